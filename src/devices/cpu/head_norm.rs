//! Norms of each head of queries and keys by root mean square (Henry et al. 2020, as in Qwen3).

use rayon::prelude::*;

use super::linear::{SUM_ROWS, add_parts};
use super::math::{dot, dot_with};
use super::views::{Call, Compute, ComputeIn};
use crate::kernels::{HeadNorm, HeadNormBackward, HeadValues};
use crate::simd::Level;

impl Compute for HeadNorm<'_> {
    fn compute(&self, level: Level, call: &Call<'_>) {
        let HeadNorm { gamma_offset: offset, epsilon, values, shape, .. } = *self;
        let gamma = [self.gamma.query, self.gamma.key].map(|gamma| call.read(gamma));
        let d = shape.head_size;
        let scaled = shape.heads + shape.kv_heads;
        let normed = values.normed_heads(shape.heads, shape.kv_heads);
        let y = call.write(self.y).par_chunks_mut(shape.qkv_width());
        let rows = y.zip(call.write(self.statistics).par_chunks_mut(normed));
        let width = values.input_width(&shape);
        rows.zip(call.read(self.x).par_chunks(width)).for_each(|((y, statistics), x)| {
            level.run(
                #[inline(always)]
                || {
                    for (head, statistic) in statistics.iter_mut().enumerate() {
                        let x = &x[head * d..][..d];
                        *statistic = 1.0 / (dot(x, x) / d as f32 + epsilon).sqrt();
                        let plain = |y: &mut [f32]| {
                            y.iter_mut().zip(x).for_each(|(y, x)| *y = *x * *statistic);
                        };
                        if head >= scaled {
                            plain(&mut y[head * d..][..d]);
                            continue;
                        }
                        let is_key = head >= shape.heads;
                        let gamma = gamma[usize::from(is_key)];
                        let all = y[head * d..][..d].iter_mut().zip(x).zip(gamma);
                        all.for_each(|((y, x), g)| *y = *x * *statistic * (offset + g));
                        if is_key && values == HeadValues::Keys {
                            plain(&mut y[(head + shape.kv_heads) * d..][..d]);
                        }
                    }
                    if values == HeadValues::Plain {
                        y[normed * d..].copy_from_slice(&x[normed * d..]);
                    }
                },
            );
        });
    }
}

impl ComputeIn for HeadNormBackward<'_> {
    fn workspace(&self) -> usize {
        self.shape.rows().div_ceil(SUM_ROWS) * 2 * self.shape.head_size
    }

    /// dx = rstd (g − x̂ mean(g x̂)), g = dy (offset + γ), in place of dy.
    fn compute(&self, level: Level, call: &Call<'_>, workspace: &mut [f32]) {
        let HeadNormBackward { gamma_offset: offset, values, shape, accumulate, .. } = *self;
        let x = call.read(self.x);
        let statistics = call.read(self.statistics);
        let gamma = [self.gamma.query, self.gamma.key].map(|gamma| call.read(gamma));
        let width = shape.qkv_width();
        let d = shape.head_size;
        let scaled = shape.heads + shape.kv_heads;
        let normed = values.normed_heads(shape.heads, shape.kv_heads);
        let read = values.input_width(&shape);
        let (q_parts, k_parts) = workspace.split_at_mut(workspace.len() / 2);
        let parts = q_parts.par_chunks_mut(d).zip(k_parts.par_chunks_mut(d));
        let chunks = call.write(self.dx).par_chunks_mut(width * SUM_ROWS).zip(parts).enumerate();
        chunks.for_each(|(chunk, (dx, (q_part, k_part)))| {
            level.run(
                #[inline(always)]
                || {
                    q_part.fill(0.0);
                    k_part.fill(0.0);
                    for (row, dx) in (chunk * SUM_ROWS..).zip(dx.chunks_exact_mut(width)) {
                        for head in 0..normed {
                            let is_key = head >= shape.heads;
                            let part = if is_key { &mut *k_part } else { &mut *q_part };
                            let rstd = statistics[row * normed + head];
                            let (dx, behind) = dx[head * d..].split_at_mut(d);
                            let x = &x[row * read + head * d..][..d];
                            let gamma = gamma[usize::from(is_key)];
                            if head < scaled {
                                for (((dx, part), x), gamma) in
                                    dx.iter_mut().zip(part).zip(x).zip(gamma)
                                {
                                    *part += *dx * (x * rstd);
                                    *dx *= offset + gamma;
                                }
                            }
                            if is_key && values == HeadValues::Keys {
                                let of_values = &behind[(shape.kv_heads - 1) * d..][..d];
                                dx.iter_mut().zip(of_values).for_each(|(dx, dv)| *dx += dv);
                            }
                            let mean = dot_with(dx, x, |x| x * rstd) / d as f32;
                            let all = dx.iter_mut().zip(x);
                            all.for_each(|(dx, x)| *dx = rstd * (*dx - x * rstd * mean));
                        }
                    }
                },
            );
        });
        add_parts(level, call.write(self.dgamma.query), q_parts, accumulate);
        add_parts(level, call.write(self.dgamma.key), k_parts, accumulate);
    }
}

