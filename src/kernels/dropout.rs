//! Dropout, and sums on the residual stream.

use super::batch::BatchView;
use super::operation::{Operation, Views};
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

/// What the rows of a mask are.
#[derive(Clone, Copy, Debug)]
pub enum MaskRows<'a> {
    /// The rows of a micro-batch, or of a chunk: each is a position of a sequence.
    Positions(BatchView<'a>),
    /// One row for each sequence: its first position.
    Sequences,
}

/// The dropout of one site of a layer: it draws the same mask whenever it is asked.
#[derive(Clone, Copy, Debug)]
pub struct Dropout<'a> {
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
    /// What its rows are.
    pub rows: MaskRows<'a>,
}

impl Dropout<'_> {
    /// The sequence of a row, and its position: both counted from those of the first row.
    pub fn place(&self, row: usize) -> (usize, usize) {
        match self.rows {
            MaskRows::Positions(batch) => batch.place(row),
            MaskRows::Sequences => (row, 0),
        }
    }
}

/// y = dropout(x). (R, C). `y` may be `x`.
#[derive(Clone, Copy, Debug)]
pub struct ApplyDropout<'a> {
    /// Output. (R, C).
    pub y: View,
    /// Input. (R, C).
    pub x: View,
    /// The mask; `None`: this is a copy.
    pub dropout: Option<Dropout<'a>>,
}

/// y = a + dropout(x). (R, C). `y` may be `x`.
#[derive(Clone, Copy, Debug)]
pub struct Residual<'a> {
    /// Output. (R, C).
    pub y: View,
    /// The residual stream. (R, C).
    pub a: View,
    /// The output of a branch. (R, C).
    pub x: View,
    /// The mask; `None`: this is a sum.
    pub dropout: Option<Dropout<'a>>,
}

/// `x` has the shape of `y`. Where it is `y`, the operation works in place.
fn reads_unless_in_place(views: &mut Views<'_>, x: View, y: View) {
    if x != y {
        views.reads("x", x, y.shape(), y.dtype);
    }
}

/// A mask is drawn for all rows.
fn check_mask(views: &Views<'_>, y: View, dropout: Option<Dropout<'_>>) {
    if let Some(Dropout { rows: MaskRows::Positions(batch), .. }) = dropout {
        views.rule(batch.rows() == y.rows, "the rows of y are not those of the dropout");
    }
}

impl Operation for ApplyDropout<'_> {
    fn views(&self, views: &mut Views<'_>) {
        let ApplyDropout { y, x, dropout } = *self;
        views.writes("y", y, y.shape(), y.dtype);
        reads_unless_in_place(views, x, y);
        check_mask(views, y, dropout);
    }
}

impl Operation for Residual<'_> {
    fn views(&self, views: &mut Views<'_>) {
        let Residual { y, a, x, dropout } = *self;
        views.writes("y", y, y.shape(), y.dtype);
        views.reads("a", a, y.shape(), y.dtype);
        reads_unless_in_place(views, x, y);
        check_mask(views, y, dropout);
    }
}
