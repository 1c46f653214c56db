//! Fetches masters and gathers embeddings: walks the plan's one list of fetches.
//!
//! It alone takes from the pool of reads. A master is read from its file, or completed of the parts
//! of all processes, or both, as soon as its version is published and a slot is free. The slot goes
//! to the actor that uses the master: a Prefetcher for an upload, or the Fetcher for a gather. A
//! gather writes the first boundaries of a step into the stash.

use std::collections::VecDeque;
use std::sync::Arc;

use async_trait::async_trait;

use crate::cause::BoxedError;
use crate::context::Context;
use crate::facts::Fact;
use crate::mailbox::{Inbox, Outbox};
use crate::messages::{Flow, Staged};
use crate::operation::{Order, Step};
use crate::pool::{Content, Pool};
use crate::schedule::{BlockId, Fetch, MicroBatch, Share, Visit, uses};
use crate::task::Actor;
use crate::work::{Stored, Work};

pub(crate) struct Fetcher {
    pub(crate) context: Context,
    pub(crate) inbox: Inbox<Flow<()>>,
    /// One for each device.
    pub(crate) staged: Vec<Outbox<Flow<Staged>>>,
    pub(crate) read_slots: Pool,
    /// Masters that were read for gathers, in the order in which they are taken.
    pub(crate) gathered: VecDeque<Staged>,
}

#[async_trait]
impl Actor for Fetcher {
    async fn run(&mut self) -> Result<(), BoxedError> {
        while let Some(step) = self.context.next_step(&mut self.inbox).await? {
            self.walk(&step).await?;
        }
        self.staged.iter().for_each(|staged| staged.send(Flow::Stop));
        Ok(())
    }
}

impl Fetcher {
    async fn walk(&mut self, step: &Arc<Step>) -> Result<(), BoxedError> {
        self.staged.iter().for_each(|staged| staged.send(Flow::Begin(step.clone())));
        for fetch in &step.plan.fetches {
            match *fetch {
                Fetch::Read { ref visits, block } => self.read(step, visits, block).await?,
                Fetch::Gather { visit, share } => self.gather(step, visit, share).await?,
            }
        }
        Ok(())
    }

    /// Reads or gathers a block into a staging slot, before the visits that need it.
    async fn read(
        &mut self,
        step: &Arc<Step>,
        visits: &[usize],
        block: BlockId,
    ) -> Result<(), BoxedError> {
        let visit = &step.plan.schedule.visits[visits[0]];
        let version = step.reads;
        let layer = Some(visit.layer);
        self.context.published(block, version, layer).await?;
        let content = Content::Block(block, version);
        let held = self.context.acquire(&mut self.read_slots, content, layer).await?;
        let slot = held.slot(content);
        let schedule = &step.plan.schedule;
        let mut arrived = None;
        if schedule.block(block).staged {
            let work = Work::Stage { block, version, stored: Stored::Master, slot };
            arrived = Some(self.context.queue(Order::at(step, visit, work)));
        }
        if schedule.ranks.count > 1 {
            let mut order = Order::at(step, visit, Work::AllGather { block, version, slot });
            order.waits.extend(arrived);
            arrived = Some(self.context.queue(order));
        }
        let arrived = arrived.expect("what is fetched is staged, or of several processes");
        let staged = Staged { block, slot: held, arrived, uses: 1 };
        if visit.device().is_none() {
            self.gathered.push_back(staged);
            return Ok(());
        }
        for (device, outbox) in (0..).zip(&self.staged) {
            let uses = uses(schedule, visits, device);
            if uses > 0 {
                outbox.send(Flow::Datum(Staged { uses, ..staged.clone() }));
            }
        }
        Ok(())
    }

    /// Queues one share of a gather. The last share of a micro-batch puts its boundaries into the
    /// stash.
    async fn gather(
        &mut self,
        step: &Arc<Step>,
        index: usize,
        share: Share,
    ) -> Result<(), BoxedError> {
        let schedule = &step.plan.schedule;
        let visit = &schedule.visits[index];
        let first = visit.micro_batches.start;
        let all = visit.micro_batches.clone();
        let (staged, completed) = match share {
            Share::MicroBatch(m) => {
                // The first micro-batch waits for the blocks of all.
                for &block in visit.blocks.iter().filter(|_| m == first) {
                    let version = step.version_read(schedule.ahead(visit, block));
                    self.context.published(block, version, Some(visit.layer)).await?;
                }
                (None, m..m + 1)
            }
            Share::Block(block) => {
                let is_last = visit.blocks.last() == Some(&block);
                let staged = self.gathers_from(step, visit, block).await?;
                (staged, if is_last { all } else { first..first })
            }
        };
        let master = Staged::master(staged.as_ref(), step.reads);
        let work = Work::Gather { visit: index, share, master };
        let mut order = Order::at(step, visit, work).of_staged(staged);
        order.raises = completed.flat_map(|m| stashed(visit, m)).collect();
        self.context.queue(order);
        Ok(())
    }

    /// Waits for a block of a gather. Returns the master that was read for it, if the block is on
    /// file.
    async fn gathers_from(
        &mut self,
        step: &Step,
        visit: &Visit,
        block: BlockId,
    ) -> Result<Option<Staged>, BoxedError> {
        if !step.plan.schedule.passes_host_slot(block) {
            self.context.published(block, step.reads, Some(visit.layer)).await?;
            return Ok(None);
        }
        let staged = self.gathered.pop_front().expect("the plan reads before it gathers");
        assert_eq!(staged.block, block, "masters are gathered from in the order of their reads");
        Ok(Some(staged))
    }
}

/// The facts that the boundaries a visit writes for a micro-batch are in the stash.
fn stashed(visit: &Visit, micro_batch: MicroBatch) -> impl Iterator<Item = Fact> {
    visit.writes.iter().map(move |&id| Fact::Stashed(id, micro_batch))
}
