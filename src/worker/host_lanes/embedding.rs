//! The embedding, which the host computes: rows of the vocabulary for the tokens of a batch, and
//! the sums of their gradients.

use half::{bf16, f16};
use l2l_actors::schedule::{BlockId, Encoding, MicroBatch, Role, Share};
use l2l_actors::work::{GradientAt, MasterAt};
use rayon::prelude::*;

use super::visit::HostVisit;
use super::{HostLanes, Squares, host_math};
use crate::eps::TableRows;
use crate::kernels::STATISTICS;
use crate::models::Tile;
use crate::simd::Level;
use crate::tensor::{Dtype, Element, Packing, int8};

/// Rows of the vocabulary for the tokens of a micro-batch.
struct Gathered<'a> {
    tokens: &'a [u32],
    table: &'a TableRows<'a>,
    /// The rows of the vocabulary in `table`.
    tile: Tile,
    channels: usize,
    scale: f32,
}

impl Gathered<'_> {
    /// Writes the rows of tokens in the tile. `noise` gives the noise of each row that is written.
    fn write<Y: Element>(&self, x: &mut [Y], noise: Option<impl Fn(usize) -> (u64, f32) + Sync>) {
        let Gathered { tokens, table, tile, channels, scale } = *self;
        host_math::gather(x, tokens, table, tile.first, channels, scale);
        if let Some(noise) = noise {
            host_math::add_noise(x, tokens, tile, channels, noise);
        }
    }

    /// Writes the rows of tokens in the tile, each packed by itself.
    fn write_packed(
        &self,
        x: &mut [f32],
        packing: Packing,
        noise: Option<impl Fn(usize) -> (u64, f32) + Sync>,
    ) {
        let packing = Packing { dtype: Dtype::F32, ..packing };
        let rows = x.par_chunks_exact_mut(packing.floats(1)).zip(self.tokens).enumerate();
        rows.for_each(|(at, (packed, token))| {
            let row = (*token as usize).checked_sub(self.tile.first);
            if row.is_none_or(|row| (row + 1) * self.channels > self.table.len()) {
                return;
            }
            let noise = noise.as_ref().map(|noise| move |_| noise(at));
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
    /// The gradients of each micro-batch as they are stashed, and the number of their rows.
    dx: &'a [(&'a [f32], usize)],
    channels: usize,
    scale: f32,
}

impl Scattered<'_> {
    /// Adds the gradients of a table's tokens to the table's rows.
    fn add_to<D: Element>(&self, table: host_math::Table<'_>) {
        let rows = self.dx.iter().flat_map(|&(dx, rows)| {
            bytemuck::cast_slice::<f32, D>(dx).chunks_exact(self.channels).take(rows)
        });
        let rows: Vec<&[D]> = rows.collect();
        host_math::scatter(self.level, table, self.tokens, &rows, self.scale);
    }

    /// Adds the gradients of a table's tokens, which are in 8 bits, to the table's rows.
    fn add_int8_to(&self, table: host_math::Table<'_>, block: u32) {
        let row_floats = int8::row_floats(self.channels, block);
        let rows = self.dx.iter().flat_map(|&(dx, rows)| dx.chunks_exact(row_floats).take(rows));
        let rows: Vec<int8::Int8Row<'_>> =
            rows.map(|packed| int8::Int8Row::new(packed, self.channels, block)).collect();
        host_math::scatter(self.level, table, self.tokens, &rows, self.scale);
    }
}

impl HostLanes {
    /// Writes a share of a gather: the embedding rows of its blocks, for its micro-batches. The
    /// share with the visit's first block also writes the first statistics.
    pub(super) fn gather(&self, at: &HostVisit<'_>, share: Share, master: MasterAt) {
        let visit = at.visit;
        let (blocks, micro_batches) = match &share {
            Share::MicroBatch(m) => (&visit.blocks[..], *m..*m + 1),
            Share::Block(block) => (std::slice::from_ref(block), visit.micro_batches.clone()),
        };
        for m in micro_batches {
            for &block in blocks {
                match master {
                    MasterAt::Memory => {
                        let lease = self.shared.eps.memory().read(block, at.state.step.number);
                        self.gather_block(at, m, block, &lease.parameters);
                    }
                    MasterAt::Slot(slot) => {
                        self.gather_block(at, m, block, at.host.read_slot(slot));
                    }
                }
            }
            if blocks.first() == visit.blocks.first() {
                self.begin_statistics(at, m);
            }
        }
    }

