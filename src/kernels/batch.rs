//! What kernels and layers are told of a micro-batch: its sizes, lengths, documents, and dropout's key.

use std::ops::Range;

use crate::tensor::View;

/// Draws a layer's dropout masks: the same numbers whenever they are asked for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    /// Probability of zero, below 1.
    pub probability: f32,
    /// The run's seed.
    pub seed: u64,
    /// The step.
    pub step: u64,
    /// The layer, and which of its dropouts.
    pub site: u32,
    /// The index in the step of the micro-batch's first sequence.
    pub first_sequence: u32,
    /// The position in its sequence of the micro-batch's first row.
    pub first_position: u32,
}

/// Sizes of one micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// B.
    pub sequences: usize,
    /// T.
    pub positions: usize,
}

impl Rows {
    /// R.
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

/// Which position of its document each row of a micro-batch is.
#[derive(Clone, Copy, Debug)]
pub struct Places<'a> {
    /// B and T.
    pub rows: Rows,
    /// The document of each position, those that came before included; empty: a sequence is one.
    /// (B, past + T).
    pub documents: &'a [Document],
    /// Positions of each sequence that came before; empty: none. (B).
    pub past: &'a [usize],
}

impl Places<'_> {
    /// The position of a row.
    pub fn of(&self, row: usize) -> usize {
        let (sequence, at) = (row / self.rows.positions, row % self.rows.positions);
        let past = self.past.get(sequence).copied().unwrap_or(0);
        let place = sequence * (past + self.rows.positions) + past + at;
        let from = self.documents.get(place).map_or(0, |document| document.from as usize);
        past + at - from
    }

    /// True when a row's position is its place in its sequence.
    pub fn is_plain(&self) -> bool {
        self.documents.is_empty() && self.past.is_empty()
    }
}

/// What a micro-batch is to a layer.
#[derive(Clone, Copy, Debug)]
pub struct BatchView<'a> {
    /// Its sizes.
    pub rows: Rows,
    /// Tokens of each sequence.
    pub lengths: &'a [usize],
    /// Kinds of its tokens. (B, T).
    pub kinds: &'a [u8],
    /// As [`Places::documents`].
    pub documents: &'a [Document],
    /// As [`Places::past`].
    pub past: &'a [usize],
    /// What dropout masks are drawn from; `None`: nothing is dropped.
    pub key: Option<DropoutKey>,
}

/// Positions of a sequence that are walked at once, at most, where none sees those behind it. A
/// longer sequence takes no more workspace than this. Whole tiles of attention.
pub const CHUNK_POSITIONS: usize = 2048;

/// Rows of a micro-batch that are walked at once: all of them, or positions of one sequence.
#[derive(Clone, Debug)]
pub struct SequenceChunk {
    /// The rows.
    pub rows: Range<usize>,
    /// Of which sequence, and how many of its positions came before; `None`: they are all rows.
    pub part_of: Option<(usize, [usize; 1])>,
}

impl SequenceChunk {
    /// Its rows of a (R, `width`) tensor.
    pub fn of(&self, view: View, width: usize) -> View {
        view.part(self.rows.start * width..self.rows.end * width)
    }

    /// What the micro-batch is to it.
    pub fn batch<'a>(&'a self, whole: &BatchView<'a>) -> BatchView<'a> {
        let Some((sequence, ref past)) = self.part_of else { return *whole };
        let BatchView { rows: Rows { positions, .. }, lengths, kinds, documents, .. } = *whole;
        let to = past[0] + self.rows.len();
        let documents = documents.get(sequence * positions..sequence * positions + to);
        let key = whole.key.map(|key| DropoutKey {
            first_sequence: key.first_sequence + sequence as u32,
            first_position: past[0] as u32,
            ..key
        });
        BatchView {
            rows: Rows { sequences: 1, positions: self.rows.len() },
            lengths: &lengths[sequence..=sequence],
            kinds: &kinds[self.rows.clone()],
            documents: documents.unwrap_or_default(),
            past,
            key,
        }
    }
}

/// What dropout masks are drawn from, but for the site.
#[derive(Clone, Copy, Debug)]
pub struct DropoutKey {
    /// The run's seed.
    pub seed: u64,
    /// The step.
    pub step: u64,
    /// The index in the step of the micro-batch's first sequence.
    pub first_sequence: u32,
    /// The position in its sequence of the micro-batch's first row.
    pub first_position: u32,
}

impl<'a> BatchView<'a> {
    /// Its rows, cut where sequences are longer than a [`CHUNK_POSITIONS`], and may be cut.
    pub fn chunks(&self, may_be_cut: bool) -> Vec<SequenceChunk> {
        let Rows { sequences, positions } = self.rows;
        if !may_be_cut || positions <= CHUNK_POSITIONS {
            return vec![SequenceChunk { rows: 0..self.rows.count(), part_of: None }];
        }
        let pasts = || (0..positions).step_by(CHUNK_POSITIONS);
        let of_sequence = |sequence: usize| {
            pasts().map(move |past| SequenceChunk {
                rows: sequence * positions + past
                    ..sequence * positions + positions.min(past + CHUNK_POSITIONS),
                part_of: Some((sequence, [past])),
            })
        };
        (0..sequences).flat_map(of_sequence).collect()
    }

    /// Which position each row is.
    pub fn places(&self) -> Places<'a> {
        Places { rows: self.rows, documents: self.documents, past: self.past }
    }

    /// The dropout of one site of a layer, if it drops anything.
    pub fn dropout(&self, probability: f32, layer: u32, site: u32) -> Option<Dropout> {
        let DropoutKey { seed, step, first_sequence, first_position } =
            self.key.filter(|_| probability > 0.0)?;
        let site = layer * 8 + site;
        Some(Dropout { probability, seed, step, site, first_sequence, first_position })
    }
}
