//! The sizes of a model.

use super::kernels::Gelu;

/// Probabilities of dropout.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Dropouts {
    /// Behind the embedding.
    pub embedding: f32,
    /// Of attention's probabilities.
    pub attention: f32,
    /// Onto the residual stream.
    pub residual: f32,
}

/// A decoder of GPT-2's kind.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    /// Blocks.
    pub layers: usize,
    /// C.
    pub hidden: usize,
    /// H.
    pub heads: usize,
    /// Channels of the feed-forward.
    pub intermediate: usize,
    /// Tokens there are.
    pub vocabulary: usize,
    /// The longest sequence.
    pub positions: usize,
    /// Form of GELU.
    pub gelu: Gelu,
    /// Added to variances.
    pub layer_norm_epsilon: f32,
    /// Dropout.
    pub dropout: Dropouts,
    /// True when head and embedding are one.
    pub tied: bool,
    /// Standard deviation of random weights.
    pub initializer_range: f32,
}
