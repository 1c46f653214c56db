//! What the relay asks of the outside: lanes to queue work on.
//!
//! The actors decide, the lanes do. An actor says what is to be done as plain data ([`Work`]),
//! with the fences it waits on and the slots it holds, and gets a fence back. Everything with
//! tensors in it (copies, kernels, the EPS) is behind [`Lanes`], and each step's batch goes past
//! the actors through [`Ports`]. [`ThreadLanes`](crate::threads::ThreadLanes) makes lanes from
//! threads and one function; [`virtual_time`](crate::virtual_time) makes them from nothing.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::cause::{ActorName, Cause, Problem};
use crate::crew::Ring;
use crate::facts::Fact;
use crate::fence::{Done, Fence};
use crate::pool::Held;
use crate::schedule::{BlockId, BoundaryId, LayerId, MicroBatch, Phase, Plan, Version, Visit};

/// An error of the outside.
pub type Trouble = Box<dyn std::error::Error + Send + Sync>;

/// An in-order queue of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Lane {
    /// Host to device, and stash to device.
    Upload,
    /// Kernels.
    Compute,
    /// Device to host, and device to stash.
    Download,
    /// Gather, loss, reduce, scatter.
    Host,
    /// Updates in the EPS.
    Update,
    /// Files under the EPS.
    File,
}

impl Lane {
    /// All lanes, in flow order.
    pub const ALL: [Lane; 6] =
        [Lane::Upload, Lane::Compute, Lane::Download, Lane::Host, Lane::Update, Lane::File];

    /// Its name in metrics and timelines.
    pub fn name(self) -> &'static str {
        ["upload", "compute", "download", "host", "update", "file"][self as usize]
    }
}

/// A boundary of a micro-batch and the slots it fills.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed {
    /// The boundary.
    pub boundary: BoundaryId,
    /// Slots of the input or the output pool, in order.
    pub slots: Vec<u32>,
}

/// Where an update finds its gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// In this landing block.
    Landing(u32),
    /// In the block's gradient region; with the EPS on file, in its copy beside the state.
    Region,
}

/// What an operation does, in slot numbers. Slots are of the pool the field is named after.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "each field is an id or a slot of that name")]
pub enum Work {
    /// File: reads a published block of this version into a slot on the host.
    ReadBlock { block: BlockId, version: Version, reads: u32 },
    /// Upload: copies a published block of this version into a weight slot, from memory or from
    /// where it was read to.
    UploadBlock { block: BlockId, version: Version, reads: Option<u32>, weights: u32 },
    /// Upload: copies a boundary from the stash into input slots.
    UploadBoundary { micro_batch: MicroBatch, inputs: Placed },
    /// Compute: one micro-batch of a device visit. Adds to each gradient, or replaces it where
    /// `first`. `weights` in the order of the visit's blocks.
    Compute {
        device_visit: usize,
        micro_batch: MicroBatch,
        weights: Vec<u32>,
        inputs: Vec<Placed>,
        outputs: Vec<Placed>,
        gradients: Vec<Accumulate>,
    },
    /// Download: copies a boundary from output slots into the stash.
    DownloadBoundary { micro_batch: MicroBatch, outputs: Placed },
    /// Download: copies a gradient into a landing block.
    DownloadGradient { block: BlockId, gradients: u32, reduced: u32 },
    /// Host: writes what a host visit writes for one micro-batch into the stash, from the batch
    /// and its blocks.
    Gather { visit: usize, micro_batch: MicroBatch },
    /// Host: the share of one of its blocks, as it was read, in what a host visit writes, for all
    /// micro-batches.
    GatherBlock { visit: usize, block: BlockId, reads: u32 },
    /// Host: the summed loss of one micro-batch. Value: that sum.
    Loss { visit: usize, micro_batch: MicroBatch },
    /// Host: replaces a block's gradient region with a landing block. Value: its sum of squares.
    Reduce { block: BlockId, reduced: u32 },
    /// Host: looks at a landing block. Value: its sum of squares.
    Measure { block: BlockId, reduced: u32 },
    /// Host: adds what a host visit reads, for all micro-batches in order, to one block's gradient
    /// (in its region, or in a landing block), or replaces it where `first`. Value: its sum of
    /// squares.
    Scatter { visit: usize, block: BlockId, first: bool, reduced: Option<u32> },
    /// File: reads a block's gradient region into a landing block.
    ReadRegion { block: BlockId, reduced: u32 },
    /// File: replaces a block's gradient region with a landing block.
    WriteRegion { block: BlockId, reduced: u32 },
    /// File: reads masters and optimizer state of a block into a slot on the host, and its gradient
    /// region where `region`.
    ReadState { block: BlockId, version: Version, states: u32, region: bool },
    /// Update: moves a block from `version` to the next, in memory (and publishes it), or where its
    /// state was read to. `norm` is the global gradient norm where updates wait for it. Value: the
    /// gradient's sum of squares.
    Update {
        block: BlockId,
        version: Version,
        gradient: Source,
        states: Option<u32>,
        norm: Option<f64>,
    },
    /// File: writes a block that was moved on from `version`, beside the one it was, and publishes
    /// it.
    WriteState { block: BlockId, version: Version, states: u32 },
    /// File: what was written until now is the state to go on from.
    Seal,
    /// Update: publishes the step's carried blocks, unchanged, as of the next version.
    Carry { version: Version },
}

