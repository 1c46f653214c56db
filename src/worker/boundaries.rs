//! How much of a boundary a micro-batch fills, and where kernels find it. Slots and places in the
//! stash have room for the longest sequences. Only the rows of the micro-batch's tokens move.

use l2l_actors::Step;
use l2l_actors::schedule::{Boundary, BoundaryId, LayerId, MicroBatch};
use l2l_actors::work::Placed;

use super::Worker;
use super::device_side::DeviceSide;
use super::step::{MicroBatchRange, StepState};
use crate::tensor::{Dtype, Packing, View};

/// A micro-batch of a boundary at a visit.
#[derive(Clone, Copy)]
pub(super) struct Filled<'a> {
    pub(super) step: &'a Step,
    pub(super) state: &'a StepState,
    /// The visited layer.
    pub(super) layer: LayerId,
    pub(super) boundary: BoundaryId,
    pub(super) micro_batch: MicroBatch,
}

impl<'a> Filled<'a> {
    /// What the boundary is.
    pub(super) fn what(self) -> &'a Boundary {
        self.step.plan.schedule.boundary(self.boundary)
    }

    /// The sequences and the tokens of the micro-batch.
    fn counts(self) -> [u64; 2] {
        let MicroBatchRange { sequences, rows } =
            self.state.range(self.micro_batch, &self.step.plan.schedule);
        [sequences.len() as u64, rows.len() as u64]
    }
}

impl Worker {
    /// Floats that a micro-batch fills in a slot.
    pub(super) fn in_slot(&self, filled: Filled<'_>) -> usize {
        let [sequences, tokens] = filled.counts();
        filled.what().bytes(sequences, tokens) as usize / Dtype::F32.size()
    }

    /// The first float and the number of floats that a micro-batch fills in the stash.
    pub(super) fn in_stash(&self, filled: Filled<'_>) -> (usize, usize) {
        let [sequences, tokens] = filled.counts();
        let bytes = filled.what().stashed_bytes(sequences, tokens) as usize;
        let floats = bytes / Dtype::F32.size();
        let (at, room) = filled.state.stash.place(filled.boundary, filled.micro_batch);
        assert!(floats <= room, "{floats} floats in a place of {room}");
        (at, floats)
    }

    /// How the stash packs a boundary of hidden states or their gradients. Others are plain.
    pub(super) fn packing(&self, boundary: &Boundary) -> Packing {
        let Boundary { encoding, .. } = *boundary;
        Packing { dtype: self.plan.dtype(), encoding, columns: boundary.width() }
    }

    /// Where kernels find what the visit reads: in an input slot, or in the stash.
    pub(super) fn input(&self, on: &DeviceSide, filled: Filled<'_>, placed: &Placed) -> View {
        if on.stays_in_stash(filled.what()) {
            return self.memory.in_stash(self.in_stash(filled));
        }
        on.input(placed, self.in_slot(filled))
    }

    /// Where kernels write what the visit writes: to an output slot, or to the stash.
    pub(super) fn output(&self, on: &DeviceSide, filled: Filled<'_>, placed: &Placed) -> View {
        if on.stays_in_stash(filled.what()) {
            return self.memory.in_stash(self.in_stash(filled));
        }
        on.output(placed, self.in_slot(filled))
    }
}
