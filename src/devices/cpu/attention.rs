//! Scaled dot-product attention in tiles (Dao et al. 2022), without a tokens × tokens matrix.
//!
//! A task of the forward owns a tile of 64 queries of one head and walks the keys in order. A task
//! of the backward owns a head of keys with all heads of queries that it serves: it walks the tiles
//! of keys, and for each the tiles of queries. So every sum has one owner and one order.

use std::ops::Range;

use rayon::prelude::*;

use super::dropout::Row;
use super::math::{dot, exp, largest, limit, limit_slope, sum};
use super::views::{Call, Compute, ComputeIn};
use crate::kernels::{Attention, AttentionBackward, AttentionShape, HEAD_LIMIT};
use crate::product::Scattered;
use crate::product::{Matrix, Product, Start};
use crate::simd::Level;

const TILE: usize = 64;

/// Most heads have at most so many channels.
const USUAL: usize = 256;

/// Zeros for a tile of heads with these channels, on the stack. Those of wide heads take time to
/// clear only where heads are wide.
macro_rules! zeros {
    ($channels:expr) => {
        if $channels <= USUAL {
            &mut [0.0_f32; TILE * USUAL][..]
        } else {
            &mut [0.0_f32; TILE * HEAD_LIMIT][..]
        }
    };
}

/// c (+)= a b on this thread. c: (m, n), rows of `width`; a: (m, k); b: (k, n).
fn small(
    level: Level,
    c: &mut [f32],
    width: usize,
    [a, b]: [Matrix<'_>; 2],
    [rows, depth, columns]: [usize; 3],
    accumulate: bool,
) {
    let start = Start::accumulate(accumulate);
    Product { a, b, rows, depth, columns, start }.on_this_thread(level, c, width);
}

/// One head of one sequence. Positions count from the begin of the sequence: the queries stand
/// behind the `before` positions that a chunk has before it.
#[derive(Clone, Copy)]
struct Head<'a> {
    size: &'a AttentionShape<'a>,
    before: usize,
    /// The first position of keys and values that are in a tensor of their own. `None`: they are
    /// beside their queries.
    first_kept: Option<usize>,
    sequence: usize,
    /// The row of the first query.
    first_row: usize,
    /// The position behind the last.
    end: usize,
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

    fn tiles(from: usize, end: usize) -> Range<usize> {
        from / TILE..end.div_ceil(TILE)
    }

    fn len(self) -> usize {
        self.to - self.from
    }
}

