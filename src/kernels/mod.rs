//! What layers ask of a device: one method an operation, on views of its memory.
//!
//! Legend: B sequences, T positions, C channels, H heads of queries, K of keys and values, D
//! channels of a head, N outputs, V vocabulary rows of a tile, R = B · T rows. All tensors are row-major. Outputs come first, then inputs,
//! then sizes. Where a gradient of weights is `accumulate`d, the first call of a step replaces it.
//!
//! Weights and what goes from layer to layer are of the device's [`Dtype`](crate::tensor::Dtype). Gradients of weights, statistics,
//! log-sum-exps, `dkv` of [`Apart`], and a head's `dh` and logits are floats, whatever that is.

mod batch;
mod loss;
mod own;
mod rotary;

pub use batch::{
    BatchView, CHUNK_POSITIONS, Document, Dropout, DropoutKey, Places, Rows, SequenceChunk,
};
pub use loss::{CrossEntropy, Loss};
pub use own::{CpuFunction, CustomKernel};
pub use rotary::{Rotary, RotaryScaling};

use crate::tensor::{Scratch, View};

/// Sizes of a product.
#[derive(Clone, Copy, Debug)]
pub struct Linear {
    /// R.
    pub rows: usize,
    /// C.
    pub inputs: usize,
    /// N.
    pub outputs: usize,
    /// True when w is (N, C) and not (C, N).
    pub transposed: bool,
}

/// Sizes of a norm.
#[derive(Clone, Copy, Debug)]
pub struct Norm {
    /// R.
    pub rows: usize,
    /// C.
    pub channels: usize,
    /// Added to the variance, or the mean square.
    pub epsilon: f32,
    /// True: by root mean square, without a mean.
    pub rms: bool,
}

/// Sizes of an attention.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// B and T.
    pub rows: Rows,
    /// H.
    pub heads: usize,
    /// K: heads of keys and values; each serves H ÷ K heads of queries.
    pub kv_heads: usize,
    /// D.
    pub head_size: usize,
    /// True when a position sees none behind it.
    pub causal: bool,
    /// How many positions one sees at most, itself included.
    pub window: Option<usize>,
    /// Tokens of each sequence; the rest is padding that nobody sees.
    pub lengths: &'a [usize],
    /// As [`Places::documents`]: a position sees its own document alone.
    pub documents: &'a [Document],
    /// As [`Places::past`].
    pub past: &'a [usize],
    /// Dropout of the probabilities.
    pub dropout: Option<Dropout>,
}

/// Keys and values that are not beside their queries, and their gradients.
#[derive(Clone, Copy, Debug)]
pub struct Apart {
    /// (B, past + T, 2 K D).
    pub kv: View,
    /// (B, past + T, 2 K D).
    pub dkv: View,
    /// True when `dkv` holds what later queries gave already.
    pub accumulate: bool,
}

/// Sizes of a head tile, and what it is to do.
#[derive(Clone, Copy, Debug)]
pub struct Scores {
    /// R.
    pub rows: usize,
    /// How many of them have a label.
    pub labelled: usize,
    /// C.
    pub channels: usize,
    /// V.
    pub tile: usize,
    /// The first of its rows in the vocabulary.
    pub first: usize,
}

impl<'a> Attention<'a> {
    /// Which position each row is.
    pub fn places(&self) -> Places<'a> {
        Places { rows: self.rows, documents: self.documents, past: self.past }
    }

    /// 2 K D: channels of keys and values side by side.
    pub fn kv_width(&self) -> usize {
        2 * self.kv_heads * self.head_size
    }

    /// (H + 2 K) D: channels of queries, keys and values side by side.
    pub fn packed(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_size
    }
}

/// Sizes of a loss of whole sequences.
#[derive(Clone, Copy, Debug)]
pub struct ClassLoss {
    /// B and T.
    pub rows: Rows,
    /// L.
    pub labels: usize,
    /// True: the square of what one score is off a value. False: the cross entropy of classes.
    pub is_value: bool,
}

/// The curves of feed-forwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// x Φ(x) (Hendrycks and Gimpel 2016).
    GeluErf,
    /// The same, with Φ by tanh.
    GeluTanh,
    /// x σ(x) (Elfwing et al. 2018).
    Silu,
    /// max(x, 0).
    Relu,
    /// The hyperbolic tangent.
    Tanh,
}

