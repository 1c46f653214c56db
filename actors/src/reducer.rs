//! The downloading side of the weight loop: lands gradients, joins what belongs together.
//!
//! It alone takes landing blocks. It walks the plan's list of reductions: device gradients as the
//! Executors close them, and the host visits that read the stash (balance, loss, objective,
//! scatter) once all of it has landed. An untied gradient of an eager step goes on in its landing
//! block; one that must wait (for the norm, or for the embedding's share) is joined into its
//! block's region first, so that no landing block is ever held by something that waits. The region
//! of a staged block is written from a landing block and read back into one.
//!
//! Each group of micro-batches has a gradient of its own. When it has landed, the Reducer adds the
//! gradients that it kept of earlier groups. The sum waits in a slot of pool `parts` for later
//! groups. After the last group the sum is the block's gradient.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;

use crate::cause::BoxedError;
use crate::context::Context;
use crate::facts::Fact;
use crate::fence::Fence;
use crate::mailbox::{Inbox, Outbox};
use crate::messages::{Flow, Gradients, Reduced};
use crate::operation::{Order, Step};
use crate::pool::{Content, Held, Pool};
use crate::schedule::{
    BlockId, ChosenBy, DeviceId, GroupId, Join, LayerId, Portion, Reduction, Version,
};
use crate::task::Actor;
use crate::work::{GradientAt, Lane, Stored, Work};

pub(crate) struct Reducer {
    pub(crate) context: Context,
    /// One for each device.
    pub(crate) gradients: Vec<Inbox<Flow<Gradients>>>,
    pub(crate) reduced: Outbox<Flow<Reduced>>,
    pub(crate) landing: Pool,
    pub(crate) part_slots: Pool,
    /// For each portion, the gradients that are kept for later groups, the youngest last.
    pub(crate) kept: BTreeMap<Portion, Vec<Held>>,
    /// Landing blocks of the gradients that are merged portion by portion.
    pub(crate) merging: BTreeMap<BlockId, Held>,
    /// The last operation of the step that takes what layers measured.
    pub(crate) measured: Option<Fence>,
    /// True when updates wait for the norm.
    pub(crate) deferred: bool,
}

