//! The heads of classes: the position that stands for a sequence, and the loss of each sequence or
//! each token.

use std::ops::Range;

use super::batch::BatchView;
use super::check::Check;
use super::cross_entropy::STATISTICS;
use super::loss::Smoothing;
use crate::tensor::{Dtype, View};

/// Which row of a sequence stands for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// The first.
    First,
    /// The last.
    Last,
}

impl Pooling {
    /// The row of a sequence that has these rows.
    pub fn row(self, rows: Range<usize>) -> usize {
        match self {
            Pooling::First => rows.start,
            Pooling::Last => rows.end - 1,
        }
    }
}

/// What has a label and scores of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Samples {
    /// Whole sequences. Label and loss are in the statistics of the first position.
    Sequences,
    /// Tokens.
    Tokens,
}

impl Samples {
    /// How many a batch has.
    pub fn of(self, batch: &BatchView<'_>) -> usize {
        match self {
            Samples::Sequences => batch.sequences(),
            Samples::Tokens => batch.rows(),
        }
    }

    /// The row with the label and the loss of each.
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
    /// Which row.
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
    /// Which row.
    pub pool: Pooling,
    /// The sequences.
    pub batch: BatchView<'a>,
}

/// The loss of each of the N samples, by the label in its statistics, where the loss is written.
#[derive(Clone, Copy, Debug)]
pub struct ClassLoss<'a> {
    /// Output: floats. (R, 4).
    pub out: View,
    /// Floats. (R, 4).
    pub statistics: View,
    /// (N, L).
    pub scores: View,
    /// What has a label.
    pub samples: Samples,
    /// True: the square of the difference between the one score and a value. False: the cross
    /// entropy of classes.
    pub is_value: bool,
    /// What of which scores is the label's.
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

impl PooledRows<'_> {
    /// Panics unless shapes and dtypes agree.
    pub fn check(&self) {
        let (check, PooledRows { y, x, batch, .. }) = (Check("pooled_rows"), *self);
        check.view("y", y, [batch.sequences(), x.columns], x.dtype);
        check.view("x", x, [batch.rows(), y.columns], y.dtype);
    }
}

impl PooledRowsBackward<'_> {
    /// Panics unless shapes and dtypes agree.
    pub fn check(&self) {
        let (check, PooledRowsBackward { dx, dy, batch, .. }) =
            (Check("pooled_rows_backward"), *self);
        check.view("dy", dy, [batch.sequences(), dx.columns], dx.dtype);
        check.view("dx", dx, [batch.rows(), dy.columns], dy.dtype);
    }
}

impl ClassLoss<'_> {
    /// Panics unless shapes and dtypes agree.
    pub fn check(&self) {
        let ClassLoss { out, statistics, scores, samples, is_value, batch, .. } = *self;
        let check = Check("class_loss");
        check.view("out", out, [batch.rows(), STATISTICS], Dtype::F32);
        check.view("statistics", statistics, [batch.rows(), STATISTICS], Dtype::F32);
        check.view("scores", scores, [samples.of(&batch), scores.columns], scores.dtype);
        check.rule(!is_value || scores.columns == 1, "a value has one score");
    }
}

impl ClassLossBackward<'_> {
    /// Panics unless shapes and dtypes agree.
    pub fn check(&self) {
        let ClassLossBackward { dscores, scores, statistics, samples, batch, .. } = *self;
        let check = Check("class_loss_backward");
        check.view("dscores", dscores, [scores.rows, scores.columns], scores.dtype);
        check.view("scores", scores, [samples.of(&batch), scores.columns], scores.dtype);
        check.view("statistics", statistics, [batch.rows(), STATISTICS], Dtype::F32);
        check.rule(!self.is_value || scores.columns == 1, "a value has one score");
    }
}
