//! A transformer block: attention and feed-forward beside the residual stream. By family, norms
//! stand before the branches or behind the sums.

mod apart;
mod backward;
mod carried;
mod chunk;
mod cut;
mod experts;
mod input;
mod linear;
mod pieces;
mod products;
mod routing;
mod saved;
mod shared;
mod slices;
mod state;
mod tensors;

use std::ops::Range;
use std::sync::OnceLock;

pub(crate) use apart::PASSED_ON;

use self::backward::ChunkGradients;
use self::carried::{CarriedViews, Turn};
use self::chunk::{ChunkPass, KvViews};
use self::products::Products;
use self::routing::RoutingViews;
use self::shared::OwnViews;
use self::slices::SlicedKv;
use self::state::ChunkState;
use self::tensors::Weights;
use super::adapters::Adapters;
use super::layer::{Backward, Cuts, Forward, Keys, Layer, Save, Tensor};
use super::low_rank::{LowRank, ProductSize};
use super::portions::LayerPortion;
use super::ports::{LayerStep, StepContext};
use super::shape::{Dropouts, Shape};
use crate::kernels::{
    Activation, AttentionShape, BatchView, Dropout, Kernels, LinearHeads, Rotary, Scale,
};
use crate::tensor::{ALIGNED, Dtype, Scratch, View};

/// The transformer block of a shape.
#[derive(Clone, Debug)]
pub struct TransformerBlock {
    /// The layer's index, for dropout.
    pub index: u32,
    /// The block's number, for names.
    pub number: usize,
    /// The model.
    pub shape: Shape,
    /// The adapters of the block's modules, if it has any.
    pub adapters: Option<Adapters>,
    /// With ReLU: only the positive numbers of its input are saved, up to this many of a row. 0:
    /// signs alone. `None`: all numbers are saved.
    pub relu_room: Option<usize>,
    /// In a slice of a block: the number of the block's heads in front of its own.
    pub(super) first_head: usize,
    /// The number of experts of a bundle, once it was counted.
    pub(in crate::models) bundle_size: OnceLock<usize>,
}

/// The inputs of a pass over one chunk, or over a whole micro-batch.
#[derive(Clone, Copy)]
struct ChunkInputs<'a> {
    weights: &'a Weights<'a>,
    chunk: BatchView<'a>,
    /// The layer's input. (R, C).
    x: View,
    saved: Option<(Save, View)>,
    kv: KvViews,
    carried: CarriedViews,
    routing: RoutingViews,
    own: OwnViews,
}

impl<'a> ChunkInputs<'a> {
    /// The inputs of a pass in slices, each of which has keys and values of its own.
    fn without_kv(
        weights: &'a Weights<'a>,
        chunk: BatchView<'a>,
        x: View,
        saved: Option<(Save, View)>,
    ) -> ChunkInputs<'a> {
        let kv = KvViews::NONE;
        let carried = CarriedViews::default();
        let routing = RoutingViews::NONE;
        let own = OwnViews::default();
        ChunkInputs { weights, chunk, x, saved, kv, carried, routing, own }
    }
}

impl TransformerBlock {
    /// A block without adapters.
    pub fn new(index: u32, number: usize, shape: Shape) -> TransformerBlock {
        TransformerBlock {
            index,
            number,
            shape: shape.of_block(number),
            adapters: None,
            relu_room: None,
            first_head: 0,
            bundle_size: OnceLock::new(),
        }
    }

    fn rotary(&self) -> Option<&Rotary> {
        let own = self.shape.window_rotary.as_ref().filter(|_| self.window().is_some());
        own.or(self.shape.rotary.as_ref()).filter(|_| self.shape.rotates(self.number))
    }

