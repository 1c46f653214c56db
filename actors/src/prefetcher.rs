//! The uploading side of both loops: walks the plan's one list of pieces.
//!
//! It alone takes from the pools of weights, visits and inputs, and with the EPS on file from that of
//! reads. For every piece it first awaits the fact that what it uploads exists (a block's version, a
//! boundary in the stash), then acquires slots, then queues the upload, then tells the Executor.

use std::collections::VecDeque;
use std::sync::Arc;

use async_trait::async_trait;

use crate::crew::{Actor, Desk};
use crate::facts::Fact;
use crate::fence::Fence;
use crate::mailbox::{Inbox, Outbox};
use crate::messages::{Flow, Inputs, Weights};
use crate::pool::{Content, Held, Pool};
use crate::ports::{Order, Placed, Step, Trouble, Work};
use crate::schedule::{BlockId, LayerId, MicroBatch, Piece};

pub(crate) struct Prefetcher {
    pub(crate) desk: Desk,
    pub(crate) inbox: Inbox<Flow<()>>,
    pub(crate) weights: Outbox<Flow<Weights>>,
    pub(crate) inputs: Outbox<Inputs>,
    pub(crate) weight_slots: Pool,
    pub(crate) visit_credits: Pool,
    pub(crate) input_slots: Pool,
    /// What the weight slots hold, until the last use of each in the plan.
    pub(crate) resident: Vec<Option<Held>>,
    /// With the EPS on file: slots to read blocks to, and what was read or is being, in order.
    pub(crate) read_slots: Pool,
    pub(crate) read: VecDeque<(BlockId, Held, Fence)>,
}

