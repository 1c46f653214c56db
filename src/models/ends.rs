//! The layers before the first transformer block and behind the last one.

use super::adapters::Adapters;
use super::layer::{Backward, Cuts, Forward, Init, Kind, Layer, Save, Tensor};
use super::low_rank::{LowRank, ProductSize};
use super::norms::{Affine, AffineBackward};
use super::ports::{LayerStep, StepContext};
use super::shape::Shape;
use crate::kernels::{
    Activate, ActivateBackward, Activation, AddPositions, AddPositionsBackward, AddTokenTypes,
    AddTokenTypesBackward, ApplyDropout, BatchView, Cast, Clear, Kernels, Linear, LinearBackward,
};
use crate::tensor::{Dtype, Scratch, View};

/// The tensors of a norm of hidden states.
fn norm_tensors(name: &str, shape: &Shape) -> Vec<Tensor> {
    shape.norm_tensors(name, shape.hidden, shape.norms_shift())
}

/// The layer between the embedding and the first transformer block. It adds learned positions and
/// token types, norms the sum and drops out, as far as the family does that.
#[derive(Clone, Debug)]
pub struct Stem {
    /// The layer's index, for dropout.
    pub index: u32,
    /// The model.
    pub shape: Shape,
}

/// The stem's tensors, or their gradients.
struct StemTensors<V> {
    positions: Option<V>,
    kinds: Option<V>,
    norm: Option<Affine<V>>,
}

impl Stem {
    /// True when models of this shape have a stem.
    pub fn is_in(shape: &Shape) -> bool {
        let drops = shape.dropout.embedding > 0.0;
        let has_norm = !shape.names.stem_norm.is_empty();
        shape.learned_positions.is_some() || shape.token_types > 0 || has_norm || drops
    }

    fn has_norm(&self) -> bool {
        !self.shape.names.stem_norm.is_empty()
    }

    fn sorted<V: Copy>(&self, views: &[V]) -> StemTensors<V> {
        let Shape { learned_positions, token_types, .. } = self.shape;
        let shifts = self.shape.norms_shift();
        let mut views = views.iter().copied();
        let mut next = || views.next().expect("as `tensors` lists them");
        StemTensors {
            positions: learned_positions.map(|_| next()),
            kinds: (token_types > 0).then(&mut next),
            norm: self.has_norm().then(|| Affine { weight: next(), bias: shifts.then(&mut next) }),
        }
    }

    /// The rows of a table of positions that are used. They begin at the first position.
    fn used_rows(&self, table: View) -> View {
        let before = self.shape.learned_positions.unwrap_or(0);
        table.row_range(before..before + self.shape.positions)
    }

    /// The sum of embedding, positions and token types.
    fn sum(&self, k: &dyn Kernels, w: &StemTensors<View>, y: View, x: View, batch: &BatchView<'_>) {
        let batch = *batch;
        match w.positions {
            Some(table) => {
                let table = self.used_rows(table);
                k.add_positions(&AddPositions { y, x, table, batch });
            }
            None => k.dropout(&ApplyDropout { y, x, dropout: None }),
        }
        if let Some(table) = w.kinds {
            k.add_token_types(&AddTokenTypes { y, table, batch });
        }
    }

    /// The gradients of the tables, from the gradient of the sum.
    fn tables_backward(
        &self,
        k: &dyn Kernels,
        d: &StemTensors<Option<View>>,
        dy: View,
        pass: &Backward<'_>,
    ) {
        let Backward { batch, accumulate, scratch, .. } = *pass;
        if let (Some(Some(rows)), Some(before)) = (d.positions, self.shape.learned_positions) {
            // No token has a position before the first.
            if before > 0 && !accumulate {
                k.clear(&Clear { y: rows.row_range(0..before) });
            }
            let dtable = self.used_rows(rows);
            k.add_positions_backward(&AddPositionsBackward { dtable, dy, batch, accumulate });
        }
        if let Some(Some(dtable)) = d.kinds {
            let op = AddTokenTypesBackward { dtable, dy, batch, accumulate };
            k.add_token_types_backward(&op, scratch);
        }
    }
}

impl Layer for Stem {
    fn tensors(&self) -> Vec<Tensor> {
        let Shape { names, positions, hidden, initializer_range, token_types, .. } = self.shape;
        let init = Init::Normal(initializer_range);
        let table =
            |name: &str, rows: usize| Tensor::new(name, vec![rows, hidden], Kind::Table, init);
        let before = self.shape.learned_positions;
        let mut all = Vec::new();
        all.extend(before.map(|before| table(names.positions, before + positions)));
        all.extend((token_types > 0).then(|| table(names.token_types, token_types)));
        if self.has_norm() {
            all.extend(norm_tensors(names.stem_norm, &self.shape));
        }
        all
    }

