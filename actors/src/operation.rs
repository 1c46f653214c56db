//! An operation: work that an actor has queued, from its order to its end.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use crate::cause::{Cause, Problem};
use crate::facts::Fact;
use crate::fence::{Done, Fence};
use crate::messages::Staged;
use crate::names::ActorName;
use crate::pool::Held;
use crate::ring::{Queued, Ring};
use crate::schedule::{BlockId, DeviceId, LayerId, Phase, StepPlan, Version, Visit};
use crate::work::{Queue, Work};

/// A step in flight: shared by all its operations.
#[derive(Debug)]
pub struct Step {
    /// The number of the step among all steps of its ring.
    pub number: Version,
    /// The newest version of every block when the step began. One that trains makes the next.
    pub version: Version,
    /// The version of every block that it reads: the newest, or with a delay the one before.
    pub reads: Version,
    /// The versions of a block that are published at a time: with a delay 2, else 1.
    pub copies: u64,
    /// The plan that its actors walk.
    pub plan: Arc<StepPlan>,
    /// The first layer that needs each block, to name it in reports.
    pub(crate) layers: Vec<Option<LayerId>>,
}

impl Step {
    /// The version of a block that an update of this batch's gradient moves on. It names the
    /// gradient, too. In a step of one batch, the batch is 0.
    pub(crate) fn version_of(&self, batch: u32) -> Version {
        self.version + u64::from(batch)
    }

    /// The version that a visit reads, if it is `ahead` updates [ahead](Visit::ahead).
    pub fn version_read(&self, ahead: u32) -> Version {
        match self.plan.schedule.in_batches {
            true => self.plan.schedule.version_read(self.version, ahead),
            false => self.reads,
        }
    }

    /// The version that the gradient of a visit's batch moves on.
    pub(crate) fn gradient_of(&self, visit: &Visit) -> Version {
        self.version_of(self.plan.schedule.batch_of(visit.micro_batches.start))
    }

    /// The first layer that needs a block.
    pub(crate) fn layer_of(&self, block: BlockId) -> Option<LayerId> {
        self.layers[block.0 as usize]
    }
}

/// For each block of a plan, the first layer that needs it.
pub(crate) fn layers_of(plan: &StepPlan) -> Vec<Option<LayerId>> {
    let mut layers = vec![None; plan.schedule.blocks.len()];
    for visit in &plan.schedule.visits {
        for block in &visit.blocks {
            layers[block.0 as usize].get_or_insert(visit.layer);
        }
    }
    layers
}

/// Work that an actor queues on a lane, with what it waits for, holds and raises.
#[derive(Debug)]
pub(crate) struct Order {
    pub(crate) step: Arc<Step>,
    pub(crate) device: Option<DeviceId>,
    pub(crate) layer: Option<LayerId>,
    pub(crate) phase: Option<Phase>,
    pub(crate) work: Work,
    pub(crate) waits: Vec<Fence>,
    pub(crate) holds: Vec<Held>,
    pub(crate) raises: Vec<Fact>,
    pub(crate) commits: bool,
}

impl Order {
    /// An order for the step as a whole.
    pub(crate) fn new(step: &Arc<Step>, work: Work) -> Order {
        Order {
            step: step.clone(),
            device: None,
            layer: None,
            phase: None,
            work,
            waits: vec![],
            holds: vec![],
            raises: vec![],
            commits: false,
        }
    }

    fn queue(&self) -> Queue {
        let lane = self.work.lane();
        Queue { lane, device: self.device.filter(|_| lane.is_of_device()) }
    }

    /// An order for a visit.
    pub(crate) fn at(step: &Arc<Step>, visit: &Visit, work: Work) -> Order {
        let layer = Some(visit.layer);
        let phase = Some(visit.phase);
        Order { device: visit.device(), layer, phase, ..Order::new(step, work) }
    }

    /// Makes the order wait for a staged master and hold its slot, if there is one.
    pub(crate) fn of_staged(mut self, staged: Option<Staged>) -> Order {
        if let Some(Staged { slot, arrived, .. }) = staged {
            self.waits.push(arrived);
            self.holds.push(slot);
        }
        self
    }

    /// An order for the gradient of a block that this layer is the first to meet.
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
        let Order { layer, ref work, commits, .. } = order;
        let queue = order.queue();
        let row = work.row();
        let number = ring.enqueued(Queued { actor, layer, queue, row, commits, begun: false });
        let fence = Fence::new(number);
        let made = fence.clone();
        (Operation { actor, order, fence, queued, after, ring, finished: false }, made)
    }

    /// The number of the operation, unique in its relay. Its fence has the same number.
    pub fn number(&self) -> u64 {
        self.fence.operation()
    }

    pub(crate) fn ring(&self) -> &Arc<Ring> {
        &self.ring
    }

    /// The fence that is reached when it is finished.
    pub fn fence(&self) -> &Fence {
        &self.fence
    }

    /// The actor that queued it.
    pub fn actor(&self) -> ActorName {
        self.actor
    }

    /// The step that it belongs to.
    pub fn step(&self) -> &Arc<Step> {
        &self.order.step
    }

    /// The layer that it serves, if it serves one.
    pub fn layer(&self) -> Option<LayerId> {
        self.order.layer
    }

    /// The phase of the visit that it serves, if it serves one.
    pub fn phase(&self) -> Option<Phase> {
        self.order.phase
    }

    /// The time at which it was queued, and the operation that had ended last by then.
    pub fn queued(&self) -> (Duration, Option<u64>) {
        (self.queued, self.after)
    }

    /// The device that it is for; `None`: the host.
    pub fn device(&self) -> Option<DeviceId> {
        self.order.device
    }

    /// The queue it belongs in.
    pub fn queue(&self) -> Queue {
        self.order.queue()
    }

    /// The work to do.
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

    /// True when the ring is ending and the work must not be started (or continued, if it is
    /// long). What [commits](Operation::commits) is never cancelled: half of a step would be torn.
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

    /// Waits until the work may be handed to a device that keeps the order itself: all it waits on
    /// is done, or was [issued](Operation::issued). False: as [`ready`](Operation::ready).
    pub async fn issuable(&self) -> bool {
        self.unless_cancelled(async {
            for fence in &self.order.waits {
                fence.issued().await;
            }
        })
        .await
    }

    /// Says that the device has the work, so that the device may be handed work that waits on it.
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

    /// Tells the watchdog that the work is still running: for what may take longer than its
    /// patience.
    pub fn still_runs(&self) {
        self.ring.moves();
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
        let operation = self.ring.named(self.actor, self.queue(), work.row());
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
