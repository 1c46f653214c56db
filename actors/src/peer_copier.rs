//! Completes blocks that come in shards: copies what other devices uploaded.
//!
//! It stands between the Prefetcher and the Executor of its device. A copy is queued once the
//! uploads of the other devices have ended, for a device keeps the order of its own queues alone.
//! The copy holds the slots that it reads, so no device takes another block there too early.

use std::sync::Arc;

use async_trait::async_trait;

use crate::cause::BoxedError;
use crate::context::Context;
use crate::fence::Fence;
use crate::mailbox::{Inbox, Outbox};
use crate::messages::{Flow, Uploaded, Weights};
use crate::operation::{Order, Step};
use crate::pool::Content;
use crate::schedule::{DeviceId, Portion, Visit};
use crate::task::Actor;
use crate::work::{Lane, Work};

pub(crate) struct PeerCopier {
    pub(crate) context: Context,
    pub(crate) device: DeviceId,
    pub(crate) prefetched: Inbox<Flow<Weights>>,
    /// One for each other device, in their order.
    pub(crate) peers: Vec<Inbox<Uploaded>>,
    pub(crate) weights: Outbox<Flow<Weights>>,
    /// The step that the weights are of.
    pub(crate) step: Option<Arc<Step>>,
}

#[async_trait]
impl Actor for PeerCopier {
    async fn run(&mut self) -> Result<(), BoxedError> {
        loop {
            let mut flow = self.context.recv(&mut self.prefetched, None).await?;
            match &mut flow {
                Flow::Begin(step) => self.step = Some(step.clone()),
                Flow::Datum(weights) => self.complete(weights).await?,
                Flow::Stop => {
                    self.weights.send(flow);
                    return Ok(());
                }
                Flow::End(_) => unreachable!("a Prefetcher sends no end"),
            }
            self.weights.send(flow);
        }
    }
}

impl PeerCopier {
    /// Queues the copies of the blocks that a device visit is the first to need.
    async fn complete(&mut self, weights: &mut Weights) -> Result<(), BoxedError> {
        let step = self.step.clone().expect("a step begins before its data come");
        if step.plan.schedule.shards == 1 {
            return Ok(());
        }
        let resolved = &step.plan.device_visits[weights.device_visit];
        let visit = step.plan.visit(weights.device_visit);
        for (residence, held) in resolved.residences.iter().zip(&weights.blocks) {
            if residence.upload {
                let content = Content::Portion(residence.portion, step.reads);
                let slot = held.slot(content);
                weights.arrived.push(self.copy(&step, visit, residence.portion, slot).await?);
            }
        }
        Ok(())
    }

    /// Copies the other devices' shards of a block into the slot that has this device's.
    async fn copy(
        &mut self,
        step: &Arc<Step>,
        visit: &Visit,
        portion: Portion,
        weights: u32,
    ) -> Result<Fence, BoxedError> {
        let version = step.reads;
        let layer = Some(visit.layer);
        let shard = step.plan.schedule.shard_of(self.device);
        let mut from = Vec::new();
        let mut holds = Vec::new();
        for (peer, other) in self.peers.iter_mut().zip(shard.others()) {
            let uploaded = self.context.recv(peer, layer).await?;
            assert_eq!(uploaded.portion, portion, "all devices upload blocks in the same order");
            self.context.arrived(Lane::Upload, &uploaded.arrived, layer).await?;
            from.push((other, uploaded.slot.slot(Content::Portion(portion, version))));
            holds.push(uploaded.slot);
        }
        let work = Work::CopyShards { portion, version, weights, shard, from };
        let order = Order { holds, ..Order::at(step, visit, work) };
        Ok(self.context.queue(order))
    }
}
