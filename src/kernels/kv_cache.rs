//! The KV cache: keys and values beside their queries or apart, and attention to cached ones.

use super::attention::AttentionShape;
use super::check::Check;
use crate::tensor::View;

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
    /// Input: keys and values side by side; floats, or of the dtype of `qkv`. (R, 2 K D).
    pub kv: View,
    /// Sizes.
    pub shape: AttentionShape<'a>,
}

/// Attention of new positions to cached keys and values, and to their own. Causal.
#[derive(Clone, Copy, Debug)]
pub struct CachedAttention<'a> {
    /// Output. (R, H D).
    pub y: View,
    /// Queries, keys and values of the new positions. (R, (H + 2 K) D).
    pub qkv: View,
    /// The cache. Each sequence has room for P positions, of which it uses as many as the batch
    /// says are cached. (B P, 2 K D).
    pub cache: View,
    /// Sizes.
    pub shape: AttentionShape<'a>,
}

impl WriteKv<'_> {
    /// Panics unless shapes and dtypes agree.
    pub fn check(&self) {
        let WriteKv { kv, qkv, shape } = *self;
        let (check, rows) = (Check("write_kv"), shape.rows());
        check.view("kv", kv, [rows, shape.kv_width()], qkv.dtype);
        check.view("qkv", qkv, [rows, shape.qkv_width()], qkv.dtype);
    }
}

impl ReadKv<'_> {
    /// Panics unless shapes agree.
    pub fn check(&self) {
        let ReadKv { qkv, kv, shape } = *self;
        let (check, rows) = (Check("read_kv"), shape.rows());
        check.view("qkv", qkv, [rows, shape.qkv_width()], qkv.dtype);
        check.view("kv", kv, [rows, shape.kv_width()], kv.dtype);
    }
}

impl CachedAttention<'_> {
    /// Panics unless shapes and dtypes agree.
    pub fn check(&self) {
        let CachedAttention { y, qkv, cache, shape } = *self;
        let (check, rows, dtype) = (Check("cached_attention"), shape.rows(), qkv.dtype);
        check.view("y", y, [rows, shape.width()], dtype);
        check.view("qkv", qkv, [rows, shape.qkv_width()], dtype);
        check.view("cache", cache, [cache.rows, shape.kv_width()], dtype);
        let sequences = shape.batch.sequences();
        let cached = (0..sequences).map(|one| shape.batch.positions_before(one)).max();
        let is_whole = cache.rows.is_multiple_of(sequences);
        let has_room = is_whole && cache.rows / sequences >= cached.unwrap_or(0);
        check.rule(has_room, "the cache has not the rows of all cached positions");
    }
}
