//! Dropout, and sums on the residual stream.

use super::check::Check;
use crate::tensor::View;

/// What the dropout masks of a micro-batch are drawn from.
#[derive(Clone, Copy, Debug)]
pub struct DropoutKey {
    /// The run's seed.
    pub seed: u64,
    /// The step.
    pub step: u64,
    /// The index in the step of the micro-batch's first sequence.
    pub first_sequence: u32,
}

/// The dropout of one site of a layer: it draws the same mask whenever it is asked.
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
    /// The index in the step of the first row's sequence.
    pub first_sequence: u32,
    /// The position of the first row in its sequence.
    pub first_position: u32,
    /// Rows of each sequence: T.
    pub positions: usize,
}

/// y = dropout(x). (R, C). `y` may be `x`.
#[derive(Clone, Copy, Debug)]
pub struct ApplyDropout {
    /// Output. (R, C).
    pub y: View,
    /// Input. (R, C).
    pub x: View,
    /// The mask; `None`: this is a copy.
    pub dropout: Option<Dropout>,
}

/// y = a + dropout(x). (R, C). `y` may be `x`.
#[derive(Clone, Copy, Debug)]
pub struct Residual {
    /// Output. (R, C).
    pub y: View,
    /// The residual stream. (R, C).
    pub a: View,
    /// The output of a branch. (R, C).
    pub x: View,
    /// The mask; `None`: this is a sum.
    pub dropout: Option<Dropout>,
}

/// A mask is drawn for whole sequences.
fn check_mask(check: Check, y: View, dropout: Option<Dropout>) {
    if let Some(Dropout { positions, .. }) = dropout {
        let is_whole = positions > 0 && y.rows.is_multiple_of(positions);
        check.rule(is_whole, "the rows of y are no whole sequences of the dropout");
    }
}

impl ApplyDropout {
    /// Panics unless shapes and dtypes agree.
    pub fn check(&self) {
        let ApplyDropout { y, x, dropout } = *self;
        let check = Check("dropout");
        check.view("x", x, [y.rows, y.columns], y.dtype);
        check_mask(check, y, dropout);
    }
}

impl Residual {
    /// Panics unless shapes and dtypes agree.
    pub fn check(&self) {
        let Residual { y, a, x, dropout } = *self;
        let check = Check("residual");
        check.view("a", a, [y.rows, y.columns], y.dtype);
        check.view("x", x, [y.rows, y.columns], y.dtype);
        check_mask(check, y, dropout);
    }
}
