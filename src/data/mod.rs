//! Data: files become sequences of tokens with labels, and sequences become batches.
//!
//! All files are read, checked and tokenized before a run starts (`files`, `reader`, `spool`).
//! After that a sequence depends only on its index ([`Dataset`]), and a batch only on its step
//! ([`Batches`]). So a resumed run has the same data as an uninterrupted one.

mod baseline;
mod batches;
mod chats;
mod check;
mod dataset;
mod files;
mod fingerprint;
mod json_error;
mod known;
mod label_set;
mod listing;
mod mask;
mod order;
mod overview;
mod pack;
mod pairs;
mod reader;
mod record;
mod reference;
mod remarks;
mod scored;
mod source;
mod spool;
mod tables;
mod tally;
mod texts;
mod vocabulary;
mod windows;

pub use baseline::{Baseline, baselines};
pub use batches::Batches;
pub use dataset::Dataset;
pub use overview::Overview;
pub(crate) use reference::References;
pub use scored::sequences_to_score;
pub use texts::sequences_of_texts;
pub use vocabulary::Vocabulary;

use std::borrow::Borrow;
use std::ops::Range;

use crate::kernels::Document;

/// The built-in corpus: the project's own source and documentation, concatenated.
pub const CORPUS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/corpus.txt"));

/// The sequences of one step, joined without padding. In the shapes, S is the number of sequences
/// and R the number of all their tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Batch {
    /// Token ids. (R).
    pub(crate) tokens: Vec<u32>,
    /// Token types (`token_type_ids`). (R).
    pub(crate) kinds: Vec<u8>,
    /// For each position, the label that its prediction is scored by. A position with a negative
    /// label is not scored. (R).
    pub(crate) targets: Vec<i32>,
    /// The index of each sequence's first token, and the number of all tokens. (S + 1).
    pub(crate) starts: Vec<usize>,
    /// The document that each position belongs to. (R). Empty when each sequence is one document.
    pub(crate) documents: Vec<Document>,
    /// With [`Predicts::LabelSet`], the labels of each sequence. (S, L). Otherwise empty.
    pub(crate) label_sets: Vec<i32>,
    /// The number of positions with a label, or of sequences with a set of labels.
    pub(crate) labelled: usize,
    /// The number of positions with a label of each sequence of the step, on all ranks.
    pub(crate) scored: Vec<u32>,
    /// The log-probability of each sequence by a reference, for an objective that needs it; else
    /// empty. (S).
    pub(crate) reference: Vec<f64>,
    /// The score of the record of each sequence, for an objective that needs it; else empty. (S).
    pub(crate) scores: Vec<f32>,
    /// The tokens at the start of each sequence that its embedding leaves out. (S). Empty: none.
    pub(crate) skipped: Vec<u32>,
}

/// One sequence of tokens with its labels.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sequence {
    /// Token ids.
    pub tokens: Vec<u32>,
    /// One label per token, as in transformers: not shifted, and −100 where nothing is scored. With
    /// [`Predicts::LabelSet`], one number per label of the model: the bits of an f32 from 0 to 1.
    pub labels: Vec<i32>,
    /// One token type per token (`token_type_ids`). Empty when all are of type 0.
    pub kinds: Vec<u8>,
    /// The number of tokens of each document, for a packed sequence. Documents do not attend to
    /// each other, and each begins at position 0. Empty when the sequence is one document.
    pub documents: Vec<usize>,
    /// For an objective that compares with a reference: the log-probability of each document by
    /// it. Else empty.
    pub reference: Vec<f64>,
    /// For an objective that compares a record's texts with a score or a label: that number. Of
    /// two answers, the margin of a reward model.
    pub score: Option<f32>,
    /// For a model that makes embeddings: of each document, the tokens at its start that its
    /// embedding leaves out, such as those of a prompt. Empty: none.
    pub skipped: Vec<usize>,
}

/// The kind of a model's predictions. It decides which label a position is scored by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Predicts {
    /// The next token: a position is scored by the next position's label (causal models).
    Next,
    /// A masked token: a position is scored by its own label (masked language models).
    Own,
    /// A class of the sequence: the first position's label.
    Class,
    /// A value of the sequence: the first position's label holds the bits of an f32.
    Value,
    /// Any number of labels of the sequence, each with a number from 0 (no) to 1 (yes).
    LabelSet,
    /// The class of each token: a position is scored by its own label.
    TokenClass,
    /// The embedding of the sequence. No position has a label.
    Embedding,
}

/// The label of a whole sequence.
enum OwnLabel {
    /// A class, or the bits of a value (f32).
    One(i32),
    /// For each label of the model, the bits of a number from 0 to 1.
    Set(Vec<i32>),
}

