//! What a step trains on: batches of token sequences with labels.

mod baseline;
mod batches;
mod dataset;
mod jsonl;
mod text;

pub use baseline::{Baseline, baselines};
pub use batches::Batches;
pub use dataset::Dataset;
pub use text::CORPUS;

use std::borrow::Borrow;

/// The sequences of one step, padded to the longest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// (S, T).
    pub(crate) tokens: Vec<u32>,
    /// What each position is to predict; negative: nothing. (S, T).
    pub(crate) targets: Vec<i32>,
    /// Tokens of each sequence.
    pub(crate) lengths: Vec<usize>,
    /// T.
    pub(crate) positions: usize,
    /// Positions with a target, in all sequences.
    pub(crate) labelled: usize,
}

/// One sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// Token ids.
    pub tokens: Vec<u32>,
    /// Labels as in transformers: unshifted, −100 for what is not scored.
    pub labels: Vec<i32>,
}

impl Sequence {
    /// Tokens that each predict the next.
    pub fn plain(tokens: Vec<u32>) -> Sequence {
        let labels = tokens.iter().map(|&token| token as i32).collect();
        Sequence { tokens, labels }
    }

    /// Positions that have something to predict.
    pub fn labelled(&self) -> usize {
        self.labels.iter().skip(1).filter(|&&label| label >= 0).count()
    }
}

impl Batch {
    /// A batch of sequences, each of at least one token and a label for each.
    ///
    /// # Panics
    /// A sequence has none, or not as many labels as tokens.
    pub fn new<S: Borrow<Sequence>>(sequences: &[S]) -> Batch {
        let lengths: Vec<usize> = sequences.iter().map(|one| one.borrow().tokens.len()).collect();
        let positions = lengths.iter().copied().max().unwrap_or(0);
        let mut tokens = vec![0; sequences.len() * positions];
        let mut targets = vec![-100; sequences.len() * positions];
        for (row, sequence) in sequences.iter().map(Borrow::borrow).enumerate() {
            let (tokens_of, labels_of) = (sequence.tokens.len(), sequence.labels.len());
            assert!(
                tokens_of > 0 && tokens_of == labels_of,
                "{tokens_of} tokens, {labels_of} labels"
            );
            let at = row * positions;
            tokens[at..at + sequence.tokens.len()].copy_from_slice(&sequence.tokens);
            let next = &sequence.labels[1..];
            targets[at..at + next.len()].copy_from_slice(next);
        }
        let labelled = targets.iter().filter(|&&target| target >= 0).count();
        Batch { tokens, targets, lengths, positions, labelled }
    }

    /// Sequences.
    pub fn sequences(&self) -> usize {
        self.lengths.len()
    }

    /// Positions with something to predict.
    pub fn labelled(&self) -> usize {
        self.labelled
    }

    /// Input tokens, without padding.
    pub fn token_count(&self) -> usize {
        self.lengths.iter().sum()
    }

    /// Each position's token; `None` for padding.
    pub(crate) fn known(&self) -> impl Iterator<Item = Option<u32>> {
        self.tokens.iter().enumerate().map(|(index, &token)| {
            let is_known = index % self.positions < self.lengths[index / self.positions];
            is_known.then_some(token)
        })
    }
}
