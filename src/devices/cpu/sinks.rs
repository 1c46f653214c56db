//! Attention's sinks. Heads have their sums in the order of the rows.

use std::ops::Range;

use rayon::prelude::*;

use super::activation::sigmoid;
use super::math::{dot, exp};
use super::views::{Call, Compute};
use crate::kernels::{AttentionShape, Sink, SinkBackward};
use crate::simd::Level;

/// The rows of each sequence.
fn sequences<'a>(shape: &'a AttentionShape<'_>) -> impl Iterator<Item = Range<usize>> + 'a {
    (0..shape.batch.sequences()).map(|sequence| shape.batch.sequence(sequence))
}

/// The place of a row's log-sum-exp: sequence by sequence, and in one head by head.
fn statistic(rows: &Range<usize>, heads: usize, head: usize, row: usize) -> usize {
    rows.start * heads + head * rows.len() + row - rows.start
}

impl Compute for Sink<'_> {
    fn compute(&self, level: Level, call: &Call<'_>) {
        let AttentionShape { heads, head_size, .. } = self.shape;
        let sinks = call.read(self.sinks);
        let lse = call.write(self.lse);
        let y = call.write(self.y);
        for rows in sequences(&self.shape) {
            let of_rows = &lse[rows.start * heads..rows.end * heads];
            let y = &mut y[rows.start * heads * head_size..rows.end * heads * head_size];
            y.par_chunks_mut(head_size).enumerate().for_each(|(at, y)| {
                let head = at % heads;
                let factor = sigmoid(of_rows[head * rows.len() + at / heads] - sinks[head]);
                level.run(
                    #[inline(always)]
                    || y.iter_mut().for_each(|y| *y *= factor),
                );
            });
            let of_rows = &mut lse[rows.start * heads..rows.end * heads];
            for (lse, sink) in of_rows.chunks_mut(rows.len().max(1)).zip(sinks) {
                lse.iter_mut().for_each(|lse| *lse = log_sum(*lse, *sink));
            }
        }
    }
}

/// ln(exp(a) + exp(b)).
fn log_sum(a: f32, b: f32) -> f32 {
    let less = -(a - b).abs();
    (if a > b { a } else { b }) + exp(less).ln_1p()
}

