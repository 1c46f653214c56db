//! Runs every micro-batch through a device visit, then the next visit.
//!
//! It alone takes from the pools of outputs and gradients, both before it queues the operation
//! that writes them. At most two visits are queued on the compute lane: the one that runs and the
//! one behind it, so that the lane never waits for this task and the queue stays short.

use std::collections::HashMap;
use std::sync::Arc;

use async_trait::async_trait;

use crate::cause::BoxedError;
use crate::context::Context;
use crate::fence::Fence;
use crate::mailbox::{Inbox, Outbox};
use crate::messages::{Flow, Gradients, Inputs, Outputs, Weights};
use crate::operation::{Order, Step};
use crate::pool::{Content, Held, Pool};
use crate::schedule::{BoundaryId, DeviceId, DeviceVisit, MicroBatch, Portion, Residence, Visit};
use crate::task::Actor;
use crate::work::{Accumulator, BlockUse, Lane, Placed, Work};

pub(crate) struct Executor {
    pub(crate) context: Context,
    pub(crate) device: DeviceId,
    pub(crate) weights: Inbox<Flow<Weights>>,
    pub(crate) inputs: Inbox<Inputs>,
    pub(crate) outputs: Outbox<Flow<Outputs>>,
    pub(crate) gradients: Outbox<Flow<Gradients>>,
    pub(crate) output_slots: Pool,
    pub(crate) gradient_slots: Pool,
    /// Accumulators from a portion's first contribution to its last.
    pub(crate) open: HashMap<Portion, Held>,
}

#[async_trait]
impl Actor for Executor {
    async fn run(&mut self) -> Result<(), BoxedError> {
        while let Some(step) = self.context.next_step(&mut self.weights).await? {
            self.walk(&step).await?;
        }
        self.outputs.send(Flow::Stop);
        self.gradients.send(Flow::Stop);
        Ok(())
    }
}

impl Executor {
    async fn walk(&mut self, step: &Arc<Step>) -> Result<(), BoxedError> {
        // Without an output nothing waits for the Stasher, and its signals would pile up.
        let visits = &step.plan.walks[usize::from(self.device)].visits;
        if visits.iter().any(|&index| !step.plan.visit(index).writes.is_empty()) {
            self.outputs.send(Flow::Begin(step.clone()));
        }
        self.gradients.send(Flow::Begin(step.clone()));
        let mut ends: Vec<Fence> = Vec::new();
        for (own, &index) in visits.iter().enumerate() {
            let visit = step.plan.visit(index);
            let resolved = &step.plan.device_visits[index];
            let layer = Some(visit.layer);
            let Flow::Datum(weights) = self.context.recv(&mut self.weights, layer).await? else {
                unreachable!("a step has weights for each of its visits");
            };
            assert_eq!(weights.device_visit, index, "weights come in the order of visits");
            if let Some(end) = own.checked_sub(2).map(|before| &ends[before]) {
                self.context.fence(Lane::Compute, end, layer).await?;
            }
            ends.push(self.visit(step, resolved, visit, weights).await?);
        }
        self.gradients.send(Flow::End(ends.pop().into_iter().collect()));
        Ok(())
    }

    /// Queues all operations of one visit, and returns the fence of the last.
    async fn visit(
        &mut self,
        step: &Arc<Step>,
        resolved: &DeviceVisit,
        visit: &Visit,
        weights: Weights,
    ) -> Result<Fence, BoxedError> {
        self.open_gradients(step, resolved, visit).await?;
        let last = visit.micro_batches.len() - 1;
        let mut blocks = self.block_uses(step, resolved, visit, &weights);
        let mut end = None;
        for (nth, m) in step.plan.schedule.units(visit).enumerate() {
            let inputs = self.inputs(weights.device_visit, visit, m).await?;
            let outputs = self.outputs(visit, m).await?;
            let work = Work::Compute {
                device_visit: weights.device_visit,
                phase: visit.phase,
                micro_batch: m,
                blocks: blocks.clone(),
                inputs: placed(&visit.reads, &inputs.boundaries, m),
                outputs: placed(&visit.writes, &outputs, m),
            };
            let mut order = Order::at(step, visit, work);
            order.waits = inputs.arrived;
            order.holds = inputs.boundaries;
            if nth == 0 {
                order.waits.extend(weights.arrived.iter().cloned());
                // The first operation of the step replaced what the accumulators held.
                blocks
                    .iter_mut()
                    .filter_map(|of| of.gradient.as_mut())
                    .for_each(|g| g.first = false);
            }
            if nth == last {
                order.holds.push(weights.credit.clone());
                order.holds.extend(weights.blocks.iter().cloned());
            }
            let computed = self.context.queue(order);
            self.send_outputs(weights.device_visit, m, outputs, &computed);
            end = Some(computed);
        }
        let end = end.expect("a visit has a micro-batch");
        self.close_gradients(resolved, &end);
        Ok(end)
    }

