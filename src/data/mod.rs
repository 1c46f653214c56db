//! What a step trains on: batches of token sequences with labels, from text, tokens or nothing.

mod baseline;
mod batches;
mod dataset;
mod files;
mod mask;
mod overview;
mod pack;
mod reader;
mod source;
mod spool;
mod vocabulary;

pub use baseline::{Baseline, baselines};
pub use batches::Batches;
pub use dataset::Dataset;
pub use overview::Overview;
pub use vocabulary::Vocabulary;

use std::borrow::Borrow;

use crate::error::Error;
use crate::kernels::Document;
use crate::models::{Head, Model};

/// The project's own source and documentation, one file behind the other.
pub const CORPUS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/corpus.txt"));

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
    /// The document of each position; empty: a sequence is one. (S, T).
    pub(crate) documents: Vec<Document>,
    /// T.
    pub(crate) positions: usize,
    /// Positions with a target, in all sequences.
    pub(crate) labelled: usize,
}

/// One sequence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sequence {
    /// Token ids.
    pub tokens: Vec<u32>,
    /// Labels as in transformers: unshifted, −100 for what is not scored.
    pub labels: Vec<i32>,
    /// Kinds of the tokens (`token_type_ids`); none: all of kind 0.
    pub kinds: Vec<u8>,
    /// Tokens of each of its documents, which do not see each other and each begin at position 0;
    /// none: it is one.
    pub documents: Vec<usize>,
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
        Sequence { tokens, labels, ..Sequence::default() }
    }

    /// Tokens that are masked later.
    fn unmasked(tokens: Vec<u32>, kinds: Vec<u8>) -> Sequence {
        Sequence { tokens, kinds, ..Sequence::default() }
    }

    /// One label for all of it.
    fn whole(tokens: Vec<u32>, label: i32, kinds: Vec<u8>) -> Sequence {
        let mut labels = vec![-100; tokens.len()];
        labels[0] = label;
        Sequence { tokens, labels, kinds, documents: Vec::new() }
    }

    /// Positions that have something to predict: the next token's label, or their own.
    pub fn labelled(&self, predicts: Predicts) -> usize {
        if predicts == Predicts::Value {
            return 1;
        }
        self.learnt(predicts).into_iter().filter(|&is| is).count()
    }

    /// Whether each position's label is scored: what a document begins with nobody predicts.
    pub fn learnt(&self, predicts: Predicts) -> Vec<bool> {
        let mut learnt: Vec<bool> = self.labels.iter().map(|&label| label >= 0).collect();
        if predicts.ahead() == 1 {
            let begins = self.cuts().map(|cut| cut.from as usize).chain([0]);
            begins.for_each(|at| learnt.get_mut(at).into_iter().for_each(|is| *is = false));
        }
        learnt
    }

    /// Its documents, by where they begin and end.
    fn cuts(&self) -> impl Iterator<Item = Document> {
        let mut at = 0;
        self.documents.iter().map(move |&tokens| {
            let from = at as u32;
            at += tokens;
            Document { from, to: at as u32 }
        })
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
        let mut documents = Vec::new();
        let has_documents = sequences.iter().any(|one| !one.borrow().documents.is_empty());
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
            if !has_documents {
                continue;
            }
            let all = Document { from: 0, to: tokens_of as u32 };
            let mut cuts: Vec<Document> = sequence.cuts().collect();
            assert!(cuts.last().is_none_or(|last| last.to == all.to), "documents of all tokens");
            if cuts.is_empty() {
                cuts.push(all);
            }
            for cut in &cuts {
                // Padding is a part of the last.
                let end = if cut.to == all.to { positions } else { cut.to as usize };
                documents.extend(std::iter::repeat_n(*cut, end - cut.from as usize));
                if predicts.ahead() == 1 && cut.to < all.to {
                    targets[at + cut.to as usize - 1] = -100;
                }
            }
        }
        let labelled = match predicts {
            Predicts::Value => sequences.len(),
            _ => targets.iter().filter(|&&target| target >= 0).count(),
        };
        Batch { tokens, kinds, targets, lengths, documents, positions, labelled }
    }

    /// A batch of sequences whose last positions each are to say what comes next.
    pub(crate) fn to_continue<S: AsRef<[u32]>>(sequences: &[S]) -> Batch {
        let plain = |tokens: &S| Sequence::plain(tokens.as_ref().to_vec());
        let mut batch = Batch::of(&sequences.iter().map(plain).collect::<Vec<_>>(), Predicts::Own);
        batch.targets.fill(-100);
        for (row, length) in batch.lengths.iter().enumerate() {
            batch.targets[row * batch.positions + length - 1] = 0;
        }
        batch.labelled = sequences.len();
        batch
    }

    /// Tokens of each document.
    pub(crate) fn document_lengths(&self) -> Vec<usize> {
        if self.documents.is_empty() {
            return self.lengths.clone();
        }
        let begins = self
            .documents
            .iter()
            .enumerate()
            .filter(|(row, document)| row % self.positions == document.from as usize);
        begins.map(|(_, document)| (document.to - document.from) as usize).collect()
    }

    /// Refuses a batch that the model cannot read, or of more than the planned `sequences`, or
    /// longer than the planned `longest` sequence.
    pub(crate) fn check(
        &self,
        model: &Model,
        longest: usize,
        sequences: usize,
    ) -> Result<(), Error> {
        let vocabulary = model.shape.vocabulary;
        let has = self.lengths.len();
        if has == 0 || has > sequences || self.lengths.contains(&0) {
            return Err(Error::bad_batch(format_args!(
                "a batch of {has} sequences: it must have 1 to {sequences} (step.batch), none empty"
            )));
        }
        if self.positions > longest {
            return Err(Error::bad_batch(format_args!(
                "a sequence of {} tokens: the plan was made for at most {longest}",
                self.positions
            )));
        }
        let known = |token: u32| (token as usize) < vocabulary;
        let is_known = |label: u32| match model.shape.head {
            Head::Tokens | Head::Masked => known(label),
            Head::Classes { labels, is_value } => is_value || (label as usize) < labels,
        };
        let is_bad = |target: &&i32| **target >= 0 && !is_known(**target as u32);
        if let Some(token) = self.tokens.iter().find(|token| !known(**token)) {
            return Err(Error::bad_batch(format_args!(
                "token {token} is outside the vocabulary of {vocabulary}"
            )));
        }
        if let Some(label) = self.targets.iter().find(is_bad) {
            return Err(Error::bad_batch(format_args!(
                "label {label} is outside the vocabulary of {vocabulary}"
            )));
        }
        if self.labelled == 0 {
            return Err(Error::bad_batch("no position of the batch has a label"));
        }
        Ok(())
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
