//! The uploading side of both loops: walks the plan's one list of pieces.
//!
//! It alone takes from the pools of weights, visits, inputs and reads. For every piece it first
//! awaits the fact that what it uploads exists (a block's version, a boundary in the stash), then
//! acquires slots, then queues the upload, then sends the Executor its message.

use std::collections::VecDeque;
use std::sync::Arc;

use async_trait::async_trait;

use crate::cause::BoxedError;
use crate::context::Context;
use crate::facts::Fact;
use crate::fence::Fence;
use crate::mailbox::{Inbox, Outbox};
use crate::messages::{Flow, Inputs, Weights};
use crate::operation::{Order, Step};
use crate::pool::{Content, Held, Pool};
use crate::schedule::{BlockId, MicroBatch, Piece, Residence, Share, Visit};
use crate::task::Actor;
use crate::work::{MasterAt, Placed, Stored, Work};

pub(crate) struct Prefetcher {
    pub(crate) context: Context,
    pub(crate) inbox: Inbox<Flow<()>>,
    pub(crate) weights: Outbox<Flow<Weights>>,
    pub(crate) inputs: Outbox<Inputs>,
    pub(crate) weight_slots: Pool,
    pub(crate) visit_credits: Pool,
    pub(crate) input_slots: Pool,
    pub(crate) read_slots: Pool,
    /// What the weight slots hold, until the last use of each in the plan.
    pub(crate) resident: Vec<Option<Held>>,
    /// Staged blocks that no piece has taken yet, in the order in which they were read.
    pub(crate) staged: VecDeque<StagedBlock>,
}

/// A block in a staging slot.
pub(crate) struct StagedBlock {
    block: BlockId,
    slot: Held,
    arrived: Fence,
}

/// Where an operation finds a block's master, and what it waits for and holds because of that.
struct Master {
    at: MasterAt,
    waits: Vec<Fence>,
    holds: Vec<Held>,
}

#[async_trait]
impl Actor for Prefetcher {
    async fn run(&mut self) -> Result<(), BoxedError> {
        loop {
            match self.context.recv(&mut self.inbox, None).await? {
                Flow::Begin(step) => self.walk(&step).await?,
                Flow::Stop => {
                    self.weights.send(Flow::Stop);
                    return Ok(());
                }
                Flow::Datum(()) | Flow::End(_) => unreachable!("the relay begins steps and stops"),
            }
        }
    }
}

