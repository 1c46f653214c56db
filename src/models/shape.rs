//! The shape of a model as plain data: its sizes, and its choice among the parts that families
//! share.

use serde::{Deserialize, Serialize};

use super::balance::Balance;
use super::block_inputs::BlockInputs;
use super::dense::{DenseModule, MOST_DENSE};
use super::families::Names;
use super::pooling::EmbeddingPooling;
use super::windows::{BlockPattern, GlobalHeads, SharedKv, Window};
use crate::kernels::{
    Activation, ClampedGate, GateForm, HeadValues, LinearHeads, LogitForm, LongRope, Pooling,
    ProblemType, QkNorm, Rotary, RotaryScaling, Yarn,
};

/// Probabilities of dropout.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Dropouts {
    /// For the embedding's output.
    pub embedding: f32,
    /// For attention's probabilities.
    pub attention: f32,
    /// For attention's output.
    pub projection: f32,
    /// For the feed-forward's output.
    pub feed_forward: f32,
    /// For the head of classes.
    pub classifier: f32,
}

/// The head of a model, and its predictions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Head {
    /// The next token, by a table of the vocabulary.
    Tokens,
    /// Masked tokens, by a transform, a table of the vocabulary and a bias for each token.
    Masked,
    /// The class of a sequence, any number of its labels, or one value.
    Classes {
        /// The number of scores.
        labels: usize,
        /// The labels of a sequence, and the loss.
        problem: ProblemType,
    },
    /// The class of each token.
    TokenClasses {
        /// The number of scores.
        labels: usize,
    },
    /// None: the model's output is an embedding of each sequence, made of its last hidden states.
    Embedding {
        /// How the hidden states of a sequence become one.
        pooling: EmbeddingPooling,
        /// The dense modules that it passes then.
        dense: [Option<DenseModule>; MOST_DENSE],
        /// Whether embeddings are scaled to length 1.
        normalise: bool,
        /// Whether the tokens of a prompt count.
        include_prompt: bool,
    },
}

impl Head {
    /// The number of scores of a head of classes.
    pub fn labels(&self) -> Option<usize> {
        match *self {
            Head::Classes { labels, .. } | Head::TokenClasses { labels } => Some(labels),
            Head::Tokens | Head::Masked | Head::Embedding { .. } => None,
        }
    }

    /// The number of labels that a sequence may have at once, if it may have several.
    pub(crate) fn label_set(self) -> Option<usize> {
        match self {
            Head::Classes { labels, problem: ProblemType::MultiLabelClassification } => {
                Some(labels)
            }
            _ => None,
        }
    }
}

/// Experts in place of the feed-forward of some blocks (Shazeer et al. 2017).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Experts {
    /// E.
    pub count: usize,
    /// k: the experts that a row chooses.
    pub per_token: usize,
    /// I: channels of one expert.
    pub intermediate: usize,
    /// True: the weights of a row are the softmax over its chosen logits. False: over all logits.
    pub normalised: bool,
    /// True when the router has biases.
    pub router_bias: bool,
    /// Channels of the shared expert, which all rows use. 0: there is none.
    pub shared: usize,
    /// Of the blocks from `from` on, every `every`-th has experts.
    pub every: usize,
    /// The first block that may have experts.
    pub from: usize,
    /// Losses of the routers, and limits of their choice.
    pub balance: Balance,
    /// The most bundles that one visit has beside no other block. `None`: one visit has the whole
    /// layer. Results are the same, bit for bit.
    pub bundles: Option<usize>,
    /// What an update does to an expert that had no row in its step.
    pub idle: IdleExperts,
}

/// What an update does to an expert that no row of its step chose.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum IdleExperts {
    /// Its gradient is zero, and it is updated like every other tensor.
    #[default]
    Update,
    /// It is left alone: weights, states of the optimizer, and the count of updates.
    Keep,
}

impl Experts {
    /// Whether a block has experts.
    pub fn is_of(&self, block: usize) -> bool {
        block >= self.from && (block + 1).is_multiple_of(self.every)
    }

    /// True if uploads of experts should wait until it is known which of them so few rows choose.
    /// While they wait, the device computes the rest of the layer without an upload beside it. So
    /// at least an eighth of the experts must be idle, by a router that chooses evenly. With more
    /// rows the wait costs more, and saves less.
    pub(crate) fn pay_a_wait(&self, rows: usize) -> bool {
        const LEAST_IDLE: f64 = 0.125;
        let is_idle_for_one = 1.0 - self.per_token as f64 / self.count as f64;
        let is_idle_for_all = is_idle_for_one.powf(rows as f64);
        self.bundles.is_some() && is_idle_for_all >= LEAST_IDLE
    }
}

