//! `l2l bench`: a few steps of a config, and how fast they were beside what the machine can do.

use l2l::{Error, StepReport, devices};

use super::journal::Journal;
use super::progress::Screen;
use super::train::{Prepared, only_steps, runtime};
use super::{Common, Ended};

/// Steps when the config names none; the first is not counted.
const STEPS: u64 = 6;

pub(super) fn bench(common: &Common, copies: bool) -> Result<Ended, Error> {
    let (mut config, layers) = common.read(None, None)?;
    if config.step.steps.is_none() && config.step.epochs.is_none() {
        config.step.steps = Some(STEPS);
    }
    (config.checkpoint, config.validation) = Default::default();
    let run = || {
        let product = devices::device_flops_per_second(&config)?;
        let prepared = Prepared::new(config.clone())?;
        let mut screen =
            Screen::new(Journal::open(&config.log)?, config.log.format, 0, prepared.steps, 0);
        let (mut first, mut rest) = (None, Vec::new());
        let summary = runtime()?.block_on(only_steps(&config, prepared, copies, |report| {
            screen.step(report);
            if first.is_none() {
                first = Some(*report);
            } else {
                rest.push(*report);
            }
        }))?;
        // A first step makes schedules and touches memory for the first time.
        let counted = if rest.is_empty() { first.into_iter().collect() } else { rest };
        let sum = |of: fn(&StepReport) -> f64| counted.iter().map(of).sum::<f64>();
        let seconds = sum(|report| report.seconds);
        let more = [
            ("tokens_per_second", sum(|report| report.tokens as f64) / seconds),
            ("model_flops_per_second", sum(|report| report.model_flops) / seconds),
            ("matmul_flops_per_second", product),
            ("exposed_wait_fraction", sum(|report| report.exposed_wait_seconds) / seconds),
        ];
        screen.summary(&summary, config.device.link.as_deref(), &more);
        Ok(Ended::Well)
    };
    run().map_err(|error| layers.locate(error))
}
