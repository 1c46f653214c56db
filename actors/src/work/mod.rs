//! Work: what an operation does, as plain data in slot numbers, and one table about it.
//!
//! [`Work::row`] is the table. For each kind of work it has the lane, the kind on the timeline, the
//! name in reports, the block or micro-batch, and the bytes that it moves. A new kind of work is a
//! variant, a row there, and one function of the lanes.

mod kind;
mod lane;

use std::fmt;

pub use kind::WorkKind;
pub use lane::{Lane, Queue};

use crate::schedule::{
    BlockId, BoundaryId, ChosenBy, GroupId, MicroBatch, Phase, Portion, Schedule, Shard, Share,
    Version,
};

/// A boundary of a micro-batch and its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// The boundary.
    pub boundary: BoundaryId,
    /// A slot of the input or the output pool.
    pub slot: u32,
}

/// A block of a compute operation: where its weights are, and its gradient if it trains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockUse {
    /// The block, or the portion of it that the operation needs.
    pub portion: Portion,
    /// Its weight slot.
    pub weights: u32,
    /// The accumulator of its gradient; `None`: the operation computes none.
    pub gradient: Option<Accumulator>,
}

/// A gradient accumulator of a compute operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accumulator {
    /// The gradient slot.
    pub slot: u32,
    /// True for the first contribution of the step, which replaces the content of the slot.
    pub first: bool,
}

/// The place of a block's master on the host, with its optimizer state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MasterAt {
    /// In the memory of the EPS.
    Memory,
    /// In this staging slot: of pool `states` for an update, else of pool `reads`.
    Slot(u32),
}

/// The place of a gradient on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GradientAt {
    /// In this landing block, a slot of pool `reduced`.
    Landing(u32),
    /// In the block's gradient region. That of a staged block is read beside its state.
    Region,
}

/// The data of a block that the EPS stores, as it passes through a staging slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// The master, in a slot of pool `reads`.
    Master,
    /// The gradient region, in a landing block.
    Gradient,
    /// The master and the optimizer state, in a slot of pool `states`.
    State {
        /// True to read the gradient region, too.
        with_gradient: bool,
    },
}