    fn steps(&self, context: &StepContext) -> Vec<LayerStep> {
        let reads = vec![context.embedding_input()];
        let writes = vec![context.embedding];
        let step = LayerStep::on_hidden(context, (0..self.blocks().len()).collect());
        vec![LayerStep { reads, writes, ..step }]
    }

    fn dropout_index(&self) -> Option<u32> {
        (self.shape.dropout.embedding > 0.0).then_some(self.index)
    }

    fn is_optional(&self) -> bool {
        false
    }

    fn products(&self) -> usize {
        0
    }

    fn saved_len(&self, _positions: usize, _save: Save, _dtype: Dtype) -> usize {
        0
    }

    fn cuts(&self, _step: usize) -> Cuts {
        Cuts::ByPosition
    }

    fn forward(&self, k: &dyn Kernels, pass: &Forward<'_>) {
        let Forward { batch, weights, x, y, scratch, .. } = *pass;
        let w = self.sorted(weights);
        let sum = if w.norm.is_some() { scratch.take_like(y) } else { y };
        self.sum(k, &w, sum, x, &batch);
        if let Some(w) = w.norm {
            let statistics = scratch.take_floats(x.rows, 2);
            k.norm(&self.shape.norm(y, statistics, sum, w));
        }
        let dropout = batch.dropout(self.shape.dropout.embedding, self.index, 0);
        if dropout.is_some() {
            k.dropout(&ApplyDropout { y, x: y, dropout });
        }
    }

    fn backward(&self, k: &dyn Kernels, pass: &Backward<'_>) {
        let Backward { batch, weights, gradients, accumulate, x, dy, dx, scratch, .. } = *pass;
        let tensors = self.sorted(weights);
        let d = self.sorted(gradients);
        let dropout = batch.dropout(self.shape.dropout.embedding, self.index, 0);
        let dx = dx.unwrap_or_else(|| scratch.take_like(dy));
        if let (Some(w), Some(d)) = (tensors.norm, d.norm) {
            let sum = scratch.take_like(x);
            let y = scratch.take_like(x);
            let dsum = scratch.take_like(x);
            let statistics = scratch.take_floats(x.rows, 2);
            self.sum(k, &tensors, sum, x, &batch);
            k.norm(&self.shape.norm(y, statistics, sum, w));
            k.dropout(&ApplyDropout { y: dsum, x: dy, dropout });
            let op = AffineBackward { dx, d, dy: dsum, x: sum, statistics, w, residual: None };
            self.shape.norm_backward(k, &op, accumulate, scratch);
        } else {
            k.dropout(&ApplyDropout { y: dx, x: dy, dropout });
        }
        self.tables_backward(k, &d, dx, pass);
    }
}

/// The norm behind the last block, or the transform of a masked LM head, which ends with a norm.
#[derive(Clone, Debug)]
pub struct Final {
    /// The model.
    pub shape: Shape,
    /// True for the transform.
    pub transforms: bool,
    /// The adapter of the transform, if it has one.
    pub adapters: Option<Adapters>,
}

/// The index for dropout of the transform's adapter. The stem has the same index and no adapters.
const ADAPTER_INDEX: u32 = 1;

impl Final {
    /// The norm of a shape.
    pub fn new(shape: Shape) -> Final {
        Final { shape, transforms: false, adapters: None }
    }

    /// The layers of a shape, without adapters.
    pub fn all_of(shape: Shape) -> impl Iterator<Item = Final> {
        let norm = (!shape.names.final_norm.is_empty()).then(|| Final::new(shape));
        let transform = Final { transforms: true, ..Final::new(shape) };
        norm.into_iter().chain(shape.masked_head().then_some(transform))
    }

    /// The transform's module, which may have an adapter.
    pub fn module(&self) -> Option<String> {
        self.transforms.then(|| self.shape.names.transform.into())
    }

    /// The transform's activation function.
    fn activation(&self) -> Activation {
        self.shape.names.transform_activation.unwrap_or(self.shape.activation)
    }