impl Predicts {
    /// The distance from a position to the position of its label.
    fn label_offset(self) -> usize {
        usize::from(self == Predicts::Next)
    }
}

impl Sequence {
    /// A sequence whose labels are its own tokens, for causal models.
    pub fn plain(tokens: Vec<u32>) -> Sequence {
        let labels = tokens.iter().map(|&token| token as i32).collect();
        Sequence { tokens, labels, ..Sequence::default() }
    }

    /// A sequence without labels. Masks are drawn and labels set each time it is used.
    fn unmasked(tokens: Vec<u32>, kinds: Vec<u8>) -> Sequence {
        Sequence { tokens, kinds, ..Sequence::default() }
    }

    /// A sequence with a single label: a class, or the bits of an f32.
    fn classified(tokens: Vec<u32>, label: i32, kinds: Vec<u8>) -> Sequence {
        let mut labels = vec![-100; tokens.len()];
        labels[0] = label;
        Sequence { tokens, labels, kinds, ..Sequence::default() }
    }

    /// A sequence with this label of its own.
    fn with_label(tokens: Vec<u32>, label: OwnLabel, kinds: Vec<u8>) -> Sequence {
        match label {
            OwnLabel::One(label) => Sequence::classified(tokens, label, kinds),
            OwnLabel::Set(labels) => Sequence { tokens, labels, kinds, ..Sequence::default() },
        }
    }

    /// The number of labels that are scored.
    pub fn labelled(&self, predicts: Predicts) -> usize {
        if matches!(predicts, Predicts::Value | Predicts::LabelSet | Predicts::Embedding) {
            return 1;
        }
        self.scored(predicts).into_iter().filter(|&is| is).count()
    }

    /// For each position, whether its label is scored. The first token of a document is not,
    /// because no position predicts it.
    pub fn scored(&self, predicts: Predicts) -> Vec<bool> {
        let mut scored: Vec<bool> = self.labels.iter().map(|&label| label >= 0).collect();
        if predicts == Predicts::Next {
            let begins = self.document_ranges().map(|document| document.from as usize).chain([0]);
            begins.for_each(|at| scored.get_mut(at).into_iter().for_each(|is| *is = false));
        }
        scored
    }

    /// The first and last position of each document.
    fn document_ranges(&self) -> impl Iterator<Item = Document> {
        let mut at = 0;
        self.documents.iter().map(move |&tokens| {
            let from = at as u32;
            at += tokens;
            Document { from, to: at as u32 }
        })
    }
}

impl Batch {
    /// Some of the batch's sequences. `labelled` and `scored` stay those of the whole batch: losses
    /// and gradients are divided by them.
    pub(crate) fn part(&self, sequences: Range<usize>) -> Batch {
        let rows = self.starts[sequences.start]..self.starts[sequences.end];
        let starts = self.starts[sequences.start..=sequences.end].iter();
        let label_sets = self.label_sets_of(sequences.clone()).to_vec();
        let reference = self.reference.get(sequences.clone()).unwrap_or_default().to_vec();
        let scores = self.scores.get(sequences.clone()).unwrap_or_default().to_vec();
        let skipped = self.skipped.get(sequences).unwrap_or_default().to_vec();
        Batch {
            tokens: self.tokens[rows.clone()].to_vec(),
            kinds: self.kinds[rows.clone()].to_vec(),
            targets: self.targets[rows.clone()].to_vec(),
            starts: starts.map(|start| start - rows.start).collect(),
            documents: self.documents.get(rows).unwrap_or_default().to_vec(),
            label_sets,
            labelled: self.labelled,
            scored: self.scored.clone(),
            reference,
            scores,
            skipped,
        }
    }

    /// What a loss over some of the batch's sequences is divided by. The batch is no part.
    pub(crate) fn labelled_in(&self, sequences: Range<usize>) -> usize {
        let sum = |counts: &[u32]| counts.iter().map(|&count| count as usize).sum::<usize>();
        // Values and sets of labels are not counted by positions: each sequence has one.
        if self.labelled == self.sequences() && self.labelled != sum(&self.scored) {
            return sequences.len();
        }
        sum(&self.scored[sequences])
    }

    /// The label sets of some of the batch's sequences, one behind the other.
    pub(crate) fn label_sets_of(&self, sequences: Range<usize>) -> &[i32] {
        let labels = self.label_sets.len() / self.sequences().max(1);
        &self.label_sets[sequences.start * labels..sequences.end * labels]
    }