/// The work of an operation, in slot numbers. Slots are of the pool that the field is named after.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "each field is an id or a slot of that name")]
pub enum Work {
    /// Host: writes a share of a gather's boundaries into the stash, from the batch and the blocks.
    Gather { visit: usize, share: Share, master: MasterAt },
    /// File: reads the stored data of a staged block into a staging slot.
    Stage { block: BlockId, version: Version, stored: Stored, slot: u32 },
    /// Upload: copies a shard of a published block of this version, or of a portion of it, into a
    /// weight slot.
    /// Without the parts that no row chose, if `chosen_by` says which parts rows choose.
    UploadBlock {
        portion: Portion,
        version: Version,
        master: MasterAt,
        weights: u32,
        shard: Shard,
        chosen_by: Option<ChosenBy>,
    },
    /// Peer: copies the shards of a block that other devices uploaded, each from a weight slot of
    /// its device, into the slot `weights` of this device, which uploaded `shard`.
    CopyShards {
        portion: Portion,
        version: Version,
        weights: u32,
        shard: Shard,
        from: Vec<(Shard, u32)>,
    },
    /// Upload: copies a boundary from the stash into an input slot.
    UploadBoundary { micro_batch: MicroBatch, inputs: Placed },
    /// Compute: one micro-batch of a device visit. `blocks` are the visit's, in its order.
    Compute {
        device_visit: usize,
        phase: Phase,
        micro_batch: MicroBatch,
        blocks: Vec<BlockUse>,
        inputs: Vec<Placed>,
        outputs: Vec<Placed>,
    },
    /// Download: copies a boundary from an output slot into the stash.
    DownloadBoundary { micro_batch: MicroBatch, outputs: Placed },
    /// Download: copies a group's gradient into a landing block. The parts that no row chose are
    /// zero there, if `chosen_by` says which parts rows choose.
    DownloadGradient {
        portion: Portion,
        group: GroupId,
        gradients: u32,
        reduced: u32,
        chosen_by: Option<ChosenBy>,
    },
    /// Host: takes what layers measured of one micro-batch, or what an objective measures of it.
    Measure { visit: usize, micro_batch: MicroBatch },
    /// Exchange: adds what all processes measured in the step, or gathers what an objective did.
    ExchangeMeasures { visit: usize },
    /// Host: writes the answers, or the weights of rows, that a micro-batch's backward visits read.
    Answer { visit: usize, micro_batch: MicroBatch },
    /// Host: the summed loss of one micro-batch. Value: that sum.
    Loss { visit: usize, micro_batch: MicroBatch },
    /// Host: decodes a group's gradient in a landing block, adds kept gradients to it, in this
    /// order, and copies the sum to `keep`, if that is given. `parts` and `keep` are slots of pool
    /// `parts`.
    Join { portion: Portion, group: GroupId, reduced: u32, parts: Vec<u32>, keep: Option<u32> },
    /// Host: puts the gradient of a portion, in the landing block `reduced`, into that of its
    /// block, in the landing block `into`. What portions have in common is added there.
    Merge { portion: Portion, reduced: u32, into: u32 },
    /// Host: measures a landing block, and copies it into the block's gradient region where
    /// `to_region`. Value: its sum of squares.
    Reduce { block: BlockId, reduced: u32, to_region: bool },
    /// Host: adds the boundaries that a scatter reads, for all micro-batches in order, to one
    /// block's gradient, or replaces the gradient where `first`. Value: its sum of squares.
    Scatter { visit: usize, block: BlockId, first: bool, gradient: GradientAt },
    /// Update: moves a block from `version` to the next, and publishes it unless it is staged.
    /// `norm` is the global gradient norm where updates wait for it. Value: the gradient's sum of
    /// squares.
    Update {
        block: BlockId,
        version: Version,
        master: MasterAt,
        gradient: GradientAt,
        norm: Option<f64>,
    },
    /// File: writes a staging slot back. A state that was moved on from `version` is written
    /// beside the one it was, and published.
    Store { block: BlockId, version: Version, stored: Stored, slot: u32 },
    /// File: makes all that was written until now the state to resume from.
    Seal,
    /// Update: publishes the step's carried blocks, unchanged, as of the next version.
    Carry { version: Version },
    /// Fetch: makes a block's master whole in a staging slot, of the parts of all processes. That
    /// of this process was read there, if the block is staged.
    AllGather { block: BlockId, version: Version, slot: u32 },
    /// Exchange: in a landing block, replaces a gradient by this process's part of the sum over all
    /// processes. Where the step is not dealt, each process has the sum already.
    ReduceScatter { block: BlockId, reduced: u32 },
    /// Exchange: receives the rows that a scatter reads from the micro-batches of other processes.
    AllGatherRows { visit: usize },
    /// Exchange: adds the values that operations of all processes reported. Value: the sum.
    AllReduce { of: Summed },
}

/// A value that is added over the processes of a run, in an order that does not depend on their
/// number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Summed {
    /// The losses of a step, by micro-batch.
    Losses,
    /// The squares of a step's gradient, by block.
    Squares,
}

/// The block and the micro-batch that an operation concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Subject {
    Nothing,
    Version(Version),
    Block(BlockId),
    Published(BlockId, Version),
    Portion(Portion),
    Uploaded(Portion, Version),
    MicroBatch(MicroBatch),
    /// A micro-batch of a visit, with the first of the visit's blocks, to show it on a timeline.
    Visit(Option<BlockId>, MicroBatch),
    Boundary(BoundaryId, MicroBatch),
}

/// The bytes that an operation moves, between host and device, or host and file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moves {
    Nothing,
    Shard(Portion, Shard),
    OtherShards(Portion, Shard),
    Gradient(Portion),
    Region(BlockId),
    Master(BlockId),
    State(BlockId),
    StateAndGradient(BlockId),
    /// The state, and the version before that is written beside it.
    StateAndOlder(BlockId),
    Boundary(BoundaryId, MicroBatch),
    /// The parts of a block's published copy that other processes have.
    OtherParts(BlockId),
    /// The parts of a block's gradient that other processes have.
    OtherPartsOfGradient(BlockId),
}

/// One row of the table of [`Work`]. Its `Display` is the operation's name in reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// The lane it belongs on.
    pub lane: Lane,
    /// The kind on the timeline.
    pub kind: WorkKind,
    title: &'static str,
    subject: Subject,
    moves: Moves,
}

