//! Columns of a tensor that belong to one module, where one product computes several modules: an
//! adapter on the values reads and writes a part of queries, keys and values.

use super::operation::{KernelOperation, Views};
use crate::tensor::View;

/// The rule that was broken when the columns of the narrow tensor are not in the wide one.
const OUTSIDE: &str = "the columns lie outside";

/// y[:, first..first + N] += scale · x.
#[derive(Clone, Copy, Debug)]
pub struct AddColumns {
    /// Output. (R, C).
    pub y: View,
    /// Input. (R, N).
    pub x: View,
    /// The first column.
    pub first: usize,
    /// A factor.
    pub scale: f32,
}

/// y = scale · x[:, first..first + N].
#[derive(Clone, Copy, Debug)]
pub struct TakeColumns {
    /// Output. (R, N).
    pub y: View,
    /// Input. (R, C).
    pub x: View,
    /// The first column.
    pub first: usize,
    /// A factor.
    pub scale: f32,
}

/// y[:, to..to + N] = x[:, from..from + N]. The other columns of `y` stay as they were.
#[derive(Clone, Copy, Debug)]
pub struct CopyColumns {
    /// Output. (R, C).
    pub y: View,
    /// Input. (R, M).
    pub x: View,
    /// The first column of `y`.
    pub to: usize,
    /// The first column of `x`.
    pub from: usize,
    /// N.
    pub columns: usize,
}

impl KernelOperation for AddColumns {
    fn views(&self, views: &mut Views<'_>) {
        let AddColumns { y, x, first, .. } = *self;
        views.writes("y", y, y.shape(), y.dtype);
        views.reads("x", x, [y.rows, x.columns], y.dtype);
        views.rule(first + x.columns <= y.columns, OUTSIDE);
    }
}

impl KernelOperation for CopyColumns {
    fn views(&self, views: &mut Views<'_>) {
        let CopyColumns { y, x, to, from, columns } = *self;
        views.writes_opaque("y", y, [x.rows, y.columns], x.dtype);
        views.reads("x", x, x.shape(), x.dtype);
        views.rule(to + columns <= y.columns && from + columns <= x.columns, OUTSIDE);
    }
}

impl KernelOperation for TakeColumns {
    fn views(&self, views: &mut Views<'_>) {
        let TakeColumns { y, x, first, .. } = *self;
        views.writes("y", y, [x.rows, y.columns], x.dtype);
        views.reads("x", x, x.shape(), x.dtype);
        views.rule(first + y.columns <= x.columns, OUTSIDE);
    }
}
