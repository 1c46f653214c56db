//! Norms of each head of queries and keys by root mean square (Henry et al. 2020, as in Qwen3).

use super::attention::AttentionShape;
use super::operation::{KernelOperation, Views};
use crate::tensor::{Dtype, View};

/// One value for queries, and one for keys: by default views of D channels.
#[derive(Clone, Copy, Debug)]
pub struct QueryKey<T = View> {
    /// For the heads of queries.
    pub query: T,
    /// For the heads of keys.
    pub key: T,
}

/// y = (offset + γ) x rstd by head; values are copied.
#[derive(Clone, Copy, Debug)]
pub struct HeadNorm<'a> {
    /// Output. (R, (H + 2 K) D).
    pub y: View,
    /// Floats: rstd of each head. (R, H + K).
    pub statistics: View,
    /// Input. (R, (H + 2 K) D).
    pub x: View,
    /// Scales. (1, D).
    pub gamma: QueryKey,
    /// The offset that is added to γ: 1 if γ is stored as its difference from 1, else 0.
    pub gamma_offset: f32,
    /// Added to the mean square.
    pub epsilon: f32,
    /// Sizes.
    pub shape: AttentionShape<'a>,
}

/// The backward of [`HeadNorm`], in place: `dx` holds dy before the call. The gradients of values
/// stay. dγ (+)= ….
#[derive(Clone, Copy, Debug)]
pub struct HeadNormBackward<'a> {
    /// (R, (H + 2 K) D).
    pub dx: View,
    /// Floats. (1, D).
    pub dgamma: QueryKey,
    /// The forward's input. (R, (H + 2 K) D).
    pub x: View,
    /// The forward's statistics. (R, H + K).
    pub statistics: View,
    /// Scales. (1, D).
    pub gamma: QueryKey,
    /// The offset that is added to γ: 1 if γ is stored as its difference from 1, else 0.
    pub gamma_offset: f32,
    /// Sizes.
    pub shape: AttentionShape<'a>,
    /// True when `dgamma` is added to; false when it is replaced.
    pub accumulate: bool,
}

impl KernelOperation for HeadNorm<'_> {
    fn views(&self, views: &mut Views<'_>) {
        let HeadNorm { y, statistics, x, gamma, shape, .. } = *self;
        let rows = shape.rows();
        let dtype = x.dtype;
        views.writes("y", y, [rows, shape.qkv_width()], dtype);
        views.writes("statistics", statistics, [rows, shape.heads + shape.kv_heads], Dtype::F32);
        views.reads("x", x, [rows, shape.qkv_width()], dtype);
        views.reads("gamma.query", gamma.query, [1, shape.head_size], dtype);
        views.reads("gamma.key", gamma.key, [1, shape.head_size], dtype);
    }
}

impl KernelOperation for HeadNormBackward<'_> {
    fn views(&self, views: &mut Views<'_>) {
        let HeadNormBackward { dx, dgamma, x, statistics, gamma, shape, .. } = *self;
        let rows = shape.rows();
        let dtype = x.dtype;
        views.writes("dx", dx, [rows, shape.qkv_width()], dtype);
        views.writes("dgamma.query", dgamma.query, [1, shape.head_size], Dtype::F32);
        views.writes("dgamma.key", dgamma.key, [1, shape.head_size], Dtype::F32);
        views.reads("x", x, [rows, shape.qkv_width()], dtype);
        views.reads("statistics", statistics, [rows, shape.heads + shape.kv_heads], Dtype::F32);
        views.reads("gamma.query", gamma.query, [1, shape.head_size], dtype);
        views.reads("gamma.key", gamma.key, [1, shape.head_size], dtype);
    }
}
