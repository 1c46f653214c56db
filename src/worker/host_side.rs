//! The host's side: losses and logits, sums of gradients.

use std::sync::{Arc, Mutex};

use l2l_actors::schedule::{BlockId, BoundaryId, MicroBatch, Role, Visit};
use l2l_actors::work::{GradientAt, Work};
use l2l_actors::{BoxedError, Operation, Step};
use rayon::ThreadPool;
use rayon::prelude::*;

use super::boundaries::Filled;
use super::clipping::Clipping;
use super::memory::HostLease;
use super::ranks::Received;
use super::step::StepState;
use super::{Worker, host_math};
use crate::config::{Config, GradientDtype, NonFinite};
use crate::eps::{Eps, FileTier};
use crate::error::Error;
use crate::kernels::STATISTICS;
use crate::optimizers::{UpdateRule, chunk_squares};
use crate::plan::{Holder, Plan, Side};
use crate::simd::Level;
use crate::tensor::widen_in_place;

/// See the [module](self).
pub(super) struct HostSide {
    pub(super) eps: Eps,
    pub(super) rule: Box<dyn UpdateRule>,
    pub(super) clipping: Clipping,
    pub(super) non_finite: NonFinite,
    gradient_dtype: GradientDtype,
    pub(super) threads: Arc<ThreadPool>,
    pub(super) level: Level,
    pub(super) seed: u64,
    /// Bytes a second of emulated updates, and of an emulated disk.
    pub(super) update_rate: Option<f64>,
    pub(super) disk_rate: Option<f64>,
    /// Bytes a second of an emulated fabric.
    pub(super) fabric_rate: Option<f64>,
    /// Split masters as f32, for an update rule that wants them whole.
    pub(super) unpacked: Mutex<Vec<f32>>,
    pub(super) received: Received,
}

/// A gradient's sum of squares.
pub(super) struct Squares {
    pub(super) sum: f64,
    /// That of each chunk, where other processes have other chunks of the block, or groups of
    /// tensors are clipped by their own norm.
    pub(super) chunks: Vec<f64>,
}

/// Floats that a thread copies at once.
const COPIED: usize = 1 << 18;

impl HostSide {
    pub(super) fn new(
        config: &Config,
        plan: &Plan,
        rule: Box<dyn UpdateRule>,
        eps: Eps,
        threads: &Arc<ThreadPool>,
    ) -> Result<HostSide, Error> {
        let unpacked = plan.regions.slots(Holder::UnpackedMasters, Side::HostOwn).floats();
        Ok(HostSide {
            eps,
            rule,
            clipping: Clipping::new(&config.optimizer),
            non_finite: config.non_finite(),
            gradient_dtype: config.device.gradient_dtype,
            threads: threads.clone(),
            level: Level::best(),
            seed: config.step.seed,
            update_rate: config.update_bytes_per_second()?,
            disk_rate: config.disk_bytes_per_second()?,
            fabric_rate: config.fabric_bytes_per_second()?,
            unpacked: Mutex::new(vec![0.0; unpacked]),
            received: Received::new(plan),
        })
    }

    /// Elements of the trained part of what this process has of a block.
    pub(super) fn trained_len(&self, block: BlockId) -> usize {
        self.eps.tensors(block).trained_len()
    }

    /// The EPS's file.
    pub(super) fn file(&self) -> &FileTier {
        self.eps.file().expect("the plan has blocks on file")
    }

    /// Widens a gradient that came in bf16.
    fn widen(&self, landed: &mut [f32]) {
        if self.gradient_dtype == GradientDtype::Bf16 {
            self.threads.install(|| widen_in_place(landed));
        }
    }

    /// Adds gradients of earlier groups to one that has landed, in this order; copies the sum to
    /// where it is kept.
    fn join(&self, landed: &mut [f32], parts: &[&[f32]], keep: Option<&mut [f32]>) {
        self.threads.install(|| {
            parts.iter().for_each(|part| add(landed, part));
            if let Some(keep) = keep {
                let chunks = keep.par_chunks_mut(COPIED).zip(landed.par_chunks(COPIED));
                chunks.for_each(|(to, from)| to.copy_from_slice(from));
            }
        });
    }