#[cfg(test)]
mod tests {
    use super::super::oracle::{Bench, close, differences, noise};
    use super::*;
    use crate::kernels::{AttentionShape, BatchMetadata, QueryKey};

    const OFFSET: f32 = 0.5;
    const EPSILON: f32 = 1e-5;

    fn plain(
        x: &[f64],
        gamma: [&[f64]; 2],
        values: HeadValues,
        shape: &AttentionShape<'_>,
    ) -> Vec<f64> {
        let d = shape.head_size;
        let scaled = shape.heads + shape.kv_heads;
        let normed = |x: &[f64]| -> Vec<f64> {
            let square = x.iter().map(|x| x * x).sum::<f64>() / d as f64;
            let rstd = 1.0 / (square + f64::from(EPSILON)).sqrt();
            x.iter().map(|x| x * rstd).collect()
        };
        let row = |x: &[f64]| -> Vec<f64> {
            let head = |index: usize| &x[index * d..][..d];
            let scale = |index: usize| {
                let gamma = gamma[usize::from(index >= shape.heads)];
                let normed = normed(head(index));
                let all = normed.iter().zip(gamma);
                all.map(|(n, g)| n * (f64::from(OFFSET) + g)).collect::<Vec<f64>>()
            };
            let mut y: Vec<f64> = (0..scaled).flat_map(scale).collect();
            for value in 0..shape.kv_heads {
                y.extend(match values {
                    HeadValues::Plain => head(scaled + value).to_vec(),
                    HeadValues::Normed => normed(head(scaled + value)),
                    HeadValues::Keys => normed(head(shape.heads + value)),
                });
            }
            y
        };
        x.chunks(values.input_width(shape)).flat_map(row).collect()
    }

    #[test]
    fn forward_and_backward_are_the_plain_ones() {
        for values in [HeadValues::Plain, HeadValues::Normed, HeadValues::Keys] {
            check([2, 1, 3], values);
            check([4, 2, 3], values);
        }
    }

    fn check(heads: [usize; 3], values: HeadValues) {
        let shape = AttentionShape::causal(BatchMetadata::plain(&[0, 35, 70]).view(), heads);
        let width = values.input_width(&shape);
        let x = noise(shape.rows() * width, 1);
        let dy = noise(shape.rows() * shape.qkv_width(), 2);
        let q = noise(3, 3);
        let k = noise(3, 4);
        for level in Level::all() {
            let mut bench = Bench::new();
            let y = bench.nan(70, shape.qkv_width());
            let statistics = bench.nan(70, values.normed_heads(shape.heads, shape.kv_heads));
            let x_view = bench.tensor(width, &x.narrow);
            let dx = bench.tensor(y.columns, &dy.narrow);
            let dgamma = QueryKey { query: bench.nan(1, 3), key: bench.nan(1, 3) };
            let gamma =
                QueryKey { query: bench.tensor(3, &q.narrow), key: bench.tensor(3, &k.narrow) };
            let norm = HeadNorm {
                y,
                statistics,
                x: x_view,
                gamma,
                gamma_offset: OFFSET,
                epsilon: EPSILON,
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
                values,
                shape,
                accumulate: false,
            };
            bench.run(level, |k, scratch| {
                k.head_norm(&norm);
                k.head_norm_backward(&backward, scratch);
            });
            close(&bench.values(y), &plain(&x.wide, [&q.wide, &k.wide], values, &shape), 1e-5);
            let [dx, dq, dk] = [dx, dgamma.query, dgamma.key].map(|view| bench.values(view));
            let rows = dx.chunks(shape.qkv_width());
            let dx: Vec<f32> = rows.flat_map(|row| row[..width].to_vec()).collect();
            let loss = |x: &[f64], q: &[f64], k: &[f64]| {
                let y = plain(x, [q, k], values, &shape);
                y.iter().zip(&dy.wide).map(|(y, dy)| y * dy).sum::<f64>()
            };
            close(&dx, &differences(&x.wide, |x| loss(x, &q.wide, &k.wide)), 1e-4);
            close(&dq, &differences(&q.wide, |q| loss(&x.wide, q, &k.wide)), 1e-4);
            close(&dk, &differences(&k.wide, |k| loss(&x.wide, &q.wide, k)), 1e-4);
        }
    }
}
