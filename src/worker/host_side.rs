//! The host's side: gathers and scatters of embedding rows, losses and logits, sums of gradients.

use std::sync::{Arc, Mutex};

use half::bf16;
use l2l_actors::ports::{Operation, Step, Trouble, Work};
use l2l_actors::schedule::{BlockId, BoundaryId, MicroBatch, Visit};
use rayon::ThreadPool;
use rayon::prelude::*;

use super::memory::HostLease;
use super::step::StepState;
use super::{Worker, host_math, not_finite};
use crate::config::Config;
use crate::eps::{Eps, FileTier};
use crate::error::Error;
use crate::kernels::STATISTICS;
use crate::models::block_len;
use crate::optimizers::UpdateRule;
use crate::optimizers::split::published;
use crate::plan::Plan;
use crate::simd::Level;
use crate::tensor::{packed, packed_mut};

/// See the [module](self).
pub(super) struct HostSide {
    pub(super) eps: Eps,
    pub(super) rule: Box<dyn UpdateRule>,
    pub(super) clip_norm: Option<f64>,
    pub(super) threads: Arc<ThreadPool>,
    pub(super) level: Level,
    /// Bytes a second of emulated updates, and of an emulated disk.
    pub(super) update_rate: Option<f64>,
    pub(super) disk_rate: Option<f64>,
    /// Floats of one part of a block of a file: masters, or one of its states.
    pub(super) file_part: usize,
    /// Split masters as f32, for an update rule that wants them whole.
    pub(super) unpacked: Mutex<Vec<f32>>,
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
        let is_split = eps.split && plan.trains();
        let unpacked = if is_split { rule.unpacked_len(plan.largest_block) } else { 0 };
        Ok(HostSide {
            eps,
            rule,
            clip_norm: config.optimizer.clip_norm,
            threads: threads.clone(),
            level: Level::best(),
            update_rate: config.update_bytes_per_second()?,
            disk_rate: config.disk_bytes_per_second()?,
            file_part: plan.host_block(),
            unpacked: Mutex::new(vec![0.0; unpacked]),
        })
    }

    pub(super) fn block_len(&self, block: BlockId) -> usize {
        block_len(self.eps.tensors(block))
    }

    /// The EPS's file.
    pub(super) fn file(&self) -> &FileTier {
        self.eps.file().expect("the plan has blocks on file")
    }

    /// Replaces a block's gradient region with a landing block; its sum of squares.
    fn reduce(&self, block: BlockId, landed: &[f32]) -> f64 {
        let mut region = self.eps.memory().region_mut(block);
        let region = &mut region[..];
        self.threads.install(|| {
            let chunks = region.par_chunks_mut(COPIED).zip(landed.par_chunks(COPIED));
            chunks.for_each(|(to, from)| to.copy_from_slice(from));
        });
        self.measure(block, region)
    }

    /// A gradient's sum of squares.
    pub(super) fn measure(&self, block: BlockId, gradient: &[f32]) -> f64 {
        self.threads.install(|| self.rule.measure(self.eps.tensors(block), gradient))
    }
}

impl Worker {
    /// The lanes of the host and of updates.
    pub(super) fn on_host(&self, operation: &Operation) -> Result<f64, Trouble> {
        let step = operation.step();
        let host = self.memory.lease(self.device.device());
        let visit_of = |index: usize| &step.plan.schedule.visits[index];
        match *operation.work() {
            Work::Gather { visit, micro_batch } => {
                self.gather(step, &host, visit_of(visit), micro_batch);
            }
            Work::GatherBlock { visit, block, reads } => {
                let table = &host.read_slot(reads)[..self.host.block_len(block)];
                self.gather_block(step, &host, visit_of(visit), block, table);
            }
            Work::Loss { visit, micro_batch } => {
                let loss = self.loss(step, &host, visit_of(visit), micro_batch);
                if !loss.is_finite() {
                    return Err(not_finite(format!("the loss is {loss}")));
                }
                return Ok(loss);
            }
            Work::Reduce { block, reduced } => {
                let landed = host.landing(reduced, self.host.block_len(block));
                return Ok(self.host.reduce(block, landed));
            }
            Work::Measure { block, reduced } => {
                let landed = host.landing(reduced, self.host.block_len(block));
                return Ok(self.host.measure(block, landed));
            }
            Work::Scatter { visit, block, first, reduced } => {
                let len = self.host.block_len(block);
                let landing = reduced.map(|slot| host.landing(slot, len));
                return Ok(self.scatter(step, &host, visit_of(visit), block, first, landing));
            }
            Work::Update { block, version, gradient, states, norm } => {
                let rate = self.steps.of(version).learning_rate;
                return self.host.update(&host, block, version, gradient, states, norm, rate);
            }
            Work::Carry { version } => {
                let eps = &self.host.eps;
                step.plan.carried.iter().for_each(|&block| eps.carry(block, version));
            }
            ref other => unreachable!("{other} is not of the host's lanes"),
        }
        Ok(0.0)
    }

    /// Writes the embedding rows and the first statistics of a micro-batch.
    fn gather(&self, step: &Step, host: &HostLease<'_>, visit: &Visit, m: MicroBatch) {
        let state = self.steps.of(step.number);
        for (tile, &block) in visit.blocks().iter().enumerate() {
            let lease = self.host.eps.memory().read(block, step.number);
            self.gather_tile(step, &state, host, visit.writes[0], m, tile, &lease.parameters);
        }
        self.begin_statistics(step, &state, host, visit.writes[1], m);
    }

