//! The head of whole sequences: their first position, a transform, and scores of classes or one
//! value (Devlin et al. 2019).

use super::layer::{Init, Kind, Tensor, tensor_views};
use super::shape::{Head, Shape};
use crate::kernels::BatchView;
use crate::kernels::{Activation, ClassLoss, Dropout, Kernels, Linear, Rows};
use crate::tensor::Scratch;
use crate::tensor::View;

/// A head of a shape that classifies.
#[derive(Clone, Debug)]
pub struct Classes {
    /// The layer's index, for dropout.
    pub index: u32,
    /// The model.
    pub shape: Shape,
}

/// What the forward leaves for the backward.
struct Walked {
    first: View,  // (B, C), of the first positions, dropped where a family drops them
    sum: View,    // (B, C), before the curve
    pooled: View, // (B, C), behind it, dropped
    scores: View, // (B, L)
}

impl Classes {
    fn labels(&self) -> usize {
        match self.shape.head {
            Head::Classes { labels, .. } => labels,
            Head::Tokens | Head::Masked => unreachable!("a head of tokens is made of tiles"),
        }
    }

    fn loss(&self, rows: Rows) -> ClassLoss {
        let is_value = matches!(self.shape.head, Head::Classes { is_value: true, .. });
        ClassLoss { rows, labels: self.labels(), is_value }
    }

    fn size(&self, rows: Rows, outputs: usize) -> Linear {
        Linear { rows: rows.sequences, inputs: self.shape.hidden, outputs, transposed: true }
    }

    /// The tensors of its block.
    pub fn tensors(&self) -> Vec<Tensor> {
        let Shape { names, hidden: c, initializer_range, .. } = self.shape;
        let linear = |name: &str, outputs: usize| {
            let tensor = |part: &str, shape: Vec<usize>, kind, init| Tensor {
                name: format!("{name}.{part}"),
                shape,
                kind,
                init,
                joined: false,
            };
            [
                tensor("weight", vec![outputs, c], Kind::Weight, Init::Normal(initializer_range)),
                tensor("bias", vec![outputs], Kind::Bias, Init::Zeros),
            ]
        };
        [linear(names.class_dense, c), linear(names.class_out, self.labels())].concat()
    }

    fn curve(&self) -> Activation {
        self.shape.names.class_activation
    }

    fn walk(
        &self,
        k: &dyn Kernels,
        batch: &BatchView<'_>,
        w: &[View],
        h: View,
        scratch: &Scratch<'_>,
    ) -> Walked {
        let (b, c) = (batch.rows.sequences, self.shape.hidden);
        let walked = Walked {
            first: scratch.take(b * c),
            sum: scratch.take(b * c),
            pooled: scratch.take(b * c),
            scores: scratch.take(b * self.labels()),
        };
        let [before, behind] = self.drops(batch);
        let one = Rows { sequences: b, positions: 1 };
        k.first_rows(walked.first, h, batch.rows);
        k.dropped(walked.first, walked.first, one, before);
        k.linear(walked.sum, walked.first, w[0], Some(w[1]), self.size(batch.rows, c));
        k.activate(walked.pooled, walked.sum, self.curve());
        k.dropped(walked.pooled, walked.pooled, one, behind);
        let size = self.size(batch.rows, self.labels());
        k.linear(walked.scores, walked.pooled, w[2], Some(w[3]), size);
        walked
    }

    fn drops(&self, batch: &BatchView<'_>) -> [Option<Dropout>; 2] {
        let p = self.shape.dropout.classifier;
        let before = if self.shape.names.class_drops_first { p } else { 0.0 };
        [batch.dropout(before, self.index, 0), batch.dropout(p, self.index, 1)]
    }

    /// Puts each sequence's loss into the statistics of its first position, and its scores to
    /// `told`, (B, L), if somebody asks for them.
    pub fn forward(
        &self,
        k: &dyn Kernels,
        batch: &BatchView<'_>,
        weights: View,
        [out, statistics, h]: [View; 3],
        told: Option<View>,
        scratch: &Scratch<'_>,
    ) {
        let w = tensor_views(&self.tensors(), weights);
        let walked = self.walk(k, batch, &w, h, scratch);
        if let Some(told) = told {
            k.cast(told, walked.scores);
        }
        k.class_loss(out, statistics, walked.scores, self.loss(batch.rows));
    }

    /// dh from the statistics' labels; the block's gradient.
    #[allow(clippy::too_many_arguments, reason = "as a tile's")]
    pub fn backward(
        &self,
        k: &dyn Kernels,
        batch: &BatchView<'_>,
        weights: View,
        gradient: View,
        [dh, statistics, h]: [View; 3],
        scale: f32,
        accumulate: bool,
        scratch: &Scratch<'_>,
    ) {
        let (b, c) = (batch.rows.sequences, self.shape.hidden);
        let w = tensor_views(&self.tensors(), weights);
        let d = tensor_views(&self.tensors(), gradient);
        let walked = self.walk(k, batch, &w, h, scratch);
        let [before, behind] = self.drops(batch);
        let one = Rows { sequences: b, positions: 1 };
        let dscores = scratch.take(b * self.labels());
        let (dpooled, dfirst) = (scratch.take(b * c), scratch.take(b * c));
        k.class_loss_backward(dscores, walked.scores, statistics, scale, self.loss(batch.rows));
        let size = self.size(batch.rows, self.labels());
        let pooled = walked.pooled;
        k.linear_backward(
            dpooled,
            d[2],
            Some(d[3]),
            dscores,
            pooled,
            w[2],
            size,
            accumulate,
            scratch,
        );
        k.dropped(dpooled, dpooled, one, behind);
        k.activate_backward(dpooled, walked.sum, self.curve());
        let size = self.size(batch.rows, c);
        let first = walked.first;
        k.linear_backward(
            dfirst,
            d[0],
            Some(d[1]),
            dpooled,
            first,
            w[0],
            size,
            accumulate,
            scratch,
        );
        k.dropped(dfirst, dfirst, one, before);
        k.first_rows_backward(dh, dfirst, batch.rows);
    }
}
