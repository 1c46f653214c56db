//! Norms over the channels of each row: by mean and deviation (Ba et al. 2016), or by root mean
//! square alone (Zhang and Sennrich 2019), which is the first one with a mean of 0.

use rayon::prelude::*;

use super::linear::add_parts;
use super::math::{dot_with, sum, sum_of};
use super::views::CpuKernels;
use crate::kernels::{Norm, NormBackward, Runs, RunsIn};
use crate::simd::Level;
use crate::tensor::Scratch;

/// Rows that one partial sum of dγ and dβ takes: by shape, never by threads.
const SUM_ROWS: usize = 64;

impl Runs<Norm> for CpuKernels<'_> {
    fn run(&self, op: &Norm) {
        let Norm { y, statistics, x, gamma, gamma_offset, beta, epsilon, rms } = *op;
        let Some(call) = self.call(op) else { return };
        let y = call.write(y);
        let statistics = call.write(statistics);
        let affine =
            Affine { gamma: call.read(gamma), offset: gamma_offset, beta: call.read_if(beta) };
        forward(self.level, y, statistics, call.read(x), affine, epsilon, rms);
    }
}

impl RunsIn<NormBackward> for CpuKernels<'_> {
    fn run_in(&self, op: &NormBackward, scratch: &Scratch<'_>) {
        let NormBackward { dx, dgamma, dbeta, residual, dy, x, statistics, gamma, .. } = *op;
        let scratch = scratch.nested();
        let memory = scratch.take_floats(1, scratch_len(x.rows, x.columns));
        let Some(call) = self.call_in(op, [memory]) else { return };
        let inputs = Inputs {
            residual: call.read_if(residual),
            dy: call.read(dy),
            x: call.read(x),
            statistics: call.read(statistics),
            gamma: call.read(gamma),
            gamma_offset: op.gamma_offset,
            rms: op.rms,
        };
        let dx = call.write(dx);
        let dgamma = call.write(dgamma);
        let dbeta = call.write_if(dbeta);
        backward(self.level, dx, dgamma, dbeta, inputs, op.accumulate, call.write(memory));
    }
}

/// Scale and shift behind the norm: (offset + γ) and β.
#[derive(Clone, Copy)]
struct Affine<'a> {
    gamma: &'a [f32],
    offset: f32,
    beta: Option<&'a [f32]>,
}

/// y = (offset + γ) (x − mean) rstd + β; `statistics` gets mean and rstd of each row.
fn forward(
    level: Level,
    y: &mut [f32],
    statistics: &mut [f32],
    x: &[f32],
    Affine { gamma, offset, beta }: Affine<'_>,
    epsilon: f32,
    rms: bool,
) {
    let c = gamma.len();
    let chunks = y.par_chunks_mut(c * SUM_ROWS).zip(statistics.par_chunks_mut(2 * SUM_ROWS));
    chunks.zip(x.par_chunks(c * SUM_ROWS)).for_each(|((y, statistics), x)| {
        level.run(
            #[inline(always)]
            || {
                let rows = y.chunks_exact_mut(c).zip(statistics.chunks_exact_mut(2));
                for ((y, statistics), x) in rows.zip(x.chunks_exact(c)) {
                    let mean = if rms { 0.0 } else { sum(x) / c as f32 };
                    let variance = sum_of(x, |x| (x - mean) * (x - mean)) / c as f32;
                    let rstd = 1.0 / (variance + epsilon).sqrt();
                    let scaled = |x: f32, g: f32| (x - mean) * rstd * (offset + g);
                    let all = y.iter_mut().zip(x).zip(gamma);
                    match beta {
                        None => all.for_each(|((y, &x), &g)| *y = scaled(x, g)),
                        Some(beta) => {
                            all.zip(beta).for_each(|(((y, &x), &g), b)| *y = scaled(x, g) + b);
                        }
                    }
                    statistics.copy_from_slice(&[mean, rstd]);
                }
            },
        );
    });
}

/// Floats of scratch that [`backward`] needs.
fn scratch_len(rows: usize, channels: usize) -> usize {
    rows.div_ceil(SUM_ROWS) * 2 * channels
}

/// Inputs of the backward pass.
#[derive(Clone, Copy)]
struct Inputs<'a> {
    residual: Option<&'a [f32]>,
    dy: &'a [f32],
    x: &'a [f32],
    statistics: &'a [f32],
    gamma: &'a [f32],
    gamma_offset: f32,
    rms: bool,
}

/// dx = residual + …; dγ and dβ (+)= …, summed over 64 rows at a time, then in order.
fn backward(
    level: Level,
    dx: &mut [f32],
    dgamma: &mut [f32],
    dbeta: Option<&mut [f32]>,
    inputs: Inputs<'_>,
    accumulate: bool,
    scratch: &mut [f32],
) {
    let c = inputs.gamma.len();
    let (gamma_parts, beta_parts) = scratch.split_at_mut(scratch.len() / 2);
    let parts = gamma_parts.par_chunks_mut(c).zip(beta_parts.par_chunks_mut(c));
    let chunks = dx.par_chunks_mut(c * SUM_ROWS).zip(parts).enumerate();
    chunks.for_each(|(chunk, (dx, (dgamma, dbeta)))| {
        level.run(
            #[inline(always)]
            || {
                dgamma.fill(0.0);
                dbeta.fill(0.0);
                for (index, dx) in dx.chunks_exact_mut(c).enumerate() {
                    let row = chunk * SUM_ROWS + index;
                    backward_row(dx, dgamma, dbeta, &inputs, row);
                }
            },
        );
    });
    add_parts(level, dgamma, gamma_parts, accumulate);
    if let Some(dbeta) = dbeta {
        add_parts(level, dbeta, beta_parts, accumulate);
    }
}