    /// Adds a gradient to a sum.
    pub(super) fn add(&self, sum: &mut [f32], gradient: &[f32]) {
        self.threads.install(|| add(sum, gradient));
    }

    /// Replaces a block's gradient region with a landing block.
    fn reduce(&self, block: BlockId, landed: &[f32]) -> Squares {
        let mut region = self.eps.memory().region_mut(block);
        let region = &mut region[..];
        self.threads.install(|| {
            let chunks = region.par_chunks_mut(COPIED).zip(landed.par_chunks(COPIED));
            chunks.for_each(|(to, from)| to.copy_from_slice(from));
        });
        self.measure(block, region)
    }

    /// A gradient's sum of squares; of several processes that of this one's part.
    pub(super) fn measure(&self, block: BlockId, gradient: &[f32]) -> Squares {
        let tensors = self.eps.tensors(block).trained();
        self.threads.install(|| match self.eps.parts() {
            None => {
                let sum = self.rule.measure(tensors, gradient);
                let has_groups = self.clipping.has_groups();
                let chunks = if has_groups { chunk_squares(tensors, gradient) } else { Vec::new() };
                Squares { sum, chunks }
            }
            Some(_) => {
                let chunks = chunk_squares(tensors, gradient);
                Squares { sum: chunks.iter().sum(), chunks }
            }
        })
    }
}

/// Adds a gradient to a sum, on all threads.
pub(super) fn add(sum: &mut [f32], gradient: &[f32]) {
    sum.par_chunks_mut(COPIED).zip(gradient.par_chunks(COPIED)).for_each(|(sum, gradient)| {
        sum.iter_mut().zip(gradient).for_each(|(sum, gradient)| *sum += gradient);
    });
}

impl Worker {
    /// The lanes of the host and of updates.
    pub(super) fn on_host(&self, operation: &Operation) -> Result<f64, BoxedError> {
        let step = operation.step();
        let host = self.memory.lease();
        let visit_of = |index: usize| &step.plan.schedule.visits[index];
        match *operation.work() {
            Work::Gather { visit, share, master } => {
                self.gather(step, &host, visit_of(visit), share, master);
            }
            Work::Loss { visit, micro_batch } => {
                let loss = self.loss(step, &host, visit_of(visit), micro_batch);
                if step.plan.schedule.ranks.count > 1 {
                    let state = self.steps.of(step.number);
                    let mut losses = state.losses.lock().expect("nothing panics inside");
                    losses.insert(micro_batch, loss);
                }
                if !loss.is_finite() && self.host.non_finite == NonFinite::Stop {
                    return Err(self.loss_not_finite(step, visit, micro_batch, loss));
                }
                return Ok(loss);
            }
            Work::Join { block, group, reduced, ref parts, keep } => {
                let len = self.trained_len(block);
                let parts: Vec<&[f32]> = parts.iter().map(|&part| host.part(part, len)).collect();
                let landed = host.landing(reduced, len);
                let is_last = keep.is_none();
                let keep = keep.map(|part| host.part_mut(part, len));
                self.host.widen(landed);
                let feedback = self.host.eps.feedback();
                if let Some(feedback) = feedback {
                    self.wait_until_saved(operation, block);
                    self.host.compress(feedback, block, group, landed);
                }
                self.host.join(landed, &parts, keep);
                let is_alone = self.host.eps.parts().is_none();
                if let Some(feedback) = feedback.filter(|_| is_last && is_alone) {
                    self.host.factorise(feedback, block, (landed, 0..len), None)?;
                }
            }
            Work::Reduce { block, reduced, to_region } => {
                let landed = host.landing(reduced, self.host.trained_len(block));
                let squares = if to_region {
                    self.host.reduce(block, landed)
                } else {
                    self.host.measure(block, landed)
                };
                return self.finite(step, block, squares);
            }
            Work::Scatter { visit, block, first, gradient } => {
                let landing = match gradient {
                    GradientAt::Landing(slot) => {
                        Some(host.landing(slot, self.host.trained_len(block)))
                    }
                    GradientAt::Region => None,
                };
                let squares = self.scatter(step, &host, visit_of(visit), block, first, landing);
                return self.finite(step, block, squares);
            }
            Work::Update { block, version, master, gradient, norm } => {
                let state = self.steps.of(version);
                let rate = state.learning_rate;
                let at = (master, gradient);
                let has_groups = self.host.clipping.has_groups();
                if self.host.non_finite == NonFinite::Skip && norm.is_some_and(|n| !n.is_finite()) {
                    self.host.eps.carry(block, version);
                    return Ok(0.0);
                }
                self.wait_until_saved(operation, block);
                let sums = has_groups.then(|| self.group_sums(&state));
                let factors = self.host.clipping.factors(norm, sums, state.loss_scale);
                let updated = self.host.update(&host, block, version, at, &factors, rate);
                return self.finite(step, block, updated.unwrap_or_else(|not_finite| not_finite));
            }
            Work::Carry { version } => {
                let eps = &self.host.eps;
                step.plan.carried.iter().for_each(|&block| eps.carry(block, version));
            }
            ref other => unreachable!("{other} is not of the host's lanes"),
        }
        Ok(0.0)
    }

