//! The host's side: gathers and scatters of embedding rows, losses and logits, sums of gradients.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use half::{bf16, f16};
use l2l_actors::schedule::{
    BlockId, Boundary, BoundaryId, Encoding, MicroBatch, Role, Share, Visit,
};
use l2l_actors::work::{GradientAt, MasterAt, Work};
use l2l_actors::{BoxedError, Operation, Step};
use rayon::ThreadPool;
use rayon::prelude::*;

use super::boundaries::Filled;
use super::clipping::Clipping;
use super::memory::HostLease;
use super::ranks::Exchanged;
use super::step::StepState;
use super::{Worker, host_math, not_finite};
use crate::config::{Config, NonFinite};
use crate::eps::{Eps, FileTier, TableRows};
use crate::error::Error;
use crate::kernels::STATISTICS;
use crate::optimizers::{UpdateRule, chunk_squares, unpacked_len};
use crate::plan::Plan;
use crate::simd::Level;
use crate::tensor::{Dtype, Element};

/// See the [module](self).
pub(super) struct HostSide {
    pub(super) eps: Eps,
    pub(super) rule: Box<dyn UpdateRule>,
    pub(super) clipping: Clipping,
    pub(super) non_finite: NonFinite,
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
    pub(super) exchanged: Exchanged,
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
        let format = config.master_format()?;
        let trains = plan.trains();
        let unpacked = if trains { unpacked_len(&*rule, format, plan.largest_tensor) } else { 0 };
        Ok(HostSide {
            eps,
            rule,
            clipping: Clipping::new(&config.optimizer),
            non_finite: config.non_finite(),
            threads: threads.clone(),
            level: Level::best(),
            seed: config.step.seed,
            update_rate: config.update_bytes_per_second()?,
            disk_rate: config.disk_bytes_per_second()?,
            fabric_rate: config.fabric_bytes_per_second()?,
            unpacked: Mutex::new(vec![0.0; unpacked]),
            exchanged: Exchanged::new(plan),
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
fn add(sum: &mut [f32], gradient: &[f32]) {
    sum.par_chunks_mut(COPIED).zip(gradient.par_chunks(COPIED)).for_each(|(sum, gradient)| {
        sum.iter_mut().zip(gradient).for_each(|(sum, gradient)| *sum += gradient);
    });
}

/// Rows of the vocabulary for the tokens of a micro-batch.
struct Gathered<'a> {
    tokens: &'a [u32],
    /// A tile of the vocabulary, and its first row there.
    table: &'a TableRows<'a>,
    first: usize,
    channels: usize,
    scale: f32,
}

impl Gathered<'_> {
    /// Writes those that lie in the tile. `noise`: rows of the tile, and the noise of each row that is
    /// written.
    fn write<Y: Element>(
        &self,
        x: &mut [Y],
        noise: Option<(usize, impl Fn(usize) -> (u64, f32) + Sync)>,
    ) {
        let Gathered { tokens, table, first, channels, scale } = *self;
        host_math::gather(x, tokens, table, first, channels, scale);
        if let Some((rows, noise)) = noise {
            host_math::add_noise(x, tokens, (first, rows), channels, noise);
        }
    }
}

/// Gradients of hidden states, each a token's, in the order of the tokens.
struct Scattered<'a> {
    level: Level,
    tokens: &'a [u32],
    /// Those of each micro-batch as they are stashed, and their rows.
    dx: &'a [(&'a [f32], usize)],
    channels: usize,
    scale: f32,
}

