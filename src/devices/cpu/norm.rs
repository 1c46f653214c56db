//! Norms over the channels of each row: by mean and deviation (Ba et al. 2016), or by root mean
//! square alone (Zhang and Sennrich 2019), which is the first one with a mean of 0.

use rayon::prelude::*;

use super::linear::{SUM_ROWS, add_parts};
use super::math::{dot_with, sum, sum_of};
use super::views::{Call, Compute, ComputeIn};
use crate::kernels::{Norm, NormBackward};
use crate::simd::Level;

impl Compute for Norm {
    fn compute(&self, level: Level, call: &Call<'_>) {
        let Norm { gamma_offset: offset, epsilon, rms, .. } = *self;
        let c = self.x.columns;
        let gamma = call.read(self.gamma);
        let beta = call.read_if(self.beta);
        let y = call.write(self.y).par_chunks_mut(c * SUM_ROWS);
        let chunks = y.zip(call.write(self.statistics).par_chunks_mut(2 * SUM_ROWS));
        let chunks = chunks.zip(call.read(self.x).par_chunks(c * SUM_ROWS));
        chunks.for_each(|((y, statistics), x)| {
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
}

impl ComputeIn for NormBackward {
    fn workspace(&self) -> usize {
        self.x.rows.div_ceil(SUM_ROWS) * 2 * self.x.columns
    }

    /// Sums dγ and dβ over 64 rows at a time, then in order.
    fn compute(&self, level: Level, call: &Call<'_>, workspace: &mut [f32]) {
        let NormBackward { gamma_offset: offset, rms, accumulate, .. } = *self;
        let c = self.x.columns;
        let [dy, x, statistics, gamma] =
            [self.dy, self.x, self.statistics, self.gamma].map(|view| call.read(view));
        let residual = call.read_if(self.residual);
        let (gamma_parts, beta_parts) = workspace.split_at_mut(workspace.len() / 2);
        let parts = gamma_parts.par_chunks_mut(c).zip(beta_parts.par_chunks_mut(c));
        let chunks = call.write(self.dx).par_chunks_mut(c * SUM_ROWS).zip(parts).enumerate();
        chunks.for_each(|(chunk, (dx, (dgamma, dbeta)))| {
            level.run(
                #[inline(always)]
                || {
                    dgamma.fill(0.0);
                    dbeta.fill(0.0);
                    for (row, dx) in (chunk * SUM_ROWS..).zip(dx.chunks_exact_mut(c)) {
                        // With slices of one length the loops below have no bounds checks and
                        // become vectors.
                        let dgamma = &mut dgamma[..c];
                        let dbeta = &mut dbeta[..c];
                        let dx = &mut dx[..c];
                        let dy = &dy[row * c..][..c];
                        let x = &x[row * c..][..c];
                        let gamma = &gamma[..c];
                        let [mean, rstd] = [statistics[2 * row], statistics[2 * row + 1]];
                        // dx = rstd (g − mean(g) − x̂ mean(g x̂)), g = dy (offset + γ); g first
                        // goes to dx.
                        for i in 0..c {
                            dx[i] = dy[i] * (offset + gamma[i]);
                            dgamma[i] += dy[i] * ((x[i] - mean) * rstd);
                            dbeta[i] += dy[i];
                        }
                        let g_mean = if rms { 0.0 } else { sum(dx) / c as f32 };
                        // Σ g x̂ = rstd (Σ g x − mean Σ g) would cancel digits, so x̂ is computed
                        // again.
                        let g_xhat = dot_with(dx, x, |x| (x - mean) * rstd) / c as f32;
                        let of_x =
                            |g: f32, x: f32| rstd * (g - g_mean - (x - mean) * rstd * g_xhat);
                        let all = dx.iter_mut().zip(x);
                        match residual {
                            None => all.for_each(|(dx, &x)| *dx = of_x(*dx, x)),
                            Some(residual) => {
                                let all = all.zip(&residual[row * c..][..c]);
                                all.for_each(|((dx, &x), r)| *dx = of_x(*dx, x) + r);
                            }
                        }
                    }
                },
            );
        });
        add_parts(level, call.write(self.dgamma), gamma_parts, accumulate);
        if let Some(dbeta) = call.write_if(self.dbeta) {
            add_parts(level, dbeta, beta_parts, accumulate);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::oracle::{Bench, close, differences, noise};
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
                let mut bench = Bench::new();
                let [y, dx] = [(); 2].map(|()| bench.nan(rows, c));
                let [dgamma, dbeta] = [(); 2].map(|()| bench.nan(1, c));
                let statistics = bench.nan(rows, 2);
                let [x_view, dy_view, residual_view, gamma_view, beta_view] =
                    [&x, &dy, &residual, &gamma, &beta].map(|of| bench.tensor(c, &of.narrow));
                let norm = Norm {
                    y,
                    statistics,
                    x: x_view,
                    gamma: gamma_view,
                    gamma_offset: offset(rms),
                    beta: Some(beta_view),
                    epsilon: EPSILON,
                    rms,
                };
                let backward = NormBackward {
                    dx,
                    dgamma,
                    dbeta: Some(dbeta),
                    residual: Some(residual_view),
                    dy: dy_view,
                    x: x_view,
                    statistics,
                    gamma: gamma_view,
                    gamma_offset: offset(rms),
                    rms,
                    accumulate: false,
                };
                bench.run(level, |k, scratch| {
                    k.norm(&norm);
                    k.norm_backward(&backward, scratch);
                });
                close(&bench.values(y), &plain(&x.wide, &gamma.wide, &beta.wide, rms), 1e-5);
                let [dx, dgamma, dbeta] = [dx, dgamma, dbeta].map(|view| bench.values(view));
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