    /// Takes an accumulator for each block whose gradient begins with this visit.
    async fn open_gradients(
        &mut self,
        step: &Step,
        resolved: &DeviceVisit,
        visit: &Visit,
    ) -> Result<(), BoxedError> {
        for &(portion, _) in resolved.accumulates.iter().filter(|(_, first)| *first) {
            let content = Content::Gradient(portion, step.gradient_of(visit));
            let pool = &mut self.gradient_slots;
            let held = self.context.acquire(pool, content, Some(visit.layer)).await?;
            self.open.insert(portion, held);
        }
        Ok(())
    }

    /// Pairs each block of a visit with its weight slot and, if it trains, with its accumulator,
    /// as the visit's first operation needs them.
    fn block_uses(
        &self,
        step: &Step,
        resolved: &DeviceVisit,
        visit: &Visit,
        weights: &Weights,
    ) -> Vec<BlockUse> {
        let of = |(&Residence { portion, ahead, .. }, held): (&Residence, &Held)| {
            let trained = resolved.accumulates.iter().find(|(trained, _)| *trained == portion);
            let gradient = trained.map(|&(_, first)| {
                let content = Content::Gradient(portion, step.gradient_of(visit));
                let slot = self.open[&portion].slot(content);
                Accumulator { slot, first }
            });
            let weights = held.slot(Content::Portion(portion, step.version_read(ahead)));
            BlockUse { portion, weights, gradient }
        };
        resolved.residences.iter().zip(&weights.blocks).map(of).collect()
    }

    async fn inputs(
        &mut self,
        device_visit: usize,
        visit: &Visit,
        micro_batch: MicroBatch,
    ) -> Result<Inputs, BoxedError> {
        if visit.reads.is_empty() {
            let boundaries = Vec::new();
            let arrived = Vec::new();
            return Ok(Inputs { device_visit, micro_batch, boundaries, arrived });
        }
        let inputs = self.context.recv(&mut self.inputs, Some(visit.layer)).await?;
        let came = (inputs.device_visit, inputs.micro_batch);
        assert_eq!(came, (device_visit, micro_batch), "inputs come in the order of operations");
        Ok(inputs)
    }

    async fn outputs(
        &mut self,
        visit: &Visit,
        micro_batch: MicroBatch,
    ) -> Result<Vec<Held>, BoxedError> {
        let mut outputs = Vec::with_capacity(visit.writes.len());
        for &boundary in &visit.writes {
            let content = Content::Boundary(boundary, micro_batch);
            let pool = &mut self.output_slots;
            outputs.push(self.context.acquire(pool, content, Some(visit.layer)).await?);
        }
        Ok(outputs)
    }

    fn send_outputs(
        &self,
        device_visit: usize,
        micro_batch: MicroBatch,
        boundaries: Vec<Held>,
        computed: &Fence,
    ) {
        if !boundaries.is_empty() {
            let computed = computed.clone();
            let outputs = Outputs { device_visit, micro_batch, boundaries, computed };
            self.outputs.send(Flow::Datum(outputs));
        }
    }

    /// Sends the gradients that this visit completes to the Reducer.
    fn close_gradients(&mut self, resolved: &DeviceVisit, end: &Fence) {
        for &portion in &resolved.closes {
            let gradient = self.open.remove(&portion).expect("the plan opens before it closes");
            let computed = end.clone();
            self.gradients.send(Flow::Datum(Gradients { portion, gradient, computed }));
        }
    }
}

/// Boundaries of a micro-batch and their slots, as an operation names them.
fn placed(ids: &[BoundaryId], held: &[Held], m: MicroBatch) -> Vec<Placed> {
    let slot = |boundary, held: &Held| held.slot(Content::Boundary(boundary, m));
    let each = ids.iter().zip(held);
    each.map(|(&boundary, held)| Placed { boundary, slot: slot(boundary, held) }).collect()
}
