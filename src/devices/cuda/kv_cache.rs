//! The KV cache: copies of keys and values, and attention to cached ones.

use super::driver::Argument;
use super::kernels::On;
use super::launches::{attention_words, int, long};
use crate::kernels::{AttentionShape, CachedAttention, ReadKv, WriteKv};
use crate::tensor::View;

impl On<'_> {
    pub(super) fn write_kv(&self, &WriteKv { kv, qkv, ref shape }: &WriteKv<'_>) {
        self.copy_kv("remember", kv, qkv, shape);
    }

    pub(super) fn read_kv(&self, &ReadKv { qkv, kv, ref shape }: &ReadKv<'_>) {
        self.copy_kv("recall", qkv, kv, shape);
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

    fn copy_kv(&self, kernel: &'static str, to: View, from: View, shape: &AttentionShape<'_>) {
        let (rows, width) = (to.rows, shape.kv_width());
        let (to, from, r) = (self.at(to), self.at(from), long(rows));
        let arguments: [&dyn Argument; 5] = [&to, &from, &r, &int(shape.qkv_width()), &int(width)];
        self.queue.columns(kernel, [rows, 1], width, &arguments);
    }
}