    fn attention<'a>(&self, batch: &BatchView<'a>) -> AttentionShape<'a> {
        let Shape { heads, kv_heads, head_size, causal, dropout, .. } = self.shape;
        AttentionShape {
            batch: *batch,
            heads,
            kv_heads,
            head_size,
            causal,
            window: self.window(),
            scale: self.shape.score_scale,
            cap: self.shape.score_cap,
            dropout: batch
                .dropout(dropout.attention, self.index, 0)
                .map(|dropout| dropout.at_head(self.first_head)),
        }
    }

    /// The dropout of attention's output.
    fn attention_dropout<'a>(&self, batch: &BatchView<'a>) -> Option<Dropout<'a>> {
        batch.dropout(self.shape.dropout.projection, self.index, 1)
    }

    /// The dropout of the feed-forward's output.
    fn feed_forward_dropout<'a>(&self, batch: &BatchView<'a>) -> Option<Dropout<'a>> {
        batch.dropout(self.shape.dropout.feed_forward, self.index, 2)
    }

    /// The block's products on a chunk, with their adapters if it has any.
    fn products_on<'a>(
        &'a self,
        k: &'a dyn Kernels,
        chunk: BatchView<'a>,
        scratch: &Scratch<'_>,
    ) -> Products<'a> {
        let adapters = self.adapters.as_ref().filter(|_| chunk.has_adapters());
        let low_rank = adapters.map(|adapters| {
            let modules = self.linear_modules();
            let inputs = modules.iter().map(|(_, inputs, _)| *inputs).max().unwrap_or(0);
            let outputs = modules.iter().map(|(.., outputs)| *outputs).max().unwrap_or(0);
            // Partial sums are floats, and have room for these.
            let is_sliced = self.shape.slices > 1;
            let room = if is_sliced { size_of::<f32>() / scratch.dtype().size() } else { 1 };
            let outputs = room * outputs;
            let size = ProductSize { rows: chunk.rows(), inputs, outputs };
            LowRank::new(k, adapters, chunk, self.index, size, scratch)
        });
        Products { block: self, k, low_rank }
    }

    /// Begins a pass over a chunk: takes the workspace that forward and backward share.
    fn chunk_pass<'a>(
        &'a self,
        k: &'a dyn Kernels,
        inputs: &ChunkInputs<'a>,
        scratch: &Scratch<'_>,
    ) -> ChunkPass<'a> {
        let ChunkInputs { weights, chunk, x, saved, kv, carried, routing, own } = *inputs;
        let widths = self.widths();
        let take = |columns| scratch.take(if columns == 0 { 0 } else { chunk.rows() }, columns);
        let is_gated = widths.gates > 0 || self.linear().is_some();
        ChunkPass {
            block: self,
            k,
            w: weights,
            batch: chunk,
            x,
            saved: self.activations(&chunk, saved, scratch),
            hidden: take(self.shape.hidden),
            rotated: take(widths.rotated),
            projected: take(widths.projected),
            gated: take(if is_gated { widths.output } else { 0 }),
            products: self.products_on(k, chunk, scratch),
            kv,
            carried,
            routing,
            own,
        }
    }
}

/// The gradient in front of the number that multiplies a block's output, if it has one.
fn output_gradient(k: &dyn Kernels, w: &Weights<'_>, dy: View, scratch: &Scratch<'_>) -> View {
    if w.output_scalar.is_none() {
        return dy;
    }
    let y = scratch.take_like(dy);
    k.scale(&Scale { y, x: dy, factor: 1.0, by: w.output_scalar });
    y
}

impl Layer for TransformerBlock {
    fn tensors(&self) -> Vec<Tensor> {
        self.tensors_of_blocks().concat()
    }

    fn blocks(&self) -> Vec<usize> {
        self.tensors_of_blocks().iter().map(Vec::len).collect()
    }

    fn stored_weights(&self, step: usize) -> usize {
        let Some(experts) = self.experts() else { return 0 };
        let of_expert = self.expert_tensors(experts, 0);
        self.experts_of(step).len() * of_expert.iter().filter(|tensor| !tensor.joined).count()
    }

    fn parts_of_block(&self, block: usize) -> Range<usize> {
        block.checked_sub(1).map_or(0..0, |behind| self.bundle(behind))
    }

    fn chosen_parts(&self, choice: &[f32]) -> Vec<bool> {
        self.experts().map_or_else(Vec::new, |experts| routing::with_rows(experts, choice))
    }

    fn products(&self) -> usize {
        let weights = |tensors: Vec<Tensor>| -> usize {
            tensors.iter().filter(|tensor| tensor.kind.is_weight()).map(Tensor::len).sum()
        };
        let passed = self.experts().map_or(0, |experts| {
            (experts.count - experts.per_token) * weights(self.expert_tensors(experts, 0))
        });
        // The delta rule multiplies its state by a key and a query, and adds a product to it.
        let of_states = |heads: LinearHeads| 3 * heads.values() * heads.key_size;
        weights(self.tensors()) - passed + self.linear().map_or(0, of_states)
    }

    fn kv_width(&self) -> usize {
        let of_attention = 2 * self.shape.kv_heads * self.shape.head_size;
        self.linear().map_or(of_attention, |_| 0)
    }

    fn state_len(&self) -> usize {
        self.linear().map_or(0, |heads| heads.carried())
    }

    fn key_channels(&self) -> usize {
        let projected = if self.reads_kv() { 0 } else { self.kv_width() };
        self.linear().map_or(projected, |heads| heads.projected())
    }

