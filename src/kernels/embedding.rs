//! Embedding tables whose rows are added to hidden states: by position, and by token type.

use super::batch::BatchView;
use super::operation::{KernelOperation, Views};
use crate::tensor::{Dtype, View};

/// y += the row of the table for each token's type.
#[derive(Clone, Copy, Debug)]
pub struct AddTokenTypes<'a> {
    /// Input and output. (R, C).
    pub y: View,
    /// The table. (types, C).
    pub table: View,
    /// The token types.
    pub batch: BatchView<'a>,
}

/// dtable (+)= Σ of dy over the rows of each token type, in order.
#[derive(Clone, Copy, Debug)]
pub struct AddTokenTypesBackward<'a> {
    /// Floats. (types, C).
    pub dtable: View,
    /// (R, C).
    pub dy: View,
    /// The token types.
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
    /// The table. (positions of the model, C).
    pub table: View,
    /// The positions.
    pub batch: BatchView<'a>,
}

/// dtable (+)= Σ of dy over the rows of each position. Without `accumulate`, a position without a
/// row gets 0.
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

impl KernelOperation for AddTokenTypes<'_> {
    fn views(&self, views: &mut Views<'_>) {
        let AddTokenTypes { y, table, batch } = *self;
        views.writes("y", y, [batch.rows(), table.columns], table.dtype);
        views.reads("table", table, table.shape(), table.dtype);
    }
}

impl KernelOperation for AddTokenTypesBackward<'_> {
    fn views(&self, views: &mut Views<'_>) {
        let AddTokenTypesBackward { dtable, dy, batch, .. } = *self;
        views.writes("dtable", dtable, [dtable.rows, dy.columns], Dtype::F32);
        views.reads("dy", dy, [batch.rows(), dtable.columns], dy.dtype);
    }
}

impl KernelOperation for AddPositions<'_> {
    fn views(&self, views: &mut Views<'_>) {
        let AddPositions { y, x, table, batch } = *self;
        views.writes("y", y, [batch.rows(), table.columns], table.dtype);
        views.reads("x", x, y.shape(), y.dtype);
        views.reads("table", table, table.shape(), table.dtype);
    }
}

impl KernelOperation for AddPositionsBackward<'_> {
    fn views(&self, views: &mut Views<'_>) {
        let AddPositionsBackward { dtable, dy, batch, .. } = *self;
        views.writes("dtable", dtable, [dtable.rows, dy.columns], Dtype::F32);
        views.reads("dy", dy, [batch.rows(), dtable.columns], dy.dtype);
    }
}
