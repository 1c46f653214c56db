//! Attention in tiles.

use super::driver::Argument;
use super::kernels::On;
use super::launches::attention_words;
use crate::kernels::{Attention, AttentionBackward, AttentionShape};
use crate::tensor::View;

/// A kernel with a block for each tile of a head, as the text expects.
#[derive(Clone, Copy)]
struct Tiles {
    kernel: &'static str,
    positions: usize,
    /// Blocks for each head.
    blocks: usize,
    threads: u32,
    /// Bytes of shared memory of a block.
    shared: usize,
}

const fn tiles(kernel: &'static str, positions: usize, threads: u32, shared: usize) -> Tiles {
    Tiles { kernel, positions, blocks: 1, threads, shared }
}

/// Forward, backward to keys and values, backward to queries.
type Passes = [Tiles; 3];

/// Without tensor cores, for heads of all sizes.
const PLAIN: Passes = [
    tiles("attention", 64, 256, 35_840),
    tiles("attention_backward_keys", 64, 256, 35_840),
    tiles("attention_backward_queries", 64, 256, 35_840),
];

/// In 16 bits on tensor cores, for heads of at most so many channels.
const CORES: [(usize, Passes); 4] = [
    (
        32,
        [
            tiles("attention_32", 128, 128, 22_528),
            tiles("attention_backward_keys_32", 128, 128, 33_792),
            tiles("attention_backward_queries_32", 128, 128, 32_768),
        ],
    ),
    (
        64,
        [
            tiles("attention_64", 128, 128, 38_912),
            tiles("attention_backward_keys_64", 128, 128, 58_368),
            tiles("attention_backward_queries_64", 128, 128, 57_344),
        ],
    ),
    (
        128,
        [
            tiles("attention_128", 128, 128, 53_248),
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

impl On<'_> {
    fn passes(&self, head_size: usize) -> Passes {
        let fits = |(most, _): &&(usize, Passes)| head_size <= *most;
        match self.queue.has_tensor_cores() {
            false => PLAIN,
            true => CORES.iter().find(fits).expect("sizes are checked").1,
        }
    }

    pub(super) fn attention(&self, op: &Attention<'_>) {
        let Attention { y, lse, qkv, kv, ref shape } = *op;
        let [forward, ..] = self.passes(shape.head_size);
        let (y, lse, qkv, kv) = (self.at(y), self.at(lse), self.at(qkv), self.at_if(kv));
        let starts = self.metadata.starts(&shape.batch);
        let documents = self.metadata.documents(&shape.batch);
        let sizes = attention_words(shape);
        let arguments: [&dyn Argument; 7] = [&y, &lse, &qkv, &kv, &starts, &documents, &sizes];
        self.tiles(forward, shape, shape.batch.longest(), shape.heads, &arguments);
    }

    /// `delta` is scratch: Σ y dy of each query and head.
    pub(super) fn attention_backward(&self, op: &AttentionBackward<'_>, delta: View) {
        let AttentionBackward { dqkv, chunk_kv, dy, y, lse, qkv, ref shape } = *op;
        let [_, to_keys, to_queries] = self.passes(shape.head_size);
        let sizes = attention_words(shape);
        let (dqkv, dy, y, lse) = (self.at(dqkv), self.at(dy), self.at(y), self.at(lse));
        let (heads, delta, qkv) = (delta.len(), self.at(delta), self.at(qkv));
        let starts = self.metadata.starts(&shape.batch);
        let arguments: [&dyn Argument; 5] = [&delta, &y, &dy, &starts, &sizes];
        let grid = [heads.div_ceil(8), 1, 1];
        self.queue.launch("attention_delta", grid, [256, 1, 1], 0, &arguments);
        let kv = self.at_if(chunk_kv.map(|one| one.kv));
        let dkv = self.at_if(chunk_kv.map(|one| one.dkv));
        let accumulate = i32::from(chunk_kv.is_some_and(|one| one.accumulate));
        let documents = self.metadata.documents(&shape.batch);
        let queries = shape.batch.longest();
        let keys = shape.batch.same_positions_before() + queries;
        let arguments: [&dyn Argument; 11] =
            [&dqkv, &dkv, &dy, &lse, &delta, &qkv, &kv, &starts, &documents, &sizes, &accumulate];
        self.tiles(to_keys, shape, keys, shape.kv_heads, &arguments);
        let arguments: [&dyn Argument; 9] =
            [&dqkv, &dy, &lse, &delta, &qkv, &kv, &starts, &documents, &sizes];
        self.tiles(to_queries, shape, queries, shape.heads, &arguments);
    }

    /// Blocks for each tile of so many positions of each of so many heads. Heads come first: the
    /// blocks that walk the most begin before all others, of whatever head.
    fn tiles(
        &self,
        tiles: Tiles,
        shape: &AttentionShape<'_>,
        positions: usize,
        heads: usize,
        arguments: &[&dyn Argument],
    ) {
        let Tiles { kernel, positions: of_tile, blocks, threads, shared } = tiles;
        let grid = [blocks * heads, positions.div_ceil(of_tile), shape.batch.sequences()];
        self.queue.launch(kernel, grid, [threads, 1, 1], shared, arguments);
    }
}
