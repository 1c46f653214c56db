//! The short convolution in front of the delta rule.

use rayon::prelude::*;

use super::super::activation::{silu, slope_of_silu};
use super::super::linear::{SUM_ROWS, add_parts};
use super::super::views::{Call, Compute, ComputeIn};
use super::rows_before;
use crate::kernels::{LinearHeads, ShortConvolution, ShortConvolutionBackward};
use crate::simd::Level;

/// The weighted sums of a row's channels and of those before it, to `y`. `x` has this row and the
/// rows before it.
#[inline(always)]
fn convolve(y: &mut [f32], x: &[f32], width: usize, before: usize, w: &[f32], taps: usize) {
    y.fill(0.0);
    for back in (0..taps.min(before + 1)).rev() {
        let x = &x[x.len() - (back + 1) * width..];
        for ((y, x), w) in y.iter_mut().zip(x).zip(w.chunks_exact(taps)) {
            *y += w[taps - 1 - back] * x;
        }
    }
}

/// All rows of `y`, from as many wider rows of `x`.
pub(super) fn forward(
    level: Level,
    heads: LinearHeads,
    y: &mut [f32],
    x: &[f32],
    w: &[f32],
    before: &[usize],
) {
    let width = x.len() / before.len();
    y.par_chunks_mut(heads.mixed()).zip(before).enumerate().for_each(|(row, (y, &before))| {
        level.run(
            #[inline(always)]
            || {
                convolve(y, &x[..(row + 1) * width], width, before, w, heads.taps);
                y.iter_mut().for_each(|y| *y = silu(*y));
            },
        );
    });
}

impl Compute for ShortConvolution<'_> {
    fn compute(&self, level: Level, call: &Call<'_>) {
        let ShortConvolution { shape, .. } = *self;
        let [x, w] = [self.projected, self.w].map(|view| call.read(view));
        let before = rows_before(&shape.batch);
        forward(level, shape.heads, call.write(self.y), x, w, &before);
    }
}

impl ComputeIn for ShortConvolutionBackward<'_> {
    fn workspace(&self) -> usize {
        let rows = self.dy.rows;
        rows * self.dy.columns + rows.div_ceil(SUM_ROWS) * self.dw.len()
    }

    /// First the gradients of the sums, then those of their inputs, then those of the weights.
    fn compute(&self, level: Level, call: &Call<'_>, workspace: &mut [f32]) {
        let heads = self.shape.heads;
        let taps = heads.taps;
        let mixed = heads.mixed();
        let [dy, x, w] = [self.dy, self.projected, self.w].map(|view| call.read(view));
        let width = heads.projected();
        let before = &rows_before(&self.shape.batch);
        let (dsums, parts) = workspace.split_at_mut(dy.len());
        let rows = dsums.par_chunks_mut(mixed).zip(dy.par_chunks(mixed)).enumerate();
        rows.for_each(|(row, (dsum, dy))| {
            level.run(
                #[inline(always)]
                || {
                    convolve(dsum, &x[..(row + 1) * width], width, before[row], w, taps);
                    let all = dsum.iter_mut().zip(dy);
                    all.for_each(|(dsum, dy)| *dsum = dy * slope_of_silu(*dsum));
                },
            );
        });
        let dsums = &*dsums;
        let rows = call.write(self.dprojected).par_chunks_mut(width).enumerate();
        rows.for_each(|(row, dx)| {
            level.run(
                #[inline(always)]
                || {
                    let dx = &mut dx[..mixed];
                    dx.fill(0.0);
                    let sees =
                        |ahead: &usize| before.get(row + ahead) == Some(&(before[row] + ahead));
                    for ahead in (0..taps).take_while(sees) {
                        let dsum = &dsums[(row + ahead) * mixed..][..mixed];
                        let all = dx.iter_mut().zip(dsum).zip(w.chunks_exact(taps));
                        all.for_each(|((dx, dsum), w)| *dx += w[taps - 1 - ahead] * dsum);
                    }
                },
            );
        });
        let chunks = parts.par_chunks_mut(self.dw.len()).enumerate();
        chunks.for_each(|(chunk, part)| {
            level.run(
                #[inline(always)]
                || {
                    part.fill(0.0);
                    let first = chunk * SUM_ROWS;
                    for row in first..before.len().min(first + SUM_ROWS) {
                        let dsum = &dsums[row * mixed..][..mixed];
                        for back in 0..taps.min(before[row] + 1) {
                            let x = &x[(row - back) * width..][..mixed];
                            let all = part.chunks_exact_mut(taps).zip(dsum).zip(x);
                            all.for_each(|((dw, dsum), x)| dw[taps - 1 - back] += dsum * x);
                        }
                    }
                },
            );
        });
        add_parts(level, call.write(self.dw), parts, self.accumulate);
    }
}
