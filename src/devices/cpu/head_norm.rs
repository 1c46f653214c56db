//! Norms of queries and keys (Henry et al. 2020): of each head, or of all heads at once.

use rayon::prelude::*;

use super::linear::{SUM_ROWS, add_parts};
use super::math::{dot_with, sum, sum_of};
use super::views::{Call, Compute, ComputeIn};
use crate::kernels::{HeadNorm, HeadNormBackward, HeadValues, QueryKey};
use crate::simd::Level;

impl Compute for HeadNorm<'_> {
    fn compute(&self, level: Level, call: &Call<'_>) {
        let HeadNorm { gamma_offset: offset, epsilon, norm, values, shape, .. } = *self;
        let gamma = [self.gamma.query, self.gamma.key].map(|gamma| call.read(gamma));
        let parts = self.parts();
        let normed = parts.normed(values);
        let of_values = shape.kv_heads * shape.head_size;
        let y = call.write(self.y).par_chunks_mut(shape.qkv_width());
        let statistics = call.write(self.statistics);
        let rows = y.zip(statistics.par_chunks_mut(normed * norm.statistics()));
        let width = values.input_width(&shape);
        rows.zip(call.read(self.x).par_chunks(width)).for_each(|((y, statistics), x)| {
            level.run(
                #[inline(always)]
                || {
                    let (rstds, means) = statistics.split_at_mut(normed);
                    for (part, to) in rstds.iter_mut().enumerate() {
                        let place = parts.place(part);
                        let x = &x[place.clone()];
                        let channels = x.len();
                        let mean = if means.is_empty() { 0.0 } else { sum(x) / channels as f32 };
                        let square = sum_of(x, |x| (x - mean) * (x - mean)) / channels as f32;
                        let rstd = 1.0 / (square + epsilon).sqrt();
                        *to = rstd;
                        if let Some(to) = means.get_mut(part) {
                            *to = mean;
                        }
                        let plain = |y: &mut [f32]| {
                            y.iter_mut().zip(x).for_each(|(y, x)| *y = (x - mean) * rstd);
                        };
                        if part >= parts.scaled() {
                            plain(&mut y[place]);
                            continue;
                        }
                        let is_key = part >= parts.count.query;
                        let nth = if is_key { part - parts.count.query } else { part };
                        let gamma = &gamma[usize::from(is_key)][norm.scales_of(nth, channels)];
                        let all = y[place.clone()].iter_mut().zip(x).zip(gamma);
                        all.for_each(|((y, x), g)| *y = (x - mean) * rstd * (offset + g));
                        if is_key && values == HeadValues::Keys {
                            plain(&mut y[place.start + of_values..][..channels]);
                        }
                    }
                    if values == HeadValues::Plain {
                        let first = y.len() - of_values;
                        y[first..].copy_from_slice(&x[first..]);
                    }
                },
            );
        });
    }
}