/// One gradient accumulator of a compute operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accumulate {
    /// The block.
    pub block: BlockId,
    /// Its gradient slot.
    pub slot: u32,
    /// True for the first contribution of the step, which replaces what the slot held.
    pub first: bool,
}

impl Work {
    /// The lane it belongs on.
    pub fn lane(&self) -> Lane {
        match self {
            Work::UploadBlock { .. } | Work::UploadBoundary { .. } => Lane::Upload,
            Work::Compute { .. } => Lane::Compute,
            Work::DownloadBoundary { .. } | Work::DownloadGradient { .. } => Lane::Download,
            Work::Gather { .. }
            | Work::GatherBlock { .. }
            | Work::Loss { .. }
            | Work::Reduce { .. }
            | Work::Measure { .. }
            | Work::Scatter { .. } => Lane::Host,
            Work::Update { .. } | Work::Carry { .. } => Lane::Update,
            Work::ReadBlock { .. }
            | Work::ReadRegion { .. }
            | Work::WriteRegion { .. }
            | Work::ReadState { .. }
            | Work::WriteState { .. }
            | Work::Seal => Lane::File,
        }
    }

    /// Bytes it moves between host and device (or stash and device), or between host and file,
    /// under this plan; 0 for work that stays where it is.
    pub fn bytes(&self, plan: &Plan) -> u64 {
        match self {
            Work::UploadBlock { block, .. } => plan.schedule.block(*block).bytes,
            Work::DownloadGradient { block, .. } => plan.schedule.block(*block).gradient_bytes,
            Work::UploadBoundary { micro_batch, inputs: placed }
            | Work::DownloadBoundary { micro_batch, outputs: placed } => {
                plan.schedule.stashed_bytes(placed.boundary, *micro_batch)
            }
            // Masters are as many bytes as their gradient, whatever is published of them.
            Work::ReadBlock { block, .. }
            | Work::ReadRegion { block, .. }
            | Work::WriteRegion { block, .. } => plan.schedule.block(*block).gradient_bytes,
            Work::ReadState { block, region, .. } => {
                let block = plan.schedule.block(*block);
                block.state_bytes + if *region { block.gradient_bytes } else { 0 }
            }
            Work::WriteState { block, .. } => plan.schedule.block(*block).state_bytes,
            _ => 0,
        }
    }
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Work::ReadBlock { block, version, .. } => write!(f, "read of {block} v{version}"),
            Work::UploadBlock { block, version, .. } => write!(f, "upload of {block} v{version}"),
            Work::UploadBoundary { micro_batch, inputs } => {
                write!(f, "upload of {} of micro-batch {micro_batch}", inputs.boundary)
            }
            Work::Compute { micro_batch, .. } => write!(f, "compute of micro-batch {micro_batch}"),
            Work::DownloadBoundary { micro_batch, outputs } => {
                write!(f, "download of {} of micro-batch {micro_batch}", outputs.boundary)
            }
            Work::DownloadGradient { block, .. } => write!(f, "download of gradient of {block}"),
            Work::Gather { micro_batch, .. } => write!(f, "gather of micro-batch {micro_batch}"),
            Work::GatherBlock { block, .. } => write!(f, "gather from {block}"),
            Work::Loss { micro_batch, .. } => write!(f, "loss of micro-batch {micro_batch}"),
            Work::Reduce { block, .. } => write!(f, "reduce of {block}"),
            Work::Measure { block, .. } => write!(f, "measure of gradient of {block}"),
            Work::ReadRegion { block, .. } => write!(f, "read of gradient of {block}"),
            Work::WriteRegion { block, .. } => write!(f, "write of gradient of {block}"),
            Work::ReadState { block, version, .. } => {
                write!(f, "read of state of {block} v{version}")
            }
            Work::WriteState { block, version, .. } => {
                write!(f, "write of {block} v{}", version + 1)
            }
            Work::Seal => write!(f, "seal"),
            Work::Scatter { block, .. } => write!(f, "scatter into {block}"),
            Work::Update { block, version, .. } => write!(f, "update of {block} v{version}"),
            Work::Carry { version } => write!(f, "carry of v{version}"),
        }
    }
}

