//! NaN and infinity in losses, hidden states and gradients, and the layer or block they are in.

use std::collections::BTreeSet;

use l2l_actors::schedule::{BlockId, MicroBatch, Visit};
use l2l_actors::{BoxedError, Step};

use super::Worker;
use super::device_side::DeviceSide;
use super::host_side::Squares;
use crate::config::NonFinite;
use crate::error::NotFinite;
use crate::models::VisitArgs;

/// An operation's error: a number is NaN or infinite.
fn not_finite(what: String) -> BoxedError {
    NotFinite(what).into()
}

impl Worker {
    /// Refuses hidden states and their gradients that are not finite, as soon as a layer has
    /// written them: the error names the first layer of which that is so. A device with memory
    /// of its own does not read them: there the loss or a gradient tells.
    pub(super) fn check_finite(
        &self,
        device: &DeviceSide,
        visit: &Visit,
        args: &VisitArgs<'_>,
    ) -> Result<(), BoxedError> {
        let writes = &args.writes;
        let all = [
            ("hidden states behind it", writes.hidden),
            ("gradients of the hidden states before it", writes.hidden_gradient),
        ];
        for (what, view) in all {
            if view.is_some_and(|view| !device.is_finite(view, self.plan.dtype)) {
                let layer = visit.layer;
                return Err(not_finite(format!(
                    "{layer} is the first whose {what} are not finite"
                )));
            }
        }
        Ok(())
    }

    /// A gradient's sum of squares.
    ///
    /// # Errors
    /// It is not finite; with the devices that computed the gradient.
    pub(super) fn finite(
        &self,
        step: &Step,
        block: BlockId,
        Squares { sum, chunks }: Squares,
    ) -> Result<f64, BoxedError> {
        if sum.is_finite() || self.host.non_finite != NonFinite::Stop {
            if step.plan.schedule.ranks.count > 1 || !chunks.is_empty() {
                let state = self.steps.of(step.number);
                state.squares.lock().expect("nothing panics inside").insert(block, chunks);
            }
            return Ok(sum);
        }
        let on = self.computed_on(step, |visit| {
            visit.phase.adds_gradients() && visit.blocks().contains(&block)
        });
        Err(not_finite(format!("the gradient of {block} is not finite{on}")))
    }

    /// The error of a loss that is not finite: with the devices that computed it.
    pub(super) fn loss_not_finite(
        &self,
        step: &Step,
        at: usize,
        m: MicroBatch,
        loss: f64,
    ) -> BoxedError {
        let reads = &step.plan.schedule.visits[at].reads;
        let on = self.computed_on(step, |visit| {
            visit.micro_batches.contains(&m) && visit.writes.iter().any(|id| reads.contains(id))
        });
        not_finite(format!("the loss is {loss}{on}"))
    }

    /// Words for an error message: which devices ran some visits. Empty if there is one device.
    fn computed_on(&self, step: &Step, is_one: impl Fn(&&Visit) -> bool) -> String {
        let devices: BTreeSet<_> =
            step.plan.schedule.device_visits().filter(is_one).filter_map(Visit::device).collect();
        let names: Vec<String> = devices.iter().map(|device| device.to_string()).collect();
        match &names[..] {
            names if names.is_empty() || self.devices.len() == 1 => String::new(),
            [one] => format!("; device {one} computed it"),
            several => format!("; devices {} computed it", several.join(", ")),
        }
    }
}
