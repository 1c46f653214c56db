//! Gates of attention's output (Qiu et al. 2025, as in Qwen3.5). The projection has each head's
//! queries and gates side by side, then all keys and values.

use super::attention::AttentionShape;
use super::operation::{KernelOperation, Views};
use crate::tensor::View;

/// Takes a projection apart.
#[derive(Clone, Copy, Debug)]
pub struct SplitGates<'a> {
    /// Queries, keys and values. (R, (H + 2 K) D).
    pub qkv: View,
    /// (R, H D).
    pub gates: View,
    /// The projection. (R, (2 H + 2 K) D).
    pub x: View,
    /// Sizes.
    pub shape: AttentionShape<'a>,
}

/// Puts a projection together: the backward of [`SplitGates`].
#[derive(Clone, Copy, Debug)]
pub struct JoinGates<'a> {
    /// The projection. (R, (2 H + 2 K) D).
    pub y: View,
    /// Queries, keys and values. (R, (H + 2 K) D).
    pub qkv: View,
    /// (R, H D).
    pub gates: View,
    /// Sizes.
    pub shape: AttentionShape<'a>,
}

/// y = x sigmoid(gates), element by element.
#[derive(Clone, Copy, Debug)]
pub struct SigmoidGate {
    /// Output. (R, C).
    pub y: View,
    /// Input. (R, C).
    pub x: View,
    /// (R, C).
    pub gates: View,
}

/// The backward of [`SigmoidGate`].
#[derive(Clone, Copy, Debug)]
pub struct SigmoidGateBackward {
    /// (R, C).
    pub dx: View,
    /// (R, C).
    pub dgates: View,
    /// (R, C).
    pub dy: View,
    /// The forward's input. (R, C).
    pub x: View,
    /// (R, C).
    pub gates: View,
}

impl KernelOperation for SplitGates<'_> {
    fn views(&self, views: &mut Views<'_>) {
        let SplitGates { qkv, gates, x, shape } = *self;
        let rows = shape.rows();
        let width = shape.width();
        views.writes("qkv", qkv, [rows, shape.qkv_width()], x.dtype);
        views.writes("gates", gates, [rows, width], x.dtype);
        views.reads("x", x, [rows, shape.qkv_width() + width], x.dtype);
    }
}

impl KernelOperation for JoinGates<'_> {
    fn views(&self, views: &mut Views<'_>) {
        let JoinGates { y, qkv, gates, shape } = *self;
        let rows = shape.rows();
        let width = shape.width();
        views.writes("y", y, [rows, shape.qkv_width() + width], y.dtype);
        views.reads("qkv", qkv, [rows, shape.qkv_width()], y.dtype);
        views.reads("gates", gates, [rows, width], y.dtype);
    }
}

impl KernelOperation for SigmoidGate {
    fn views(&self, views: &mut Views<'_>) {
        let SigmoidGate { y, x, gates } = *self;
        views.writes("y", y, x.shape(), x.dtype);
        views.reads("x", x, x.shape(), x.dtype);
        views.reads("gates", gates, x.shape(), x.dtype);
    }
}

impl KernelOperation for SigmoidGateBackward {
    fn views(&self, views: &mut Views<'_>) {
        let SigmoidGateBackward { dx, dgates, dy, x, gates } = *self;
        views.writes("dx", dx, x.shape(), x.dtype);
        views.writes("dgates", dgates, x.shape(), x.dtype);
        views.reads("dy", dy, x.shape(), x.dtype);
        views.reads("x", x, x.shape(), x.dtype);
        views.reads("gates", gates, x.shape(), x.dtype);
    }
}
