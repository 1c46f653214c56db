//! The downloading side of the weight loop: lands gradients, joins what belongs together.
//!
//! It alone takes landing blocks. It walks the plan's list of reductions: device gradients as the
//! Executor closes them, and the host visits that read the stash (loss, scatter) once all of it
//! has landed. An untied gradient of an eager step goes on in its landing block; one that must
//! wait (for the norm, or for the embedding's share) is joined into its block's region first, so
//! that no landing block is ever held by something that waits. With the EPS on file regions are
//! there, too, written from landing blocks and read back into them.

use std::sync::Arc;

use async_trait::async_trait;

use crate::crew::{Actor, Desk};
use crate::fence::Fence;
use crate::mailbox::{Inbox, Outbox};
use crate::messages::{Flow, Gradients, Reduced};
use crate::pool::{Content, Held, Pool};
use crate::ports::{Lane, Order, Step, Trouble, Work};
use crate::schedule::{BlockId, LayerId, Reduction};

pub(crate) struct Reducer {
    pub(crate) desk: Desk,
    pub(crate) gradients: Inbox<Flow<Gradients>>,
    pub(crate) reduced: Outbox<Flow<Reduced>>,
    pub(crate) landing: Pool,
    /// True when updates wait for the norm.
    pub(crate) deferred: bool,
}

#[async_trait]
impl Actor for Reducer {
    async fn run(&mut self) -> Result<(), Trouble> {
        loop {
            match self.desk.recv(&mut self.gradients, None).await? {
                Flow::Begin(step) => self.walk(&step).await?,
                Flow::Stop => {
                    self.reduced.send(Flow::Stop);
                    return Ok(());
                }
                Flow::Datum(_) | Flow::End(_) => unreachable!("the walk takes all gradients"),
            }
        }
    }
}

impl Reducer {
    async fn walk(&mut self, step: &Arc<Step>) -> Result<(), Trouble> {
        self.reduced.send(Flow::Begin(step.clone()));
        for reduction in &step.plan.reductions {
            match *reduction {
                Reduction::Gradient { block, joins } => self.land(step, block, joins).await?,
                Reduction::Loss { visit } => self.loss(step, visit).await?,
                Reduction::Scatter { visit } => self.scatter(step, visit).await?,
            }
        }
        let Flow::End(last) = self.desk.recv(&mut self.gradients, None).await? else {
            unreachable!("the walk takes all gradients");
        };
        self.reduced.send(Flow::End(last));
        Ok(())
    }

    async fn land(&mut self, step: &Arc<Step>, block: BlockId, joins: bool) -> Result<(), Trouble> {
        let layer = layer_of(step, block);
        let Flow::Datum(closed) = self.desk.recv(&mut self.gradients, layer).await? else {
            unreachable!("the plan closes this gradient");
        };
        assert_eq!(closed.block, block, "gradients close in the order of visits");
        let content = Content::Gradient(block, step.number);
        let held = self.desk.acquire(&mut self.landing, 1, content, layer).await?;
        let landing = held.into_iter().next().expect("one slot was asked for");
        let (gradients, reduced) = (closed.gradient.slot(content), landing.slot(content));
        let work = Work::DownloadGradient { block, gradients, reduced };
        let mut order = Order::gradient(step, layer, work);
        order.waits = vec![closed.computed];
        order.holds = vec![closed.gradient];
        let landed = self.desk.queue(order);
        let on_file = step.plan.pools.is_on_file();
        if !joins && !self.deferred {
            let landing = Some(landing);
            self.reduced.send(Flow::Datum(Reduced::Gradient { block, landing, reduced: landed }));
            return Ok(());
        }
        let reduced = if on_file {
            let mut measured = landed;
            if !joins {
                let mut order = Order::gradient(step, layer, Work::Measure { block, reduced });
                order.waits = vec![measured];
                measured = self.desk.queue(order);
            }
            self.store(step, layer, block, landing, &measured).await?;
            measured
        } else {
            let mut order = Order::gradient(step, layer, Work::Reduce { block, reduced });
            order.waits = vec![landed];
            order.holds = vec![landing];
            self.desk.queue(order)
        };
        if !joins {
            self.reduced.send(Flow::Datum(Reduced::Gradient { block, landing: None, reduced }));
        }
        Ok(())
    }

