//! The uploading side of both loops: walks the plan's list of pieces.
//!
//! It alone takes from the pools of weights, visits and inputs. For every piece it first awaits the
//! source of the upload (a block's version, a master that the Fetcher staged, a boundary in the
//! stash; what rows choose of a block), then acquires slots, then queues the upload, then sends the
//! Executor its message.

use std::sync::Arc;

use async_trait::async_trait;

use crate::cause::BoxedError;
use crate::context::Context;
use crate::fence::Fence;
use crate::mailbox::{Inbox, Outbox};
use crate::messages::{Flow, Inputs, Staged, Uploaded, Weights};
use crate::operation::{Order, Step};
use crate::pool::{Content, Held, Pool};
use crate::schedule::{BlockId, DeviceId, MicroBatch, Piece, Residence, Shard, Version, Visit};
use crate::task::Actor;
use crate::work::{Placed, Work};

pub(crate) struct Prefetcher {
    pub(crate) context: Context,
    pub(crate) device: DeviceId,
    pub(crate) staged: Inbox<Flow<Staged>>,
    /// The master from which further portions are uploaded.
    pub(crate) master: Option<Staged>,
    pub(crate) weights: Outbox<Flow<Weights>>,
    pub(crate) inputs: Outbox<Inputs>,
    /// One for each other device, where blocks may come in shards.
    pub(crate) peers: Vec<Outbox<Uploaded>>,
    pub(crate) weight_slots: Pool,
    pub(crate) visit_credits: Pool,
    pub(crate) input_slots: Pool,
    /// The slots of resident blocks, until the last use of each in the plan.
    pub(crate) resident: Vec<Option<Held>>,
}

#[async_trait]
impl Actor for Prefetcher {
    async fn run(&mut self) -> Result<(), BoxedError> {
        while let Some(step) = self.context.next_step(&mut self.staged).await? {
            self.walk(&step).await?;
        }
        self.weights.send(Flow::Stop);
        Ok(())
    }
}

impl Prefetcher {
    async fn walk(&mut self, step: &Arc<Step>) -> Result<(), BoxedError> {
        self.weights.send(Flow::Begin(step.clone()));
        for piece in &step.plan.walks[usize::from(self.device)].pieces {
            match *piece {
                Piece::Weights { device_visit } => self.announce(step, device_visit).await?,
                Piece::Inputs { device_visit, micro_batch } => {
                    self.bring(step, device_visit, micro_batch).await?;
                }
            }
        }
        Ok(())
    }

    /// Uploads the blocks of a device visit that are not there yet, and announces the visit.
    async fn announce(&mut self, step: &Arc<Step>, device_visit: usize) -> Result<(), BoxedError> {
        let visit = step.plan.visit(device_visit);
        let content = Content::Visit(device_visit);
        let layer = Some(visit.layer);
        let credit = self.context.acquire(&mut self.visit_credits, content, layer).await?;
        let mut blocks = Vec::new();
        let mut arrived = Vec::new();
        for residence in &step.plan.device_visits[device_visit].residences {
            if residence.upload {
                arrived.push(self.upload(step, visit, residence).await?);
            }
            let tenant = &mut self.resident[residence.slot as usize];
            let held = if residence.last_use { tenant.take() } else { tenant.clone() };
            blocks.push(held.expect("the plan uploads before it uses"));
        }
        self.weights.send(Flow::Datum(Weights { device_visit, credit, blocks, arrived }));
        Ok(())
    }

    /// Uploads one block, or the device's shard of it, to the slot that the plan names.
    async fn upload(
        &mut self,
        step: &Arc<Step>,
        visit: &Visit,
        &Residence { portion, ahead, slot, chosen_by, .. }: &Residence,
    ) -> Result<Fence, BoxedError> {
        let version = step.version_read(ahead);
        let layer = Some(visit.layer);
        let staged = self.source(step, visit, portion.block, version).await?;
        if let Some(choice) = chosen_by {
            for m in choice.micro_batches() {
                self.context.stashed(&[choice.boundary], m, layer).await?;
            }
        }
        let content = Content::Portion(portion, version);
        let held = self.context.acquire_slot(&mut self.weight_slots, slot, content, layer).await?;
        let master = Staged::master(staged.as_ref(), version);
        let shard = step.plan.schedule.shard_of(self.device);
        let work = Work::UploadBlock { portion, version, master, weights: slot, shard, chosen_by };
        let arrived = self.context.queue(Order::at(step, visit, work).of_staged(staged));
        if shard != Shard::WHOLE {
            let uploaded = Uploaded { portion, slot: held.clone(), arrived: arrived.clone() };
            self.peers.iter().for_each(|peer| peer.send(uploaded.clone()));
        }
        self.resident[slot as usize] = Some(held);
        Ok(arrived)
    }

    /// Waits until a block is published. Returns the master that was read for it, if the block is
    /// on file. Its slot is free when the last of the uploads that share it has ended.
    async fn source(
        &mut self,
        step: &Step,
        visit: &Visit,
        block: BlockId,
        version: Version,
    ) -> Result<Option<Staged>, BoxedError> {
        let layer = Some(visit.layer);
        if !step.plan.schedule.passes_host_slot(block) {
            self.context.published(block, version, layer).await?;
            return Ok(None);
        }
        let mut staged = match self.master.take() {
            Some(staged) => staged,
            None => match self.context.recv(&mut self.staged, layer).await? {
                Flow::Datum(staged) => staged,
                _ => unreachable!("the plan reads this block before the next step"),
            },
        };
        staged.uses -= 1;
        self.master = (staged.uses > 0).then(|| staged.clone());
        assert_eq!(staged.block, block, "blocks are uploaded in the order of their reads");
        Ok(Some(staged))
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
        let mut boundaries = Vec::new();
        let mut arrived = Vec::new();
        for &boundary in &visit.reads {
            self.context.stashed(&[boundary], micro_batch, layer).await?;
            let content = Content::Boundary(boundary, micro_batch);
            let held = self.context.acquire(&mut self.input_slots, content, layer).await?;
            let slot = held.slot(content);
            let work = Work::UploadBoundary { micro_batch, inputs: Placed { boundary, slot } };
            arrived.push(self.context.queue(Order::at(step, visit, work)));
            boundaries.push(held);
        }
        self.inputs.send(Inputs { device_visit, micro_batch, boundaries, arrived });
        Ok(())
    }
}
