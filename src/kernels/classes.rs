//! Classification heads: the row that is pooled from each sequence, and the loss of each sequence
//! or of each token.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::batch::BatchView;
use super::cross_entropy::STATISTICS;
use super::loss::Smoothing;
use super::operation::{KernelOperation, Views};
use crate::tensor::{Dtype, View};

/// The rows of a sequence that its scores are computed from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// The first.
    First,
    /// The last.
    Last,
    /// All: their mean.
    Mean,
}

impl Pooling {
    /// The pooled rows of a sequence, whose rows are `rows`.
    pub fn rows(self, rows: Range<usize>) -> Range<usize> {
        match self {
            Pooling::First => rows.start..rows.start + 1,
            Pooling::Last => rows.end - 1..rows.end,
            Pooling::Mean => rows,
        }
    }
}

/// The units that have a label and scores each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Samples {
    /// Whole sequences. Label and loss are in the statistics of the first position.
    Sequences,
    /// Tokens.
    Tokens,
}

impl Samples {
    /// The number of samples in a batch.
    pub fn of(self, batch: &BatchView<'_>) -> usize {
        match self {
            Samples::Sequences => batch.sequences(),
            Samples::Tokens => batch.rows(),
        }
    }

    /// The row of each sample that has its label and its loss.
    pub fn rows<'b>(self, batch: &'b BatchView<'_>) -> impl Iterator<Item = usize> + 'b {
        (0..self.of(batch)).map(move |sample| match self {
            Samples::Sequences => batch.sequence(sample).start,
            Samples::Tokens => sample,
        })
    }
}

/// The labels of a sample, and the loss of its scores: transformers' `problem_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ProblemType {
    /// One of the classes: cross entropy.
    SingleLabelClassification,
    /// One value: the squared error of the one score.
    Regression,
    /// Any number of the labels, each by itself: the mean over all labels of the binary cross
    /// entropy of the score's sigmoid.
    MultiLabelClassification,
}

impl ProblemType {
    const ALL: [ProblemType; 3] = [
        ProblemType::SingleLabelClassification,
        ProblemType::Regression,
        ProblemType::MultiLabelClassification,
    ];

    /// The usual problem of a head with this number of scores.
    pub fn of_labels(labels: usize) -> ProblemType {
        match labels {
            1 => ProblemType::Regression,
            _ => ProblemType::SingleLabelClassification,
        }
    }

    /// The problem of this name.
    pub fn named(name: &str) -> Option<ProblemType> {
        ProblemType::ALL.into_iter().find(|problem| problem.name() == name)
    }

    /// Whether a head with this number of scores can have it.
    pub fn fits(self, labels: usize) -> bool {
        self == ProblemType::MultiLabelClassification || self == ProblemType::of_labels(labels)
    }

    /// The name in `config.json` and in config files.
    pub fn name(self) -> &'static str {
        match self {
            ProblemType::SingleLabelClassification => "single_label_classification",
            ProblemType::Regression => "regression",
            ProblemType::MultiLabelClassification => "multi_label_classification",
        }
    }
}

/// y = one row of each sequence of x.
#[derive(Clone, Copy, Debug)]
pub struct PooledRows<'a> {
    /// Output. (B, C).
    pub y: View,
    /// Input. (R, C).
    pub x: View,
    /// The row that is pooled.
    pub pool: Pooling,
    /// The sequences.
    pub batch: BatchView<'a>,
}

/// dx = dy in one row of each sequence, and 0 in all others.
#[derive(Clone, Copy, Debug)]
pub struct PooledRowsBackward<'a> {
    /// (R, C).
    pub dx: View,
    /// (B, C).
    pub dy: View,
    /// The row that is pooled.
    pub pool: Pooling,
    /// The sequences.
    pub batch: BatchView<'a>,
}

