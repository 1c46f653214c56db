//! Visits: one stay of a device, or of the host lane, at one layer.

use std::fmt;
use std::ops::Range;

use super::ids::{BlockId, BoundaryId, LayerId, MicroBatch};

/// Index of a device among those of a ring.
pub type DeviceId = u8;

/// Where a visit runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Place {
    /// The host lane.
    Host,
    /// This device.
    Device(DeviceId),
}

/// What a visit does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum VisitKind {
    /// Host, forward: writes the first boundaries from the batch and the embedding's blocks.
    Gather,
    /// Device: a layer of the stack, from hidden state to hidden state.
    Layer,
    /// Device: a tile of the head, which passes statistics on.
    Tile,
    /// Host, forward: computes the loss from the last statistics. Of no block, and writes nothing.
    Loss,
    /// Host, backward: adds the last gradient to the embedding's blocks. Their gradients end here.
    Scatter,
}

impl VisitKind {
    /// True for what a device does, false for what the host lane does.
    pub fn on_device(self) -> bool {
        matches!(self, VisitKind::Layer | VisitKind::Tile)
    }
}

/// Direction of a visit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// Activations.
    Forward,
    /// Gradients.
    Backward,
    /// The part of a backward pass that other layers wait for: the gradient of the input.
    Inputs,
    /// The rest of it: gradients of the blocks.
    Weights,
}

impl Phase {
    /// True for a backward pass and each of its parts.
    pub fn is_backward(self) -> bool {
        self != Phase::Forward
    }

    /// True for a visit that adds to the gradients of its blocks.
    pub fn adds_gradients(self) -> bool {
        matches!(self, Phase::Backward | Phase::Weights)
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Phase::Forward => "forward",
            Phase::Backward => "backward",
            Phase::Inputs => "backward of inputs",
            Phase::Weights => "backward of weights",
        })
    }
}

/// The blocks of a visit.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Needs {
    /// Known when the schedule is made.
    Known(Vec<BlockId>),
}

/// One stay of a device, or of the host lane, at one layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Visit {
    /// What it does.
    pub kind: VisitKind,
    /// The layer visited.
    pub layer: LayerId,
    /// Forward or backward.
    pub phase: Phase,
    /// Where.
    pub place: Place,
    /// Which micro-batches, in this order.
    pub micro_batches: Range<MicroBatch>,
    /// Which blocks.
    pub needs: Needs,
    /// Boundaries that each micro-batch brings.
    pub reads: Vec<BoundaryId>,
    /// Boundaries that each micro-batch leaves behind.
    pub writes: Vec<BoundaryId>,
}

impl Visit {
    /// The blocks that this visit is known to need.
    pub fn blocks(&self) -> &[BlockId] {
        let Needs::Known(blocks) = &self.needs;
        blocks
    }

    /// The same visit, of other micro-batches.
    pub fn of_micro_batches(&self, micro_batches: Range<MicroBatch>) -> Visit {
        Visit { micro_batches, ..self.clone() }
    }

    /// True for a visit of a device, false for one of the host lane.
    pub fn on_device(&self) -> bool {
        self.device().is_some()
    }

    /// The device that is visited; `None`: the host.
    pub fn device(&self) -> Option<DeviceId> {
        match self.place {
            Place::Device(device) => Some(device),
            Place::Host => None,
        }
    }
}