    /// Writes the rows of one tile, as it was read, for all micro-batches; with the first tile, their
    /// first statistics.
    fn gather_block(
        &self,
        step: &Step,
        host: &HostLease<'_>,
        visit: &Visit,
        block: BlockId,
        table: &[f32],
    ) {
        let state = self.steps.of(step.number);
        let tile = visit.blocks().iter().position(|&id| id == block).expect("a block of its");
        for m in visit.micro_batches.clone() {
            self.gather_tile(step, &state, host, visit.writes[0], m, tile, table);
            if tile == 0 {
                self.begin_statistics(step, &state, host, visit.writes[1], m);
            }
        }
    }

    /// Copies the rows of a micro-batch's tokens that lie in a tile, whose block `table` is.
    #[allow(clippy::too_many_arguments, reason = "what both gathers share")]
    fn gather_tile(
        &self,
        step: &Step,
        state: &StepState,
        host: &HostLease<'_>,
        to: BoundaryId,
        m: MicroBatch,
        tile: usize,
        table: &[f32],
    ) {
        let lies = state.rows(m, &step.plan.schedule);
        let tokens = &state.batch.tokens[lies.positions.clone()];
        let x = host.stashed_mut(state.stash.place(to, m));
        let (tile, channels) = (self.model.tiles[tile], self.model.shape.hidden);
        let (floats, sequence) = (tile.rows * channels, lies.rows.positions * channels);
        self.host.threads.install(|| {
            if x.len() == lies.rows.sequences * sequence {
                let table = &table[..floats];
                return host_math::gather(x, tokens, table, tile.first, channels, |x| x);
            }
            let tokens = tokens.chunks_exact(lies.rows.positions);
            for (x, tokens) in packed_mut(x, lies.rows.sequences).zip(tokens) {
                let (x, first) = (&mut x[..sequence], tile.first);
                if self.host.eps.split {
                    let table = &published(table)[..floats];
                    host_math::gather(x, tokens, table, first, channels, |x| x);
                } else {
                    let table = &table[..floats];
                    host_math::gather(x, tokens, table, first, channels, bf16::from_f32);
                }
            }
        });
    }

    fn begin_statistics(
        &self,
        step: &Step,
        state: &StepState,
        host: &HostLease<'_>,
        to: BoundaryId,
        m: MicroBatch,
    ) {
        let targets = &state.batch.targets[state.rows(m, &step.plan.schedule).positions];
        let statistics = host.stashed_mut(state.stash.place(to, m));
        let positions = statistics.chunks_exact_mut(STATISTICS).zip(targets);
        positions.for_each(|(of_one, &target)| host_math::begin_statistics(of_one, target));
    }

    /// A micro-batch's share of the loss; keeps its logits, if they left the device.
    fn loss(&self, step: &Step, host: &HostLease<'_>, visit: &Visit, m: MicroBatch) -> f64 {
        let state = self.steps.of(step.number);
        let scores_tokens = self.model.shape.scores_tokens();
        if state.purpose.scores() {
            self.keep_logits(&state, host, m);
            if scores_tokens {
                return 0.0; // the tiles wrote their logits and summed nothing
            }
        }
        let statistics = host.stashed(state.stash.place(visit.reads[0], m));
        let of_position = |statistics: &[f32]| {
            if scores_tokens {
                host_math::token_loss(statistics, &*self.model.loss)
            } else {
                host_math::sequence_loss(statistics)
            }
        };
        let losses = statistics.chunks_exact(STATISTICS).filter_map(of_position);
        losses.map(f64::from).sum::<f64>() / state.batch.labelled as f64
    }

    /// Keeps the logits of a micro-batch, sequence by sequence, tile after tile.
    fn keep_logits(&self, state: &StepState, host: &HostLease<'_>, m: MicroBatch) {
        let mut logits = self.results.logits.lock().expect("nothing panics inside");
        let tiles = state.carries.told.iter();
        let tiles: Vec<(&[f32], usize)> =
            tiles.map(|&(id, floats)| (host.stashed(state.stash.place(id, m)), floats)).collect();
        let sequences = tiles.first().map_or(0, |(tile, floats)| tile.len() / floats);
        for sequence in 0..sequences {
            for (tile, floats) in &tiles {
                logits.extend(&tile[sequence * floats..][..*floats]);
            }
        }
    }

    /// Adds the embedding's gradient to a tile's, in its region or a landing block; the sum of
    /// squares of what that comes to.
    fn scatter(
        &self,
        step: &Step,
        host: &HostLease<'_>,
        visit: &Visit,
        block: BlockId,
        first: bool,
        landing: Option<&mut [f32]>,
    ) -> f64 {
        let state = self.steps.of(step.number);
        let dx = host.stashed(state.stash.whole(visit.reads[0]));
        let mut region;
        let gradient = match landing {
            Some(landing) => landing,
            None => {
                region = self.host.eps.memory().region_mut(block);
                &mut region[..]
            }
        };
        if first {
            gradient.fill(0.0);
        }
        let (tile, channels) = (self.model.tiles[block.0 as usize], self.model.shape.hidden);
        let table = &mut gradient[..tile.rows * channels];
        let (level, first, tokens) = (self.host.level, tile.first, &*state.tokens);
        let (sequences, positions) = (state.batch.lengths.len(), state.batch.positions);
        self.host.threads.install(|| {
            if dx.len() == sequences * positions * channels {
                let of = |at: usize| &dx[at * channels..][..channels];
                host_math::scatter(level, table, tokens, of, first, channels, |dx| dx);
            } else {
                let packed: Vec<&[bf16]> = packed(dx, sequences).collect();
                let of =
                    |at: usize| &packed[at / positions][at % positions * channels..][..channels];
                host_math::scatter(level, table, tokens, of, first, channels, bf16::to_f32);
            }
        });
        self.host.measure(block, gradient)
    }
}
