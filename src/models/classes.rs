//! The head of whole sequences: scores of classes, or one value. An encoder has them of its first
//! position, behind a transform (Devlin et al. 2019); a decoder of its last position.

use super::adapters::Adapters;
use super::layer::{Init, Kind, Tensor};
use super::low_rank::LowRank;
use super::shape::{Head, Shape};
use crate::kernels::{
    Activate, ActivateBackward, Activation, ApplyDropout, BatchView, Cast, ClassLoss,
    ClassLossBackward, Dropout, Kernels, Linear, LinearBackward, MaskRows, PooledRows,
    PooledRowsBackward, Pooling, Smoothing,
};
use crate::tensor::{Scratch, View};

/// Its index for dropout, which no layer has.
const INDEX: u32 = 0;

/// Where the adapter's tensors begin among the head's.
const ADAPTER_AT: usize = 4;

/// A head of a shape that classifies.
#[derive(Clone, Debug)]
pub struct Classes {
    /// The model.
    pub shape: Shape,
    /// The adapter of its transform, if it has one.
    pub adapters: Option<Adapters>,
}

/// The arguments of its forward on one micro-batch.
#[derive(Clone, Copy, Debug)]
pub struct ClassesForward<'a> {
    /// Output: the statistics, with each sequence's loss in those of its first position. (R, 4).
    pub out: View,
    /// Output: each sequence's scores in floats, if somebody asks for them. (B, L).
    pub scores: Option<View>,
    /// The micro-batch.
    pub batch: BatchView<'a>,
    /// The head's tensors.
    pub weights: &'a [View],
    /// Labels. (R, 4).
    pub statistics: View,
    /// What the head reads. (R, C).
    pub h: View,
    /// What of which scores is the label's.
    pub smoothing: Smoothing,
}

/// The arguments of its backward on one micro-batch.
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
    /// Labels. (R, 4).
    pub statistics: View,
    /// What the head reads. (R, C).
    pub h: View,
    /// As in the forward.
    pub smoothing: Smoothing,
    /// The factor of a sequence's loss.
    pub scale: f32,
    /// True when the gradient is added to; false when it is replaced.
    pub accumulate: bool,
}

/// Activations of the head, recomputed by its backward.
struct Activations {
    /// One position of each sequence, behind the first dropout. (B, C).
    first: View,
    /// The transform before its activation function. (B, C).
    sum: View,
    /// The transform, behind the second dropout; without a transform, `first`. (B, C).
    pooled: View,
    /// (B, L).
    scores: View,
}

impl Classes {
    pub(super) fn labels(&self) -> usize {
        match self.shape.head {
            Head::Classes { labels, .. } => labels,
            Head::Tokens | Head::Masked => unreachable!("a head of tokens is made of tiles"),
        }
    }

    fn has_transform(&self) -> bool {
        !self.shape.names.class_dense.is_empty()
    }

    /// The position that stands for a sequence: a causal model has read all of it at the last.
    fn pool(&self) -> Pooling {
        if self.shape.causal { Pooling::Last } else { Pooling::First }
    }

    fn is_value(&self) -> bool {
        matches!(self.shape.head, Head::Classes { is_value: true, .. })
    }

    /// The tensors of its block.
    pub fn tensors(&self) -> Vec<Tensor> {
        let Shape { names, hidden: c, initializer_range, .. } = self.shape;
        let linear = |name: &str, outputs: usize, kind| {
            let tensor = |part: &str, shape: Vec<usize>, kind, init| Tensor {
                name: format!("{name}.{part}"),
                shape,
                kind,
                init,
                joined: false,
            };
            [
                tensor("weight", vec![outputs, c], kind, Init::Normal(initializer_range)),
                tensor("bias", vec![outputs], Kind::Bias, Init::Zeros),
            ]
        };
        if !self.has_transform() {
            let [weight, _] = linear(names.class_out, self.labels(), Kind::Table);
            return vec![weight];
        }
        let dense = linear(names.class_dense, c, Kind::Weight);
        let mut all = [dense, linear(names.class_out, self.labels(), Kind::Table)].concat();
        let adapters = self.adapters.iter();
        all.extend(adapters.flat_map(|adapters| adapters.tensors(names.class_dense, c, c)));
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
        let (adapters, c) = (self.adapters.as_ref()?, self.shape.hidden);
        let size = (batch.sequences(), c, c);
        Some(LowRank::new(k, adapters, (batch, INDEX), size, scratch).of_sequences())
    }

