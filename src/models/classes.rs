//! The head of classes, of sequences or of tokens. A sequence gets scores of classes, scores of
//! labels of which it may have several, or one value: an encoder computes them from the first
//! position, behind a transform (Devlin et al. 2019), and a decoder from the last position. Of
//! tokens, each position gets scores.

use l2l_actors::schedule::{Boundary, Role};

use super::adapters::Adapters;
use super::layer::{Cuts, Init, Kind, Tensor};
use super::low_rank::{LowRank, ProductSize};
use super::shape::{Head, Shape};
use crate::kernels::{
    Activate, ActivateBackward, Activation, ApplyDropout, BatchView, Cast, ClassLoss,
    ClassLossBackward, Dropout, Kernels, Linear, LinearBackward, MaskRows, PooledRows,
    PooledRowsBackward, Pooling, ProblemType, Samples, Smoothing,
};
use crate::tensor::{Scratch, View};

/// The index for dropout. Layers have indices from 1.
const INDEX: u32 = 0;

/// The number of the head's tensors before those of its adapter.
const ADAPTER_AT: usize = 4;

/// A head of classes.
#[derive(Clone, Debug)]
pub struct Classes {
    /// The model.
    pub shape: Shape,
    /// The adapter of the transform, if it has one.
    pub adapters: Option<Adapters>,
}

/// The arguments of the head's forward on one micro-batch.
#[derive(Clone, Copy, Debug)]
pub struct ClassesForward<'a> {
    /// Output: the statistics, with the loss of each of the N sequences or tokens. (R, 4); with
    /// several labels a sequence, (B, 1 + L).
    pub out: View,
    /// Output: the scores of each sequence or token in floats, if the step asks for them. (N, L).
    pub scores: Option<View>,
    /// The micro-batch.
    pub batch: BatchView<'a>,
    /// The head's tensors.
    pub weights: &'a [View],
    /// Labels, in the shape of [`ClassLoss`]'s statistics.
    pub statistics: View,
    /// Hidden states. (R, C).
    pub h: View,
    /// Label smoothing.
    pub smoothing: Smoothing,
}

/// The arguments of the head's backward on one micro-batch.
#[derive(Clone, Copy, Debug)]
pub struct ClassesBackward<'a> {
    /// Output: the gradient of `h`. (R, C).
    pub dh: View,
    /// Output: the gradients of the tensors that are trained.
    pub gradients: &'a [Option<View>],
    /// The micro-batch.
    pub batch: BatchView<'a>,
    /// The head's tensors.
    pub weights: &'a [View],
    /// Labels, in the shape of [`ClassLoss`]'s statistics.
    pub statistics: View,
    /// Hidden states. (R, C).
    pub h: View,
    /// Label smoothing.
    pub smoothing: Smoothing,
    /// The factor of a loss.
    pub scale: f32,
    /// True when the gradient is added to; false when it is replaced.
    pub accumulate: bool,
}

/// Activations of the head, recomputed by its backward.
struct Activations {
    /// One position of each sequence, or each position, behind the first dropout. (N, C).
    first: View,
    /// The transform before its activation function. (N, C).
    sum: View,
    /// The transform, behind the second dropout; without a transform, `first`. (N, C).
    pooled: View,
    /// (N, L).
    scores: View,
}

impl Classes {
    pub(super) fn labels(&self) -> usize {
        match self.shape.head {
            Head::Classes { labels, .. } | Head::TokenClasses { labels } => labels,
            Head::Tokens | Head::Masked => unreachable!("a head of tokens is made of tiles"),
        }
    }

    /// The scores of each sample, for the host.
    pub(super) fn logits(&self) -> Boundary {
        let labels = self.labels();
        match self.samples() {
            Samples::Tokens => Boundary::of_tokens(Role::Logits, labels, size_of::<f32>()),
            Samples::Sequences => Boundary::of_sequences(Role::Logits, labels, size_of::<f32>()),
        }
    }

    /// The row that stands for a sequence is computed with the rows of all sequences.
    pub(super) fn cuts(&self) -> Cuts {
        match self.samples() {
            Samples::Tokens => Cuts::ByPosition,
            Samples::Sequences => Cuts::Never,
        }
    }

