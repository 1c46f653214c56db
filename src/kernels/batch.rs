//! A micro-batch as layers and kernels see it: the rows of its sequences, one sequence behind the
//! other, their metadata, and chunks of a sequence.
//!
//! The metadata has one owner. A layer that walks a long sequence chunk by chunk passes a range of
//! positions to the kernels, and each device computes from it which part of the metadata to read.

use std::ops::Range;

use super::dropout::{Dropout, DropoutKey, MaskRows};
use crate::random;
use crate::tensor::View;

/// Separates the random numbers of embedding noise from those of masks.
const NOISE: u64 = 0x4e45_4654;

/// Sizes of the largest micro-batch that a buffer has room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// B.
    pub sequences: usize,
    /// T: rows of the longest sequence.
    pub positions: usize,
}

impl Rows {
    /// The number of rows if all sequences are as long as the longest.
    pub fn count(self) -> usize {
        self.sequences * self.positions
    }

    /// The first row of each sequence if all are as long as the longest; then the count of rows.
    pub fn starts(self) -> Vec<usize> {
        (0..=self.sequences).map(|sequence| sequence * self.positions).collect()
    }
}

/// The range of a document in its sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Document {
    /// The first position of the document.
    pub from: u32,
    /// The position behind its last.
    pub to: u32,
}

/// The metadata of a micro-batch's tokens.
///
/// Legend: B sequences, R rows. A row is a token: the rows of a sequence follow those of the one
/// before it, without padding.
#[derive(Clone, Copy, Debug)]
pub struct BatchMetadata<'a> {
    /// The first row of each sequence, and the row behind the last. The first number need not be 0:
    /// it is not where this is a part of a larger batch. (B + 1).
    pub starts: &'a [usize],
    /// The kind of each token. (R).
    pub kinds: &'a [u8],
    /// The document of each position. Empty: each sequence is one document. (R).
    pub documents: &'a [Document],
    /// Positions of each sequence that are in the KV cache already. Empty: none. (B).
    pub cached: &'a [usize],
    /// The key that dropout masks are drawn from. `None`: nothing is dropped.
    pub dropout_key: Option<DropoutKey>,
}

/// Some positions of one sequence of a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceChunk {
    /// The sequence in the micro-batch.
    pub sequence: usize,
    /// The first position.
    pub from: usize,
    /// The position behind the last.
    pub to: usize,
}

/// A micro-batch, or a chunk of one of its sequences.
#[derive(Clone, Copy, Debug)]
pub struct BatchView<'a> {
    metadata: BatchMetadata<'a>,
    chunk: Option<SequenceChunk>,
    of_reference: bool,
}

impl<'a> BatchMetadata<'a> {
    /// Sequences of one document each, of which nothing is cached and nothing dropped.
    pub const fn plain(starts: &'a [usize]) -> BatchMetadata<'a> {
        BatchMetadata { starts, kinds: &[], documents: &[], cached: &[], dropout_key: None }
    }

    /// All of the micro-batch.
    pub const fn view(self) -> BatchView<'a> {
        BatchView { metadata: self, chunk: None, of_reference: false }
    }

    /// B.
    pub fn sequences(&self) -> usize {
        self.starts.len() - 1
    }

    /// R.
    pub fn rows(&self) -> usize {
        self.starts[self.sequences()] - self.starts[0]
    }

    /// The rows of one sequence.
    pub fn sequence(&self, index: usize) -> Range<usize> {
        let [first, from, to] = [0, index, index + 1].map(|at| self.starts[at]);
        from - first..to - first
    }

    /// T: rows of the longest sequence.
    pub fn longest(&self) -> usize {
        (0..self.sequences()).map(|index| self.sequence(index).len()).max().unwrap_or(0)
    }
}

