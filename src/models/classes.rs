//! The head of classes, of sequences or of tokens. A sequence gets scores of classes, scores of
//! labels of which it may have several, or one value: an encoder computes them from the first
//! position, behind a transform (Devlin et al. 2019), and a decoder from the last position. Of
//! tokens, each position gets scores.

use l2l_actors::schedule::{Boundary, Role};

use super::adapters::Adapters;
use super::layer::{Cuts, Init, Kind, Tensor};
use super::low_rank::{Adapter, LowRank, ProductSize};
use super::norms::{Affine, AffineBackward};
use super::shape::{Head, Shape};
use crate::kernels::{
    Activate, ActivateBackward, Activation, ApplyDropout, BatchView, Cast, ClassLoss,
    ClassLossBackward, Dropout, Kernels, Linear, LinearBackward, MaskRows, PooledRows,
    PooledRowsBackward, Pooling, ProblemType, Samples, Smoothing,
};
use crate::tensor::{Scratch, View};

/// The index for dropout. Layers have indices from 1.
const INDEX: u32 = 0;

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
    /// True: an objective reads the one score of each sequence.
    pub weighed: bool,
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
    /// True: the statistics have an objective's gradient by the one score.
    pub weighed: bool,
    /// The factor of a loss.
    pub scale: f32,
    /// True when the gradient is added to; false when it is replaced.
    pub accumulate: bool,
}

/// Activations of the head, recomputed by its backward.
struct Activations {
    /// One position of each sequence, or each position, behind the first dropout. (N, C).
    first: View,
    transform: Option<Transformed>,
    /// The transform, behind the second dropout; without a transform, `first`. (N, C).
    pooled: View,
    /// (N, L).
    scores: View,
}

/// Activations of the transform.
struct Transformed {
    /// Before the activation function. (N, C).
    sum: View,
    /// Behind it; where no norm follows, `pooled`. (N, C).
    activated: View,
    /// Of the norm. (N, 2).
    statistics: View,
}

/// The head's tensors, or their gradients, without those of the adapter.
struct HeadTensors<V> {
    transform: Option<TransformTensors<V>>,
    out: Affine<V>,
}

struct TransformTensors<V> {
    dense: Affine<V>,
    norm: Option<Affine<V>>,
}

