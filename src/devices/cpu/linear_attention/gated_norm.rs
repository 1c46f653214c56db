//! The norm of the delta rule's output, with its gates.

use rayon::prelude::*;

use super::super::activation::{silu, slope_of_silu};
use super::super::linear::{SUM_ROWS, add_parts};
use super::super::math::dot;
use super::super::views::{Call, Compute, ComputeIn};
use crate::kernels::{GatedNorm, GatedNormBackward};
use crate::simd::Level;

impl Compute for GatedNorm<'_> {
    fn compute(&self, level: Level, call: &Call<'_>) {
        let GatedNorm { epsilon, shape, .. } = *self;
        let heads = shape.heads;
        let d = heads.value_size;
        let [x, projected, gamma] =
            [self.x, self.projected, self.gamma].map(|view| call.read(view));
        let rows = call.write(self.y).par_chunks_mut(heads.values());
        let rows = rows.zip(x.par_chunks(heads.values()));
        rows.zip(projected.par_chunks(heads.projected())).for_each(|((y, x), projected)| {
            level.run(
                #[inline(always)]
                || {
                    let z = projected[heads.remembered()..].chunks_exact(d);
                    for ((y, x), z) in y.chunks_exact_mut(d).zip(x.chunks_exact(d)).zip(z) {
                        let rstd = 1.0 / (dot(x, x) / d as f32 + epsilon).sqrt();
                        let all = y.iter_mut().zip(x).zip(z).zip(gamma);
                        all.for_each(|(((y, x), z), g)| *y = x * rstd * g * silu(*z));
                    }
                },
            );
        });
    }
}

impl ComputeIn for GatedNormBackward<'_> {
    fn workspace(&self) -> usize {
        self.x.rows.div_ceil(SUM_ROWS) * self.gamma.columns
    }

    /// dx = rstd (g − x̂ mean(g x̂)), g = dy silu(z) γ.
    fn compute(&self, level: Level, call: &Call<'_>, parts: &mut [f32]) {
        let heads = self.shape.heads;
        let d = heads.value_size;
        let width = heads.values();
        let projected_width = heads.projected();
        let [dy, x, projected, gamma] =
            [self.dy, self.x, self.projected, self.gamma].map(|view| call.read(view));
        let chunks = call.write(self.dx).par_chunks_mut(width * SUM_ROWS);
        let dprojected = call.write(self.dprojected).par_chunks_mut(projected_width * SUM_ROWS);
        let chunks = chunks.zip(dprojected).zip(parts.par_chunks_mut(d)).enumerate();
        chunks.for_each(|(chunk, ((dx, dprojected), part))| {
            level.run(
                #[inline(always)]
                || {
                    part.fill(0.0);
                    let rows = dx.chunks_exact_mut(width);
                    let rows = rows.zip(dprojected.chunks_exact_mut(projected_width));
                    for (row, (dx, dprojected)) in (chunk * SUM_ROWS..).zip(rows) {
                        let z = &projected[row * projected_width + heads.remembered()..];
                        let dz = &mut dprojected[heads.remembered()..];
                        for head in 0..heads.value_heads {
                            let own = head * d..(head + 1) * d;
                            let x = &x[row * width..][own.clone()];
                            let dy = &dy[row * width..][own.clone()];
                            let dx = &mut dx[own.clone()];
                            let z = &z[own.clone()];
                            let dz = &mut dz[own];
                            let rstd = 1.0 / (dot(x, x) / d as f32 + self.epsilon).sqrt();
                            for at in 0..d {
                                let normed = x[at] * rstd;
                                let dnormed = dy[at] * silu(z[at]);
                                dz[at] = dy[at] * (normed * gamma[at]) * slope_of_silu(z[at]);
                                part[at] += dnormed * normed;
                                dx[at] = dnormed * gamma[at];
                            }
                            let mean = dot(dx, x) * rstd / d as f32;
                            let all = dx.iter_mut().zip(x);
                            all.for_each(|(dx, x)| *dx = rstd * (*dx - x * rstd * mean));
                        }
                    }
                },
            );
        });
        add_parts(level, call.write(self.dgamma), parts, self.accumulate);
    }
}
