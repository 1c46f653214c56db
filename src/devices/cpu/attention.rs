//! Scaled dot-product attention in tiles (Dao et al. 2022): no tokens × tokens matrix.
//!
//! A task owns a tile of 64 queries of one head (forward, dq) or of 64 keys (dk, dv) and walks the
//! other side in order, so every sum has one owner and one order. dq has a pass of its own.

use rayon::prelude::*;

use super::dropout::Row;
use super::linear::{Matrix, small};
use super::math::{dot, exp, largest, sum};
use super::scattered::Scattered;
use crate::models::Attention;
use crate::simd::Level;

const TILE: usize = 64;

/// The largest head.
pub(super) const HEAD_LIMIT: usize = 256;

/// One head of one sequence.
#[derive(Clone, Copy)]
struct Head<'a> {
    size: &'a Attention<'a>,
    sequence: usize,
    head: usize,
}

/// Positions `from..to`.
#[derive(Clone, Copy)]
struct Span {
    from: usize,
    to: usize,
}

impl Span {
    fn tile(index: usize, end: usize) -> Span {
        Span { from: index * TILE, to: end.min((index + 1) * TILE) }
    }

    fn len(self) -> usize {
        self.to - self.from
    }
}

impl Head<'_> {
    fn channels(&self) -> usize {
        self.size.heads * self.size.head_size
    }

    /// Where this head's columns of a position begin in a tensor with rows of `width`.
    fn at(&self, position: usize, width: usize) -> usize {
        let row = self.sequence * self.size.rows.positions + position;
        row * width + self.head * self.size.head_size
    }

    /// Queries (0), keys (1) or values (2) of some positions.
    fn part<'q>(&self, qkv: &'q [f32], which: usize, span: Span) -> Matrix<'q> {
        let (c, width) = (self.channels(), 3 * self.channels());
        Matrix::rows(&qkv[self.at(span.from, width) + which * c..], width)
    }

    /// This head's columns of a (R, C) tensor.
    fn columns<'q>(&self, x: &'q [f32], span: Span) -> Matrix<'q> {
        Matrix::rows(&x[self.at(span.from, self.channels())..], self.channels())
    }

    /// Index in a (B, H, T) tensor.
    fn statistic(&self, position: usize) -> usize {
        let Attention { rows, heads, .. } = self.size;
        (self.sequence * heads + self.head) * rows.positions + position
    }

    fn length(&self) -> usize {
        self.size.lengths[self.sequence].clamp(1, self.size.rows.positions)
    }

    /// Keys that the last query of a span may see.
    fn keys_end(&self, queries: Span) -> usize {
        if self.size.causal { self.length().min(queries.to) } else { self.length() }
    }

    fn scale(&self) -> f32 {
        1.0 / (self.size.head_size as f32).sqrt()
    }

    /// Scaled scores of queries and keys; −∞ where a query may not see a key.
    fn scores(&self, s: &mut [f32], qkv: &[f32], queries: Span, keys: Span) {
        let (q, k) = (self.part(qkv, 0, queries), self.part(qkv, 1, keys));
        small(s, TILE, q, k.transposed(), (queries.len(), self.size.head_size, keys.len()), false);
        let scale = self.scale();
        for (index, row) in s.chunks_mut(TILE).take(queries.len()).enumerate() {
            let last = if self.size.causal { queries.from + index + 1 } else { keys.to };
            let seen = last.min(keys.to).saturating_sub(keys.from);
            row[..seen].iter_mut().for_each(|s| *s *= scale);
            row[seen..].fill(f32::NEG_INFINITY);
        }
    }

    /// Multiplies probabilities (or their gradients) by the dropout mask.
    fn drop_out(&self, p: &mut [f32], queries: Span, keys: Span) {
        let Some(dropout) = &self.size.dropout else { return };
        for (index, row) in p.chunks_mut(TILE).take(queries.len()).enumerate() {
            let query = (self.head as u32) << 20 | (queries.from + index) as u32;
            let mask = Row::new(dropout, self.sequence, query);
            for column in (0..keys.len()).step_by(4) {
                let factors = mask.factors(keys.from + column);
                row[column..].iter_mut().zip(factors).for_each(|(p, factor)| *p *= factor);
            }
        }
    }
}

