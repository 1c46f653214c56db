//! What a model is, as plain data: sizes, and which of the shared parts it is made of.

use super::families::Names;
use crate::kernels::Activation;
use crate::kernels::Rotary;

/// Probabilities of dropout.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Dropouts {
    /// Behind the embedding.
    pub embedding: f32,
    /// Of attention's probabilities.
    pub attention: f32,
    /// Of attention's output.
    pub projection: f32,
    /// Of the feed-forward's output.
    pub feed_forward: f32,
    /// In the head of whole sequences.
    pub classifier: f32,
}

/// What a model predicts, and by what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Head {
    /// The next token, by a table.
    Tokens,
    /// Masked tokens, by a transform, a table and a bias by token.
    Masked,
    /// Of a whole sequence: one of some classes, or a value.
    Classes {
        /// How many scores there are.
        labels: usize,
        /// True when the one score is a value.
        is_value: bool,
    },
}

/// A transformer of one of the families.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    /// What its tensors are called.
    pub names: &'static Names,
    /// Blocks.
    pub layers: usize,
    /// C.
    pub hidden: usize,
    /// H.
    pub heads: usize,
    /// Heads of keys and values, each shared by as many queries' heads.
    pub kv_heads: usize,
    /// D.
    pub head_size: usize,
    /// Channels of the feed-forward.
    pub intermediate: usize,
    /// Tokens there are.
    pub vocabulary: usize,
    /// The longest sequence.
    pub positions: usize,
    /// Rows of the table of positions that stand before the first; no table: `None`.
    pub learned_positions: Option<usize>,
    /// Kinds of tokens; 0: they have none.
    pub token_types: usize,
    /// Positions by rotation.
    pub rotary: Option<Rotary>,
    /// True when a position sees none behind it.
    pub causal: bool,
    /// How many positions it sees at most, itself included, in blocks from `.1` on.
    pub window: Option<(usize, usize)>,
    /// True for a norm by root mean square alone (Zhang and Sennrich 2019).
    pub rms_norm: bool,
    /// True when norms stand behind the sum and not before the branch.
    pub post_norm: bool,
    /// Added to variances.
    pub norm_epsilon: f32,
    /// True when queries and keys are normed by head.
    pub qk_norm: bool,
    /// Biases of queries, keys and values; of attention's output; of the feed-forward.
    pub biases: [bool; 3],
    /// The feed-forward's curve.
    pub activation: Activation,
    /// True when the feed-forward multiplies a gate with what it gates (Shazeer 2020).
    pub gated: bool,
    /// True when weights of products are (outputs, inputs), as PyTorch's linear layers are.
    pub transposed: bool,
    /// Dropout.
    pub dropout: Dropouts,
    /// True when head and embedding are one.
    pub tied: bool,
    /// What it predicts.
    pub head: Head,
    /// Standard deviation of random weights.
    pub initializer_range: f32,
}

impl Shape {
    /// True when a transform and a bias by token stand at the head.
    pub fn masked_head(&self) -> bool {
        self.head == Head::Masked
    }

    /// True when the head scores tokens.
    pub fn scores_tokens(&self) -> bool {
        matches!(self.head, Head::Tokens | Head::Masked)
    }

    /// Channels of queries, keys and values side by side.
    pub fn qkv(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_size
    }

    /// Channels of attention's output before its projection.
    pub fn attention_width(&self) -> usize {
        self.heads * self.head_size
    }

    /// Channels that the feed-forward widens to: a gate's too.
    pub fn up(&self) -> usize {
        self.intermediate * if self.gated { 2 } else { 1 }
    }
}
