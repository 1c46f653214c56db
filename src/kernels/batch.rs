//! A micro-batch as layers and kernels see it: its sizes, its metadata, and chunks of its
//! sequences.
//!
//! The metadata has one owner. A layer that walks a long sequence chunk by chunk hands on a range
//! of positions, and each device computes from the range which part of the metadata is meant.

use std::ops::Range;

use super::dropout::{Dropout, DropoutKey};
use crate::tensor::View;

/// Sizes of a micro-batch, or of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// B.
    pub sequences: usize,
    /// T.
    pub positions: usize,
}

impl Rows {
    /// R = B · T.
    pub fn count(self) -> usize {
        self.sequences * self.positions
    }
}

/// Where a document begins and ends in its sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Document {
    /// Its first position.
    pub from: u32,
    /// The position behind its last.
    pub to: u32,
}

/// What the tokens of a micro-batch are.
#[derive(Clone, Copy, Debug)]
pub struct BatchMetadata<'a> {
    /// Sizes.
    pub rows: Rows,
    /// Tokens of each sequence; the rest is padding. (B).
    pub lengths: &'a [usize],
    /// The kind of each token. (B, T).
    pub kinds: &'a [u8],
    /// The document of each position. Empty: each sequence is one document. (B, T).
    pub documents: &'a [Document],
    /// Positions of each sequence that are in the KV cache already. Empty: none. (B).
    pub cached: &'a [usize],
    /// What dropout masks are drawn from. `None`: nothing is dropped.
    pub dropout_key: Option<DropoutKey>,
}

/// Positions of one sequence that are walked at once, at most, where no position sees a later one.
/// So workspace does not grow with longer sequences. Whole tiles of attention.
pub const CHUNK_POSITIONS: usize = 2048;

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
}

impl<'a> BatchMetadata<'a> {
    /// All of the micro-batch.
    pub fn view(self) -> BatchView<'a> {
        BatchView { metadata: self, chunk: None }
    }
}