impl Activation {
    /// All names that transformers has for them.
    pub const ALL: [(&str, Activation); 7] = [
        ("gelu", Activation::GeluErf),
        ("gelu_new", Activation::GeluTanh),
        ("gelu_pytorch_tanh", Activation::GeluTanh),
        ("silu", Activation::Silu),
        ("swish", Activation::Silu),
        ("relu", Activation::Relu),
        ("tanh", Activation::Tanh),
    ];

    /// The one of this name.
    pub fn named(name: &str) -> Option<Activation> {
        Activation::ALL.iter().find(|(known, _)| *known == name).map(|(_, activation)| *activation)
    }

    /// Its first name.
    pub fn name(self) -> &'static str {
        let named = Activation::ALL.iter().find(|(_, activation)| *activation == self);
        named.expect("each has a name").0
    }
}

/// Floats of a position's head statistics: running maximum, sum, target's logit, label.
pub const STATISTICS: usize = 4;

/// The label of a position's statistics, whose bits the fourth float holds; negative: none.
pub fn label_of(statistics: &[f32]) -> i32 {
    statistics[3].to_bits() as i32
}

/// The most channels of a head that kernels have room for.
pub const HEAD_LIMIT: usize = 256;

/// What a device can do.
pub trait Kernels {
    /// y = x w + b. y: (R, N); x: (R, C); w: (C, N), or (N, C) turned; b: (N).
    fn linear(&self, y: View, x: View, w: View, b: Option<View>, size: Linear);

    /// dx = dy wᵀ, dw (+)= xᵀ dy, db (+)= Σ dy.
    #[allow(clippy::too_many_arguments, reason = "three gradients of three tensors")]
    fn linear_backward(
        &self,
        dx: View,
        dw: View,
        db: Option<View>,
        dy: View,
        x: View,
        w: View,
        size: Linear,
        accumulate: bool,
        scratch: &Scratch<'_>,
    );

    /// y = γ (x − mean) rstd + β. `statistics`: (R, 2), mean (0 by root mean square) and rstd.
    fn norm(&self, y: View, statistics: View, x: View, gamma: View, beta: Option<View>, size: Norm);

    /// dx = `residual` + …, dγ (+)= …, dβ (+)= ….
    #[allow(clippy::too_many_arguments, reason = "three gradients of three tensors")]
    fn norm_backward(
        &self,
        dx: View,
        dgamma: View,
        dbeta: Option<View>,
        residual: Option<View>,
        dy: View,
        x: View,
        statistics: View,
        gamma: View,
        size: Norm,
        accumulate: bool,
        scratch: &Scratch<'_>,
    );

    /// y = f(x).
    fn activate(&self, y: View, x: View, form: Activation);

    /// dx = dx f′(x): before, `dx` holds dy.
    fn activate_backward(&self, dx: View, x: View, form: Activation);

    /// y = f(gate) up. y: (R, I); x: (R, 2 I), gate and up side by side.
    fn gate(&self, y: View, x: View, channels: usize, form: Activation);

    /// dx from dy. dx: (R, 2 I).
    fn gate_backward(&self, dx: View, dy: View, x: View, channels: usize, form: Activation);

