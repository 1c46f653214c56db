//! Updates blocks and publishes them; knows a step's loss and norm.
//!
//! *Eager*: each block as soon as its gradient is complete. *Deferred*: all blocks once the norm
//! is known, in forward order, just ahead of the next step's Prefetcher. From that moment the
//! updates are committed: they are queued in one go, need nothing but the host, and lanes run
//! them even when the ring is ending. So a deferred step either changes nothing or everything.
//!
//! *With the EPS on file* a block's state is read to a slot, updated there and written beside what it
//! was, one read ahead of the update that runs; a step's end is sealed behind its last write.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;

use crate::crew::{Actor, Desk};
use crate::facts::Fact;
use crate::fence::Fence;
use crate::mailbox::{Inbox, Outbox};
use crate::messages::{Flow, Reduced, Resolved};
use crate::pool::{Content, Held, Pool};
use crate::ports::{Lane, Order, Source, Step, Trouble, Work};
use crate::reducer::layer_of;
use crate::schedule::BlockId;

pub(crate) struct Optimizer {
    pub(crate) desk: Desk,
    pub(crate) reduced: Inbox<Flow<Reduced>>,
    pub(crate) resolved: Outbox<Resolved>,
    /// True when updates wait for the norm.
    pub(crate) deferred: bool,
    /// With the EPS on file: slots for blocks with their states.
    pub(crate) state_slots: Pool,
    /// And the update that runs in one, whose block is to be written.
    pub(crate) updating: Option<Updating>,
}

/// A block that is moved on in a slot.
pub(crate) struct Updating {
    block: BlockId,
    states: Held,
    updated: Fence,
}

#[async_trait]
impl Actor for Optimizer {
    async fn run(&mut self) -> Result<(), Trouble> {
        loop {
            match self.desk.recv(&mut self.reduced, None).await? {
                Flow::Begin(step) => self.walk(&step).await?,
                Flow::Stop => return Ok(()),
                Flow::Datum(_) | Flow::End(_) => unreachable!("the walk takes all gradients"),
            }
        }
    }
}

impl Optimizer {
    async fn walk(&mut self, step: &Arc<Step>) -> Result<(), Trouble> {
        let mut losses = Vec::new();
        let mut squares = BTreeMap::new(); // block -> whose value is its sum of squares
        let last = loop {
            match self.desk.recv(&mut self.reduced, None).await? {
                Flow::Datum(Reduced::Loss(fence)) => losses.push(fence),
                Flow::Datum(Reduced::Gradient { block, landing, reduced }) => {
                    let measured = if self.deferred {
                        reduced
                    } else if step.plan.pools.is_on_file() {
                        self.update_on_file(step, block, landing, vec![reduced], None).await?
                    } else {
                        self.update(step, block, landing, vec![reduced], None)
                    };
                    squares.insert(block, measured);
                }
                Flow::End(last) => break last,
                Flow::Begin(_) | Flow::Stop => unreachable!("a step ends before anything else"),
            }
        };
        // In micro-batch order and in block order, whatever order they came in.
        let loss = self.sum(Lane::Host, losses).await?;
        let lane = if self.deferred { Lane::Host } else { Lane::Update };
        let norm = self.sum(lane, squares.into_values()).await?.sqrt();
        self.desk.fence(Lane::Compute, &last, None).await?;
        let resolved = Resolved { step: step.number, loss, norm };
        if step.plan.pools.is_on_file() {
            return self.end_on_file(step, resolved).await;
        }
        // No wait from here on: what is committed is queued whole.
        if self.deferred {
            for &block in &step.plan.updates {
                self.update(step, block, None, Vec::new(), Some(norm));
            }
        }
        self.carry(step);
        self.desk.resolves();
        self.resolved.send(resolved);
        Ok(())
    }

