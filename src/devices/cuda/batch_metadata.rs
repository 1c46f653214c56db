//! The metadata of a micro-batch where kernels read it: where sequences begin, cached positions,
//! documents and kinds of tokens.

use l2l_actors::BoxedError;

use super::driver::{Address, Stream};
use super::launches::{FLOAT, NULL, int};
use super::{Cuda, IN_FLIGHT};
use crate::kernels::{BatchMetadata, BatchView, Rows};
use crate::tensor::View;

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

impl Cuda {
    /// Sends a micro-batch's metadata to the device, unless it has the same already. A kernel reads
    /// it from pinned memory: a copy would wait for the blocks on their way.
    pub(super) fn send_metadata(
        &self,
        batch: &BatchMetadata<'_>,
    ) -> Result<DeviceMetadata, BoxedError> {
        let to = self.address(self.metadata);
        let mut current = self.current.lock().expect("nothing panics inside");
        let mut words = Vec::new();
        DeviceMetadata::write(batch, &mut words);
        if words != current.words {
            let place = current.changes % IN_FLIGHT * self.metadata.len();
            // SAFETY: fewer operations are in flight than there are places, so none still reads
            // this one.
            let host = unsafe { self.staging.write(View::floats(place, words.len())) };
            bytemuck::cast_slice_mut(host).copy_from_slice(&words);
            let from = host.as_ptr().cast::<u8>();
            // A place may lie in two pinned parts.
            let last = size_of_val(host) - 1;
            let mapped = self.driver.mapped(from);
            let mapped = mapped.filter(|at| {
                self.driver.mapped(from.wrapping_add(last)) == Some(at + last as Address)
            });
            match mapped {
                Some(from) => {
                    let count = int(words.len());
                    let queue = self.queue();
                    queue.each("copy_words", words.len(), 1, &[&to, &from, &count]);
                    queue.end()?;
                }
                None => self.copy_in(Stream::Compute, to, from, size_of_val(host))?,
            }
            (current.words, current.changes) = (words, current.changes + 1);
        }
        Ok(DeviceMetadata::of(batch, to))
    }
}
