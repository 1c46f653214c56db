//! What the chunks of a sequence pass on: the keys and values that later chunks attend to, and the
//! gradients of these.
//!
//! Without a window, a position has its place. With one, the state has room for a chunk and for the
//! chunks that it attends to, so it is as large for any length. These lie one behind the other, as
//! attention reads them, and all move by a chunk when the walk does: to the front in the forward,
//! to the back in the backward, before the keys of the chunk in front are computed.

use std::ops::Range;

use super::TransformerBlock;
use crate::kernels::{BatchView, Cast, ChunkKv, Clear, Kernels, SequenceChunk};
use crate::models::layer::{ChunkMemory, Layer};
use crate::tensor::{Dtype, Scratch, View};

/// The chunk state during a pass over a chunk.
#[derive(Clone, Copy)]
pub(super) struct ChunkState {
    /// Floats.
    memory: View,
    /// The dtype of keys and values.
    dtype: Dtype,
    /// Positions that it has room for, and numbers of each.
    room: [usize; 2],
    /// Positions of a chunk.
    most: usize,
    /// Positions before a chunk that are there, too.
    before: usize,
    /// The chunk, and the positions of its sequence.
    chunk: SequenceChunk,
    positions: usize,
    /// The first position that is there.
    first: usize,
}

impl TransformerBlock {
    /// The state for a chunk of a longer sequence, when the pass over the chunk computes attention.
    pub(super) fn chunk_state(
        &self,
        batch: &BatchView<'_>,
        ChunkMemory { memory, before }: ChunkMemory,
        dtype: Dtype,
    ) -> Option<ChunkState> {
        let chunk = batch.chunk().filter(|_| self.linear().is_none())?;
        let positions = batch.metadata().sequence(chunk.sequence).len();
        let most = self.shape.chunk_positions;
        let room = [positions.min(before.saturating_add(most)), self.kv_width()];
        let first = chunk.from.saturating_sub(before);
        Some(ChunkState { memory, dtype, room, most, before, chunk, positions, first })
    }
}

impl ChunkState {
    /// Keys and values of all places.
    fn kv(&self) -> View {
        let [positions, width] = self.room;
        Scratch::new(self.memory, self.dtype).take(positions, width)
    }

    /// Gradients of keys and values, in training.
    fn dkv(&self) -> View {
        let [positions, width] = self.room;
        let state = Scratch::new(self.memory, self.dtype);
        state.take(positions, width);
        state.take_floats(positions, width)
    }

    /// The rows of some positions.
    fn rows(&self, positions: Range<usize>) -> Range<usize> {
        positions.start - self.first..positions.end - self.first
    }

    /// The place of the chunk's own keys and values. (R, 2 K D).
    pub(super) fn own(&self) -> View {
        self.kv().row_range(self.rows(self.chunk.from..self.chunk.to))
    }

    /// Keys and values of the positions that the chunk attends to, its own included.
    pub(super) fn seen(&self) -> View {
        self.kv().row_range(self.rows(self.first..self.chunk.to))
    }

    /// The same, with their gradients.
    pub(super) fn seen_in_backward(&self) -> ChunkKv {
        let dkv = self.dkv().row_range(self.rows(self.first..self.chunk.to));
        ChunkKv { kv: self.seen(), dkv, accumulate: self.chunk.to < self.positions }
    }

    /// Drops the chunk that lies behind the window now, in a forward.
    pub(super) fn move_on(self, k: &dyn Kernels) -> ChunkState {
        if self.first > 0 {
            let kv = self.kv();
            for to in (0..self.before).step_by(self.most) {
                self.copy(k, kv, to, to + self.most);
            }
        }
        self
    }

    /// Makes room for the keys of the chunk, in a backward. They are computed before the backward
    /// of the last chunk that attends to them. It is the last of the sequence, or nothing needs the
    /// chunk behind it any more.
    pub(super) fn move_back(self, k: &dyn Kernels) -> ChunkState {
        let last = (self.positions - 1) / self.most * self.most;
        let of_last = last.saturating_sub(self.before);
        if self.chunk.from >= of_last {
            return ChunkState { first: of_last, ..self };
        }
        let dkv = self.dkv();
        for view in [self.kv(), dkv] {
            for from in (0..self.before).step_by(self.most).rev() {
                self.copy(k, view, from + self.most, from);
            }
        }
        k.clear(&Clear { y: dkv.row_range(0..self.most) });
        ChunkState { first: self.chunk.from, ..self }
    }

    /// Copies the rows of a chunk.
    fn copy(&self, k: &dyn Kernels, view: View, to: usize, from: usize) {
        let [y, x] = [to, from].map(|at| view.row_range(at..at + self.most));
        k.cast(&Cast { y, x });
    }
}
