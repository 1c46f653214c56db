//! Runs every micro-batch through a device visit, then the next visit.
//!
//! It alone takes from the pools of outputs and gradients, both before it queues the operation
//! that writes them. At most two visits are queued on the compute lane: the one that runs and the
//! one behind it, so that the lane never waits for this task and the queue stays short.

use std::collections::HashMap;
use std::sync::Arc;

use async_trait::async_trait;

use crate::crew::{Actor, Desk};
use crate::fence::Fence;
use crate::mailbox::{Inbox, Outbox};
use crate::messages::{Flow, Gradients, Inputs, Outputs, Weights};
use crate::pool::{Content, Held, Pool};
use crate::ports::{Accumulate, Lane, Order, Placed, Step, Trouble, Work};
use crate::schedule::{BlockId, BoundaryId, DeviceVisit, MicroBatch, Visit};

pub(crate) struct Executor {
    pub(crate) desk: Desk,
    pub(crate) weights: Inbox<Flow<Weights>>,
    pub(crate) inputs: Inbox<Inputs>,
    pub(crate) outputs: Outbox<Flow<Outputs>>,
    pub(crate) gradients: Outbox<Flow<Gradients>>,
    pub(crate) output_slots: Pool,
    pub(crate) gradient_slots: Pool,
    /// Accumulators from a block's first contribution to its last.
    pub(crate) open: HashMap<BlockId, Held>,
}

#[async_trait]
impl Actor for Executor {
    async fn run(&mut self) -> Result<(), Trouble> {
        loop {
            match self.desk.recv(&mut self.weights, None).await? {
                Flow::Begin(step) => self.walk(&step).await?,
                Flow::Stop => {
                    self.outputs.send(Flow::Stop);
                    self.gradients.send(Flow::Stop);
                    return Ok(());
                }
                Flow::Datum(_) | Flow::End(_) => unreachable!("the walk takes all weights"),
            }
        }
    }
}

impl Executor {
    async fn walk(&mut self, step: &Arc<Step>) -> Result<(), Trouble> {
        // Without an output nothing waits for the Stasher, and its signals would pile up.
        let writes = |index: usize| !step.plan.visit(index).writes.is_empty();
        if (0..step.plan.device_visits.len()).any(writes) {
            self.outputs.send(Flow::Begin(step.clone()));
        }
        self.gradients.send(Flow::Begin(step.clone()));
        let mut ends: Vec<Fence> = Vec::new();
        for (index, resolved) in step.plan.device_visits.iter().enumerate() {
            let visit = step.plan.visit(index);
            let Flow::Datum(weights) = self.desk.recv(&mut self.weights, Some(visit.layer)).await?
            else {
                unreachable!("a step has weights for each of its visits");
            };
            assert_eq!(weights.device_visit, index, "weights come in the order of visits");
            if let Some(end) = index.checked_sub(2).map(|before| &ends[before]) {
                self.desk.fence(Lane::Compute, end, Some(visit.layer)).await?;
            }
            ends.push(self.visit(step, resolved, visit, weights).await?);
        }
        let last = ends.pop().expect("a plan has a device visit");
        self.gradients.send(Flow::End(last));
        Ok(())
    }

    /// Queues all operations of one visit; its end.
    async fn visit(
        &mut self,
        step: &Arc<Step>,
        resolved: &DeviceVisit,
        visit: &Visit,
        weights: Weights,
    ) -> Result<Fence, Trouble> {
        let slot_of = |(residence, held): (&crate::schedule::Residence, &Held)| {
            held.slot(Content::Block(residence.block, step.number))
        };
        let slots: Vec<u32> =
            resolved.residences.iter().zip(&weights.blocks).map(slot_of).collect();
        for &(block, first) in resolved.accumulates.iter().filter(|(_, first)| *first) {
            debug_assert!(first);
            let content = Content::Gradient(block, step.number);
            let pool = &mut self.gradient_slots;
            let held = self.desk.acquire(pool, 1, content, Some(visit.layer)).await?;
            self.open.extend(held.into_iter().map(|held| (block, held)));
        }
        let (first, last) = (visit.micro_batches.start, visit.micro_batches.end - 1);
        let mut end = None;
        for m in visit.micro_batches.clone() {
            let inputs = self.inputs(weights.device_visit, visit, m).await?;
            let outputs = self.outputs(step, visit, m).await?;
            let place = |ids: &[BoundaryId], held: &[Vec<Held>]| {
                let placed = ids.iter().zip(held).map(|(&boundary, held)| Placed {
                    boundary,
                    slots: held.iter().map(|h| h.slot(Content::Boundary(boundary, m))).collect(),
                });
                placed.collect::<Vec<_>>()
            };
            let work = Work::Compute {
                device_visit: weights.device_visit,
                micro_batch: m,
                weights: slots.clone(),
                inputs: place(&visit.reads, &inputs.boundaries),
                outputs: place(&visit.writes, &outputs),
                gradients: self.accumulators(step, resolved, m == first),
            };
            let mut order = Order::at(step, visit, work);
            order.waits = inputs.arrived;
            order.holds = inputs.boundaries.into_iter().flatten().collect();
            if m == first {
                order.waits.extend(weights.arrived.iter().cloned());
            }
            if m == last {
                order.holds.push(weights.credit.clone());
                order.holds.extend(weights.blocks.iter().cloned());
            }
            let computed = self.desk.queue(order);
            if !outputs.is_empty() {
                self.outputs.send(Flow::Datum(Outputs {
                    device_visit: weights.device_visit,
                    micro_batch: m,
                    boundaries: outputs,
                    computed: computed.clone(),
                }));
            }
            end = Some(computed);
        }
        let end = end.expect("a visit has a micro-batch");
        for &block in &resolved.closes {
            let gradient = self.open.remove(&block).expect("the plan opens before it closes");
            let computed = end.clone();
            self.gradients.send(Flow::Datum(Gradients { block, gradient, computed }));
        }
        Ok(end)
    }

    async fn inputs(
        &mut self,
        device_visit: usize,
        visit: &Visit,
        micro_batch: MicroBatch,
    ) -> Result<Inputs, Trouble> {
        if visit.reads.is_empty() {
            let (boundaries, arrived) = (Vec::new(), Vec::new());
            return Ok(Inputs { device_visit, micro_batch, boundaries, arrived });
        }
        let inputs = self.desk.recv(&mut self.inputs, Some(visit.layer)).await?;
        let came = (inputs.device_visit, inputs.micro_batch);
        assert_eq!(came, (device_visit, micro_batch), "inputs come in the order of operations");
        Ok(inputs)
    }

    async fn outputs(
        &mut self,
        step: &Arc<Step>,
        visit: &Visit,
        micro_batch: MicroBatch,
    ) -> Result<Vec<Vec<Held>>, Trouble> {
        let mut outputs = Vec::with_capacity(visit.writes.len());
        for &boundary in &visit.writes {
            let content = Content::Boundary(boundary, micro_batch);
            let count = step.plan.schedule.boundary(boundary).slots;
            let pool = &mut self.output_slots;
            outputs.push(self.desk.acquire(pool, count, content, Some(visit.layer)).await?);
        }
        Ok(outputs)
    }

    fn accumulators(
        &self,
        step: &Step,
        resolved: &DeviceVisit,
        first_of_visit: bool,
    ) -> Vec<Accumulate> {
        let of = |&(block, first): &(BlockId, bool)| {
            let slot = self.open[&block].slot(Content::Gradient(block, step.number));
            Accumulate { block, slot, first: first && first_of_visit }
        };
        resolved.accumulates.iter().map(of).collect()
    }
}
