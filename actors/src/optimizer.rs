//! Updates blocks and publishes them; knows a step's loss and norm.
//!
//! *Eager*: each block as soon as its gradient is complete. *Deferred*: all blocks once the norm is
//! known, in forward order, just ahead of the next step's Prefetcher; with a delay in the order in
//! which the next step's Reducer needs the regions. Updates in memory are
//! committed from that moment: they are queued in one go, need nothing but the host, and lanes run
//! them even when the ring is ending. So a deferred step in memory changes either nothing or
//! everything.
//!
//! The state of a staged block is read to a slot, updated there, and written beside its old version
//! on file, one read ahead of the update that runs. A step's end is sealed behind its last write.
//! Until then the state that was sealed before is whole on file.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;

use crate::cause::BoxedError;
use crate::context::Context;
use crate::facts::Fact;
use crate::fence::Fence;
use crate::mailbox::{Inbox, Outbox};
use crate::messages::{Flow, Reduced, Resolved};
use crate::operation::{Order, Step};
use crate::pool::{Content, Held, Pool};
use crate::schedule::{BlockId, Reduction, Version};
use crate::task::Actor;
use crate::work::{GradientAt, Lane, MasterAt, Stored, Summed, Work};

pub(crate) struct Optimizer {
    pub(crate) context: Context,
    pub(crate) reduced: Inbox<Flow<Reduced>>,
    pub(crate) resolved: Outbox<Resolved>,
    /// True when updates wait for the norm.
    pub(crate) deferred: bool,
    /// Staging slots for blocks with their states.
    pub(crate) state_slots: Pool,
    /// The staged block that is being updated, and is to be written behind its update.
    pub(crate) updating: Option<Updating>,
    /// The seal of the last step whose blocks are staged.
    pub(crate) sealed: Option<Fence>,
}

/// A staged block that is being updated in its slot.
pub(crate) struct Updating {
    block: BlockId,
    state: Held,
    updated: Fence,
}

/// A gradient whose sum is on the host, or will be there when the fences are reached.
#[derive(Default)]
struct Complete {
    /// The landing block that holds it; `None`: its gradient region.
    landing: Option<Held>,
    waits: Vec<Fence>,
    /// The global norm, where the update waited for it.
    norm: Option<f64>,
}

#[async_trait]
impl Actor for Optimizer {
    async fn run(&mut self) -> Result<(), BoxedError> {
        while let Some(step) = self.context.next_step(&mut self.reduced).await? {
            self.walk(&step).await?;
        }
        Ok(())
    }
}

impl Optimizer {
    async fn walk(&mut self, step: &Arc<Step>) -> Result<(), BoxedError> {
        let mut losses = Vec::new();
        // By block and version: the fence that reports the sum of squares.
        let mut squares = BTreeMap::new();
        let ends = loop {
            match self.context.recv(&mut self.reduced, None).await? {
                Flow::Datum(Reduced::Loss(fence)) => losses.push(fence),
                Flow::Datum(Reduced::Gradient { block, version, reduced, .. }) if self.deferred => {
                    squares.insert((block, version), reduced);
                }
                Flow::Datum(Reduced::Gradient { block, version, landing, reduced, measured }) => {
                    let waits = [reduced].into_iter().chain(measured).collect();
                    let complete = Complete { landing, waits, norm: None };
                    let updated = self.update(step, block, version, complete).await?;
                    squares.insert((block, version), updated);
                }
                Flow::End(ends) => break ends,
                Flow::Begin(_) | Flow::Stop => unreachable!("a step ends before anything else"),
            }
        };
        // A step ends when the state before it is sealed. So of several processes none writes over
        // a state that another one may have to go back to.
        if let Some(sealed) = self.sealed.take() {
            self.context.fence(Lane::File, &sealed, None).await?;
        }
        // In micro-batch order and in block order, so that the sums do not depend on timing.
        let lane = if self.deferred { Lane::Host } else { Lane::Update };
        let [loss, squares] = if step.plan.schedule.ranks.count == 1 {
            [self.sum(Lane::Host, losses).await?, self.sum(lane, squares.into_values()).await?]
        } else {
            self.sum_over_ranks(step, losses, squares.into_values().collect()).await?
        };
        let norm = squares.sqrt();
        for end in &ends {
            self.context.fence(Lane::Compute, end, None).await?;
        }
        self.end(step, Resolved { step: step.number, loss, norm }).await
    }

    /// Resolves a step, and queues the updates that waited for its norm. In memory nothing here
    /// waits, so all of them are queued or none; those of staged blocks come as slots allow, under
    /// the next step.
    async fn end(&mut self, step: &Arc<Step>, resolved: Resolved) -> Result<(), BoxedError> {
        if step.plan.schedule.trains {
            self.carry(step).await?;
        }
        self.context.resolves();
        self.resolved.send(resolved);
        let updates = &step.plan.updates;
        let late = match (self.deferred, step.copies) {
            (false, _) => Vec::new(),
            (true, 1) => updates.clone(),
            // The next step needs regions before it needs weights.
            (true, _) => by_region(step),
        };
        for block in late {
            let norm = Some(resolved.norm);
            let complete = Complete { norm, ..Complete::default() };
            self.update(step, block, step.version, complete).await?;
        }
        self.store(step).await?;
        if updates.iter().any(|&id| step.plan.schedule.block(id).staged) {
            self.sealed = Some(self.context.queue(Order::new(step, Work::Seal)));
        }
        Ok(())
    }

