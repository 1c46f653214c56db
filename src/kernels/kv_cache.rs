//! The KV cache: copies of keys and values from beside their queries and back, and attention to
//! cached keys and values.

use super::attention::AttentionShape;
use super::operation::{KernelOperation, Views};
use crate::tensor::{Dtype, View};

/// Copies keys and values from beside their queries.
#[derive(Clone, Copy, Debug)]
pub struct WriteKv<'a> {
    /// Output: keys and values side by side. (R, 2 K D).
    pub kv: View,
    /// Input: queries, keys and values side by side. (R, (H + 2 K) D).
    pub qkv: View,
    /// Sizes.
    pub shape: AttentionShape<'a>,
}

/// Copies keys and values, or their gradients, to beside their queries.
#[derive(Clone, Copy, Debug)]
pub struct ReadKv<'a> {
    /// Output: queries, keys and values side by side. (R, (H + 2 K) D).
    pub qkv: View,
    /// Input: keys and values side by side. Floats; on the CPU also of the dtype of `qkv`.
    /// (R, 2 K D).
    pub kv: View,
    /// Sizes.
    pub shape: AttentionShape<'a>,
}

/// Causal attention of new positions to cached keys and values and to their own.
#[derive(Clone, Copy, Debug)]
pub struct CachedAttention<'a> {
    /// Output. (R, H D).
    pub y: View,
    /// Output: the log-sum-exp, as [`Attention`](super::Attention) writes it. Floats. (R, H).
    pub lse: View,
    /// Queries, keys and values of the new positions. (R, (H + 2 K) D).
    pub qkv: View,
    /// The cache. Each sequence has room for P positions; the batch says how many of them it uses.
    /// (B P, 2 K D).
    pub cache: View,
    /// Sizes.
    pub shape: AttentionShape<'a>,
}

impl KernelOperation for WriteKv<'_> {
    fn views(&self, views: &mut Views<'_>) {
        let WriteKv { kv, qkv, shape } = *self;
        let rows = shape.rows();
        views.writes("kv", kv, [rows, shape.kv_width()], qkv.dtype);
        views.reads("qkv", qkv, [rows, shape.qkv_width()], qkv.dtype);
    }
}

impl KernelOperation for ReadKv<'_> {
    fn views(&self, views: &mut Views<'_>) {
        let ReadKv { qkv, kv, shape } = *self;
        let rows = shape.rows();
        // The queries' columns stay as they were.
        views.writes_opaque("qkv", qkv, [rows, shape.qkv_width()], qkv.dtype);
        views.reads("kv", kv, [rows, shape.kv_width()], kv.dtype);
    }
}

impl KernelOperation for CachedAttention<'_> {
    fn views(&self, views: &mut Views<'_>) {
        let CachedAttention { y, lse, qkv, cache, shape } = *self;
        let rows = shape.rows();
        let dtype = qkv.dtype;
        views.writes("y", y, [rows, shape.width()], dtype);
        views.writes("lse", lse, [rows, shape.heads], Dtype::F32);
        views.reads("qkv", qkv, [rows, shape.qkv_width()], dtype);
        views.reads("cache", cache, [cache.rows, shape.kv_width()], dtype);
        let sequences = shape.batch.sequences();
        let cached = (0..sequences).map(|one| shape.batch.positions_before(one)).max();
        let is_whole = cache.rows.is_multiple_of(sequences);
        let has_room = is_whole && cache.rows / sequences >= cached.unwrap_or(0);
        views.rule(has_room, "the cache does not have rows for all cached positions");
    }
}
