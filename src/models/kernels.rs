//! What layers ask of a device: one method an operation, on views of its memory.
//!
//! Legend: B sequences, T positions, C channels, H heads, D = C ÷ H, N outputs, V vocabulary
//! rows of a tile, R = B · T rows. All tensors are row-major. Outputs come first, then inputs,
//! then sizes. Where a gradient of weights is `accumulate`d, the first call of a step replaces it.

use std::ops::Range;

use super::layer::Scratch;
use super::loss::Loss;

/// A range of a device's memory, in f32 elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    /// Its first element.
    pub at: usize,
    /// Its elements.
    pub len: usize,
}

impl View {
    /// A part of it.
    ///
    /// # Panics
    /// The part lies outside.
    pub fn part(self, range: Range<usize>) -> View {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {self:?}");
        View { at: self.at + range.start, len: range.end - range.start }
    }
}

/// Draws a layer's dropout masks: the same numbers whenever they are asked for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    /// Probability of zero, below 1.
    pub probability: f32,
    /// The run's seed.
    pub seed: u64,
    /// The step.
    pub step: u64,
    /// The layer, and which of its dropouts.
    pub site: u32,
    /// The index in the step of the micro-batch's first sequence.
    pub first_sequence: u32,
}

/// Sizes of one micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// B.
    pub sequences: usize,
    /// T.
    pub positions: usize,
}

impl Rows {
    /// R.
    pub fn count(self) -> usize {
        self.sequences * self.positions
    }
}

/// Sizes of a product.
#[derive(Clone, Copy, Debug)]
pub struct Linear {
    /// R.
    pub rows: usize,
    /// C.
    pub inputs: usize,
    /// N.
    pub outputs: usize,
}

/// Sizes of a layer norm.
#[derive(Clone, Copy, Debug)]
pub struct Norm {
    /// R.
    pub rows: usize,
    /// C.
    pub channels: usize,
    /// Added to the variance.
    pub epsilon: f32,
}

/// Sizes of an attention.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// B and T.
    pub rows: Rows,
    /// H.
    pub heads: usize,
    /// D.
    pub head_size: usize,
    /// True when a position sees none behind it.
    pub causal: bool,
    /// Tokens of each sequence; the rest is padding that nobody sees.
    pub lengths: &'a [usize],
    /// Dropout of the probabilities.
    pub dropout: Option<Dropout>,
}

/// Sizes of a head tile.
#[derive(Clone, Copy, Debug)]
pub struct Scores {
    /// R.
    pub rows: usize,
    /// C.
    pub channels: usize,
    /// V.
    pub tile: usize,
    /// The first of its rows in the vocabulary.
    pub first: usize,
}

/// The two forms of GELU (Hendrycks and Gimpel 2016).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gelu {
    /// x Φ(x).
    Erf,
    /// Φ by tanh.
    Tanh,
}

/// How a token is drawn: the largest of logit ÷ temperature + Gumbel noise is a draw from their
/// softmax (Gumbel 1954; Maddison et al. 2014), found tile by tile without the logits of all.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0: the likeliest.
    pub temperature: f32,
    /// What the noise is drawn from, with position and token.
    pub seed: u64,
}

/// Floats of a position's head statistics: running maximum, sum, target's logit, label. When
/// tokens are drawn: the best value so far, 0, its token, label.
pub const STATISTICS: usize = 4;

/// What a device can do.
pub trait Kernels {
    /// y = x w + b. y: (R, N); x: (R, C); w: (C, N); b: (N).
    fn linear(&self, y: View, x: View, w: View, b: View, size: Linear);

    /// dx = dy wᵀ, dw (+)= xᵀ dy, db (+)= Σ dy.
    #[allow(clippy::too_many_arguments, reason = "three gradients of three tensors")]
    fn linear_backward(
        &self,
        dx: View,
        dw: View,
        db: View,
        dy: View,
        x: View,
        w: View,
        size: Linear,
        accumulate: bool,
        scratch: &Scratch<'_>,
    );

    /// y = γ (x − mean) rstd + β. `statistics`: (R, 2), mean and rstd.
    fn layer_norm(&self, y: View, statistics: View, x: View, gamma: View, beta: View, size: Norm);

    /// dx = `residual` + …, dγ (+)= …, dβ (+)= ….
    #[allow(clippy::too_many_arguments, reason = "three gradients of three tensors")]
    fn layer_norm_backward(
        &self,
        dx: View,
        dgamma: View,
        dbeta: View,
        residual: Option<View>,
        dy: View,
        x: View,
        statistics: View,
        gamma: View,
        size: Norm,
        accumulate: bool,
        scratch: &Scratch<'_>,
    );

    /// y = gelu(x).
    fn gelu(&self, y: View, x: View, form: Gelu);

    /// dx = dx gelu′(x): before, `dx` holds dy.
    fn gelu_backward(&self, dx: View, x: View, form: Gelu);

    /// Scaled dot-product attention. y: (R, C); lse: (B, H, T), log-sum-exp of the scores;
    /// qkv: (R, 3C).
    fn attention(&self, y: View, lse: View, qkv: View, size: Attention<'_>);

    /// dqkv from dy.
    #[allow(clippy::too_many_arguments, reason = "all that the forward had, and gradients")]
    fn attention_backward(
        &self,
        dqkv: View,
        dy: View,
        y: View,
        lse: View,
        qkv: View,
        size: Attention<'_>,
        scratch: &Scratch<'_>,
    );

    /// y = a + dropout(x). (R, C); y may be x.
    fn residual(&self, y: View, a: View, x: View, rows: Rows, dropout: Option<Dropout>);

    /// y = dropout(x), the mask as in [`residual`](Kernels::residual); y may be x.
    fn dropped(&self, y: View, x: View, rows: Rows, dropout: Option<Dropout>);

    /// y = x + w by position. w: (positions of the model, C).
    fn add_positions(&self, y: View, x: View, w: View, rows: Rows);

    /// dw (+)= Σ over sequences of dy; positions beyond T get 0 where it replaces.
    fn add_positions_backward(&self, dw: View, dy: View, rows: Rows, accumulate: bool);

    /// Takes a tile of the vocabulary into each labelled position's statistics. h: (R, C);
    /// w: (V, C).
    #[allow(clippy::too_many_arguments, reason = "two outputs' worth of inputs")]
    fn score(
        &self,
        out: View,
        statistics: View,
        h: View,
        w: View,
        size: Scores,
        scratch: &Scratch<'_>,
    );

    /// Takes a tile of the vocabulary into each labelled position's draw of a token.
    #[allow(clippy::too_many_arguments, reason = "as `score`, and how")]
    fn sample(
        &self,
        out: View,
        statistics: View,
        h: View,
        w: View,
        how: Sampling,
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
        before: Option<View>,
        statistics: View,
        h: View,
        w: View,
        loss: &dyn Loss,
        scale: f32,
        size: Scores,
        accumulate: bool,
        scratch: &Scratch<'_>,
    );
}