/// Where the norms of a block stand, beside its branches: attention and the feed-forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormPlaces {
    /// The input of each branch is normed (GPT-2, Llama).
    Before,
    /// The same, but the first block's attention reads the norm behind the embedding (ModernBERT).
    BeforeButFirst,
    /// So is its output, before it is added to the residual stream (Gemma 3).
    Around,
    /// The output of each branch is normed before it is added, and its input is not (OLMo 2).
    Behind,
    /// The sum of a branch and the residual stream is normed (BERT).
    BehindSums,
    /// Both branches read the block's input, which one norm norms for both (Cohere).
    BeforeBoth,
    /// Both branches read the block's input, and each has a norm of its own (GPT-NeoX).
    BeforeEach,
}

impl NormPlaces {
    /// True when the inputs of branches are normed.
    pub(crate) fn are_before(self) -> bool {
        !matches!(self, NormPlaces::Behind | NormPlaces::BehindSums)
    }

    /// True when the outputs of branches are normed.
    pub(crate) fn are_behind(self) -> bool {
        matches!(self, NormPlaces::Around | NormPlaces::Behind)
    }

    /// True when both branches read the block's input.
    pub(crate) fn are_beside(self) -> bool {
        matches!(self, NormPlaces::BeforeBoth | NormPlaces::BeforeEach)
    }

    /// True when sums are normed.
    pub(crate) fn are_behind_sums(self) -> bool {
        self == NormPlaces::BehindSums
    }
}

/// Linear attention in place of attention in some blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearAttention {
    /// Its sizes.
    pub heads: LinearHeads,
    /// The blocks that have it.
    pub blocks: BlockPattern,
}

/// A transformer of one of the families.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    /// The names of its tensors.
    pub names: &'static Names,
    /// The number of blocks.
    pub layers: usize,
    /// C.
    pub hidden: usize,
    /// Channels of the embedding, if they are not C: then a product follows.
    pub embedding_channels: Option<usize>,
    /// H.
    pub heads: usize,
    /// K: heads of keys and values. Each serves H ÷ K heads of queries.
    pub kv_heads: usize,
    /// D.
    pub head_size: usize,
    /// What values are, where queries and keys are normed by head.
    pub values: HeadValues,
    /// Heads of the blocks without a window, if they differ.
    pub global_heads: Option<GlobalHeads>,
    /// The blocks that read the keys and values of others, if any do.
    pub shared_kv: Option<SharedKv>,
    /// Inputs of each block beside hidden states, if blocks have them.
    pub block_inputs: Option<BlockInputs>,
    /// I: channels of the feed-forward.
    pub intermediate: usize,
    /// Experts in place of the feed-forward of some blocks.
    pub experts: Option<Experts>,
    /// Tokens of the vocabulary.
    pub vocabulary: usize,
    /// The positions of a sequence, without a scaling of rotary positions for longer ones.
    pub positions: usize,
    /// With a table of positions: its unused rows before the first position. `None`: no table.
    pub learned_positions: Option<usize>,
    /// The number of token types; 0: the model has none.
    pub token_types: usize,
    /// The factor of attention's scores; `None`: 1 ÷ √D.
    pub score_scale: Option<f32>,
    /// The limit of attention's scores: a score s becomes cap tanh(s ÷ cap).
    pub score_cap: Option<f32>,
    /// Rotary positions.
    pub rotary: Option<Rotary>,
    /// The blocks that have rotary positions, if the model has any.
    pub rotary_blocks: BlockPattern,
    /// True when a position sees no later one.
    pub causal: bool,
    /// Rotary positions of the blocks with a window, if they differ from those of other blocks.
    pub window_rotary: Option<Rotary>,
    /// The window of attention, and the blocks that have it.
    pub window: Option<Window>,
    /// True for a norm by root mean square alone (Zhang and Sennrich 2019).
    pub rms_norm: bool,
    /// True when norms have no shifts, though they subtract the mean.
    pub norms_only_scale: bool,
    /// Where the norms of a block stand.
    pub norms: NormPlaces,
    /// Added to the scales of norms: 1 if they are stored as differences from 1.
    pub norm_offset: f32,
    /// Added to the variance, or the mean square, of a norm.
    pub norm_epsilon: f32,
    /// The norms of queries and keys, if they have any.
    pub qk_norm: Option<QkNorm>,
    /// True when the projection gives queries, keys and values of each head side by side.
    pub qkv_by_head: bool,
    /// True when each head of attention has a sink: a learned score that joins the softmax and has
    /// no value.
    pub sinks: bool,
    /// True when a number of each block, which is not trained, multiplies its output.
    pub output_scalars: bool,
    /// True when the output of attention is multiplied by sigmoids of gates, which the projection
    /// of the queries gives beside these, head by head.
    pub output_gates: bool,
    /// Linear attention, and the blocks that have it.
    pub linear: Option<LinearAttention>,
    /// Whether these have biases: queries, keys and values; attention's output; the feed-forward.
    pub biases: [bool; 3],
    /// True when the transform of a head, if it has one, has a bias.
    pub transform_bias: bool,
    /// True when a head of masked tokens has a bias for each token.
    pub token_bias: bool,
    /// The feed-forward's activation function.
    pub activation: Activation,
    /// True when the feed-forward multiplies its up projection by a gate (Shazeer 2020).
    pub gated: bool,
    /// The gate in place of the activation function's, if gate and up projection are limited.
    pub clamped: Option<ClampedGate>,
    /// True when weights of products are (outputs, inputs), as in PyTorch's linear layers.
    pub transposed: bool,
    /// The most positions of one sequence that a layer of a causal model computes at once. All
    /// layers of a model have the same number.
    pub chunk_positions: usize,
    /// S: the slices into which heads and channels of a block are cut; 1: they are not.
    pub slices: usize,
    /// P: the pieces in which a block is visited, a divisor of its slices; 1: it is visited whole.
    /// Results are the same, bit for bit.
    pub pieces: usize,
    /// Probabilities of dropout.
    pub dropout: Dropouts,
    /// The factor of embeddings.
    pub embedding_scale: f32,
    /// The factor of a branch's output, before it is added to the residual stream.
    pub residual_scale: f32,
    /// How logits of the vocabulary are made.
    pub logits: LogitForm,
    /// True when the head's table is the embedding's.
    pub tied: bool,
    /// The head, and its predictions.
    pub head: Head,
    /// The rows of a sequence that the head of classes of an encoder reads.
    pub pooling: Pooling,
    /// The standard deviation of initial weights.
    pub initializer_range: f32,
}

