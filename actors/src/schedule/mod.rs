//! The schedule: the visits of one step, as plain data.
//!
//! A schedule says *what* meets *what*, in which order; nothing in it runs. The generators
//! ([`relay`], [`resident`], [`pipeline()`]) are pure functions from a [`RingModel`] and a
//! [`Selection`]; anyone may write another, or edit what they return. A [`StepPlan`] is a schedule
//! that was checked, with every choice made once that would otherwise be made at run time: which
//! slot a block takes, in what order the upload lane moves pieces, where gradients open, close and
//! join. All actors walk the one plan, so nothing they do depends on timing.
//!
//! A visit names its [`Place`]: each device walks the visits of its own, and [`deal()`] and
//! [`deal_groups`] say which. A boundary is written by one visit and read by others, wherever they
//! are, so activations pass between devices through the stash. Each block says whether it is
//! [staged](Block::staged); actors take it from the plan.
//!
//! What a layer needs and leaves stands in its [`RingStep`]s alone.

mod batches;
mod boundary;
mod chain;
mod choice;
mod deal;
mod device_visits;
mod fetches;
mod generate;
mod hand_over;
mod ids;
mod model;
mod pieces;
mod pipeline;
mod plan;
mod pools;
mod portions;
mod reductions;
mod reference;
mod replay;
mod residency;
mod rounds;
mod rules;
mod runs;
mod shards;
mod spans;
mod stages;
mod stay;
mod sums;
mod traffic;
mod visit;

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

pub use batches::{pipedream, pipedream_2bw};
pub use boundary::{Boundary, Encoding, Role};
pub use choice::ChosenBy;
pub use deal::{deal, deal_groups, devices_of_groups};
pub use device_visits::DeviceVisit;
pub(crate) use fetches::uses;
pub use fetches::{Fetch, Share};
pub use generate::{relay, resident};
pub use hand_over::hand_over;
pub use ids::{BlockId, BoundaryId, GroupId, LayerId, MicroBatch, Version};
pub use model::{
    Input, Question, RingLayer, RingModel, RingObjective, RingStep, Selection, equal_groups,
};
pub use pieces::Piece;
pub use pipeline::{Action, Pipeline};
pub use plan::{DeviceWalk, StepPlan};
pub use pools::{Capacities, Pools};
pub use portions::{Cut, Portion};
pub use reductions::Reduction;
pub use residency::Residence;
pub use shards::Shard;
pub use spans::{Join, group_spans, sums_of_spans};
pub use stages::pipeline;
pub use traffic::Traffic;
pub use visit::{ALL_CHUNKS, Copied, DeviceId, Phase, Place, Visit, VisitKind};

/// Parameters that move and update together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Bytes of the published copy, in the device's dtype: what one upload moves.
    pub weight_bytes: u64,
    /// Bytes of the f32 gradient of the trainable part.
    pub gradient_bytes: u64,
    /// Bytes of that gradient as it leaves the device: what one download moves.
    pub download_bytes: u64,
    /// Bytes of that gradient as several processes exchange it, all parts together.
    pub reduce_scatter_bytes: u64,
    /// True when a gradient is encoded on its way, or where it lands. Then each passes a `Join`
    /// behind its download, also where nothing is added to it.
    pub encoded: bool,
    /// Bytes of the f32 master: what one read of a staged block moves. Of several processes, those
    /// of this one's part; so are the next three.
    pub master_bytes: u64,
    /// Bytes of the optimizer state. The update of a staged block moves them and the master, each
    /// way.
    pub state_bytes: u64,
    /// Bytes of the version before that the update of a staged block writes beside them. 0 without
    /// a delay.
    pub older_bytes: u64,
    /// Bytes of the gradient region of a staged block.
    pub region_bytes: u64,
    /// True when the EPS keeps the block in a file. Then its master, its optimizer state and its
    /// gradient region pass through staging slots on the host.
    pub staged: bool,
    /// True when this step computes no gradient for it.
    pub frozen: bool,
}

