//! What the rows of linear attention leave to later ones of their sequence: the last inputs of the
//! convolution and the states of the delta rule. It is as large for any number of rows. Generation
//! keeps it in the KV cache, and the chunks of a long sequence pass it on.
//!
//! The backward walks a sequence from its end, and needs what lies in front of each chunk. So in
//! training there is a place for each chunk, which `Layer::keys` fills again. In a forward the
//! places of two chunks serve in turn.

use super::TransformerBlock;
use crate::kernels::{BatchView, Carried, CarriedGradients, LinearHeads};
use crate::models::layer::{ChunkMemory, KvCache};
use crate::tensor::{ALIGNED, View};

/// What a pass over a chunk does with what passes along its sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    Forward,
    Keys,
    Backward,
}

/// What passes along the sequences of a pass; nothing in a block with attention.
#[derive(Clone, Copy, Default)]
pub(super) struct CarriedViews {
    /// What the forward's operations read and write. (B, S).
    pub(super) forward: Carried,
    /// The gradients of the backward's. (B, S).
    pub(super) gradients: CarriedGradients,
    /// The place for a copy of what is left behind. (B, S).
    pub(super) copy: Option<View>,
}

/// The places of a sequence's chunks.
#[derive(Clone, Copy)]
struct Places {
    memory: View,
    /// S.
    floats: usize,
    /// Chunks that leave something to a later one.
    count: usize,
}

impl Places {
    fn at(&self, place: usize) -> View {
        let from = place * self.floats.next_multiple_of(ALIGNED);
        self.memory.part(from..from + self.floats)
    }

    /// What a chunk leaves behind.
    fn behind(&self, chunk: usize, turn: Turn) -> View {
        self.at(if turn == Turn::Forward { chunk % 2 } else { chunk })
    }

    /// The gradient of what a chunk has left behind.
    fn gradient(&self, chunk: usize) -> View {
        self.at(self.count + chunk % 2)
    }
}

/// Floats of the places of a sequence of several chunks.
pub(super) fn chunk_state_len(heads: LinearHeads, chunks: usize, trains: bool) -> usize {
    let count = chunks.saturating_sub(1);
    let places = if trains { count + count.min(2) } else { count.min(2) };
    places * heads.carried().next_multiple_of(ALIGNED)
}

impl TransformerBlock {
    /// What passes along the sequences of a batch or chunk.
    pub(super) fn carried(
        &self,
        batch: &BatchView<'_>,
        ChunkMemory { memory, .. }: ChunkMemory,
        kv_cache: Option<KvCache>,
        turn: Turn,
    ) -> CarriedViews {
        let Some(heads) = self.linear() else { return CarriedViews::default() };
        let Some(chunk) = batch.chunk() else {
            let before = kv_cache.and_then(|cache| cache.cached);
            let behind = kv_cache.map(|cache| cache.new);
            return CarriedViews { forward: Carried { before, behind }, ..CarriedViews::default() };
        };
        let most = self.shape.chunk_positions;
        let count = (batch.metadata().sequence(chunk.sequence).len() - 1) / most;
        let places = Places { memory, floats: heads.carried(), count };
        let own = chunk.from / most;
        let cache = kv_cache.map(|cache| cache.new);
        let has_later = own < count;
        let passes_on = turn != Turn::Backward && has_later;
        let place = passes_on.then(|| places.behind(own, turn));
        let before = own.checked_sub(1).map(|earlier| places.behind(earlier, turn));
        let mut views = CarriedViews {
            forward: Carried { before, behind: place.or(cache) },
            copy: cache.filter(|_| place.is_some()),
            ..CarriedViews::default()
        };
        if turn == Turn::Backward {
            let dbefore = own.checked_sub(1).map(|earlier| places.gradient(earlier));
            let dbehind = has_later.then(|| places.gradient(own));
            views.gradients = CarriedGradients { before, dbefore, dbehind };
        }
        views
    }
}
