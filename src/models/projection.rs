//! The product between the stem and the first block, where embeddings have other channels than
//! hidden states (ELECTRA-small).

use super::adapters::Adapters;
use super::layer::{Backward, Cuts, Forward, Init, Kind, Layer, Save, Tensor};
use super::low_rank::{LowRank, ProductSize};
use super::ports::{LayerStep, StepContext};
use super::shape::Shape;
use crate::kernels::{BatchView, Kernels, Linear, LinearBackward};
use crate::tensor::{Dtype, Scratch, View};

/// The projection of embeddings to the channels of hidden states.
#[derive(Clone, Debug)]
pub struct EmbeddingProjection {
    /// The model.
    pub shape: Shape,
    /// The adapter of the product, if it has one.
    pub adapters: Option<Adapters>,
}

/// The index for dropout of the product's adapter. The stem has the same index and no adapters.
const ADAPTER_INDEX: u32 = 1;

impl EmbeddingProjection {
    /// The projection of a shape, without an adapter, if it has one.
    pub fn of(shape: Shape) -> Option<EmbeddingProjection> {
        shape.embedding_channels.map(|_| EmbeddingProjection { shape, adapters: None })
    }

    /// The name, inputs and outputs of its module.
    pub(crate) fn module(&self) -> (String, usize, usize) {
        let name = self.shape.names.embedding_projection.to_string();
        (name, self.shape.embedding_width(), self.shape.hidden)
    }

    fn low_rank<'a>(
        &'a self,
        k: &'a dyn Kernels,
        chunk: BatchView<'a>,
        scratch: &Scratch<'_>,
    ) -> Option<LowRank<'a>> {
        let adapters = self.adapters.as_ref()?;
        let (_, inputs, outputs) = self.module();
        let size = ProductSize { rows: chunk.rows(), inputs, outputs };
        Some(LowRank::new(k, adapters, chunk, ADAPTER_INDEX, size, scratch))
    }
}

impl Layer for EmbeddingProjection {
    fn tensors(&self) -> Vec<Tensor> {
        let (name, inputs, outputs) = self.module();
        let init = Init::Normal(self.shape.initializer_range);
        let weight =
            Tensor::new(format!("{name}.weight"), vec![outputs, inputs], Kind::Weight, init);
        let bias = Tensor::new(format!("{name}.bias"), vec![outputs], Kind::Bias, Init::Zeros);
        let adapters = self.adapters.iter().flat_map(|adapters| &adapters.modules);
        let adapters = adapters.flat_map(|adapter| adapter.tensors(inputs, outputs));
        [weight, bias].into_iter().chain(adapters).collect()
    }

    fn steps(&self, context: &StepContext) -> Vec<LayerStep> {
        let reads = vec![context.embedding_input()];
        vec![LayerStep { reads, ..LayerStep::on_hidden(context, vec![0]) }]
    }

    fn is_optional(&self) -> bool {
        false
    }

    fn saved_len(&self, _positions: usize, _save: Save, _dtype: Dtype) -> usize {
        0
    }

    fn cuts(&self, _step: usize) -> Cuts {
        Cuts::ByPosition
    }

    fn forward(&self, k: &dyn Kernels, pass: &Forward<'_>) {
        let Forward { batch, weights, x, y, scratch, .. } = *pass;
        k.linear(&Linear { y, x, w: weights[0], bias: Some(weights[1]), transposed: true });
        if let Some((low_rank, adapters)) =
            self.low_rank(k, batch, scratch).zip(self.adapters.as_ref())
        {
            low_rank.add(y, x, &adapters.only(weights, 2, self.shape.hidden));
        }
    }

    fn backward(&self, k: &dyn Kernels, pass: &Backward<'_>) {
        let Backward { batch, weights, gradients, accumulate, x, dy, scratch, .. } = *pass;
        let dx: View = pass.dx.unwrap_or_else(|| scratch.take_like(x));
        let op = LinearBackward {
            dx,
            dw: gradients[0],
            dbias: gradients[1],
            dy,
            x,
            w: weights[0],
            transposed: true,
            accumulate,
        };
        k.linear_backward(&op, scratch);
        if let Some((low_rank, adapters)) =
            self.low_rank(k, batch, scratch).zip(self.adapters.as_ref())
        {
            let w = adapters.only(weights, 2, self.shape.hidden);
            let d = adapters.only(gradients, 2, self.shape.hidden);
            low_rank.backward([dx, dy, x], &w, &d, accumulate, scratch);
        }
    }
}