    /// Copies the rows of a micro-batch's tokens that lie in a block's tile of the vocabulary.
    /// `stored` is the published block.
    fn gather_block(&self, at: &HostVisit<'_>, m: MicroBatch, block: BlockId, stored: &[f32]) {
        let model = &*self.shared.model;
        let schedule = at.schedule();
        let tile = at.visit.blocks.iter().position(|&id| id == block);
        let tile = model.tiles[tile.expect("a share is of the visit's blocks")];
        let boundary = schedule.with_role(&at.visit.writes, Role::Hidden);
        let boundary = boundary.expect("a gather writes hidden states");
        let x = at.stashed_mut(boundary, m);
        let channels = model.shape.hidden;
        let rows = Gathered {
            tokens: &at.state.input.batch.tokens[at.state.range(m).rows],
            table: &self.shared.eps.table_rows(&model.blocks[block.0 as usize], stored),
            tile,
            channels,
            scale: model.shape.embedding_scale,
        };
        let alpha = self.neftune_alpha;
        let noise = (alpha > 0.0 && at.state.input.purpose.trains())
            .then(|| at.state.metadata(m, self.shared.seed));
        let noise = noise.as_ref().map(|batch| {
            let batch = batch.view();
            move |row: usize| batch.noise(row, alpha, channels)
        });
        let packing = self.shared.packing(schedule.boundary(boundary));
        self.shared.threads.install(|| match (packing.encoding, packing.dtype) {
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

    fn begin_statistics(&self, at: &HostVisit<'_>, m: MicroBatch) {
        let schedule = at.schedule();
        let targets = &at.state.input.batch.targets[at.state.range(m).rows];
        let boundary = schedule.with_role(&at.visit.writes, Role::Statistics);
        let statistics = at.stashed_mut(boundary.expect("a gather writes statistics"), m);
        let positions = statistics.chunks_exact_mut(STATISTICS).zip(targets);
        positions.for_each(|(of_one, &target)| host_math::begin_statistics(of_one, target));
    }

    /// Adds the embedding's gradient to a tile's gradient, in its region or in a landing block, and
    /// returns the sum of squares of the result.
    pub(super) fn scatter(
        &self,
        at: &HostVisit<'_>,
        block: BlockId,
        first: bool,
        gradient: GradientAt,
    ) -> Squares {
        let shared = &*self.shared;
        let schedule = at.schedule();
        let state = &at.state;
        let boundary = schedule.with_role(&at.visit.reads, Role::HiddenGradient);
        let boundary = boundary.expect("a scatter reads gradients of hidden states");
        let mut region;
        let gradient = match gradient {
            GradientAt::Landing(slot) => at.host.landing(slot, shared.own_trained_len(block)),
            GradientAt::Region => {
                region = shared.eps.memory().region_mut(block);
                &mut region[..]
            }
        };
        let tile = shared.model.tiles[block.0 as usize];
        let channels = shared.model.shape.hidden;
        // Each rank has its own part of the table.
        let from = shared.eps.parts().map_or(0, |parts| parts.own(block).start);
        let floats = (tile.rows * channels).saturating_sub(from).min(gradient.len());
        let (rows, rest) = gradient.split_at_mut(floats);
        if first {
            rest.fill(0.0);
        }
        let table = host_math::Table { rows, from, first: tile.first, is_new: first };
        let received = shared.embedding_rows.read().expect("nothing panics inside");
        let of_micro_batch = |m: MicroBatch| (at.stashed(boundary, m), state.range(m).rows.len());
        let (dx, tokens): (Vec<(&[f32], usize)>, &[u32]) = match &state.input.dealt {
            None => {
                let all = 0..schedule.micro_batches.len() as MicroBatch;
                (all.map(of_micro_batch).collect(), &state.input.batch.tokens)
            }
            Some(dealt) => (vec![(&received, dealt.rows.len())], &dealt.tokens),
        };
        let level = shared.threads.level;
        let scale = shared.model.shape.embedding_scale;
        let rows = Scattered { level, tokens, dx: &dx, channels, scale };
        let Packing { encoding, dtype, .. } = shared.packing(schedule.boundary(boundary));
        shared.threads.install(|| match (encoding, dtype) {
            (Encoding::Int8 { block }, _) => rows.add_int8_to(table, block),
            (Encoding::Plain, Dtype::F32) => rows.add_to::<f32>(table),
            (Encoding::Bf16, _) | (Encoding::Plain, Dtype::Bf16) => rows.add_to::<bf16>(table),
            (Encoding::Plain, Dtype::F16) => rows.add_to::<f16>(table),
        });
        self.measure(block, gradient)
    }
}
