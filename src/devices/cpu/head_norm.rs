//! Norms of each head of queries and keys by root mean square (Henry et al. 2020, as in Qwen3).

use rayon::prelude::*;

use super::linear::add_parts;
use super::math::{dot, dot_with};
use super::views::{Call, CpuKernels};
use crate::kernels::{AttentionShape, HeadNorm, HeadNormBackward, QueryKey, Runs, RunsIn};
use crate::simd::Level;
use crate::tensor::Scratch;

/// Rows that one partial sum of dγ takes: by shape, never by threads.
const SUM_ROWS: usize = 64;

impl Runs<HeadNorm<'_>> for CpuKernels<'_> {
    fn run(&self, op: &HeadNorm<'_>) {
        let HeadNorm { y, statistics, x, gamma, gamma_offset, epsilon, ref shape } = *op;
        let Some(call) = self.call(op) else { return };
        let y = call.write(y);
        let statistics = call.write(statistics);
        let scales = Scales::read(&call, gamma, gamma_offset);
        forward(self.level, y, statistics, call.read(x), scales, epsilon, shape);
    }
}

impl RunsIn<HeadNormBackward<'_>> for CpuKernels<'_> {
    fn run_in(&self, op: &HeadNormBackward<'_>, scratch: &Scratch<'_>) {
        let HeadNormBackward { dx, dgamma, x, statistics, gamma, ref shape, accumulate, .. } = *op;
        let scratch = scratch.nested();
        let memory = scratch.take_floats(1, scratch_len(shape));
        let Some(call) = self.call_in(op, [memory]) else { return };
        let inputs = Inputs {
            x: call.read(x),
            statistics: call.read(statistics),
            scales: Scales::read(&call, gamma, op.gamma_offset),
        };
        let dx = call.write(dx);
        let dgamma = [dgamma.query, dgamma.key].map(|view| call.write(view));
        backward(self.level, dx, dgamma, inputs, shape, accumulate, call.write(memory));
    }
}

/// The scales of queries and of keys, and the offset that is added to them.
#[derive(Clone, Copy)]
struct Scales<'a> {
    gamma: [&'a [f32]; 2],
    offset: f32,
}

impl<'a> Scales<'a> {
    fn read(call: &'a Call<'_>, gamma: QueryKey, offset: f32) -> Scales<'a> {
        Scales { gamma: [gamma.query, gamma.key].map(|gamma| call.read(gamma)), offset }
    }
}

/// y = (offset + γ) x rstd by head; values are copied. `statistics`: (R, H + K), rstd.
fn forward(
    level: Level,
    y: &mut [f32],
    statistics: &mut [f32],
    x: &[f32],
    Scales { gamma, offset }: Scales<'_>,
    epsilon: f32,
    shape: &AttentionShape<'_>,
) {
    let width = shape.qkv_width();
    let d = shape.head_size;
    let normed = shape.heads + shape.kv_heads;
    let rows = y.par_chunks_mut(width).zip(statistics.par_chunks_mut(normed));
    rows.zip(x.par_chunks(width)).for_each(|((y, statistics), x)| {
        level.run(
            #[inline(always)]
            || {
                for (head, statistic) in statistics.iter_mut().enumerate() {
                    let gamma = gamma[usize::from(head >= shape.heads)];
                    let y = &mut y[head * d..][..d];
                    let x = &x[head * d..][..d];
                    *statistic = 1.0 / (dot(x, x) / d as f32 + epsilon).sqrt();
                    let all = y.iter_mut().zip(x).zip(gamma);
                    all.for_each(|((y, x), g)| *y = *x * *statistic * (offset + g));
                }
                y[normed * d..].copy_from_slice(&x[normed * d..]);
            },
        );
    });
}

/// Floats of scratch that [`backward`] needs.
fn scratch_len(shape: &AttentionShape<'_>) -> usize {
    shape.rows().div_ceil(SUM_ROWS) * 2 * shape.head_size
}

/// Inputs of the backward pass.
#[derive(Clone, Copy)]
struct Inputs<'a> {
    x: &'a [f32],
    statistics: &'a [f32],
    scales: Scales<'a>,
}