    fn attention_channels(&self) -> usize {
        let sides = if self.shape.causal { 1 } else { 2 };
        self.linear().map_or(sides * self.shape.attention_width(), |_| 0)
    }

    fn dropout_index(&self) -> Option<u32> {
        let Dropouts { attention, projection, feed_forward, .. } = self.shape.dropout;
        [attention, projection, feed_forward].iter().any(|p| *p > 0.0).then_some(self.index)
    }

    fn steps(&self, context: &StepContext) -> Vec<LayerStep> {
        let mut step = LayerStep::on_hidden(context, (0..self.count_blocks()).collect());
        let chunks = context.chunks(self.cuts(0)).count();
        step.saves = context.save.map(|save| self.saved_activations(save, context.dtype, chunks));
        step.asks = self.experts().map(|experts| experts.question());
        context.add_kv(&mut step, self.kv_width());
        context.add_state(&mut step, self.state_len());
        self.add_own(context, &mut step);
        match () {
            () if self.is_in_pieces() => self.steps_of_pieces(context, &step),
            () if self.is_apart() => self.steps_apart(context, step),
            () => vec![step],
        }
    }

    fn portions(&self, _block: usize) -> Vec<LayerPortion> {
        self.portions_of_pieces()
    }

    fn cuts(&self, step: usize) -> Cuts {
        match step {
            _ if !self.shape.causal => Cuts::Never,
            _ if self.is_in_pieces() => self.cuts_of_piece(step),
            0 => Cuts::Causal,
            _ => Cuts::ByPosition,
        }
    }

    fn window(&self) -> Option<usize> {
        self.shape.window.filter(|window| window.is_of(self.number)).map(|one| one.positions)
    }

    fn saved_len(&self, positions: usize, save: Save, dtype: Dtype) -> usize {
        let bytes = self.saved_activations(save, dtype, 1).bytes(1, positions as u64);
        bytes as usize / size_of::<f32>()
    }

    fn saved_len_of(&self, step: usize, positions: usize, save: Save, dtype: Dtype) -> usize {
        if !self.is_in_pieces() {
            return self.saved_len(positions, save, dtype);
        }
        let saved = self.saved_by_piece(&self.piece(step), save, dtype, 1);
        let bytes = saved.map_or(0, |saved| saved.bytes(1, positions as u64));
        bytes as usize / size_of::<f32>()
    }

    fn chunk_state_len(&self, positions: usize, trains: bool, dtype: Dtype) -> usize {
        if self.shape.slices > 1 {
            return self.sliced_state_len(self.slice(0).chunk_state_len(positions, trains, dtype));
        }
        let is_cut = self.cuts(0) != Cuts::Never && positions > self.shape.chunk_positions;
        if let Some(heads) = self.linear() {
            let chunks = if is_cut { positions.div_ceil(self.shape.chunk_positions) } else { 1 };
            return carried::chunk_state_len(heads, chunks, trains);
        }
        let numbers = positions * self.kv_width();
        let gradients = if trains { numbers } else { 0 };
        let [values, gradients] =
            [dtype.floats(numbers), gradients].map(|floats| floats.next_multiple_of(ALIGNED));
        if is_cut { values + gradients } else { 0 }
    }

    fn is_optional(&self) -> bool {
        // A block that is left out would lack what others read of it, or leave its input unread.
        self.shape.shared_kv.is_none() && self.shape.block_inputs.is_none()
    }

    fn pack_relu(&mut self, density: Option<f64>, trained: &[Tensor]) -> bool {
        let Shape { gated, activation, intermediate, .. } = self.shape;
        let is_whole = self.shape.slices == 1 && self.experts().is_none();
        if gated || activation != Activation::Relu || !is_whole {
            return false;
        }
        let is_read = |(name, _): &(String, usize)| {
            let is_of = |tensor: &Tensor| {
                let part = tensor.name.strip_prefix(name.as_str());
                tensor.kind.is_weight() && part.is_some_and(|part| part.starts_with('.'))
            };
            trained.iter().any(is_of)
        };
        // Only the gradient of the second product's weights needs the numbers.
        let room = |density: f64| (density * intermediate as f64).ceil() as usize;
        let mut down = self.common_modules().into_iter().flat_map(|[_, down]| down.named);
        let is_read = down.any(|module| is_read(&module));
        self.relu_room = density.map(|density| if is_read { room(density) } else { 0 });
        true
    }