impl Compute for SinkBackward<'_> {
    fn compute(&self, level: Level, call: &Call<'_>) {
        let AttentionShape { heads, head_size, .. } = self.shape;
        let width = self.shape.width();
        let sinks = call.read(self.sinks);
        let lse = call.read(self.lse);
        let dy = call.read(self.dy);
        let y = call.read(self.y);
        let dsinks = call.write(self.dsinks).par_iter_mut().zip(sinks).enumerate();
        dsinks.for_each(|(head, (dsink, sink))| {
            let sum: f32 = level.run(
                #[inline(always)]
                || {
                    let of_row = |rows: &Range<usize>, row: usize| {
                        let at = row * width + head * head_size;
                        let slope = dot(&dy[at..][..head_size], &y[at..][..head_size]);
                        exp(sink - lse[statistic(rows, heads, head, row)]) * slope
                    };
                    let of_rows = |rows: Range<usize>| -> f32 {
                        rows.clone().map(|row| of_row(&rows, row)).sum()
                    };
                    sequences(&self.shape).map(of_rows).sum()
                },
            );
            *dsink = if self.accumulate { *dsink - sum } else { -sum };
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::oracle::{Bench, close, differences, noise};
    use super::*;
    use crate::kernels::{Attention, AttentionBackward, BatchMetadata};

    /// Causal attention with sinks, in f64.
    fn plain(qkv: &[f64], sinks: &[f64], shape: &AttentionShape<'_>) -> Vec<f64> {
        let AttentionShape { heads, kv_heads, head_size: d, window, .. } = *shape;
        let width = shape.qkv_width();
        let mut y = vec![0.0; shape.rows() * heads * d];
        for rows in sequences(shape) {
            for (row, head) in rows.clone().flat_map(|row| (0..heads).map(move |h| (row, h))) {
                let shared = head * kv_heads / heads;
                let first = window.map_or(0, |window| (row + 1).saturating_sub(window));
                let keys = first.max(rows.start)..row + 1;
                let q = &qkv[row * width + head * d..][..d];
                let of = |key: usize, which: usize| {
                    &qkv[key * width + (heads + which * kv_heads + shared) * d..][..d]
                };
                let product =
                    |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
                let p = keys.clone().map(|key| (product(q, of(key, 0)) / (d as f64).sqrt()).exp());
                let p: Vec<f64> = p.collect();
                let total = p.iter().sum::<f64>() + sinks[head].exp();
                for (p, key) in p.iter().zip(keys) {
                    let to = &mut y[(row * heads + head) * d..][..d];
                    to.iter_mut().zip(of(key, 1)).for_each(|(y, v)| *y += p / total * v);
                }
            }
        }
        y
    }

    #[test]
    fn attention_with_sinks_and_its_gradients_are_the_plain_ones() {
        let starts = [0_usize, 5, 6, 13];
        let metadata = BatchMetadata::plain(&starts);
        for (sizes, window) in [([4, 2, 3], None), ([3, 1, 6], Some(2)), ([1, 1, 5], None)] {
            let causal = AttentionShape::causal(metadata.view(), sizes);
            let shape = AttentionShape { window, ..causal };
            let rows = shape.rows();
            let qkv = noise(rows * shape.qkv_width(), 1);
            let sinks = noise(shape.heads, 2);
            let dy = noise(rows * shape.width(), 3);
            let loss = |qkv: &[f64], sinks: &[f64]| {
                let y = plain(qkv, sinks, &shape);
                y.iter().zip(&dy.wide).map(|(y, dy)| y * dy).sum::<f64>()
            };
            for level in Level::all() {
                let mut bench = Bench::new();
                let y = bench.nan(rows, shape.width());
                let lse = bench.nan(rows, shape.heads);
                let dqkv = bench.nan(rows, shape.qkv_width());
                let dsinks = bench.nan(1, shape.heads);
                let more = bench.tensor(shape.heads, &vec![2.0; shape.heads]);
                let qkv_view = bench.tensor(shape.qkv_width(), &qkv.narrow);
                let sinks_view = bench.tensor(shape.heads, &sinks.narrow);
                let dy_view = bench.tensor(shape.width(), &dy.narrow);
                let op = AttentionBackward {
                    dqkv,
                    chunk_kv: None,
                    dy: dy_view,
                    y,
                    lse,
                    qkv: qkv_view,
                    shape,
                };
                let of_sinks = SinkBackward {
                    dsinks,
                    dy: dy_view,
                    y,
                    lse,
                    sinks: sinks_view,
                    shape,
                    accumulate: false,
                };
                bench.run(level, |k, scratch| {
                    k.attention(&Attention { y, lse, qkv: qkv_view, kv: None, shape });
                    k.sink(&Sink { y, lse, sinks: sinks_view, shape });
                    k.attention_backward(&op, scratch);
                    k.sink_backward(&of_sinks);
                    k.sink_backward(&SinkBackward { dsinks: more, accumulate: true, ..of_sinks });
                });
                close(&bench.values(y), &plain(&qkv.wide, &sinks.wide, &shape), 1e-6);
                let expected = differences(&qkv.wide, |qkv| loss(qkv, &sinks.wide));
                close(&bench.values(dqkv), &expected, 1e-5);
                let expected = differences(&sinks.wide, |sinks| loss(&qkv.wide, sinks));
                close(&bench.values(dsinks), &expected, 1e-5);
                let more: Vec<f32> = bench.values(more).iter().map(|d| d - 2.0).collect();
                close(&more, &expected, 1e-5);
            }
        }
    }
}
