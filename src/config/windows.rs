//! Windows of batches, those of PipeDream and PipeDream-2BW: what a config may have beside them.

use super::check::{must, refuse};
use super::{
    Config, DepthConfig, Dtype, EpsTier, GradientDtype, LossScaleKind, NonFinite, ObjectiveConfig,
    ScheduleConfig, ScheduleKind, StepConfig,
};
use crate::error::Error;

impl Config {
    /// The batches of a step of the ring: of windows those that have an update each. Else 1.
    pub fn window(&self) -> u32 {
        let has_windows = self.schedule.kind.of_windows().is_some();
        self.schedule.window.filter(|_| has_windows).unwrap_or(1).max(1)
    }

    /// The records of a step of the ring.
    pub(crate) fn records_of_window(&self) -> usize {
        self.step.batch.saturating_mul(self.window() as usize)
    }

    /// The fewest micro-batches of a batch. With PipeDream-2BW so many follow each other through
    /// the stages before one needs their update. Else 1.
    pub fn fewest_micro_batches(&self) -> usize {
        let ScheduleConfig { kind, stages, .. } = self.schedule;
        let stages = stages.filter(|_| kind == ScheduleKind::DoubleBuffered).unwrap_or(1);
        (stages as usize).saturating_sub(1).max(1)
    }

    pub(super) fn check_windows(&self) -> Result<(), Error> {
        let ScheduleConfig { kind, stages, window, .. } = self.schedule;
        let keys = [("schedule.stages", stages), ("schedule.window", window)];
        let Some(name) = kind.of_windows() else {
            let problem = "is for schedule.kind = \"pipedream\" or \"2bw\": leave it out";
            return keys.into_iter().try_for_each(|(key, set)| refuse(set.is_some(), key, problem));
        };
        let problem = format!("is missing: schedule.kind = \"{name}\" needs it");
        keys.into_iter().try_for_each(|(key, set)| refuse(set.is_none(), key, &problem))?;
        let is = |range: std::ops::RangeInclusive<u32>, set: Option<u32>| {
            set.is_some_and(|set| range.contains(&set))
        };
        must(is(1..=255, stages), "schedule.stages", "from 1 to 255")?;
        must(is(1..=1 << 16, window), "schedule.window", "from 1 to 65536")?;
        self.check_beside_windows(name)?;
        match kind {
            ScheduleKind::DoubleBuffered => self.check_double_buffered()?,
            _ => self.check_pipedream()?,
        }
        let every = [
            ("step.steps", self.step.steps),
            ("checkpoint.every_steps", self.checkpoint.every_steps),
            ("validation.every_steps", self.validation.every_steps),
        ];
        every.into_iter().try_for_each(|(key, steps)| self.check_whole_windows(key, steps))
    }

    fn check_pipedream(&self) -> Result<(), Error> {
        let delays = "is 1, and schedule.kind = \"pipedream\" has delays of its own: leave it out";
        refuse(self.schedule.delay > 0, "schedule.delay", delays)?;
        let problem = "must be step.batch: a batch goes through the stages as one micro-batch, \
                       with schedule.kind = \"pipedream\"";
        refuse(self.step.micro_batch != self.step.batch, "step.micro_batch", problem)
    }

    fn check_double_buffered(&self) -> Result<(), Error> {
        let of_kind = "with schedule.kind = \"2bw\"";
        let delays = format!("must be 1, {of_kind}: each batch lacks one update (docs/delay.md)");
        refuse(self.schedule.delay == 0, "schedule.delay", &delays)?;
        let after = format!("must be left out, {of_kind}, in which all batches have the delay");
        refuse(self.schedule.delay_after.is_some(), "schedule.delay_after", &after)?;
        let StepConfig { batch, micro_batch, .. } = self.step;
        let whole = format!("must divide step.batch, {of_kind}: a micro-batch is of one batch");
        refuse(!batch.is_multiple_of(micro_batch), "step.micro_batch", &whole)?;
        let has = batch / micro_batch;
        let needs = self.fewest_micro_batches();
        let problem = format!(
            "is {micro_batch}, so a batch has {has} micro-batches. {needs} or more must follow \
             each other through the stages, {of_kind}, before one needs their update: make it or \
             schedule.stages smaller, or step.batch larger"
        );
        refuse(has < needs, "step.micro_batch", &problem)
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

    /// Refuses what no window can have.
    fn check_beside_windows(&self, kind: &str) -> Result<(), Error> {
        let (key, set) = match (self.device.dtype, self.loss_scale.kind) {
            (Dtype::F16, _) => ("device.dtype", "\"bf16\" or \"f32\""),
            (_, LossScaleKind::Dynamic | LossScaleKind::Fixed) => ("loss_scale.kind", "\"none\""),
            _ => ("step.non_finite", "\"stop\" or \"continue\""),
        };
        let skips = format!(
            "skips steps whose gradient is not finite, which is known when the batch has gone \
             backward, and with schedule.kind = \"{kind}\" updates come before: set {set}"
        );
        refuse(self.non_finite() == NonFinite::Skip, key, &skips)?;
        let clips = format!(
            "needs the norm of all gradients, which is known when the batch has gone backward, and \
             with schedule.kind = \"{kind}\" updates come before: leave it out"
        );
        refuse(self.optimizer.clips(), "optimizer.clip_norm", &clips)?;
        let refused = [
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
            refuse(is, key, &format!("must be {what}, with schedule.kind = \"{kind}\""))
        })
    }
}
