//! Classification heads: the row that is pooled from each sequence, and the loss of each sequence
//! or of each token.

use std::ops::Range;

use super::batch::BatchView;
use super::cross_entropy::STATISTICS;
use super::loss::Smoothing;
use super::operation::{KernelOperation, Views};
use crate::tensor::{Dtype, View};

/// The row of a sequence that its scores are computed from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// The first.
    First,
    /// The last.
    Last,
}

impl Pooling {
    /// The pooled row of a sequence, whose rows are `rows`.
    pub fn row(self, rows: Range<usize>) -> usize {
        match self {
            Pooling::First => rows.start,
            Pooling::Last => rows.end - 1,
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
/// there.
#[derive(Clone, Copy, Debug)]
pub struct ClassLoss<'a> {
    /// Output: floats. (R, 4).
    pub out: View,
    /// Floats. (R, 4).
    pub statistics: View,
    /// (N, L).
    pub scores: View,
    /// The units that have a label.
    pub samples: Samples,
    /// True: the loss is the squared difference between the one score and a value (regression).
    /// False: the cross entropy of classes.
    pub is_value: bool,
    /// Label smoothing.
    pub smoothing: Smoothing,
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
    /// Floats. (R, 4).
    pub statistics: View,
    /// A factor.
    pub scale: f32,
    /// As in [`ClassLoss`].
    pub samples: Samples,
    /// As in [`ClassLoss`].
    pub is_value: bool,
    /// As in [`ClassLoss`].
    pub smoothing: Smoothing,
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

impl KernelOperation for ClassLoss<'_> {
    fn views(&self, views: &mut Views<'_>) {
        let ClassLoss { out, statistics, scores, samples, is_value, batch, .. } = *self;
        // Each row of them holds a label, which is no number.
        views.writes_opaque("out", out, [batch.rows(), STATISTICS], Dtype::F32);
        views.reads("statistics", statistics, [batch.rows(), STATISTICS], Dtype::F32);
        views.reads("scores", scores, [samples.of(&batch), scores.columns], scores.dtype);
        views.rule(!is_value || scores.columns == 1, "a value has one score");
    }
}

impl KernelOperation for ClassLossBackward<'_> {
    fn views(&self, views: &mut Views<'_>) {
        let ClassLossBackward { dscores, scores, statistics, samples, batch, .. } = *self;
        views.writes("dscores", dscores, scores.shape(), scores.dtype);
        views.reads("scores", scores, [samples.of(&batch), scores.columns], scores.dtype);
        views.reads("statistics", statistics, [batch.rows(), STATISTICS], Dtype::F32);
        views.rule(!self.is_value || scores.columns == 1, "a value has one score");
    }
}
