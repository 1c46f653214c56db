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
use std::io::{self, Read};

/// Takes what a reader has, piece by piece.
fn each_bytes(from: &mut (impl Read + ?Sized), mut take: impl FnMut(&[u8])) -> io::Result<()> {
    let mut piece = vec![0; 1 << 16];
    loop {
        match from.read(&mut piece)? {
            0 => return Ok(()),
            bytes => take(&piece[..bytes]),
        }
    }
}

/// The sequences of one step, padded to the longest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// (S, T).
    pub(crate) tokens: Vec<u32>,
    /// Kinds of tokens. (S, T).
    pub(crate) kinds: Vec<u8>,
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
    /// Kinds of the tokens (`token_type_ids`); none: all of kind 0.
    pub kinds: Vec<u8>,
}

/// Which label a position is scored by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Predicts {
    /// The next position's, as causal models are trained.
    Next,
    /// Its own, as masked tokens are.
    Own,
    /// The first position's, a class of the sequence.
    Class,
    /// The first position's, the bits of a value of the sequence (f32).
    Value,
}

impl Predicts {
    fn ahead(self) -> usize {
        match self {
            Predicts::Next => 1,
            Predicts::Own | Predicts::Class | Predicts::Value => 0,
        }
    }
}

impl Sequence {
    /// Tokens that each predict the next.
    pub fn plain(tokens: Vec<u32>) -> Sequence {
        let labels = tokens.iter().map(|&token| token as i32).collect();
        Sequence { tokens, labels, kinds: Vec::new() }
    }

    /// One label for all of it.
    fn whole(tokens: Vec<u32>, label: i32, kinds: Vec<u8>) -> Sequence {
        let mut labels = vec![-100; tokens.len()];
        labels[0] = label;
        Sequence { tokens, labels, kinds }
    }

    /// Positions that have something to predict: the next token's label, or their own.
    pub fn labelled(&self, predicts: Predicts) -> usize {
        if predicts == Predicts::Value {
            return 1;
        }
        let labels = &self.labels[predicts.ahead().min(self.labels.len())..];
        labels.iter().filter(|&&label| label >= 0).count()
    }
}

impl Batch {
    /// A batch of sequences of which each has one class.
    ///
    /// # Panics
    /// A sequence is empty.
    pub fn of_classes(sequences: &[(Vec<u32>, u32)]) -> Batch {
        let whole = |(tokens, class): &(Vec<u32>, u32)| {
            Sequence::whole(tokens.clone(), *class as i32, Vec::new())
        };
        Batch::of(&sequences.iter().map(whole).collect::<Vec<_>>(), Predicts::Class)
    }

    /// A batch of sequences for a causal model, each of at least one token and a label for each.
    ///
    /// # Panics
    /// A sequence has none, or not as many labels (or kinds, if it has any) as tokens.
    pub fn new<S: Borrow<Sequence>>(sequences: &[S]) -> Batch {
        Batch::of(sequences, Predicts::Next)
    }

    /// A batch of sequences, each of at least one token and a label for each.
    ///
    /// # Panics
    /// As [`new`](Batch::new).
    pub fn of<S: Borrow<Sequence>>(sequences: &[S], predicts: Predicts) -> Batch {
        let lengths: Vec<usize> = sequences.iter().map(|one| one.borrow().tokens.len()).collect();
        let positions = lengths.iter().copied().max().unwrap_or(0);
        let mut tokens = vec![0; sequences.len() * positions];
        let mut targets = vec![-100; sequences.len() * positions];
        let mut kinds = vec![0; sequences.len() * positions];
        for (row, sequence) in sequences.iter().map(Borrow::borrow).enumerate() {
            let (tokens_of, labels_of) = (sequence.tokens.len(), sequence.labels.len());
            assert!(
                tokens_of > 0 && tokens_of == labels_of,
                "{tokens_of} tokens, {labels_of} labels"
            );
            let at = row * positions;
            tokens[at..at + sequence.tokens.len()].copy_from_slice(&sequence.tokens);
            assert!(sequence.kinds.is_empty() || sequence.kinds.len() == tokens_of, "kinds");
            kinds[at..at + sequence.kinds.len()].copy_from_slice(&sequence.kinds);
            let next = &sequence.labels[predicts.ahead()..];
            targets[at..at + next.len()].copy_from_slice(next);
        }
        let labelled = match predicts {
            Predicts::Value => sequences.len(),
            _ => targets.iter().filter(|&&target| target >= 0).count(),
        };
        Batch { tokens, kinds, targets, lengths, positions, labelled }
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