#[inline(always)]
fn backward_row(
    dx: &mut [f32],
    dgamma: &mut [f32],
    dbeta: &mut [f32],
    inputs: &Inputs<'_>,
    row: usize,
) {
    // With slices of one length the loops below have no bounds checks and become vectors.
    let c = dx.len();
    let dgamma = &mut dgamma[..c];
    let dbeta = &mut dbeta[..c];
    let dy = &inputs.dy[row * c..][..c];
    let x = &inputs.x[row * c..][..c];
    let gamma = &inputs.gamma[..c];
    let offset = inputs.gamma_offset;
    let [mean, rstd] = [inputs.statistics[2 * row], inputs.statistics[2 * row + 1]];
    // dx = rstd (g − mean(g) − x̂ mean(g x̂)), g = dy (offset + γ); g first goes to dx.
    for i in 0..c {
        dx[i] = dy[i] * (offset + gamma[i]);
        dgamma[i] += dy[i] * ((x[i] - mean) * rstd);
        dbeta[i] += dy[i];
    }
    let g_mean = if inputs.rms { 0.0 } else { sum(dx) / c as f32 };
    // Σ g x̂ = rstd (Σ g x − mean Σ g) would cancel digits, so x̂ is computed again.
    let g_xhat = dot_with(dx, x, |x| (x - mean) * rstd) / c as f32;
    let of_x = |g: f32, x: f32| rstd * (g - g_mean - (x - mean) * rstd * g_xhat);
    let all = dx.iter_mut().zip(x);
    match inputs.residual {
        None => all.for_each(|(dx, &x)| *dx = of_x(*dx, x)),
        Some(residual) => {
            let all = all.zip(&residual[row * c..][..c]);
            all.for_each(|((dx, &x), r)| *dx = of_x(*dx, x) + r);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::oracle::{close, differences, noise};
    use super::*;

    const EPSILON: f32 = 1e-5;

    /// In these tests, norms by root mean square store γ as its difference from 1.
    fn offset(rms: bool) -> f32 {
        if rms { 1.0 } else { 0.0 }
    }

    fn plain(x: &[f64], gamma: &[f64], beta: &[f64], rms: bool) -> Vec<f64> {
        let c = gamma.len();
        let mut y = Vec::new();
        for row in x.chunks(c) {
            let mean = if rms { 0.0 } else { row.iter().sum::<f64>() / c as f64 };
            let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / c as f64;
            let rstd = 1.0 / (variance + f64::from(EPSILON)).sqrt();
            let scale = |i| f64::from(offset(rms)) + gamma[i];
            y.extend((0..c).map(|i| (row[i] - mean) * rstd * scale(i) + beta[i]));
        }
        y
    }

    #[test]
    fn forward_and_backward_are_the_plain_ones() {
        let sizes = [(1, 2), (3, 7), (5, 48), (150, 5)];
        for ((rows, c), rms) in sizes.into_iter().flat_map(|s| [(s, false), (s, true)]) {
            let x = noise(rows * c, 1);
            let gamma = noise(c, 2);
            let beta = noise(c, 3);
            let dy = noise(rows * c, 4);
            let residual = noise(rows * c, 5);
            for level in Level::all() {
                let mut y = vec![f32::NAN; rows * c];
                let mut statistics = vec![f32::NAN; 2 * rows];
                let affine =
                    Affine { gamma: &gamma.narrow, offset: offset(rms), beta: Some(&beta.narrow) };
                forward(level, &mut y, &mut statistics, &x.narrow, affine, EPSILON, rms);
                close(&y, &plain(&x.wide, &gamma.wide, &beta.wide, rms), 1e-5);

                let mut dx = vec![f32::NAN; rows * c];
                let mut dgamma = vec![f32::NAN; c];
                let mut dbeta = vec![f32::NAN; c];
                let inputs = Inputs {
                    residual: Some(&residual.narrow),
                    dy: &dy.narrow,
                    x: &x.narrow,
                    statistics: &statistics,
                    gamma: &gamma.narrow,
                    gamma_offset: offset(rms),
                    rms,
                };
                let mut memory = vec![f32::NAN; scratch_len(rows, c)];
                let dbeta_slice = Some(&mut dbeta[..]);
                backward(level, &mut dx, &mut dgamma, dbeta_slice, inputs, false, &mut memory);
                let loss = |x: &[f64], gamma: &[f64], beta: &[f64]| {
                    let y = plain(x, gamma, beta, rms);
                    y.iter().zip(&dy.wide).map(|(y, dy)| y * dy).sum::<f64>()
                };
                let slope = differences(&x.wide, |x| loss(x, &gamma.wide, &beta.wide));
                let expected: Vec<f64> =
                    slope.iter().zip(&residual.wide).map(|(slope, r)| slope + r).collect();
                close(&dx, &expected, 1e-3); // rows of two nearly equal channels are steep
                close(&dgamma, &differences(&gamma.wide, |g| loss(&x.wide, g, &beta.wide)), 1e-4);
                close(&dbeta, &differences(&beta.wide, |b| loss(&x.wide, &gamma.wide, b)), 1e-4);
            }
        }
    }
}