    /// Puts a landing block into its region on file, once it holds what it is to hold: the lane of
    /// files waits for nobody.
    async fn store(
        &mut self,
        step: &Arc<Step>,
        layer: Option<LayerId>,
        block: BlockId,
        landing: Held,
        complete: &Fence,
    ) -> Result<(), Trouble> {
        self.desk.fence(Lane::Host, complete, layer).await?;
        let reduced = landing.slot(Content::Gradient(block, step.number));
        let mut order = Order::gradient(step, layer, Work::WriteRegion { block, reduced });
        order.holds = vec![landing];
        self.desk.queue(order);
        Ok(())
    }

    async fn loss(&mut self, step: &Arc<Step>, index: usize) -> Result<(), Trouble> {
        self.all_stashed(step, index).await?;
        let visit = &step.plan.schedule.visits[index];
        for micro_batch in visit.micro_batches.clone() {
            let work = Work::Loss { visit: index, micro_batch };
            let fence = self.desk.queue(Order::at(step, visit, work));
            self.reduced.send(Flow::Datum(Reduced::Loss(fence)));
        }
        Ok(())
    }

    async fn scatter(&mut self, step: &Arc<Step>, index: usize) -> Result<(), Trouble> {
        self.all_stashed(step, index).await?;
        let schedule = &step.plan.schedule;
        let visit = &schedule.visits[index];
        for &block in visit.blocks().iter().filter(|&&id| !schedule.block(id).frozen) {
            let joined =
                |r: &Reduction| matches!(r, Reduction::Gradient { block: b, .. } if *b == block);
            // Its region may still feed the update of the step before.
            let version = step.number;
            let updated = async |facts: &crate::facts::Facts| facts.updated(block, version).await;
            self.desk.fact(Content::Block(block, version), Some(visit.layer), updated).await?;
            let first = !step.plan.reductions.iter().any(joined);
            let (landing, reduced) = if step.plan.pools.is_on_file() {
                self.scatter_landed(step, index, block, first).await?
            } else {
                let work = Work::Scatter { visit: index, block, first, reduced: None };
                (None, self.desk.queue(Order::at(step, visit, work)))
            };
            self.reduced.send(Flow::Datum(Reduced::Gradient { block, landing, reduced }));
        }
        Ok(())
    }

    /// A scatter whose block's region is on file: into a landing block, in which the gradient goes on
    /// unless it must wait for the norm.
    async fn scatter_landed(
        &mut self,
        step: &Arc<Step>,
        index: usize,
        block: BlockId,
        first: bool,
    ) -> Result<(Option<Held>, Fence), Trouble> {
        let visit = &step.plan.schedule.visits[index];
        let (content, layer) = (Content::Gradient(block, step.number), Some(visit.layer));
        let held = self.desk.acquire(&mut self.landing, 1, content, layer).await?;
        let landing = held.into_iter().next().expect("one slot was asked for");
        let reduced = landing.slot(content);
        let work = Work::Scatter { visit: index, block, first, reduced: Some(reduced) };
        let mut order = Order::at(step, visit, work);
        if !first {
            let read = Order::at(step, visit, Work::ReadRegion { block, reduced });
            order.waits.push(self.desk.queue(read));
        }
        let scattered = self.desk.queue(order);
        if !self.deferred {
            return Ok((Some(landing), scattered));
        }
        self.store(step, layer, block, landing, &scattered).await?;
        Ok((None, scattered))
    }

    /// Waits until all that a host visit reads has landed.
    async fn all_stashed(&mut self, step: &Arc<Step>, index: usize) -> Result<(), Trouble> {
        let visit = &step.plan.schedule.visits[index];
        for m in visit.micro_batches.clone() {
            let content = Content::Boundary(visit.reads[0], m);
            let landed = async |facts: &crate::facts::Facts| facts.stashed(&visit.reads, m).await;
            self.desk.fact(content, Some(visit.layer), landed).await?;
        }
        Ok(())
    }
}

/// The first layer that meets a block, to name it in reports.
pub(crate) fn layer_of(step: &Step, block: BlockId) -> Option<LayerId> {
    let visits = &step.plan.schedule.visits;
    visits.iter().find(|visit| visit.blocks().contains(&block)).map(|visit| visit.layer)
}
