//! The KV cache: copies of keys and values, and attention to cached ones.

use super::attention::check_head;
use super::kernels::{On, arguments};
use super::launches::{attention_words, long};
use crate::kernels::{AttentionShape, CachedAttention, ReadKv, WriteKv};
use crate::tensor::View;

impl On<'_> {
    pub(super) fn write_kv(&self, &WriteKv { kv, qkv, ref shape }: &WriteKv<'_>) {
        let rows = kv.rows;
        let width = shape.kv_width();
        let arguments = arguments!(self; kv, qkv, long(rows), shape.qkv_width(), width);
        self.queue.columns("remember", [rows, 1], width, arguments);
    }

    pub(super) fn read_kv(&self, &ReadKv { qkv, kv, ref shape }: &ReadKv<'_>) {
        self.recall(qkv, kv, shape, 1);
    }

    /// Sums the gradients of keys and values over `shares`, and writes them beside those of the
    /// queries. `from`: (shares R, 2 K D).
    pub(super) fn recall(&self, to: View, from: View, shape: &AttentionShape<'_>, shares: usize) {
        let rows = to.rows;
        let width = shape.kv_width();
        let arguments = arguments!(self; to, from, long(rows), shape.qkv_width(), width, shares);
        self.queue.columns("recall", [rows, 1], width, arguments);
    }

    pub(super) fn cached_attention(&self, op: &CachedAttention<'_>) {
        let CachedAttention { y, lse, qkv, cache, ref shape } = *op;
        check_head(shape.head_size);
        let cached = self.metadata.cached(&shape.batch);
        let starts = self.metadata.starts(&shape.batch);
        let room = cache.rows / shape.batch.sequences();
        let sizes = attention_words(shape);
        let arguments = arguments!(self; y, lse, qkv, cache, starts, cached, room, sizes);
        let grid = [y.rows, shape.heads, 1];
        self.queue.launch("attention_to_past", grid, [256, 1, 1], 0, arguments);
    }
}
