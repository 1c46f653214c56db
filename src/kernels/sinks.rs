//! Attention's sinks: one learned score a head, which joins the softmax of each query and has no
//! value (Xiao et al. 2024; gpt-oss).
//!
//! Attention is computed without them. Then the output and the log-sum-exp of each query are
//! corrected. Attention's backward reads the corrected ones, so it needs no change.

use super::attention::AttentionShape;
use super::operation::{KernelOperation, Views};
use crate::tensor::{Dtype, View};

/// y = y σ(lse − sink), then lse = ln(exp(lse) + exp(sink)): in place.
#[derive(Clone, Copy, Debug)]
pub struct Sink<'a> {
    /// The output of attention, then with sinks. (R, H D).
    pub y: View,
    /// Floats: the log-sum-exp, as [`Attention`](super::Attention) lays it out. (R, H).
    pub lse: View,
    /// The sink of each head. (1, H).
    pub sinks: View,
    /// Sizes.
    pub shape: AttentionShape<'a>,
}

/// dsinks (+)= −Σ exp(sink − lse) ⟨dy, y⟩ of each head, over the rows.
#[derive(Clone, Copy, Debug)]
pub struct SinkBackward<'a> {
    /// Floats. (1, H).
    pub dsinks: View,
    /// (R, H D).
    pub dy: View,
    /// The output with sinks. (R, H D).
    pub y: View,
    /// Floats: the log-sum-exp with sinks. (R, H).
    pub lse: View,
    /// As in [`Sink`]. (1, H).
    pub sinks: View,
    /// Sizes.
    pub shape: AttentionShape<'a>,
    /// True when `dsinks` is added to; false when it is replaced.
    pub accumulate: bool,
}

impl KernelOperation for Sink<'_> {
    fn views(&self, views: &mut Views<'_>) {
        let Sink { y, lse, sinks, shape } = *self;
        let rows = shape.rows();
        views.writes("y", y, [rows, shape.width()], sinks.dtype);
        views.writes("lse", lse, [rows, shape.heads], Dtype::F32);
        views.reads("sinks", sinks, [1, shape.heads], y.dtype);
    }
}

impl KernelOperation for SinkBackward<'_> {
    fn views(&self, views: &mut Views<'_>) {
        let SinkBackward { dsinks, dy, y, lse, sinks, shape, .. } = *self;
        let rows = shape.rows();
        views.writes("dsinks", dsinks, [1, shape.heads], Dtype::F32);
        views.reads("dy", dy, [rows, shape.width()], y.dtype);
        views.reads("y", y, [rows, shape.width()], y.dtype);
        views.reads("lse", lse, [rows, shape.heads], Dtype::F32);
        views.reads("sinks", sinks, [1, shape.heads], y.dtype);
    }
}
