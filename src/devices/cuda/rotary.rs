//! Positions by rotation: a block for each row.

use super::kernels::{On, arguments};
use super::launches::{attention_words, rotary_words};
use crate::kernels::{AttentionShape, Rotate, SequenceChunk};

impl On<'_> {
    pub(super) fn rotate(&self, op: &Rotate<'_>) {
        let batch = op.shape.batch;
        let tables = op.tables();
        let of_sequence = |sequence: usize| {
            let to = batch.sequence(sequence).len();
            batch.chunk_of(SequenceChunk { sequence, from: 0, to })
        };
        for (sequence, table) in tables.iter().enumerate() {
            let batch = if tables.len() == 1 { batch } else { of_sequence(sequence) };
            let qkv = if tables.len() == 1 { op.qkv } else { batch.rows_of(op.qkv) };
            let shape = AttentionShape { batch, ..op.shape };
            let rotary = rotary_words(table);
            let documents = self.metadata.documents(&batch);
            let starts = self.metadata.starts(&batch);
            let cached = self.metadata.cached(&batch);
            let sizes = attention_words(&shape);
            let inverse = op.inverse;
            let arguments =
                arguments!(self; qkv, rotary, starts, documents, cached, sizes, inverse);
            self.queue.launch("rotate", [qkv.rows, 1, 1], [256, 1, 1], 0, arguments);
        }
    }
}
