//! The head of whole sequences: their first positions, and the loss of each sequence.

use super::check::Check;
use super::cross_entropy::STATISTICS;
use crate::tensor::{Dtype, View};

/// y = the first row of each sequence of x.
#[derive(Clone, Copy, Debug)]
pub struct FirstRows {
    /// Output. (B, C).
    pub y: View,
    /// Input. (B T, C).
    pub x: View,
}

/// dx = dy in the first row of each sequence, and 0 in all others.
#[derive(Clone, Copy, Debug)]
pub struct FirstRowsBackward {
    /// (B T, C).
    pub dx: View,
    /// (B, C).
    pub dy: View,
}

/// The loss of each sequence, by the label in the statistics of its first position, where the loss
/// is written.
#[derive(Clone, Copy, Debug)]
pub struct ClassLoss {
    /// Output: floats. (B T, 4).
    pub out: View,
    /// Floats. (B T, 4).
    pub statistics: View,
    /// (B, L).
    pub scores: View,
    /// True: the square of the difference between the one score and a value. False: the cross
    /// entropy of classes.
    pub is_value: bool,
}

/// dscores = scale · the loss's gradient.
#[derive(Clone, Copy, Debug)]
pub struct ClassLossBackward {
    /// (B, L).
    pub dscores: View,
    /// (B, L).
    pub scores: View,
    /// Floats. (B T, 4).
    pub statistics: View,
    /// A factor.
    pub scale: f32,
    /// As in [`ClassLoss`].
    pub is_value: bool,
}

/// Rows that are whole sequences of some others.
fn whole(check: Check, rows: usize, sequences: usize) {
    let is_whole = sequences > 0 && rows.is_multiple_of(sequences);
    check.rule(is_whole, "the rows of all positions are no whole sequences");
}

impl FirstRows {
    /// Panics unless shapes and dtypes agree.
    pub fn check(&self) {
        let (check, FirstRows { y, x }) = (Check("first_rows"), *self);
        check.view("y", y, [y.rows, x.columns], x.dtype);
        whole(check, x.rows, y.rows);
    }
}

impl FirstRowsBackward {
    /// Panics unless shapes and dtypes agree.
    pub fn check(&self) {
        let (check, FirstRowsBackward { dx, dy }) = (Check("first_rows_backward"), *self);
        check.view("dy", dy, [dy.rows, dx.columns], dx.dtype);
        whole(check, dx.rows, dy.rows);
    }
}

impl ClassLoss {
    /// Panics unless shapes and dtypes agree.
    pub fn check(&self) {
        let (check, ClassLoss { out, statistics, scores, .. }) = (Check("class_loss"), *self);
        check.view("out", out, [statistics.rows, STATISTICS], Dtype::F32);
        check.view("statistics", statistics, [statistics.rows, STATISTICS], Dtype::F32);
        whole(check, statistics.rows, scores.rows);
        check.rule(!self.is_value || scores.columns == 1, "a value has one score");
    }
}

impl ClassLossBackward {
    /// Panics unless shapes and dtypes agree.
    pub fn check(&self) {
        let ClassLossBackward { dscores, scores, statistics, .. } = *self;
        let check = Check("class_loss_backward");
        check.view("dscores", dscores, [scores.rows, scores.columns], scores.dtype);
        check.view("statistics", statistics, [statistics.rows, STATISTICS], Dtype::F32);
        whole(check, statistics.rows, scores.rows);
        check.rule(!self.is_value || scores.columns == 1, "a value has one score");
    }
}
