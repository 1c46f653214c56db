//! The walk over the chunks of long sequences at one visit.
//!
//! Sequences follow each other in both passes. The forward walks a sequence from its begin; the
//! backward walks it from its end, so that the gradients of a chunk's keys and values hold the
//! contributions of all later queries when the walk reaches the chunk. Before that, the keys and
//! values of the chunks that it attends to are computed again, unless they are there; its own are
//! computed in its backward. Units of a ring have the same order.

use std::ops::Range;

use l2l_actors::schedule::ALL_CHUNKS;

use super::layer::{Cuts, Layer};
use crate::kernels::BatchView;
use crate::tensor::Dtype;

/// What a backward visit does with a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    Keys,
    Backward,
}

/// The chunks of a visit's sequences; or one, which has all rows.
pub(crate) struct Walk<'a> {
    chunks: Vec<BatchView<'a>>,
    /// The chunks before its own that a chunk attends to.
    reach: usize,
    /// The most positions of a chunk.
    most: usize,
}

/// The chunks of `most` positions before its own that a chunk attends to, if a position depends on
/// `window` positions, its own included.
pub(crate) fn reach(cuts: Cuts, window: Option<usize>, most: usize) -> u32 {
    let chunks = |window: usize| window.saturating_sub(1).div_ceil(most).max(1);
    match window {
        _ if cuts != Cuts::Causal => 0,
        None => ALL_CHUNKS,
        Some(window) => u32::try_from(chunks(window)).unwrap_or(ALL_CHUNKS),
    }
}

impl<'a> Walk<'a> {
    /// A visit to these rows, of which a chunk has `most` at most.
    pub(crate) fn new(
        rows: &BatchView<'a>,
        cuts: Cuts,
        window: Option<usize>,
        most: usize,
    ) -> Walk<'a> {
        let has_cached = || rows.metadata().cached.iter().any(|cached| *cached > 0);
        let may_be_cut = match cuts {
            Cuts::Never => false,
            Cuts::ByPosition => true,
            // Attention to cached keys and values takes all new rows at once.
            Cuts::Causal => !has_cached(),
        };
        let chunks = rows.chunks(may_be_cut.then_some(most));
        Walk { chunks, reach: reach(cuts, window, most) as usize, most }
    }

    /// The positions before a chunk that are there: see [`ChunkMemory`](super::layer::ChunkMemory).
    pub(crate) fn before(&self) -> usize {
        self.reach.saturating_mul(self.most)
    }

    /// The chunks in the order of the forward.
    pub(crate) fn forward(&self) -> impl Iterator<Item = BatchView<'a>> {
        self.chunks.iter().copied()
    }

    /// The chunks in the order of the backward, and what is done with each.
    pub(crate) fn backward(&self) -> impl Iterator<Item = (Turn, BatchView<'a>)> {
        let sequence = |chunk: &BatchView<'_>| chunk.chunk().map(|chunk| chunk.sequence);
        let sequences = self.chunks.chunk_by(move |a, b| sequence(a) == sequence(b));
        sequences.flat_map(move |chunks| {
            let last = chunks.len() - 1;
            (0..chunks.len()).rev().flat_map(move |own| {
                let first = own.saturating_sub(self.reach);
                let below = (own + 1).saturating_sub(self.reach).min(own);
                let there = if own == last { last } else { below };
                let keys = chunks[first..there].iter().map(|chunk| (Turn::Keys, *chunk));
                keys.chain([(Turn::Backward, chunks[own])])
            })
        })
    }

    /// The place of a chunk's saved activations among those of all chunks, which lie one behind the
    /// other. `len` tells how many floats a chunk of so many positions has. `None`: all of them.
    pub(crate) fn saved(
        &self,
        chunk: &BatchView<'_>,
        len: impl Fn(usize) -> usize,
    ) -> Option<Range<usize>> {
        if self.chunks.len() == 1 {
            return None;
        }
        let first = chunk.row_range().start;
        let before = self.chunks.iter().take_while(|chunk| chunk.row_range().start < first);
        let from: usize = before.map(|chunk| len(chunk.rows())).sum();
        Some(from..from + len(chunk.rows()))
    }
}

