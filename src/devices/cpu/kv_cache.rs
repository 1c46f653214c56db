//! The KV cache: generation computes a few tokens at a time, so keys and values of the earlier ones
//! are kept instead of computed again.

use rayon::prelude::*;

use super::math::{dot, exp, largest, limit, sum};
use super::views::{Call, Compute};
use crate::kernels::{CachedAttention, ReadKv, WriteKv};
use crate::simd::Level;

/// Keys that are scored together.
const TILE: usize = 64;

impl Compute for WriteKv<'_> {
    fn compute(&self, _: Level, call: &Call<'_>) {
        let WriteKv { kv, qkv, shape } = *self;
        let kv = call.write(kv).chunks_exact_mut(shape.kv_width());
        let rows = kv.zip(call.read(qkv).chunks_exact(shape.qkv_width()));
        rows.for_each(|(kv, qkv)| kv.copy_from_slice(&qkv[shape.width()..]));
    }
}

impl Compute for ReadKv<'_> {
    fn compute(&self, _: Level, call: &Call<'_>) {
        let ReadKv { qkv, kv, shape } = *self;
        let qkv = call.write(qkv).chunks_exact_mut(shape.qkv_width());
        let rows = qkv.zip(call.read(kv).chunks_exact(shape.kv_width()));
        rows.for_each(|(qkv, kv)| qkv[shape.width()..].copy_from_slice(kv));
    }
}

impl Compute for CachedAttention<'_> {
    fn compute(&self, level: Level, call: &Call<'_>) {
        let shape = &self.shape;
        let d = shape.head_size;
        let qkv = call.read(self.qkv);
        let cache = call.read(self.cache);
        let of_sequence = cache.len() / shape.batch.sequences();
        let heads = call.write(self.y).par_chunks_mut(d).enumerate();
        let statistics = heads.map(|(task, y)| {
            let row = task / shape.heads;
            let head = task % shape.heads;
            let (sequence, at) = shape.batch.place(row);
            let first_row = row - at;
            let cached = shape.batch.positions_before(sequence);
            let shared = head * shape.kv_heads / shape.heads;
            // A position's keys and values: in the cache, or beside its queries.
            let kv_of = |key: usize| -> &[f32] {
                match key.checked_sub(cached) {
                    None => &cache[sequence * of_sequence + key * shape.kv_width()..],
                    Some(new) => &qkv[(first_row + new) * shape.qkv_width() + shape.heads * d..],
                }
            };
            let query = cached + at;
            let q = &qkv[row * shape.qkv_width() + head * d..][..d];
            let k = shared * d;
            let v = (shape.kv_heads + shared) * d;
            let first = shape.window.map_or(0, |window| (query + 1).saturating_sub(window));
            let scale = shape.score_scale();
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
                        limit(p, shape.cap);
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
                    // Sequence by sequence, and in one head by head.
                    let new = shape.batch.sequence(sequence).len();
                    (first_row * shape.heads + head * new + at, most + total.ln())
                },
            )
        });
        let statistics: Vec<(usize, f32)> = statistics.collect();
        let lse = call.write(self.lse);
        statistics.into_iter().for_each(|(place, value)| lse[place] = value);
    }
}

#[cfg(test)]
mod tests {
    use super::super::oracle::{Bench, noise};
    use super::*;
    use crate::kernels::{Attention, AttentionShape, BatchMetadata};

    fn are_near(found: &[f32], expected: &[f32]) -> bool {
        assert_eq!(found.len(), expected.len());
        let off = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
        off.fold(0.0, f32::max) < 1e-5
    }

    /// Attention to a cache is attention to all positions at once.
    #[test]
    fn it_is_attention_to_all_at_once() {
        let starts = [0_usize, 7, 97, 168];
        let most = 90;
        let d = 5;
        let lengths = [7, 90, 71];
        for (heads, kv_heads, window) in [(2, 2, None), (4, 2, Some(66)), (3, 1, Some(1))] {
            let metadata = BatchMetadata::plain(&starts);
            let plain = AttentionShape::causal(metadata.view(), [heads, kv_heads, d]);
            let [scale, cap] = [0.9, 0.7].map(|number| window.map(|_| number));
            let all = AttentionShape { window, scale, cap, ..plain };
            let rows = all.rows();
            let qkv = noise(rows * all.qkv_width(), 1).narrow;
            for new in [[1, 1, 1], [3, 1, 2]] {
                let cached = [0, 1, 2].map(|s| lengths[s] - new[s]);
                let begins = [0, new[0], new[0] + new[1], new[0] + new[1] + new[2]];
                let batch = BatchMetadata { starts: &begins, cached: &cached, ..metadata }.view();
                let few = AttentionShape { batch, ..all };
                let of = |s: usize| (starts[s] + cached[s]) * all.qkv_width();
                let last = (0..3).flat_map(|s| &qkv[of(s)..][..new[s] * all.qkv_width()]);
                let last: Vec<f32> = last.copied().collect();
                for level in Level::all() {
                    let mut bench = Bench::new();
                    let y = bench.nan(rows, all.width());
                    let lse = bench.nan(rows, heads);
                    let kv = bench.nan(rows, all.kv_width());
                    let found = bench.nan(few.rows(), all.width());
                    let found_lse = bench.nan(few.rows(), heads);
                    let of_all = bench.tensor(all.qkv_width(), &qkv);
                    let of_last = bench.tensor(all.qkv_width(), &last);
                    bench.run(level, |k, _| {
                        k.attention(&Attention { y, lse, qkv: of_all, kv: None, shape: all });
                        k.write_kv(&WriteKv { kv, qkv: of_all, shape: all });
                    });
                    // The cache has room for `most` positions of each sequence.
                    let mut cache = vec![f32::NAN; 3 * most * all.kv_width()];
                    let kv = bench.values(kv);
                    for s in 0..3 {
                        let from = &kv[starts[s] * all.kv_width()..][..cached[s] * all.kv_width()];
                        cache[s * most * all.kv_width()..][..from.len()].copy_from_slice(from);
                    }
                    let cache = bench.tensor(all.kv_width(), &cache);
                    let lse_of_few = found_lse;
                    let op = CachedAttention {
                        y: found,
                        lse: lse_of_few,
                        qkv: of_last,
                        cache,
                        shape: few,
                    };
                    bench.run(level, |k, _| k.cached_attention(&op));
                    let [y, found] = [y, found].map(|view| bench.values(view));
                    let [lse, found_lse] = [lse, found_lse].map(|view| bench.values(view));
                    for s in 0..3 {
                        let of_all = &lse[starts[s] * heads..][..lengths[s] * heads];
                        let of_few = &found_lse[begins[s] * heads..][..new[s] * heads];
                        let rows = of_all.chunks(lengths[s]).zip(of_few.chunks(new[s]));
                        for (all, few) in rows {
                            assert!(are_near(few, &all[cached[s]..]), "{heads} {new:?} {s}");
                        }
                        let new = new[s] * heads * d;
                        let expected = &y[(starts[s] + cached[s]) * heads * d..][..new];
                        let found = &found[begins[s] * heads * d..][..new];
                        assert!(are_near(found, expected), "{heads} {new:?} {s}");
                    }
                }
            }
        }
    }
}