#[async_trait]
impl Actor for Prefetcher {
    async fn run(&mut self) -> Result<(), Trouble> {
        loop {
            match self.desk.recv(&mut self.inbox, None).await? {
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
    async fn walk(&mut self, step: &Arc<Step>) -> Result<(), Trouble> {
        self.desk.ring.facts.begin(&step.plan);
        self.weights.send(Flow::Begin(step.clone()));
        for piece in &step.plan.pieces {
            match *piece {
                Piece::Gather { visit } => self.gather(step, visit).await?,
                Piece::Read { visit, block } => self.read(step, visit, block).await?,
                Piece::GatherBlock { visit, block } => self.gather_block(step, visit, block),
                Piece::Weights { device_visit } => self.fetch(step, device_visit).await?,
                Piece::Inputs { device_visit, micro_batch } => {
                    self.bring(step, device_visit, micro_batch).await?;
                }
            }
        }
        Ok(())
    }

    async fn gather(&mut self, step: &Arc<Step>, index: usize) -> Result<(), Trouble> {
        let visit = &step.plan.schedule.visits[index];
        for &block in visit.blocks() {
            self.version(step, block, visit.layer).await?;
        }
        for micro_batch in visit.micro_batches.clone() {
            let work = Work::Gather { visit: index, micro_batch };
            let mut order = Order::at(step, visit, work);
            order.raises = visit.writes.iter().map(|&id| Fact::Stashed(id, micro_batch)).collect();
            self.desk.queue(order);
        }
        Ok(())
    }

    /// Reads a block from its file, ahead of the piece that takes it.
    async fn read(
        &mut self,
        step: &Arc<Step>,
        index: usize,
        block: BlockId,
    ) -> Result<(), Trouble> {
        let visit = &step.plan.schedule.visits[index];
        self.version(step, block, visit.layer).await?;
        let (content, pool) = (Content::Block(block, step.number), &mut self.read_slots);
        let held = self.desk.acquire(pool, 1, content, Some(visit.layer)).await?;
        let held = held.into_iter().next().expect("one slot was asked for");
        let (version, reads) = (step.number, held.slot(content));
        let work = Work::ReadBlock { block, version, reads };
        let fence = self.desk.queue(Order::at(step, visit, work));
        self.read.push_back((block, held, fence));
        Ok(())
    }

    /// The block that was read first of those not yet taken.
    fn take_read(&mut self, expected: BlockId) -> (Held, Fence) {
        let (block, held, fence) = self.read.pop_front().expect("the plan reads before it takes");
        assert_eq!(block, expected, "blocks are taken in the order they are read in");
        (held, fence)
    }

    /// Gathers one block's share; behind the last one, all of it is there.
    fn gather_block(&mut self, step: &Arc<Step>, index: usize, block: BlockId) {
        let (held, arrived) = self.take_read(block);
        let visit = &step.plan.schedule.visits[index];
        let reads = held.slot(Content::Block(block, step.number));
        let work = Work::GatherBlock { visit: index, block, reads };
        let mut order = Order::at(step, visit, work);
        order.waits = vec![arrived];
        order.holds = vec![held];
        if visit.blocks().last() == Some(&block) {
            let landed = visit.micro_batches.clone();
            let all = landed.flat_map(|m| visit.writes.iter().map(move |&id| (id, m)));
            order.raises = all.map(|(id, m)| Fact::Stashed(id, m)).collect();
        }
        self.desk.queue(order);
    }

    async fn fetch(&mut self, step: &Arc<Step>, device_visit: usize) -> Result<(), Trouble> {
        let visit = step.plan.visit(device_visit);
        let layer = visit.layer;
        let content = Content::Visit(device_visit);
        let credit = self.desk.acquire(&mut self.visit_credits, 1, content, Some(layer)).await?;
        let (mut blocks, mut arrived) = (Vec::new(), Vec::new());
        for residence in &step.plan.device_visits[device_visit].residences {
            let content = Content::Block(residence.block, step.number);
            if residence.fetch {
                self.version(step, residence.block, layer).await?;
                let slots = &mut self.weight_slots;
                let held =
                    self.desk.acquire_slot(slots, residence.slot, content, Some(layer)).await?;
                let (block, version, weights) = (residence.block, step.number, residence.slot);
                let read = step.plan.pools.is_on_file().then(|| self.take_read(block));
                let reads = read.as_ref().map(|(held, _)| held.slot(content));
                let work = Work::UploadBlock { block, version, reads, weights };
                let mut order = Order::at(step, visit, work);
                if let Some((held, arrived)) = read {
                    (order.holds, order.waits) = (vec![held], vec![arrived]);
                }
                arrived.push(self.desk.queue(order));
                self.resident[residence.slot as usize] = Some(held);
            }
            let tenant = &mut self.resident[residence.slot as usize];
            let held = if residence.last_use { tenant.take() } else { tenant.clone() };
            blocks.push(held.expect("the plan fetches before it uses"));
        }
        let credit = credit.into_iter().next().expect("one credit was asked for");
        self.weights.send(Flow::Datum(Weights { device_visit, credit, blocks, arrived }));
        Ok(())
    }

    async fn bring(
        &mut self,
        step: &Arc<Step>,
        device_visit: usize,
        micro_batch: MicroBatch,
    ) -> Result<(), Trouble> {
        let visit = step.plan.visit(device_visit);
        let layer = Some(visit.layer);
        let (mut boundaries, mut arrived) = (Vec::new(), Vec::new());
        for &boundary in &visit.reads {
            let content = Content::Boundary(boundary, micro_batch);
            let landed = async |facts: &crate::facts::Facts| {
                facts.stashed(&[boundary], micro_batch).await;
            };
            self.desk.fact(content, layer, landed).await?;
            let count = step.plan.schedule.boundary(boundary).slots;
            let held = self.desk.acquire(&mut self.input_slots, count, content, layer).await?;
            let slots = held.iter().map(|held| held.slot(content)).collect();
            let work = Work::UploadBoundary { micro_batch, inputs: Placed { boundary, slots } };
            arrived.push(self.desk.queue(Order::at(step, visit, work)));
            boundaries.push(held);
        }
        self.inputs.send(Inputs { device_visit, micro_batch, boundaries, arrived });
        Ok(())
    }

    async fn version(
        &mut self,
        step: &Arc<Step>,
        block: BlockId,
        layer: LayerId,
    ) -> Result<(), Trouble> {
        let version = step.number;
        let updated = async |facts: &crate::facts::Facts| facts.updated(block, version).await;
        self.desk.fact(Content::Block(block, version), Some(layer), updated).await
    }
}
