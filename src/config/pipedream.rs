//! Windows of batches, as PipeDream has them: what a config may have beside them.

use super::check::{must, refuse};
use super::{
    Config, DepthConfig, Dtype, EpsTier, GradientDtype, LossScaleKind, NonFinite, ObjectiveConfig,
    ScheduleConfig, ScheduleKind,
};
use crate::error::Error;

impl Config {
    /// The batches of a step of the ring: with PipeDream those of a window, which have an update
    /// each. Else 1.
    pub fn window(&self) -> u32 {
        let is_pipedream = self.schedule.kind == ScheduleKind::Pipedream;
        self.schedule.window.filter(|_| is_pipedream).unwrap_or(1).max(1)
    }

    /// The records of a step of the ring.
    pub(crate) fn records_of_window(&self) -> usize {
        self.step.batch.saturating_mul(self.window() as usize)
    }

    pub(super) fn check_pipedream(&self) -> Result<(), Error> {
        let ScheduleConfig { kind, stages, window, .. } = self.schedule;
        let keys = [("schedule.stages", stages), ("schedule.window", window)];
        if kind != ScheduleKind::Pipedream {
            let problem = "is for schedule.kind = \"pipedream\": leave it out";
            return keys.into_iter().try_for_each(|(key, set)| refuse(set.is_some(), key, problem));
        }
        let problem = "is missing: schedule.kind = \"pipedream\" needs it";
        keys.into_iter().try_for_each(|(key, set)| refuse(set.is_none(), key, problem))?;
        let is = |range: std::ops::RangeInclusive<u32>, set: Option<u32>| {
            set.is_some_and(|set| range.contains(&set))
        };
        must(is(1..=255, stages), "schedule.stages", "from 1 to 255")?;
        must(is(1..=1 << 16, window), "schedule.window", "from 1 to 65536")?;
        self.check_beside_pipedream()?;
        let every = [
            ("step.steps", self.step.steps),
            ("checkpoint.every_steps", self.checkpoint.every_steps),
            ("validation.every_steps", self.validation.every_steps),
        ];
        every.into_iter().try_for_each(|(key, steps)| self.check_whole_windows(key, steps))
    }

    /// Refuses a run of so many steps if its windows are not whole.
    pub(crate) fn check_steps_of_run(&self, steps: u64) -> Result<(), Error> {
        let window = u64::from(self.window());
        if self.step.epochs.is_none() || steps.is_multiple_of(window) {
            return self.check_whole_windows("step.steps", Some(steps));
        }
        let next = steps.next_multiple_of(window);
        let fewer = match next - window {
            0 => String::new(),
            fewer => format!("{fewer} or "),
        };
        let problem = format_args!(
            "makes {steps} steps, and a window has {window} batches: set step.steps = {fewer}\
             {next} in its place, as nothing stops inside a window"
        );
        Err(Error::config("step.epochs", problem))
    }

    /// Refuses a number of steps that is not one of whole windows.
    fn check_whole_windows(&self, key: &str, steps: Option<u64>) -> Result<(), Error> {
        let window = u64::from(self.window());
        match steps.filter(|steps| !steps.is_multiple_of(window)) {
            None => Ok(()),
            Some(steps) => Err(Error::config(
                key,
                format_args!(
                    "is {steps}, and a window has {window} batches: set a multiple of \
                     schedule.window, as nothing stops inside a window"
                ),
            )),
        }
    }

    fn check_beside_pipedream(&self) -> Result<(), Error> {
        let (key, set) = match (self.device.dtype, self.loss_scale.kind) {
            (Dtype::F16, _) => ("device.dtype", "\"bf16\" or \"f32\""),
            (_, LossScaleKind::Dynamic | LossScaleKind::Fixed) => ("loss_scale.kind", "\"none\""),
            _ => ("step.non_finite", "\"stop\" or \"continue\""),
        };
        let skips = format!(
            "skips steps whose gradient is not finite, which is known when the batch has gone \
             backward, and with schedule.kind = \"pipedream\" updates come before: set {set}"
        );
        refuse(self.non_finite() == NonFinite::Skip, key, &skips)?;
        let clips = "needs the norm of all gradients, which is known when the batch has gone \
                     backward, and with schedule.kind = \"pipedream\" updates come before: leave \
                     it out";
        refuse(self.optimizer.clips(), "optimizer.clip_norm", clips)?;
        let delays = "is 1, and schedule.kind = \"pipedream\" has delays of its own: leave it out";
        refuse(self.schedule.delay > 0, "schedule.delay", delays)?;
        let refused = [
            (
                self.step.micro_batch != self.step.batch,
                "step.micro_batch",
                "step.batch: a batch goes through the stages as one micro-batch",
            ),
            (self.parallel.groups != 1, "parallel.groups", "1: each batch is a group"),
            (self.parallel.slices != 1, "parallel.slices", "1"),
            (self.eps.tier == EpsTier::File, "eps.tier", "\"memory\""),
            (self.compression().is_some(), "compression.kind", "\"none\""),
            (self.device.gradient_dtype != GradientDtype::F32, "device.gradient_dtype", "\"f32\""),
            (
                self.objective.kind != ObjectiveConfig::default().kind,
                "objective.kind",
                "\"cross-entropy\"",
            ),
            (self.depth != DepthConfig::default(), "depth", "left out"),
        ];
        refused.into_iter().try_for_each(|(is, key, what)| {
            refuse(is, key, &format!("must be {what}, with schedule.kind = \"pipedream\""))
        })
    }
}
