//! The host lane and the update lane: embedding rows, losses and logits, sums of gradients,
//! updates.

mod balance;
mod embedding;
mod loss;
mod objective;
mod rows;
mod update;
mod visit;

use std::sync::{Arc, Mutex};

use l2l_actors::schedule::{BlockId, Portion, VisitKind};
use l2l_actors::work::Work;
use l2l_actors::{BoxedError, Operation};

use self::visit::HostVisit;
use super::compressed::Compressor;
use super::shared::Shared;
use crate::config::{Config, GradientDtype};
use crate::error::Error;
use crate::optimizers::{UpdateRule, chunk_squares};
use crate::plan::{Holder, Side};
use crate::tensor::widen_in_place;

/// The work of the host lane and the update lane.
pub(super) struct HostLanes {
    shared: Arc<Shared>,
    rule: Box<dyn UpdateRule>,
    neftune_alpha: f64,
    /// Split masters as f32, for an update rule that reads whole tensors.
    unpacked: Mutex<Vec<f32>>,
    /// The factors of PowerSGD, where one process has all groups.
    workspace: Mutex<Vec<f32>>,
    /// Logits of each labelled position, or scores of each sequence, in order.
    logits: Mutex<Vec<f32>>,
}

/// A gradient's sum of squares.
struct Squares {
    sum: f64,
    /// One sum a chunk; filled only with several ranks or clipping by group.
    chunks: Vec<f64>,
}

impl HostLanes {
    pub(super) fn new(
        config: &Config,
        rule: Box<dyn UpdateRule>,
        shared: Arc<Shared>,
    ) -> Result<HostLanes, Error> {
        let plan = &shared.plan;
        let floats = |holder| plan.regions.slots(holder, Side::HostOwn).floats();
        let unpacked = floats(Holder::UnpackedMasters);
        let is_alone = shared.eps.parts().is_none();
        let workspace = if is_alone { floats(Holder::ReceivedGradient) } else { 0 };
        Ok(HostLanes {
            rule,
            neftune_alpha: config.train.neftune_alpha,
            unpacked: Mutex::new(vec![0.0; unpacked]),
            workspace: Mutex::new(vec![0.0; workspace]),
            logits: Mutex::default(),
            shared,
        })
    }

    /// Takes the logits of the last step, if it left any.
    pub(super) fn take_logits(&self) -> Vec<f32> {
        std::mem::take(&mut *self.logits.lock().expect("nothing panics inside"))
    }

    /// Does the work of either lane, and returns its value.
    pub(super) fn run(&self, operation: &Operation) -> Result<f64, BoxedError> {
        match *operation.work() {
            Work::Gather { visit, share, master } => {
                self.gather(&self.visit(operation, visit), share, master);
                Ok(0.0)
            }
            Work::Measure { visit, micro_batch } => {
                let at = self.visit(operation, visit);
                match at.visit.kind {
                    VisitKind::Objective { .. } => self.measure_records(&at, micro_batch),
                    _ => self.take_measures(&at, micro_batch),
                }
                Ok(0.0)
            }
            Work::Answer { visit, micro_batch } => {
                let at = self.visit(operation, visit);
                match at.visit.kind {
                    VisitKind::Objective { .. } => self.weigh(&at, micro_batch),
                    _ => self.answer(&at, micro_batch),
                }
                Ok(0.0)
            }
            Work::Loss { visit, micro_batch } => {
                let at = self.visit(operation, visit);
                match at.visit.kind {
                    VisitKind::Objective { .. } => self.loss_of_records(&at, micro_batch),
                    _ => Ok(self.loss(&at, micro_batch)),
                }
            }
            Work::Join { .. } => self.join(operation).map(|()| 0.0),
            Work::Merge { portion, reduced, into } => {
                self.merge(operation, portion, [reduced, into]);
                Ok(0.0)
            }
            Work::Reduce { block, reduced, to_region } => {
                Ok(self.reduce(operation, block, reduced, to_region))
            }
            Work::Scatter { visit, block, first, gradient } => {
                let squares = self.scatter(&self.visit(operation, visit), block, first, gradient);
                Ok(self.record_squares(operation, block, squares))
            }
            Work::Update { .. } => Ok(self.update(operation)),
            Work::Carry { version } => {
                let carried = operation.step().plan.carried.iter();
                carried.for_each(|&block| self.shared.eps.carry(block, version));
                Ok(0.0)
            }
            ref other => unreachable!("{other} is not work of the host lane or the update lane"),
        }
    }