/// Runs `of` for every head and every tile of `end` positions.
fn each_tile(size: &Attention<'_>, of: impl Fn(Head<'_>, Span) + Sync) {
    let positions = size.rows.positions;
    let tiles = positions.div_ceil(TILE);
    let tasks = size.rows.sequences * size.heads * tiles;
    (0..tasks).into_par_iter().with_max_len(1).for_each(|task| {
        let (head, tile) = (task / tiles, task % tiles);
        let (sequence, head) = (head / size.heads, head % size.heads);
        of(Head { size, sequence, head }, Span::tile(tile, positions));
    });
}

/// y and log-sum-exp of the scores.
pub(super) fn forward(
    level: Level,
    y: &mut [f32],
    lse: &mut [f32],
    qkv: &[f32],
    size: &Attention<'_>,
) {
    let (y, lse, d) = (Scattered::new(y), Scattered::new(lse), size.head_size);
    each_tile(size, |head, queries| {
        let mut p = [0.0_f32; TILE * TILE];
        let mut mixed = [0.0_f32; TILE * HEAD_LIMIT];
        let (mut most, mut total) = ([f32::NEG_INFINITY; TILE], [0.0_f32; TILE]);
        let end = head.keys_end(queries);
        for tile in 0..end.div_ceil(TILE) {
            let keys = Span::tile(tile, end);
            head.scores(&mut p, qkv, queries, keys);
            level.run(
                #[inline(always)]
                || {
                    for (index, p) in p.chunks_exact_mut(TILE).take(queries.len()).enumerate() {
                        let p = &mut p[..keys.len()];
                        let new = most[index].max(largest(p));
                        let shrink = exp(most[index] - new);
                        p.iter_mut().for_each(|p| *p = exp(*p - new));
                        total[index] = total[index] * shrink + sum(p);
                        most[index] = new;
                        mixed[index * d..][..d].iter_mut().for_each(|y| *y *= shrink);
                    }
                },
            );
            head.drop_out(&mut p, queries, keys);
            let v = head.part(qkv, 2, keys);
            small(&mut mixed, d, Matrix::rows(&p, TILE), v, (queries.len(), keys.len(), d), true);
        }
        for index in 0..queries.len() {
            let position = queries.from + index;
            // SAFETY: this task alone has these queries of this head.
            let (y, lse) = unsafe {
                (
                    y.piece(head.at(position, head.channels()), d),
                    lse.piece(head.statistic(position), 1),
                )
            };
            let mixed = &mixed[index * d..][..d];
            y.iter_mut().zip(mixed).for_each(|(y, mixed)| *y = mixed / total[index]);
            lse[0] = most[index] + total[index].ln();
        }
    });
}

/// What the backward reads.
#[derive(Clone, Copy)]
pub(super) struct Inputs<'a> {
    pub(super) dy: &'a [f32],
    pub(super) lse: &'a [f32],
    pub(super) qkv: &'a [f32],
    /// Σ y dy of each query and head.
    pub(super) delta: &'a [f32],
}

/// delta of [`Inputs`]: (B, H, T).
pub(super) fn delta(level: Level, delta: &mut [f32], y: &[f32], dy: &[f32], size: &Attention<'_>) {
    let (positions, d) = (size.rows.positions, size.head_size);
    delta.par_chunks_mut(positions).enumerate().for_each(|(index, delta)| {
        let head = Head { size, sequence: index / size.heads, head: index % size.heads };
        level.run(
            #[inline(always)]
            || {
                for (position, delta) in delta.iter_mut().enumerate() {
                    let at = head.at(position, head.channels());
                    *delta = dot(&y[at..at + d], &dy[at..at + d]);
                }
            },
        );
    });
}