/// Computes the loss of each of the N samples from the label in its statistics, and writes the loss
/// there. With several labels, which only sequences have, the statistics are (B, 1 + L): the loss,
/// then a number from 0 to 1 for each label. Otherwise they are (R, 4).
#[derive(Clone, Copy, Debug)]
pub struct ClassLoss<'a> {
    /// Output: floats. (R, 4) or (B, 1 + L).
    pub out: View,
    /// Floats. (R, 4) or (B, 1 + L).
    pub statistics: View,
    /// (N, L).
    pub scores: View,
    /// The units that have a label.
    pub samples: Samples,
    /// The labels of a sample, and its loss.
    pub problem: ProblemType,
    /// Label smoothing.
    pub smoothing: Smoothing,
    /// True: an objective reads the one score, which is written in the place of the loss.
    pub weighed: bool,
    /// The sequences.
    pub batch: BatchView<'a>,
}

/// dscores = scale · the loss's gradient.
#[derive(Clone, Copy, Debug)]
pub struct ClassLossBackward<'a> {
    /// (N, L).
    pub dscores: View,
    /// (N, L).
    pub scores: View,
    /// Floats. (R, 4) or (B, 1 + L).
    pub statistics: View,
    /// A factor.
    pub scale: f32,
    /// As in [`ClassLoss`].
    pub samples: Samples,
    /// As in [`ClassLoss`].
    pub problem: ProblemType,
    /// As in [`ClassLoss`].
    pub smoothing: Smoothing,
    /// True: the statistics are weighed. Their third float is an objective's gradient by the one
    /// score, in the place of the loss's.
    pub weighed: bool,
    /// The sequences.
    pub batch: BatchView<'a>,
}

impl KernelOperation for PooledRows<'_> {
    fn views(&self, views: &mut Views<'_>) {
        let PooledRows { y, x, batch, .. } = *self;
        views.writes("y", y, [batch.sequences(), x.columns], x.dtype);
        views.reads("x", x, [batch.rows(), y.columns], y.dtype);
    }
}

impl KernelOperation for PooledRowsBackward<'_> {
    fn views(&self, views: &mut Views<'_>) {
        let PooledRowsBackward { dx, dy, batch, .. } = *self;
        views.writes("dx", dx, [batch.rows(), dy.columns], dy.dtype);
        views.reads("dy", dy, [batch.sequences(), dx.columns], dx.dtype);
    }
}

/// The shape of the statistics that a class loss reads and writes.
fn statistics_shape(problem: ProblemType, scores: View, batch: &BatchView<'_>) -> [usize; 2] {
    match problem {
        ProblemType::MultiLabelClassification => [batch.sequences(), 1 + scores.columns],
        _ => [batch.rows(), STATISTICS],
    }
}

fn check_problem(
    problem: ProblemType,
    scores: View,
    samples: Samples,
    weighed: bool,
    views: &mut Views<'_>,
) {
    let is_value = problem == ProblemType::Regression;
    views.rule(!is_value || scores.columns == 1, "a value has one score");
    let is_set = problem == ProblemType::MultiLabelClassification;
    views.rule(!is_set || samples == Samples::Sequences, "only sequences have several labels");
    views.rule(!weighed || is_value, "an objective reads one score");
}

impl KernelOperation for ClassLoss<'_> {
    fn views(&self, views: &mut Views<'_>) {
        let ClassLoss { out, statistics, scores, samples, problem, weighed, batch, .. } = *self;
        let shape = statistics_shape(problem, scores, &batch);
        // Each row of them holds a label, which is no number.
        views.writes_opaque("out", out, shape, Dtype::F32);
        views.reads("statistics", statistics, shape, Dtype::F32);
        views.reads("scores", scores, [samples.of(&batch), scores.columns], scores.dtype);
        check_problem(problem, scores, samples, weighed, views);
    }
}

impl KernelOperation for ClassLossBackward<'_> {
    fn views(&self, views: &mut Views<'_>) {
        let ClassLossBackward { dscores, scores, statistics, samples, problem, .. } = *self;
        let ClassLossBackward { weighed, batch, .. } = *self;
        let shape = statistics_shape(problem, scores, &batch);
        views.writes("dscores", dscores, scores.shape(), scores.dtype);
        views.reads("scores", scores, [samples.of(&batch), scores.columns], scores.dtype);
        views.reads("statistics", statistics, shape, Dtype::F32);
        check_problem(problem, scores, samples, weighed, views);
    }
}
