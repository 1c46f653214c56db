//! A block in slices (Shoeybi et al. 2019): each has some of the heads and of the channels of the
//! feed-forward, and computes by itself. The outputs of attention and of the feed-forward are sums
//! of the slices' partial sums: in float, from the first slice to the last, rounded once. In the
//! backward, so are the gradients of their inputs, from the last slice to the first. So the bits
//! depend on the number of slices, and not on who computes which of them.

use std::ops::Range;

use super::backward::{Buffers, ChunkGradients};
use super::chunk::{ChunkPass, KvViews};
use super::cut::{PackedGradients, Packer, Part, add_shared, shared_len};
use super::products::{MlpPart, MlpPass, Products};
use super::routing::RoutingViews;
use super::saved::Activations;
use super::state::ChunkState;
use super::tensors::{FeedForward, Gradients, Mlp, Product, Weights};
use super::{ChunkInputs, TransformerBlock};
use crate::kernels::{AddColumns, Cast, CopyColumns, Kernels, Residual, Scale};
use crate::models::layer::{ChunkMemory, KvCache, Layer, Save};
use crate::tensor::{ALIGNED, Dtype, Scratch, View};

/// A pass over a chunk of a block in slices.
pub(super) struct SlicedPass<'a> {
    /// The pass over the block: its norms, the sums behind its branches, and their dropout. It
    /// reads the first slice's activations, but only those that are common to all slices.
    whole: ChunkPass<'a>,
    slices: Vec<SliceState>,
    kv_cache: Option<KvCache>,
}

/// A slice, and what it keeps during a pass.
struct SliceState {
    block: TransformerBlock,
    saved: Activations,
    /// As in [`ChunkPass`].
    rotated: View,
    chunk_state: Option<ChunkState>,
}

/// The chunk state of a pass, and what a slice does with its part of it at first.
pub(super) struct SlicedKv {
    pub(super) kv_cache: Option<KvCache>,
    pub(super) chunk_state: ChunkMemory,
    pub(super) begin: fn(ChunkState, &dyn Kernels) -> ChunkState,
}

impl TransformerBlock {
    /// Begins a pass over a chunk.
    pub(super) fn sliced_pass<'a>(
        &'a self,
        k: &'a dyn Kernels,
        inputs: &ChunkInputs<'a>,
        kv: &SlicedKv,
        scratch: &Scratch<'_>,
    ) -> SlicedPass<'a> {
        let ChunkInputs { weights, chunk, x, saved, .. } = *inputs;
        let count = self.shape.slices;
        let blocks: Vec<TransformerBlock> = (0..count).map(|slice| self.slice(slice)).collect();
        let activations = self.activations_of_slices(&blocks, &chunk, saved, scratch);
        let first = activations[0];
        let memory = kv.chunk_state.memory;
        let room = memory.len() / count / ALIGNED * ALIGNED;
        let state = |(index, (block, saved)): (usize, (TransformerBlock, Activations))| {
            let own = ChunkMemory {
                memory: memory.part(index * room..(index + 1) * room),
                ..kv.chunk_state
            };
            let chunk_state = block.chunk_state(&chunk, own, scratch.dtype());
            let rotated = scratch.take(chunk.rows(), block.widths().rotated);
            let chunk_state = chunk_state.map(|state| (kv.begin)(state, k));
            SliceState { block, saved, rotated, chunk_state }
        };
        let slices = blocks.into_iter().zip(activations).enumerate().map(state).collect();
        let nothing = scratch.take(0, 0);
        let whole = ChunkPass {
            block: self,
            k,
            w: weights,
            batch: chunk,
            x,
            saved: first,
            hidden: scratch.take(chunk.rows(), self.shape.hidden),
            rotated: nothing,
            projected: nothing,
            gated: nothing,
            products: self.products_on(k, chunk, scratch),
            kv: KvViews::NONE,
            routing: RoutingViews::NONE,
        };
        SlicedPass { whole, slices, kv_cache: kv.kv_cache }
    }

    /// Floats of the chunk state of all slices, one behind the other, if one has this many.
    pub(super) fn sliced_state_len(&self, of_slice: usize) -> usize {
        self.shape.slices * of_slice.next_multiple_of(ALIGNED)
    }
}