impl<'a> Head<'a> {
    fn new(
        size: &'a AttentionShape<'a>,
        first_kept: Option<usize>,
        sequence: usize,
        head: usize,
    ) -> Head<'a> {
        let before = positions_before(size);
        let rows = size.batch.sequence(sequence);
        let first_row = rows.start;
        let end = before + rows.len();
        Head { size, before, first_kept, sequence, first_row, end, head }
    }

    fn channels(&self) -> usize {
        self.size.width()
    }

    /// Positions of the queries.
    fn positions(&self) -> Range<usize> {
        self.before..self.end
    }

    /// The row of a query.
    fn row(&self, position: usize) -> usize {
        self.first_row + position - self.before
    }

    /// The begin of this head's columns of a query in a (R, H D) tensor.
    fn at(&self, position: usize) -> usize {
        self.row(position) * self.channels() + self.head * self.size.head_size
    }

    /// The begin of this head's query of a position.
    fn at_query(&self, position: usize) -> usize {
        self.row(position) * self.size.qkv_width() + self.head * self.size.head_size
    }

    /// The distance, in floats, from one position's keys to the next position's.
    fn stride(&self) -> usize {
        match self.first_kept {
            Some(_) => self.size.kv_width(),
            None => self.size.qkv_width(),
        }
    }

    /// The begin of this head's key (0) or value (1) of a position.
    fn at_key(&self, position: usize, which: usize) -> usize {
        let AttentionShape { heads, kv_heads, head_size, .. } = *self.size;
        let queries = if self.first_kept.is_some() { 0 } else { heads };
        let head = queries + which * kv_heads + self.head * kv_heads / heads;
        let row = self.first_row + position - self.first_kept.unwrap_or(0);
        row * self.stride() + head * head_size
    }

    /// Queries of some positions.
    fn queries<'q>(&self, qkv: &'q [f32], span: Span) -> Matrix<'q> {
        Matrix::rows(&qkv[self.at_query(span.from)..], self.size.qkv_width())
    }

    /// Keys (0) or values (1) of some positions.
    fn keys<'q>(&self, kv: &'q [f32], which: usize, span: Span) -> Matrix<'q> {
        Matrix::rows(&kv[self.at_key(span.from, which)..], self.stride())
    }

    /// This head's columns of a (R, C) tensor.
    fn columns<'q>(&self, x: &'q [f32], span: Span) -> Matrix<'q> {
        Matrix::rows(&x[self.at(span.from)..], self.channels())
    }

    /// The index of a query in a (R, H) tensor that is laid out sequence by sequence, head by head.
    fn statistic(&self, position: usize) -> usize {
        let queries = self.positions();
        let before = self.first_row * self.size.heads + self.head * queries.len();
        before + position - queries.start
    }

    /// The document of a position: its first position, and the position behind its last.
    fn document(&self, position: usize) -> (usize, usize) {
        let document = self.size.batch.document(self.sequence, position);
        document.map_or((0, self.end), |one| (one.from as usize, one.to as usize))
    }

    /// The key behind the last one that the query sees.
    fn keys_end(&self, query: usize) -> usize {
        let (_, end) = self.document(query);
        let ahead = if self.size.causal { Some(1) } else { self.size.window };
        ahead.map_or(end, |ahead| end.min(query.saturating_add(ahead)))
    }

    /// The first key that the query sees.
    fn first_key(&self, query: usize) -> usize {
        let (first, _) = self.document(query);
        self.size.window.map_or(first, |window| first.max((query + 1).saturating_sub(window)))
    }

    /// Tiles of keys that some query of a span sees, up to `end`.
    fn key_tiles(&self, queries: Span, end: usize) -> Range<usize> {
        Span::tiles(self.first_key(queries.from), end)
    }

    /// Tiles of queries that may see some key of a span.
    fn query_tiles(&self, keys: Span) -> Range<usize> {
        let (begin, _) = self.document(keys.from);
        let (_, end) = self.document(keys.to - 1);
        let window = self.size.window.unwrap_or(usize::MAX);
        let ahead = if self.size.causal { 1 } else { window };
        let first = begin.max((keys.from + 1).saturating_sub(ahead));
        let end = end.min((keys.to - 1).saturating_add(window));
        Span::tiles(first.max(self.before), end.min(self.end))
    }

    /// Scores of queries and keys; −∞ where a query may not see a key.
    fn scores(
        &self,
        level: Level,
        s: &mut [f32],
        [qkv, kv]: [&[f32]; 2],
        queries: Span,
        keys: Span,
    ) {
        let q = self.queries(qkv, queries);
        let k = self.keys(kv, 0, keys);
        let sizes = [queries.len(), self.size.head_size, keys.len()];
        small(level, s, TILE, [q, k.transposed()], sizes, false);
        let scale = self.size.score_scale();
        let cap = self.size.cap;
        for (index, row) in s.chunks_mut(TILE).take(queries.len()).enumerate() {
            let end = self.keys_end(queries.from + index);
            let seen = end.min(keys.to).saturating_sub(keys.from);
            level.run(
                #[inline(always)]
                || {
                    row[..seen].iter_mut().for_each(|s| *s *= scale);
                    limit(&mut row[..seen], cap);
                },
            );
            row[seen..].fill(f32::NEG_INFINITY);
            let unseen = self.first_key(queries.from + index).saturating_sub(keys.from);
            row[..unseen.min(keys.len())].fill(f32::NEG_INFINITY);
        }
    }

    /// Multiplies probabilities (or their gradients) by the dropout mask.
    fn drop_out(&self, level: Level, p: &mut [f32], queries: Span, keys: Span) {
        let Some(dropout) = &self.size.dropout else { return };
        level.run(
            #[inline(always)]
            || {
                for (index, row) in p.chunks_mut(TILE).take(queries.len()).enumerate() {
                    let query = (queries.from - self.before + index) as u32;
                    let mask = Row::new(dropout, self.sequence, (self.head as u32) << 20 | query);
                    mask.apply(&mut row[..keys.len()], keys.from);
                }
            },
        );
    }
}

/// The number of positions before the queries: equal for all sequences, and a multiple of the tile.
fn positions_before(size: &AttentionShape<'_>) -> usize {
    let before = size.batch.same_positions_before();
    assert!(before.is_multiple_of(TILE), "{before} positions before a chunk are no whole tiles");
    before
}