impl ComputeIn for HeadNormBackward<'_> {
    fn workspace(&self) -> usize {
        let QueryKey { query, key } = self.gamma;
        self.shape.rows().div_ceil(SUM_ROWS) * (query.len() + key.len())
    }

    /// dx = rstd (g − mean(g) − x̂ mean(g x̂)), g = dy (offset + γ), in place of dy. A norm by root
    /// mean square does not subtract mean(g).
    fn compute(&self, level: Level, call: &Call<'_>, workspace: &mut [f32]) {
        let HeadNormBackward { gamma_offset: offset, norm, values, shape, accumulate, .. } = *self;
        let x = call.read(self.x);
        let statistics = call.read(self.statistics);
        let gamma = [self.gamma.query, self.gamma.key].map(|gamma| call.read(gamma));
        let width = shape.qkv_width();
        let parts = self.parts();
        let normed = parts.normed(values);
        let of_row = normed * norm.statistics();
        let of_values = shape.kv_heads * shape.head_size;
        let read = values.input_width(&shape);
        let count = shape.rows().div_ceil(SUM_ROWS);
        let (q_sums, k_sums) = workspace.split_at_mut(count * gamma[0].len());
        let sums = q_sums.par_chunks_mut(gamma[0].len()).zip(k_sums.par_chunks_mut(gamma[1].len()));
        let chunks = call.write(self.dx).par_chunks_mut(width * SUM_ROWS).zip(sums).enumerate();
        chunks.for_each(|(chunk, (dx, (q_sum, k_sum)))| {
            level.run(
                #[inline(always)]
                || {
                    q_sum.fill(0.0);
                    k_sum.fill(0.0);
                    for (row, dx) in (chunk * SUM_ROWS..).zip(dx.chunks_exact_mut(width)) {
                        let (rstds, means) = statistics[row * of_row..][..of_row].split_at(normed);
                        for (part, &rstd) in rstds.iter().enumerate() {
                            let place = parts.place(part);
                            let channels = place.len();
                            let is_key = part >= parts.count.query;
                            let mean = means.get(part).copied().unwrap_or(0.0);
                            let x = &x[row * read + place.start..][..channels];
                            let (dx, behind) = dx[place.start..].split_at_mut(channels);
                            if part < parts.scaled() {
                                let nth = if is_key { part - parts.count.query } else { part };
                                let own = norm.scales_of(nth, channels);
                                let to = if is_key { &mut *k_sum } else { &mut *q_sum };
                                let gamma = &gamma[usize::from(is_key)][own.clone()];
                                let all = dx.iter_mut().zip(&mut to[own]).zip(x).zip(gamma);
                                for (((dx, to), x), gamma) in all {
                                    *to += *dx * ((x - mean) * rstd);
                                    *dx *= offset + gamma;
                                }
                            }
                            if is_key && values == HeadValues::Keys {
                                let dvalue = &behind[of_values - channels..][..channels];
                                dx.iter_mut().zip(dvalue).for_each(|(dx, dv)| *dx += dv);
                            }
                            let g_mean =
                                if means.is_empty() { 0.0 } else { sum(dx) / channels as f32 };
                            let g_xhat = dot_with(dx, x, |x| (x - mean) * rstd) / channels as f32;
                            dx.iter_mut().zip(x).for_each(|(dx, x)| {
                                *dx = rstd * (*dx - g_mean - (x - mean) * rstd * g_xhat);
                            });
                        }
                    }
                },
            );
        });
        add_parts(level, call.write(self.dgamma.query), q_sums, accumulate);
        add_parts(level, call.write(self.dgamma.key), k_sums, accumulate);
    }
}

#[cfg(test)]
mod tests {
    use super::super::oracle::{Bench, close, differences, noise};
    use super::*;
    use crate::kernels::{AttentionShape, BatchMetadata, QkNorm};

    const OFFSET: f32 = 0.5;
    const EPSILON: f32 = 1e-5;

    fn plain(x: &[f64], gamma: [&[f64]; 2], op: &HeadNorm<'_>) -> Vec<f64> {
        let HeadNorm { norm, values, shape, .. } = *op;
        let [heads, kv_heads, d] = shape.sizes();
        let normed = |x: &[f64]| -> Vec<f64> {
            let channels = x.len() as f64;
            let mean = match norm {
                QkNorm::LayerNorm => x.iter().sum::<f64>() / channels,
                QkNorm::ByHead | QkNorm::Joint => 0.0,
            };
            let square = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / channels;
            let rstd = 1.0 / (square + f64::from(EPSILON)).sqrt();
            x.iter().map(|x| (x - mean) * rstd).collect()
        };
        let of_kind = |x: &[f64], gamma: &[f64]| -> Vec<f64> {
            let channels = if norm == QkNorm::Joint { x.len() } else { d };
            let n = x.chunks(channels).flat_map(normed);
            n.zip(gamma.iter().cycle()).map(|(n, g)| n * (f64::from(OFFSET) + g)).collect()
        };
        let row = |x: &[f64]| -> Vec<f64> {
            let (queries, rest) = x.split_at(heads * d);
            let (keys, own) = rest.split_at(kv_heads * d);
            let of_values: Vec<f64> = match values {
                HeadValues::Plain => own.to_vec(),
                HeadValues::Normed => own.chunks(d).flat_map(normed).collect(),
                HeadValues::Keys => keys.chunks(d).flat_map(normed).collect(),
            };
            [of_kind(queries, gamma[0]), of_kind(keys, gamma[1]), of_values].concat()
        };
        x.chunks(values.input_width(&shape)).flat_map(row).collect()
    }

