//! Which floats of a slot or of the stash a micro-batch fills. Slots and places in the stash have
//! room for the longest sequences, and only the rows of the micro-batch's tokens move.

use std::ops::Range;

use l2l_actors::Operation;
use l2l_actors::schedule::{Boundary, BoundaryId, LayerId, MicroBatch, Visit};
use l2l_actors::work::Placed;

use super::step::{MicroBatchRange, StepState};
use crate::plan::StepOfLayer;
use crate::tensor::Dtype;

/// A micro-batch of a boundary at a visit.
#[derive(Clone, Copy)]
pub(super) struct Filled<'a> {
    pub(super) state: &'a StepState,
    /// The visited layer.
    pub(super) layer: LayerId,
    pub(super) boundary: BoundaryId,
    pub(super) micro_batch: MicroBatch,
}

impl<'a> Filled<'a> {
    /// A boundary of a device's operation.
    pub(super) fn of(
        operation: &'a Operation,
        state: &'a StepState,
        placed: &Placed,
        micro_batch: MicroBatch,
    ) -> Filled<'a> {
        let layer = operation.layer().expect("boundaries are read and written at visits");
        Filled { state, layer, boundary: placed.boundary, micro_batch }
    }

    /// The boundary as the schedule declares it.
    pub(super) fn declared(self) -> &'a Boundary {
        self.state.schedule().boundary(self.boundary)
    }

    /// The layer and the step of the visits that read or write the boundary: only those of one step
    /// do.
    pub(super) fn step(self) -> StepOfLayer {
        let visits = &self.state.schedule().visits;
        let is_met = |visit: &&Visit| {
            visit.layer == self.layer
                && visit.all_reads().chain(visit.all_writes()).any(|id| id == self.boundary)
        };
        let visit = visits.iter().find(is_met).expect("a boundary is met at a visit");
        StepOfLayer { layer: visit.layer, step: visit.step }
    }

    /// Floats in a slot.
    pub(super) fn slot_floats(self) -> usize {
        let MicroBatchRange { sequences, rows } = self.range();
        let bytes = self.declared().bytes(sequences.len() as u64, rows.len() as u64);
        bytes as usize / Dtype::F32.size()
    }

    /// The floats of what its device keeps.
    pub(super) fn kept_range(self) -> Range<usize> {
        let floats = self.slot_floats();
        let (at, room) = self.state.input.stash.kept_place(self.boundary, self.micro_batch);
        assert!(floats <= room, "{floats} floats in a place of {room}");
        at..at + floats
    }

    /// The floats of the stash.
    pub(super) fn stash_range(self) -> Range<usize> {
        let MicroBatchRange { sequences, rows } = self.range();
        let bytes = self.declared().stashed_bytes(sequences.len() as u64, rows.len() as u64);
        let floats = bytes as usize / Dtype::F32.size();
        let (at, room) = self.state.input.stash.place(self.boundary, self.micro_batch);
        assert!(floats <= room, "{floats} floats in a place of {room}");
        at..at + floats
    }

    fn range(self) -> MicroBatchRange {
        self.state.range(self.micro_batch)
    }
}