    /// The visit of an operation, by its place in the schedule.
    fn visit<'a>(&'a self, operation: &'a Operation, index: usize) -> HostVisit<'a> {
        HostVisit {
            state: self.shared.state(operation),
            visit: &operation.step().plan.schedule.visits[index],
            host: self.shared.memory.lease(),
        }
    }

    /// Widens a gradient that has landed, adds the gradients of earlier groups in their order, and
    /// keeps the sum for later groups.
    fn join(&self, operation: &Operation) -> Result<(), BoxedError> {
        let &Work::Join { portion, group, reduced, ref parts, keep } = operation.work() else {
            unreachable!("{} is no join", operation.work())
        };
        let block = portion.block;
        let shared = &*self.shared;
        let host = shared.memory.lease();
        let len = shared.trained_len(portion);
        let landed = host.landing(reduced, len);
        if shared.plan.gradient_dtype() == GradientDtype::Bf16 {
            shared.threads.install(|| widen_in_place(landed));
        }
        let compressor = Compressor::of(shared, block);
        if let Some(compressor) = &compressor {
            self.wait_until_saved(operation, block);
            compressor.compress(group, landed);
        }
        parts.iter().for_each(|&part| shared.threads.add(landed, host.part(part, len)));
        if let Some(part) = keep {
            shared.threads.copy(host.part_mut(part, len), landed);
            return Ok(());
        }
        if let Some(compressor) = compressor.filter(|_| shared.eps.parts().is_none()) {
            compressor.factorise(landed, 0..len, &self.workspace, None)?;
        }
        Ok(())
    }

    /// Puts the gradient of a portion into that of its block. What no tensor has is zero there.
    fn merge(&self, operation: &Operation, portion: Portion, [reduced, into]: [u32; 2]) {
        let shared = &*self.shared;
        let host = shared.memory.lease();
        let of_block = &shared.model.blocks[portion.block.0 as usize];
        let landed = host.landing(reduced, shared.trained_len(portion));
        let whole = host.landing(into, of_block.trained_len());
        if operation.step().plan.schedule.is_first_merged(portion) {
            shared.threads.clear(whole);
        }
        let rows = shared.model.portion(portion).gradients(of_block);
        rows.into_iter().for_each(|rows| shared.threads.copy_rows(whole, landed, rows));
    }

    /// Measures a gradient, and copies it to the block's gradient region where it has to wait.
    fn reduce(&self, operation: &Operation, block: BlockId, reduced: u32, to_region: bool) -> f64 {
        let shared = &*self.shared;
        let landed = shared.memory.lease().landing(reduced, shared.own_trained_len(block));
        if to_region {
            shared.threads.copy(&mut shared.eps.memory().region_mut(block), landed);
        }
        self.record_squares(operation, block, self.measure(block, landed))
    }

    /// The sum of squares of a gradient; with several ranks, of this rank's part.
    fn measure(&self, block: BlockId, gradient: &[f32]) -> Squares {
        let shared = &*self.shared;
        let tensors = shared.eps.tensors(block).trained();
        shared.threads.install(|| {
            if shared.eps.parts().is_some() {
                let chunks = chunk_squares(tensors, gradient);
                return Squares { sum: chunks.iter().sum(), chunks };
            }
            let sum = self.rule.measure(tensors, gradient);
            let has_groups = shared.clipping.has_groups();
            let chunks = if has_groups { chunk_squares(tensors, gradient) } else { Vec::new() };
            Squares { sum, chunks }
        })
    }

    /// Keeps the sums of a gradient's chunks for the norms of all ranks and of groups, and returns
    /// the sum of all.
    fn record_squares(&self, operation: &Operation, block: BlockId, squares: Squares) -> f64 {
        let Squares { sum, chunks } = squares;
        if operation.step().plan.schedule.ranks.count > 1 || !chunks.is_empty() {
            let state = self.shared.state(operation);
            state.squares.lock().expect("nothing panics inside").insert(block, chunks);
        }
        sum
    }

    /// Waits until a block may be changed, if its state is being saved.
    fn wait_until_saved(&self, operation: &Operation, block: BlockId) {
        let beat = || operation.still_runs();
        self.shared.eps.wait_until_saved(block, operation.step().version, &beat);
    }
}
