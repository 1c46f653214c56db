//! How much of a boundary a micro-batch fills, and where kernels find it. Slots and places in the
//! stash have room for the longest sequences. Only the rows of the micro-batch's tokens move.

use l2l_actors::Step;
use l2l_actors::schedule::{Boundary, BoundaryId, Encoding, LayerId, MicroBatch, Role};
use l2l_actors::work::Placed;

use super::Worker;
use super::device_side::DeviceSide;
use super::step::StepState;
use crate::kernels::STATISTICS;
use crate::models::{Head, Part};
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
}

impl Worker {
    /// Floats that a micro-batch fills in a slot.
    pub(super) fn in_slot(&self, filled: Filled<'_>) -> usize {
        let Filled { step, state, layer, boundary, micro_batch: m } = filled;
        let (schedule, dtype) = (&step.plan.schedule, self.plan.dtype);
        let rows = state.range(m, schedule).rows.len();
        let hidden = rows * self.model.shape.hidden;
        match filled.what().role {
            Role::Hidden | Role::HiddenGradient => dtype.floats(hidden),
            Role::HeadGradient => self.model.head_gradient(dtype).floats(hidden),
            Role::Statistics => rows * STATISTICS,
            Role::SavedActivations => {
                let Part::Stack(layer) = &self.model.parts[layer.0 as usize] else {
                    unreachable!("only layers of the stack save activations")
                };
                let of_each = state.lengths(m, schedule);
                of_each.map(|length| layer.saved_len(length, self.save, dtype)).sum()
            }
            Role::NewKv => dtype.floats(rows * self.kv_width(layer)),
            Role::Logits if let Head::TokenClasses { labels } = self.model.shape.head => {
                rows * labels
            }
            // Logits of one position a sequence, or as many cached positions for each sequence.
            Role::Logits | Role::CachedKv => {
                schedule.boundary_bytes(boundary, m) as usize / Dtype::F32.size()
            }
        }
    }

    /// The first float and the number of floats that a micro-batch fills in the stash.
    pub(super) fn in_stash(&self, filled: Filled<'_>) -> (usize, usize) {
        let Filled { step, state, micro_batch, .. } = filled;
        let rows = || state.range(micro_batch, &step.plan.schedule).rows.len();
        let floats = match filled.what().encoding {
            Encoding::Plain => self.in_slot(filled),
            Encoding::Bf16 | Encoding::Int8 { .. } => self.packing(filled.what()).floats(rows()),
        };
        let (at, room) = filled.state.stash.place(filled.boundary, filled.micro_batch);
        assert!(floats <= room, "{floats} floats in a place of {room}");
        (at, floats)
    }

    /// How the stash packs a boundary of hidden states or their gradients. Others are plain.
    pub(super) fn packing(&self, boundary: &Boundary) -> Packing {
        let (dtype, columns) = (self.plan.dtype, self.model.shape.hidden);
        Packing { dtype, encoding: boundary.encoding, columns }
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

    /// Numbers that the KV cache of a layer holds for each position.
    pub(super) fn kv_width(&self, layer: LayerId) -> usize {
        match &self.model.parts[layer.0 as usize] {
            Part::Stack(layer) => layer.kv_width(),
            Part::Embedding | Part::Head(_) | Part::Classes(_) => 0,
        }
    }
}