impl Shape {
    /// The default of `chunk_positions`.
    pub const CHUNK_POSITIONS: usize = 8192;

    /// Positions of the largest tile of attention on any device: chunks are of whole tiles.
    pub const CHUNK_TILE: usize = 128;

    /// The most positions of any model.
    pub(crate) const POSITION_LIMIT: usize = 1 << 20;

    /// The most positions of a sequence: those of the model, or, if its rotary positions are
    /// stretched, `factor` times those that it was trained with. The other kinds (Llama 3's,
    /// LongRoPE), and models whose layers have rotary positions by their kind, count the longer
    /// sequences in `positions` already.
    pub fn most_positions(&self) -> usize {
        let is_one_kind = self.window_rotary.is_none();
        let scaling = self.rotary.filter(|_| is_one_kind).map(|rotary| rotary.scaling);
        let (trained, factor) = match scaling {
            Some(RotaryScaling::Linear(factor) | RotaryScaling::Dynamic { factor, .. }) => {
                (self.positions, factor)
            }
            Some(RotaryScaling::Yarn(Yarn { factor, positions, .. })) => (positions, factor),
            _ => (self.positions, 1.0),
        };
        let stretched = (trained as f64 * f64::from(factor)) as usize;
        stretched.min(Shape::POSITION_LIMIT).max(self.positions)
    }

    /// The number of positions beyond which a text that is generated is read anew; `None`: it never
    /// is.
    pub(crate) fn rereads_beyond(&self) -> Option<usize> {
        match self.rotary?.scaling {
            RotaryScaling::LongRope(LongRope { positions, .. })
                if self.names.rereads_long_texts() =>
            {
                Some(positions)
            }
            _ => None,
        }
    }

    /// The modules of a layer whose outputs are added to the hidden states: of attention and of the
    /// feed-forward layer.
    pub(crate) fn residual_outputs(&self, layer: usize) -> [String; 2] {
        let name = |module: &str| module.replace("{}", &layer.to_string());
        let output = match self.linear_of(layer) {
            Some(_) => self.names.linear.output,
            None => self.names.projection,
        };
        [name(output), name(self.names.down)]
    }

    /// True when a block has the norm of the attention.
    pub(crate) fn has_attention_norm(&self, block: usize) -> bool {
        self.norms != NormPlaces::BeforeButFirst || block > 0
    }

