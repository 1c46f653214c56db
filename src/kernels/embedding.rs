//! Tables whose rows are added: by position, and by kind of token.

use super::batch::BatchView;
use super::operation::{Operation, Views};
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

impl Operation for AddTokenTypes<'_> {
    fn views(&self, views: &mut Views<'_>) {
        let AddTokenTypes { y, table, batch } = *self;
        views.writes("y", y, [batch.rows(), table.columns], table.dtype);
        views.reads("table", table, table.shape(), table.dtype);
    }
}

impl Operation for AddTokenTypesBackward<'_> {
    fn views(&self, views: &mut Views<'_>) {
        let AddTokenTypesBackward { dtable, dy, batch, .. } = *self;
        views.writes("dtable", dtable, [dtable.rows, dy.columns], Dtype::F32);
        views.reads("dy", dy, [batch.rows(), dtable.columns], dy.dtype);
    }
}

impl Operation for AddPositions<'_> {
    fn views(&self, views: &mut Views<'_>) {
        let AddPositions { y, x, table, batch } = *self;
        views.writes("y", y, [batch.rows(), table.columns], table.dtype);
        views.reads("x", x, y.shape(), y.dtype);
        views.reads("table", table, table.shape(), table.dtype);
    }
}

impl Operation for AddPositionsBackward<'_> {
    fn views(&self, views: &mut Views<'_>) {
        let AddPositionsBackward { dtable, dy, batch, .. } = *self;
        views.writes("dtable", dtable, [dtable.rows, dy.columns], Dtype::F32);
        views.reads("dy", dy, [batch.rows(), dtable.columns], dy.dtype);
    }
}