/// Floats that the chunks, of `most` positions, of a sequence pass on in a layer.
pub(crate) fn chunk_state_len(
    layer: &dyn Layer,
    [positions, most]: [usize; 2],
    trains: bool,
    dtype: Dtype,
) -> usize {
    let chunks = (reach(Cuts::Causal, layer.window(), most) as usize).saturating_add(1);
    layer.chunk_state_len(positions.min(chunks.saturating_mul(most)), trains, dtype)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::{BatchMetadata, SequenceChunk};

    /// The turns of a backward over sequences of 300, 100 and 256 rows.
    fn turns(cuts: Cuts, window: Option<usize>, most: usize) -> Vec<(Turn, Range<usize>)> {
        let batch = BatchMetadata::plain(&[7, 307, 407, 663]).view();
        let walk = Walk::new(&batch, cuts, window, most);
        walk.backward().map(|(turn, chunk)| (turn, chunk.row_range())).collect()
    }

    #[test]
    fn a_backward_walks_each_sequence_from_its_end() {
        use Turn::{Backward, Keys};
        let by_position = [256..300, 128..256, 0..128, 300..400, 528..656, 400..528];
        let by_position = by_position.map(|rows| (Backward, rows));
        assert_eq!(turns(Cuts::ByPosition, None, 128), by_position);
        let mut causal = by_position.to_vec();
        causal.insert(4, (Keys, 400..528));
        causal.splice(0..0, [(Keys, 0..128), (Keys, 128..256)]);
        assert_eq!(turns(Cuts::Causal, None, 128), causal);
        assert_eq!(turns(Cuts::Causal, Some(130), 128), causal);
        let whole = [(Backward, 0..656)];
        assert_eq!(turns(Cuts::Causal, None, 384), whole);
        assert_eq!(turns(Cuts::Never, None, 128), whole);
        // With a window, keys are computed just before they are needed.
        causal.swap(0, 2);
        causal.swap(0, 1);
        assert_eq!(turns(Cuts::Causal, Some(129), 128), causal);
    }

    #[test]
    fn a_window_reaches_whole_chunks() {
        let windows = [0, 1, 2, 129, 130, 257, 258, usize::MAX];
        let chunks = windows.map(|window| reach(Cuts::Causal, Some(window), 128));
        assert_eq!(chunks, [1, 1, 1, 1, 2, 2, 3, ALL_CHUNKS]);
        assert_eq!(reach(Cuts::Causal, None, 128), ALL_CHUNKS);
        assert_eq!(reach(Cuts::ByPosition, Some(130), 128), 0);
    }

    #[test]
    fn cached_positions_keep_new_rows_together() {
        let metadata = BatchMetadata { cached: &[3], ..BatchMetadata::plain(&[0, 300]) };
        let chunks = |cuts| Walk::new(&metadata.view(), cuts, None, 128).forward().count();
        assert_eq!([Cuts::Causal, Cuts::ByPosition].map(chunks), [1, 3]);
    }

    #[test]
    fn saved_activations_lie_chunk_behind_chunk() {
        let batch = BatchMetadata::plain(&[0, 300, 400]).view();
        let walk = Walk::new(&batch, Cuts::Causal, None, 128);
        let saved = walk.forward().map(|chunk| walk.saved(&chunk, |rows| 2 * rows + 16));
        let saved: Vec<_> = saved.flatten().collect();
        assert_eq!(saved, [0..272, 272..544, 544..648, 648..864]);
        // A visit to one chunk alone has its saved activations alone.
        let chunk = batch.chunk_of(SequenceChunk { sequence: 0, from: 128, to: 256 });
        let alone = Walk::new(&chunk, Cuts::Causal, None, 128);
        assert_eq!(alone.backward().count(), 1);
        assert_eq!(alone.saved(&chunk, |rows| rows), None);
    }
}