/// A step in flight: shared by all its operations.
#[derive(Debug)]
pub struct Step {
    /// Its number, and the version of every block it reads.
    pub number: Version,
    /// What it does.
    pub plan: Arc<Plan>,
}

/// What an actor orders from a lane.
#[derive(Debug)]
pub(crate) struct Order {
    pub(crate) step: Arc<Step>,
    pub(crate) layer: Option<LayerId>,
    pub(crate) phase: Option<Phase>,
    pub(crate) work: Work,
    pub(crate) waits: Vec<Fence>,
    pub(crate) holds: Vec<Held>,
    pub(crate) raises: Vec<Fact>,
    pub(crate) commits: bool,
}

impl Order {
    /// Of the step as a whole.
    pub(crate) fn new(step: &Arc<Step>, work: Work) -> Order {
        Order {
            step: step.clone(),
            layer: None,
            phase: None,
            work,
            waits: vec![],
            holds: vec![],
            raises: vec![],
            commits: false,
        }
    }

    /// For a visit.
    pub(crate) fn at(step: &Arc<Step>, visit: &Visit, work: Work) -> Order {
        let (layer, phase) = (Some(visit.layer), Some(visit.phase));
        Order { layer, phase, ..Order::new(step, work) }
    }

    /// For the gradient of a block that this layer meets first.
    pub(crate) fn gradient(step: &Arc<Step>, layer: Option<LayerId>, work: Work) -> Order {
        Order { layer, phase: Some(Phase::Backward), ..Order::new(step, work) }
    }
}

/// Queued work. A lane runs each once, in order: when [`ready`](Operation::ready), it does the
/// work and calls [`finish`](Operation::finish). Dropping one unfinished fails the ring.
#[derive(Debug)]
pub struct Operation {
    actor: ActorName,
    order: Order,
    fence: Fence,
    queued: Duration,
    after: Option<u64>,
    ring: Arc<Ring>,
    finished: bool,
}

impl Operation {
    pub(crate) fn new(
        actor: ActorName,
        order: Order,
        ring: Arc<Ring>,
        queued: Duration,
    ) -> (Operation, Fence) {
        let after = ring.last_finished();
        let fence = Fence::new(ring.enqueued(actor, &order));
        let made = fence.clone();
        (Operation { actor, order, fence, queued, after, ring, finished: false }, made)
    }

    /// Its number, unique in its relay; its fence has the same.
    pub fn number(&self) -> u64 {
        self.fence.operation()
    }

    /// What is reached when it is finished.
    pub fn fence(&self) -> &Fence {
        &self.fence
    }

