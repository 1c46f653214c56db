//! Attention in tiles, and what is remembered of keys and values.

use super::driver::Argument;
use super::kernels::On;
use super::launches::{self as with, int, long};
use crate::models::{Apart, Attention, View};

/// Positions of a block.
const TILE: usize = 64;

/// Bytes that a block shares, as the text says.
const SHARED: usize = 35_840;

impl On<'_> {
    pub(super) fn attention(
        &self,
        y: View,
        lse: View,
        qkv: View,
        kv: Option<View>,
        size: &Attention<'_>,
    ) {
        let (y, lse, qkv, kv) = (self.at(y), self.at(lse), self.at(qkv), self.maybe(kv));
        let (lengths, documents) =
            (self.notes.lengths(size.lengths), self.notes.documents(size.documents));
        let sizes = with::attention(size);
        let arguments: [&dyn Argument; 7] = [&y, &lse, &qkv, &kv, &lengths, &documents, &sizes];
        self.tiles("attention", size, size.rows.positions, size.heads, &arguments);
    }

    /// dqkv, and what goes apart. `delta` is scratch.
    pub(super) fn attention_backward(
        &self,
        [dqkv, delta]: [View; 2],
        [dy, y, lse, qkv]: [View; 4],
        apart: Option<Apart>,
        size: &Attention<'_>,
    ) {
        let sizes = with::attention(size);
        let (dqkv, dy, y, lse) = (self.at(dqkv), self.at(dy), self.at(y), self.at(lse));
        let (delta, qkv) = (self.at(delta), self.at(qkv));
        let rows = size.rows.count() * size.heads;
        let arguments: [&dyn Argument; 4] = [&delta, &y, &dy, &sizes];
        self.queue.launch("attention_delta", [rows.div_ceil(8), 1, 1], [256, 1, 1], 0, &arguments);
        let (kv, dkv) = (self.maybe(apart.map(|one| one.kv)), self.maybe(apart.map(|one| one.dkv)));
        let accumulate = i32::from(apart.is_some_and(|one| one.accumulate));
        let (lengths, documents) =
            (self.notes.lengths(size.lengths), self.notes.documents(size.documents));
        let keys = size.rows.positions + size.past.first().copied().unwrap_or(0);
        let arguments: [&dyn Argument; 11] =
            [&dqkv, &dkv, &dy, &lse, &delta, &qkv, &kv, &lengths, &documents, &sizes, &accumulate];
        self.tiles("attention_backward_keys", size, keys, size.kv_heads, &arguments);
        let arguments: [&dyn Argument; 9] =
            [&dqkv, &dy, &lse, &delta, &qkv, &kv, &lengths, &documents, &sizes];
        let queries = size.rows.positions;
        self.tiles("attention_backward_queries", size, queries, size.heads, &arguments);
    }

    pub(super) fn attention_to_past(&self, y: View, qkv: View, past: View, size: &Attention<'_>) {
        let capacity = past.len / size.rows.sequences / size.remembered();
        let (y, qkv, kv, pasts) =
            (self.at(y), self.at(qkv), self.at(past), self.notes.pasts(size.past));
        let (capacity, sizes) = (int(capacity), with::attention(size));
        let arguments: [&dyn Argument; 6] = [&y, &qkv, &kv, &pasts, &capacity, &sizes];
        let grid = [size.rows.count(), size.heads, 1];
        self.queue.launch("attention_to_past", grid, [256, 1, 1], 0, &arguments);
    }

    /// A block for each tile of so many positions of each of so many heads.
    fn tiles(
        &self,
        kernel: &'static str,
        size: &Attention<'_>,
        positions: usize,
        heads: usize,
        arguments: &[&dyn Argument],
    ) {
        let grid = [positions.div_ceil(TILE), heads, size.rows.sequences];
        self.queue.launch(kernel, grid, [256, 1, 1], SHARED, arguments);
    }

    /// Keys and values of each position, to or from beside the queries.
    pub(super) fn move_keys(
        &self,
        kernel: &'static str,
        to: View,
        from: View,
        size: &Attention<'_>,
    ) {
        let (rows, width) = (size.rows.count(), size.remembered());
        let (to, from, r) = (self.at(to), self.at(from), long(rows));
        let arguments: [&dyn Argument; 5] = [&to, &from, &r, &int(size.packed()), &int(width)];
        self.queue.columns(kernel, [rows, 1], width, &arguments);
    }
}