impl Classes {
    pub(super) fn labels(&self) -> usize {
        match self.shape.head {
            Head::Classes { labels, .. } | Head::TokenClasses { labels } => labels,
            Head::Tokens | Head::Masked | Head::Embedding { .. } => {
                unreachable!("a head of tokens is made of tiles")
            }
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
        !self.shape.class_transform().is_empty()
    }

    /// The rows that stand for a sequence. A causal model has read the whole sequence at the last
    /// position.
    fn pool(&self) -> Pooling {
        if self.shape.causal { Pooling::Last } else { self.shape.pooling }
    }

    fn problem(&self) -> ProblemType {
        match self.shape.head {
            Head::Classes { problem, .. } => problem,
            _ => ProblemType::SingleLabelClassification,
        }
    }

    /// The tensors of the head's block.
    pub fn tensors(&self) -> Vec<Tensor> {
        let c = self.shape.hidden;
        let adapters = self.adapters.iter().flat_map(|adapters| &adapters.modules);
        let of_adapters = adapters.flat_map(|adapter| adapter.tensors(c, c));
        self.own_tensors().into_iter().chain(of_adapters).collect()
    }

    fn own_tensors(&self) -> Vec<Tensor> {
        let Shape { names, hidden: c, initializer_range, transform_bias, .. } = self.shape;
        let linear = |name: &str, outputs: usize, kind, has_bias: bool| {
            let init = Init::Normal(initializer_range);
            let weight = Tensor::new(format!("{name}.weight"), vec![outputs, c], kind, init);
            let bias =
                || Tensor::new(format!("{name}.bias"), vec![outputs], Kind::Bias, Init::Zeros);
            [weight].into_iter().chain(has_bias.then(bias))
        };
        let mut all = Vec::new();
        if self.has_transform() {
            all.extend(linear(self.shape.class_transform(), c, Kind::Weight, transform_bias));
        }
        if self.has_norm() {
            all.extend(self.shape.norm_tensors(names.class_norm, c, self.shape.norms_shift()));
        }
        let out = match self.samples() {
            Samples::Sequences => names.class_out,
            Samples::Tokens => names.token_classes,
        };
        all.extend(linear(out, self.labels(), Kind::Table, self.scores_have_bias()));
        all
    }

    fn has_norm(&self) -> bool {
        self.has_transform() && !self.shape.names.class_norm.is_empty()
    }

    fn scores_have_bias(&self) -> bool {
        self.has_transform() || self.samples() == Samples::Tokens
    }

    fn sorted<V: Copy>(&self, views: &[V]) -> HeadTensors<V> {
        let Shape { transform_bias, .. } = self.shape;
        let shifts = self.shape.norms_shift();
        let mut views = views.iter().copied();
        let mut next = |has_bias: bool| {
            let mut next = || views.next().expect("as `tensors` lists them");
            Affine { weight: next(), bias: has_bias.then(next) }
        };
        let transform = self.has_transform().then(|| TransformTensors {
            dense: next(transform_bias),
            norm: self.has_norm().then(|| next(shifts)),
        });
        HeadTensors { transform, out: next(self.scores_have_bias()) }
    }

    /// The tensors of the adapter.
    fn adapter<V: Copy>(&self, adapters: &Adapters, views: &[V]) -> [Adapter<V>; 1] {
        adapters.only(views, self.own_tensors().len(), self.shape.hidden)
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
        let size = ProductSize { rows: self.samples().of(&batch), inputs: c, outputs: c };
        let low_rank = LowRank::new(k, adapters, batch, INDEX, size, scratch);
        Some(match self.samples() {
            Samples::Sequences => low_rank.of_sequences(),
            Samples::Tokens => low_rank,
        })
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
        let tensors = self.sorted(w);
        let first = scratch.take(n, c);
        let [before, behind] = self.dropouts(batch);
        match self.samples() {
            Samples::Sequences => {
                k.pooled_rows(&PooledRows { y: first, x: h, pool: self.pool(), batch: *batch });
                if before.is_some() {
                    k.dropout(&ApplyDropout { y: first, x: first, dropout: before });
                }
            }
            Samples::Tokens => k.dropout(&ApplyDropout { y: first, x: h, dropout: before }),
        }
        let mut pooled = first;
        let transform = tensors.transform.map(|TransformTensors { dense, norm }| {
            let sum = scratch.take(n, c);
            let activated = scratch.take(n, c);
            let statistics = scratch.take_floats(n, 2);
            let Affine { weight: w_dense, bias } = dense;
            k.linear(&Linear { y: sum, x: first, w: w_dense, bias, transposed: true });
            let low_rank = self.low_rank(k, *batch, &scratch.nested());
            if let Some((low_rank, adapters)) = low_rank.zip(self.adapters.as_ref()) {
                low_rank.add(sum, first, &self.adapter(adapters, w));
            }
            k.activate(&Activate { y: activated, x: sum, activation: self.activation() });
            pooled = activated;
            if let Some(norm) = norm {
                pooled = scratch.take(n, c);
                k.norm(&self.shape.norm(pooled, statistics, activated, norm));
            }
            if behind.is_some() {
                k.dropout(&ApplyDropout { y: pooled, x: pooled, dropout: behind });
            }
            Transformed { sum, activated, statistics }
        });
        let scores = scratch.take(n, self.labels());
        let Affine { weight, bias } = tensors.out;
        k.linear(&Linear { y: scores, x: pooled, w: weight, bias, transposed: true });
        Activations { first, transform, pooled, scores }
    }

    /// The dropouts before the transform and behind it. Without a transform that of tokens comes
    /// before the scores.
    fn dropouts<'a>(&self, batch: &BatchView<'a>) -> [Option<Dropout<'a>>; 2] {
        let p = self.shape.head_dropout();
        let of_sequences = |p, site| {
            let dropout = batch.dropout(p, INDEX, site);
            dropout.map(|dropout| Dropout { rows: MaskRows::Sequences, ..dropout })
        };
        match (self.samples(), self.has_transform()) {
            (Samples::Tokens, false) => [batch.dropout(p, INDEX, 0), None],
            (Samples::Tokens, true) => [None, batch.dropout(p, INDEX, 1)],
            (Samples::Sequences, false) => [None; 2],
            (Samples::Sequences, true) => {
                let before = if self.shape.names.class_drops_first { p } else { 0.0 };
                [of_sequences(before, 0), of_sequences(p, 1)]
            }
        }
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
            weighed: pass.weighed,
            batch: *batch,
        });
    }

    /// The gradients of `h` and of the block.
    pub fn backward(&self, k: &dyn Kernels, pass: &ClassesBackward<'_>, scratch: &Scratch<'_>) {
        let ClassesBackward { dh, batch, weights, statistics, h, accumulate, .. } = *pass;
        let all = self.activations(k, &batch, weights, h, scratch);
        let Activations { first, pooled, scores, .. } = all;
        let dscores = scratch.take_like(scores);
        let dpooled = scratch.take_like(pooled);
        k.class_loss_backward(&ClassLossBackward {
            dscores,
            scores,
            statistics,
            scale: pass.scale,
            samples: self.samples(),
            problem: self.problem(),
            smoothing: pass.smoothing,
            weighed: pass.weighed,
            batch,
        });
        let w = self.sorted(weights).out;
        let d = self.sorted(pass.gradients).out;
        linear_backward(k, [dpooled, dscores, pooled], w, d, accumulate, scratch);
        let mut dfirst = dpooled;
        if let Some(transform) = all.transform {
            dfirst = scratch.take_like(first);
            self.transform_backward(k, pass, &transform, [dfirst, dpooled, first], scratch);
        }
        let [before, _] = self.dropouts(&batch);
        if self.samples() == Samples::Tokens {
            return k.dropout(&ApplyDropout { y: dh, x: dfirst, dropout: before });
        }
        if before.is_some() {
            k.dropout(&ApplyDropout { y: dfirst, x: dfirst, dropout: before });
        }
        let pool = self.pool();
        k.pooled_rows_backward(&PooledRowsBackward { dx: dh, dy: dfirst, pool, batch });
    }

    /// The gradients of the transform's tensors and of its input `first`, from that of its output.
    fn transform_backward(
        &self,
        k: &dyn Kernels,
        pass: &ClassesBackward<'_>,
        transform: &Transformed,
        [dfirst, dpooled, first]: [View; 3],
        scratch: &Scratch<'_>,
    ) {
        let ClassesBackward { batch, weights, gradients, accumulate, .. } = *pass;
        let Transformed { sum, activated, statistics } = *transform;
        let tensors = self.sorted(weights).transform.zip(self.sorted(gradients).transform);
        let (w, d) = tensors.expect("the head has a transform");
        let [_, behind] = self.dropouts(&batch);
        if behind.is_some() {
            k.dropout(&ApplyDropout { y: dpooled, x: dpooled, dropout: behind });
        }
        let mut dsum = dpooled;
        if let Some((w, d)) = w.norm.zip(d.norm) {
            dsum = scratch.take_like(dpooled);
            let norm = AffineBackward {
                dx: dsum,
                d,
                dy: dpooled,
                x: activated,
                statistics,
                w,
                residual: None,
            };
            self.shape.norm_backward(k, &norm, accumulate, scratch);
        }
        let activation = self.activation();
        k.activate_backward(&ActivateBackward { dx: dsum, x: sum, activation });
        linear_backward(k, [dfirst, dsum, first], w.dense, d.dense, accumulate, scratch);
        let low_rank = self.low_rank(k, batch, scratch);
        if let Some((low_rank, adapters)) = low_rank.zip(self.adapters.as_ref()) {
            let w = self.adapter(adapters, weights);
            let d = self.adapter(adapters, gradients);
            low_rank.backward([dfirst, dsum, first], &w, &d, accumulate, scratch);
        }
    }
}

/// The gradients of a product's tensors and of its input x, from that of its output.
pub(super) fn linear_backward(
    k: &dyn Kernels,
    [dx, dy, x]: [View; 3],
    w: Affine<View>,
    d: Affine<Option<View>>,
    accumulate: bool,
    scratch: &Scratch<'_>,
) {
    let op = LinearBackward {
        dx,
        dw: d.weight,
        dbias: d.bias.flatten(),
        dy,
        x,
        w: w.weight,
        transposed: true,
        accumulate,
    };
    k.linear_backward(&op, scratch);
}