/// Calls `of` in parallel for the first head of each group of `group` heads of each sequence.
fn each_head(
    size: &AttentionShape<'_>,
    first_kept: Option<usize>,
    group: usize,
    of: impl Fn(Head<'_>) + Sync,
) {
    let of_sequence = size.heads / group;
    let tasks = size.batch.sequences() * of_sequence;
    (0..tasks).into_par_iter().with_max_len(1).for_each(|task| {
        let sequence = task / of_sequence;
        let head = task % of_sequence * group;
        of(Head::new(size, first_kept, sequence, head));
    });
}

/// Calls `of` in parallel for each head of each sequence and each tile of its queries.
fn each_tile(
    size: &AttentionShape<'_>,
    first_kept: Option<usize>,
    of: impl Fn(Head<'_>, Span) + Sync,
) {
    let heads = (0..size.batch.sequences() * size.heads).into_par_iter().with_max_len(1);
    heads.for_each(|task| {
        let head = Head::new(size, first_kept, task / size.heads, task % size.heads);
        let tiles = Span::tiles(head.before, head.end).into_par_iter().with_max_len(1);
        tiles.for_each(|tile| of(head, Span::tile(tile, head.end)));
    });
}

impl Compute for Attention<'_> {
    fn compute(&self, level: Level, call: &Call<'_>) {
        let shape = &self.shape;
        let y = Scattered::new(call.write(self.y));
        let lse = Scattered::new(call.write(self.lse));
        let qkv = call.read(self.qkv);
        let kv = call.read(self.kv.unwrap_or(self.qkv));
        let d = shape.head_size;
        let first_kept = self.kv.map(|kv| shape.first_kept(kv));
        each_tile(shape, first_kept, |head, queries| {
            let mut p = [0.0_f32; TILE * TILE];
            let output = zeros!(d);
            let mut most = [f32::NEG_INFINITY; TILE];
            let mut total = [0.0_f32; TILE];
            let end = head.keys_end(queries.to - 1);
            for tile in head.key_tiles(queries, end) {
                let keys = Span::tile(tile, end);
                head.scores(level, &mut p, [qkv, kv], queries, keys);
                level.run(
                    #[inline(always)]
                    || {
                        for (index, p) in p.chunks_exact_mut(TILE).take(queries.len()).enumerate() {
                            let p = &mut p[..keys.len()];
                            // With a window, a query may see no key of the first tiles.
                            let new = most[index].max(largest(p)).max(f32::MIN);
                            let shrink = exp(most[index] - new);
                            p.iter_mut().for_each(|p| *p = exp(*p - new));
                            total[index] = total[index] * shrink + sum(p);
                            most[index] = new;
                            output[index * d..][..d].iter_mut().for_each(|y| *y *= shrink);
                        }
                    },
                );
                head.drop_out(level, &mut p, queries, keys);
                let v = head.keys(kv, 1, keys);
                let p = Matrix::rows(&p, TILE);
                let sizes = [queries.len(), keys.len(), d];
                small(level, output, d, [p, v], sizes, true);
            }
            for index in 0..queries.len() {
                let position = queries.from + index;
                // SAFETY: this task alone has these queries of this head.
                let (y, lse) = unsafe {
                    (y.piece(head.at(position), d), lse.piece(head.statistic(position), 1))
                };
                let output = &output[index * d..][..d];
                y.iter_mut().zip(output).for_each(|(y, output)| *y = output / total[index]);
                lse[0] = most[index] + total[index].ln();
            }
        });
    }
}

impl ComputeIn for AttentionBackward<'_> {
    fn workspace(&self) -> usize {
        self.shape.rows() * self.shape.heads
    }

    fn compute(&self, level: Level, call: &Call<'_>, workspace: &mut [f32]) {
        let AttentionBackward { chunk_kv, ref shape, .. } = *self;
        let dy = call.read(self.dy);
        delta(level, workspace, call.read(self.y), dy, shape);
        let inputs = Inputs {
            dy,
            lse: call.read(self.lse),
            qkv: call.read(self.qkv),
            kv: call.read(chunk_kv.map_or(self.qkv, |chunk| chunk.kv)),
            delta: workspace,
        };
        let dqkv = Scattered::new(call.write(self.dqkv));
        let d = shape.head_size;
        let first_kept = chunk_kv.map(|chunk| shape.first_kept(chunk.kv));
        let accumulate = chunk_kv.is_some_and(|chunk| chunk.accumulate);
        let dkv = chunk_kv.map_or(dqkv, |chunk| Scattered::new(call.write(chunk.dkv)));
        let write = |head: &Head<'_>, which: usize, span: Span, values: &[f32]| {
            for (position, values) in (span.from..span.to).zip(values.chunks_exact(d)) {
                // SAFETY: one task alone has this part of these positions of this head.
                let to = unsafe { dkv.piece(head.at_key(position, which), d) };
                if accumulate {
                    to.iter_mut().zip(values).for_each(|(to, value)| *to += value);
                } else {
                    to.copy_from_slice(values);
                }
            }
        };
        let group = shape.heads / shape.kv_heads;
        each_head(shape, first_kept, group, |first| {
            let mut pair = Pair { p: [0.0; TILE * TILE], ds: [0.0; TILE * TILE] };
            let heads = || (first.head..first.head + group).map(|head| Head { head, ..first });
            for (head, position) in
                heads().flat_map(|head| head.positions().map(move |p| (head, p)))
            {
                // SAFETY: this task alone has the queries of these heads.
                unsafe { dqkv.piece(head.at_query(position), d) }.fill(0.0);
            }
            let tiles = Span::tiles(first_kept.unwrap_or(0), first.end);
            for keys in tiles.map(|tile| Span::tile(tile, first.end)) {
                let dk = zeros!(d);
                let dv = zeros!(d);
                for head in heads() {
                    for tile in head.query_tiles(keys) {
                        let queries = Span::tile(tile, head.end);
                        pair.fill(level, &head, &inputs, queries, keys);
                        let transposed = |x| Matrix::rows(x, TILE).transposed();
                        let dy = head.columns(inputs.dy, queries);
                        let q = head.queries(inputs.qkv, queries);
                        let sizes = [keys.len(), queries.len(), d];
                        small(level, dv, d, [transposed(&pair.p), dy], sizes, true);
                        small(level, dk, d, [transposed(&pair.ds), q], sizes, true);
                        let dq = Product {
                            a: Matrix::rows(&pair.ds, TILE),
                            b: head.keys(inputs.kv, 0, keys),
                            rows: queries.len(),
                            depth: keys.len(),
                            columns: d,
                            start: Start::C,
                        };
                        let at = head.at_query(queries.from);
                        // SAFETY: rows of one head's queries, which lie in dqkv; as above.
                        unsafe { dq.on_pointer(level, dqkv.base().add(at), shape.qkv_width()) };
                    }
                }
                write(&first, 0, keys, dk);
                write(&first, 1, keys, dv);
            }
        });
    }
}