    fn forward(&self, k: &dyn Kernels, pass: &Forward<'_>) {
        match pass.step {
            _ if self.is_in_pieces() => return self.piece_forward(k, pass),
            0 if self.is_apart() => return self.base_forward(k, pass),
            0 => {}
            _ => return self.part_forward(k, pass),
        }
        let Forward { batch, x, y, saved, kv_cache, chunk_state, scratch, .. } = *pass;
        let weights = &self.sorted(pass.weights, pass.stored);
        if self.shape.slices > 1 {
            let kv = SlicedKv { kv_cache, chunk_state, begin: ChunkState::move_on };
            let inputs = ChunkInputs::without_kv(weights, batch, x, saved);
            return self.sliced_pass(k, &inputs, &kv, scratch).forward(y, scratch);
        }
        let state = self.chunk_state(&batch, chunk_state, scratch.dtype());
        let for_others = self.kv_for_others(&pass.ports);
        let kv = KvViews::new(kv_cache, state.map(|state| state.move_on(k)), for_others);
        let carried = self.carried(&batch, chunk_state, kv_cache, Turn::Forward);
        let routing = RoutingViews::of_forward(&pass.ports);
        let own = self.own_views(&pass.ports);
        let inputs = ChunkInputs { weights, chunk: batch, x, saved, kv, carried, routing, own };
        self.chunk_pass(k, &inputs, scratch).forward(y, scratch);
    }

    fn keys(&self, k: &dyn Kernels, pass: &Keys<'_>) {
        if self.is_in_pieces() {
            return self.piece_keys(k, pass);
        }
        let Keys { batch, x, saved, chunk_state, scratch, .. } = *pass;
        let weights = &self.sorted(pass.weights, pass.stored);
        if self.shape.slices > 1 {
            let kv = SlicedKv { kv_cache: None, chunk_state, begin: ChunkState::move_back };
            let inputs = ChunkInputs::without_kv(weights, batch, x, saved);
            let save = saved.map(|(save, _)| save);
            return self.sliced_pass(k, &inputs, &kv, scratch).keys(save, scratch);
        }
        let state = self.chunk_state(&batch, chunk_state, scratch.dtype());
        let own = state.map(|state| state.move_back(k).own());
        let kv = KvViews { new: [own, None, None], ..KvViews::NONE };
        let carried = self.carried(&batch, chunk_state, None, Turn::Keys);
        let routing = RoutingViews::NONE;
        let own = self.own_views(&pass.ports);
        let inputs = ChunkInputs { weights, chunk: batch, x, saved, kv, carried, routing, own };
        let is_saved = matches!(saved, Some((Save::All, _)));
        self.chunk_pass(k, &inputs, scratch).keys(is_saved, scratch);
    }

    fn backward(&self, k: &dyn Kernels, pass: &Backward<'_>) {
        if self.is_in_pieces() {
            return self.piece_backward(k, pass);
        }
        if pass.step > 0 {
            return self.part_backward(k, pass);
        }
        let Backward { batch, x, saved, dy, dx, chunk_state, accumulate, scratch, .. } = *pass;
        let weights = &self.sorted(pass.weights, pass.stored);
        let dy = output_gradient(k, weights, dy, scratch);
        let (base, experts) = pass.gradients.split_at(pass.weights.len());
        let d = &self.sorted(base, experts);
        let dx = dx.unwrap_or_else(|| scratch.take_like(x));
        let save = saved.map(|(save, _)| save);
        if self.shape.slices > 1 {
            let kv = SlicedKv { kv_cache: None, chunk_state, begin: |state, _| state };
            let inputs = ChunkInputs::without_kv(weights, batch, x, saved);
            let of_chunk = self.sliced_pass(k, &inputs, &kv, scratch);
            let gradients =
                ChunkGradients { d, dy, dx, chunk_kv: None, save, accumulate, passed: None };
            return of_chunk.backward(&gradients, scratch);
        }
        let state = self.chunk_state(&batch, chunk_state, scratch.dtype());
        let kv = KvViews::new(None, state, None);
        let carried = self.carried(&batch, chunk_state, None, Turn::Backward);
        let routing = RoutingViews::of_backward(&pass.ports);
        let own = self.own_views(&pass.ports);
        let inputs = ChunkInputs { weights, chunk: batch, x, saved, kv, carried, routing, own };
        let chunk_kv = state.as_ref().map(ChunkState::seen_in_backward);
        let of_chunk = self.chunk_pass(k, &inputs, scratch);
        let passed = self.is_apart().then(|| {
            let dh = scratch.take_floats(batch.rows(), self.shape.hidden);
            self.passed_down(k, pass, dh)
        });
        let gradients = ChunkGradients { d, dy, dx, chunk_kv, save, accumulate, passed };
        of_chunk.backward(&gradients, scratch);
    }
}