impl<'a> BatchView<'a> {
    /// The metadata of the whole micro-batch.
    pub fn metadata(&self) -> &BatchMetadata<'a> {
        &self.metadata
    }

    /// The chunk that this is; `None`: the whole micro-batch.
    pub fn chunk(&self) -> Option<SequenceChunk> {
        self.chunk
    }

    /// The same rows for the reference of an objective: without adapters, and nothing is dropped.
    #[must_use]
    pub(crate) fn of_reference(self) -> BatchView<'a> {
        let metadata = BatchMetadata { dropout_key: None, ..self.metadata };
        BatchView { metadata, of_reference: true, ..self }
    }

    /// True if adapters add to products; false for the reference of an objective.
    pub(crate) fn has_adapters(&self) -> bool {
        !self.of_reference
    }

    /// A chunk of one sequence.
    ///
    /// # Panics
    /// It lies outside.
    pub fn chunk_of(&self, chunk: SequenceChunk) -> BatchView<'a> {
        let SequenceChunk { sequence, from, to } = chunk;
        let of_sequence = self.metadata.sequence(sequence).len();
        assert!(from <= to && to <= of_sequence, "{chunk:?} of {of_sequence} rows");
        BatchView { chunk: Some(chunk), ..*self }
    }

    /// The whole micro-batch, or, if a sequence is longer than `most` positions, chunks of at most
    /// `most` positions, sequence by sequence. `None`: sequences may not be cut.
    ///
    /// # Panics
    /// `most` is 0.
    pub fn chunks(&self, most: Option<usize>) -> Vec<BatchView<'a>> {
        let Some(most) = most.filter(|&most| self.longest() > most) else { return vec![*self] };
        let of_sequence = |sequence: usize| {
            let positions = self.metadata.sequence(sequence).len();
            (0..positions).step_by(most).map(move |from| {
                let to = positions.min(from + most);
                self.chunk_of(SequenceChunk { sequence, from, to })
            })
        };
        (0..self.metadata.sequences()).flat_map(of_sequence).collect()
    }

    /// B: the number of sequences; 1 for a chunk.
    pub fn sequences(&self) -> usize {
        self.chunk.map_or(self.metadata.sequences(), |_| 1)
    }

    /// R.
    pub fn rows(&self) -> usize {
        self.chunk.map_or(self.metadata.rows(), |chunk| chunk.to - chunk.from)
    }

    /// The rows of one of its sequences.
    pub fn sequence(&self, index: usize) -> Range<usize> {
        match self.chunk {
            Some(chunk) => 0..chunk.to - chunk.from,
            None => self.metadata.sequence(index),
        }
    }

    /// T: rows of its longest sequence.
    pub fn longest(&self) -> usize {
        self.chunk.map_or_else(|| self.metadata.longest(), |chunk| chunk.to - chunk.from)
    }

    /// Its rows, as the micro-batch numbers them.
    pub fn row_range(&self) -> Range<usize> {
        match self.chunk {
            Some(SequenceChunk { sequence, from, to }) => {
                let first = self.metadata.sequence(sequence).start;
                first + from..first + to
            }
            None => 0..self.metadata.rows(),
        }
    }

    /// Its rows of a tensor of the whole micro-batch. (R, any).
    pub fn rows_of(&self, view: View) -> View {
        view.row_range(self.row_range())
    }

    /// Its first sequence in the micro-batch.
    pub fn first_sequence(&self) -> usize {
        self.chunk.map_or(0, |chunk| chunk.sequence)
    }

    /// Its first position in each of its sequences.
    pub fn first_position(&self) -> usize {
        self.chunk.map_or(0, |chunk| chunk.from)
    }

    /// The kind of each of its tokens.
    pub fn kinds(&self) -> &'a [u8] {
        &self.metadata.kinds[self.row_range()]
    }

    /// The document of a position of one of its sequences, where sequences have several. The
    /// position is counted from the begin of the sequence.
    pub fn document(&self, sequence: usize, position: usize) -> Option<&'a Document> {
        let first = self.metadata.sequence(self.first_sequence() + sequence).start;
        self.metadata.documents.get(first + position)
    }

    /// Positions of one of its sequences that come before its first row.
    pub fn positions_before(&self, sequence: usize) -> usize {
        let cached = self.metadata.cached.get(self.first_sequence() + sequence);
        cached.copied().unwrap_or(0) + self.first_position()
    }

    /// Positions before the first row, if all sequences have the same number of them.
    ///
    /// # Panics
    /// They differ.
    pub fn same_positions_before(&self) -> usize {
        let before = self.positions_before(0);
        let is_same = (1..self.sequences()).all(|one| self.positions_before(one) == before);
        assert!(is_same, "positions before: {:?}", self.metadata.cached);
        before
    }

    /// The sequence of a row, and the row's index in that sequence.
    pub fn place(&self, row: usize) -> (usize, usize) {
        if self.chunk.is_some() {
            return (0, row);
        }
        let starts = self.metadata.starts;
        let sequence = starts.partition_point(|start| start - starts[0] <= row) - 1;
        (sequence, row - self.sequence(sequence).start)
    }

    /// The position of a row in its document.
    pub fn position_in_document(&self, row: usize) -> usize {
        let (sequence, at) = self.place(row);
        let position = self.positions_before(sequence) + at;
        let document = self.document(sequence, position);
        position - document.map_or(0, |document| document.from as usize)
    }

    /// The lengths that rotary frequencies follow. While texts are generated, each sequence has a
    /// length of its own, as if it were alone. Else there is one for all sequences of the
    /// micro-batch, also for a chunk: that of its longest document, as in transformers.
    pub(crate) fn rotary_lengths(&self) -> Vec<usize> {
        let BatchMetadata { documents, cached, .. } = self.metadata;
        let of_sequence = |index: usize| {
            cached.get(index).copied().unwrap_or(0) + self.metadata.sequence(index).len()
        };
        if !cached.is_empty() {
            let first = self.first_sequence();
            return (first..first + self.sequences()).map(of_sequence).collect();
        }
        let of_document = |document: &Document| (document.to - document.from) as usize;
        let longest = documents.iter().map(of_document).max();
        vec![longest.unwrap_or_else(|| self.metadata.longest())]
    }

    /// True if the micro-batch is for training.
    pub fn trains(&self) -> bool {
        self.metadata.dropout_key.is_some()
    }

    /// The random key and the largest magnitude of the noise that NEFTune adds to a row.
    ///
    /// # Panics
    /// The batch is not for training.
    pub(crate) fn noise(&self, row: usize, alpha: f64, channels: usize) -> (u64, f32) {
        let DropoutKey { seed, step, first_sequence } =
            self.metadata.dropout_key.expect("noise is for training");
        let (sequence, position) = self.place(row);
        let length = self.metadata.starts[sequence + 1] - self.metadata.starts[sequence];
        let key = random::keyed(seed ^ NOISE, step);
        let key = random::keyed(key, u64::from(first_sequence) + sequence as u64);
        let most = alpha / ((length * channels) as f64).sqrt();
        (random::keyed(key, position as u64), most as f32)
    }

    /// The dropout of one site of a layer; `None`: nothing is dropped.
    pub fn dropout(&self, probability: f32, layer: u32, site: u32) -> Option<Dropout<'a>> {
        let DropoutKey { seed, step, first_sequence } =
            self.metadata.dropout_key.filter(|_| probability > 0.0)?;
        Some(Dropout {
            probability,
            seed,
            step,
            site: layer * 8 + site,
            first_sequence: first_sequence + self.first_sequence() as u32,
            first_position: self.first_position() as u32,
            rows: MaskRows::Positions(*self),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: Document = Document { from: 0, to: 4 };
    const FIRST: Document = Document { from: 0, to: 2 };
    const SECOND: Document = Document { from: 2, to: 3 };

    fn metadata() -> BatchMetadata<'static> {
        BatchMetadata {
            // A part of a larger batch, with three rows before it.
            starts: &[3, 7, 10],
            kinds: &[0, 1, 0, 1, 1, 1, 0],
            documents: &[WHOLE, WHOLE, WHOLE, WHOLE, FIRST, FIRST, SECOND],
            cached: &[],
            dropout_key: Some(DropoutKey { seed: 1, step: 2, first_sequence: 5 }),
        }
    }

    #[test]
    fn a_chunk_is_a_range_of_its_micro_batch() {
        let whole = metadata().view();
        assert_eq!((whole.sequences(), whole.rows(), whole.longest()), (2, 7, 4));
        assert_eq!([whole.sequence(0), whole.sequence(1)], [0..4, 4..7]);
        assert_eq!([0, 3, 4, 6].map(|row| whole.place(row)), [(0, 0), (0, 3), (1, 0), (1, 2)]);
        let chunk = whole.chunk_of(SequenceChunk { sequence: 1, from: 1, to: 3 });
        assert_eq!((chunk.sequences(), chunk.rows(), chunk.longest()), (1, 2, 2));
        assert_eq!((chunk.sequence(0), chunk.row_range()), (0..2, 5..7));
        assert_eq!(chunk.kinds(), [1, 0]);
        assert_eq!(chunk.same_positions_before(), 1);
        assert_eq!(chunk.place(1), (0, 1));
        assert_eq!(chunk.document(0, 2), Some(&SECOND));
        let positions: Vec<usize> = (0..7).map(|row| whole.position_in_document(row)).collect();
        assert_eq!(positions, [0, 1, 2, 3, 0, 1, 0]);
        assert_eq!([0, 1].map(|row| chunk.position_in_document(row)), [1, 0]);
        let dropout = chunk.dropout(0.5, 3, 1).expect("it drops");
        let first = (dropout.first_sequence, dropout.first_position, dropout.site);
        assert_eq!((first, dropout.place(1)), ((6, 1, 25), (0, 1)));
        assert!(whole.dropout(0.0, 3, 1).is_none());
    }

    #[test]
    fn rotary_lengths_are_of_documents_or_of_generated_texts() {
        let chunk = SequenceChunk { sequence: 1, from: 1, to: 3 };
        assert_eq!(metadata().view().rotary_lengths(), [4]);
        assert_eq!(metadata().view().chunk_of(chunk).rotary_lengths(), [4]);
        let plain = BatchMetadata { documents: &[], starts: &[3, 5, 10], ..metadata() };
        assert_eq!(plain.view().rotary_lengths(), [5]);
        let generated = BatchMetadata { cached: &[7, 0], ..plain };
        assert_eq!(generated.view().rotary_lengths(), [9, 5]);
        assert_eq!(generated.view().chunk_of(chunk).rotary_lengths(), [5]);
    }

    #[test]
    fn long_sequences_are_cut_and_short_ones_are_not() {
        const MOST: usize = 128;
        let starts = [0, 2, MOST + 5];
        let metadata = BatchMetadata { starts: &starts, documents: &[], ..metadata() };
        assert_eq!(metadata.view().chunks(None).len(), 1);
        let chunks = metadata.view().chunks(Some(MOST));
        let ranges: Vec<_> = chunks.iter().map(BatchView::row_range).collect();
        assert_eq!(ranges, [0..2, 2..2 + MOST, 2 + MOST..MOST + 5]);
        let short = BatchMetadata { starts: &[0, MOST, 2 * MOST], ..metadata };
        assert_eq!(short.view().chunks(Some(MOST)).len(), 1);
    }

    #[test]
    #[should_panic(expected = "positions before")]
    fn cached_positions_that_differ_are_not_the_same() {
        let metadata = BatchMetadata { cached: &[1, 2], documents: &[], ..metadata() };
        metadata.view().same_positions_before();
    }
}
