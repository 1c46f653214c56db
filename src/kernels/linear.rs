//! Matrix products with weights.

use super::operation::{KernelOperation, Views};
use crate::tensor::{Dtype, View};

/// y = x w + bias.
#[derive(Clone, Copy, Debug)]
pub struct Linear {
    /// Output, of the dtype of `x` or floats. (R, N).
    pub y: View,
    /// Input. (R, C).
    pub x: View,
    /// Weights. (C, N), or (N, C) where they are transposed.
    pub w: View,
    /// (1, N).
    pub bias: Option<View>,
    /// True when `w` is (N, C), as PyTorch stores it.
    pub transposed: bool,
}

/// dx = dy wᵀ, dw (+)= xᵀ dy, dbias (+)= Σ dy.
#[derive(Clone, Copy, Debug)]
pub struct LinearBackward {
    /// Of the dtype of `x`, or floats. (R, C).
    pub dx: View,
    /// Floats, in the shape of `w`; `None`: the weights are frozen.
    pub dw: Option<View>,
    /// Floats. (1, N).
    pub dbias: Option<View>,
    /// (R, N).
    pub dy: View,
    /// The forward's input. (R, C).
    pub x: View,
    /// As in [`Linear`].
    pub w: View,
    /// As in [`Linear`].
    pub transposed: bool,
    /// True when `dw` and `dbias` are added to; false when they are replaced.
    pub accumulate: bool,
}

/// Sizes of a product.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LinearSize {
    /// R.
    pub(crate) rows: usize,
    /// C.
    pub(crate) inputs: usize,
    /// N.
    pub(crate) outputs: usize,
    /// True when w is (N, C) and not (C, N).
    pub(crate) transposed: bool,
}

impl LinearSize {
    fn weights(self) -> [usize; 2] {
        let LinearSize { inputs, outputs, transposed, .. } = self;
        if transposed { [outputs, inputs] } else { [inputs, outputs] }
    }
}

/// The dtype that a product may write to this view: floats, or that of its factors.
fn written(view: View, factors: Dtype) -> Dtype {
    if view.dtype == Dtype::F32 { Dtype::F32 } else { factors }
}

impl KernelOperation for Linear {
    fn views(&self, views: &mut Views<'_>) {
        let size = self.size();
        let dtype = self.x.dtype;
        views.writes("y", self.y, [size.rows, size.outputs], written(self.y, dtype));
        views.reads("x", self.x, [size.rows, size.inputs], dtype);
        views.reads("w", self.w, size.weights(), dtype);
        views.reads("bias", self.bias, [1, size.outputs], dtype);
    }
}

impl Linear {
    pub(crate) fn size(&self) -> LinearSize {
        let Linear { y, x, transposed, .. } = *self;
        LinearSize { rows: x.rows, inputs: x.columns, outputs: y.columns, transposed }
    }
}

impl KernelOperation for LinearBackward {
    fn views(&self, views: &mut Views<'_>) {
        let size = self.size();
        let dtype = self.x.dtype;
        views.writes("dx", self.dx, [size.rows, size.inputs], written(self.dx, dtype));
        views.writes("dw", self.dw, size.weights(), Dtype::F32);
        views.writes("dbias", self.dbias, [1, size.outputs], Dtype::F32);
        views.reads("dy", self.dy, [size.rows, size.outputs], dtype);
        views.reads("x", self.x, [size.rows, size.inputs], dtype);
        views.reads("w", self.w, size.weights(), dtype);
    }
}

impl LinearBackward {
    pub(crate) fn size(&self) -> LinearSize {
        let LinearBackward { dy, x, transposed, .. } = *self;
        LinearSize { rows: x.rows, inputs: x.columns, outputs: dy.columns, transposed }
    }
}