/// Computes dx in place of dy; dγ (+)= ….
fn backward(
    level: Level,
    dx: &mut [f32],
    dgamma: [&mut [f32]; 2],
    inputs: Inputs<'_>,
    shape: &AttentionShape<'_>,
    accumulate: bool,
    scratch: &mut [f32],
) {
    let width = shape.qkv_width();
    let d = shape.head_size;
    let normed = shape.heads + shape.kv_heads;
    let (q_parts, k_parts) = scratch.split_at_mut(scratch.len() / 2);
    let parts = q_parts.par_chunks_mut(d).zip(k_parts.par_chunks_mut(d));
    let chunks = dx.par_chunks_mut(width * SUM_ROWS).zip(parts).enumerate();
    chunks.for_each(|(chunk, (dx, (q_part, k_part)))| {
        level.run(
            #[inline(always)]
            || {
                q_part.fill(0.0);
                k_part.fill(0.0);
                for (index, dx) in dx.chunks_exact_mut(width).enumerate() {
                    let row = chunk * SUM_ROWS + index;
                    let x = &inputs.x[row * width..][..width];
                    for head in 0..normed {
                        let is_key = head >= shape.heads;
                        let part = if is_key { &mut *k_part } else { &mut *q_part };
                        let gamma = inputs.scales.gamma[usize::from(is_key)];
                        let rstd = inputs.statistics[row * normed + head];
                        backward_head(
                            &mut dx[head * d..][..d],
                            part,
                            &x[head * d..][..d],
                            gamma,
                            inputs.scales.offset,
                            rstd,
                        );
                    }
                }
            },
        );
    });
    let [q, k] = dgamma;
    add_parts(level, q, q_parts, accumulate);
    add_parts(level, k, k_parts, accumulate);
}

/// dx = rstd (g − x̂ mean(g x̂)), g = dy (offset + γ).
#[inline(always)]
fn backward_head(
    dx: &mut [f32],
    dgamma: &mut [f32],
    x: &[f32],
    gamma: &[f32],
    offset: f32,
    rstd: f32,
) {
    for (((dx, dgamma), x), gamma) in dx.iter_mut().zip(dgamma).zip(x).zip(gamma) {
        *dgamma += *dx * (x * rstd);
        *dx *= offset + gamma;
    }
    let mean = dot_with(dx, x, |x| x * rstd) / x.len() as f32;
    dx.iter_mut().zip(x).for_each(|(dx, x)| *dx = rstd * (*dx - x * rstd * mean));
}

#[cfg(test)]
mod tests {
    use super::super::oracle::{close, differences, noise};
    use super::*;
    use crate::kernels::BatchMetadata;

    const OFFSET: f32 = 0.5;
    const EPSILON: f32 = 1e-5;

    fn plain(x: &[f64], gamma: [&[f64]; 2], shape: &AttentionShape<'_>) -> Vec<f64> {
        let d = shape.head_size;
        let head = |(index, x): (usize, &[f64])| -> Vec<f64> {
            let head = index % (shape.heads + 2 * shape.kv_heads);
            if head >= shape.heads + shape.kv_heads {
                return x.to_vec();
            }
            let square = x.iter().map(|x| x * x).sum::<f64>() / d as f64;
            let rstd = 1.0 / (square + f64::from(EPSILON)).sqrt();
            let gamma = gamma[usize::from(head >= shape.heads)];
            x.iter().zip(gamma).map(|(x, g)| x * rstd * (f64::from(OFFSET) + g)).collect()
        };
        x.chunks(d).enumerate().flat_map(head).collect()
    }

    #[test]
    fn forward_and_backward_are_the_plain_ones() {
        let batch = BatchMetadata {
            starts: &[0, 35, 70],
            kinds: &[],
            documents: &[],
            cached: &[],
            dropout_key: None,
        };
        let shape = AttentionShape {
            batch: batch.view(),
            heads: 2,
            kv_heads: 1,
            head_size: 3,
            causal: true,
            window: None,
            dropout: None,
        };
        let len = shape.rows() * shape.qkv_width();
        let x = noise(len, 1);
        let dy = noise(len, 2);
        let q = noise(3, 3);
        let k = noise(3, 4);
        for level in Level::all() {
            let mut y = vec![f32::NAN; len];
            let mut statistics = vec![f32::NAN; shape.rows() * 3];
            let scales = Scales { gamma: [&q.narrow, &k.narrow], offset: OFFSET };
            forward(level, &mut y, &mut statistics, &x.narrow, scales, EPSILON, &shape);
            close(&y, &plain(&x.wide, [&q.wide, &k.wide], &shape), 1e-5);
            let mut dx = dy.narrow.clone();
            let mut dq = vec![f32::NAN; 3];
            let mut dk = vec![f32::NAN; 3];
            let inputs = Inputs { x: &x.narrow, statistics: &statistics, scales };
            let mut memory = vec![f32::NAN; scratch_len(&shape)];
            let dgamma = [&mut dq[..], &mut dk];
            backward(level, &mut dx, dgamma, inputs, &shape, false, &mut memory);
            let loss = |x: &[f64], q: &[f64], k: &[f64]| {
                plain(x, [q, k], &shape).iter().zip(&dy.wide).map(|(y, dy)| y * dy).sum::<f64>()
            };
            close(&dx, &differences(&x.wide, |x| loss(x, &q.wide, &k.wide)), 1e-4);
            close(&dq, &differences(&q.wide, |q| loss(&x.wide, q, &k.wide)), 1e-4);
            close(&dk, &differences(&k.wide, |k| loss(&x.wide, &q.wide, k)), 1e-4);
        }
    }
}