impl Work {
    /// The table: one row for each kind of work.
    pub fn row(&self) -> Row {
        use {Lane as L, Moves as M, Subject as S, WorkKind as K};
        let row = |lane, kind, title, subject, moves| Row { lane, kind, title, subject, moves };
        match *self {
            Work::Gather { share: Share::MicroBatch(m), .. } => {
                row(L::Host, K::Gather, "gather of ", S::MicroBatch(m), M::Nothing)
            }
            Work::Gather { share: Share::Block(b), .. } => {
                row(L::Host, K::Gather, "gather from ", S::Block(b), M::Nothing)
            }
            Work::Stage { block: b, version: v, stored, .. } => match stored {
                Stored::Master => {
                    row(L::File, K::Read, "read of ", S::Published(b, v), M::Master(b))
                }
                Stored::Gradient => {
                    row(L::File, K::Read, "read of gradient of ", S::Block(b), M::Region(b))
                }
                Stored::State { with_gradient } => {
                    let moves = if with_gradient { M::StateAndGradient(b) } else { M::State(b) };
                    row(L::File, K::Read, "read of state of ", S::Published(b, v), moves)
                }
            },
            Work::UploadBlock { portion: p, version: v, shard, .. } => {
                row(L::Upload, K::Weights, "upload of ", S::Uploaded(p, v), M::Shard(p, shard))
            }
            Work::CopyShards { portion: p, version: v, shard, .. } => {
                let moves = M::OtherShards(p, shard);
                row(L::Peer, K::Shards, "copy of shards of ", S::Uploaded(p, v), moves)
            }
            Work::UploadBoundary { micro_batch: m, inputs: Placed { boundary: id, .. } } => {
                row(L::Upload, K::Input, "upload of ", S::Boundary(id, m), M::Boundary(id, m))
            }
            Work::Compute { phase, micro_batch: m, ref blocks, .. } => {
                let first = blocks.first().map(|of| of.portion.block);
                row(L::Compute, phase.into(), "compute of ", S::Visit(first, m), M::Nothing)
            }
            Work::DownloadBoundary { micro_batch: m, outputs: Placed { boundary: id, .. } } => {
                row(L::Download, K::Output, "download of ", S::Boundary(id, m), M::Boundary(id, m))
            }
            Work::DownloadGradient { portion: p, .. } => {
                let title = "download of gradient of ";
                row(L::Download, K::Gradient, title, S::Portion(p), M::Gradient(p))
            }
            Work::Measure { micro_batch: m, .. } => {
                row(L::Host, K::Balance, "measure of ", S::MicroBatch(m), M::Nothing)
            }
            Work::ExchangeMeasures { .. } => {
                row(L::Exchange, K::Sum, "exchange of measures", S::Nothing, M::Nothing)
            }
            Work::Answer { micro_batch: m, .. } => {
                row(L::Host, K::Balance, "answer to ", S::MicroBatch(m), M::Nothing)
            }
            Work::Loss { micro_batch: m, .. } => {
                row(L::Host, K::Loss, "loss of ", S::MicroBatch(m), M::Nothing)
            }
            Work::Join { portion: p, .. } => {
                row(L::Host, K::Reduce, "join of gradients of ", S::Portion(p), M::Nothing)
            }
            Work::Merge { portion: p, .. } => {
                row(L::Host, K::Reduce, "merge of gradient of ", S::Portion(p), M::Nothing)
            }
            Work::Reduce { block: b, .. } => {
                row(L::Host, K::Reduce, "reduce of ", S::Block(b), M::Nothing)
            }
            Work::Scatter { block: b, .. } => {
                row(L::Host, K::Scatter, "scatter into ", S::Block(b), M::Nothing)
            }
            Work::Update { block: b, version: v, .. } => {
                row(L::Update, K::Update, "update of ", S::Published(b, v), M::Nothing)
            }
            Work::Store { block: b, version: v, stored, .. } => match stored {
                Stored::Gradient => {
                    row(L::File, K::Write, "write of gradient of ", S::Block(b), M::Region(b))
                }
                Stored::Master | Stored::State { .. } => {
                    row(L::File, K::Write, "write of ", S::Published(b, v + 1), M::StateAndOlder(b))
                }
            },
            Work::Seal => row(L::File, K::Seal, "seal", S::Nothing, M::Nothing),
            Work::Carry { version: v } => {
                row(L::Update, K::Carry, "carry of ", S::Version(v), M::Nothing)
            }
            Work::AllGather { block: b, version: v, .. } => {
                row(L::Fetch, K::Fetch, "fetch of ", S::Published(b, v), M::OtherParts(b))
            }
            Work::ReduceScatter { block: b, .. } => {
                let moves = M::OtherPartsOfGradient(b);
                row(L::Exchange, K::Exchange, "exchange of gradient of ", S::Block(b), moves)
            }
            Work::AllGatherRows { .. } => {
                let title = "exchange of rows of the embedding's gradient";
                row(L::Exchange, K::Exchange, title, S::Nothing, M::Nothing)
            }
            Work::AllReduce { of: Summed::Losses } => {
                row(L::Exchange, K::Sum, "sum of losses", S::Nothing, M::Nothing)
            }
            Work::AllReduce { of: Summed::Squares } => {
                row(L::Exchange, K::Sum, "sum of squares", S::Nothing, M::Nothing)
            }
        }
    }

