//! Inputs of each block beside hidden states (Gemma Team 2026): rows of a table of tokens, and a
//! product of the embedding, both of which have channels for each block.
//!
//! The host gathers a token's row of that table behind its embedding. One layer in front of the
//! first block adds both kinds, and leaves each block its own part. So a visit of a block uploads
//! no more than that.

use l2l_actors::schedule::Role;

use super::adapters::Adapters;
use super::layer::{Backward, Cuts, Forward, Init, Kind, Layer, Save, Tensor};
use super::low_rank::{LowRank, ProductSize};
use super::norms::{Affine, AffineBackward};
use super::ports::{LayerStep, StepContext};
use super::shape::Shape;
use crate::kernels::{
    BatchView, CopyColumns, Kernels, Linear, LinearBackward, Residual, Scale, TakeColumns,
};
use crate::tensor::{Dtype, Scratch, View};

/// The sizes of blocks' inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockInputs {
    /// Rows of their table: as many as the vocabulary has tokens, or more.
    pub vocabulary: usize,
    /// P: channels of the input of one block.
    pub channels: usize,
}

/// The first of the numbers of the boundaries of blocks' inputs: block b has the number behind it
/// by b.
const FIRST: u16 = 512;

/// The number of the boundary of a block's input.
pub(super) fn number_of(block: usize) -> u16 {
    FIRST + u16::try_from(block).expect("families bound the number of such blocks")
}

/// The layer that computes the inputs of all blocks.
#[derive(Clone, Debug)]
pub struct InputProjection {
    /// The model.
    pub shape: Shape,
    /// The adapter of the product, if it has one.
    pub adapters: Option<Adapters>,
}

/// The index for dropout of the product's adapter. The stem has the same index and no adapters.
const ADAPTER_INDEX: u32 = 1;

/// The factor of the sum of both kinds: 1 ÷ √2.
const OF_SUM: f32 = std::f32::consts::FRAC_1_SQRT_2;

/// What forward and backward compute. The product has L P channels, and the norm L rows for each of
/// the batch.
struct Projected<'a> {
    /// (R, L P).
    product: View,
    /// (R, L P).
    normed: View,
    /// (R L, 2).
    statistics: View,
    low_rank: Option<LowRank<'a>>,
}

impl InputProjection {
    /// The layer of a shape, without an adapter, if it has one.
    pub fn of(shape: Shape) -> Option<InputProjection> {
        shape.block_inputs.map(|_| InputProjection { shape, adapters: None })
    }

    /// P.
    fn channels(&self) -> usize {
        self.shape.block_inputs.map_or(0, |inputs| inputs.channels)
    }

    /// L P: channels of the inputs of all blocks.
    fn all(&self) -> usize {
        self.shape.layers * self.channels()
    }

    /// The name, inputs and outputs of its module.
    pub(crate) fn module(&self) -> (String, usize, usize) {
        (self.shape.names.inputs.projection.into(), self.shape.hidden, self.all())
    }

    /// The factor of the product: 1 ÷ √C.
    fn of_product(&self) -> f32 {
        (self.shape.hidden as f64).powf(-0.5) as f32
    }

    /// The embedding, to `embedding`; its product, and the norm of that.
    fn project<'a>(
        &'a self,
        k: &'a dyn Kernels,
        weights: &[View],
        [embedding, x]: [View; 2],
        batch: BatchView<'a>,
        scratch: &Scratch<'_>,
    ) -> Projected<'a> {
        let rows = x.rows;
        let all = self.all();
        k.take_columns(&TakeColumns { y: embedding, x, first: 0, scale: 1.0 });
        let product = scratch.take(rows, all);
        k.linear(&Linear { y: product, x: embedding, w: weights[0], bias: None, transposed: true });
        let low_rank = self.adapters.as_ref().map(|adapters| {
            let size = ProductSize { rows, inputs: self.shape.hidden, outputs: all };
            LowRank::new(k, adapters, batch, ADAPTER_INDEX, size, scratch)
        });
        if let Some((low_rank, adapters)) = low_rank.zip(self.adapters.as_ref()) {
            low_rank.add(product, embedding, &adapters.only(weights, 2, all));
        }
        k.scale(&Scale { y: product, x: product, factor: self.of_product(), by: None });
        let normed = scratch.take(rows, all);
        let statistics = scratch.take_floats(rows * self.shape.layers, 2);
        let [y, x] = [normed, product].map(|view| self.by_block(view));
        k.norm(&self.shape.norm(y, statistics, x, self.norm_of(weights)));
        Projected { product, normed, statistics, low_rank }
    }

    /// A row for each input of one block. (R L, P).
    fn by_block(&self, view: View) -> View {
        view.with_columns(self.channels())
    }

    fn norm_of<V: Copy>(&self, views: &[V]) -> Affine<V> {
        Affine { weight: views[1], bias: None }
    }

    /// The gradient of the sum of both kinds. (R, L P).
    fn gradient(&self, k: &dyn Kernels, pass: &Backward<'_>) -> View {
        let Backward { x, scratch, ref ports, .. } = *pass;
        let y = scratch.take(x.rows, self.all());
        let columns = self.channels();
        for block in 0..self.shape.layers {
            let x = ports.read(Role::OwnGradient(number_of(block))).expect("each block leaves it");
            k.copy_columns(&CopyColumns { y, x, to: block * columns, from: 0, columns });
        }
        k.scale(&Scale { y, x: y, factor: OF_SUM, by: None });
        y
    }
}

