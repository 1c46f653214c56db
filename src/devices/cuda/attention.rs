//! Attention in tiles.

use super::driver::{Argument, Place};
use super::kernels::{On, arguments};
use super::launches::{attention_words, attention_words_from};
use super::texts::AMPERE;
use crate::kernels::{Attention, AttentionBackward, AttentionShape, ChunkKv, HEAD_LIMIT};
use crate::tensor::{Scratch, View};

/// A kernel with a block for each tile of a head, and the launch that its text expects.
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

/// Panics for a head that kernels have no room for. Heads of a config are refused before; those of
/// a layer of one's own are not.
pub(super) fn check_head(head_size: usize) {
    assert!(head_size <= HEAD_LIMIT, "a head has {head_size} channels, more than {HEAD_LIMIT}");
}

/// Each block has half of a head's channels.
const fn halves(tiles: Tiles) -> Tiles {
    Tiles { blocks: 2, ..tiles }
}

/// Forward, backward to keys and values, backward to queries.
type Passes = [Tiles; 3];

/// Without tensor cores, for heads of up to 256 channels.
const PLAIN: Passes = [
    tiles("attention", 64, 256, 35_840),
    tiles("attention_backward_keys", 64, 256, 35_840),
    tiles("attention_backward_queries", 64, 256, 35_840),
];

/// Without tensor cores, for heads of 257 to 512 channels.
const WIDE: Passes = [
    halves(tiles("attention_wide", 64, 256, 35_840)),
    halves(tiles("attention_backward_keys_wide", 64, 256, 35_840)),
    halves(tiles("attention_backward_queries_wide", 64, 256, 35_840)),
];

/// In 16 bits on tensor cores, for heads of at most 32, 64, 128 and 256 channels.
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
            halves(tiles("attention_backward_keys_256", 64, 128, 84_992)),
            tiles("attention_backward_queries_256", 64, 128, 84_736),
        ],
    ),
];

/// In 16 bits on the tensor cores of sm_70 and sm_75, with at most 64 KiB of shared memory a block.
const CORES_IN_64K: [(usize, Passes); 4] = [
    CORES[0],
    CORES[1],
    (
        128,
        [
            CORES[2].1[0],
            tiles("attention_backward_keys_128_64k", 64, 128, 53_248),
            tiles("attention_backward_queries_128_64k", 64, 128, 52_736),
        ],
    ),
    (
        256,
        [
            tiles("attention_256_64k", 64, 128, 50_944),
            halves(tiles("attention_backward_keys_256_64k", 32, 64, 51_072)),
            tiles("attention_backward_queries_256_64k", 32, 64, 50_816),
        ],
    ),
];

/// With this number of keys of a sequence, counted over all key heads, the gradient of keys has
/// enough blocks for a large GPU. With half of it, some multiprocessors have no block. Keys behind
/// a window count, too: whether they are there must not change the order of a sum.
const ENOUGH_KEYS: usize = 16_896;

/// The number of shares into which the query heads of a key head are split. Each share is a block
/// of its own. With few keys there are several shares, and their gradients are summed afterwards.
fn shares_of(shape: &AttentionShape<'_>) -> usize {
    let keys = shape.positions() * shape.kv_heads;
    let group = shape.heads / shape.kv_heads;
    if keys >= ENOUGH_KEYS / 2 {
        return 1;
    }
    let is_enough = |shares: &usize| group.is_multiple_of(*shares) && shares * keys >= ENOUGH_KEYS;
    (1..=group).find(is_enough).unwrap_or(group)
}

/// Workspace of the backward: Σ y dy of each query and head, and the gradients of the shares. Its
/// size never falls as rows are added, so the planned workspace is enough for smaller
/// micro-batches.
pub(super) fn backward_scratch(op: &AttentionBackward<'_>, scratch: &Scratch<'_>) -> [View; 2] {
    let shape = &op.shape;
    let kept = op.chunk_kv.map_or(shape.positions(), |chunk| chunk.kv.rows);
    let keys = (kept * shape.kv_heads).min(ENOUGH_KEYS / 2);
    let group = shape.heads / shape.kv_heads;
    let of_shares = if group > 1 { group * keys } else { 0 };
    let delta = scratch.take_floats(shape.rows(), shape.heads);
    [delta, scratch.take_floats(of_shares, 2 * shape.head_size)]
}

