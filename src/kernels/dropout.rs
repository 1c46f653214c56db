//! Dropout, and sums on the residual stream.

use super::batch::BatchView;
use super::operation::{KernelOperation, Views};
use crate::tensor::View;

/// The key that the dropout masks of a micro-batch are drawn from.
#[derive(Clone, Copy, Debug)]
pub struct DropoutKey {
    /// The run's seed.
    pub seed: u64,
    /// The step.
    pub step: u64,
    /// The index in the step of the micro-batch's first sequence.
    pub first_sequence: u32,
}

/// The positions of a mask's rows.
#[derive(Clone, Copy, Debug)]
pub enum MaskRows<'a> {
    /// The rows of a micro-batch, or of a chunk: each is a position of a sequence.
    Positions(BatchView<'a>),
    /// One row for each sequence: its first position.
    Sequences,
}

/// Dropout at one site of a layer. The mask is a function of these fields, so a recomputed forward
/// pass drops the same elements.
#[derive(Clone, Copy, Debug)]
pub struct Dropout<'a> {
    /// Probability of zero, below 1.
    pub probability: f32,
    /// The run's seed.
    pub seed: u64,
    /// The step.
    pub step: u64,
    /// The layer and the index of this dropout in it, as one number.
    pub site: u32,
    /// The index in the step of the first row's sequence.
    pub first_sequence: u32,
    /// The position of the first row in its sequence.
    pub first_position: u32,
    /// The positions of its rows.
    pub rows: MaskRows<'a>,
}

/// The bits of a mask's row that hold the query, in the dropout of attention. The head is above
/// them.
pub(crate) const QUERY_BITS: u32 = 20;

impl<'a> Dropout<'a> {
    /// The dropout of attention whose first head is this one of the model's heads.
    pub(crate) fn at_head(self, head: usize) -> Dropout<'a> {
        let before = (head as u32) << QUERY_BITS;
        Dropout { first_position: self.first_position + before, ..self }
    }

    /// The sequence and the position of a row, both relative to the first row's.
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
    /// The dropout; `None`: y = x.
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
    /// The dropout; `None`: y = a + x.
    pub dropout: Option<Dropout<'a>>,
}

/// y = factor `by` x. (R, C). `y` may be `x`.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    /// Output. (R, C).
    pub y: View,
    /// Input. (R, C).
    pub x: View,
    /// The factor.
    pub factor: f32,
    /// Another one, in the device's memory. (1, 1).
    pub by: Option<View>,
}

/// Declares `x`, which has the shape of `y`, unless it is `y`: then the operation works in place.
fn reads_unless_in_place(views: &mut Views<'_>, x: View, y: View) {
    if x != y {
        views.reads("x", x, y.shape(), y.dtype);
    }
}

/// A mask of positions has the rows of `y`.
fn check_mask(views: &Views<'_>, y: View, dropout: Option<Dropout<'_>>) {
    if let Some(Dropout { rows: MaskRows::Positions(batch), .. }) = dropout {
        views.rule(batch.rows() == y.rows, "the rows of y are not those of the dropout");
    }
}

impl KernelOperation for ApplyDropout<'_> {
    fn views(&self, views: &mut Views<'_>) {
        let ApplyDropout { y, x, dropout } = *self;
        views.writes("y", y, y.shape(), y.dtype);
        reads_unless_in_place(views, x, y);
        check_mask(views, y, dropout);
    }
}

impl KernelOperation for Scale {
    fn views(&self, views: &mut Views<'_>) {
        let Scale { y, x, by, .. } = *self;
        views.writes("y", y, y.shape(), y.dtype);
        reads_unless_in_place(views, x, y);
        views.reads("by", by, [1, 1], y.dtype);
    }
}

impl KernelOperation for Residual<'_> {
    fn views(&self, views: &mut Views<'_>) {
        let Residual { y, a, x, dropout } = *self;
        views.writes("y", y, y.shape(), y.dtype);
        views.reads("a", a, y.shape(), y.dtype);
        reads_unless_in_place(views, x, y);
        check_mask(views, y, dropout);
    }
}