impl Layer for InputProjection {
    fn tensors(&self) -> Vec<Tensor> {
        let (name, inputs, outputs) = self.module();
        let init = Init::Normal(self.shape.initializer_range);
        let weight =
            Tensor::new(format!("{name}.weight"), vec![outputs, inputs], Kind::Weight, init);
        let norm = self.shape.norm_tensors(self.shape.names.inputs.norm, self.channels(), false);
        let adapters = self.adapters.iter().flat_map(|adapters| &adapters.modules);
        let adapters = adapters.flat_map(|adapter| adapter.tensors(inputs, outputs));
        [weight].into_iter().chain(norm).chain(adapters).collect()
    }

    fn steps(&self, context: &StepContext) -> Vec<LayerStep> {
        let reads = vec![context.embedding_input()];
        let inputs = (0..self.shape.layers).map(number_of);
        let inputs = inputs.map(|number| context.own(number, self.channels()));
        let writes = [context.hidden()].into_iter().chain(inputs).collect();
        vec![LayerStep { reads, writes, ..LayerStep::on_hidden(context, vec![0]) }]
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
        let Forward { batch, weights, x, y, scratch, ref ports, .. } = *pass;
        let Projected { normed, .. } = self.project(k, weights, [y, x], batch, scratch);
        let sum = scratch.take_like(normed);
        k.take_columns(&TakeColumns { y: sum, x, first: self.shape.hidden, scale: 1.0 });
        k.residual(&Residual { y: sum, a: normed, x: sum, dropout: None });
        for block in 0..self.shape.layers {
            let y = ports.written(Role::Own(number_of(block))).expect("the step declares it");
            let first = block * self.channels();
            k.take_columns(&TakeColumns { y, x: sum, first, scale: OF_SUM });
        }
    }

    fn backward(&self, k: &dyn Kernels, pass: &Backward<'_>) {
        let Backward { batch, weights, gradients, accumulate, x, dy, dx, scratch, .. } = *pass;
        let hidden = self.shape.hidden;
        let all = self.all();
        let dsum = self.gradient(k, pass);
        let embedding = scratch.take(x.rows, hidden);
        let projected = self.project(k, weights, [embedding, x], batch, scratch);
        let Projected { product, statistics, low_rank, .. } = projected;
        let dproduct = projected.normed; // nothing reads it any more
        let [of_product, of_sum, input] = [dproduct, dsum, product].map(|one| self.by_block(one));
        let op = AffineBackward {
            dx: of_product,
            d: Affine { weight: gradients[1], bias: None },
            dy: of_sum,
            x: input,
            statistics,
            w: self.norm_of(weights),
            residual: None,
        };
        self.shape.norm_backward(k, &op, accumulate, &scratch.nested());
        k.scale(&Scale { y: dproduct, x: dproduct, factor: self.of_product(), by: None });
        let dembedding = scratch.take_like(embedding);
        let op = LinearBackward {
            dx: dembedding,
            dw: gradients[0],
            dbias: None,
            dy: dproduct,
            x: embedding,
            w: weights[0],
            transposed: true,
            accumulate,
        };
        k.linear_backward(&op, scratch);
        if let Some((low_rank, adapters)) = low_rank.zip(self.adapters.as_ref()) {
            let w = adapters.only(weights, 2, all);
            let d = adapters.only(gradients, 2, all);
            low_rank.backward([dembedding, dproduct, embedding], &w, &d, accumulate, scratch);
        }
        let Some(y) = dx else { return };
        k.residual(&Residual { y: dembedding, a: dy, x: dembedding, dropout: None });
        let parts = [(0, dembedding), (hidden, dsum)];
        for (to, x) in parts {
            k.copy_columns(&CopyColumns { y, x, to, from: 0, columns: x.columns });
        }
    }
}
