//! The metadata of a micro-batch where kernels read it: lengths, cached positions, documents and
//! kinds of tokens.

use super::driver::Address;
use super::launches::{FLOAT, NULL};
use crate::kernels::{BatchMetadata, BatchView, Rows};

/// The metadata of a micro-batch in the device's memory. Addresses of a chunk's part are computed
/// from the chunk's range.
#[derive(Clone, Copy)]
pub(super) struct DeviceMetadata {
    /// All of it, in floats.
    pub(super) floats: usize,
    at: Address,
    rows: Rows,
}

impl DeviceMetadata {
    /// Floats that the metadata of a micro-batch takes.
    pub(super) fn len(rows: Rows) -> usize {
        2 * rows.sequences + 2 * rows.count() + rows.count().div_ceil(FLOAT)
    }

    /// Writes it to memory of the host from where it will be copied to `at`.
    pub(super) fn write(
        batch: &BatchMetadata<'_>,
        host: &mut [f32],
        at: Address,
    ) -> DeviceMetadata {
        let BatchMetadata { rows, lengths, cached, documents, kinds, .. } = *batch;
        let floats = DeviceMetadata::len(rows);
        let words: &mut [u32] = bytemuck::cast_slice_mut(&mut host[..floats]);
        let (of_sequences, rest) = words.split_at_mut(2 * rows.sequences);
        let (of_positions, of_kinds) = rest.split_at_mut(2 * rows.count());
        let (to_lengths, to_cached) = of_sequences.split_at_mut(rows.sequences);
        for (to, length) in to_lengths.iter_mut().zip(lengths) {
            *to = *length as u32;
        }
        for (to, cached) in to_cached.iter_mut().zip(cached) {
            *to = *cached as u32;
        }
        for (to, document) in of_positions.chunks_exact_mut(2).zip(documents) {
            to.copy_from_slice(&[document.from, document.to]);
        }
        bytemuck::cast_slice_mut(of_kinds)[..kinds.len()].copy_from_slice(kinds);
        DeviceMetadata { floats, at, rows }
    }

    /// The address of a word.
    fn word(&self, index: usize) -> Address {
        self.at + (index * FLOAT) as Address
    }

    fn check(&self, batch: &BatchView<'_>) {
        let Rows { sequences, positions } = batch.metadata().rows;
        assert_eq!(self.rows, Rows { sequences, positions }, "kernels run on another micro-batch");
    }

    /// Lengths of the sequences of a micro-batch or of its chunk.
    pub(super) fn lengths(&self, batch: &BatchView<'_>) -> Address {
        self.check(batch);
        self.word(batch.first_sequence())
    }

    /// Cached positions of each sequence. Null where the positions before the first row are the
    /// same for all sequences, and are passed as a number.
    pub(super) fn cached(&self, batch: &BatchView<'_>) -> Address {
        self.check(batch);
        if batch.metadata().cached.is_empty() || batch.chunk().is_some() {
            return NULL;
        }
        self.word(self.rows.sequences)
    }

    /// Documents of positions, from the first position of the first sequence on. Null where each
    /// sequence is one document.
    pub(super) fn documents(&self, batch: &BatchView<'_>) -> Address {
        self.check(batch);
        if batch.metadata().documents.is_empty() {
            return NULL;
        }
        let first = batch.first_sequence() * self.rows.positions;
        self.word(2 * self.rows.sequences + 2 * first)
    }

    /// Kinds of tokens of the rows.
    pub(super) fn kinds(&self, batch: &BatchView<'_>) -> Address {
        self.check(batch);
        let begin = self.word(2 * self.rows.sequences + 2 * self.rows.count());
        begin + batch.row_range().start as Address
    }
}