/// Probabilities, dropped ones, and gradients of the scores, of one pair of tiles.
struct Pair {
    p: [f32; TILE * TILE],
    ds: [f32; TILE * TILE],
}

impl Pair {
    /// `p`: as dropout left them; `ds` = scale p (dp − delta).
    fn fill(&mut self, level: Level, head: &Head<'_>, inputs: &Inputs<'_>, q: Span, k: Span) {
        let d = head.size.head_size;
        head.scores(&mut self.p, inputs.qkv, q, k);
        let (dy, v) = (head.columns(inputs.dy, q), head.part(inputs.qkv, 2, k));
        small(&mut self.ds, TILE, dy, v.transposed(), (q.len(), d, k.len()), false);
        head.drop_out(&mut self.ds, q, k);
        let scale = head.scale();
        level.run(
            #[inline(always)]
            || {
                let rows = self.p.chunks_exact_mut(TILE).zip(self.ds.chunks_exact_mut(TILE));
                for (index, (p, ds)) in rows.take(q.len()).enumerate() {
                    let at = head.statistic(q.from + index);
                    let (lse, delta) = (inputs.lse[at], inputs.delta[at]);
                    for (p, ds) in p[..k.len()].iter_mut().zip(ds) {
                        *p = exp(*p - lse);
                        *ds = scale * *p * (*ds - delta);
                    }
                }
            },
        );
        head.drop_out(&mut self.p, q, k);
    }
}

/// dqkv.
pub(super) fn backward(level: Level, dqkv: &mut [f32], inputs: &Inputs<'_>, size: &Attention<'_>) {
    let (dqkv, d, positions) = (Scattered::new(dqkv), size.head_size, size.rows.positions);
    let write = |head: &Head<'_>, which: usize, span: Span, values: &[f32]| {
        for (position, values) in (span.from..span.to).zip(values.chunks_exact(d)) {
            let at = head.at(position, 3 * head.channels()) + which * head.channels();
            // SAFETY: one task alone has this part of these positions of this head.
            unsafe { dqkv.piece(at, d) }.copy_from_slice(values);
        }
    };
    each_tile(size, |head, keys| {
        let seen = Span { to: keys.to.min(head.length()), ..keys };
        let mut pair = Pair { p: [0.0; TILE * TILE], ds: [0.0; TILE * TILE] };
        let (mut dk, mut dv) = ([0.0; TILE * HEAD_LIMIT], [0.0; TILE * HEAD_LIMIT]);
        let first = if size.causal { keys.from / TILE } else { 0 };
        if seen.from < seen.to {
            for tile in first..positions.div_ceil(TILE) {
                let queries = Span::tile(tile, positions);
                pair.fill(level, &head, inputs, queries, seen);
                let turned = |x| Matrix::rows(x, TILE).transposed();
                let (dy, q) = (head.columns(inputs.dy, queries), head.part(inputs.qkv, 0, queries));
                let sizes = (seen.len(), queries.len(), d);
                small(&mut dv, d, turned(&pair.p), dy, sizes, true);
                small(&mut dk, d, turned(&pair.ds), q, sizes, true);
            }
        }
        write(&head, 1, keys, &dk);
        write(&head, 2, keys, &dv);
    });
    each_tile(size, |head, queries| {
        let mut pair = Pair { p: [0.0; TILE * TILE], ds: [0.0; TILE * TILE] };
        let mut dq = [0.0; TILE * HEAD_LIMIT];
        let end = head.keys_end(queries);
        for tile in 0..end.div_ceil(TILE) {
            let keys = Span::tile(tile, end);
            pair.fill(level, &head, inputs, queries, keys);
            let k = head.part(inputs.qkv, 1, keys);
            let ds = Matrix::rows(&pair.ds, TILE);
            small(&mut dq, d, ds, k, (queries.len(), keys.len(), d), true);
        }
        write(&head, 0, queries, &dq);
    });
}