/// Inputs of the backward pass.
#[derive(Clone, Copy)]
struct Inputs<'a> {
    dy: &'a [f32],
    lse: &'a [f32],
    qkv: &'a [f32],
    /// The tensor that holds keys and values: `qkv`, or that of a chunk.
    kv: &'a [f32],
    /// Σ y dy of each query and head.
    delta: &'a [f32],
}

/// Computes `delta` of [`Inputs`].
fn delta(level: Level, delta: &mut [f32], y: &[f32], dy: &[f32], size: &AttentionShape<'_>) {
    let delta = Scattered::new(delta);
    let d = size.head_size;
    each_head(size, None, 1, |head| {
        let queries = head.positions();
        // SAFETY: this task alone has this head of this sequence.
        let delta = unsafe { delta.piece(head.statistic(queries.start), queries.len()) };
        level.run(
            #[inline(always)]
            || {
                for (position, delta) in queries.zip(delta) {
                    let at = head.at(position);
                    *delta = dot(&y[at..at + d], &dy[at..at + d]);
                }
            },
        );
    });
}

/// Probabilities and gradients of the scores of one pair of tiles.
struct Pair {
    p: [f32; TILE * TILE],
    ds: [f32; TILE * TILE],
}

impl Pair {
    /// Computes `p`, after dropout, and `ds` = scale p (dp − delta), times the slope of the limit.
    fn fill(&mut self, level: Level, head: &Head<'_>, inputs: &Inputs<'_>, q: Span, k: Span) {
        let d = head.size.head_size;
        head.scores(level, &mut self.p, [inputs.qkv, inputs.kv], q, k);
        let dy = head.columns(inputs.dy, q);
        let v = head.keys(inputs.kv, 1, k);
        small(level, &mut self.ds, TILE, [dy, v.transposed()], [q.len(), d, k.len()], false);
        head.drop_out(level, &mut self.ds, q, k);
        let scale = head.size.score_scale();
        let cap = head.size.cap;
        level.run(
            #[inline(always)]
            || {
                let rows = self.p.chunks_exact_mut(TILE).zip(self.ds.chunks_exact_mut(TILE));
                for (index, (p, ds)) in rows.take(q.len()).enumerate() {
                    let at = head.statistic(q.from + index);
                    let lse = inputs.lse[at];
                    let delta = inputs.delta[at];
                    let slopes = &mut [1.0; TILE][..k.len()];
                    if let Some(cap) = cap {
                        let scores = p.iter().zip(&mut *slopes);
                        scores.for_each(|(score, slope)| *slope = limit_slope(*score, cap));
                    }
                    for ((p, ds), slope) in p[..k.len()].iter_mut().zip(ds).zip(&*slopes) {
                        *p = exp(*p - lse);
                        *ds = scale * *p * (*ds - delta) * slope;
                    }
                }
            },
        );
        head.drop_out(level, &mut self.p, q, k);
    }
}

#[cfg(test)]
mod tests;