impl On<'_> {
    fn passes(&self, head_size: usize) -> Passes {
        check_head(head_size);
        let target = self.queue.target();
        let by_size = match target.has_tensor_cores() {
            _ if head_size > 256 => return WIDE,
            false => return PLAIN,
            true if target.architecture < AMPERE => CORES_IN_64K,
            true => CORES,
        };
        let fits = |(most, _): &(usize, Passes)| head_size <= *most;
        by_size.into_iter().find(fits).expect("a wide head has its own").1
    }

    pub(super) fn attention(&self, op: &Attention<'_>) {
        let Attention { y, lse, qkv, kv, ref shape } = *op;
        let [forward, ..] = self.passes(shape.head_size);
        let starts = self.metadata.starts(&shape.batch);
        let documents = self.metadata.documents(&shape.batch);
        let sizes = attention_words(shape);
        let kv = self.at_first_position(kv, shape);
        let arguments = arguments!(self; y, lse, qkv, kv, starts, documents, sizes);
        self.tiles(forward, shape, shape.batch.longest(), shape.heads, arguments);
    }

    pub(super) fn attention_backward(&self, op: &AttentionBackward<'_>, [delta, parts]: [View; 2]) {
        let AttentionBackward { dqkv, chunk_kv, dy, y, lse, qkv, ref shape } = *op;
        let [_, to_keys, to_queries] = self.passes(shape.head_size);
        let first = chunk_kv.map_or(0, |chunk| shape.first_kept(chunk.kv));
        let sizes = attention_words_from(shape, first);
        let starts = self.metadata.starts(&shape.batch);
        let documents = self.metadata.documents(&shape.batch);
        let arguments = arguments!(self; delta, y, dy, starts, sizes);
        let grid = [delta.len().div_ceil(8), 1, 1];
        self.queue.launch("attention_delta", grid, [256, 1, 1], 0, arguments);
        let kv = self.at_first_position(chunk_kv.map(|one| one.kv), shape);
        let shares = shares_of(shape);
        let dkv = match chunk_kv {
            _ if shares > 1 => self.at(parts).before(first * shape.kv_width()),
            chunk => self.at_first_position(chunk.map(|one| one.dkv), shape),
        };
        let has_sum = chunk_kv.is_some_and(|one| one.accumulate);
        let accumulate = has_sum && shares == 1;
        let queries = shape.batch.longest();
        let keys = shape.batch.same_positions_before() + queries - first;
        let arguments = arguments!(
            self; dqkv, dkv, dy, lse, delta, qkv, kv, starts, documents, sizes, accumulate, shares
        );
        self.tiles(to_keys, shape, keys, shape.kv_heads * shares, arguments);
        match chunk_kv {
            _ if shares == 1 => {}
            Some(ChunkKv { dkv, .. }) => {
                let length = dkv.len();
                self.queue.fold(self.at(dkv), self.at(parts), [shares, length, length], has_sum);
            }
            None => self.recall(dqkv, parts, shape, shares),
        }
        let arguments = arguments!(self; dqkv, dy, lse, delta, qkv, kv, starts, documents, sizes);
        self.tiles(to_queries, shape, queries, shape.heads, arguments);
    }

    /// Where the first position of the sequence would lie in a chunk's tensor of keys and values,
    /// or of their gradients: kernels count positions from there.
    fn at_first_position(&self, kv: Option<View>, shape: &AttentionShape<'_>) -> Place {
        let place = |kv: View| self.at(kv).before(shape.first_kept(kv) * shape.kv_width());
        kv.map_or(Place::NULL, place)
    }

    /// Launches a block for each tile of positions of each head. Heads come first in the grid, so
    /// that the longest blocks of all heads begin first.
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
