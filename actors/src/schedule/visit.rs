//! Visits: one stay of a device, or of the host lane, at one layer.

use std::fmt;
use std::ops::Range;

use super::ids::{BlockId, BoundaryId, LayerId, MicroBatch};

/// Index of a device among those of a ring.
pub type DeviceId = u8;

/// The place where a visit runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Place {
    /// The host lane.
    Host,
    /// This device.
    Device(DeviceId),
}

/// The work of a visit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum VisitKind {
    /// Host, forward: writes the first boundaries from the batch and the embedding's blocks.
    Gather,
    /// Device: a layer of the stack, from hidden state to hidden state.
    Layer,
    /// Device: a tile of the head, which passes statistics on.
    Tile,
    /// Host, forward: takes what layers measured of their micro-batches, and writes answers that
    /// their backward visits read. Of no block.
    Balance {
        /// True if each answer needs what was measured of the whole step, on all ranks. Then the
        /// step has one such visit.
        of_step: bool,
    },
    /// Host, forward: computes the loss from the last statistics. Of no block, and writes nothing.
    Loss,
    /// Host, forward: computes the loss of whole records from complete statistics or from the last
    /// hidden states. In a step that trains it writes statistics with the weight of each row, or
    /// the gradient of these states, which the backward visits read. Of no block.
    Objective {
        /// True if each loss needs what is measured of the whole step. Then the step has one such
        /// visit.
        of_step: bool,
    },
    /// Host, backward: adds the last gradient to the embedding's blocks. Their gradients end here.
    Scatter,
}

impl VisitKind {
    /// True for a visit of a device, false for one of the host lane.
    pub fn on_device(self) -> bool {
        matches!(self, VisitKind::Layer | VisitKind::Tile)
    }

    /// True for a visit of the host that computes losses.
    pub(crate) fn takes_loss(self) -> bool {
        matches!(self, VisitKind::Loss | VisitKind::Objective { .. })
    }

    /// True for a visit of the host that computes losses of whole records.
    pub fn is_objective(self) -> bool {
        matches!(self, VisitKind::Objective { .. })
    }

    /// True for a visit of the host that needs all micro-batches of the step at once.
    pub fn is_of_step(self) -> bool {
        use VisitKind::{Balance, Objective};
        matches!(self, Balance { of_step: true } | Objective { of_step: true })
    }
}

/// The pass that a visit is a part of, and what it computes there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// Activations.
    Forward,
    /// Activations of the reference that an objective compares with, beside those of the forward
    /// pass. It adds to no gradient. See [`RingObjective`](super::RingObjective).
    Reference,
    /// In the backward pass: what the later chunks of a run attend to, computed again. It adds to
    /// no gradient. See [`Schedule::runs`](super::Schedule).
    Keys,
    /// Gradients.
    Backward,
}

impl Phase {
    /// True for a visit of the backward pass.
    pub fn is_backward(self) -> bool {
        matches!(self, Phase::Keys | Phase::Backward)
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Phase::Forward => "forward",
            Phase::Reference => "reference",
            Phase::Keys => "keys",
            Phase::Backward => "backward",
        })
    }
}

/// The reach of a layer without a window: a chunk attends to all chunks before it.
pub const ALL_CHUNKS: u32 = u32::MAX;

/// One stay of a device, or of the host lane, at one layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Visit {
    /// The kind of the visit.
    pub kind: VisitKind,
    /// The layer visited.
    pub layer: LayerId,
    /// The index of its step among those that the layer declares.
    pub step: u16,
    /// Forward or backward.
    pub phase: Phase,
    /// The place where it runs.
    pub place: Place,
    /// The micro-batches. [`Schedule::units`](super::Schedule::units) gives their order.
    pub micro_batches: Range<MicroBatch>,
    /// How many chunks of its run before its own a micro-batch attends to, by the keys and values
    /// that these left on the device. 0: none; [`ALL_CHUNKS`]: all.
    pub reach: u32,
    /// The blocks that the layer declares for this step.
    pub blocks: Vec<BlockId>,
    /// The portion of each that a device needs, by its index; `None`: the blocks are not cut.
    pub cut: Option<u16>,
    /// The updates of this step that its trained blocks have had, and the [lag](super::Schedule) of
    /// the step: it reads the version behind them, whichever is the newest by then. 0 unless the
    /// step is [in batches](super::Schedule).
    pub ahead: u32,
    /// The boundary by which rows choose parts of the blocks, where the stash has it in time.
    /// `None`: the visit needs all of them.
    pub chosen_by: Option<BoundaryId>,
    /// Boundaries that each micro-batch brings.
    pub reads: Vec<BoundaryId>,
    /// Boundaries that each micro-batch leaves behind.
    pub writes: Vec<BoundaryId>,
    /// Boundaries that each micro-batch leaves on the device, for a later visit of the same device.
    /// They take no slots, and no lane copies them.
    pub keeps: Vec<BoundaryId>,
    /// Boundaries that an earlier visit of the device keeps for this one.
    pub kept: Vec<BoundaryId>,
    /// Boundaries that it reads or writes, and that stay on the device as copies, too.
    pub copies: Vec<Copied>,
}

/// A boundary that a visit copies on its device, for later visits of the same device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copied {
    /// What the visit reads or writes.
    pub from: BoundaryId,
    /// The copy, which the device keeps: it takes no slot.
    pub to: BoundaryId,
}

impl Visit {
    /// The same visit, of other micro-batches.
    pub fn of_micro_batches(&self, micro_batches: Range<MicroBatch>) -> Visit {
        Visit { micro_batches, ..self.clone() }
    }

    /// All boundaries that the visit reads, wherever they wait.
    pub fn all_reads(&self) -> impl Iterator<Item = BoundaryId> {
        self.reads.iter().chain(&self.kept).copied()
    }

    /// All boundaries that the visit writes, wherever they go.
    pub fn all_writes(&self) -> impl Iterator<Item = BoundaryId> {
        self.writes.iter().copied().chain(self.stays())
    }

    /// All boundaries that the visit leaves on the device.
    pub fn stays(&self) -> impl Iterator<Item = BoundaryId> {
        self.keeps.iter().copied().chain(self.copies.iter().map(|copied| copied.to))
    }

    /// The least that has a device of its own: the layer, or one piece of it.
    pub(super) fn stop(&self) -> (LayerId, Option<u16>) {
        (self.layer, self.cut.map(|_| self.step))
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