    /// The transform's adapter on a chunk, if it has one.
    fn low_rank<'a>(
        &'a self,
        k: &'a dyn Kernels,
        chunk: BatchView<'a>,
        scratch: &Scratch<'_>,
    ) -> Option<LowRank<'a>> {
        let adapters = self.adapters.as_ref()?;
        let c = self.shape.hidden;
        let size = ProductSize { rows: chunk.rows(), inputs: c, outputs: c };
        Some(LowRank::new(k, adapters, chunk, ADAPTER_INDEX, size, scratch))
    }

    /// The norm's input, which is x or its transform; and the transform before its activation
    /// function.
    fn norm_input(
        &self,
        k: &dyn Kernels,
        views: &[View],
        x: View,
        low_rank: Option<&LowRank<'_>>,
        scratch: &Scratch<'_>,
    ) -> (View, Option<View>) {
        if !self.transforms {
            return (x, None);
        }
        let sum = scratch.take_like(x);
        let activated = scratch.take_like(x);
        let transposed = self.shape.transposed;
        let Affine { weight, bias } = self.product_of(views);
        k.linear(&Linear { y: sum, x, w: weight, bias, transposed });
        if let Some((low_rank, adapters)) = low_rank.zip(self.adapters.as_ref()) {
            low_rank.add(sum, x, &adapters.only(views, self.adapter_at(), self.shape.hidden));
        }
        k.activate(&Activate { y: activated, x: sum, activation: self.activation() });
        (activated, Some(sum))
    }

    /// The transform's tensors among the views.
    fn product_of<V: Copy>(&self, views: &[V]) -> Affine<V> {
        Affine { weight: views[0], bias: self.shape.transform_bias.then(|| views[1]) }
    }

    /// The number of tensors before those of the norm.
    fn norm_at(&self) -> usize {
        if self.transforms { 1 + usize::from(self.shape.transform_bias) } else { 0 }
    }

    /// The number of tensors before those of the adapter.
    fn adapter_at(&self) -> usize {
        self.norm_at() + 1 + usize::from(self.shape.norms_shift())
    }

    /// The norm's tensors among the views.
    fn norm_of<V: Copy>(&self, views: &[V]) -> Affine<V> {
        let at = self.norm_at();
        Affine { weight: views[at], bias: self.shape.norms_shift().then(|| views[at + 1]) }
    }
}

impl Layer for Final {
    fn tensors(&self) -> Vec<Tensor> {
        let Shape { names, hidden: c, initializer_range, .. } = self.shape;
        if !self.transforms {
            return norm_tensors(names.final_norm, &self.shape);
        }
        let transform = names.transform;
        let init = Init::Normal(initializer_range);
        let bias = || Tensor::new(format!("{transform}.bias"), vec![c], Kind::Bias, Init::Zeros);
        let mut all =
            vec![Tensor::new(format!("{transform}.weight"), vec![c, c], Kind::Weight, init)];
        all.extend(self.shape.transform_bias.then(bias));
        all.extend(norm_tensors(names.transform_norm, &self.shape));
        let adapters = self.adapters.iter().flat_map(|adapters| &adapters.modules);
        all.extend(adapters.flat_map(|adapter| adapter.tensors(c, c)));
        all
    }

    fn is_optional(&self) -> bool {
        false
    }

    fn takes_floats(&self) -> bool {
        true
    }

    fn saved_len(&self, _positions: usize, _save: Save, _dtype: Dtype) -> usize {
        0
    }

    fn cuts(&self, _step: usize) -> Cuts {
        Cuts::ByPosition
    }

    fn forward(&self, k: &dyn Kernels, pass: &Forward<'_>) {
        let Forward { batch, weights, x, y, scratch, .. } = *pass;
        let low_rank = self.low_rank(k, batch, scratch);
        let (input, _) = self.norm_input(k, weights, x, low_rank.as_ref(), scratch);
        let statistics = scratch.take_floats(x.rows, 2);
        k.norm(&self.shape.norm(y, statistics, input, self.norm_of(weights)));
    }

    fn backward(&self, k: &dyn Kernels, pass: &Backward<'_>) {
        let Backward { batch, weights, gradients: d, accumulate, x, mut dy, scratch, .. } = *pass;
        let dx = pass.dx.unwrap_or_else(|| scratch.take_like(x));
        if dy.dtype != x.dtype {
            let floats = dy;
            dy = scratch.take_like(floats);
            k.cast(&Cast { y: dy, x: floats });
        }
        let y = scratch.take_like(dy);
        let statistics = scratch.take_floats(x.rows, 2);
        let w = self.norm_of(weights);
        let low_rank = self.low_rank(k, batch, scratch);
        let (input, sum) = self.norm_input(k, weights, x, low_rank.as_ref(), scratch);
        k.norm(&self.shape.norm(y, statistics, input, w));
        let dinput = if sum.is_some() { scratch.take_like(dy) } else { dx };
        let d_norm = self.norm_of(d);
        let op =
            AffineBackward { dx: dinput, d: d_norm, dy, x: input, statistics, w, residual: None };
        self.shape.norm_backward(k, &op, accumulate, scratch);
        let Some(sum) = sum else { return };
        let activation = self.activation();
        let activate = ActivateBackward { dx: dinput, x: sum, activation };
        let dproduct = self.product_of(d);
        let op = LinearBackward {
            dx,
            dw: dproduct.weight,
            dbias: dproduct.bias.flatten(),
            dy: dinput,
            x,
            w: self.product_of(weights).weight,
            transposed: self.shape.transposed,
            accumulate,
        };
        k.activate_linear_backward(&activate, &op, scratch);
        if let Some((low_rank, adapters)) = low_rank.zip(self.adapters.as_ref()) {
            let c = self.shape.hidden;
            let w = adapters.only(weights, self.adapter_at(), c);
            let d = adapters.only(d, self.adapter_at(), c);
            low_rank.backward([dx, dinput, x], &w, &d, accumulate, scratch);
        }
    }
}