#[async_trait]
impl Actor for Reducer {
    async fn run(&mut self) -> Result<(), BoxedError> {
        loop {
            // Each device sends the same signals.
            let mut signal = None;
            for gradients in &mut self.gradients {
                signal = Some(self.context.recv(gradients, None).await?);
            }
            match signal.expect("a ring has a device") {
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
    async fn walk(&mut self, step: &Arc<Step>) -> Result<(), BoxedError> {
        self.reduced.send(Flow::Begin(step.clone()));
        self.measured = None;
        for reduction in &step.plan.reductions {
            match *reduction {
                Reduction::Gradient { portion, group, device, chosen_by, join, scattered } => {
                    let block = portion.block;
                    let (landing, landed) =
                        self.land(step, portion, group, device, chosen_by).await?;
                    let joined = self.join(step, portion, group, join, &landing, landed).await?;
                    if !join.keeps
                        && let Some((landing, whole)) =
                            self.merge(step, portion, landing, joined).await?
                    {
                        let whole = self.reduce_scatter(step, block, &landing, whole);
                        let version = step.version_of(step.plan.schedule.batch(group));
                        self.complete(step, block, version, scattered, landing, whole).await?;
                    }
                }
                Reduction::Balance { visit } => self.balance(step, visit).await?,
                Reduction::Loss { visit } => self.loss(step, visit).await?,
                Reduction::Objective { visit } => self.objective(step, visit).await?,
                Reduction::Scatter { visit } => self.scatter(step, visit).await?,
            }
        }
        let mut ends = Vec::new();
        for gradients in &mut self.gradients {
            let Flow::End(end) = self.context.recv(gradients, None).await? else {
                unreachable!("the walk takes all gradients");
            };
            ends.extend(end);
        }
        self.reduced.send(Flow::End(ends));
        Ok(())
    }

    /// Downloads a gradient.
    async fn land(
        &mut self,
        step: &Arc<Step>,
        portion: Portion,
        group: GroupId,
        device: DeviceId,
        chosen_by: Option<ChosenBy>,
    ) -> Result<(Held, Fence), BoxedError> {
        let layer = step.layer_of(portion.block);
        let gradients = &mut self.gradients[usize::from(device)];
        let Flow::Datum(closed) = self.context.recv(gradients, layer).await? else {
            unreachable!("the plan closes this gradient");
        };
        assert_eq!(closed.portion, portion, "gradients close in the order of visits");
        // The lane of downloads runs in order: boundaries that are computed before must not stand
        // behind this gradient.
        self.context.arrived(Lane::Compute, &closed.computed, layer).await?;
        let version = step.version_of(step.plan.schedule.batch(group));
        let content = Content::Gradient(portion, version);
        let landing = self.context.acquire(&mut self.landing, content, layer).await?;
        let gradients = closed.gradient.slot(content);
        let reduced = landing.slot(content);
        let work = Work::DownloadGradient { portion, group, gradients, reduced, chosen_by };
        let mut order = Order { device: Some(device), ..Order::gradient(step, layer, work) };
        order.waits = vec![closed.computed];
        order.holds = vec![closed.gradient];
        Ok((landing, self.context.queue(order)))
    }

    /// Adds gradients that were kept to one that has landed, and keeps the sum where later groups
    /// are added to it. Decodes an encoded gradient first. Returns the fence behind which the sum
    /// is there.
    async fn join(
        &mut self,
        step: &Arc<Step>,
        portion: Portion,
        group: GroupId,
        Join { adds, keeps }: Join,
        landing: &Held,
        landed: Fence,
    ) -> Result<Fence, BoxedError> {
        let encoded = step.plan.schedule.block(portion.block).encoded;
        if adds == 0 && !keeps && !encoded {
            return Ok(landed);
        }
        let version = step.version_of(step.plan.schedule.batch(group));
        let content = Content::Gradient(portion, version);
        let layer = step.layer_of(portion.block);
        let kept = self.kept.entry(portion).or_default();
        let mut holds = kept.split_off(kept.len() - adds as usize);
        holds.reverse(); // the youngest first
        let parts = holds.iter().map(|part| part.slot(content)).collect();
        let mut keep = None;
        if keeps {
            let part = self.context.acquire(&mut self.part_slots, content, layer).await?;
            keep = Some(part.slot(content));
            holds.push(part.clone());
            self.kept.entry(portion).or_default().push(part);
        }
        let work = Work::Join { portion, group, reduced: landing.slot(content), parts, keep };
        holds.push(landing.clone());
        let mut order = Order::gradient(step, layer, work);
        order.waits = vec![landed];
        order.holds = holds;
        Ok(self.context.queue(order))
    }

    /// Merges the gradient of a portion into that of its block, which has a landing block from the
    /// first portion on. Returns the landing block of a gradient that is complete, and the fence
    /// behind which it is there. A block that is not cut has landed whole.
    async fn merge(
        &mut self,
        step: &Arc<Step>,
        portion: Portion,
        landing: Held,
        joined: Fence,
    ) -> Result<Option<(Held, Fence)>, BoxedError> {
        let Portion { block, cut: Some(cut) } = portion else {
            return Ok(Some((landing, joined)));
        };
        let layer = step.layer_of(block);
        let content = Content::Gradient(block.into(), step.version);
        let held = match self.merging.remove(&block) {
            Some(held) => held,
            None => self.context.acquire(&mut self.landing, content, layer).await?,
        };
        let reduced = landing.slot(Content::Gradient(portion, step.version));
        let work = Work::Merge { portion, reduced, into: held.slot(content) };
        let mut order = Order::gradient(step, layer, work);
        order.waits = vec![joined];
        order.holds = vec![landing, held.clone()];
        let merged = self.context.queue(order);
        if cut == 0 {
            return Ok(Some((held, merged)));
        }
        self.merging.insert(block, held);
        Ok(None)
    }

    /// Exchanges parts of a gradient with the other processes, if there are any. Returns the fence
    /// behind which the landing block holds the sum of this process's part.
    fn reduce_scatter(
        &self,
        step: &Arc<Step>,
        block: BlockId,
        landing: &Held,
        joined: Fence,
    ) -> Fence {
        if step.plan.schedule.ranks.count == 1 {
            return joined;
        }
        let reduced = landing.slot(Content::Gradient(block.into(), step.version));
        let work = Work::ReduceScatter { block, reduced };
        let mut order = Order::gradient(step, step.layer_of(block), work);
        order.waits = vec![joined];
        order.holds = vec![landing.clone()];
        self.context.queue(order)
    }

    /// Sends a block's gradient on: in its landing block, or from its region where it waits.
    async fn complete(
        &mut self,
        step: &Arc<Step>,
        block: BlockId,
        version: Version,
        scattered: bool,
        landing: Held,
        landed: Fence,
    ) -> Result<(), BoxedError> {
        if !scattered && !self.deferred {
            self.send(block, version, Some(landing), landed);
            return Ok(());
        }
        let layer = step.layer_of(block);
        let complete = self.move_to_region(step, block, layer, landing, landed, scattered).await?;
        if !scattered {
            self.send(block, version, None, complete);
        }
        Ok(())
    }

    /// Puts a landed gradient into its block's region, where it waits, and returns the fence that
    /// reports its sum of squares. A gradient that a scatter adds to is measured there.
    async fn move_to_region(
        &mut self,
        step: &Arc<Step>,
        block: BlockId,
        layer: Option<LayerId>,
        landing: Held,
        landed: Fence,
        scattered: bool,
    ) -> Result<Fence, BoxedError> {
        let is_staged = step.plan.schedule.block(block).staged;
        let reduced = landing.slot(Content::Gradient(block.into(), step.version));
        // With a delay, the region may still feed the update of the step before.
        self.context.published(block, step.version, layer).await?;
        let complete = if scattered && is_staged {
            landed
        } else {
            let work = Work::Reduce { block, reduced, to_region: !is_staged };
            let mut order = Order::gradient(step, layer, work);
            order.waits = vec![landed];
            order.holds = vec![landing.clone()];
            self.context.queue(order)
        };
        if is_staged {
            self.store(step, block, layer, landing, &complete).await?;
        }
        Ok(complete)
    }

    /// Writes a landing block to its region on file once the block is complete, because the lane of
    /// files must not wait.
    async fn store(
        &mut self,
        step: &Arc<Step>,
        block: BlockId,
        layer: Option<LayerId>,
        landing: Held,
        complete: &Fence,
    ) -> Result<(), BoxedError> {
        self.context.fence(Lane::Host, complete, layer).await?;
        let version = step.version;
        let stored = Stored::Gradient;
        let slot = landing.slot(Content::Gradient(block.into(), step.version));
        let work = Work::Store { block, version, stored, slot };
        let mut order = Order::gradient(step, layer, work);
        order.holds = vec![landing];
        self.context.queue(order);
        Ok(())
    }

    /// Queues the measures; then, if the answers are of the whole step, the exchange with other
    /// processes; then the answers. The lane of the host runs in order, so an answer comes behind
    /// every measure.
    async fn balance(&mut self, step: &Arc<Step>, index: usize) -> Result<(), BoxedError> {
        let measured = self.measures(step, index).await?;
        self.measured = measured.last().cloned();
        let exchanged = self.exchange(step, index, measured);
        self.answers(step, index, exchanged.as_ref());
        Ok(())
    }

    /// Queues the measures, and their exchange as for a balance; then the loss of each micro-batch,
    /// which the lane of the host computes behind every measure of the visit; then the weights of
    /// rows.
    async fn objective(&mut self, step: &Arc<Step>, index: usize) -> Result<(), BoxedError> {
        let measured = self.measures(step, index).await?;
        let exchanged = self.exchange(step, index, measured);
        self.losses(step, index, exchanged.as_ref());
        self.answers(step, index, exchanged.as_ref());
        Ok(())
    }

    /// Queues the exchange of measures with the other processes that share the step, if the visit
    /// needs those of all.
    fn exchange(&self, step: &Arc<Step>, index: usize, measured: Vec<Fence>) -> Option<Fence> {
        let schedule = &step.plan.schedule;
        let visit = &schedule.visits[index];
        (schedule.ranks.dealt && visit.kind.is_of_step()).then(|| {
            let work = Work::ExchangeMeasures { visit: index };
            self.context.queue(Order { waits: measured, ..Order::at(step, visit, work) })
        })
    }

    /// Queues the measure of each micro-batch as soon as all that it reads has landed.
    async fn measures(&mut self, step: &Arc<Step>, index: usize) -> Result<Vec<Fence>, BoxedError> {
        let visit = &step.plan.schedule.visits[index];
        let mut measured = Vec::new();
        for micro_batch in visit.micro_batches.clone() {
            self.context.stashed(&visit.reads, micro_batch, Some(visit.layer)).await?;
            let work = Work::Measure { visit: index, micro_batch };
            measured.push(self.context.queue(Order::at(step, visit, work)));
        }
        Ok(measured)
    }

    /// Queues the answer to each micro-batch, if the visit writes any.
    fn answers(&self, step: &Arc<Step>, index: usize, exchanged: Option<&Fence>) {
        let visit = &step.plan.schedule.visits[index];
        for micro_batch in visit.micro_batches.clone().filter(|_| !visit.writes.is_empty()) {
            let work = Work::Answer { visit: index, micro_batch };
            let mut order = Order::at(step, visit, work);
            order.waits.extend(exchanged.cloned());
            let stashed = |&id| Fact::Stashed(id, micro_batch);
            order.raises = visit.writes.iter().map(stashed).collect();
            self.context.queue(order);
        }
    }

    /// Queues the loss of each micro-batch, once all that it reads has landed.
    async fn loss(&mut self, step: &Arc<Step>, index: usize) -> Result<(), BoxedError> {
        self.all_stashed(step, index).await?;
        self.losses(step, index, None);
        Ok(())
    }

    fn losses(&self, step: &Arc<Step>, index: usize, exchanged: Option<&Fence>) {
        let visit = &step.plan.schedule.visits[index];
        for micro_batch in visit.micro_batches.clone() {
            let work = Work::Loss { visit: index, micro_batch };
            let waits = exchanged.cloned().into_iter().collect();
            let fence = self.context.queue(Order { waits, ..Order::at(step, visit, work) });
            self.reduced.send(Flow::Datum(Reduced::Loss(fence)));
        }
    }

    /// Queues a scatter for each block that trains, once all that it reads has landed.
    async fn scatter(&mut self, step: &Arc<Step>, index: usize) -> Result<(), BoxedError> {
        self.all_stashed(step, index).await?;
        let schedule = &step.plan.schedule;
        let visit = &schedule.visits[index];
        let rows = Order::at(step, visit, Work::AllGatherRows { visit: index });
        let rows = schedule.ranks.dealt.then(|| self.context.queue(rows));
        let version = step.gradient_of(visit);
        for &block in visit.blocks.iter().filter(|&&id| !schedule.block(id).frozen) {
            // Its region may still feed the update before.
            self.context.published(block, version, Some(visit.layer)).await?;
            let first = !step.plan.reductions.iter().any(|r| r.block() == Some(block));
            if schedule.block(block).staged {
                self.scatter_landed(step, index, block, first, rows.clone()).await?;
            } else {
                let gradient = GradientAt::Region;
                let work = Work::Scatter { visit: index, block, first, gradient };
                let mut order = Order::at(step, visit, work);
                order.waits.extend(rows.clone());
                let scattered = self.context.queue(order);
                self.send(block, version, None, scattered);
            }
        }
        Ok(())
    }

    /// Scatters into a landing block, for a region that is on file. The gradient goes on in that
    /// landing block unless it must wait for the norm.
    async fn scatter_landed(
        &mut self,
        step: &Arc<Step>,
        index: usize,
        block: BlockId,
        first: bool,
        rows: Option<Fence>,
    ) -> Result<(), BoxedError> {
        let visit = &step.plan.schedule.visits[index];
        let content = Content::Gradient(block.into(), step.version);
        let layer = Some(visit.layer);
        let landing = self.context.acquire(&mut self.landing, content, layer).await?;
        let version = step.version;
        let slot = landing.slot(content);
        let gradient = GradientAt::Landing(slot);
        let mut order =
            Order::at(step, visit, Work::Scatter { visit: index, block, first, gradient });
        order.waits.extend(rows);
        if !first {
            let work = Work::Stage { block, version, stored: Stored::Gradient, slot };
            order.waits.push(self.context.queue(Order::at(step, visit, work)));
        }
        let scattered = self.context.queue(order);
        if !self.deferred {
            self.send(block, version, Some(landing), scattered);
            return Ok(());
        }
        self.store(step, block, layer, landing, &scattered).await?;
        self.send(block, version, None, scattered);
        Ok(())
    }

    fn send(&self, block: BlockId, version: Version, landing: Option<Held>, reduced: Fence) {
        let measured = self.measured.clone();
        let gradient = Reduced::Gradient { block, version, landing, reduced, measured };
        self.reduced.send(Flow::Datum(gradient));
    }

    /// Waits until all that a host visit reads has landed.
    async fn all_stashed(&mut self, step: &Arc<Step>, index: usize) -> Result<(), BoxedError> {
        let visit = &step.plan.schedule.visits[index];
        for m in visit.micro_batches.clone() {
            self.context.stashed(&visit.reads, m, Some(visit.layer)).await?;
        }
        Ok(())
    }
}
