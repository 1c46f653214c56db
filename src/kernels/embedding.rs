//! Tables whose rows are added: by position, and by kind of token.

use super::batch::BatchView;
use super::check::Check;
use crate::tensor::{Dtype, View};

/// y += the row of the table for each token's kind.
#[derive(Clone, Copy, Debug)]
pub struct AddTokenTypes<'a> {
    /// Input and output. (R, C).
    pub y: View,
    /// (kinds, C).
    pub table: View,
    /// The kinds.
    pub batch: BatchView<'a>,
}

/// dtable (+)= Σ over rows of each kind of dy, in order.
#[derive(Clone, Copy, Debug)]
pub struct AddTokenTypesBackward<'a> {
    /// Floats. (kinds, C).
    pub dtable: View,
    /// (R, C).
    pub dy: View,
    /// The kinds.
    pub batch: BatchView<'a>,
    /// True when `dtable` is added to; false when it is replaced.
    pub accumulate: bool,
}

/// y = x + the row of the table for each position.
#[derive(Clone, Copy, Debug)]
pub struct AddPositions<'a> {
    /// Output. (R, C).
    pub y: View,
    /// Input. (R, C).
    pub x: View,
    /// (positions of the model, C).
    pub table: View,
    /// The positions.
    pub batch: BatchView<'a>,
}

/// dtable (+)= Σ over rows of each position of dy. Positions that no row has get 0 where it
/// replaces.
#[derive(Clone, Copy, Debug)]
pub struct AddPositionsBackward<'a> {
    /// Floats. (positions of the model, C).
    pub dtable: View,
    /// (R, C).
    pub dy: View,
    /// The positions.
    pub batch: BatchView<'a>,
    /// True when `dtable` is added to; false when it is replaced.
    pub accumulate: bool,
}

impl AddTokenTypes<'_> {
    /// Panics unless shapes and dtypes agree.
    pub fn check(&self) {
        let (check, AddTokenTypes { y, table, batch }) = (Check("add_token_types"), *self);
        check.view("y", y, [batch.rows(), table.columns], table.dtype);
    }
}

impl AddTokenTypesBackward<'_> {
    /// Panics unless shapes and dtypes agree.
    pub fn check(&self) {
        let AddTokenTypesBackward { dtable, dy, batch, .. } = *self;
        let check = Check("add_token_types_backward");
        check.view("dy", dy, [batch.rows(), dtable.columns], dy.dtype);
        check.view("dtable", dtable, [dtable.rows, dy.columns], Dtype::F32);
    }
}

impl AddPositions<'_> {
    /// Panics unless shapes and dtypes agree.
    pub fn check(&self) {
        let (check, AddPositions { y, x, table, batch }) = (Check("add_positions"), *self);
        check.view("y", y, [batch.rows(), table.columns], table.dtype);
        check.view("x", x, [y.rows, y.columns], y.dtype);
    }
}

impl AddPositionsBackward<'_> {
    /// Panics unless shapes and dtypes agree.
    pub fn check(&self) {
        let AddPositionsBackward { dtable, dy, batch, .. } = *self;
        let check = Check("add_positions_backward");
        check.view("dy", dy, [batch.rows(), dtable.columns], dy.dtype);
        check.view("dtable", dtable, [dtable.rows, dy.columns], Dtype::F32);
    }
}