    /// A batch for a classifier, of the tokens and the class of each sequence.
    ///
    /// # Panics
    /// A sequence is empty.
    pub fn of_classes(sequences: &[(Vec<u32>, u32)]) -> Batch {
        let classified = |(tokens, class): &(Vec<u32>, u32)| {
            Sequence::classified(tokens.clone(), *class as i32, Vec::new())
        };
        Batch::of(&sequences.iter().map(classified).collect::<Vec<_>>(), Predicts::Class)
    }

    /// A batch for a causal model. Each sequence has at least one token, and one label per token.
    ///
    /// # Panics
    /// A sequence is empty, or its labels or token types (if it has any) are not one per token.
    pub fn new<S: Borrow<Sequence>>(sequences: &[S]) -> Batch {
        Batch::of(sequences, Predicts::Next)
    }

    /// A batch for a model that predicts `predicts`. Each sequence has at least one token, and one
    /// label per token, or one per label of the model.
    ///
    /// # Panics
    /// A sequence is empty, has token types that are not one per token, or has another number of
    /// labels.
    pub fn of<S: Borrow<Sequence>>(sequences: &[S], predicts: Predicts) -> Batch {
        let mut tokens = Vec::new();
        let mut targets = Vec::new();
        let mut kinds = Vec::new();
        let mut starts = vec![0];
        let mut documents = Vec::new();
        let mut label_sets = Vec::new();
        let has_documents = sequences.iter().any(|one| !one.borrow().documents.is_empty());
        for sequence in sequences.iter().map(Borrow::borrow) {
            let length = sequence.tokens.len();
            let labels = sequence.labels.len();
            let has_set = predicts == Predicts::LabelSet;
            let expected = if has_set { sequences[0].borrow().labels.len() } else { length };
            assert!(length > 0 && labels == expected, "{length} tokens, {labels} labels");
            assert!(sequence.kinds.is_empty() || sequence.kinds.len() == length, "kinds");
            let at = tokens.len();
            tokens.extend(&sequence.tokens);
            kinds.extend(&sequence.kinds);
            kinds.resize(at + length, 0);
            let to = if has_set { &mut label_sets } else { &mut targets };
            to.extend(&sequence.labels[predicts.label_offset()..]);
            targets.resize(at + length, -100);
            starts.push(at + length);
            if !has_documents {
                continue;
            }
            let all = Document { from: 0, to: length as u32 };
            let mut ranges: Vec<Document> = sequence.document_ranges().collect();
            assert!(ranges.last().is_none_or(|last| last.to == all.to), "documents of all tokens");
            if ranges.is_empty() {
                ranges.push(all);
            }
            for document in &ranges {
                let tokens = (document.to - document.from) as usize;
                documents.extend(std::iter::repeat_n(*document, tokens));
                // The last token of a document does not predict the first of the next one.
                if predicts == Predicts::Next && document.to < all.to {
                    targets[at + document.to as usize - 1] = -100;
                }
            }
        }
        let labelled = match predicts {
            Predicts::Value | Predicts::LabelSet | Predicts::Embedding => sequences.len(),
            _ => targets.iter().filter(|&&target| target >= 0).count(),
        };
        let count = |rows: &[usize]| {
            let targets = &targets[rows[0]..rows[1]];
            targets.iter().filter(|target| **target >= 0).count() as u32
        };
        let scored = match predicts {
            Predicts::Embedding => vec![1; sequences.len()],
            _ => starts.windows(2).map(count).collect(),
        };
        let reference = Vec::new();
        let scores = Vec::new();
        let skipped = Vec::new();
        Batch {
            tokens,
            kinds,
            targets,
            starts,
            documents,
            label_sets,
            labelled,
            scored,
            reference,
            scores,
            skipped,
        }
    }

    /// A batch for an objective, of records: each document of a sequence is a sequence by itself.
    /// It has a reference if all records have one.
    ///
    /// # Panics
    /// As [`Batch::new`].
    pub fn of_records<S: Borrow<Sequence>>(records: &[S]) -> Batch {
        Batch::records_of(records, Predicts::Next)
    }

    /// A batch for a model that makes embeddings, of records: each document of a sequence is a text
    /// by itself. Labels are not read.
    ///
    /// # Panics
    /// As [`Batch::new`].
    pub fn of_texts<S: Borrow<Sequence>>(records: &[S]) -> Batch {
        Batch::records_of(records, Predicts::Embedding)
    }

    /// A batch for an objective on scores, of records: each document of a sequence is a sequence by
    /// itself. Labels are not read.
    ///
    /// # Panics
    /// As [`Batch::new`].
    pub fn of_scored<S: Borrow<Sequence>>(records: &[S]) -> Batch {
        Batch::records_of(records, Predicts::Value)
    }