    /// Waits until a block may be changed, if its state is being saved.
    fn wait_until_saved(&self, operation: &Operation, block: BlockId) {
        let beat = || operation.still_runs();
        self.host.eps.wait_until_saved(block, operation.step().number, &beat);
    }

    /// The sums of squares of each group's gradients, once all are measured.
    fn group_sums<'s>(&self, state: &'s StepState) -> &'s [f64] {
        state.group_sums.get_or_init(|| {
            let squares = state.squares.lock().expect("nothing panics inside");
            let mut sums = self.host.clipping.no_sums();
            for (block, chunks) in &*squares {
                let tensors = self.host.eps.tensors(*block).trained();
                self.host.clipping.add(&mut sums, tensors, chunks);
            }
            sums
        })
    }

    /// A micro-batch's share of the loss; keeps its logits, if they left the device.
    fn loss(&self, step: &Step, host: &HostLease<'_>, visit: &Visit, m: MicroBatch) -> f64 {
        let state = self.steps.of(step.number);
        let schedule = &step.plan.schedule;
        let scores_vocabulary = self.model.shape.scores_vocabulary();
        if state.purpose.scores() {
            self.keep_logits(step, &state, host, visit, m);
            if scores_vocabulary {
                return 0.0; // the tiles wrote their logits and summed nothing
            }
        }
        let id = schedule.with_role(&visit.reads, Role::Statistics).expect("a loss reads it");
        let state = &*state;
        let layer = visit.layer;
        let boundary = id;
        let place = self.in_stash(Filled { step, state, layer, boundary, micro_batch: m });
        let statistics = host.stashed(place);
        let of_position = |statistics: &[f32]| {
            if scores_vocabulary {
                host_math::token_loss(statistics, &*self.model.loss)
            } else {
                host_math::sequence_loss(statistics)
            }
        };
        let losses = statistics.chunks_exact(STATISTICS).filter_map(of_position);
        losses.map(f64::from).sum::<f64>() / state.batch.labelled as f64
    }

    /// Keeps the logits of a micro-batch, sequence by sequence, tile after tile.
    fn keep_logits(
        &self,
        step: &Step,
        state: &StepState,
        host: &HostLease<'_>,
        visit: &Visit,
        m: MicroBatch,
    ) {
        let schedule = &step.plan.schedule;
        let is_logits = |id: &&BoundaryId| schedule.boundary(**id).role == Role::Logits;
        let tiles = visit.reads.iter().filter(is_logits);
        let layer = visit.layer;
        let filled = |&boundary| Filled { step, state, layer, boundary, micro_batch: m };
        let tiles: Vec<&[f32]> = tiles.map(|id| host.stashed(self.in_stash(filled(id)))).collect();
        let sequences = state.range(m, schedule).sequences.len();
        let mut logits = self.results.logits.lock().expect("nothing panics inside");
        if let [all] = tiles[..] {
            return logits.extend(all); // of classes, and of a vocabulary in one tile
        }
        for sequence in 0..sequences {
            for tile in &tiles {
                let floats = tile.len() / sequences;
                logits.extend(&tile[sequence * floats..][..floats]);
            }
        }
    }
}
