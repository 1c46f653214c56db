//! Norms of each head of queries and keys by root mean square (Henry et al. 2020, as in Qwen3), and
//! of values (Gemma 4).

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

/// What values are, where queries and keys are normed by head.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HeadValues {
    /// They are not normed.
    #[default]
    Plain,
    /// They are normed, without scales: x rstd.
    Normed,
    /// They are the keys' x rstd: the projection has none.
    Keys,
}

impl HeadValues {
    /// The width of the input of a norm of heads.
    pub(crate) fn input_width(self, shape: &AttentionShape<'_>) -> usize {
        match self {
            HeadValues::Keys => (shape.heads + shape.kv_heads) * shape.head_size,
            HeadValues::Plain | HeadValues::Normed => shape.qkv_width(),
        }
    }

    /// The heads of a row that are normed by themselves.
    pub(crate) fn normed_heads(self, heads: usize, kv_heads: usize) -> usize {
        heads + if self == HeadValues::Normed { 2 * kv_heads } else { kv_heads }
    }
}

/// y = (offset + γ) x rstd by head; values are copied, or normed.
#[derive(Clone, Copy, Debug)]
pub struct HeadNorm<'a> {
    /// Output. (R, (H + 2 K) D).
    pub y: View,
    /// Floats: rstd of each head. (R, H + K); of normed values, too: (R, H + 2 K).
    pub statistics: View,
    /// Input. (R, (H + 2 K) D); where values are the keys', (R, (H + K) D).
    pub x: View,
    /// Scales. (1, D).
    pub gamma: QueryKey,
    /// The offset that is added to γ: 1 if γ is stored as its difference from 1, else 0.
    pub gamma_offset: f32,
    /// Added to the mean square.
    pub epsilon: f32,
    /// What values are.
    pub values: HeadValues,
    /// Sizes.
    pub shape: AttentionShape<'a>,
}

/// The backward of [`HeadNorm`], in place: `dx` holds dy before the call. The gradients of values
/// stay, unless they are normed; those of values that are the keys' are added to the keys'.
/// dγ (+)= ….
#[derive(Clone, Copy, Debug)]
pub struct HeadNormBackward<'a> {
    /// (R, (H + 2 K) D).
    pub dx: View,
    /// Floats. (1, D).
    pub dgamma: QueryKey,
    /// The forward's input.
    pub x: View,
    /// The forward's statistics.
    pub statistics: View,
    /// Scales. (1, D).
    pub gamma: QueryKey,
    /// The offset that is added to γ: 1 if γ is stored as its difference from 1, else 0.
    pub gamma_offset: f32,
    /// As in [`HeadNorm`].
    pub values: HeadValues,
    /// Sizes.
    pub shape: AttentionShape<'a>,
    /// True when `dgamma` is added to; false when it is replaced.
    pub accumulate: bool,
}

impl KernelOperation for HeadNorm<'_> {
    fn views(&self, views: &mut Views<'_>) {
        let HeadNorm { y, statistics, x, gamma, values, shape, .. } = *self;
        let rows = shape.rows();
        let dtype = x.dtype;
        let normed = values.normed_heads(shape.heads, shape.kv_heads);
        views.writes("y", y, [rows, shape.qkv_width()], dtype);
        views.writes("statistics", statistics, [rows, normed], Dtype::F32);
        views.reads("x", x, [rows, values.input_width(&shape)], dtype);
        views.reads("gamma.query", gamma.query, [1, shape.head_size], dtype);
        views.reads("gamma.key", gamma.key, [1, shape.head_size], dtype);
    }
}

impl KernelOperation for HeadNormBackward<'_> {
    fn views(&self, views: &mut Views<'_>) {
        let HeadNormBackward { dx, dgamma, x, statistics, gamma, values, shape, .. } = *self;
        let rows = shape.rows();
        let dtype = x.dtype;
        let normed = values.normed_heads(shape.heads, shape.kv_heads);
        views.writes("dx", dx, [rows, shape.qkv_width()], dtype);
        views.writes("dgamma.query", dgamma.query, [1, shape.head_size], Dtype::F32);
        views.writes("dgamma.key", dgamma.key, [1, shape.head_size], Dtype::F32);
        views.reads("x", x, [rows, values.input_width(&shape)], dtype);
        views.reads("statistics", statistics, [rows, normed], Dtype::F32);
        views.reads("gamma.query", gamma.query, [1, shape.head_size], dtype);
        views.reads("gamma.key", gamma.key, [1, shape.head_size], dtype);
    }
}
