//! Objectives: losses of whole records, such as a chosen and a rejected answer.
//!
//! The host measures the log-probabilities, scores or embeddings of all sequences between the
//! forward and the backward pass of a step. An objective makes of them the loss of each record, and
//! the slopes: the loss's derivatives by each of these. A slope becomes the weight of a row of the
//! head's gradient, or the gradient of a score or of the last hidden states, so a device needs no
//! kernel of its own for an objective.

mod contrastive;
mod metrics;
mod preference;
mod reward;
mod similarity;
mod triplet;
mod units;

use std::ops::Range;

pub use contrastive::Contrastive;
pub(crate) use metrics::MOST_METRICS;
pub use metrics::ObjectiveMetrics;
pub use preference::{Preference, PreferenceKind};
pub use reward::{Binary, Reward};
pub use similarity::{Similarity, SimilarityKind};
pub use triplet::{Distance, Triplet};
pub(crate) use units::{LEAST, add_unscaled, length};

/// What an objective reads of each sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Measures {
    /// The sum of the log-probabilities of its labelled tokens.
    #[default]
    LogProbabilities,
    /// That sum, and the log-probability of each labelled token.
    Tokens,
    /// Its score, of a model that classifies sequences and has one label.
    Scores,
    /// Its embedding, of a model with the task `sentence-embedding`.
    Embeddings,
}

/// What the loss of a record depends on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// The record itself.
    #[default]
    Record,
    /// All records of the step.
    Step,
}

/// A loss of whole records. The sequences of a record follow each other in a
/// [`Batch`](crate::data::Batch).
pub trait Objective: Send + Sync {
    /// Its name for messages, with its parameters.
    fn name(&self) -> String;

    /// The number of sequences of a record.
    fn sequences(&self) -> usize {
        1
    }

    /// What it reads of each sequence.
    fn measures(&self) -> Measures {
        Measures::LogProbabilities
    }

    /// What the loss of a record depends on.
    fn scope(&self) -> Scope {
        Scope::Record
    }

    /// True if it compares each sequence with a reference: see
    /// [`Batch::with_reference`](crate::data::Batch::with_reference).
    fn needs_reference(&self) -> bool {
        false
    }

    /// True if it reads a score of each record: see [`Sequence::score`](crate::data::Sequence).
    fn needs_scores(&self) -> bool {
        false
    }

    /// The names of its [metrics](Objective::metrics): at most 8.
    fn metric_names(&self) -> &'static [&'static str] {
        &[]
    }

    /// Further numbers of each of these records, in the order of their names: (records, names).
    /// Reports of steps and of validations have their means over all records.
    fn metrics(&self, of: &Measurements<'_>) -> Vec<f64> {
        let _ = of;
        Vec::new()
    }

    /// The loss of each of these records. The loss of the step is the sum over all its records, so
    /// a mean divides by [`Measurements::records_of_step`]. Adds to the slopes the derivatives of
    /// that sum.
    ///
    /// # Errors
    /// Why the records have no loss.
    fn loss(&self, of: &Measurements<'_>, slopes: &mut Slopes<'_>) -> Result<Vec<f64>, String>;
}

/// The measured sequences of some records, and facts about the whole step.
#[derive(Clone, Copy, Debug)]
pub struct Measurements<'a> {
    pub(crate) sequences: &'a [SequenceValues],
    /// Of each sequence, if the batch has them.
    pub(crate) reference: &'a [f64],
    /// The labelled tokens of each sequence of the step.
    pub(crate) labelled: &'a [u32],
    /// Sequences of a record.
    pub(crate) each: usize,
    /// Token ids of the step, and the first of each sequence among them, and the end.
    pub(crate) ids: &'a [u32],
    pub(crate) starts: &'a [usize],
    /// The score of the record of each sequence, if the batch has them.
    pub(crate) scores: &'a [f32],
}

/// What is measured of a sequence.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct SequenceValues {
    /// The sum, in the order of tokens.
    pub(crate) log_probability: f64,
    pub(crate) tokens: usize,
    /// With [`Measures::Scores`].
    pub(crate) score: f64,
    /// With [`Measures::Tokens`].
    pub(crate) of_tokens: Vec<f32>,
    /// With [`Measures::Embeddings`].
    pub(crate) embedding: Vec<f32>,
}

