//! The uploading side of both loops: walks the plan's one list of pieces.
//!
//! It alone takes from the pools of weights, visits and inputs. For every piece it first awaits
//! the fact that what it uploads exists (a block's version, a boundary in the stash), then
//! acquires slots, then queues the upload, then tells the Executor.

use std::sync::Arc;

use async_trait::async_trait;

use crate::crew::{Actor, Desk};
use crate::facts::Fact;
use crate::mailbox::{Inbox, Outbox};
use crate::messages::{Flow, Inputs, Weights};
use crate::pool::{Content, Held, Pool};
use crate::ports::{Order, Placed, Step, Trouble, Work};
use crate::schedule::{LayerId, MicroBatch, Piece};

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
                let (block, version) = (residence.block, step.number);
                let work = Work::UploadBlock { block, version, weights: residence.slot };
                arrived.push(self.desk.queue(Order::at(step, visit, work)));
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
        block: crate::schedule::BlockId,
        layer: LayerId,
    ) -> Result<(), Trouble> {
        let version = step.number;
        let updated = async |facts: &crate::facts::Facts| facts.updated(block, version).await;
        self.desk.fact(Content::Block(block, version), Some(layer), updated).await
    }
}
