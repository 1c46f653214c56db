//! Scaled dot-product attention in tiles (Dao et al. 2022): no tokens × tokens matrix.
//!
//! A task owns a tile of 64 queries of one head (forward, dq) or of 64 keys (dk, dv) and walks the
//! other side in order, so every sum has one owner and one order. dq has a pass of its own.

use std::ops::Range;

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

    /// Where this head's columns of a position begin in a (R, H D) tensor.
    fn at(&self, position: usize) -> usize {
        let row = self.sequence * self.size.rows.positions + position;
        row * self.channels() + self.head * self.size.head_size
    }

    /// Where this head's queries (0), keys (1) or values (2) of a position begin.
    fn at_part(&self, position: usize, which: usize) -> usize {
        let Attention { heads, kv_heads, head_size, .. } = *self.size;
        let row = self.sequence * self.size.rows.positions + position;
        let shared = self.head * kv_heads / heads;
        let head = [self.head, heads + shared, heads + kv_heads + shared][which];
        row * self.size.packed() + head * head_size
    }

    /// Queries (0), keys (1) or values (2) of some positions.
    fn part<'q>(&self, qkv: &'q [f32], which: usize, span: Span) -> Matrix<'q> {
        Matrix::rows(&qkv[self.at_part(span.from, which)..], self.size.packed())
    }

    /// This head's columns of a (R, C) tensor.
    fn columns<'q>(&self, x: &'q [f32], span: Span) -> Matrix<'q> {
        Matrix::rows(&x[self.at(span.from)..], self.channels())
    }

    /// Index in a (B, H, T) tensor.
    fn statistic(&self, position: usize) -> usize {
        let Attention { rows, heads, .. } = self.size;
        (self.sequence * heads + self.head) * rows.positions + position
    }

    fn length(&self) -> usize {
        self.size.lengths[self.sequence].clamp(1, self.size.rows.positions)
    }

    /// The document of a position: the first of its positions, and the one behind its last.
    fn document(&self, position: usize) -> (usize, usize) {
        let row = self.sequence * self.size.rows.positions + position;
        let document = self.size.documents.get(row);
        document.map_or((0, self.length()), |one| (one.from as usize, one.to as usize))
    }

    /// Keys that the last query of a span may see.
    fn keys_end(&self, queries: Span) -> usize {
        let (_, end) = self.document(queries.to - 1);
        if self.size.causal { end.min(queries.to) } else { end }
    }

    /// The first key that the query sees.
    fn first_key(&self, query: usize) -> usize {
        let (first, _) = self.document(query);
        self.size.window.map_or(first, |window| first.max((query + 1).saturating_sub(window)))
    }

    /// Tiles of keys that some query of a span sees, up to `end`.
    fn key_tiles(&self, queries: Span, end: usize) -> Range<usize> {
        self.first_key(queries.from) / TILE..end.div_ceil(TILE)
    }

    /// Tiles of queries that may see some key of a span.
    fn query_tiles(&self, keys: Span) -> Range<usize> {
        let (begin, _) = self.document(keys.from);
        let (_, end) = self.document(keys.to - 1);
        let first = if self.size.causal { keys.from } else { begin };
        // Padding stands behind the last document, as a part of it.
        let positions = self.size.rows.positions;
        let end = if end >= self.length() { positions } else { end };
        let end =
            self.size.window.map_or(end, |window| end.min((keys.to - 1).saturating_add(window)));
        first / TILE..end.div_ceil(TILE)
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
            let (_, end) = self.document(queries.from + index);
            let last = if self.size.causal { end.min(queries.from + index + 1) } else { end };
            let seen = last.min(keys.to).saturating_sub(keys.from);
            row[..seen].iter_mut().for_each(|s| *s *= scale);
            row[seen..].fill(f32::NEG_INFINITY);
            let unseen = self.first_key(queries.from + index).saturating_sub(keys.from);
            row[..unseen.min(keys.len())].fill(f32::NEG_INFINITY);
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

/// Runs `of` for every `heads`-th of every sequence and every tile of positions.
fn each_tile(size: &Attention<'_>, heads: usize, of: impl Fn(Head<'_>, Span) + Sync) {
    let positions = size.rows.positions;
    let tiles = positions.div_ceil(TILE);
    let of_sequence = size.heads / heads;
    let tasks = size.rows.sequences * of_sequence * tiles;
    (0..tasks).into_par_iter().with_max_len(1).for_each(|task| {
        let (head, tile) = (task / tiles, task % tiles);
        let (sequence, head) = (head / of_sequence, head % of_sequence * heads);
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
    each_tile(size, 1, |head, queries| {
        let mut p = [0.0_f32; TILE * TILE];
        let mut mixed = [0.0_f32; TILE * HEAD_LIMIT];
        let (mut most, mut total) = ([f32::NEG_INFINITY; TILE], [0.0_f32; TILE]);
        let end = head.keys_end(queries);
        for tile in head.key_tiles(queries, end) {
            let keys = Span::tile(tile, end);
            head.scores(&mut p, qkv, queries, keys);
            level.run(
                #[inline(always)]
                || {
                    for (index, p) in p.chunks_exact_mut(TILE).take(queries.len()).enumerate() {
                        let p = &mut p[..keys.len()];
                        // A query may see nothing of the first tiles of its window's.
                        let new = most[index].max(largest(p)).max(f32::MIN);
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
            let (y, lse) =
                unsafe { (y.piece(head.at(position), d), lse.piece(head.statistic(position), 1)) };
            if total[index] == 0.0 {
                // Padding whose window has no token.
                y.fill(0.0);
                lse[0] = f32::INFINITY;
                continue;
            }
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
                    let at = head.at(position);
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
            let at = head.at_part(position, which);
            // SAFETY: one task alone has this part of these positions of this head.
            unsafe { dqkv.piece(at, d) }.copy_from_slice(values);
        }
    };
    // Keys and values gather from all heads of queries that they serve, in order.
    let group = size.heads / size.kv_heads;
    each_tile(size, group, |first, keys| {
        let head = first;
        let seen = Span { to: keys.to.min(head.length()), ..keys };
        let mut pair = Pair { p: [0.0; TILE * TILE], ds: [0.0; TILE * TILE] };
        let (mut dk, mut dv) = ([0.0; TILE * HEAD_LIMIT], [0.0; TILE * HEAD_LIMIT]);
        let heads = (first.head..first.head + group).map(|head| Head { head, ..first });
        for head in heads.filter(|_| seen.from < seen.to) {
            for tile in head.query_tiles(seen) {
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
    each_tile(size, 1, |head, queries| {
        let mut pair = Pair { p: [0.0; TILE * TILE], ds: [0.0; TILE * TILE] };
        let mut dq = [0.0; TILE * HEAD_LIMIT];
        let end = head.keys_end(queries);
        for tile in head.key_tiles(queries, end) {
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
    use crate::models::{Document, Dropout, Rows};

    /// The masks are the kernel's own; what is done with them is not.
    fn plain(qkv: &[f64], size: &Attention<'_>) -> Vec<f64> {
        let (t, h, d) = (size.rows.positions, size.heads, size.head_size);
        let (c, k) = (h * d, size.kv_heads);
        let mut y = vec![0.0; size.rows.count() * c];
        for (sequence, head) in (0..size.rows.sequences * h).map(|i| (i / h, i % h)) {
            let at = |position: usize, which: usize| {
                let column = [head, h + head / (h / k), h + k + head / (h / k)][which];
                let from = (sequence * t + position) * (h + 2 * k) * d + column * d;
                &qkv[from..from + d]
            };
            for query in 0..t {
                let (from, end) = match size.documents.get(sequence * t + query) {
                    Some(document) => (document.from as usize, document.to as usize),
                    None => (0, size.lengths[sequence]),
                };
                let end = end.min(if size.causal { query + 1 } else { t });
                let score = |key| {
                    let products = at(query, 0).iter().zip(at(key, 1)).map(|(q, k)| q * k);
                    products.sum::<f64>() / (d as f64).sqrt()
                };
                let first = size.window.map_or(0, |window| (query + 1).saturating_sub(window));
                let first = first.max(from);
                let scores: Vec<(usize, f64)> = (first..end).map(|key| (key, score(key))).collect();
                let total: f64 = scores.iter().map(|(_, score)| score.exp()).sum();
                for (key, score) in scores {
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
        check_more(sequences, t, [h, h, d], causal, None, p);
    }

    /// Sequences cut into documents of these lengths, again and again.
    fn cut(lengths: &[usize], t: usize, every: &[usize]) -> Vec<Document> {
        let mut all = Vec::new();
        for &length in lengths {
            let (mut at, mut turn) = (0, every.iter().cycle());
            while at < length {
                let to = length.min(at + turn.next().expect("it goes round"));
                // Padding is a part of the last.
                let rows = if to == length { t - at } else { to - at };
                all.extend(vec![Document { from: at as u32, to: to as u32 }; rows]);
                at = to;
            }
        }
        all
    }

    fn check_more(
        sequences: usize,
        t: usize,
        [h, kv_heads, d]: [usize; 3],
        causal: bool,
        window: Option<usize>,
        p: f32,
    ) {
        check_documents(sequences, t, [h, kv_heads, d], causal, window, p, &[]);
    }

    fn check_documents(
        sequences: usize,
        t: usize,
        [h, kv_heads, d]: [usize; 3],
        causal: bool,
        window: Option<usize>,
        p: f32,
        every: &[usize],
    ) {
        let lengths: Vec<usize> = (0..sequences).map(|b| t - (b * 3) % t).collect();
        let documents = if every.is_empty() { Vec::new() } else { cut(&lengths, t, every) };
        let dropout = Dropout { probability: p, seed: 1, step: 2, site: 3, first_sequence: 4 };
        let size = Attention {
            rows: Rows { sequences, positions: t },
            heads: h,
            kv_heads,
            head_size: d,
            causal,
            window,
            lengths: &lengths,
            documents: &documents,
            past: &[],
            dropout: (p > 0.0).then_some(dropout),
        };
        let (r, c) = (sequences * t, h * d);
        let (qkv, dy) = (noise(r * size.packed(), 1), noise(r * c, 2));
        for level in Level::all() {
            let (mut y, mut lse) = (vec![f32::NAN; r * c], vec![f32::NAN; r * h]);
            forward(level, &mut y, &mut lse, &qkv.narrow, &size);
            close(&y, &plain(&qkv.wide, &size), 1e-5);
            let mut sums = vec![f32::NAN; r * h];
            delta(level, &mut sums, &y, &dy.narrow, &size);
            let mut dqkv = vec![f32::NAN; r * size.packed()];
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
    fn shared_keys_and_windows_are_the_plain_ones() {
        for (t, heads) in [(5, [4, 2, 3]), (5, [3, 1, 2]), (70, [2, 1, 2])] {
            check_more(2, t, heads, true, None, 0.2);
            for window in [1, 2, 3, 65, 100] {
                check_more(2, t, heads, true, Some(window), 0.0);
            }
        }
        check_more(1, 200, [2, 1, 5], true, Some(40), 0.0);
        check_more(2, 5, [4, 2, 3], false, None, 0.0);
    }

    #[test]
    fn documents_see_themselves_alone() {
        for causal in [true, false] {
            check_documents(2, 6, [2, 1, 3], causal, None, 0.0, &[2, 1]);
            check_documents(2, 7, [1, 1, 4], causal, None, 0.2, &[3]);
            check_documents(2, 200, [1, 1, 3], causal, None, 0.0, &[70, 3, 64, 1]);
        }
        check_documents(2, 8, [2, 2, 2], true, Some(2), 0.0, &[3, 5]);
        check_documents(1, 150, [1, 1, 3], true, Some(20), 0.0, &[70, 30]);
    }

    #[test]
    fn heads_of_every_size_work() {
        for d in [8, 63, 64, 65, 127, 128, 256] {
            check(2, 70, 1, d, true, 0.0);
        }
    }
}
