//! The backwards of slices: sums of gradients of a branch's input and of what slices share, from
//! the last slice to the first.

use super::{GradientSums, SlicedPass};
use crate::kernels::Cast;
use crate::models::block::ChunkPass;
use crate::models::block::backward::ChunkGradients;
use crate::models::block::chunk::KvViews;
use crate::models::block::cut::{PackedGradients, Packer, SharedRoom, shared_len};
use crate::models::block::products::{MlpPart, MlpPass};
use crate::models::block::slices::SliceState;
use crate::models::block::state::ChunkState;
use crate::models::block::tensors::Gradients;
use crate::models::portions::Part;
use crate::tensor::{Scratch, View};

impl SlicedPass<'_> {
    /// The backward of [`feed`](Self::feed): adds the gradients of the feed-forward's input to the
    /// running sum, from the last slice to the first.
    pub(in crate::models::block) fn feed_backward(
        &self,
        sums: GradientSums,
        dy: View,
        g: &ChunkGradients<'_>,
        scratch: &Scratch<'_>,
    ) {
        let ChunkPass { block, hidden: x, .. } = self.whole;
        let shared = self.shared_of_mlp(sums, g, scratch);
        for slice in self.all().rev() {
            let scratch = &scratch.nested();
            let w = &self.mlp_weights(slice, scratch);
            let own = shared.take_own(scratch);
            let room = self.room(own, g, scratch);
            let mut packed = PackedGradients::new(self.packer(scratch), g.accumulate);
            let d = &match self.portion {
                Some(portion) => block
                    .mlp_of(slice, portion.mlp(), &mut |at, part| portion.place(at, &part, &room)),
                None => block.mlp_of(slice, g.d.mlp(), &mut |d: Option<View>, part| {
                    d.map(|d| packed.of(d, part, &room))
                }),
            };
            let SliceState { block, saved, .. } = self.slice(slice);
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
            let partial = self.take_partial(slice, sums.input, scratch);
            products.mlp_backward(mlp, [partial, dy], scratch);
            self.add(sums.input, partial);
            packed.unpack();
            self.add_shared(slice, &shared, own);
        }
        self.end_shared(&shared, g.accumulate);
    }

    /// The backward of [`attend`](Self::attend), as that of the feed-forward.
    pub(in crate::models::block) fn attend_backward(
        &self,
        sums: GradientSums,
        dy: View,
        g: &ChunkGradients<'_>,
        scratch: &Scratch<'_>,
    ) {
        let block = self.whole.block;
        let input = self.whole.attention_input();
        let shared = self.shared_of_attention(sums, g, scratch);
        for slice in self.all().rev() {
            let scratch = &scratch.nested();
            let w = &self.attention_weights(slice, scratch);
            let own = shared.take_own(scratch);
            let room = self.room(own, g, scratch);
            let mut packed = PackedGradients::new(self.packer(scratch), g.accumulate);
            let d: &Gradients = &match self.portion {
                Some(portion) => block.attention_of(slice, &portion.indices, &mut |at, part| {
                    portion.place(at, &part, &room)
                }),
                None => block.attention_of(slice, g.d, &mut |d: Option<View>, part| {
                    d.map(|d| packed.of(d, part, &room))
                }),
            };
            let state = &self.slice(slice).chunk_state;
            let chunk_kv = state.as_ref().map(ChunkState::seen_in_backward);
            let g = &ChunkGradients { d, chunk_kv, passed: None, ..*g };
            let kv = KvViews::new(None, *state, None);
            let pass = self.pass(slice, w, kv);
            let dqkv = pass.heads_backward(g, dy, scratch);
            let partial = self.take_partial(slice, sums.input, scratch);
            pass.projection_backward(g, partial, dqkv, input, scratch);
            self.add(sums.input, partial);
            packed.unpack();
            self.add_shared(slice, &shared, own);
        }
        self.end_shared(&shared, g.accumulate);
    }

    /// True for the last slice of the block, where sums of gradients begin.
    fn begins_sums(&self, slice: usize) -> bool {
        slice + 1 == self.whole.block.shape.slices
    }

    /// The place for the gradient of a branch's input by a slice: the running sum itself for the
    /// last slice, which begins it.
    fn take_partial(&self, slice: usize, sum: View, scratch: &Scratch<'_>) -> View {
        if self.begins_sums(slice) { sum } else { self.take_sum(scratch) }
    }

    fn packer<'p>(&'p self, scratch: &'p Scratch<'p>) -> Packer<'p> {
        Packer { k: self.whole.k, scratch }
    }

    fn room(&self, own: View, g: &ChunkGradients<'_>, scratch: &Scratch<'_>) -> SharedRoom<'_> {
        let room = Scratch::new(own, scratch.dtype());
        SharedRoom { k: self.whole.k, room, accumulate: g.accumulate }
    }

    fn shared_of_mlp(
        &self,
        sums: GradientSums,
        g: &ChunkGradients<'_>,
        scratch: &Scratch<'_>,
    ) -> SharedGradients {
        let block = self.whole.block;
        let tensors = match self.portion {
            Some(portion) => portion.shared(),
            None => {
                let mut all = Vec::new();
                let mut add = |d: Option<View>, part| {
                    let shared = d.filter(|_| part == Part::Shared);
                    all.extend(shared.map(|d| (d.shape(), Some(d))));
                };
                block.mlp_of(self.first, g.d.mlp(), &mut add);
                all
            }
        };
        SharedGradients::new(tensors, sums, scratch)
    }

    fn shared_of_attention(
        &self,
        sums: GradientSums,
        g: &ChunkGradients<'_>,
        scratch: &Scratch<'_>,
    ) -> SharedGradients {
        let block = self.whole.block;
        let tensors = match self.portion {
            Some(portion) => portion.shared(),
            None => {
                let mut all = Vec::new();
                let mut add = |d: Option<View>, part| {
                    let shared = d.filter(|_| part == Part::Shared);
                    all.extend(shared.map(|d| (d.shape(), Some(d))));
                    None
                };
                let _: Gradients = block.attention_of(self.first, g.d, &mut add);
                all
            }
        };
        SharedGradients::new(tensors, sums, scratch)
    }

    /// Adds a slice's gradients of what the slices share to their sum.
    fn add_shared(&self, slice: usize, shared: &SharedGradients, own: View) {
        let k = self.whole.k;
        match shared.sum {
            y if y.is_empty() => {}
            y if self.begins_sums(slice) => k.cast(&Cast { y, x: own }),
            y => self.add(y, own),
        }
    }

    /// Adds the sums of what the slices share to the gradients of the tensors, if these are in the
    /// pass: it has the first slice.
    fn end_shared(&self, shared: &SharedGradients, accumulate: bool) {
        if self.first > 0 {
            return;
        }
        let mut end = 0;
        for &(size, d) in &shared.tensors {
            let at = end;
            end += shared_len([size]);
            let Some(y) = d else { continue };
            let x = shared.sum.part(at..at + y.len()).with_columns(y.columns);
            if accumulate {
                self.add(y, x);
            } else {
                self.whole.k.cast(&Cast { y, x });
            }
        }
    }
}

/// The gradients of tensors that slices share.
struct SharedGradients {
    /// The size of each, and its place.
    tensors: Vec<([usize; 2], Option<View>)>,
    /// The sum so far.
    sum: View,
}

impl SharedGradients {
    fn new(
        tensors: Vec<([usize; 2], Option<View>)>,
        sums: GradientSums,
        scratch: &Scratch<'_>,
    ) -> SharedGradients {
        let len = shared_len(tensors.iter().map(|(size, _)| *size));
        let sum = sums.shared.unwrap_or_else(|| scratch.take_floats(1, len));
        SharedGradients { tensors, sum }
    }

    /// Room for the gradients of a slice.
    fn take_own(&self, scratch: &Scratch<'_>) -> View {
        scratch.take_floats(1, self.sum.len())
    }
}