    /// Whether sequences or tokens have labels.
    pub(super) fn samples(&self) -> Samples {
        match self.shape.head {
            Head::TokenClasses { .. } => Samples::Tokens,
            _ => Samples::Sequences,
        }
    }

    fn has_transform(&self) -> bool {
        self.samples() == Samples::Sequences && !self.shape.names.class_dense.is_empty()
    }

    /// The position that stands for a sequence. A causal model has read the whole sequence at the
    /// last position.
    fn pool(&self) -> Pooling {
        if self.shape.causal { Pooling::Last } else { Pooling::First }
    }

    fn problem(&self) -> ProblemType {
        match self.shape.head {
            Head::Classes { problem, .. } => problem,
            _ => ProblemType::SingleLabelClassification,
        }
    }

    /// The tensors of the head's block.
    pub fn tensors(&self) -> Vec<Tensor> {
        let Shape { names, hidden: c, initializer_range, .. } = self.shape;
        let linear = |name: &str, outputs: usize, kind| {
            let init = Init::Normal(initializer_range);
            [
                Tensor::new(format!("{name}.weight"), vec![outputs, c], kind, init),
                Tensor::new(format!("{name}.bias"), vec![outputs], Kind::Bias, Init::Zeros),
            ]
        };
        if self.samples() == Samples::Tokens {
            return linear(names.token_classes, self.labels(), Kind::Table).to_vec();
        }
        if !self.has_transform() {
            let [weight, _] = linear(names.class_out, self.labels(), Kind::Table);
            return vec![weight];
        }
        let dense = linear(names.class_dense, c, Kind::Weight);
        let mut all = [dense, linear(names.class_out, self.labels(), Kind::Table)].concat();
        let adapters = self.adapters.iter().flat_map(|adapters| &adapters.modules);
        all.extend(adapters.flat_map(|adapter| adapter.tensors(c, c)));
        all
    }

    fn activation(&self) -> Activation {
        self.shape.names.class_activation
    }

