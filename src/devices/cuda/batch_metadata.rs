//! The metadata of a micro-batch where kernels read it: where sequences begin, cached positions,
//! documents and kinds of tokens.

use super::driver::Address;
use super::launches::{FLOAT, NULL};
use crate::kernels::{BatchMetadata, BatchView, Rows};

/// The metadata of a micro-batch in the device's memory. Addresses of a chunk's part are computed
/// from the chunk's range.
#[derive(Clone, Copy)]
pub(super) struct DeviceMetadata {
    at: Address,
    sequences: usize,
    rows: usize,
}

/// Words of a micro-batch's metadata: first rows of sequences, cached positions, kinds, and behind
/// them documents, where there are some.
fn words(sequences: usize, rows: usize, has_documents: bool) -> usize {
    let documents = if has_documents { 2 * rows } else { 0 };
    2 * sequences + 1 + rows.div_ceil(FLOAT) + documents
}

impl DeviceMetadata {
    /// Floats that the metadata of a micro-batch takes at most.
    pub(super) fn len(rows: Rows) -> usize {
        words(rows.sequences, rows.count(), true)
    }

    /// The metadata of a micro-batch, at an address.
    pub(super) fn of(batch: &BatchMetadata<'_>, at: Address) -> DeviceMetadata {
        DeviceMetadata { at, sequences: batch.sequences(), rows: batch.rows() }
    }

    /// Writes the metadata to memory of the host, which grows to its size.
    pub(super) fn write(batch: &BatchMetadata<'_>, to: &mut Vec<u32>) {
        let BatchMetadata { starts, cached, documents, kinds, .. } = *batch;
        let sequences = batch.sequences();
        let rows = batch.rows();
        to.clear();
        to.resize(words(sequences, rows, !documents.is_empty()), 0);
        let (to_starts, rest) = to.split_at_mut(sequences + 1);
        let (to_cached, rest) = rest.split_at_mut(sequences);
        let (to_kinds, to_documents) = rest.split_at_mut(rows.div_ceil(FLOAT));
        for (to, start) in to_starts.iter_mut().zip(starts) {
            *to = (start - starts[0]) as u32;
        }
        for (to, cached) in to_cached.iter_mut().zip(cached) {
            *to = *cached as u32;
        }
        bytemuck::cast_slice_mut(to_kinds)[..kinds.len()].copy_from_slice(kinds);
        for (to, document) in to_documents.chunks_exact_mut(2).zip(documents) {
            to.copy_from_slice(&[document.from, document.to]);
        }
    }

    /// The address of a word.
    fn word(&self, index: usize) -> Address {
        self.at + (index * FLOAT) as Address
    }

    fn check(&self, batch: &BatchView<'_>) {
        let of_batch = [batch.metadata().sequences(), batch.metadata().rows()];
        assert_eq!([self.sequences, self.rows], of_batch, "kernels run on another micro-batch");
    }

    /// The first row of each sequence, and the row behind the last. Null for a chunk: all of its
    /// rows are of one sequence.
    pub(super) fn starts(&self, batch: &BatchView<'_>) -> Address {
        self.check(batch);
        if batch.chunk().is_some() { NULL } else { self.word(0) }
    }

    /// Cached positions of each sequence. Null where the positions before the first row are the
    /// same for all sequences, and are passed as a number.
    pub(super) fn cached(&self, batch: &BatchView<'_>) -> Address {
        self.check(batch);
        if batch.metadata().cached.is_empty() || batch.chunk().is_some() {
            return NULL;
        }
        self.word(self.sequences + 1)
    }

    /// Documents of positions, from the first position of the first sequence on. Null where each
    /// sequence is one document.
    pub(super) fn documents(&self, batch: &BatchView<'_>) -> Address {
        self.check(batch);
        if batch.metadata().documents.is_empty() {
            return NULL;
        }
        let first = batch.metadata().sequence(batch.first_sequence()).start;
        self.word(words(self.sequences, self.rows, false) + 2 * first)
    }

    /// Kinds of tokens of the rows.
    pub(super) fn kinds(&self, batch: &BatchView<'_>) -> Address {
        self.check(batch);
        let begin = self.word(2 * self.sequences + 1);
        begin + batch.row_range().start as Address
    }
}
