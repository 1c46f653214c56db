//! Norms of each head of queries and keys by root mean square (Henry et al. 2020, as in Qwen3).

use rayon::prelude::*;

use super::linear::{SUM_ROWS, add_parts};
use super::math::{dot, dot_with};
use super::views::{Call, Compute, ComputeIn};
use crate::kernels::{HeadNorm, HeadNormBackward};
use crate::simd::Level;

impl Compute for HeadNorm<'_> {
    fn compute(&self, level: Level, call: &Call<'_>) {
        let HeadNorm { gamma_offset: offset, epsilon, shape, .. } = *self;
        let gamma = [self.gamma.query, self.gamma.key].map(|gamma| call.read(gamma));
        let width = shape.qkv_width();
        let d = shape.head_size;
        let normed = shape.heads + shape.kv_heads;
        let y = call.write(self.y).par_chunks_mut(width);
        let rows = y.zip(call.write(self.statistics).par_chunks_mut(normed));
        rows.zip(call.read(self.x).par_chunks(width)).for_each(|((y, statistics), x)| {
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
}

impl ComputeIn for HeadNormBackward<'_> {
    fn workspace(&self) -> usize {
        self.shape.rows().div_ceil(SUM_ROWS) * 2 * self.shape.head_size
    }

    /// dx = rstd (g − x̂ mean(g x̂)), g = dy (offset + γ), in place of dy.
    fn compute(&self, level: Level, call: &Call<'_>, workspace: &mut [f32]) {
        let HeadNormBackward { gamma_offset: offset, shape, accumulate, .. } = *self;
        let x = call.read(self.x);
        let statistics = call.read(self.statistics);
        let gamma = [self.gamma.query, self.gamma.key].map(|gamma| call.read(gamma));
        let width = shape.qkv_width();
        let d = shape.head_size;
        let normed = shape.heads + shape.kv_heads;
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
                            let dx = &mut dx[head * d..][..d];
                            let x = &x[row * width + head * d..][..d];
                            let gamma = gamma[usize::from(is_key)];
                            for (((dx, part), x), gamma) in
                                dx.iter_mut().zip(part).zip(x).zip(gamma)
                            {
                                *part += *dx * (x * rstd);
                                *dx *= offset + gamma;
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
        let shape = AttentionShape::causal(BatchMetadata::plain(&[0, 35, 70]).view(), [2, 1, 3]);
        let len = shape.rows() * shape.qkv_width();
        let x = noise(len, 1);
        let dy = noise(len, 2);
        let q = noise(3, 3);
        let k = noise(3, 4);
        for level in Level::all() {
            let mut bench = Bench::new();
            let y = bench.nan(70, shape.qkv_width());
            let statistics = bench.nan(70, 3);
            let x_view = bench.tensor(y.columns, &x.narrow);
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
                shape,
            };
            let backward = HeadNormBackward {
                dx,
                dgamma,
                x: x_view,
                statistics,
                gamma,
                gamma_offset: OFFSET,
                shape,
                accumulate: false,
            };
            bench.run(level, |k, scratch| {
                k.head_norm(&norm);
                k.head_norm_backward(&backward, scratch);
            });
            close(&bench.values(y), &plain(&x.wide, [&q.wide, &k.wide], &shape), 1e-5);
            let [dx, dq, dk] = [dx, dgamma.query, dgamma.key].map(|view| bench.values(view));
            let loss = |x: &[f64], q: &[f64], k: &[f64]| {
                plain(x, [q, k], &shape).iter().zip(&dy.wide).map(|(y, dy)| y * dy).sum::<f64>()
            };
            close(&dx, &differences(&x.wide, |x| loss(x, &q.wide, &k.wide)), 1e-4);
            close(&dq, &differences(&q.wide, |q| loss(&x.wide, q, &k.wide)), 1e-4);
            close(&dk, &differences(&k.wide, |k| loss(&x.wide, &q.wide, k)), 1e-4);
        }
    }
}
