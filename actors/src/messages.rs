//! Everything that travels on an edge, in flow order. The datum changes its name at each hop:
//! [`Staged`] → [`Weights`] (with [`Uploaded`] shards) and [`Inputs`] → [`Outputs`] and
//! [`Gradients`] → [`Reduced`] → the fact [`Updated`](crate::facts::Fact::Updated). Each message
//! owns the slots that it names, and its fences say when the content of a slot is there. A caller
//! of the relay gets [`Resolved`] alone; the others are public as documentation.

use std::sync::Arc;

use crate::fence::Fence;
use crate::operation::Step;
use crate::pool::{Content, Held};
use crate::schedule::{BlockId, MicroBatch, Portion, Version};
use crate::work::MasterAt;

/// The messages of the main flow: the begin of a step, its data, its end, and the stop.
#[derive(Debug)]
pub enum Flow<T> {
    /// The data that follows is this step's.
    Begin(Arc<Step>),
    /// One datum.
    Datum(T),
    /// The step has no more data. The fences are those of the last operation of each device that
    /// had one.
    End(Vec<Fence>),
    /// There are no more steps. The actor that receives this sends it on and ends.
    Stop,
}

/// Fetcher → Prefetcher: the master of a staged block is in a staging slot, or on its way there.
#[derive(Clone, Debug)]
pub struct Staged {
    /// The block.
    pub block: BlockId,
    /// The staging slot.
    pub slot: Held,
    /// The operation that reads it.
    pub arrived: Fence,
    /// The uploads of the device that take their portions from it. They follow each other.
    pub uses: u32,
}

impl Staged {
    /// The master of a block for an operation of the step that reads this version: in the slot of
    /// the staged master, if there is one.
    pub(crate) fn master(staged: Option<&Staged>, version: Version) -> MasterAt {
        staged.map_or(MasterAt::Memory, |staged| {
            MasterAt::Slot(staged.slot.slot(Content::Block(staged.block, version)))
        })
    }
}

/// Prefetcher → PeerCopiers of other devices: a shard of a block is on its way to a weight slot.
#[derive(Clone, Debug)]
pub struct Uploaded {
    /// The block, or the portion of it.
    pub portion: Portion,
    /// The weight slot.
    pub slot: Held,
    /// The operation that uploads it.
    pub arrived: Fence,
}

/// Prefetcher → Executor, by way of the PeerCopier if there is one: the blocks of the next device
/// visit are here or on their way.
#[derive(Debug)]
pub struct Weights {
    /// Index in [`StepPlan::device_visits`](crate::schedule::StepPlan::device_visits).
    pub device_visit: usize,
    /// The visit's credit, free when the visit ends.
    pub credit: Held,
    /// One slot per block, shared with the Prefetcher until their last use.
    pub blocks: Vec<Held>,
    /// The uploads that this visit is the first to need.
    pub arrived: Vec<Fence>,
}

/// Prefetcher → Executor: what one micro-batch brings to a device visit.
#[derive(Debug)]
pub struct Inputs {
    /// Index in [`StepPlan::device_visits`](crate::schedule::StepPlan::device_visits).
    pub device_visit: usize,
    /// The micro-batch.
    pub micro_batch: MicroBatch,
    /// The slot of each boundary the visit reads, in its order.
    pub boundaries: Vec<Held>,
    /// Their uploads.
    pub arrived: Vec<Fence>,
}

/// Executor → Stasher: what one micro-batch leaves behind.
#[derive(Debug)]
pub struct Outputs {
    /// Index in [`StepPlan::device_visits`](crate::schedule::StepPlan::device_visits).
    pub device_visit: usize,
    /// The micro-batch.
    pub micro_batch: MicroBatch,
    /// The slot of each boundary the visit writes, in its order.
    pub boundaries: Vec<Held>,
    /// The operation that writes them.
    pub computed: Fence,
}

/// Executor → Reducer: a group's gradient of a portion is complete on the device.
#[derive(Debug)]
pub struct Gradients {
    /// The block, or the portion of it.
    pub portion: Portion,
    /// The gradient slot on the device.
    pub gradient: Held,
    /// The last operation that adds to it.
    pub computed: Fence,
}

/// Reducer → Optimizer.
#[derive(Debug)]
pub enum Reduced {
    /// A block's gradient is complete on the host.
    Gradient {
        /// The block.
        block: BlockId,
        /// The version that it moves on.
        version: Version,
        /// The landing block that holds it; `None`: its gradient region.
        landing: Option<Held>,
        /// The operation that put it there.
        reduced: Fence,
        /// The last operation that takes what layers measured in the step, if they did: by these
        /// measures an update may leave parts of the block alone.
        measured: Option<Fence>,
    },
    /// The loss of one micro-batch.
    Loss(Fence),
}

/// Optimizer → Relay: loss and norm of a step are known.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Resolved {
    /// The step.
    pub step: Version,
    /// The sum of the losses its loss operations reported, in order.
    pub loss: f64,
    /// The global gradient norm.
    pub norm: f64,
}
