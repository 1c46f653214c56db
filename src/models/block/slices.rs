//! A block in slices (Shoeybi et al. 2019): each has some of the heads and of the channels of the
//! feed-forward, and computes by itself. The outputs of attention and of the feed-forward are sums
//! of the slices' partial sums: in float, from the first slice to the last, rounded once. In the
//! backward, so are the gradients of their inputs, from the last slice to the first. So the bits
//! depend on the number of slices, and not on who computes which of them.

mod gradients;

use std::ops::Range;

use super::backward::{Buffers, ChunkGradients};
use super::carried::CarriedViews;
use super::chunk::{ChunkPass, KvViews};
use super::cut::Packer;
use super::pieces::{Half, PortionViews};
use super::products::Products;
use super::routing::RoutingViews;
use super::saved::Activations;
use super::shared::OwnViews;
use super::state::ChunkState;
use super::tensors::{Mlp, Product, Weights};
use super::{ChunkInputs, TransformerBlock};
use crate::kernels::{AddColumns, Cast, CopyColumns, Kernels, Residual, Scale};
use crate::models::layer::{ChunkMemory, KvCache, Layer, Save};
use crate::tensor::{ALIGNED, Scratch, View};

/// A pass over a chunk of a block in slices: of all of them, or of those of a piece.
pub(super) struct SlicedPass<'a> {
    /// The pass over the block: its norms, the sums behind its branches, and their dropout. It
    /// reads the first slice's activations, but only those that are common to all slices.
    pub(super) whole: ChunkPass<'a>,
    /// The number of its first slice in the block.
    first: usize,
    slices: Vec<SliceState>,
    /// The tensors of a piece. `None`: those of slices are packed from the block's.
    portion: Option<&'a PortionViews>,
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

/// The slices of a pass, the half that it computes, and where it finds what it needs of the block.
pub(super) struct PassOf<'a> {
    pub(super) slices: Range<usize>,
    pub(super) half: Half,
    pub(super) portion: Option<&'a PortionViews>,
    /// The residual stream behind attention. `None`: it is an activation of the pass.
    pub(super) attention_sum: Option<View>,
}

/// The sums to which the backwards of slices add, from the last slice to the first.
#[derive(Clone, Copy)]
pub(super) struct GradientSums {
    /// Of the branch's input, in float. (R, C).
    pub(super) input: View,
    /// Of what the slices share, one behind the other. `None`: the sum begins and ends in the pass.
    pub(super) shared: Option<View>,
}

impl TransformerBlock {
    /// Begins a pass over a chunk, with all slices.
    pub(super) fn sliced_pass<'a>(
        &'a self,
        k: &'a dyn Kernels,
        inputs: &ChunkInputs<'a>,
        kv: &SlicedKv,
        scratch: &Scratch<'_>,
    ) -> SlicedPass<'a> {
        let slices = 0..self.shape.slices;
        let of = PassOf { slices, half: Half::Both, portion: None, attention_sum: None };
        self.pass_of_slices(k, inputs, kv, of, scratch)
    }

    /// Begins a pass over a chunk, with some slices.
    pub(super) fn pass_of_slices<'a>(
        &'a self,
        k: &'a dyn Kernels,
        inputs: &ChunkInputs<'a>,
        kv: &SlicedKv,
        of: PassOf<'a>,
        scratch: &Scratch<'_>,
    ) -> SlicedPass<'a> {
        let ChunkInputs { weights, chunk, x, saved, .. } = *inputs;
        let first = of.slices.start;
        let count = of.slices.len();
        let blocks: Vec<_> = of.slices.clone().map(|slice| self.slice(slice)).collect();
        let activations = self.activations_of_slices(&blocks, &chunk, saved, &of, scratch);
        let common = activations[0];
        let memory = kv.chunk_state.memory;
        let room = memory.len() / count / ALIGNED * ALIGNED;
        let has_state = of.half != Half::Feed;
        let if_so = |width: usize| if has_state { width } else { 0 };
        let projected = scratch.take(chunk.rows(), if_so(blocks[0].widths().projected));
        let state = |(index, (block, saved)): (usize, (TransformerBlock, Activations))| {
            let own = ChunkMemory {
                memory: memory.part(index * room..(index + 1) * room),
                ..kv.chunk_state
            };
            let chunk_state = block.chunk_state(&chunk, own, scratch.dtype());
            let chunk_state = chunk_state.filter(|_| has_state);
            let rotated = scratch.take(chunk.rows(), if_so(block.widths().rotated));
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
            saved: common,
            hidden: scratch.take(chunk.rows(), self.shape.hidden),
            rotated: nothing,
            projected,
            gated: nothing,
            products: self.products_on(k, chunk, scratch),
            kv: KvViews::NONE,
            carried: CarriedViews::default(),
            routing: RoutingViews::NONE,
            own: OwnViews::default(),
        };
        SlicedPass { whole, first, slices, portion: of.portion, kv_cache: kv.kv_cache }
    }

    /// Floats of the chunk state of the slices of a visit, one behind the other, if one has this
    /// many.
    pub(super) fn sliced_state_len(&self, of_slice: usize) -> usize {
        self.slices_of_attention() * of_slice.next_multiple_of(ALIGNED)
    }
}

