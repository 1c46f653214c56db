//! Linear attention by the gated delta rule (Yang et al. 2025, as in Qwen3.5). A head has a state
//! of (D_v, D_k) numbers in place of keys and values. Each position shrinks it, and replaces what
//! the state has at its key by its value.
//!
//! Legend: H heads of values, G heads of queries and keys. Each of them serves H ÷ G heads of
//! values. M = 2 G D_k + H D_v channels pass the convolution: queries, keys and values side by
//! side. A row of the projection has P = M + 2 H + H D_v channels: these, the factors of new
//! values (β), the steps (a), and the gates of the output (z).

use super::batch::BatchView;
use super::operation::{KernelOperation, Views};
use crate::tensor::{Dtype, View};

/// The sizes of linear attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearHeads {
    /// G.
    pub key_heads: usize,
    /// H.
    pub value_heads: usize,
    /// D_k.
    pub key_size: usize,
    /// D_v.
    pub value_size: usize,
    /// Positions that the convolution sees, its own included.
    pub taps: usize,
}

impl LinearHeads {
    /// G D_k: channels of all queries, or of all keys.
    pub fn keys(&self) -> usize {
        self.key_heads * self.key_size
    }

    /// H D_v: channels of all values, and of the output.
    pub fn values(&self) -> usize {
        self.value_heads * self.value_size
    }

    /// M.
    pub fn mixed(&self) -> usize {
        2 * self.keys() + self.values()
    }

    /// M + 2 H: the channels of the projection in front of the gates.
    pub fn remembered(&self) -> usize {
        self.mixed() + 2 * self.value_heads
    }

    /// P.
    pub fn projected(&self) -> usize {
        self.remembered() + self.values()
    }

    /// (taps − 1) M: what the convolution of later rows reads of earlier ones.
    pub fn inputs(&self) -> usize {
        (self.taps - 1) * self.mixed()
    }

    /// H D_v D_k: the states of a sequence.
    pub fn states(&self) -> usize {
        self.values() * self.key_size
    }

    /// S: floats that the rows of a sequence leave to later ones. See [`Carried`].
    pub fn carried(&self) -> usize {
        self.inputs() + self.states()
    }
}

/// The rows of linear attention, and its sizes. A state begins with zeros at each document. Rows
/// may follow others of their sequences ([`BatchView::positions_before`]): see [`Carried`].
#[derive(Clone, Copy, Debug)]
pub struct LinearShape<'a> {
    /// The rows, their documents, and the positions before them.
    pub batch: BatchView<'a>,
    /// Sizes.
    pub heads: LinearHeads,
}

/// What the earlier rows of a sequence have left to these, and what these leave to later ones: S
/// floats for each sequence. First (taps − 1, M): the inputs of the convolution on the last rows,
/// the last one behind the others. Then (H, D_v, D_k): the state of each head of values. The
/// convolution reads and writes the first part, the delta rule the second. What lies in front of
/// the first position of a document does not count, and must be finite; of a sequence without
/// earlier rows nothing is read.
#[derive(Clone, Copy, Debug, Default)]
pub struct Carried {
    /// Input; `None`: no sequence has earlier rows. (B, S).
    pub before: Option<View>,
    /// Output, if there are later rows. (B, S).
    pub behind: Option<View>,
}

/// The gradients of what rows leave to later ones: S floats for each sequence, in the order of
/// [`Carried`]. In place of the gradients of the convolution's inputs on the last rows there are
/// those of its sums (in front of SiLU) on the first rows behind them, (taps − 1, M): the gradient
/// of an input is then one sum in one order, wherever a sequence is cut. Rows that are not there
/// are zeros.
#[derive(Clone, Copy, Debug, Default)]
pub struct CarriedGradients {
    /// The forward's input. (B, S).
    pub before: Option<View>,
    /// Output: the gradient of `before`. (B, S).
    pub dbefore: Option<View>,
    /// Input: the gradient of what these rows have left; `None`: there are no later rows. (B, S).
    pub dbehind: Option<View>,
}

/// The numbers that each head of values learns.
#[derive(Clone, Copy, Debug)]
pub struct HeadDecay<T = View> {
    /// ln A. (1, H).
    pub log: T,
    /// What is added to the steps. (1, H).
    pub bias: T,
}

/// y = silu(Σ w\[c, i\] x\[row − taps + 1 + i, c\]) by channel, over rows of one document.
#[derive(Clone, Copy, Debug)]
pub struct ShortConvolution<'a> {
    /// Output. (R, M).
    pub y: View,
    /// The projection. (R, P).
    pub projected: View,
    /// Weights. (M, taps).
    pub w: View,
    /// Sizes.
    pub shape: LinearShape<'a>,
    /// What passes along the sequences.
    pub carried: Carried,
}