    /// True when the input of a block's attention is normed.
    pub(crate) fn norms_attention_input(&self, block: usize) -> bool {
        self.norms.are_before() && self.has_attention_norm(block)
    }

    /// True when the head scores masked tokens: it has a transform and, with `token_bias`, a bias
    /// for each token.
    pub fn masked_head(&self) -> bool {
        self.head == Head::Masked
    }

    /// The name of the model's tensor that files of adapters have under this one. A tied head is
    /// the embedding, and the bias of a masked head has two names.
    pub(crate) fn name_of(&self, stored: &str) -> String {
        match self.names.head_biases() {
            biases if biases.iter().any(|bias| bias == stored) => self.head_bias(),
            _ if self.tied && self.scores_vocabulary() && stored == self.names.head => {
                self.names.embedding.into()
            }
            _ => stored.into(),
        }
    }

    /// The name of the bias of a masked LM head.
    pub fn head_bias(&self) -> String {
        let [of_layer, own] = self.names.head_biases();
        if self.tied { own } else { of_layer }
    }

    /// True when the head scores the tokens of the vocabulary.
    pub fn scores_vocabulary(&self) -> bool {
        matches!(self.head, Head::Tokens | Head::Masked)
    }

    /// The module of the transform of a head of classes; "" without one.
    pub(crate) fn class_transform(&self) -> &'static str {
        match self.head {
            Head::Classes { .. } => self.names.class_dense,
            Head::TokenClasses { .. } if self.names.transforms_tokens => self.names.class_dense,
            _ => "",
        }
    }

    pub(crate) fn head_dropout(&self) -> f32 {
        match self.head {
            Head::TokenClasses { .. } if !self.names.token_classifier_dropout => {
                self.dropout.feed_forward
            }
            _ => self.dropout.classifier,
        }
    }

    /// The sizes of a block's linear attention, if it has that.
    pub(crate) fn linear_of(&self, block: usize) -> Option<LinearHeads> {
        self.linear.filter(|linear| linear.blocks.has(block)).map(|linear| linear.heads)
    }

    /// True if a block has rotary positions, if the model has any.
    pub(crate) fn rotates(&self, block: usize) -> bool {
        self.rotary_blocks.has(block)
    }

    /// How a gated feed-forward's gate and up projection become one.
    pub(crate) fn gate_form(&self) -> GateForm {
        self.clamped.map_or(GateForm::Plain(self.activation), GateForm::Clamped)
    }

    /// Channels of the embedding.
    pub fn embedding_width(&self) -> usize {
        self.embedding_channels.unwrap_or(self.hidden)
    }

    /// Channels that the host gathers for a token: of its embedding, and of all blocks' inputs.
    pub(crate) fn gathered_width(&self) -> usize {
        let of_inputs = self.block_inputs.map_or(0, |inputs| self.layers * inputs.channels);
        self.embedding_width() + of_inputs
    }

    /// Whether a block has a window.
    pub(crate) fn has_window(&self, block: usize) -> bool {
        self.window.is_some_and(|window| window.is_of(block))
    }

    /// The shape with the heads and the feed-forward of a block.
    pub(crate) fn of_block(self, block: usize) -> Shape {
        let is_wide = self.shared_kv.is_some_and(|shared| shared.wide && block >= shared.from);
        let intermediate = self.intermediate * if is_wide { 2 } else { 1 };
        let shape = Shape { intermediate, ..self };
        if self.has_window(block) { shape } else { shape.with_global_heads() }
    }

    /// The shape with the heads of blocks without a window.
    pub(crate) fn with_global_heads(self) -> Shape {
        let Some(GlobalHeads { kv_heads, head_size, values }) = self.global_heads else {
            return self;
        };
        Shape { kv_heads, head_size, values, ..self }
    }

    /// Channels of queries, keys and values side by side.
    pub fn qkv(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_size
    }

    /// The same, as the projection gives them.
    pub(crate) fn projected_qkv(&self) -> usize {
        match self.values {
            HeadValues::Keys => self.qkv() - self.kv_heads * self.head_size,
            HeadValues::Plain | HeadValues::Normed => self.qkv(),
        }
    }

    /// Channels of attention's output before its projection.
    pub fn attention_width(&self) -> usize {
        self.heads * self.head_size
    }

    /// Channels of the feed-forward before its activation function, with those of a gate.
    pub fn up(&self) -> usize {
        self.up_of(self.intermediate)
    }

    /// The same of a feed-forward with these channels.
    pub(crate) fn up_of(&self, channels: usize) -> usize {
        channels * if self.gated { 2 } else { 1 }
    }
}