    /// Turns queries and keys by their positions, in place; back with `back`. qkv: (R, (H + 2K) D).
    fn rotate(&self, qkv: View, rotary: &Rotary, size: Attention<'_>, back: bool);

    /// Norms each head of queries and keys by root mean square. y, x: (R, (H + 2K) D);
    /// `statistics`: (R, H + K), rstd; gamma: (D) of queries and of keys.
    fn head_norm(
        &self,
        y: View,
        statistics: View,
        x: View,
        gamma: [View; 2],
        epsilon: f32,
        size: Attention<'_>,
    );

    /// Its backward, in place: before, `dx` holds dy; values' gradients stay.
    #[allow(clippy::too_many_arguments, reason = "two gradients of two tensors")]
    fn head_norm_backward(
        &self,
        dx: View,
        dgamma: [View; 2],
        x: View,
        statistics: View,
        gamma: [View; 2],
        size: Attention<'_>,
        accumulate: bool,
        scratch: &Scratch<'_>,
    );

    /// Scaled dot-product attention. y: (R, H D); lse: (B, H, T), log-sum-exp of the scores;
    /// qkv: (R, (H + 2K) D). `kv`: where keys and values are, if not beside the queries, those that
    /// came before and these: (B, past + T, 2 K D), all pasts equal and multiples of 64; causal.
    fn attention(&self, y: View, lse: View, qkv: View, kv: Option<View>, size: Attention<'_>);

    /// Keys and values of each position, side by side. y: (R, 2 K D); qkv: (R, (H + 2K) D).
    fn remember(&self, y: View, qkv: View, size: Attention<'_>);

    /// Puts them back: the other way. qkv: (R, (H + 2K) D); kv: (R, 2 K D).
    fn recall(&self, qkv: View, kv: View, size: Attention<'_>);

    /// Attention to what came before, too: each sequence sees `size.past` rows of its own in
    /// `past`. y: (R, H D); qkv: (R, (H + 2K) D); past: (B, P, 2 K D). Causal.
    fn attention_to_past(&self, y: View, qkv: View, past: View, size: Attention<'_>);

    /// dqkv from dy. With keys and values `apart`, their gradients go there, too.
    #[allow(clippy::too_many_arguments, reason = "all that the forward had, and gradients")]
    fn attention_backward(
        &self,
        dqkv: View,
        dy: View,
        y: View,
        lse: View,
        qkv: View,
        apart: Option<Apart>,
        size: Attention<'_>,
        scratch: &Scratch<'_>,
    );

    /// y = a + dropout(x). (R, C); y may be x.
    fn residual(&self, y: View, a: View, x: View, rows: Rows, dropout: Option<Dropout>);

    /// y = dropout(x), the mask as in [`residual`](Kernels::residual); y may be x.
    fn dropped(&self, y: View, x: View, rows: Rows, dropout: Option<Dropout>);

    /// y = x, of which one may be floats where the other is of the device's [`Dtype`](crate::tensor::Dtype).
    fn cast(&self, y: View, x: View);

    /// y: (B, C), the first rows of x: (B, T, C).
    fn first_rows(&self, y: View, x: View, rows: Rows);

    /// dx: dy in the first rows, 0 in all others.
    fn first_rows_backward(&self, dx: View, dy: View, rows: Rows);

    /// Each sequence's loss, by the label in the statistics of its first position, where it goes.
    /// scores: (B, L).
    fn class_loss(&self, out: View, statistics: View, scores: View, size: ClassLoss);

    /// dscores = scale · d.
    fn class_loss_backward(
        &self,
        dscores: View,
        scores: View,
        statistics: View,
        scale: f32,
        size: ClassLoss,
    );

    /// A kernel of one's own, which its layer has [told of](crate::models::Layer::custom_kernels).
    fn own(&self, kernel: &CustomKernel, writes: &[View], reads: &[View], numbers: &[f32]);

    /// y = 0.
    fn clear(&self, y: View);

    /// y += w by kind of token. w: (kinds, C); kinds: (B, T).
    fn add_types(&self, y: View, w: View, kinds: &[u8]);

    /// dw (+)= Σ over rows of each kind of dy, in order.
    fn add_types_backward(
        &self,
        dw: View,
        dy: View,
        kinds: &[u8],
        accumulate: bool,
        scratch: &Scratch<'_>,
    );

    /// y = x + w by position. w: (positions of the model, C).
    fn add_positions(&self, y: View, x: View, w: View, places: Places<'_>);

    /// dw (+)= Σ over rows of each position of dy; positions that none has get 0 where it replaces.
    fn add_positions_backward(&self, dw: View, dy: View, places: Places<'_>, accumulate: bool);

    /// Takes a tile of the vocabulary into each labelled position's statistics. h: (R, C);
    /// w: (V, C); bias: (V).
    #[allow(clippy::too_many_arguments, reason = "two outputs' worth of inputs")]
    fn score(
        &self,
        out: View,
        statistics: View,
        h: View,
        w: View,
        bias: Option<View>,
        size: Scores,
        scratch: &Scratch<'_>,
    );

    /// Logits of the labelled positions, in order. y: (labelled positions, V); h: (R, C);
    /// w: (V, C); bias: (V).
    #[allow(clippy::too_many_arguments, reason = "as `score`")]
    fn logits(
        &self,
        y: View,
        statistics: View,
        h: View,
        w: View,
        bias: Option<View>,
        size: Scores,
        scratch: &Scratch<'_>,
    );

    /// dh = dh of the tiles before (`None`: 0) + scale · d w, dw (+)= scale · dᵀ h, with d the
    /// loss's gradient of the logits, from complete statistics.
    #[allow(clippy::too_many_arguments, reason = "two gradients of two tensors")]
    fn score_backward(
        &self,
        dh: View,
        dw: View,
        dbias: Option<View>,
        before: Option<View>,
        statistics: View,
        h: View,
        w: View,
        bias: Option<View>,
        loss: &dyn Loss,
        scale: f32,
        size: Scores,
        accumulate: bool,
        scratch: &Scratch<'_>,
    );
}
