//! Positions by rotation: a block for each row.

use super::kernels::{On, arguments};
use super::launches::{attention_words, frequencies};
use crate::kernels::Rotate;

impl On<'_> {
    pub(super) fn rotate(&self, op: &Rotate<'_>) {
        let Rotate { qkv, rotary, ref shape, inverse } = *op;
        let frequencies = frequencies(rotary, shape.head_size);
        let documents = self.metadata.documents(&shape.batch);
        let starts = self.metadata.starts(&shape.batch);
        let cached = self.metadata.cached(&shape.batch);
        let sizes = attention_words(shape);
        let arguments =
            arguments!(self; qkv, frequencies, starts, documents, cached, sizes, inverse);
        self.queue.launch("rotate", [qkv.rows, 1, 1], [256, 1, 1], 0, arguments);
    }
}