impl SlicedPass<'_> {
    /// The slices of the pass, by their numbers in the block.
    pub(super) fn all(&self) -> Range<usize> {
        self.first..self.first + self.slices.len()
    }

    fn slice(&self, number: usize) -> &SliceState {
        &self.slices[number - self.first]
    }

    /// A running sum in float. (R, C).
    pub(super) fn take_sum(&self, scratch: &Scratch<'_>) -> View {
        scratch.take_floats(self.whole.x.rows, self.whole.x.columns)
    }

    fn products<'s>(&'s self, slice: usize) -> Products<'s> {
        let Products { k, low_rank, .. } = self.whole.products;
        Products { block: &self.slice(slice).block, k, low_rank }
    }

    /// The pass over a slice's attention.
    fn pass<'s>(&'s self, slice: usize, w: &'s Weights<'s>, kv: KvViews) -> ChunkPass<'s> {
        let SliceState { ref block, saved, rotated, .. } = *self.slice(slice);
        let ChunkPass { k, batch, x, hidden, projected, gated, routing, own, .. } = self.whole;
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
            carried: CarriedViews::default(),
            routing,
            own,
        }
    }

    /// The keys and values of a slice, beside those in its projection. Those of the KV cache are
    /// copied from and to the slice's columns.
    fn kv(&self, slice: usize, scratch: &Scratch<'_>) -> KvViews {
        let SliceState { block, chunk_state, .. } = self.slice(slice);
        let width = block.kv_width();
        let new = self.kv_cache.map(|cache| scratch.take(cache.new.rows, width));
        let cached = self.kv_cache.and_then(|cache| cache.cached).map(|x| {
            let y = scratch.take(x.rows, width);
            let from = (slice - self.first) * width;
            self.whole.k.copy_columns(&CopyColumns { y, x, to: 0, from, columns: width });
            y
        });
        let chunk = chunk_state.map(|state| state.seen());
        KvViews { new: [new, chunk_state.map(|state| state.own()), None], cached, chunk }
    }

    /// A slice's weights of attention, packed.
    fn attention_weights(&self, slice: usize, scratch: &Scratch<'_>) -> Weights<'static> {
        let ChunkPass { block, k, w, .. } = self.whole;
        if let Some(portion) = self.portion {
            return block
                .attention_of(slice, &portion.indices, &mut |at, part| portion.weight(at, &part));
        }
        let packer = Packer { k, scratch };
        block.attention_of(slice, w, &mut |weight, part| packer.weight(weight, &part))
    }

    /// A slice's weights of the feed-forward, packed.
    fn mlp_weights(&self, slice: usize, scratch: &Scratch<'_>) -> Mlp<View> {
        let ChunkPass { block, k, w, .. } = self.whole;
        if let Some(portion) = self.portion {
            return block.mlp_of(slice, portion.mlp(), &mut |at, part| portion.weight(at, &part));
        }
        let packer = Packer { k, scratch };
        block.mlp_of(slice, w.mlp(), &mut |weight, part| packer.weight(weight, &part))
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
    pub(super) fn attend(
        &self,
        slices: Range<usize>,
        sum: View,
        input: View,
        scratch: &Scratch<'_>,
    ) {
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
            let to = (slice - self.first) * columns;
            let op = CopyColumns { y: cache.new, x, to, from: 0, columns };
            self.whole.k.copy_columns(&op);
        }
        pass
    }

    /// Computes the attention of all slices again.
    pub(super) fn recompute_attention(&self, input: View, scratch: &Scratch<'_>) {
        for slice in self.all() {
            let scratch = &scratch.nested();
            self.attention(slice, &self.attention_weights(slice, scratch), input, scratch);
        }
    }

    /// Adds the outputs of the feed-forward of some slices to the running sum, from its input in
    /// `hidden`.
    pub(super) fn feed(&self, slices: Range<usize>, sum: View, scratch: &Scratch<'_>) {
        for slice in slices {
            let scratch = &scratch.nested();
            let w = &self.mlp_weights(slice, scratch);
            let SliceState { block, saved, .. } = self.slice(slice);
            let products = self.products(slice);
            products.linear(saved.up, self.whole.hidden, &w.up);
            let activated = scratch.take(saved.up.rows, block.shape.intermediate);
            products.activate(activated, saved.up);
            self.add_output(slice, sum, activated, &w.down, scratch);
        }
    }

    /// The output of a branch from the complete sum, to `hidden`.
    pub(super) fn branch(&self, sum: View) {
        let ChunkPass { block, k, hidden: y, .. } = self.whole;
        k.cast(&Cast { y, x: sum });
        let factor = block.shape.residual_scale;
        if factor != 1.0 {
            k.scale(&Scale { y, x: y, factor, by: None });
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
            let own = self.slice(slice).chunk_state.map(|state| state.own());
            let kv = KvViews { new: [own, None, None], ..KvViews::NONE };
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
                self.recompute_attention(whole.attention_input(), scratch);
                whole.norm_saved_sum();
            }
        }
        let sums = GradientSums { input: sum, shared: None };
        let dropout = block.feed_forward_dropout(batch);
        let dy = whole.products.dropout_backward(dbranch, g.dy, dropout);
        self.feed_backward(sums, dy, g, scratch);
        k.cast(&Cast { y: dbranch, x: sum });
        whole.middle_norm_backward(g, buffers, g.dy, scratch);
        let dsum = if block.shape.norms.are_beside() { g.dy } else { dattention_sum };
        let dropout = block.attention_dropout(batch);
        let dy = whole.products.dropout_backward(dbranch, dsum, dropout);
        self.attend_backward(sums, dy, g, scratch);
        k.cast(&Cast { y: dbranch, x: sum });
        whole.input_backward(g, buffers, scratch);
    }
}

#[cfg(test)]
mod tests;
