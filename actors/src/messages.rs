//! Everything that travels on an edge, in flow order. The datum changes its name at each hop:
//! [`Weights`] and [`Inputs`] → [`Outputs`] and [`Gradients`] → [`Reduced`] → the fact
//! [`Updated`](crate::facts::Fact::Updated). Each message owns the slots it speaks of, and says
//! with fences when what they hold is there.

use std::sync::Arc;

use crate::fence::Fence;
use crate::pool::Held;
use crate::ports::Step;
use crate::schedule::{BlockId, MicroBatch, Version};

/// What every edge of the main flow carries: a step begins, its data, its end, and the stop.
#[derive(Debug)]
pub(crate) enum Flow<T> {
    /// The data that follows is this step's.
    Begin(Arc<Step>),
    /// One datum.
    Datum(T),
    /// The step has no more; its last operation of the device.
    End(Fence),
    /// There are no more steps; whoever gets this hands it on and ends.
    Stop,
}

/// Prefetcher → Executor: the blocks of the next device visit are here or on their way.
#[derive(Debug)]
pub(crate) struct Weights {
    pub(crate) device_visit: usize,
    /// The visit's credit, free when the visit ends.
    pub(crate) credit: Held,
    /// One slot per block, shared with the Prefetcher until their last use.
    pub(crate) blocks: Vec<Held>,
    pub(crate) arrived: Vec<Fence>,
}

/// Prefetcher → Executor: what one micro-batch brings to a device visit.
#[derive(Debug)]
pub(crate) struct Inputs {
    pub(crate) device_visit: usize,
    pub(crate) micro_batch: MicroBatch,
    /// Slots of each boundary the visit reads, in its order.
    pub(crate) boundaries: Vec<Vec<Held>>,
    pub(crate) arrived: Vec<Fence>,
}

/// Executor → Stasher: what one micro-batch leaves behind.
#[derive(Debug)]
pub(crate) struct Outputs {
    pub(crate) device_visit: usize,
    pub(crate) micro_batch: MicroBatch,
    /// Slots of each boundary the visit writes, in its order.
    pub(crate) boundaries: Vec<Vec<Held>>,
    pub(crate) computed: Fence,
}

/// Executor → Reducer: a block's gradient is complete on the device.
#[derive(Debug)]
pub(crate) struct Gradients {
    pub(crate) block: BlockId,
    pub(crate) gradient: Held,
    pub(crate) computed: Fence,
}

/// Reducer → Optimizer.
#[derive(Debug)]
pub(crate) enum Reduced {
    /// A block's gradient is complete on the host: in a landing block, or (`None`) in its region.
    Gradient { block: BlockId, landing: Option<Held>, reduced: Fence },
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
