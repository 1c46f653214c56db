//! Some columns of a tensor: those of one module among the outputs of a product for several.

use super::check::Check;
use crate::tensor::View;

/// y[:, first..first + N] += scale · x.
#[derive(Clone, Copy, Debug)]
pub struct AddColumns {
    /// Output. (R, C).
    pub y: View,
    /// Input. (R, N).
    pub x: View,
    /// The first of the columns.
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
    /// The first of the columns.
    pub first: usize,
    /// A factor.
    pub scale: f32,
}

impl AddColumns {
    /// Panics unless shapes and dtypes agree.
    pub fn check(&self) {
        check("add_columns", self.y, ("x", self.x), self.first);
    }
}

impl TakeColumns {
    /// Panics unless shapes and dtypes agree.
    pub fn check(&self) {
        check("take_columns", self.x, ("y", self.y), self.first);
    }
}

fn check(name: &'static str, all: View, (field, some): (&str, View), first: usize) {
    let check = Check(name);
    check.view(field, some, [all.rows, some.columns], all.dtype);
    check.rule(first + some.columns <= all.columns, "the columns lie outside");
}
