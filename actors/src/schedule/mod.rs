//! The schedule: the visits of one step, as plain data.
//!
//! A schedule says *what* meets *what*, in which order; nothing in it runs. The generators
//! ([`relay`], [`resident`]) are pure functions from a [`Model`] and a [`Selection`]; anyone may
//! write another, or edit what they return. A [`Plan`] is a schedule that was checked, with every
//! decision that would otherwise be taken at run time taken once: which slot a block takes, in
//! what order the upload lane moves pieces, where gradients open, close and join. All actors walk
//! the one plan, so nothing they do depends on timing.
//!
//! Room left on purpose. *Several devices*: a visit names its [`Place`]; each device walks the
//! visits of its own. *Stages*: a boundary is written by one visit and read by others, wherever
//! they are, so activations pass between devices through the stash. *Experts*: what a visit
//! [`Needs`] is an open enum; blocks that a router chooses become a second variant.

mod generate;
mod plan;
mod reads;
mod replay;
mod residency;
mod rules;

use std::fmt;
use std::ops::Range;

pub use generate::{Layer, Model, Role, Selection, relay, resident};
pub use plan::{Capacities, DeviceVisit, Piece, Plan, Pools, Reduction, Traffic};
pub use residency::Residence;

/// A step's number, counted from 0; also the version of every block that step reads.
pub type Version = u64;

/// Index of a micro-batch within its step.
pub type MicroBatch = u32;

/// Index of a block in [`Schedule::blocks`]: the same in every step of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(pub u32);

/// Index of a layer of the model: the same in every step of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LayerId(pub u32);

/// Index of a boundary in [`Schedule::boundaries`]: valid within one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BoundaryId(pub u32);

/// Parameters that move and update together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Bytes of the published copy: what one upload moves.
    pub bytes: u64,
    /// Bytes of the f32 gradient of the trainable part: what one download moves.
    pub gradient_bytes: u64,
    /// Bytes of masters and optimizer state: what an update moves each way with the EPS on file.
    pub state_bytes: u64,
    /// True when this step computes no gradient for it.
    pub frozen: bool,
}

/// What a micro-batch carries from one visit to another, through the stash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Boundary {
    /// Slots of the input or output pool that one micro-batch of it fills, at least 1.
    pub slots: u32,
    /// Bytes of one sequence of it in a slot.
    pub bytes_per_sequence: u64,
    /// Bytes of one sequence of it in the stash, and on the way there.
    pub stashed_per_sequence: u64,
}

/// Where a visit runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Place {
    /// The host lane: gather, scatter, loss.
    Host,
    /// The compute lane of this device. One device so far: 0.
    Device(u8),
}

/// Direction of a visit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Activations.
    Forward,
    /// Gradients.
    Backward,
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
    /// Boundaries each micro-batch brings.
    pub reads: Vec<BoundaryId>,
    /// Boundaries each micro-batch leaves behind.
    pub writes: Vec<BoundaryId>,
}

impl Visit {
    /// The blocks this visit is known to need.
    pub fn blocks(&self) -> &[BlockId] {
        let Needs::Known(blocks) = &self.needs;
        blocks
    }

    /// True for the host visit that takes the loss: forward, of no block, reading only.
    pub fn is_loss(&self) -> bool {
        !self.on_device() && self.phase == Phase::Forward && self.writes.is_empty()
    }

    /// True for the host visit that gathers: forward, writing.
    pub fn is_gather(&self) -> bool {
        !self.on_device() && self.phase == Phase::Forward && !self.writes.is_empty()
    }

    /// True for a visit of a device, false for one of the host lane.
    pub fn on_device(&self) -> bool {
        matches!(self.place, Place::Device(_))
    }
}

/// The visits of one step, in order, with the sizes of what they move.
///
/// Host visits come in three kinds, told apart by what they do: *gather* (forward, writes only),
/// *loss* (forward, reads only) and *scatter* (backward, reads only; its blocks' gradients end
/// there). The order of the visits of one place is the order they run in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// Every block of the model, visited or not.
    pub blocks: Vec<Block>,
    /// Every boundary of this step.
    pub boundaries: Vec<Boundary>,
    /// Sequences in each micro-batch; the last may be smaller.
    pub micro_batches: Vec<u32>,
    /// The visits.
    pub visits: Vec<Visit>,
}

impl Schedule {
    /// The block's facts. Panics on an unknown id: a plan holds none.
    pub fn block(&self, id: BlockId) -> &Block {
        &self.blocks[id.0 as usize]
    }

    /// The boundary's facts. Panics on an unknown id: a plan holds none.
    pub fn boundary(&self, id: BoundaryId) -> &Boundary {
        &self.boundaries[id.0 as usize]
    }

    /// Bytes of one micro-batch of a boundary in its slots.
    pub fn boundary_bytes(&self, id: BoundaryId, micro_batch: MicroBatch) -> u64 {
        let sequences = u64::from(self.micro_batches[micro_batch as usize]);
        self.boundary(id).bytes_per_sequence.saturating_mul(sequences)
    }

    /// Bytes of one micro-batch of a boundary in the stash.
    pub fn stashed_bytes(&self, id: BoundaryId, micro_batch: MicroBatch) -> u64 {
        let sequences = u64::from(self.micro_batches[micro_batch as usize]);
        self.boundary(id).stashed_per_sequence.saturating_mul(sequences)
    }

    /// Slots that one micro-batch of all these boundaries fills; of unknown ones, none.
    pub fn slots(&self, boundaries: &[BoundaryId]) -> u32 {
        let slots = |id: &BoundaryId| self.boundaries.get(id.0 as usize).map_or(0, |b| b.slots);
        boundaries.iter().map(slots).fold(0, u32::saturating_add)
    }

    /// True for a known block that computes a gradient.
    fn trains(&self, id: BlockId) -> bool {
        self.blocks.get(id.0 as usize).is_some_and(|block| !block.frozen)
    }
}

/// A schedule, or a plan of one, that cannot run: the visit and the rule it breaks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Refusal {
    /// Index in [`Schedule::visits`], when one visit is to blame.
    pub visit: Option<usize>,
    /// What is wrong and what to do.
    pub reason: String,
}

impl Refusal {
    pub(crate) fn of(reason: impl Into<String>) -> Refusal {
        Refusal { visit: None, reason: reason.into() }
    }

    pub(crate) fn at(schedule: &Schedule, visit: usize, reason: impl fmt::Display) -> Refusal {
        let Visit { layer, phase, .. } = &schedule.visits[visit];
        Refusal { visit: Some(visit), reason: format!("{layer} {phase}: {reason}") }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.visit {
            Some(visit) => write!(f, "schedule refused at visit {visit}, {}", self.reason),
            None => write!(f, "schedule refused: {}", self.reason),
        }
    }
}

impl fmt::Display for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "block {}", self.0)
    }
}

impl fmt::Display for LayerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "layer {}", self.0)
    }
}

impl fmt::Display for BoundaryId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "boundary {}", self.0)
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Phase::Forward => "forward",
            Phase::Backward => "backward",
        })
    }
}
