//! Attention in tiles, and what is remembered of keys and values.

use super::driver::Argument;
use super::kernels::On;
use super::launches::{self as with, int, long};
use crate::kernels::{Apart, Attention};
use crate::tensor::{Dtype, View};

/// A kernel with a block for each tile of a head, as the text says.
#[derive(Clone, Copy)]
struct Tiles {
    kernel: &'static str,
    positions: usize,
    /// Blocks for each head.
    blocks: usize,
    threads: u32,
    /// Bytes that a block shares.
    shared: usize,
}

const fn tiles(kernel: &'static str, positions: usize, threads: u32, shared: usize) -> Tiles {
    Tiles { kernel, positions, blocks: 1, threads, shared }
}

/// Forward, backward to keys and values, backward to queries.
type Passes = [Tiles; 3];

/// For heads of all sizes.
const PLAIN: Passes = [
    tiles("attention", 64, 256, 35_840),
    tiles("attention_backward_keys", 64, 256, 35_840),
    tiles("attention_backward_queries", 64, 256, 35_840),
];

/// On tensor cores, for heads of at most so many channels.
const CORES: [(usize, Passes); 4] = [
    (
        32,
        [
            tiles("attention_32", 128, 256, 22_528),
            tiles("attention_backward_keys_32", 64, 128, 22_528),
            tiles("attention_backward_queries_32", 64, 128, 32_768),
        ],
    ),
    (
        64,
        [
            tiles("attention_64", 128, 256, 38_912),
            tiles("attention_backward_keys_64", 64, 128, 38_912),
            tiles("attention_backward_queries_64", 64, 128, 57_344),
        ],
    ),
    (
        128,
        [
            tiles("attention_128", 128, 256, 71_680),
            tiles("attention_backward_keys_128", 64, 128, 71_680),
            tiles("attention_backward_queries_128", 64, 128, 70_656),
        ],
    ),
    (
        256,
        [
            tiles("attention_256", 64, 128, 68_096),
            // Half of a head's channels each.
            Tiles { blocks: 2, ..tiles("attention_backward_keys_256", 64, 128, 84_992) },
            tiles("attention_backward_queries_256", 64, 128, 84_736),
        ],
    ),
];

fn passes(of: Dtype, head_size: usize) -> Passes {
    let fits = |(most, _): &&(usize, Passes)| head_size <= *most;
    match of {
        Dtype::F32 => PLAIN,
        Dtype::Bf16 => CORES.iter().find(fits).expect("sizes are checked").1,
    }
}

impl On<'_> {
    pub(super) fn attention(
        &self,
        y: View,
        lse: View,
        qkv: View,
        kv: Option<View>,
        size: &Attention<'_>,
    ) {
        let [forward, ..] = passes(qkv.dtype, size.head_size);
        let (y, lse, qkv, kv) = (self.at(y), self.at(lse), self.at(qkv), self.maybe(kv));
        let (lengths, documents) =
            (self.notes.lengths(size.lengths), self.notes.documents(size.documents));
        let sizes = with::attention(size);
        let arguments: [&dyn Argument; 7] = [&y, &lse, &qkv, &kv, &lengths, &documents, &sizes];
        self.tiles(forward, size, size.rows.positions, size.heads, &arguments);
    }

    /// dqkv, and what goes apart. `delta` is scratch.
    pub(super) fn attention_backward(
        &self,
        [dqkv, delta]: [View; 2],
        [dy, y, lse, qkv]: [View; 4],
        apart: Option<Apart>,
        size: &Attention<'_>,
    ) {
        let [_, to_keys, to_queries] = passes(qkv.dtype, size.head_size);
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
        self.tiles(to_keys, size, keys, size.kv_heads, &arguments);
        let arguments: [&dyn Argument; 9] =
            [&dqkv, &dy, &lse, &delta, &qkv, &kv, &lengths, &documents, &sizes];
        let queries = size.rows.positions;
        self.tiles(to_queries, size, queries, size.heads, &arguments);
    }

    pub(super) fn attention_to_past(&self, y: View, qkv: View, past: View, size: &Attention<'_>) {
        let capacity = past.len() / size.rows.sequences / size.kv_width();
        let (y, qkv, kv, pasts) =
            (self.at(y), self.at(qkv), self.at(past), self.notes.pasts(size.past));
        let (capacity, sizes) = (int(capacity), with::attention(size));
        let arguments: [&dyn Argument; 6] = [&y, &qkv, &kv, &pasts, &capacity, &sizes];
        let grid = [size.rows.count(), size.heads, 1];
        self.queue.launch("attention_to_past", grid, [256, 1, 1], 0, &arguments);
    }

    /// Blocks for each tile of so many positions of each of so many heads.
    fn tiles(
        &self,
        tiles: Tiles,
        size: &Attention<'_>,
        positions: usize,
        heads: usize,
        arguments: &[&dyn Argument],
    ) {
        let Tiles { kernel, positions: of_tile, blocks, threads, shared } = tiles;
        let grid = [positions.div_ceil(of_tile), blocks * heads, size.rows.sequences];
        self.queue.launch(kernel, grid, [threads, 1, 1], shared, arguments);
    }

    /// Keys and values of each position, to or from beside the queries.
    pub(super) fn move_keys(
        &self,
        kernel: &'static str,
        to: View,
        from: View,
        size: &Attention<'_>,
    ) {
        let (rows, width) = (size.rows.count(), size.kv_width());
        let (to, from, r) = (self.at(to), self.at(from), long(rows));
        let arguments: [&dyn Argument; 5] = [&to, &from, &r, &int(size.packed()), &int(width)];
        self.queue.columns(kernel, [rows, 1], width, &arguments);
    }
}