impl SlicedPass<'_> {
    fn all(&self) -> Range<usize> {
        0..self.slices.len()
    }

    /// A running sum in float. (R, C).
    fn take_sum(&self, scratch: &Scratch<'_>) -> View {
        scratch.take_floats(self.whole.x.rows, self.whole.x.columns)
    }

    fn products<'s>(&'s self, slice: usize) -> Products<'s> {
        let Products { k, low_rank, .. } = self.whole.products;
        Products { block: &self.slices[slice].block, k, low_rank }
    }

    /// The pass over a slice's attention.
    fn pass<'s>(&'s self, slice: usize, w: &'s Weights<'s>, kv: KvViews) -> ChunkPass<'s> {
        let SliceState { ref block, saved, rotated, .. } = self.slices[slice];
        let ChunkPass { k, batch, x, hidden, projected, gated, routing, .. } = self.whole;
        let products = self.products(slice);
        ChunkPass {
            block,
            k,
            w,
            batch,
            x,
            saved,
            hidden,
            rotated,
            projected,
            gated,
            products,
            kv,
            routing,
        }
    }

    /// The keys and values of a slice, beside those in its projection. Those of the KV cache are
    /// copied from and to the slice's columns.
    fn kv(&self, slice: usize, scratch: &Scratch<'_>) -> KvViews {
        let SliceState { block, chunk_state, .. } = &self.slices[slice];
        let width = block.kv_width();
        let new = self.kv_cache.map(|cache| scratch.take(cache.new.rows, width));
        let cached = self.kv_cache.and_then(|cache| cache.cached).map(|x| {
            let y = scratch.take(x.rows, width);
            let from = slice * width;
            self.whole.k.copy_columns(&CopyColumns { y, x, to: 0, from, columns: width });
            y
        });
        let chunk = chunk_state.map(|state| state.seen());
        KvViews { new: [new, chunk_state.map(|state| state.own())], cached, chunk }
    }

    /// A slice's weights of attention, packed.
    fn attention_weights(&self, slice: usize, scratch: &Scratch<'_>) -> Weights<'static> {
        let ChunkPass { block, k, w, .. } = self.whole;
        let packer = Packer { k, scratch };
        block.attention_of(slice, w, &mut |weight, part| packer.weight(weight, &part))
    }

    /// The feed-forward of the block.
    fn mlp(&self) -> &Mlp<View> {
        let FeedForward::Dense(mlp) = &self.whole.w.feed_forward else {
            unreachable!("blocks with experts are not cut");
        };
        mlp
    }

    /// A slice's weights of the feed-forward, packed.
    fn mlp_weights(&self, slice: usize, scratch: &Scratch<'_>) -> Mlp<View> {
        let ChunkPass { block, k, .. } = self.whole;
        let packer = Packer { k, scratch };
        block.mlp_of(slice, self.mlp(), &mut |weight, part| packer.weight(weight, &part))
    }

    /// Adds a slice's output, the product of `x`, to the running sum. That of the first slice
    /// begins it.
    fn add_output(
        &self,
        slice: usize,
        sum: View,
        x: View,
        product: &Product<View>,
        scratch: &Scratch<'_>,
    ) {
        let partial = if slice == 0 { sum } else { self.take_sum(scratch) };
        self.products(slice).linear(partial, x, product);
        self.add(sum, partial);
    }

    /// Adds a partial sum to the running sum, unless it is the sum.
    fn add(&self, y: View, x: View) {
        if y != x {
            self.whole.k.add_columns(&AddColumns { y, x, first: 0, scale: 1.0 });
        }
    }

    /// Adds the outputs of attention of some slices to the running sum, from the input of
    /// attention.
    fn attend(&self, slices: Range<usize>, sum: View, input: View, scratch: &Scratch<'_>) {
        for slice in slices {
            let scratch = &scratch.nested();
            let w = &self.attention_weights(slice, scratch);
            let pass = self.attention(slice, w, input, scratch);
            self.add_output(slice, sum, pass.gated_output(), &w.projection, scratch);
        }
    }

    /// Computes the attention of a slice.
    fn attention<'s>(
        &'s self,
        slice: usize,
        w: &'s Weights<'s>,
        input: View,
        scratch: &Scratch<'_>,
    ) -> ChunkPass<'s> {
        let kv = self.kv(slice, scratch);
        let pass = self.pass(slice, w, kv);
        pass.recompute_attention(input, scratch);
        if let (Some(cache), Some(x)) = (self.kv_cache, kv.new[0]) {
            let columns = x.columns;
            let to = slice * columns;
            let op = CopyColumns { y: cache.new, x, to, from: 0, columns };
            self.whole.k.copy_columns(&op);
        }
        pass
    }

    /// Adds the outputs of the feed-forward of some slices to the running sum, from its input in
    /// `hidden`.
    fn feed(&self, slices: Range<usize>, sum: View, scratch: &Scratch<'_>) {
        for slice in slices {
            let scratch = &scratch.nested();
            let w = &self.mlp_weights(slice, scratch);
            let SliceState { block, saved, .. } = &self.slices[slice];
            let products = self.products(slice);
            products.linear(saved.up, self.whole.hidden, &w.up);
            let activated = scratch.take(saved.up.rows, block.shape.intermediate);
            products.activate(activated, saved.up);
            self.add_output(slice, sum, activated, &w.down, scratch);
        }
    }

    /// The output of a branch from the complete sum, to `hidden`.
    fn branch(&self, sum: View) {
        let ChunkPass { block, k, hidden: y, .. } = self.whole;
        k.cast(&Cast { y, x: sum });
        let factor = block.shape.residual_scale;
        if factor != 1.0 {
            k.scale(&Scale { y, x: y, factor });
        }
    }

    /// Computes the chunk's output, to `y`.
    pub(super) fn forward(&self, y: View, scratch: &Scratch<'_>) {
        let sum = self.take_sum(scratch);
        self.recompute_feed_forward_input(sum, scratch);
        self.feed(self.all(), sum, scratch);
        self.branch(sum);
        let ChunkPass { block, k, ref saved, hidden: x, ref batch, .. } = self.whole;
        let dropout = block.feed_forward_dropout(batch);
        k.residual(&Residual { y, a: saved.attention_sum, x, dropout });
    }

    /// Computes attention and its sum, and the feed-forward's input.
    fn recompute_feed_forward_input(&self, sum: View, scratch: &Scratch<'_>) {
        self.attend(self.all(), sum, self.whole.attention_input(), scratch);
        self.branch(sum);
        self.whole.add_attention();
    }

    /// Computes the keys and values of the chunk again, to the chunk state.
    pub(super) fn keys(&self, save: Option<Save>, scratch: &Scratch<'_>) {
        let input = self.whole.attention_input();
        for slice in self.all() {
            let scratch = &scratch.nested();
            let w = &self.attention_weights(slice, scratch);
            let own = self.slices[slice].chunk_state.map(|state| state.own());
            let kv = KvViews { new: [None, own], ..KvViews::NONE };
            let pass = self.pass(slice, w, kv);
            match save {
                Some(Save::All) => pass.qkv_for_attention(),
                _ => pass.project_qkv(input),
            };
        }
    }

    /// The gradient of the chunk's input, and of the block's tensors.
    pub(super) fn backward(&self, g: &ChunkGradients<'_>, scratch: &Scratch<'_>) {
        let whole = &self.whole;
        let ChunkPass { block, k, ref batch, x, .. } = *whole;
        let buffers = Buffers::new(x, scratch);
        let Buffers { dbranch, dattention_sum } = buffers;
        let sum = self.take_sum(scratch);
        match g.save {
            None => self.recompute_feed_forward_input(sum, scratch),
            Some(Save::All) => whole.norm_saved_sum(),
            Some(Save::AllButAttention) => {
                let input = whole.attention_input();
                for slice in self.all() {
                    let scratch = &scratch.nested();
                    self.attention(slice, &self.attention_weights(slice, scratch), input, scratch);
                }
                whole.norm_saved_sum();
            }
        }
        let dropout = block.feed_forward_dropout(batch);
        let dy = whole.products.dropout_backward(dbranch, g.dy, dropout);
        self.feed_backward(self.all(), sum, dy, g, scratch);
        k.cast(&Cast { y: dbranch, x: sum });
        whole.middle_norm_backward(g, buffers, g.dy, scratch);
        let dsum = if block.shape.norms.are_beside() { g.dy } else { dattention_sum };
        let dropout = block.attention_dropout(batch);
        let dy = whole.products.dropout_backward(dbranch, dsum, dropout);
        self.attend_backward(self.all(), sum, dy, g, scratch);
        k.cast(&Cast { y: dbranch, x: sum });
        whole.input_backward(g, buffers, scratch);
    }

    /// The backward of [`feed`](Self::feed): adds the gradients of the feed-forward's input to the
    /// running sum, from the last slice to the first.
    fn feed_backward(
        &self,
        slices: Range<usize>,
        sum: View,
        dy: View,
        g: &ChunkGradients<'_>,
        scratch: &Scratch<'_>,
    ) {
        let ChunkPass { block, hidden: x, .. } = self.whole;
        let FeedForward::Dense(d) = &g.d.feed_forward else {
            unreachable!("blocks with experts are not cut");
        };
        let mut shared = Vec::new();
        block.mlp_of(0, d, &mut |d, part| shared.extend(d.filter(|_| part == Part::Shared)));
        let shared = SharedGradients::new(shared, self.slices.len(), scratch);
        for slice in slices.rev() {
            let scratch = &scratch.nested();
            let w = &self.mlp_weights(slice, scratch);
            let mut packed = self.packed_gradients(&shared, slice, g, scratch);
            let d =
                &block.mlp_of(slice, d, &mut |d: Option<View>, part| d.map(|d| packed.of(d, part)));
            let SliceState { block, saved, .. } = &self.slices[slice];
            let products = self.products(slice);
            let up = saved.up;
            if g.save.is_none() {
                products.linear(up, x, &w.up);
            }
            let activated = scratch.take(up.rows, block.shape.intermediate);
            products.activate(activated, up);
            let parts = &[MlpPart { rows: 0..up.rows, w, d }];
            let accumulate = g.accumulate;
            let mlp = MlpPass { parts, x, up, activated, weighted: None, accumulate };
            let partial = self.take_partial(slice, sum, scratch);
            products.mlp_backward(mlp, [partial, dy], scratch);
            self.add(sum, partial);
            packed.unpack();
        }
        shared.add(self.whole.k, g.accumulate);
    }

    /// The backward of [`attend`](Self::attend), as that of the feed-forward.
    fn attend_backward(
        &self,
        slices: Range<usize>,
        sum: View,
        dy: View,
        g: &ChunkGradients<'_>,
        scratch: &Scratch<'_>,
    ) {
        let block = self.whole.block;
        let input = self.whole.attention_input();
        let mut shared = Vec::new();
        let _: Gradients = block.attention_of(0, g.d, &mut |d: Option<View>, part| {
            shared.extend(d.filter(|_| part == Part::Shared));
            d
        });
        let shared = SharedGradients::new(shared, self.slices.len(), scratch);
        for slice in slices.rev() {
            let scratch = &scratch.nested();
            let w = &self.attention_weights(slice, scratch);
            let mut packed = self.packed_gradients(&shared, slice, g, scratch);
            let d = &block.attention_of(slice, g.d, &mut |d: Option<View>, part| {
                d.map(|d| packed.of(d, part))
            });
            let state = &self.slices[slice].chunk_state;
            let chunk_kv = state.as_ref().map(ChunkState::seen_in_backward);
            let g = &ChunkGradients { d, chunk_kv, passed: None, ..*g };
            let kv = KvViews::new(None, *state);
            let pass = self.pass(slice, w, kv);
            let dqkv = pass.heads_backward(g, dy, scratch);
            let partial = self.take_partial(slice, sum, scratch);
            pass.projection_backward(g, partial, dqkv, input, scratch);
            self.add(sum, partial);
            packed.unpack();
        }
        shared.add(self.whole.k, g.accumulate);
    }

    /// The place for the gradient of a branch's input by a slice: the running sum itself for the
    /// last slice, which begins it.
    fn take_partial(&self, slice: usize, sum: View, scratch: &Scratch<'_>) -> View {
        if slice + 1 == self.slices.len() { sum } else { self.take_sum(scratch) }
    }

    fn packed_gradients<'p>(
        &'p self,
        shared: &SharedGradients,
        slice: usize,
        g: &ChunkGradients<'_>,
        scratch: &'p Scratch<'p>,
    ) -> PackedGradients<'p> {
        PackedGradients {
            packer: Packer { k: self.whole.k, scratch },
            shared: shared.of(slice, scratch.dtype()),
            accumulate: g.accumulate,
            packed: Vec::new(),
        }
    }
}

/// The gradients of tensors that slices share, with room for those of each slice.
struct SharedGradients {
    tensors: Vec<View>,
    /// (S, floats of a slice).
    all: View,
}

impl SharedGradients {
    fn new(tensors: Vec<View>, slices: usize, scratch: &Scratch<'_>) -> SharedGradients {
        let all = scratch.take_floats(slices, shared_len(&tensors));
        SharedGradients { tensors, all }
    }

    /// The room of a slice.
    fn of(&self, slice: usize, dtype: Dtype) -> Scratch<'static> {
        let row = self.all.part(slice * self.all.columns..(slice + 1) * self.all.columns);
        Scratch::new(row, dtype)
    }

    /// Adds the slices' gradients, and the sum to the tensors' gradients.
    fn add(&self, k: &dyn Kernels, accumulate: bool) {
        add_shared(k, &self.tensors, self.all, accumulate);
    }
}

#[cfg(test)]
mod tests;
