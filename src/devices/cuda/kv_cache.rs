//! The KV cache: copies of keys and values, and attention to cached ones.

use super::driver::Argument;
use super::kernels::On;
use super::launches::{attention_words, int, long};
use crate::kernels::{AttentionShape, CachedAttention, ReadKv, WriteKv};
use crate::tensor::View;

impl On<'_> {
    pub(super) fn write_kv(&self, &WriteKv { kv, qkv, ref shape }: &WriteKv<'_>) {
        let rows = kv.rows;
        let width = shape.kv_width();
        let arguments: [&dyn Argument; 5] =
            [&self.at(kv), &self.at(qkv), &long(rows), &int(shape.qkv_width()), &int(width)];
        self.queue.columns("remember", [rows, 1], width, &arguments);
    }

    pub(super) fn read_kv(&self, &ReadKv { qkv, kv, ref shape }: &ReadKv<'_>) {
        self.recall(qkv, kv, shape, 1);
    }

    /// Sums the gradients of keys and values over `shares`, and writes them beside those of the
    /// queries. `from`: (shares R, 2 K D).
    pub(super) fn recall(&self, to: View, from: View, shape: &AttentionShape<'_>, shares: usize) {
        let rows = to.rows;
        let width = shape.kv_width();
        let w = int(width);
        let arguments: [&dyn Argument; 6] =
            [&self.at(to), &self.at(from), &long(rows), &int(shape.qkv_width()), &w, &int(shares)];
        self.queue.columns("recall", [rows, 1], width, &arguments);
    }

    pub(super) fn cached_attention(&self, op: &CachedAttention<'_>) {
        let CachedAttention { y, qkv, cache, ref shape } = *op;
        let grid = [y.rows, shape.heads, 1];
        let y = self.at(y);
        let qkv = self.at(qkv);
        let kv = self.at(cache);
        let cached = self.metadata.cached(&shape.batch);
        let sizes = attention_words(shape);
        let starts = self.metadata.starts(&shape.batch);
        let arguments: [&dyn Argument; 7] =
            [&y, &qkv, &kv, &starts, &cached, &int(cache.rows / shape.batch.sequences()), &sizes];
        self.queue.launch("attention_to_past", grid, [256, 1, 1], 0, &arguments);
    }
}