    /// Who queued it.
    pub fn actor(&self) -> ActorName {
        self.actor
    }

    /// The step it belongs to.
    pub fn step(&self) -> &Arc<Step> {
        &self.order.step
    }

    /// The layer it serves, if one.
    pub fn layer(&self) -> Option<LayerId> {
        self.order.layer
    }

    /// The phase of the visit it serves, if one.
    pub fn phase(&self) -> Option<Phase> {
        self.order.phase
    }

    /// When it was queued, and the operation that had ended last by then.
    pub fn queued(&self) -> (Duration, Option<u64>) {
        (self.queued, self.after)
    }

    /// What to do.
    pub fn work(&self) -> &Work {
        &self.order.work
    }

    /// The operations that come first, on any lane.
    pub fn waits(&self) -> &[Fence] {
        &self.order.waits
    }

    /// True for an update of a step whose norm is known: it runs even when the ring is ending.
    pub fn commits(&self) -> bool {
        self.order.commits
    }

    /// True when the ring is ending and the work must not be started (or go on, if it is long).
    /// What [commits](Operation::commits) is never cancelled: half of a step would be torn.
    pub fn is_cancelled(&self) -> bool {
        !self.order.commits && self.ring.switch.tripped()
    }

    /// Waits until the work may begin. False: it is cancelled; drop the operation.
    pub async fn ready(&self) -> bool {
        self.unless_cancelled(async {
            for fence in &self.order.waits {
                fence.wait().await;
            }
        })
        .await
    }

    /// Waits until the work may be handed to a device that keeps the order itself: all it waits on is
    /// done, or was [issued](Operation::issued). False: as [`ready`](Operation::ready).
    pub async fn issuable(&self) -> bool {
        self.unless_cancelled(async {
            for fence in &self.order.waits {
                fence.issued().await;
            }
        })
        .await
    }

    /// Says that the work is in a device's hands, and that others that wait on it may be, too.
    pub fn issued(&self) {
        self.fence.issue();
    }

    async fn unless_cancelled(&self, all: impl Future<Output = ()>) -> bool {
        if self.order.commits {
            all.await;
            return true;
        }
        self.ring.switch.until_tripped(all).await.is_some() && !self.is_cancelled()
    }

    /// Tells the watchdog that the work has begun.
    pub fn begun(&self) {
        self.ring.begun(self.number());
    }

    /// Tells the watchdog that the work goes on: for what may take longer than its patience.
    pub fn still_runs(&self) {
        self.ring.still_runs();
    }

    /// Ends it. Success reaches the fence, raises its facts and lets go of its slots; an error
    /// trips the kill switch.
    pub fn finish(mut self, result: Result<Done, Problem>) {
        self.finished = true;
        match result {
            Ok(done) => {
                self.ring.finished(self.number());
                for fact in &self.order.raises {
                    self.ring.facts.raise(fact);
                }
                self.fence.reach(done);
            }
            Err(problem) => self.fail(problem),
        }
    }

    fn fail(&self, problem: Problem) {
        self.ring.failed(self.number());
        let Order { layer, work, .. } = &self.order;
        let operation = work.to_string();
        self.ring.switch.trip(Cause { actor: self.actor, layer: *layer, operation, problem });
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        if !self.finished {
            self.fail(Problem::Error("the lane dropped it unfinished".into()));
        }
    }
}

/// Where actors queue work.
#[async_trait]
pub trait Lanes: Send + Sync + 'static {
    /// Queues an operation on the lane its work belongs on. Does not wait.
    fn queue(&self, operation: Operation);

    /// Time since an origin of its own.
    fn now(&self) -> Duration;

    /// No more operations will be queued: lanes end when they have run or dropped what they have.
    fn close(&self);

    /// Waits until every lane has ended.
    async fn closed(&self);
}

/// Lanes, and the data of each step.
pub trait Ports: Lanes {
    /// What a step trains on; the actors never see it.
    type Batch: Send + 'static;

    /// Takes the data of a step before any of its operations is queued.
    fn begin(&self, step: &Arc<Step>, batch: Self::Batch);
}