impl<'a> BatchView<'a> {
    /// What the tokens of the whole micro-batch are.
    pub fn metadata(&self) -> &BatchMetadata<'a> {
        &self.metadata
    }

    /// Which chunk this is; `None`: the whole micro-batch.
    pub fn chunk(&self) -> Option<SequenceChunk> {
        self.chunk
    }

    /// A chunk of one sequence.
    ///
    /// # Panics
    /// It lies outside.
    pub fn chunk_of(&self, chunk: SequenceChunk) -> BatchView<'a> {
        let Rows { sequences, positions } = self.metadata.rows;
        let SequenceChunk { sequence, from, to } = chunk;
        let is_inside = sequence < sequences && from <= to && to <= positions;
        assert!(is_inside, "{chunk:?} of {:?}", self.metadata.rows);
        BatchView { metadata: self.metadata, chunk: Some(chunk) }
    }

    /// All rows at once; or, where sequences may be cut and are longer than [`CHUNK_POSITIONS`],
    /// chunk by chunk and sequence by sequence.
    pub fn chunks(&self, may_be_cut: bool) -> Vec<BatchView<'a>> {
        let Rows { sequences, positions } = self.rows();
        if !may_be_cut || positions <= CHUNK_POSITIONS {
            return vec![*self];
        }
        let of_sequence = |sequence: usize| {
            (0..positions).step_by(CHUNK_POSITIONS).map(move |from| {
                let to = positions.min(from + CHUNK_POSITIONS);
                self.chunk_of(SequenceChunk { sequence, from, to })
            })
        };
        (0..sequences).flat_map(of_sequence).collect()
    }

    /// Its sizes.
    pub fn rows(&self) -> Rows {
        match self.chunk {
            Some(SequenceChunk { from, to, .. }) => Rows { sequences: 1, positions: to - from },
            None => self.metadata.rows,
        }
    }

    /// Its rows among those of the micro-batch.
    pub fn row_range(&self) -> Range<usize> {
        let begin = self.first_sequence() * self.metadata.rows.positions + self.first_position();
        begin..begin + self.rows().count()
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

    /// Tokens of each of its sequences, all of them.
    pub fn lengths(&self) -> &'a [usize] {
        let first = self.first_sequence();
        &self.metadata.lengths[first..first + self.rows().sequences]
    }

    /// The kind of each of its tokens.
    pub fn kinds(&self) -> &'a [u8] {
        &self.metadata.kinds[self.row_range()]
    }

    /// The document of a position of one of its sequences, where sequences have several. The
    /// position is counted from the begin of the sequence.
    pub fn document(&self, sequence: usize, position: usize) -> Option<&'a Document> {
        let sequence = self.first_sequence() + sequence;
        self.metadata.documents.get(sequence * self.metadata.rows.positions + position)
    }

    /// Positions of one of its sequences that come before its first row.
    pub fn positions_before(&self, sequence: usize) -> usize {
        let cached = self.metadata.cached.get(self.first_sequence() + sequence);
        cached.copied().unwrap_or(0) + self.first_position()
    }

    /// The same, where it is the same for each of its sequences.
    ///
    /// # Panics
    /// It differs.
    pub fn same_positions_before(&self) -> usize {
        let before = self.positions_before(0);
        let is_same = (1..self.rows().sequences).all(|one| self.positions_before(one) == before);
        assert!(is_same, "positions before: {:?}", self.metadata.cached);
        before
    }

    /// The position of a row in its document.
    pub fn position_in_document(&self, row: usize) -> usize {
        let positions = self.rows().positions;
        let (sequence, at) = (row / positions, row % positions);
        let position = self.positions_before(sequence) + at;
        let document = self.document(sequence, position);
        position - document.map_or(0, |document| document.from as usize)
    }

    /// The dropout of one site of a layer; `None`: nothing is dropped.
    pub fn dropout(&self, probability: f32, layer: u32, site: u32) -> Option<Dropout> {
        let DropoutKey { seed, step, first_sequence } =
            self.metadata.dropout_key.filter(|_| probability > 0.0)?;
        Some(Dropout {
            probability,
            seed,
            step,
            site: layer * 8 + site,
            first_sequence: first_sequence + self.first_sequence() as u32,
            first_position: self.first_position() as u32,
            positions: self.rows().positions,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: Document = Document { from: 0, to: 4 };
    const FIRST: Document = Document { from: 0, to: 3 };
    const SECOND: Document = Document { from: 3, to: 4 };

    fn metadata() -> BatchMetadata<'static> {
        BatchMetadata {
            rows: Rows { sequences: 2, positions: 4 },
            lengths: &[4, 3],
            kinds: &[0, 1, 0, 1, 1, 1, 0, 0],
            documents: &[WHOLE, WHOLE, WHOLE, WHOLE, FIRST, FIRST, FIRST, SECOND],
            cached: &[],
            dropout_key: Some(DropoutKey { seed: 1, step: 2, first_sequence: 5 }),
        }
    }

    #[test]
    fn a_chunk_is_a_range_of_its_micro_batch() {
        let whole = metadata().view();
        let chunk = whole.chunk_of(SequenceChunk { sequence: 1, from: 2, to: 4 });
        assert_eq!(chunk.rows(), Rows { sequences: 1, positions: 2 });
        assert_eq!(chunk.row_range(), 6..8);
        assert_eq!(chunk.lengths(), [3]);
        assert_eq!(chunk.kinds(), [0, 0]);
        assert_eq!(chunk.same_positions_before(), 2);
        assert_eq!(chunk.document(0, 3), Some(&SECOND));
        let positions: Vec<usize> = (0..8).map(|row| whole.position_in_document(row)).collect();
        assert_eq!(positions, [0, 1, 2, 3, 0, 1, 2, 0]);
        assert_eq!([0, 1].map(|row| chunk.position_in_document(row)), [2, 0]);
        let dropout = chunk.dropout(0.5, 3, 1).expect("it drops");
        let first = (dropout.first_sequence, dropout.first_position, dropout.positions);
        assert_eq!((first, dropout.site), ((6, 2, 2), 25));
        assert_eq!(whole.dropout(0.0, 3, 1), None);
    }

    #[test]
    fn long_sequences_are_cut_and_short_ones_are_not() {
        let rows = Rows { sequences: 2, positions: CHUNK_POSITIONS + 3 };
        let metadata = BatchMetadata { rows, documents: &[], ..metadata() };
        assert_eq!(metadata.view().chunks(false).len(), 1);
        let chunks = metadata.view().chunks(true);
        let ranges: Vec<_> = chunks.iter().map(BatchView::row_range).collect();
        let (first, second) = (CHUNK_POSITIONS, CHUNK_POSITIONS + 3);
        let expected =
            [0..first, first..second, second..second + first, second + first..2 * second];
        assert_eq!(ranges, expected);
    }

    #[test]
    #[should_panic(expected = "positions before")]
    fn cached_positions_that_differ_are_not_the_same() {
        let metadata = BatchMetadata { cached: &[1, 2], documents: &[], ..metadata() };
        metadata.view().same_positions_before();
    }
}
