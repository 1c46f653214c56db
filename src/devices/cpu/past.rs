//! Attention to keys and values of positions that came before, for tokens that come a few at a
//! time: nothing that was computed once is computed again.

use rayon::prelude::*;

use super::math::{dot, exp, largest, sum};
use crate::kernels::Attention;
use crate::simd::Level;

/// Keys that are looked at together.
const TILE: usize = 64;

/// Keys and values of each position. y: (R, 2 K D); qkv: (R, (H + 2K) D).
pub(super) fn remember(y: &mut [f32], qkv: &[f32], size: &Attention<'_>) {
    let rows = y.chunks_exact_mut(size.kv_width()).zip(qkv.chunks_exact(size.packed()));
    rows.for_each(|(y, qkv)| y.copy_from_slice(&qkv[size.packed() - size.kv_width()..]));
}

/// The other way: the gradients of keys and values go beside those of their queries.
pub(super) fn recall(qkv: &mut [f32], kv: &[f32], size: &Attention<'_>) {
    let rows = qkv.chunks_exact_mut(size.packed()).zip(kv.chunks_exact(size.kv_width()));
    rows.for_each(|(qkv, kv)| qkv[size.packed() - size.kv_width()..].copy_from_slice(kv));
}

/// Attention of each query to its sequence's past and to what came with it, up to itself. y:
/// (R, H D); qkv: (R, (H + 2K) D); past: (B, P, 2 K D), of which a sequence has its own number.
pub(super) fn attention(
    level: Level,
    y: &mut [f32],
    qkv: &[f32],
    past: &[f32],
    size: &Attention<'_>,
) {
    let (d, positions) = (size.head_size, size.rows.positions);
    let of_sequence = past.len() / size.rows.sequences;
    y.par_chunks_mut(d).enumerate().for_each(|(task, y)| {
        let (row, head) = (task / size.heads, task % size.heads);
        let (sequence, at) = (row / positions, row % positions);
        let (before, shared) = (size.past[sequence], head * size.kv_heads / size.heads);
        // A position's keys and values: remembered, or beside its queries.
        let kv_width = |key: usize| -> &[f32] {
            match key.checked_sub(before) {
                None => &past[sequence * of_sequence + key * size.kv_width()..],
                Some(new) => {
                    let row = sequence * positions + new;
                    &qkv[row * size.packed() + size.heads * d..]
                }
            }
        };
        let query = before + at;
        let q = &qkv[row * size.packed() + head * d..][..d];
        let (k, v) = (shared * d, (size.kv_heads + shared) * d);
        let first = size.window.map_or(0, |window| (query + 1).saturating_sub(window));
        let scale = 1.0 / (d as f32).sqrt();
        level.run(
            #[inline(always)]
            || {
                let (mut most, mut total) = (f32::NEG_INFINITY, 0.0_f32);
                y.fill(0.0);
                for tile in (first..=query).step_by(TILE) {
                    let keys = tile..(tile + TILE).min(query + 1);
                    let mut p = [0.0; TILE];
                    let p = &mut p[..keys.len()];
                    for (p, key) in p.iter_mut().zip(keys.clone()) {
                        *p = scale * dot(q, &kv_width(key)[k..k + d]);
                    }
                    let new = most.max(largest(p));
                    let shrink = exp(most - new);
                    p.iter_mut().for_each(|p| *p = exp(*p - new));
                    (most, total) = (new, total * shrink + sum(p));
                    y.iter_mut().for_each(|y| *y *= shrink);
                    for (&p, key) in p.iter().zip(keys) {
                        let v = &kv_width(key)[v..v + d];
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
    use super::super::attention;
    use super::super::oracle::noise;
    use super::*;
    use crate::kernels::Rows;

    /// What comes behind a past sees what it would have seen all at once.
    #[test]
    fn it_is_attention_to_all_at_once() {
        let (lengths, most, d) = ([7_usize, 90, 71], 90, 5);
        for (heads, kv_heads, window) in [(2, 2, None), (4, 2, Some(66)), (3, 1, Some(1))] {
            let rows = Rows { sequences: 3, positions: most };
            let all = Attention {
                rows,
                heads,
                kv_heads,
                head_size: d,
                causal: true,
                window,
                lengths: &lengths,
                documents: &[],
                past: &[],
                dropout: None,
            };
            let qkv = noise(rows.count() * all.packed(), 1).narrow;
            let (mut y, mut lse) =
                (vec![0.0; rows.count() * heads * d], vec![0.0; rows.count() * heads]);
            let mut kv = vec![0.0; rows.count() * all.kv_width()];
            for new in [1, 3] {
                let past = lengths.map(|length| length - new);
                let rows = Rows { sequences: 3, positions: new };
                let few = Attention { rows, past: &past, ..all };
                let of = |sequence: usize| (sequence * most + past[sequence]) * all.packed();
                let last = (0..3).flat_map(|s| &qkv[of(s)..][..new * all.packed()]).copied();
                let last: Vec<f32> = last.collect();
                for level in Level::all() {
                    attention::forward(level, &mut y, &mut lse, &qkv, None, &all);
                    remember(&mut kv, &qkv, &all);
                    let mut found = vec![f32::NAN; rows.count() * heads * d];
                    attention(level, &mut found, &last, &kv, &few);
                    for s in 0..3 {
                        let expected = &y[(s * most + past[s]) * heads * d..][..new * heads * d];
                        let found = &found[s * new * heads * d..][..new * heads * d];
                        let off = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
                        assert!(off.fold(0.0, f32::max) < 1e-5, "{heads} {new} {s}");
                    }
                }
            }
        }
    }
}