    /// The rest of a step on file. Updates that waited for the norm come as slots allow, under the
    /// next step: what was sealed before is whole on file until all of it is there.
    async fn end_on_file(&mut self, step: &Arc<Step>, resolved: Resolved) -> Result<(), Trouble> {
        self.carry(step);
        self.desk.resolves();
        self.resolved.send(resolved);
        let late = if self.deferred { &step.plan.updates[..] } else { &[] };
        for &block in late {
            self.update_on_file(step, block, None, Vec::new(), Some(resolved.norm)).await?;
        }
        self.write(step).await?;
        if !step.plan.updates.is_empty() {
            self.desk.queue(Order::new(step, Work::Seal));
        }
        Ok(())
    }

    /// Reads a block's state, and has it updated there. The one before is written behind this read,
    /// once its update has ended: the lane of files waits for nobody.
    async fn update_on_file(
        &mut self,
        step: &Arc<Step>,
        block: BlockId,
        landing: Option<Held>,
        waits: Vec<Fence>,
        norm: Option<f64>,
    ) -> Result<Fence, Trouble> {
        let (version, layer) = (step.number, layer_of(step, block));
        let content = Content::Block(block, version);
        let held = self.desk.acquire(&mut self.state_slots, 1, content, layer).await?;
        let states = held.into_iter().next().expect("one slot was asked for");
        let (slot, region) = (states.slot(content), landing.is_none());
        let work = Work::ReadState { block, version, states: slot, region };
        let read = self.desk.queue(Order::gradient(step, layer, work));
        self.write(step).await?;
        let mut order = self.order(step, block, landing, waits, norm);
        if let Work::Update { states, .. } = &mut order.work {
            *states = Some(slot);
        }
        order.waits.push(read);
        let updated = self.desk.queue(order);
        self.updating = Some(Updating { block, states, updated: updated.clone() });
        Ok(updated)
    }

    /// Writes the block that was updated last, unless it was.
    async fn write(&mut self, step: &Arc<Step>) -> Result<(), Trouble> {
        let Some(Updating { block, states, updated }) = self.updating.take() else { return Ok(()) };
        let (version, layer) = (step.number, layer_of(step, block));
        self.desk.fence(Lane::Update, &updated, layer).await?;
        let slot = states.slot(Content::Block(block, version));
        let mut order =
            Order::gradient(step, layer, Work::WriteState { block, version, states: slot });
        order.holds = vec![states];
        order.raises = vec![Fact::Updated(block, version + 1)];
        self.desk.queue(order);
        Ok(())
    }

    fn update(
        &self,
        step: &Arc<Step>,
        block: BlockId,
        landing: Option<Held>,
        waits: Vec<Fence>,
        norm: Option<f64>,
    ) -> Fence {
        let mut order = self.order(step, block, landing, waits, norm);
        order.raises = vec![Fact::Updated(block, step.number + 1)];
        order.commits = self.deferred;
        self.desk.queue(order)
    }

    fn order(
        &self,
        step: &Arc<Step>,
        block: BlockId,
        landing: Option<Held>,
        waits: Vec<Fence>,
        norm: Option<f64>,
    ) -> Order {
        let version = step.number;
        let gradient = match &landing {
            Some(held) => Source::Landing(held.slot(Content::Gradient(block, version))),
            None => Source::Region,
        };
        let work = Work::Update { block, version, gradient, states: None, norm };
        let mut order = Order::gradient(step, layer_of(step, block), work);
        order.waits = waits;
        order.holds = landing.into_iter().collect();
        order
    }

    /// Publishes the blocks nobody updated: after the last use of this version.
    fn carry(&self, step: &Arc<Step>) {
        let mut order = Order::new(step, Work::Carry { version: step.number });
        let carried = step.plan.carried.iter();
        order.raises = carried.map(|&block| Fact::Updated(block, step.number + 1)).collect();
        order.commits = true;
        self.desk.queue(order);
    }

    async fn sum(
        &mut self,
        lane: Lane,
        fences: impl IntoIterator<Item = Fence>,
    ) -> Result<f64, Trouble> {
        let mut sum = 0.0;
        for fence in fences {
            sum += self.desk.fence(lane, &fence, None).await?.value;
        }
        Ok(sum)
    }
}
