//! Numbers that are not finite: where they came up first.

use std::collections::BTreeSet;

use l2l_actors::schedule::{BlockId, Encoding, LayerId, MicroBatch, Role, Visit};
use l2l_actors::{BoxedError, Step};

use super::Worker;
use super::boundaries::Filled;
use super::device_side::DeviceSide;
use super::host_side::Squares;
use super::memory::HostLease;
use crate::config::NonFinite;
use crate::error::NotFinite;
use crate::models::VisitArgs;
use crate::tensor::is_finite;

/// A loss or a norm that is no number, as an operation's error.
pub(super) fn not_finite(what: String) -> BoxedError {
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

    /// The error of a loss that is not finite: with the devices that computed it and, where hidden
    /// states are in the host's stash, the first layer behind which they are not finite.
    pub(super) fn loss_not_finite(
        &self,
        step: &Step,
        host: &HostLease<'_>,
        at: usize,
        m: MicroBatch,
        loss: f64,
    ) -> BoxedError {
        let visits = &step.plan.schedule.visits;
        let on = self.computed_on(step, |visit| {
            visit.micro_batches.contains(&m)
                && visit.writes.iter().any(|id| visits[at].reads.contains(id))
        });
        let first = match self.first_not_finite(step, host, at, m) {
            Some(layer) => {
                format!("; {layer} is the first whose hidden states behind it are not finite")
            }
            None => String::new(),
        };
        not_finite(format!("the loss is {loss}{on}{first}"))
    }

    /// The first layer behind which the stash has hidden states of a micro-batch that are not
    /// finite. A loss, which is visit number `at`, was computed from them. Those that no later
    /// visit reads, as in a validation, may have been overwritten: they are left out.
    fn first_not_finite(
        &self,
        step: &Step,
        host: &HostLease<'_>,
        at: usize,
        m: MicroBatch,
    ) -> Option<LayerId> {
        if self.plan.stash_on_device {
            return None;
        }
        let (state, schedule) = (&*self.steps.of(step.number), &step.plan.schedule);
        let (before, behind) = schedule.visits.split_at(at);
        let before = before.iter().filter(|visit| visit.micro_batches.contains(&m));
        let rows = state.range(m, schedule).rows.len();
        let wrote = before.filter_map(|visit| {
            let boundary = schedule.with_role(&visit.writes, Role::Hidden)?;
            let is_there = behind.iter().any(|visit| visit.reads.contains(&boundary));
            is_there.then_some((visit.layer, boundary))
        });
        let mut bad = wrote.filter(|&(layer, boundary)| {
            let filled = Filled { step, state, layer, boundary, micro_batch: m };
            let packing = self.packing(filled.what());
            let stashed = host.stashed(self.in_stash(filled));
            if packing.encoding == Encoding::Plain {
                return !is_finite(packing.dtype, stashed);
            }
            let mut unpacked = vec![0.0; packing.dtype.floats(rows * packing.columns)];
            packing.unpack(&mut unpacked, stashed);
            !is_finite(packing.dtype, &unpacked)
        });
        bad.next().map(|(layer, _)| layer)
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