#[cfg(test)]
mod tests {
    use super::super::oracle::{close, differences, noise};
    use super::*;
    use crate::models::{Dropout, Rows};

    /// The masks are the kernel's own; what is done with them is not.
    fn plain(qkv: &[f64], size: &Attention<'_>) -> Vec<f64> {
        let (t, h, d) = (size.rows.positions, size.heads, size.head_size);
        let c = h * d;
        let mut y = vec![0.0; size.rows.count() * c];
        for (sequence, head) in (0..size.rows.sequences * h).map(|i| (i / h, i % h)) {
            let at = |position: usize, which: usize| {
                let from = (sequence * t + position) * 3 * c + which * c + head * d;
                &qkv[from..from + d]
            };
            for query in 0..t {
                let end = size.lengths[sequence].min(if size.causal { query + 1 } else { t });
                let score = |key| {
                    let products = at(query, 0).iter().zip(at(key, 1)).map(|(q, k)| q * k);
                    products.sum::<f64>() / (d as f64).sqrt()
                };
                let scores: Vec<f64> = (0..end).map(score).collect();
                let total: f64 = scores.iter().map(|score| score.exp()).sum();
                for (key, score) in scores.iter().enumerate() {
                    let factor = size.dropout.map_or(1.0, |dropout| {
                        let row = (head as u32) << 20 | query as u32;
                        let factors = Row::new(&dropout, sequence, row).factors(key / 4 * 4);
                        f64::from(factors[key % 4])
                    });
                    for (i, v) in at(key, 2).iter().enumerate() {
                        let to = (sequence * t + query) * c + head * d + i;
                        y[to] += factor * score.exp() / total * v;
                    }
                }
            }
        }
        y
    }

    fn check(sequences: usize, t: usize, h: usize, d: usize, causal: bool, p: f32) {
        let lengths: Vec<usize> = (0..sequences).map(|b| t - (b * 3) % t).collect();
        let dropout = Dropout { probability: p, seed: 1, step: 2, site: 3, first_sequence: 4 };
        let size = Attention {
            rows: Rows { sequences, positions: t },
            heads: h,
            head_size: d,
            causal,
            lengths: &lengths,
            dropout: (p > 0.0).then_some(dropout),
        };
        let (r, c) = (sequences * t, h * d);
        let (qkv, dy) = (noise(r * 3 * c, 1), noise(r * c, 2));
        for level in Level::all() {
            let (mut y, mut lse) = (vec![f32::NAN; r * c], vec![f32::NAN; r * h]);
            forward(level, &mut y, &mut lse, &qkv.narrow, &size);
            close(&y, &plain(&qkv.wide, &size), 1e-5);
            let mut sums = vec![f32::NAN; r * h];
            delta(level, &mut sums, &y, &dy.narrow, &size);
            let mut dqkv = vec![f32::NAN; r * 3 * c];
            let inputs = Inputs { dy: &dy.narrow, lse: &lse, qkv: &qkv.narrow, delta: &sums };
            backward(level, &mut dqkv, &inputs, &size);
            if r * c < 400 {
                let loss = |qkv: &[f64]| {
                    plain(qkv, &size).iter().zip(&dy.wide).map(|(y, dy)| y * dy).sum::<f64>()
                };
                close(&dqkv, &differences(&qkv.wide, loss), 1e-4);
            }
            assert!(dqkv.iter().all(|value| value.is_finite()));
        }
    }

    #[test]
    fn forward_and_backward_are_the_plain_ones() {
        for causal in [true, false] {
            for p in [0.0, 0.2] {
                check(1, 1, 1, 8, causal, p);
                check(3, 5, 2, 3, causal, p);
                check(1, 67, 1, 5, causal, p);
                check(2, 130, 2, 13, causal, p);
            }
        }
    }

    #[test]
    fn heads_of_every_size_work() {
        for d in [8, 63, 64, 65, 127, 128, 256] {
            check(2, 70, 1, d, true, 0.0);
        }
    }
}
