//! NaN and infinity in losses, hidden states and gradients, and the layer or block they are in.

use std::collections::BTreeSet;
use std::sync::OnceLock;

use l2l_actors::schedule::{BlockId, MicroBatch, Phase, Role, Version, Visit};
use l2l_actors::{BoxedError, Step};

use super::Worker;
use super::device_side::DeviceSide;
use super::host_side::Squares;
use crate::config::NonFinite;
use crate::error::NotFinite;
use crate::kernels::{BatchMetadata, Inspected};
use crate::models::{self, VisitArgs};
use crate::tensor::View;

/// An operation's error: a number is NaN or infinite.
fn not_finite(what: String) -> BoxedError {
    NotFinite(what).into()
}

/// What a visit writes that is looked at.
const LOOKED_AT: [&str; 2] =
    ["hidden states behind it", "gradients of the hidden states before it"];

/// A visit of a step, and which of the views that it writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Written {
    step: Version,
    device_visit: usize,
    /// Of [`LOOKED_AT`].
    what: usize,
}

impl Written {
    /// As a mark that a device keeps: the step is the upper half, never 0.
    fn mark(self) -> i64 {
        let visit = (self.device_visit * LOOKED_AT.len() + self.what) as i64;
        ((self.step as i64 + 1) << 32) | visit
    }

    /// What a mark of a step says; none if it is of another step.
    fn of_step(step: Version, mark: i64) -> Option<Written> {
        let visit = (mark & i64::from(u32::MAX)) as usize;
        let device_visit = visit / LOOKED_AT.len();
        let what = visit % LOOKED_AT.len();
        let written = Written { step, device_visit, what };
        (written.mark() == mark).then_some(written)
    }

    fn words(self, step: &Step) -> String {
        let layer = step.plan.visit(self.device_visit).layer;
        let what = LOOKED_AT[self.what];
        format!("{layer} is the first whose {what} are not finite")
    }
}

impl Worker {
    /// Refuses hidden states and their gradients that are not finite, as soon as a layer has
    /// written them: the error names the first layer of which that is so, and its first
    /// operation. A device that issues its work keeps a mark of the layer, which the error of the
    /// loss or of a gradient names.
    pub(super) fn check_finite(
        &self,
        (step, device, device_visit): (&Step, &DeviceSide, usize),
        batch: &BatchMetadata<'_>,
        args: &VisitArgs<'_>,
    ) -> Result<(), BoxedError> {
        let all = [args.written(Role::Hidden), args.written(Role::HiddenGradient)];
        for (what, view) in all.into_iter().enumerate() {
            let Some(view) = view else { continue };
            let written = Written { step: step.number, device_visit, what };
            if !device.is_finite(view, written.mark())? {
                let operation =
                    self.first_operation(device, step.plan.visit(device_visit), batch, args)?;
                return Err(not_finite(format!("{}{operation}", written.words(step))));
            }
        }
        Ok(())
    }

    /// Words for an error message: the first operation of a visit whose results are not finite,
    /// found by running the visit again. The step has failed, so nobody reads what that writes.
    fn first_operation(
        &self,
        device: &DeviceSide,
        visit: &Visit,
        batch: &BatchMetadata<'_>,
        args: &VisitArgs<'_>,
    ) -> Result<String, BoxedError> {
        let found = OnceLock::new();
        let on_write = |operation: &'static str, view: View| {
            if found.get().is_none() && matches!(device.is_finite(view, 0), Ok(false)) {
                let View { rows, columns, .. } = view;
                let of = format!("{operation}, of ({rows}, {columns})");
                _ = found.set(format!("; its first such operation is {of}"));
            }
        };
        device.compute(batch, &|kernels| {
            let inspected = Inspected { kernels, on_write: &on_write };
            models::run(&self.model, visit, &inspected, args)
        })?;
        Ok(found.into_inner().unwrap_or_default())
    }

    /// Words for an error message: the first layer of a step that a device has marked.
    fn first_marked(&self, step: &Step) -> String {
        let marks = self.devices.iter().filter_map(|device| device.first_non_finite().ok()?);
        let of_step = marks.filter_map(|mark| Written::of_step(step.number, mark));
        let first = of_step.min_by_key(|written| (written.device_visit, written.what));
        first.map(|written| format!("; {}", written.words(step))).unwrap_or_default()
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
            visit.phase == Phase::Backward && visit.blocks.contains(&block)
        });
        let first = self.first_marked(step);
        Err(not_finite(format!("the gradient of {block} is not finite{on}{first}")))
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
        not_finite(format!("the loss is {loss}{on}{}", self.first_marked(step)))
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