/// The backward of [`ShortConvolution`]. dw (+)= ….
#[derive(Clone, Copy, Debug)]
pub struct ShortConvolutionBackward<'a> {
    /// The gradient of the projection, of which this writes the first M columns. (R, P).
    pub dprojected: View,
    /// Floats. (M, taps).
    pub dw: View,
    /// (R, M).
    pub dy: View,
    /// The forward's input. (R, P).
    pub projected: View,
    /// Weights. (M, taps).
    pub w: View,
    /// Sizes.
    pub shape: LinearShape<'a>,
    /// The gradients of what passes along the sequences.
    pub carried: CarriedGradients,
    /// True when `dw` is added to; false when it is replaced.
    pub accumulate: bool,
}

/// The output of each position's state at its query: S ← α S + δ kᵀ with δ = β (v − α S k) and
/// α = exp(−A softplus(a + bias)), then y = S q. Queries and keys have length 1, and queries are
/// divided by √D_k.
#[derive(Clone, Copy, Debug)]
pub struct DeltaRule<'a> {
    /// Output. (R, H D_v).
    pub y: View,
    /// Queries, keys and values. (R, M).
    pub x: View,
    /// The projection. (R, P).
    pub projected: View,
    /// Of each head of values. (1, H).
    pub decay: HeadDecay,
    /// Sizes.
    pub shape: LinearShape<'a>,
    /// What passes along the sequences.
    pub carried: Carried,
}

/// The backward of [`DeltaRule`]. The gradients of what each head learns (+)= ….
#[derive(Clone, Copy, Debug)]
pub struct DeltaRuleBackward<'a> {
    /// (R, M).
    pub dx: View,
    /// The gradient of the projection, of which this writes the columns of β and a. (R, P).
    pub dprojected: View,
    /// Floats. (1, H).
    pub ddecay: HeadDecay,
    /// (R, H D_v).
    pub dy: View,
    /// The forward's input. (R, M).
    pub x: View,
    /// The projection. (R, P).
    pub projected: View,
    /// Of each head of values. (1, H).
    pub decay: HeadDecay,
    /// Sizes.
    pub shape: LinearShape<'a>,
    /// The gradients of what passes along the sequences.
    pub carried: CarriedGradients,
    /// True when `ddecay` is added to; false when it is replaced.
    pub accumulate: bool,
}

/// y = γ x rstd silu(z) by head of values, where z is in the projection.
#[derive(Clone, Copy, Debug)]
pub struct GatedNorm<'a> {
    /// Output. (R, H D_v).
    pub y: View,
    /// Input. (R, H D_v).
    pub x: View,
    /// The projection. (R, P).
    pub projected: View,
    /// Scales. (1, D_v).
    pub gamma: View,
    /// Added to the mean square.
    pub epsilon: f32,
    /// Sizes.
    pub shape: LinearShape<'a>,
}

/// The backward of [`GatedNorm`]. dγ (+)= ….
#[derive(Clone, Copy, Debug)]
pub struct GatedNormBackward<'a> {
    /// (R, H D_v).
    pub dx: View,
    /// The gradient of the projection, of which this writes the columns of z. (R, P).
    pub dprojected: View,
    /// Floats. (1, D_v).
    pub dgamma: View,
    /// (R, H D_v).
    pub dy: View,
    /// The forward's input. (R, H D_v).
    pub x: View,
    /// The projection. (R, P).
    pub projected: View,
    /// Scales. (1, D_v).
    pub gamma: View,
    /// Added to the mean square.
    pub epsilon: f32,
    /// Sizes.
    pub shape: LinearShape<'a>,
    /// True when `dgamma` is added to; false when it is replaced.
    pub accumulate: bool,
}

impl LinearShape<'_> {
    /// Sizes of a tensor with this number of columns.
    fn of(&self, columns: usize) -> [usize; 2] {
        [self.batch.rows(), columns]
    }

    /// Sizes of what passes along the sequences.
    fn of_sequences(&self) -> [usize; 2] {
        [self.batch.sequences(), self.heads.carried()]
    }

    fn has_before(&self, views: &mut Views<'_>, before: Option<View>) {
        let has_earlier = |sequence| self.batch.positions_before(sequence) > 0;
        let is_first = !(0..self.batch.sequences()).any(has_earlier);
        views.rule(is_first || before.is_some(), "earlier rows have left nothing to these");
    }

    fn rule(&self, views: &mut Views<'_>) {
        let LinearHeads { key_heads, value_heads, taps, .. } = self.heads;
        let serves = key_heads > 0 && value_heads.is_multiple_of(key_heads);
        views.rule(serves && taps > 0, "heads of keys do not serve as many heads of values each");
    }
}

impl Carried {
    fn views(self, views: &mut Views<'_>, shape: &LinearShape<'_>) {
        let size = shape.of_sequences();
        if let Some(behind) = self.behind {
            // The convolution and the delta rule write a part each.
            views.writes_opaque("carried.behind", behind, size, Dtype::F32);
        }
        views.reads("carried.before", self.before, size, Dtype::F32);
        shape.has_before(views, self.before);
    }
}