    fn records_of<S: Borrow<Sequence>>(records: &[S], predicts: Predicts) -> Batch {
        let mut reference = Vec::new();
        let mut scores = Vec::new();
        let mut skipped = Vec::new();
        let mut sequences = Vec::new();
        for record in records.iter().map(Borrow::borrow) {
            reference.extend(&record.reference);
            let mut documents: Vec<Document> = record.document_ranges().collect();
            if documents.is_empty() && predicts != Predicts::Next {
                documents.push(Document { from: 0, to: record.tokens.len() as u32 });
            }
            scores.extend(documents.iter().filter_map(|_| record.score));
            let of_documents = record.skipped.iter().map(|&tokens| tokens as u32);
            let of_documents = of_documents.chain(std::iter::repeat(0));
            skipped.extend(of_documents.take(documents.len()));
            sequences.extend(documents.into_iter().map(|Document { from, to }| {
                let rows = from as usize..to as usize;
                let tokens = record.tokens[rows.clone()].to_vec();
                let kinds = record.kinds.get(rows.clone()).unwrap_or_default().to_vec();
                match predicts {
                    // The score of a sequence stands in the row of its label.
                    Predicts::Value => Sequence::classified(tokens, 0, kinds),
                    Predicts::Embedding => {
                        Sequence { labels: vec![-100; tokens.len()], tokens, ..Sequence::default() }
                    }
                    _ => {
                        let labels = record.labels[rows].to_vec();
                        Sequence { labels, tokens, ..Sequence::default() }
                    }
                }
            }));
        }
        let mut batch = Batch::of(&sequences, predicts);
        if scores.len() == batch.sequences() {
            batch.scores = scores;
        }
        if skipped.iter().any(|&tokens| tokens > 0) {
            batch.skipped = skipped;
        }
        let is_whole = reference.len() == batch.sequences() && !reference.is_empty();
        if is_whole { batch.with_reference(reference) } else { batch }
    }

    /// The same batch, with the log-probability of each sequence by a reference: see
    /// [`Objective::needs_reference`](crate::objectives::Objective::needs_reference) and
    /// [`Trainer::log_probabilities`](crate::Trainer::log_probabilities).
    ///
    /// # Panics
    /// There is not one number a sequence.
    pub fn with_reference(mut self, log_probabilities: Vec<f64>) -> Batch {
        let has = log_probabilities.len();
        assert_eq!(has, self.sequences(), "a log-probability of each sequence");
        self.reference = log_probabilities;
        self
    }

    /// A batch for generation: only the last position of each sequence is scored, so the head
    /// gives the logits of the next token.
    pub(crate) fn for_generation<S: AsRef<[u32]>>(sequences: &[S]) -> Batch {
        let plain = |tokens: &S| Sequence::plain(tokens.as_ref().to_vec());
        let mut batch = Batch::of(&sequences.iter().map(plain).collect::<Vec<_>>(), Predicts::Own);
        batch.targets.fill(-100);
        for end in &batch.starts[1..] {
            batch.targets[end - 1] = 0;
        }
        batch.labelled = sequences.len();
        batch.scored = vec![1; sequences.len()];
        batch
    }

    /// The number of tokens of each document of the batch.
    pub(crate) fn document_lengths(&self) -> Vec<usize> {
        if self.documents.is_empty() {
            return self.lengths().collect();
        }
        let mut lengths = Vec::new();
        let mut row = 0;
        while let Some(document) = self.documents.get(row) {
            lengths.push((document.to - document.from) as usize);
            row += lengths[lengths.len() - 1];
        }
        lengths
    }

    /// The number of sequences.
    pub fn sequences(&self) -> usize {
        self.starts.len() - 1
    }

    /// The token ids of each sequence.
    pub(crate) fn texts(&self) -> impl Iterator<Item = &[u32]> {
        self.starts.windows(2).map(|ends| &self.tokens[ends[0]..ends[1]])
    }

    /// The number of tokens of a sequence.
    pub(crate) fn length(&self, sequence: usize) -> usize {
        self.starts[sequence + 1] - self.starts[sequence]
    }

    /// The number of tokens of each sequence.
    pub(crate) fn lengths(&self) -> impl Iterator<Item = usize> {
        self.starts.windows(2).map(|ends| ends[1] - ends[0])
    }

    /// The number of tokens of the longest sequence.
    pub fn longest(&self) -> usize {
        self.lengths().max().unwrap_or(0)
    }

    /// The number of positions that have a label.
    pub fn labelled(&self) -> usize {
        self.labelled
    }

    /// The number of input tokens.
    pub fn token_count(&self) -> usize {
        self.tokens.len()
    }
}