    #[test]
    fn forward_and_backward_are_the_plain_ones() {
        for values in [HeadValues::Plain, HeadValues::Normed, HeadValues::Keys] {
            check([2, 1, 3], QkNorm::ByHead, values);
            check([4, 2, 3], QkNorm::ByHead, values);
        }
        check([4, 2, 3], QkNorm::Joint, HeadValues::Plain);
        for values in [HeadValues::Plain, HeadValues::Normed, HeadValues::Keys] {
            check([2, 1, 3], QkNorm::LayerNorm, values);
        }
        check([4, 2, 3], QkNorm::LayerNorm, HeadValues::Plain);
    }

    fn check(heads: [usize; 3], norm: QkNorm, values: HeadValues) {
        let shape = AttentionShape::causal(BatchMetadata::plain(&[0, 35, 70]).view(), heads);
        let parts = norm.parts(heads);
        let scales = norm.scales(&parts);
        let width = values.input_width(&shape);
        let x = noise(shape.rows() * width, 1);
        let dy = noise(shape.rows() * shape.qkv_width(), 2);
        let q = noise(scales.query.iter().product(), 3);
        let k = noise(scales.key.iter().product(), 4);
        for level in Level::all() {
            let mut bench = Bench::new();
            let y = bench.nan(70, shape.qkv_width());
            let statistics = bench.nan(70, parts.normed(values) * norm.statistics());
            let x_view = bench.tensor(width, &x.narrow);
            let dx = bench.tensor(y.columns, &dy.narrow);
            let [of_query, of_key] = [scales.query, scales.key];
            let dgamma = QueryKey {
                query: bench.nan(of_query[0], of_query[1]),
                key: bench.nan(of_key[0], of_key[1]),
            };
            let gamma = QueryKey {
                query: bench.tensor(of_query[1], &q.narrow),
                key: bench.tensor(of_key[1], &k.narrow),
            };
            let op = HeadNorm {
                y,
                statistics,
                x: x_view,
                gamma,
                gamma_offset: OFFSET,
                epsilon: EPSILON,
                norm,
                values,
                shape,
            };
            let backward = HeadNormBackward {
                dx,
                dgamma,
                x: x_view,
                statistics,
                gamma,
                gamma_offset: OFFSET,
                norm,
                values,
                shape,
                accumulate: false,
            };
            bench.run(level, |k, scratch| {
                k.head_norm(&op);
                k.head_norm_backward(&backward, scratch);
            });
            close(&bench.values(y), &plain(&x.wide, [&q.wide, &k.wide], &op), 1e-5);
            let [dx, dq, dk] = [dx, dgamma.query, dgamma.key].map(|view| bench.values(view));
            let rows = dx.chunks(shape.qkv_width());
            let dx: Vec<f32> = rows.flat_map(|row| row[..width].to_vec()).collect();
            let loss = |x: &[f64], q: &[f64], k: &[f64]| {
                let y = plain(x, [q, k], &op);
                y.iter().zip(&dy.wide).map(|(y, dy)| y * dy).sum::<f64>()
            };
            close(&dx, &differences(&x.wide, |x| loss(x, &q.wide, &k.wide)), 1e-4);
            close(&dq, &differences(&q.wide, |q| loss(&x.wide, q, &k.wide)), 1e-4);
            close(&dk, &differences(&k.wide, |k| loss(&x.wide, &q.wide, k)), 1e-4);
        }
    }
}
