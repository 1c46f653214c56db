//! Rows of embedding tables that are added: by position, and by token type.

use rayon::prelude::*;

use super::views::{Call, Compute, ComputeIn};
use crate::kernels::{AddPositions, AddPositionsBackward, AddTokenTypes, AddTokenTypesBackward};
use crate::simd::Level;

impl Compute for AddPositions<'_> {
    fn compute(&self, level: Level, call: &Call<'_>) {
        /// Rows of one task.
        const ROWS: usize = 64;
        let AddPositions { y, batch, .. } = *self;
        let channels = y.columns;
        let x = call.read(self.x).par_chunks(ROWS * channels);
        let w = call.read(self.table);
        let pieces = call.write(y).par_chunks_mut(ROWS * channels).zip(x).enumerate();
        pieces.for_each(|(piece, (y, x))| {
            level.run(
                #[inline(always)]
                || {
                    let pairs = y.chunks_exact_mut(channels).zip(x.chunks_exact(channels));
                    for (at, (y, x)) in pairs.enumerate() {
                        let position = batch.position_in_document(piece * ROWS + at);
                        let w = &w[position * channels..][..channels];
                        for ((y, x), w) in y.iter_mut().zip(x).zip(w) {
                            *y = x + w;
                        }
                    }
                },
            );
        });
    }
}

impl Compute for AddPositionsBackward<'_> {
    fn compute(&self, level: Level, call: &Call<'_>) {
        let AddPositionsBackward { dtable, dy, batch, accumulate } = *self;
        let place = |row| batch.position_in_document(row);
        sum_rows(level, call.write(dtable), call.read(dy), accumulate, dy.columns, place);
    }
}

impl Compute for AddTokenTypes<'_> {
    fn compute(&self, level: Level, call: &Call<'_>) {
        let channels = self.y.columns;
        let y = call.write(self.y);
        let w = call.read(self.table);
        level.run(
            #[inline(always)]
            || {
                for (y, &kind) in y.chunks_exact_mut(channels).zip(self.batch.kinds()) {
                    let w = &w[usize::from(kind) * channels..][..channels];
                    y.iter_mut().zip(w).for_each(|(y, w)| *y += w);
                }
            },
        );
    }
}

impl ComputeIn for AddTokenTypesBackward<'_> {
    fn workspace(&self) -> usize {
        0
    }

    fn compute(&self, level: Level, call: &Call<'_>, _: &mut [f32]) {
        let AddTokenTypesBackward { dtable, dy, batch, accumulate } = *self;
        let kinds = batch.kinds();
        let place = |row: usize| usize::from(kinds[row]);
        sum_rows(level, call.write(dtable), call.read(dy), accumulate, dy.columns, place);
    }
}

/// Adds each row of dy to its row of the table, in order.
fn sum_rows(
    level: Level,
    dtable: &mut [f32],
    dy: &[f32],
    accumulate: bool,
    channels: usize,
    place: impl Fn(usize) -> usize,
) {
    level.run(
        #[inline(always)]
        || {
            if !accumulate {
                dtable.fill(0.0);
            }
            for (row, dy) in dy.chunks_exact(channels).enumerate() {
                let dtable = &mut dtable[place(row) * channels..][..channels];
                dtable.iter_mut().zip(dy).for_each(|(to, dy)| *to += dy);
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::super::oracle::{Bench, close, differences, noise};
    use super::*;
    use crate::kernels::{BatchMetadata, BatchView, Document};

    #[test]
    fn positions_are_added_and_summed() {
        let c = 5;
        let plain = BatchMetadata::plain(&[0, 2, 4, 5]);
        check_positions(plain.view(), c, |row| row % 2);
        let cached = BatchMetadata { cached: &[1, 0, 2], ..plain };
        check_positions(cached.view(), c, |row| row % 2 + [1, 0, 2][row / 2]);
        let [all, first, second] = [(0, 2), (0, 1), (1, 2)].map(|(from, to)| Document { from, to });
        let documents = [all, all, first, second, first];
        let packed = BatchMetadata { documents: &documents, ..plain };
        check_positions(packed.view(), c, |row| [0, 1, 0, 0, 0][row]);
    }

    fn check_positions(batch: BatchView<'_>, c: usize, position: impl Fn(usize) -> usize) {
        let r = batch.rows();
        let x = noise(r * c, 1);
        let w = noise(4 * c, 2);
        let dy = noise(r * c, 3);
        let plain = |w: &[f64]| -> Vec<f64> {
            x.wide.iter().enumerate().map(|(i, x)| x + w[position(i / c) * c + i % c]).collect()
        };
        let loss = |w: &[f64]| plain(w).iter().zip(&dy.wide).map(|(y, dy)| y * dy).sum::<f64>();
        for level in Level::all() {
            let mut bench = Bench::new();
            let y = bench.nan(r, c);
            let dtable = bench.nan(4, c);
            let [x, table, dy] = [&x, &w, &dy].map(|of| bench.tensor(c, &of.narrow));
            bench.run(level, |k, _| {
                k.add_positions(&AddPositions { y, x, table, batch });
                let accumulate = false;
                k.add_positions_backward(&AddPositionsBackward { dtable, dy, batch, accumulate });
            });
            close(&bench.values(y), &plain(&w.wide), 1e-6);
            close(&bench.values(dtable), &differences(&w.wide, loss), 1e-5);
        }
    }
}
