//! NaN and infinity in hidden states and their gradients, and the layer that wrote them first.

use std::sync::OnceLock;

use l2l_actors::schedule::{Role, Version, Visit};
use l2l_actors::{BoxedError, Operation, Step};

use super::DeviceLanes;
use crate::error::NotFinite;
use crate::kernels::{BatchMetadata, Inspected};
use crate::models::{self, Model, PASSED_ON, VisitArgs};
use crate::tensor::View;

/// The boundaries that are checked when a visit has written them.
const CHECKED: [(Role, &str); 5] = [
    (Role::Hidden, "hidden states behind it"),
    (Role::HiddenGradient, "gradients of the hidden states before it"),
    PASSED_ON[0],
    PASSED_ON[1],
    PASSED_ON[2],
];

/// A visit of a step, and one of the boundaries that it writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Written {
    step: Version,
    device_visit: usize,
    /// The boundary's place in [`CHECKED`].
    what: usize,
}

impl Written {
    /// The mark that a device keeps. The step is the upper half, plus 1: 0 marks nothing.
    fn mark(self) -> i64 {
        let visit = (self.device_visit * CHECKED.len() + self.what) as i64;
        ((self.step as i64 + 1) << 32) | visit
    }

    /// The visit and the boundary of a mark; none if the mark is of another step.
    fn of_step(step: Version, mark: i64) -> Option<Written> {
        let visit = (mark & i64::from(u32::MAX)) as usize;
        let device_visit = visit / CHECKED.len();
        let what = visit % CHECKED.len();
        let written = Written { step, device_visit, what };
        (written.mark() == mark).then_some(written)
    }

    fn words(self, step: &Step, model: &Model) -> String {
        let Visit { layer, ref blocks, .. } = *step.plan.visit(self.device_visit);
        let (_, what) = CHECKED[self.what];
        let mut tensors = blocks.iter().flat_map(|id| &model.blocks[id.0 as usize]);
        let all = &model.layer_blocks[layer.0 as usize];
        let part = tensors.next().filter(|_| blocks.len() < all.len()).map(|first| {
            let last = tensors.last().unwrap_or(first);
            format!(", in its visit with {} to {}", first.name, last.name)
        });
        let part = part.unwrap_or_default();
        format!("{layer} is the first whose {what} are not finite{part}")
    }
}

impl DeviceLanes {
    /// Refuses hidden states and gradients that are not finite as soon as a layer has written
    /// them: the error names the layer and the first kernel. A device that issues its work keeps a
    /// mark of the layer instead, which the error of the loss or of a gradient names.
    pub(super) fn check_finite(
        &self,
        operation: &Operation,
        device_visit: usize,
        batch: &BatchMetadata<'_>,
        args: &VisitArgs<'_>,
    ) -> Result<(), BoxedError> {
        let step = operation.step();
        for (what, (role, _)) in CHECKED.into_iter().enumerate() {
            // A GPU's kernel reads elements of its dtype. A sum in floats ends in such elements.
            let is_read = |view: &View| view.dtype == args.dtype;
            let Some(view) = args.written(role).filter(is_read) else { continue };
            let written = Written { step: step.number, device_visit, what };
            if !self.device_of(operation).is_finite(view, written.mark())? {
                let kernel = self.first_kernel(operation, device_visit, batch, args)?;
                return Err(NotFinite(format!(
                    "{}{kernel}",
                    written.words(step, &self.shared.model)
                ))
                .into());
            }
        }
        Ok(())
    }

    /// Words for an error message: the first kernel of a visit whose results are not finite. The
    /// visit runs again to find it. The step has failed, so the results are read nowhere else.
    fn first_kernel(
        &self,
        operation: &Operation,
        device_visit: usize,
        batch: &BatchMetadata<'_>,
        args: &VisitArgs<'_>,
    ) -> Result<String, BoxedError> {
        let side = self.side(operation);
        let visit = operation.step().plan.visit(device_visit);
        let found = OnceLock::new();
        let on_write = |kernel: &'static str, view: View| {
            if found.get().is_none() && matches!(side.device.is_finite(view, 0), Ok(false)) {
                let View { rows, columns, .. } = view;
                let of = format!("{kernel}, of ({rows}, {columns})");
                _ = found.set(format!("; its first such operation is {of}"));
            }
        };
        side.compute(batch, &|kernels| {
            let inspected = Inspected { kernels, on_write: &on_write };
            models::run(&self.shared.model, visit, &inspected, args)
        })?;
        Ok(found.into_inner().unwrap_or_default())
    }

    /// Words for an error message: the first layer of a step that a device has marked.
    pub(in crate::worker) fn first_marked(&self, step: &Step) -> String {
        let marks = self.devices().filter_map(|device| device.first_non_finite().ok()?);
        let of_step = marks.filter_map(|mark| Written::of_step(step.number, mark));
        let first = of_step.min_by_key(|written| (written.device_visit, written.what));
        first
            .map(|written| format!("; {}", written.words(step, &self.shared.model)))
            .unwrap_or_default()
    }
}
