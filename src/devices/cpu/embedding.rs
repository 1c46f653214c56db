//! Rows of embedding tables that are added: by position, and by token type.

use rayon::prelude::*;

use super::views::CpuKernels;
use crate::kernels::{
    AddPositions, AddPositionsBackward, AddTokenTypes, AddTokenTypesBackward, BatchView, Runs,
    RunsIn,
};
use crate::simd::Level;
use crate::tensor::Scratch;

impl Runs<AddTokenTypes<'_>> for CpuKernels<'_> {
    fn run(&self, op: &AddTokenTypes<'_>) {
        let AddTokenTypes { y, table, batch } = *op;
        let Some(call) = self.call(op) else { return };
        add_types(self.level, call.write(y), call.read(table), batch.kinds(), y.columns);
    }
}

impl RunsIn<AddTokenTypesBackward<'_>> for CpuKernels<'_> {
    fn run_in(&self, op: &AddTokenTypesBackward<'_>, _: &Scratch<'_>) {
        let AddTokenTypesBackward { dtable, dy, batch, accumulate } = *op;
        let Some(call) = self.call(op) else { return };
        let dtable = call.write(dtable);
        sum_types(self.level, dtable, call.read(dy), batch.kinds(), dy.columns, accumulate);
    }
}

impl Runs<AddPositions<'_>> for CpuKernels<'_> {
    fn run(&self, op: &AddPositions<'_>) {
        let AddPositions { y, x, table, ref batch } = *op;
        let Some(call) = self.call(op) else { return };
        add_rows(self.level, call.write(y), call.read(x), call.read(table), batch);
    }
}

impl Runs<AddPositionsBackward<'_>> for CpuKernels<'_> {
    fn run(&self, op: &AddPositionsBackward<'_>) {
        let AddPositionsBackward { dtable, dy, ref batch, accumulate } = *op;
        let Some(call) = self.call(op) else { return };
        sum_rows(self.level, call.write(dtable), call.read(dy), batch, accumulate);
    }
}

/// y = x + w by position. x, y: (R, C); w: (positions, C).
fn add_rows(level: Level, y: &mut [f32], x: &[f32], w: &[f32], batch: &BatchView<'_>) {
    /// Rows of one task.
    const ROWS: usize = 64;
    let channels = y.len() / batch.rows();
    let pieces = y.par_chunks_mut(ROWS * channels).zip(x.par_chunks(ROWS * channels)).enumerate();
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

/// dw (+)= Σ of dy over the rows of each position, in order.
fn sum_rows(level: Level, dw: &mut [f32], dy: &[f32], batch: &BatchView<'_>, accumulate: bool) {
    let channels = dy.len() / batch.rows();
    level.run(
        #[inline(always)]
        || {
            if !accumulate {
                dw.fill(0.0);
            }
            for (row, dy) in dy.chunks_exact(channels).enumerate() {
                let dw = &mut dw[batch.position_in_document(row) * channels..][..channels];
                dw.iter_mut().zip(dy).for_each(|(dw, dy)| *dw += dy);
            }
        },
    );
}

/// y += w by token type. y: (R, C); w: (types, C).
fn add_types(level: Level, y: &mut [f32], w: &[f32], kinds: &[u8], channels: usize) {
    level.run(
        #[inline(always)]
        || {
            for (y, &kind) in y.chunks_exact_mut(channels).zip(kinds) {
                let w = &w[usize::from(kind) * channels..][..channels];
                y.iter_mut().zip(w).for_each(|(y, w)| *y += w);
            }
        },
    );
}

/// dw (+)= Σ of dy over the rows of each token type, in order.
fn sum_types(
    level: Level,
    dw: &mut [f32],
    dy: &[f32],
    kinds: &[u8],
    channels: usize,
    accumulate: bool,
) {
    level.run(
        #[inline(always)]
        || {
            if !accumulate {
                dw.fill(0.0);
            }
            for (dy, &kind) in dy.chunks_exact(channels).zip(kinds) {
                let dw = &mut dw[usize::from(kind) * channels..][..channels];
                dw.iter_mut().zip(dy).for_each(|(dw, dy)| *dw += dy);
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::super::oracle::{close, differences, noise};
    use super::*;
    use crate::kernels::{BatchMetadata, Document};

    #[test]
    fn positions_are_added_and_summed() {
        let c = 5;
        let plain = BatchMetadata {
            starts: &[0, 2, 4, 5],
            kinds: &[],
            documents: &[],
            cached: &[],
            dropout_key: None,
        };
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
            let mut y = vec![f32::NAN; r * c];
            add_rows(level, &mut y, &x.narrow, &w.narrow, &batch);
            close(&y, &plain(&w.wide), 1e-6);
            let mut dw = vec![f32::NAN; 4 * c];
            sum_rows(level, &mut dw, &dy.narrow, &batch, false);
            close(&dw, &differences(&w.wide, loss), 1e-5);
        }
    }
}