    /// Queues the update of a block, and returns the fence that reports the gradient's sum of
    /// squares. In memory, the update ends the block's step. The state of a staged block is read
    /// before the update and written behind it.
    async fn update(
        &mut self,
        step: &Arc<Step>,
        block: BlockId,
        version: Version,
        complete: Complete,
    ) -> Result<Fence, BoxedError> {
        if step.plan.schedule.block(block).staged {
            return self.update_staged(step, block, complete).await;
        }
        let mut order = order(step, block, version, MasterAt::Memory, complete);
        order.raises = vec![Fact::Updated(block, version + 1)];
        order.commits = self.deferred;
        Ok(self.context.queue(order))
    }

    /// Reads a block's state, and has it updated there. The block before is written behind this
    /// read, once its update has ended, because the lane of files must not wait.
    async fn update_staged(
        &mut self,
        step: &Arc<Step>,
        block: BlockId,
        mut complete: Complete,
    ) -> Result<Fence, BoxedError> {
        let version = step.version;
        let layer = step.layer_of(block);
        let content = Content::Block(block, version);
        let state = self.context.acquire(&mut self.state_slots, content, layer).await?;
        let slot = state.slot(content);
        let stored = Stored::State { with_gradient: complete.landing.is_none() };
        let work = Work::Stage { block, version, stored, slot };
        complete.waits.push(self.context.queue(Order::gradient(step, layer, work)));
        self.store(step).await?;
        let order = order(step, block, version, MasterAt::Slot(slot), complete);
        let updated = self.context.queue(order);
        self.updating = Some(Updating { block, state, updated: updated.clone() });
        Ok(updated)
    }

    /// Writes the staged block that was updated last, unless that was done.
    async fn store(&mut self, step: &Arc<Step>) -> Result<(), BoxedError> {
        let Some(Updating { block, state, updated }) = self.updating.take() else { return Ok(()) };
        let version = step.version;
        let layer = step.layer_of(block);
        self.context.fence(Lane::Update, &updated, layer).await?;
        let slot = state.slot(Content::Block(block, version));
        let stored = Stored::State { with_gradient: false };
        let work = Work::Store { block, version, stored, slot };
        let mut order = Order::gradient(step, layer, work);
        order.holds = vec![state];
        order.raises = vec![Fact::Updated(block, version + 1)];
        self.context.queue(order);
        Ok(())
    }

    /// Publishes the blocks that nothing updated, after the last use of this version. The write of
    /// a staged block of the step before may still be on its way.
    async fn carry(&mut self, step: &Arc<Step>) -> Result<(), BoxedError> {
        let is_staged = |id: &&BlockId| step.plan.schedule.block(**id).staged;
        for &block in step.plan.carried.iter().filter(is_staged) {
            self.context.published(block, step.version, step.layer_of(block)).await?;
        }
        // Of a step in batches, once for each.
        for version in (0..step.plan.schedule.batches()).map(|batch| step.version_of(batch)) {
            let mut order = Order::new(step, Work::Carry { version });
            let carried = step.plan.carried.iter();
            order.raises = carried.map(|&block| Fact::Updated(block, version + 1)).collect();
            order.commits = true;
            self.context.queue(order);
        }
        Ok(())
    }

    async fn sum_over_ranks(
        &mut self,
        step: &Arc<Step>,
        losses: Vec<Fence>,
        squares: Vec<Fence>,
    ) -> Result<[f64; 2], BoxedError> {
        let queued = [(Summed::Losses, losses), (Summed::Squares, squares)].map(|(of, waits)| {
            self.context.queue(Order { waits, ..Order::new(step, Work::AllReduce { of }) })
        });
        let mut sums = [0.0; 2];
        for (sum, fence) in sums.iter_mut().zip(&queued) {
            *sum = self.context.fence(Lane::Exchange, fence, None).await?.value;
        }
        Ok(sums)
    }

    async fn sum(
        &mut self,
        lane: Lane,
        fences: impl IntoIterator<Item = Fence>,
    ) -> Result<f64, BoxedError> {
        let mut sum = 0.0;
        for fence in fences {
            sum += self.context.fence(lane, &fence, None).await?.value;
        }
        Ok(sum)
    }
}

/// The updated blocks in the order in which a step needs their regions.
fn by_region(step: &Step) -> Vec<BlockId> {
    let mut left = step.plan.updates.clone();
    let mut in_order = Vec::new();
    for reduction in &step.plan.reductions {
        let blocks: &[BlockId] = match reduction {
            Reduction::Gradient { portion, .. } => std::slice::from_ref(&portion.block),
            Reduction::Scatter { visit } => &step.plan.schedule.visits[*visit].blocks,
            _ => &[],
        };
        in_order.extend(left.extract_if(.., |block| blocks.contains(block)));
    }
    in_order
}

/// The update of a block whose master is at this place.
fn order(
    step: &Arc<Step>,
    block: BlockId,
    version: Version,
    master: MasterAt,
    complete: Complete,
) -> Order {
    let Complete { landing, waits, norm } = complete;
    let gradient = match &landing {
        Some(held) => GradientAt::Landing(held.slot(Content::Gradient(block.into(), version))),
        None => GradientAt::Region,
    };
    let work = Work::Update { block, version, master, gradient, norm };
    let mut order = Order::gradient(step, step.layer_of(block), work);
    order.waits = waits;
    order.holds = landing.into_iter().collect();
    order
}