    fn activations(
        &self,
        k: &dyn Kernels,
        batch: &BatchView<'_>,
        w: &[View],
        h: View,
        scratch: &Scratch<'_>,
    ) -> Activations {
        let (b, c) = (batch.sequences(), self.shape.hidden);
        if !self.has_transform() {
            let first = scratch.take(b, c);
            let scores = scratch.take(b, self.labels());
            k.pooled_rows(&PooledRows { y: first, x: h, pool: self.pool(), batch: *batch });
            k.linear(&Linear { y: scores, x: first, w: w[0], bias: None, transposed: true });
            return Activations { first, sum: first, pooled: first, scores };
        }
        let all = Activations {
            first: scratch.take(b, c),
            sum: scratch.take(b, c),
            pooled: scratch.take(b, c),
            scores: scratch.take(b, self.labels()),
        };
        let Activations { first, sum, pooled, scores } = all;
        let [before, behind] = self.dropouts(batch);
        k.pooled_rows(&PooledRows { y: first, x: h, pool: self.pool(), batch: *batch });
        k.dropout(&ApplyDropout { y: first, x: first, dropout: before });
        k.linear(&Linear { y: sum, x: first, w: w[0], bias: Some(w[1]), transposed: true });
        if let Some(low_rank) = self.low_rank(k, *batch, &scratch.nested()) {
            low_rank.add(sum, first, &Adapters::only(w, ADAPTER_AT, self.shape.hidden));
        }
        k.activate(&Activate { y: pooled, x: sum, activation: self.activation() });
        k.dropout(&ApplyDropout { y: pooled, x: pooled, dropout: behind });
        k.linear(&Linear { y: scores, x: pooled, w: w[2], bias: Some(w[3]), transposed: true });
        all
    }

    /// The dropouts before the transform and behind it, of one position of each sequence.
    fn dropouts<'a>(&self, batch: &BatchView<'a>) -> [Option<Dropout<'a>>; 2] {
        let p = self.shape.dropout.classifier;
        let before = if self.shape.names.class_drops_first { p } else { 0.0 };
        [batch.dropout(before, INDEX, 0), batch.dropout(p, INDEX, 1)]
            .map(|dropout| dropout.map(|dropout| Dropout { rows: MaskRows::Sequences, ..dropout }))
    }

    /// Each sequence's loss, and its scores.
    pub fn forward(&self, k: &dyn Kernels, pass: &ClassesForward<'_>, scratch: &Scratch<'_>) {
        let ClassesForward { out, ref batch, weights, statistics, h, .. } = *pass;
        let Activations { scores, .. } = self.activations(k, batch, weights, h, scratch);
        if let Some(y) = pass.scores {
            k.cast(&Cast { y, x: scores });
        }
        let (is_value, smoothing, batch) = (self.is_value(), pass.smoothing, *batch);
        k.class_loss(&ClassLoss { out, statistics, scores, is_value, smoothing, batch });
    }

    /// The gradients of `h` and of the block.
    pub fn backward(&self, k: &dyn Kernels, pass: &ClassesBackward<'_>, scratch: &Scratch<'_>) {
        let ClassesBackward { dh, gradients: d, ref batch, weights: w, statistics, h, .. } = *pass;
        let Activations { first, sum, pooled, scores } = self.activations(k, batch, w, h, scratch);
        let [before, behind] = self.dropouts(batch);
        let dscores = scratch.take_like(scores);
        let (dpooled, dfirst) = (scratch.take_like(pooled), scratch.take_like(first));
        let batch = *batch;
        k.class_loss_backward(&ClassLossBackward {
            dscores,
            scores,
            statistics,
            scale: pass.scale,
            is_value: self.is_value(),
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
        if !self.has_transform() {
            linear_backward(dfirst, dscores, first, 0);
            return k.pooled_rows_backward(&PooledRowsBackward { dx: dh, dy: dfirst, pool, batch });
        }
        linear_backward(dpooled, dscores, pooled, 2);
        k.dropout(&ApplyDropout { y: dpooled, x: dpooled, dropout: behind });
        let activation = self.activation();
        k.activate_backward(&ActivateBackward { dx: dpooled, x: sum, activation });
        linear_backward(dfirst, dpooled, first, 0);
        if let Some(low_rank) = self.low_rank(k, batch, scratch) {
            let c = self.shape.hidden;
            let (w, d) = (Adapters::only(w, ADAPTER_AT, c), Adapters::only(d, ADAPTER_AT, c));
            low_rank.backward([dfirst, dpooled, first], (&w, &d), pass.accumulate, scratch);
        }
        k.dropout(&ApplyDropout { y: dfirst, x: dfirst, dropout: before });
        k.pooled_rows_backward(&PooledRowsBackward { dx: dh, dy: dfirst, pool, batch });
    }
}
