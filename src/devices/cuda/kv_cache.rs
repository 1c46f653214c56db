//! The KV cache: copies of keys and values, and attention to cached ones.

use super::driver::Argument;
use super::kernels::On;
use super::launches::{attention_words, int, long};
use crate::kernels::{AttentionShape, CachedAttention, ReadKv, WriteKv};
use crate::tensor::View;

impl On<'_> {
    pub(super) fn write_kv(&self, &WriteKv { kv, qkv, ref shape }: &WriteKv<'_>) {
        let (rows, width) = (kv.rows, shape.kv_width());
        let (to, from, r) = (self.at(kv), self.at(qkv), long(rows));
        let arguments: [&dyn Argument; 5] = [&to, &from, &r, &int(shape.qkv_width()), &int(width)];
        self.queue.columns("remember", [rows, 1], width, &arguments);
    }

    pub(super) fn read_kv(&self, &ReadKv { qkv, kv, ref shape }: &ReadKv<'_>) {
        self.recall(qkv, kv, shape, 1);
    }

    /// Sums the gradients of keys and values over `shares`, and writes them beside those of the
    /// queries. `from`: (shares R, 2 K D).
    pub(super) fn recall(&self, to: View, from: View, shape: &AttentionShape<'_>, shares: usize) {
        let (rows, width) = (to.rows, shape.kv_width());
        let (packed, to, from) = (int(shape.qkv_width()), self.at(to), self.at(from));
        let (r, w, shares) = (long(rows), int(width), int(shares));
        let arguments: [&dyn Argument; 6] = [&to, &from, &r, &packed, &w, &shares];
        self.queue.columns("recall", [rows, 1], width, &arguments);
    }

    pub(super) fn cached_attention(&self, op: &CachedAttention<'_>) {
        let CachedAttention { y, qkv, cache, ref shape } = *op;
        let (grid, capacity) =
            ([y.rows, shape.heads, 1], int(cache.rows / shape.batch.sequences()));
        let (y, qkv, kv) = (self.at(y), self.at(qkv), self.at(cache));
        let (cached, sizes) = (self.metadata.cached(&shape.batch), attention_words(shape));
        let starts = self.metadata.starts(&shape.batch);
        let arguments: [&dyn Argument; 7] = [&y, &qkv, &kv, &starts, &cached, &capacity, &sizes];
        self.queue.launch("attention_to_past", grid, [256, 1, 1], 0, &arguments);
    }
}
