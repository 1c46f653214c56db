//! Losses and gradients that are NaN or infinite: the error, and the devices that computed them.

use std::collections::BTreeSet;

use l2l_actors::schedule::{Phase, Visit};
use l2l_actors::work::Work;
use l2l_actors::{BoxedError, Operation, Step};

use super::Worker;
use crate::config::NonFinite;
use crate::error::NotFinite;

impl Worker {
    /// Returns an operation's value: of a loss, or a gradient's sum of squares.
    ///
    /// # Errors
    /// The value is not finite, and the run is to stop at that.
    pub(super) fn finite(&self, operation: &Operation, value: f64) -> Result<f64, BoxedError> {
        if value.is_finite() || self.shared.non_finite != NonFinite::Stop {
            return Ok(value);
        }
        let step = operation.step();
        let what = match *operation.work() {
            Work::Loss { visit, micro_batch } => {
                let reads = &step.plan.schedule.visits[visit].reads;
                let on = self.computed_on(step, |visit| {
                    visit.micro_batches.contains(&micro_batch)
                        && visit.writes.iter().any(|id| reads.contains(id))
                });
                format!("the loss is {value}{on}")
            }
            Work::Reduce { block, .. }
            | Work::Scatter { block, .. }
            | Work::Update { block, .. } => {
                let on = self.computed_on(step, |visit| {
                    visit.phase == Phase::Backward && visit.blocks.contains(&block)
                });
                format!("the gradient of {block} is not finite{on}")
            }
            _ => return Ok(value), // each rank has checked its part of a sum of ranks
        };
        Err(NotFinite(what + &self.devices.first_marked(step)).into())
    }

    /// Words for an error message: the devices that ran some visits. Empty if there is one device.
    fn computed_on(&self, step: &Step, is_one: impl Fn(&&Visit) -> bool) -> String {
        let devices: BTreeSet<_> =
            step.plan.schedule.device_visits().filter(is_one).filter_map(Visit::device).collect();
        let names: Vec<String> = devices.iter().map(|device| device.to_string()).collect();
        match &names[..] {
            names if names.is_empty() || self.shared.plan.devices() == 1 => String::new(),
            [one] => format!("; device {one} computed it"),
            several => format!("; devices {} computed it", several.join(", ")),
        }
    }
}