/// The visits of one step, in order, with the sizes of blocks and boundaries. The order of the
/// visits of one place is the order in which they run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// Every block of the model, visited or not.
    pub blocks: Vec<Block>,
    /// The portions of blocks that are cut: see [`Portion`].
    pub cuts: BTreeMap<BlockId, Vec<Cut>>,
    /// Every boundary of this step.
    pub boundaries: Vec<Boundary>,
    /// Tokens of the longest sequence, or of a chunk if there are runs: slots and stash have room
    /// for as many.
    pub positions: u32,
    /// Sequences, or chunks of one, in each micro-batch; the last may be smaller.
    pub micro_batches: Vec<u32>,
    /// Micro-batches that are the chunks of one sequence, in order: sorted, disjoint, of two or
    /// more, each inside one group.
    pub runs: Vec<Range<MicroBatch>>,
    /// Tokens of the longest last chunk of a run: it moves fewer bytes.
    pub last_chunk: u32,
    /// The groups of micro-batches, in order, none empty. Each group has gradients of its own,
    /// which the Reducer adds in pairs, by a tree that depends on the number of groups alone.
    pub groups: Vec<Range<MicroBatch>>,
    /// False: all groups are of one batch, and a block has one update, of their sum. True: each
    /// group is a batch, and has updates of its own. Then the step is a window of batches, and each
    /// visit says [how many](Visit::ahead) of these updates it waits for.
    pub in_batches: bool,
    /// The updates, 0 or 1, that the weights which the first batch of a step in batches reads lack.
    /// 1: its ring has a delay, and keeps two versions of each block.
    pub lag: u32,
    /// 1: each device uploads whole blocks. More: the number of devices, each of which uploads its
    /// [`Shard`] of a block and copies the others from the devices that uploaded them.
    pub shards: u32,
    /// The processes of the run, and whether they share this step's groups.
    pub ranks: Ranks,
    /// True for a step that trains: it makes the next version of every block. Other steps change
    /// nothing, and leave the version as it is.
    pub trains: bool,
    /// The visits.
    pub visits: Vec<Visit>,
}

/// The processes of a run. Each has a ring of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ranks {
    /// The number of processes. If there are several, each has a part of every block: a block is
    /// completed in a staging slot, and each process updates its part.
    pub count: u32,
    /// True: other processes compute other groups of this step, so gradients are exchanged. False:
    /// each process computes the whole step.
    pub dealt: bool,
}

impl Ranks {
    /// One process, which has everything.
    pub const ONE: Ranks = Ranks { count: 1, dealt: false };
}

impl Schedule {
    /// The block of this id. Panics on an unknown id: a plan holds none.
    pub fn block(&self, id: BlockId) -> &Block {
        &self.blocks[id.0 as usize]
    }

    /// The boundary of this id. Panics on an unknown id: a plan holds none.
    pub fn boundary(&self, id: BoundaryId) -> &Boundary {
        &self.boundaries[id.0 as usize]
    }

    /// The boundary of this role among those that a visit reads, or those that it writes.
    pub fn with_role(&self, boundaries: &[BoundaryId], role: Role) -> Option<BoundaryId> {
        boundaries.iter().copied().find(|&id| self.boundary(id).role == role)
    }

    /// Bytes in the stash of one micro-batch of a boundary, whose sequences (or chunks) are all the
    /// longest.
    pub fn stashed_bytes(&self, id: BoundaryId, micro_batch: MicroBatch) -> u64 {
        let sequences = u64::from(self.micro_batches[micro_batch as usize]);
        let is_last = self.run_of(micro_batch).is_some_and(|run| micro_batch + 1 == run.end);
        let positions = if is_last { self.last_chunk } else { self.positions };
        let tokens = sequences.saturating_mul(u64::from(positions));
        self.boundary(id).stashed_bytes(sequences, tokens)
    }

    /// The group of a micro-batch. Panics on an unknown one: a plan holds none.
    pub fn group_of(&self, micro_batch: MicroBatch) -> GroupId {
        let at = self.groups.partition_point(|group| group.end <= micro_batch);
        assert!(at < self.groups.len(), "micro-batch {micro_batch} is in no group");
        at as GroupId
    }

    /// Devices up to the last one that is visited.
    pub fn devices(&self) -> u32 {
        let devices = self.visits.iter().filter_map(Visit::device);
        devices.map(|device| u32::from(device) + 1).max().unwrap_or(0)
    }

    /// The visits of devices, in order.
    pub fn device_visits(&self) -> impl Iterator<Item = &Visit> {
        self.visits.iter().filter(|visit| visit.on_device())
    }

    /// True for a block whose master passes through a slot on the host before an upload: it is on
    /// file, or other ranks have parts of it.
    pub fn passes_host_slot(&self, id: BlockId) -> bool {
        self.ranks.count > 1 || self.block(id).staged
    }

    /// The share of `bytes` that other ranks hold, if all parts are equal.
    pub fn remote_bytes(&self, bytes: u64) -> u64 {
        bytes - bytes / u64::from(self.ranks.count)
    }

    /// True if some block's master passes through a host slot.
    pub(crate) fn fetches(&self) -> bool {
        self.ranks.count > 1 || self.blocks.iter().any(|block| block.staged)
    }

    /// True for a known block that computes a gradient.
    fn is_trained(&self, id: BlockId) -> bool {
        self.blocks.get(id.0 as usize).is_some_and(|block| !block.frozen)
    }

    /// The number of these blocks that pass through host slots; unknown ones count 0.
    fn host_slots(&self, blocks: &[BlockId]) -> usize {
        let is_known = |id: &&BlockId| (id.0 as usize) < self.blocks.len();
        blocks.iter().filter(is_known).filter(|&&id| self.passes_host_slot(id)).count()
    }
}

/// The reason why a schedule, or a plan of one, cannot run: the visit and the rule that it breaks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Refusal {
    /// Index in [`Schedule::visits`], when one visit is to blame.
    pub visit: Option<usize>,
    /// The problem, and what to do about it.
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
