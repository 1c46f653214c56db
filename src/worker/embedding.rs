//! The embedding, which the host computes: rows of the vocabulary for the tokens of a batch, and
//! the sums of their gradients.

use half::{bf16, f16};
use l2l_actors::Step;
use l2l_actors::schedule::{BlockId, Encoding, MicroBatch, Role, Share, Visit};
use l2l_actors::work::MasterAt;
use rayon::prelude::*;

use super::boundaries::Filled;
use super::host_side::Squares;
use super::memory::HostLease;
use super::step::StepState;
use super::{Worker, host_math};
use crate::eps::TableRows;
use crate::kernels::STATISTICS;
use crate::simd::Level;
use crate::tensor::{Dtype, Element, Packing, int8};

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
    /// Writes those that lie in the tile. `noise`: rows of the tile, and the noise of each row that
    /// is written.
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

impl Gathered<'_> {
    /// The same for rows that are packed.
    fn write_packed(
        &self,
        x: &mut [f32],
        packing: Packing,
        noise: Option<(usize, impl Fn(usize) -> (u64, f32) + Sync)>,
    ) {
        let packing = Packing { dtype: Dtype::F32, ..packing };
        let rows = x.par_chunks_exact_mut(packing.floats(1)).zip(self.tokens).enumerate();
        rows.for_each(|(at, (packed, token))| {
            let row = (*token as usize).checked_sub(self.first);
            if row.is_none_or(|row| (row + 1) * self.channels > self.table.len()) {
                return;
            }
            let noise = noise.as_ref().map(|(rows, noise)| (*rows, move |_| noise(at)));
            let mut row = vec![0.0_f32; self.channels];
            Gathered { tokens: std::slice::from_ref(token), ..*self }.write(&mut row, noise);
            packing.pack(packed, &row);
        });
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

    /// The same for rows in 8 bits.
    fn add_int8_to(&self, table: host_math::Table<'_>, block: u32) {
        let row_floats = int8::row_floats(self.channels, block);
        let rows = self.dx.iter().flat_map(|&(dx, rows)| dx.chunks_exact(row_floats).take(rows));
        let rows: Vec<int8::Int8Row<'_>> =
            rows.map(|packed| int8::Int8Row::new(packed, self.channels, block)).collect();
        host_math::scatter(self.level, table, self.tokens, &rows, self.scale);
    }
}

impl Worker {
    /// Writes a share of a gather: the embedding rows of its blocks, for its micro-batches. The
    /// share with the visit's first block writes the first statistics.
    pub(super) fn gather(
        &self,
        step: &Step,
        host: &HostLease<'_>,
        visit: &Visit,
        share: Share,
        master: MasterAt,
    ) {
        let state = self.steps.of(step.number);
        let (blocks, micro_batches) = match &share {
            Share::MicroBatch(m) => (&visit.blocks[..], *m..*m + 1),
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
            if blocks.first() == visit.blocks.first() {
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
        let tile = visit.blocks.iter().position(|&id| id == block);
        let tile = self.model.tiles[tile.expect("a share is of the visit's blocks")];
        let tokens = &state.batch.tokens[state.range(m, schedule).rows];
        let id = schedule.with_role(&visit.writes, Role::Hidden).expect("a gather writes it");
        let layer = visit.layer;
        let boundary = id;
        let x = self.in_stash(Filled { step, state, layer, boundary, micro_batch: m });
        let x = host.stashed_mut(x);
        let channels = self.model.shape.hidden;
        let tensors = &self.model.blocks[block.0 as usize];
        let first = tile.first;
        let table = self.host.eps.table_rows(tensors, stored);
        let scale = self.model.shape.embedding_scale;
        let rows = Gathered { tokens, table: &table, first, channels, scale };
        let noise = (self.neftune_alpha > 0.0 && state.purpose.trains())
            .then(|| state.metadata(m, schedule, self.seed));
        let alpha = self.neftune_alpha;
        let noise = noise.as_ref().map(|batch| {
            let batch = batch.view();
            (tile.rows, move |row: usize| batch.noise(row, alpha, channels))
        });
        let packing = self.packing(schedule.boundary(id));
        self.host.threads.install(|| match (packing.encoding, packing.dtype) {
            (Encoding::Int8 { .. }, _) => rows.write_packed(x, packing, noise),
            (Encoding::Plain, Dtype::F32) => rows.write(x, noise),
            (Encoding::Bf16, _) | (Encoding::Plain, Dtype::Bf16) => {
                rows.write(bytemuck::cast_slice_mut::<_, bf16>(x), noise);
            }
            (Encoding::Plain, Dtype::F16) => {
                rows.write(bytemuck::cast_slice_mut::<_, f16>(x), noise);
            }
        });
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
        let layer = visit.layer;
        let boundary = id;
        let place = self.in_stash(Filled { step, state, layer, boundary, micro_batch: m });
        let statistics = host.stashed_mut(place);
        let positions = statistics.chunks_exact_mut(STATISTICS).zip(targets);
        positions.for_each(|(of_one, &target)| host_math::begin_statistics(of_one, target));
    }

    /// Adds the embedding's gradient to a tile's, in its region or a landing block; the sum of
    /// squares of what that comes to.
    pub(super) fn scatter(
        &self,
        step: &Step,
        host: &HostLease<'_>,
        visit: &Visit,
        block: BlockId,
        first: bool,
        landing: Option<&mut [f32]>,
    ) -> Squares {
        let state = self.steps.of(step.number);
        let schedule = &step.plan.schedule;
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
        let tile = self.model.tiles[block.0 as usize];
        let channels = self.model.shape.hidden;
        let scale = self.model.shape.embedding_scale;
        // Of several processes, this one's part of the table.
        let from = self.host.eps.parts().map_or(0, |parts| parts.own(block).start);
        let floats = (tile.rows * channels).saturating_sub(from).min(gradient.len());
        let (rows, rest) = gradient.split_at_mut(floats);
        if first {
            rest.fill(0.0);
        }
        let table = host_math::Table { rows, from, first: tile.first, is_new: first };
        let others = self.host.received.embedding_rows.read().expect("nothing panics inside");
        let (dx, tokens): (Vec<(&[f32], usize)>, &[u32]) = match &state.dealt {
            None => (dx.collect(), &state.batch.tokens),
            Some(dealt) => (vec![(&others, dealt.rows.len())], &dealt.tokens),
        };
        let level = self.host.level;
        let rows = Scattered { level, tokens, dx: &dx, channels, scale };
        let Packing { encoding, dtype, .. } = self.packing(schedule.boundary(id));
        self.host.threads.install(|| match (encoding, dtype) {
            (Encoding::Int8 { block }, _) => rows.add_int8_to(table, block),
            (Encoding::Plain, Dtype::F32) => rows.add_to::<f32>(table),
            (Encoding::Bf16, _) | (Encoding::Plain, Dtype::Bf16) => rows.add_to::<bf16>(table),
            (Encoding::Plain, Dtype::F16) => rows.add_to::<f16>(table),
        });
        self.host.measure(block, gradient)
    }
}