impl Measurements<'_> {
    /// The number of these records.
    pub fn records(&self) -> usize {
        self.sequences.len() / self.each
    }

    /// The sequences of one of these records.
    pub fn sequences_of(&self, record: usize) -> Range<usize> {
        record * self.each..(record + 1) * self.each
    }

    /// The number of records of the whole step.
    pub fn records_of_step(&self) -> usize {
        self.labelled.len() / self.each
    }

    /// The labelled tokens of the whole step.
    pub fn tokens_of_step(&self) -> u64 {
        self.labelled.iter().copied().map(u64::from).sum()
    }

    /// The labelled tokens of the whole step in the sequences at this place of their records.
    pub fn tokens_at(&self, place: usize) -> u64 {
        self.labelled.iter().skip(place).step_by(self.each).copied().map(u64::from).sum()
    }

    /// The labelled tokens of a sequence.
    pub fn tokens(&self, sequence: usize) -> usize {
        self.sequences[sequence].tokens
    }

    /// The sum of the log-probabilities of a sequence's labelled tokens.
    pub fn log_probability(&self, sequence: usize) -> f64 {
        self.sequences[sequence].log_probability
    }

    /// The log-probability of each labelled token of a sequence, in order. Empty without
    /// [`Measures::Tokens`].
    pub fn of_tokens(&self, sequence: usize) -> &[f32] {
        &self.sequences[sequence].of_tokens
    }

    /// The score that the model gives a sequence. 0 without [`Measures::Scores`].
    pub fn model_score(&self, sequence: usize) -> f64 {
        self.sequences[sequence].score
    }

    /// The embedding of a sequence. Empty without [`Measures::Embeddings`].
    pub fn embedding(&self, sequence: usize) -> &[f32] {
        &self.sequences[sequence].embedding
    }

    /// The score of a record.
    ///
    /// # Panics
    /// The batch has no scores. A batch of an objective that needs them is checked for them.
    pub fn score(&self, record: usize) -> f32 {
        self.scores[record * self.each]
    }

    /// The token ids of a sequence.
    pub fn token_ids(&self, sequence: usize) -> &[u32] {
        &self.ids[self.starts[sequence]..self.starts[sequence + 1]]
    }

    /// The log-probability of a sequence by the reference.
    ///
    /// # Panics
    /// The batch has no reference. A batch of an objective that needs one is checked for it.
    pub fn reference(&self, sequence: usize) -> f64 {
        self.reference[sequence]
    }
}

/// The derivatives of a loss, by what is measured of each sequence. They begin at 0.
#[derive(Debug)]
pub struct Slopes<'a>(pub(crate) &'a mut [SequenceSlopes]);

/// The derivatives by what is measured of one sequence.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct SequenceSlopes {
    /// By the log-probability of the sequence, or by its score.
    pub(crate) of_sequence: f64,
    /// By the log-probability of each labelled token, beside that of the sequence.
    pub(crate) of_tokens: Vec<f64>,
    /// By each number of its embedding.
    pub(crate) of_embedding: Vec<f32>,
}

impl SequenceSlopes {
    /// Zeros for a sequence of which this was measured.
    pub(crate) fn of(values: &SequenceValues) -> SequenceSlopes {
        SequenceSlopes {
            of_sequence: 0.0,
            of_tokens: vec![0.0; values.of_tokens.len()],
            of_embedding: vec![0.0; values.embedding.len()],
        }
    }

    /// The weight of a labelled token's row: the derivative by its −log p.
    pub(crate) fn weight(&self, token: usize) -> f64 {
        -(self.of_sequence + self.of_tokens.get(token).copied().unwrap_or(0.0))
    }
}

impl Slopes<'_> {
    /// Adds to the derivative by the log-probability of a sequence; with [`Measures::Scores`], by
    /// its score.
    pub fn add(&mut self, sequence: usize, slope: f64) {
        self.0[sequence].of_sequence += slope;
    }

    /// The derivatives by each number of a sequence's embedding. Empty without
    /// [`Measures::Embeddings`].
    pub fn of_embedding(&mut self, sequence: usize) -> &mut [f32] {
        &mut self.0[sequence].of_embedding
    }

    /// The derivatives by the log-probability of each labelled token of a sequence. Empty without
    /// [`Measures::Tokens`].
    pub fn of_tokens(&mut self, sequence: usize) -> &mut [f64] {
        &mut self.0[sequence].of_tokens
    }
}

/// The widths of the embeddings' prefixes of which a loss is the sum.
fn widths(of: &Measurements<'_>, dimensions: &[usize]) -> Result<Vec<usize>, String> {
    let all = if of.records() > 0 { of.embedding(0).len() } else { 0 };
    match dimensions.iter().find(|width| **width > all) {
        _ if dimensions.is_empty() => Ok(vec![all]),
        Some(width) => Err(format!("dimensions have {width}, and embeddings have {all} numbers")),
        None => Ok(dimensions.to_vec()),
    }
}