impl CarriedGradients {
    fn views(self, views: &mut Views<'_>, shape: &LinearShape<'_>) {
        let size = shape.of_sequences();
        if let Some(dbefore) = self.dbefore {
            views.writes_opaque("carried.dbefore", dbefore, size, Dtype::F32);
        }
        views.reads("carried.before", self.before, size, Dtype::F32);
        views.reads("carried.dbehind", self.dbehind, size, Dtype::F32);
        shape.has_before(views, self.before);
    }
}

impl HeadDecay {
    fn reads(self, views: &mut Views<'_>, heads: usize, dtype: Dtype) {
        views.reads("decay.log", self.log, [1, heads], dtype);
        views.reads("decay.bias", self.bias, [1, heads], dtype);
    }
}

impl KernelOperation for ShortConvolution<'_> {
    fn views(&self, views: &mut Views<'_>) {
        let ShortConvolution { y, projected, w, shape, carried } = *self;
        let heads = shape.heads;
        let dtype = projected.dtype;
        views.writes("y", y, shape.of(heads.mixed()), dtype);
        views.reads("projected", projected, shape.of(heads.projected()), dtype);
        views.reads("w", w, [heads.mixed(), heads.taps], dtype);
        carried.views(views, &shape);
        shape.rule(views);
    }
}

impl KernelOperation for ShortConvolutionBackward<'_> {
    fn views(&self, views: &mut Views<'_>) {
        let ShortConvolutionBackward { dprojected, dw, dy, projected, w, shape, carried, .. } =
            *self;
        let heads = shape.heads;
        let dtype = projected.dtype;
        let all = shape.of(heads.projected());
        views.writes_opaque("dprojected", dprojected, all, dtype);
        views.writes("dw", dw, [heads.mixed(), heads.taps], Dtype::F32);
        views.reads("dy", dy, shape.of(heads.mixed()), dtype);
        views.reads("projected", projected, all, dtype);
        views.reads("w", w, [heads.mixed(), heads.taps], dtype);
        carried.views(views, &shape);
        shape.rule(views);
    }
}

impl KernelOperation for DeltaRule<'_> {
    fn views(&self, views: &mut Views<'_>) {
        let DeltaRule { y, x, projected, decay, shape, carried } = *self;
        let heads = shape.heads;
        let dtype = projected.dtype;
        views.writes("y", y, shape.of(heads.values()), dtype);
        views.reads("x", x, shape.of(heads.mixed()), dtype);
        views.reads("projected", projected, shape.of(heads.projected()), dtype);
        decay.reads(views, heads.value_heads, dtype);
        carried.views(views, &shape);
        shape.rule(views);
    }
}

impl KernelOperation for DeltaRuleBackward<'_> {
    fn views(&self, views: &mut Views<'_>) {
        let DeltaRuleBackward { dx, dprojected, ddecay, dy, x, projected, .. } = *self;
        let DeltaRuleBackward { decay, shape, carried, .. } = *self;
        let heads = shape.heads;
        let dtype = projected.dtype;
        let all = shape.of(heads.projected());
        views.writes("dx", dx, shape.of(heads.mixed()), dtype);
        views.writes_opaque("dprojected", dprojected, all, dtype);
        views.writes("ddecay.log", ddecay.log, [1, heads.value_heads], Dtype::F32);
        views.writes("ddecay.bias", ddecay.bias, [1, heads.value_heads], Dtype::F32);
        views.reads("dy", dy, shape.of(heads.values()), dtype);
        views.reads("x", x, shape.of(heads.mixed()), dtype);
        views.reads("projected", projected, all, dtype);
        decay.reads(views, heads.value_heads, dtype);
        carried.views(views, &shape);
        shape.rule(views);
    }
}

impl KernelOperation for GatedNorm<'_> {
    fn views(&self, views: &mut Views<'_>) {
        let GatedNorm { y, x, projected, gamma, shape, .. } = *self;
        let heads = shape.heads;
        let dtype = projected.dtype;
        views.writes("y", y, shape.of(heads.values()), dtype);
        views.reads("x", x, shape.of(heads.values()), dtype);
        views.reads("projected", projected, shape.of(heads.projected()), dtype);
        views.reads("gamma", gamma, [1, heads.value_size], dtype);
    }
}

impl KernelOperation for GatedNormBackward<'_> {
    fn views(&self, views: &mut Views<'_>) {
        let GatedNormBackward { dx, dprojected, dgamma, dy, x, projected, gamma, shape, .. } =
            *self;
        let heads = shape.heads;
        let dtype = projected.dtype;
        let all = shape.of(heads.projected());
        views.writes("dx", dx, shape.of(heads.values()), dtype);
        views.writes_opaque("dprojected", dprojected, all, dtype);
        views.writes("dgamma", dgamma, [1, heads.value_size], Dtype::F32);
        views.reads("dy", dy, shape.of(heads.values()), dtype);
        views.reads("x", x, shape.of(heads.values()), dtype);
        views.reads("projected", projected, all, dtype);
        views.reads("gamma", gamma, [1, heads.value_size], dtype);
    }
}