impl Scattered<'_> {
    /// Adds those that lie in a table to its rows.
    fn add_to<D: Element>(&self, table: host_math::Table<'_>) {
        let rows = self.dx.iter().flat_map(|&(dx, rows)| {
            bytemuck::cast_slice::<f32, D>(dx).chunks_exact(self.channels).take(rows)
        });
        let rows: Vec<&[D]> = rows.collect();
        host_math::scatter(self.level, table, self.tokens, &rows, self.scale);
    }
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
                    let reads = &visit_of(visit).reads;
                    let on = self.computed_on(step, |visit| {
                        visit.micro_batches.contains(&micro_batch)
                            && visit.writes.iter().any(|id| reads.contains(id))
                    });
                    return Err(not_finite(format!("the loss is {loss}{on}")));
                }
                return Ok(loss);
            }
            Work::Join { block, reduced, ref parts, keep } => {
                let len = self.trained_len(block);
                let parts: Vec<&[f32]> = parts.iter().map(|&part| host.part(part, len)).collect();
                let keep = keep.map(|part| host.part_mut(part, len));
                self.host.join(host.landing(reduced, len), &parts, keep);
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
                let (rate, at) = (state.learning_rate, (master, gradient));
                let has_groups = self.host.clipping.has_groups();
                if self.host.non_finite == NonFinite::Skip && norm.is_some_and(|n| !n.is_finite()) {
                    self.host.eps.carry(block, version);
                    return Ok(0.0);
                }
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

    /// A gradient's sum of squares.
    ///
    /// # Errors
    /// It is not finite; with the devices that computed the gradient.
    fn finite(
        &self,
        step: &Step,
        block: BlockId,
        Squares { sum, chunks }: Squares,
    ) -> Result<f64, BoxedError> {
        if sum.is_finite() || self.host.non_finite != NonFinite::Stop {
            if step.plan.schedule.ranks.count > 1 || !chunks.is_empty() {
                let state = self.steps.of(step.number);
                state.squares.lock().expect("nothing panics inside").insert(block, chunks);
            }
            return Ok(sum);
        }
        let on = self.computed_on(step, |visit| {
            visit.phase.adds_gradients() && visit.blocks().contains(&block)
        });
        Err(not_finite(format!("the gradient of {block} is not finite{on}")))
    }

    /// Words for an error message: which devices ran some visits. Empty if there is one device.
    fn computed_on(&self, step: &Step, is_one: impl Fn(&&Visit) -> bool) -> String {
        let devices: BTreeSet<_> =
            step.plan.schedule.device_visits().filter(is_one).filter_map(Visit::device).collect();
        let names: Vec<String> = devices.iter().map(|device| device.to_string()).collect();
        match &names[..] {
            names if names.is_empty() || self.devices.len() == 1 => String::new(),
            [one] => format!("; device {one} computed it"),
            several => format!("; devices {} computed it", several.join(", ")),
        }
    }

    /// Writes a share of a gather: the embedding rows of its blocks, for its micro-batches. The
    /// share with the visit's first block writes the first statistics.
    fn gather(
        &self,
        step: &Step,
        host: &HostLease<'_>,
        visit: &Visit,
        share: Share,
        master: MasterAt,
    ) {
        let state = self.steps.of(step.number);
        let (blocks, micro_batches) = match &share {
            Share::MicroBatch(m) => (visit.blocks(), *m..*m + 1),
            Share::Block(block) => (std::slice::from_ref(block), visit.micro_batches.clone()),
        };
        for m in micro_batches {
            for &block in blocks {
                match master {
                    MasterAt::Memory => {
                        let lease = self.host.eps.memory().read(block, step.number);
                        self.gather_block(step, &state, host, visit, m, (block, &lease.parameters));
                    }
                    MasterAt::Slot(slot) => {
                        let stored = host.read_slot(slot);
                        self.gather_block(step, &state, host, visit, m, (block, stored));
                    }
                }
            }
            if blocks.first() == visit.blocks().first() {
                self.begin_statistics(step, &state, host, visit, m);
            }
        }
    }

    /// Copies the rows of a micro-batch's tokens that lie in a block's tile of the vocabulary.
    fn gather_block(
        &self,
        step: &Step,
        state: &StepState,
        host: &HostLease<'_>,
        visit: &Visit,
        m: MicroBatch,
        (block, stored): (BlockId, &[f32]),
    ) {
        let schedule = &step.plan.schedule;
        let tile = visit.blocks().iter().position(|&id| id == block);
        let tile = self.model.tiles[tile.expect("a share is of the visit's blocks")];
        let tokens = &state.batch.tokens[state.range(m, schedule).rows];
        let id = schedule.with_role(&visit.writes, Role::Hidden).expect("a gather writes it");
        let (layer, boundary) = (visit.layer, id);
        let x = self.in_stash(Filled { step, state, layer, boundary, micro_batch: m });
        let (x, channels) = (host.stashed_mut(x), self.model.shape.hidden);
        let tensors = &self.model.blocks[block.0 as usize];
        let (first, table) = (tile.first, self.host.eps.table_rows(tensors, stored));
        let scale = self.model.shape.embedding_scale;
        let rows = Gathered { tokens, table: &table, first, channels, scale };
        let noise = (self.neftune_alpha > 0.0 && state.purpose.trains())
            .then(|| state.metadata(m, schedule, self.seed));
        let alpha = self.neftune_alpha;
        let noise = noise.as_ref().map(|batch| {
            let batch = batch.view();
            (tile.rows, move |row: usize| batch.noise(row, alpha, channels))
        });
        self.host.threads.install(|| match self.stashed_dtype(schedule.boundary(id)) {
            Dtype::F32 => rows.write(x, noise),
            Dtype::Bf16 => rows.write(bytemuck::cast_slice_mut::<_, bf16>(x), noise),
            Dtype::F16 => rows.write(bytemuck::cast_slice_mut::<_, f16>(x), noise),
        });
    }

    /// The dtype in which the stash holds a boundary of hidden states or their gradients.
    pub(super) fn stashed_dtype(&self, boundary: &Boundary) -> Dtype {
        match boundary.encoding {
            Encoding::PackedBf16 => Dtype::Bf16,
            Encoding::Plain => self.plan.dtype,
        }
    }

    fn begin_statistics(
        &self,
        step: &Step,
        state: &StepState,
        host: &HostLease<'_>,
        visit: &Visit,
        m: MicroBatch,
    ) {
        let schedule = &step.plan.schedule;
        let targets = &state.batch.targets[state.range(m, schedule).rows];
        let id = schedule.with_role(&visit.writes, Role::Statistics).expect("a gather writes it");
        let (layer, boundary) = (visit.layer, id);
        let place = self.in_stash(Filled { step, state, layer, boundary, micro_batch: m });
        let statistics = host.stashed_mut(place);
        let positions = statistics.chunks_exact_mut(STATISTICS).zip(targets);
        positions.for_each(|(of_one, &target)| host_math::begin_statistics(of_one, target));
    }

    /// A micro-batch's share of the loss; keeps its logits, if they left the device.
    fn loss(&self, step: &Step, host: &HostLease<'_>, visit: &Visit, m: MicroBatch) -> f64 {
        let (state, schedule) = (self.steps.of(step.number), &step.plan.schedule);
        let scores_vocabulary = self.model.shape.scores_vocabulary();
        if state.purpose.scores() {
            self.keep_logits(step, &state, host, visit, m);
            if scores_vocabulary {
                return 0.0; // the tiles wrote their logits and summed nothing
            }
        }
        let id = schedule.with_role(&visit.reads, Role::Statistics).expect("a loss reads it");
        let (state, layer, boundary) = (&*state, visit.layer, id);
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
    ) -> Squares {
        let (state, schedule) = (self.steps.of(step.number), &step.plan.schedule);
        let id = schedule.with_role(&visit.reads, Role::HiddenGradient);
        let id = id.expect("a scatter reads it");
        let layer = visit.layer;
        let of_micro_batch = |micro_batch: MicroBatch| {
            let filled = Filled { step, state: &state, layer, boundary: id, micro_batch };
            let rows = state.range(micro_batch, schedule).rows.len();
            (host.stashed(self.in_stash(filled)), rows)
        };
        let dx = (0..schedule.micro_batches.len() as MicroBatch).map(of_micro_batch);
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
        let scale = self.model.shape.embedding_scale;
        // Of several processes, this one's part of the table.
        let from = self.host.eps.parts().map_or(0, |parts| parts.own(block).start);
        let floats = (tile.rows * channels).saturating_sub(from).min(gradient.len());
        let table = host_math::Table { rows: &mut gradient[..floats], from, first: tile.first };
        let others = self.host.exchanged.rows.read().expect("nothing panics inside");
        let (dx, tokens): (Vec<(&[f32], usize)>, &[u32]) = match &state.dealt {
            None => (dx.collect(), &state.batch.tokens),
            Some(dealt) => (vec![(&others, dealt.rows.len())], &dealt.tokens),
        };
        let level = self.host.level;
        let rows = Scattered { level, tokens, dx: &dx, channels, scale };
        self.host.threads.install(|| match self.stashed_dtype(schedule.boundary(id)) {
            Dtype::F32 => rows.add_to::<f32>(table),
            Dtype::Bf16 => rows.add_to::<bf16>(table),
            Dtype::F16 => rows.add_to::<f16>(table),
        });
        self.host.measure(block, gradient)
    }
}