impl Prefetcher {
    async fn walk(&mut self, step: &Arc<Step>) -> Result<(), BoxedError> {
        self.context.begins(&step.plan);
        self.weights.send(Flow::Begin(step.clone()));
        for piece in &step.plan.pieces {
            match *piece {
                Piece::Gather { visit, share } => self.gather(step, visit, share).await?,
                Piece::Stage { visit, block } => self.stage(step, visit, block).await?,
                Piece::Weights { device_visit } => self.fetch(step, device_visit).await?,
                Piece::Inputs { device_visit, micro_batch } => {
                    self.bring(step, device_visit, micro_batch).await?;
                }
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
        let visit = &step.plan.schedule.visits[index];
        let (first, all) = (visit.micro_batches.start, visit.micro_batches.clone());
        let (master, completed) = match share {
            Share::MicroBatch(m) => {
                // What the first micro-batch waited for is there for the others, too.
                for &block in visit.blocks().iter().filter(|_| m == first) {
                    self.context.published(block, step.number, Some(visit.layer)).await?;
                }
                (Master { at: MasterAt::Memory, waits: vec![], holds: vec![] }, m..m + 1)
            }
            Share::Block(block) => {
                if !step.plan.schedule.block(block).staged {
                    self.context.published(block, step.number, Some(visit.layer)).await?;
                }
                let is_last = visit.blocks().last() == Some(&block);
                (self.master(step, block), if is_last { all } else { first..first })
            }
        };
        let mut order =
            Order::at(step, visit, Work::Gather { visit: index, share, master: master.at });
        (order.waits, order.holds) = (master.waits, master.holds);
        order.raises = completed.flat_map(|m| stashed(visit, m)).collect();
        self.context.queue(order);
        Ok(())
    }

    /// Reads a block from its file, ahead of the piece that takes it.
    async fn stage(
        &mut self,
        step: &Arc<Step>,
        index: usize,
        block: BlockId,
    ) -> Result<(), BoxedError> {
        let visit = &step.plan.schedule.visits[index];
        let (version, layer) = (step.number, Some(visit.layer));
        self.context.published(block, version, layer).await?;
        let content = Content::Block(block, version);
        let held = self.context.acquire_one(&mut self.read_slots, content, layer).await?;
        let slot = held.slot(content);
        let work = Work::Stage { block, version, stored: Stored::Master, slot };
        let arrived = self.context.queue(Order::at(step, visit, work));
        self.staged.push_back(StagedBlock { block, slot: held, arrived });
        Ok(())
    }

    /// Where the master of a block is: in memory, or in the staging slot that the plan has it
    /// read to.
    fn master(&mut self, step: &Step, block: BlockId) -> Master {
        if !step.plan.schedule.block(block).staged {
            return Master { at: MasterAt::Memory, waits: vec![], holds: vec![] };
        }
        let staged = self.staged.pop_front().expect("the plan stages before it takes");
        assert_eq!(staged.block, block, "blocks are taken in the order in which they are staged");
        let slot = staged.slot.slot(Content::Block(block, step.number));
        let (waits, holds) = (vec![staged.arrived], vec![staged.slot]);
        Master { at: MasterAt::Slot(slot), waits, holds }
    }

    /// Uploads the blocks of a device visit that are not there yet, and announces the visit.
    async fn fetch(&mut self, step: &Arc<Step>, device_visit: usize) -> Result<(), BoxedError> {
        let visit = step.plan.visit(device_visit);
        let (content, layer) = (Content::Visit(device_visit), Some(visit.layer));
        let credit = self.context.acquire_one(&mut self.visit_credits, content, layer).await?;
        let (mut blocks, mut arrived) = (Vec::new(), Vec::new());
        for residence in &step.plan.device_visits[device_visit].residences {
            if residence.fetch {
                arrived.push(self.upload(step, visit, residence).await?);
            }
            let tenant = &mut self.resident[residence.slot as usize];
            let held = if residence.last_use { tenant.take() } else { tenant.clone() };
            blocks.push(held.expect("the plan fetches before it uses"));
        }
        self.weights.send(Flow::Datum(Weights { device_visit, credit, blocks, arrived }));
        Ok(())
    }

    /// Uploads one block to the slot that the plan names.
    async fn upload(
        &mut self,
        step: &Arc<Step>,
        visit: &Visit,
        &Residence { block, slot, .. }: &Residence,
    ) -> Result<Fence, BoxedError> {
        let (version, layer) = (step.number, Some(visit.layer));
        self.context.published(block, version, layer).await?;
        let content = Content::Block(block, version);
        let held = self.context.acquire_slot(&mut self.weight_slots, slot, content, layer).await?;
        let master = self.master(step, block);
        let work = Work::UploadBlock { block, version, master: master.at, weights: slot };
        let mut order = Order::at(step, visit, work);
        (order.waits, order.holds) = (master.waits, master.holds);
        self.resident[slot as usize] = Some(held);
        Ok(self.context.queue(order))
    }

    /// Uploads the boundaries that a micro-batch brings to a device visit.
    async fn bring(
        &mut self,
        step: &Arc<Step>,
        device_visit: usize,
        micro_batch: MicroBatch,
    ) -> Result<(), BoxedError> {
        let visit = step.plan.visit(device_visit);
        let layer = Some(visit.layer);
        let (mut boundaries, mut arrived) = (Vec::new(), Vec::new());
        for &boundary in &visit.reads {
            self.context.stashed(&[boundary], micro_batch, layer).await?;
            let content = Content::Boundary(boundary, micro_batch);
            let count = step.plan.schedule.boundary(boundary).slots;
            let held = self.context.acquire(&mut self.input_slots, count, content, layer).await?;
            let slots = held.iter().map(|held| held.slot(content)).collect();
            let work = Work::UploadBoundary { micro_batch, inputs: Placed { boundary, slots } };
            arrived.push(self.context.queue(Order::at(step, visit, work)));
            boundaries.push(held);
        }
        self.inputs.send(Inputs { device_visit, micro_batch, boundaries, arrived });
        Ok(())
    }
}

/// The facts that all a visit writes for a micro-batch is in the stash.
fn stashed(visit: &Visit, micro_batch: MicroBatch) -> impl Iterator<Item = Fact> {
    visit.writes.iter().map(move |&id| Fact::Stashed(id, micro_batch))
}
