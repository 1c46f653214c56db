//! The KV cache: generation computes a few tokens at a time, so keys and values of the earlier ones
//! are kept instead of computed again.

use rayon::prelude::*;

use super::math::{dot, exp, largest, sum};
use super::views::CpuKernels;
use crate::kernels::{AttentionShape, CachedAttention, ReadKv, Runs, WriteKv};
use crate::simd::Level;

/// Keys that are scored together.
const TILE: usize = 64;

impl Runs<WriteKv<'_>> for CpuKernels<'_> {
    fn run(&self, op: &WriteKv<'_>) {
        let WriteKv { kv, qkv, ref shape } = *op;
        let Some(call) = self.call(op) else { return };
        copy_from_qkv(call.write(kv), call.read(qkv), shape);
    }
}

impl Runs<ReadKv<'_>> for CpuKernels<'_> {
    fn run(&self, op: &ReadKv<'_>) {
        let ReadKv { qkv, kv, ref shape } = *op;
        let Some(call) = self.call(op) else { return };
        copy_to_qkv(call.write(qkv), call.read(kv), shape);
    }
}

impl Runs<CachedAttention<'_>> for CpuKernels<'_> {
    fn run(&self, op: &CachedAttention<'_>) {
        let CachedAttention { y, qkv, cache, ref shape } = *op;
        let Some(call) = self.call(op) else { return };
        attention(self.level, call.write(y), call.read(qkv), call.read(cache), shape);
    }
}

/// Copies the keys and values of each position. kv: (R, 2 K D); qkv: (R, (H + 2K) D).
pub(super) fn copy_from_qkv(kv: &mut [f32], qkv: &[f32], shape: &AttentionShape<'_>) {
    let rows = kv.chunks_exact_mut(shape.kv_width()).zip(qkv.chunks_exact(shape.qkv_width()));
    rows.for_each(|(kv, qkv)| kv.copy_from_slice(&qkv[shape.width()..]));
}

/// Copies keys and values, or their gradients, to beside their queries.
pub(super) fn copy_to_qkv(qkv: &mut [f32], kv: &[f32], shape: &AttentionShape<'_>) {
    let rows = qkv.chunks_exact_mut(shape.qkv_width()).zip(kv.chunks_exact(shape.kv_width()));
    rows.for_each(|(qkv, kv)| qkv[shape.width()..].copy_from_slice(kv));
}

/// Attention of each query to the cached keys of its sequence and to the new ones, up to its own.
/// y: (R, H D); qkv: (R, (H + 2K) D); cache: (B, P, 2 K D). A sequence uses its first
/// positions there, as many as it has cached.
fn attention(level: Level, y: &mut [f32], qkv: &[f32], cache: &[f32], size: &AttentionShape<'_>) {
    let d = size.head_size;
    let of_sequence = cache.len() / size.batch.sequences();
    y.par_chunks_mut(d).enumerate().for_each(|(task, y)| {
        let row = task / size.heads;
        let head = task % size.heads;
        let (sequence, at) = size.batch.place(row);
        let first_row = row - at;
        let cached = size.batch.positions_before(sequence);
        let shared = head * size.kv_heads / size.heads;
        // A position's keys and values: in the cache, or beside its queries.
        let kv_of = |key: usize| -> &[f32] {
            match key.checked_sub(cached) {
                None => &cache[sequence * of_sequence + key * size.kv_width()..],
                Some(new) => &qkv[(first_row + new) * size.qkv_width() + size.heads * d..],
            }
        };
        let query = cached + at;
        let q = &qkv[row * size.qkv_width() + head * d..][..d];
        let k = shared * d;
        let v = (size.kv_heads + shared) * d;
        let first = size.window.map_or(0, |window| (query + 1).saturating_sub(window));
        let scale = 1.0 / (d as f32).sqrt();
        level.run(
            #[inline(always)]
            || {
                let mut most = f32::NEG_INFINITY;
                let mut total = 0.0_f32;
                y.fill(0.0);
                for tile in (first..=query).step_by(TILE) {
                    let keys = tile..(tile + TILE).min(query + 1);
                    let mut p = [0.0; TILE];
                    let p = &mut p[..keys.len()];
                    for (p, key) in p.iter_mut().zip(keys.clone()) {
                        *p = scale * dot(q, &kv_of(key)[k..k + d]);
                    }
                    let new = most.max(largest(p));
                    let shrink = exp(most - new);
                    p.iter_mut().for_each(|p| *p = exp(*p - new));
                    (most, total) = (new, total * shrink + sum(p));
                    y.iter_mut().for_each(|y| *y *= shrink);
                    for (&p, key) in p.iter().zip(keys) {
                        let v = &kv_of(key)[v..v + d];
                        y.iter_mut().zip(v).for_each(|(y, v)| *y += p * v);
                    }
                }
                y.iter_mut().for_each(|y| *y /= total);
            },
        );
    });
}

#[cfg(test)]
mod tests {
    use super::super::attention::forward;
    use super::super::oracle::noise;
    use super::*;
    use crate::kernels::BatchMetadata;

    /// Attention to a cache is attention to all positions at once.
    #[test]
    fn it_is_attention_to_all_at_once() {
        let starts = [0_usize, 7, 97, 168];
        let most = 90;
        let d = 5;
        let lengths = [7, 90, 71];
        for (heads, kv_heads, window) in [(2, 2, None), (4, 2, Some(66)), (3, 1, Some(1))] {
            let metadata = BatchMetadata {
                starts: &starts,
                kinds: &[],
                documents: &[],
                cached: &[],
                dropout_key: None,
            };
            let all = AttentionShape {
                batch: metadata.view(),
                heads,
                kv_heads,
                head_size: d,
                causal: true,
                window,
                dropout: None,
            };
            let rows = all.rows();
            let qkv = noise(rows * all.qkv_width(), 1).narrow;
            let mut y = vec![0.0; rows * heads * d];
            let mut lse = vec![0.0; rows * heads];
            let mut kv = vec![0.0; rows * all.kv_width()];
            for new in [[1, 1, 1], [3, 1, 2]] {
                let cached = [0, 1, 2].map(|s| lengths[s] - new[s]);
                let begins = [0, new[0], new[0] + new[1], new[0] + new[1] + new[2]];
                let batch = BatchMetadata { starts: &begins, cached: &cached, ..metadata }.view();
                let few = AttentionShape { batch, ..all };
                let of = |s: usize| (starts[s] + cached[s]) * all.qkv_width();
                let last = (0..3).flat_map(|s| &qkv[of(s)..][..new[s] * all.qkv_width()]);
                let last: Vec<f32> = last.copied().collect();
                for level in Level::all() {
                    forward(level, &mut y, &mut lse, &qkv, None, &all);
                    copy_from_qkv(&mut kv, &qkv, &all);
                    // The cache has room for `most` positions of each sequence.
                    let mut cache = vec![f32::NAN; 3 * most * all.kv_width()];
                    for s in 0..3 {
                        let from = &kv[starts[s] * all.kv_width()..][..cached[s] * all.kv_width()];
                        cache[s * most * all.kv_width()..][..from.len()].copy_from_slice(from);
                    }
                    let mut found = vec![f32::NAN; few.rows() * heads * d];
                    attention(level, &mut found, &last, &cache, &few);
                    for s in 0..3 {
                        let new = new[s] * heads * d;
                        let expected = &y[(starts[s] + cached[s]) * heads * d..][..new];
                        let found = &found[begins[s] * heads * d..][..new];
                        let off = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
                        assert!(off.fold(0.0, f32::max) < 1e-5, "{heads} {new:?} {s}");
                    }
                }
            }
        }
    }
}
