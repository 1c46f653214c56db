//! Updates blocks and publishes them; knows a step's loss and norm.
//!
//! *Eager*: each block as soon as its gradient is complete. *Deferred*: all blocks once the norm
//! is known, in forward order, just ahead of the next step's Prefetcher. From that moment the
//! updates are committed: they are queued in one go, need nothing but the host, and lanes run
//! them even when the ring is ending. So a deferred step either changes nothing or everything.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;

use crate::crew::{Actor, Desk};
use crate::facts::Fact;
use crate::fence::Fence;
use crate::mailbox::{Inbox, Outbox};
use crate::messages::{Flow, Reduced, Resolved};
use crate::pool::{Content, Held};
use crate::ports::{Lane, Order, Source, Step, Trouble, Work};
use crate::reducer::layer_of;
use crate::schedule::BlockId;

pub(crate) struct Optimizer {
    pub(crate) desk: Desk,
    pub(crate) reduced: Inbox<Flow<Reduced>>,
    pub(crate) resolved: Outbox<Resolved>,
    /// True when updates wait for the norm.
    pub(crate) deferred: bool,
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
        // No wait from here on: what is committed is queued whole.
        if self.deferred {
            for &block in &step.plan.updates {
                self.update(step, block, None, Vec::new(), Some(norm));
            }
        }
        self.carry(step);
        self.desk.resolves();
        self.resolved.send(Resolved { step: step.number, loss, norm });
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
        let version = step.number;
        let gradient = match &landing {
            Some(held) => Source::Landing(held.slot(Content::Gradient(block, version))),
            None => Source::Region,
        };
        let work = Work::Update { block, version, gradient, norm };
        let mut order = Order::gradient(step, layer_of(step, block), work);
        order.waits = waits;
        order.holds = landing.into_iter().collect();
        order.raises = vec![Fact::Updated(block, version + 1)];
        order.commits = self.deferred;
        self.desk.queue(order)
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