    /// The transform's adapter on a micro-batch, if it has one.
    fn low_rank<'a>(
        &'a self,
        k: &'a dyn Kernels,
        batch: BatchView<'a>,
        scratch: &Scratch<'_>,
    ) -> Option<LowRank<'a>> {
        let adapters = self.adapters.as_ref()?;
        let c = self.shape.hidden;
        let size = ProductSize { rows: batch.sequences(), inputs: c, outputs: c };
        Some(LowRank::new(k, adapters, batch, INDEX, size, scratch).of_sequences())
    }

    fn activations(
        &self,
        k: &dyn Kernels,
        batch: &BatchView<'_>,
        w: &[View],
        h: View,
        scratch: &Scratch<'_>,
    ) -> Activations {
        let n = self.samples().of(batch);
        let c = self.shape.hidden;
        if !self.has_transform() {
            let first = scratch.take(n, c);
            let scores = scratch.take(n, self.labels());
            match self.samples() {
                Samples::Sequences => {
                    let pool = self.pool();
                    k.pooled_rows(&PooledRows { y: first, x: h, pool, batch: *batch });
                }
                Samples::Tokens => {
                    let dropout = self.token_dropout(batch);
                    k.dropout(&ApplyDropout { y: first, x: h, dropout });
                }
            }
            let bias = w.get(1).copied();
            k.linear(&Linear { y: scores, x: first, w: w[0], bias, transposed: true });
            return Activations { first, sum: first, pooled: first, scores };
        }
        let all = Activations {
            first: scratch.take(n, c),
            sum: scratch.take(n, c),
            pooled: scratch.take(n, c),
            scores: scratch.take(n, self.labels()),
        };
        let Activations { first, sum, pooled, scores } = all;
        let [before, behind] = self.dropouts(batch);
        k.pooled_rows(&PooledRows { y: first, x: h, pool: self.pool(), batch: *batch });
        k.dropout(&ApplyDropout { y: first, x: first, dropout: before });
        k.linear(&Linear { y: sum, x: first, w: w[0], bias: Some(w[1]), transposed: true });
        let low_rank = self.low_rank(k, *batch, &scratch.nested());
        if let Some((low_rank, adapters)) = low_rank.zip(self.adapters.as_ref()) {
            low_rank.add(sum, first, &adapters.only(w, ADAPTER_AT, self.shape.hidden));
        }
        k.activate(&Activate { y: pooled, x: sum, activation: self.activation() });
        k.dropout(&ApplyDropout { y: pooled, x: pooled, dropout: behind });
        k.linear(&Linear { y: scores, x: pooled, w: w[2], bias: Some(w[3]), transposed: true });
        all
    }

    /// The dropout of each position, before the scores of tokens.
    fn token_dropout<'a>(&self, batch: &BatchView<'a>) -> Option<Dropout<'a>> {
        batch.dropout(self.shape.head_dropout(), INDEX, 0)
    }

    /// The dropouts before the transform and behind it, of one position of each sequence.
    fn dropouts<'a>(&self, batch: &BatchView<'a>) -> [Option<Dropout<'a>>; 2] {
        let p = self.shape.head_dropout();
        let before = if self.shape.names.class_drops_first { p } else { 0.0 };
        [batch.dropout(before, INDEX, 0), batch.dropout(p, INDEX, 1)]
            .map(|dropout| dropout.map(|dropout| Dropout { rows: MaskRows::Sequences, ..dropout }))
    }

    /// The loss of each sequence or token, and its scores.
    pub fn forward(&self, k: &dyn Kernels, pass: &ClassesForward<'_>, scratch: &Scratch<'_>) {
        let ClassesForward { out, ref batch, weights, statistics, h, .. } = *pass;
        let Activations { scores, .. } = self.activations(k, batch, weights, h, scratch);
        if let Some(y) = pass.scores {
            k.cast(&Cast { y, x: scores });
        }
        k.class_loss(&ClassLoss {
            out,
            statistics,
            scores,
            samples: self.samples(),
            problem: self.problem(),
            smoothing: pass.smoothing,
            batch: *batch,
        });
    }

    /// The gradients of `h` and of the block.
    pub fn backward(&self, k: &dyn Kernels, pass: &ClassesBackward<'_>, scratch: &Scratch<'_>) {
        let ClassesBackward { dh, gradients: d, ref batch, weights: w, statistics, h, .. } = *pass;
        let Activations { first, sum, pooled, scores } = self.activations(k, batch, w, h, scratch);
        let [before, behind] = self.dropouts(batch);
        let dscores = scratch.take_like(scores);
        let dpooled = scratch.take_like(pooled);
        let dfirst = scratch.take_like(first);
        let batch = *batch;
        k.class_loss_backward(&ClassLossBackward {
            dscores,
            scores,
            statistics,
            scale: pass.scale,
            samples: self.samples(),
            problem: self.problem(),
            smoothing: pass.smoothing,
            batch,
        });
        let linear_backward = |dx: View, dy: View, x: View, at: usize| {
            let op = LinearBackward {
                dx,
                dw: d[at],
                dbias: d.get(at + 1).copied().flatten(),
                dy,
                x,
                w: w[at],
                transposed: true,
                accumulate: pass.accumulate,
            };
            k.linear_backward(&op, scratch);
        };
        let pool = self.pool();
        if self.samples() == Samples::Tokens {
            linear_backward(dfirst, dscores, first, 0);
            let dropout = self.token_dropout(&batch);
            return k.dropout(&ApplyDropout { y: dh, x: dfirst, dropout });
        }
        if !self.has_transform() {
            linear_backward(dfirst, dscores, first, 0);
            return k.pooled_rows_backward(&PooledRowsBackward { dx: dh, dy: dfirst, pool, batch });
        }
        linear_backward(dpooled, dscores, pooled, 2);
        k.dropout(&ApplyDropout { y: dpooled, x: dpooled, dropout: behind });
        let activation = self.activation();
        k.activate_backward(&ActivateBackward { dx: dpooled, x: sum, activation });
        linear_backward(dfirst, dpooled, first, 0);
        let low_rank = self.low_rank(k, batch, scratch);
        if let Some((low_rank, adapters)) = low_rank.zip(self.adapters.as_ref()) {
            let c = self.shape.hidden;
            let w = adapters.only(w, ADAPTER_AT, c);
            let d = adapters.only(d, ADAPTER_AT, c);
            low_rank.backward([dfirst, dpooled, first], &w, &d, pass.accumulate, scratch);
        }
        k.dropout(&ApplyDropout { y: dfirst, x: dfirst, dropout: before });
        k.pooled_rows_backward(&PooledRowsBackward { dx: dh, dy: dfirst, pool, batch });
    }
}
