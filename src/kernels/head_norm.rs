//! Norms of queries and keys (Henry et al. 2020): of each head, or of all heads at once; and of the
//! heads of values.
//!
//! A row has parts that are normed by themselves: P of queries, and Q of keys.

use std::ops::Range;

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

/// What a norm of queries and keys spans, and which scales it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// Each head by root mean square. All heads of queries have the same scales, and so have all
    /// heads of keys (Qwen3).
    ByHead,
    /// All heads of queries at once by root mean square, and all heads of keys (OLMo 2).
    Joint,
    /// Each head by mean and deviation, with scales of its own (Command R+).
    LayerNorm,
}

impl QkNorm {
    /// The parts of a row, for H, K and D.
    pub(crate) fn parts(self, [heads, kv_heads, head_size]: [usize; 3]) -> NormParts {
        match self {
            QkNorm::ByHead | QkNorm::LayerNorm => NormParts {
                count: QueryKey { query: heads, key: kv_heads },
                channels: QueryKey { query: head_size, key: head_size },
            },
            QkNorm::Joint => NormParts {
                count: QueryKey { query: 1, key: 1 },
                channels: QueryKey { query: heads * head_size, key: kv_heads * head_size },
            },
        }
    }

    /// Sizes of the scales.
    pub(crate) fn scales(self, parts: &NormParts) -> QueryKey<[usize; 2]> {
        let NormParts { count, channels } = *parts;
        let rows = |count| if self == QkNorm::LayerNorm { count } else { 1 };
        QueryKey {
            query: [rows(count.query), channels.query],
            key: [rows(count.key), channels.key],
        }
    }

    /// The scales of a part with these channels, the n-th of queries or of keys, among all scales
    /// of its kind.
    pub(crate) fn scales_of(self, nth: usize, channels: usize) -> Range<usize> {
        match self {
            QkNorm::ByHead | QkNorm::Joint => 0..channels,
            QkNorm::LayerNorm => nth * channels..(nth + 1) * channels,
        }
    }

    /// Statistics of a part.
    pub(crate) fn statistics(self) -> usize {
        match self {
            QkNorm::ByHead | QkNorm::Joint => 1,
            QkNorm::LayerNorm => 2,
        }
    }
}

/// The parts of a row that are normed by themselves: those of queries, then those of keys. Behind
/// them values have as many parts as keys.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NormParts {
    /// P and Q.
    pub(crate) count: QueryKey<usize>,
    /// Channels of a part.
    pub(crate) channels: QueryKey<usize>,
}

impl NormParts {
    /// P + Q: the parts that have scales.
    pub(crate) fn scaled(&self) -> usize {
        self.count.query + self.count.key
    }

    /// The parts that have statistics.
    pub(crate) fn normed(&self, values: HeadValues) -> usize {
        self.scaled() + if values == HeadValues::Normed { self.count.key } else { 0 }
    }

    /// The channels of a part among those of a row.
    pub(crate) fn place(&self, part: usize) -> Range<usize> {
        let NormParts { count, channels } = *self;
        let of_keys = part.saturating_sub(count.query) * channels.key;
        let start = part.min(count.query) * channels.query + of_keys;
        let is_query = part < count.query;
        start..start + if is_query { channels.query } else { channels.key }
    }
}

impl HeadValues {
    /// The width of the input of a norm of heads.
    pub(crate) fn input_width(self, shape: &AttentionShape<'_>) -> usize {
        match self {
            HeadValues::Keys => (shape.heads + shape.kv_heads) * shape.head_size,
            HeadValues::Plain | HeadValues::Normed => shape.qkv_width(),
        }
    }
}

/// y = (offset + γ) (x − mean) rstd by part, where the mean of a norm by root mean square is 0;
/// values are copied, or normed.
#[derive(Clone, Copy, Debug)]
pub struct HeadNorm<'a> {
    /// Output. (R, (H + 2 K) D).
    pub y: View,
    /// Floats: rstd of each part. (R, P + Q); of normed values, too: (R, P + 2 Q). With
    /// [`QkNorm::LayerNorm`], the means of all these parts stand behind.
    pub statistics: View,
    /// Input. (R, (H + 2 K) D); where values are the keys', (R, (H + K) D).
    pub x: View,
    /// Scales: of one part, or of each.
    pub gamma: QueryKey,
    /// The offset that is added to γ: 1 if γ is stored as its difference from 1, else 0.
    pub gamma_offset: f32,
    /// Added to the mean square, or to the variance.
    pub epsilon: f32,
    /// What the norm spans.
    pub norm: QkNorm,
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
    /// Floats.
    pub dgamma: QueryKey,
    /// The forward's input.
    pub x: View,
    /// The forward's statistics.
    pub statistics: View,
    /// Scales: of one part, or of each.
    pub gamma: QueryKey,
    /// The offset that is added to γ: 1 if γ is stored as its difference from 1, else 0.
    pub gamma_offset: f32,
    /// As in [`HeadNorm`].
    pub norm: QkNorm,
    /// As in [`HeadNorm`].
    pub values: HeadValues,
    /// Sizes.
    pub shape: AttentionShape<'a>,
    /// True when `dgamma` is added to; false when it is replaced.
    pub accumulate: bool,
}

impl HeadNorm<'_> {
    /// The parts of a row.
    pub(crate) fn parts(&self) -> NormParts {
        self.norm.parts(self.shape.sizes())
    }
}

impl HeadNormBackward<'_> {
    /// The parts of a row.
    pub(crate) fn parts(&self) -> NormParts {
        self.norm.parts(self.shape.sizes())
    }
}

impl KernelOperation for HeadNorm<'_> {
    fn views(&self, views: &mut Views<'_>) {
        let HeadNorm { y, statistics, x, gamma, norm, values, shape, .. } = *self;
        let rows = shape.rows();
        let dtype = x.dtype;
        let parts = self.parts();
        let scales = norm.scales(&parts);
        let of_row = parts.normed(values) * norm.statistics();
        views.writes("y", y, [rows, shape.qkv_width()], dtype);
        views.writes("statistics", statistics, [rows, of_row], Dtype::F32);
        views.reads("x", x, [rows, values.input_width(&shape)], dtype);
        views.reads("gamma.query", gamma.query, scales.query, dtype);
        views.reads("gamma.key", gamma.key, scales.key, dtype);
    }
}

impl KernelOperation for HeadNormBackward<'_> {
    fn views(&self, views: &mut Views<'_>) {
        let HeadNormBackward { dx, dgamma, x, statistics, gamma, norm, values, shape, .. } = *self;
        let rows = shape.rows();
        let dtype = x.dtype;
        let parts = self.parts();
        let scales = norm.scales(&parts);
        let of_row = parts.normed(values) * norm.statistics();
        views.writes("dx", dx, [rows, shape.qkv_width()], dtype);
        views.writes("dgamma.query", dgamma.query, scales.query, Dtype::F32);
        views.writes("dgamma.key", dgamma.key, scales.key, Dtype::F32);
        views.reads("x", x, [rows, values.input_width(&shape)], dtype);
        views.reads("statistics", statistics, [rows, of_row], Dtype::F32);
        views.reads("gamma.query", gamma.query, scales.query, dtype);
        views.reads("gamma.key", gamma.key, scales.key, dtype);
    }
}