    /// The lane it belongs on.
    pub fn lane(&self) -> Lane {
        self.row().lane
    }

    /// Bytes it moves: to or from a device, or between host and file; 0 for work that stays where
    /// it is. What rows choose of a block counts as all of it.
    pub fn bytes(&self, schedule: &Schedule) -> u64 {
        self.row().bytes(schedule)
    }

    /// True for an operation whose [`Done`](crate::fence::Done) reports a value: a loss or a sum
    /// of squares.
    pub fn has_value(&self) -> bool {
        use Work::{AllReduce, Loss, Reduce, Scatter, Update};
        matches!(
            self,
            Loss { .. } | Reduce { .. } | Scatter { .. } | Update { .. } | AllReduce { .. }
        )
    }
}

impl Row {
    /// The block that it concerns, if it concerns one. Of a visit with several blocks, the first.
    pub fn block(&self) -> Option<BlockId> {
        match self.subject {
            Subject::Block(block) | Subject::Published(block, _) => Some(block),
            Subject::Portion(portion) | Subject::Uploaded(portion, _) => Some(portion.block),
            Subject::Visit(block, _) => block,
            _ => None,
        }
    }

    /// The micro-batch that it concerns, if it concerns one.
    pub fn micro_batch(&self) -> Option<MicroBatch> {
        match self.subject {
            Subject::MicroBatch(m) | Subject::Visit(_, m) | Subject::Boundary(_, m) => Some(m),
            _ => None,
        }
    }

    /// As [`Work::bytes`].
    pub fn bytes(&self, schedule: &Schedule) -> u64 {
        match self.moves {
            Moves::Nothing => 0,
            Moves::Shard(id, shard) => shard.bytes(schedule.cut(id).weight_bytes),
            Moves::OtherShards(id, shard) => {
                let all = schedule.cut(id).weight_bytes;
                all - shard.bytes(all)
            }
            Moves::Gradient(id) => schedule.cut(id).download_bytes,
            Moves::Region(id) => schedule.block(id).region_bytes,
            Moves::Master(id) => schedule.block(id).master_bytes,
            Moves::State(id) => {
                let block = schedule.block(id);
                block.master_bytes.saturating_add(block.state_bytes)
            }
            Moves::StateAndGradient(id) => {
                let state = Row { moves: Moves::State(id), ..*self }.bytes(schedule);
                state.saturating_add(schedule.block(id).region_bytes)
            }
            Moves::StateAndOlder(id) => {
                let state = Row { moves: Moves::State(id), ..*self }.bytes(schedule);
                state.saturating_add(schedule.block(id).older_bytes)
            }
            Moves::Boundary(id, m) => schedule.stashed_bytes(id, m),
            Moves::OtherParts(id) => schedule.remote_bytes(schedule.block(id).weight_bytes),
            Moves::OtherPartsOfGradient(_) if !schedule.ranks.dealt => 0,
            Moves::OtherPartsOfGradient(id) => {
                schedule.remote_bytes(schedule.block(id).reduce_scatter_bytes)
            }
        }
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let title = self.title;
        match self.subject {
            Subject::Nothing => write!(f, "{title}"),
            Subject::Version(version) => write!(f, "{title}v{version}"),
            Subject::Block(block) => write!(f, "{title}{block}"),
            Subject::Published(block, version) => write!(f, "{title}{block} v{version}"),
            Subject::Portion(portion) => write!(f, "{title}{portion}"),
            Subject::Uploaded(portion, version) => write!(f, "{title}{portion} v{version}"),
            Subject::MicroBatch(m) | Subject::Visit(_, m) => write!(f, "{title}micro-batch {m}"),
            Subject::Boundary(id, m) => write!(f, "{title}{id} of micro-batch {m}"),
        }
    }
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.row().fmt(f)
    }
}
