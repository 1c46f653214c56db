//! The activations that a block's forward leaves for its backward, saved or in workspace.

use l2l_actors::schedule::{Boundary, Role};

use super::TransformerBlock;
use super::pieces::{Half, Piece};
use super::slices::PassOf;
use crate::kernels::{BatchView, packed_row};
use crate::models::layer::Save;
use crate::models::shape::Experts;
use crate::tensor::{ALIGNED, Dtype, Scratch, View};

#[derive(Clone, Copy)]
pub(super) struct Activations {
    /// Statistics of the first norm. (R, 2).
    pub(super) norm1: View,
    /// Queries, keys and values: as attention sees them, unless their heads are normed after this.
    /// (R, (H + 2K) D). With linear attention: all of the projection. (R, P).
    pub(super) qkv: View,
    /// The gates of attention's output, if they are not in `qkv`. (R, H D).
    pub(super) gates: Option<View>,
    /// Statistics of the norms of heads. (R, H + K), or more with norms of values.
    pub(super) qk_norm: Option<View>,
    /// The output of attention, or of the delta rule, in front of its gates. (R, H D).
    pub(super) attention_output: View,
    /// Log-sum-exp of attention's scores, and of the sinks if there are any. (R, H). With linear
    /// attention it has no columns.
    pub(super) lse: View,
    /// The residual stream behind attention. (R, C).
    pub(super) attention_sum: View,
    /// Statistics of the second norm. (R, 2).
    pub(super) norm2: View,
    /// The feed-forward that all rows use, before its activation function. (R, I or 2 I).
    pub(super) up: View,
    /// The experts before their activation function, sorted by expert, if they are saved.
    /// (R k, 2 I).
    pub(super) experts_up: Option<View>,
    /// The positive numbers of `up`, if they are saved in its place.
    pub(super) positive: Option<Positive>,
    /// The residual stream behind the feed-forward, if a norm or another branch follows. (R, C).
    pub(super) feed_forward_sum: Option<View>,
    /// The outputs of attention and of the feed-forward, if they are normed.
    pub(super) branches: Option<[Branch; 2]>,
}

/// Positive numbers that are saved in place of all numbers.
#[derive(Clone, Copy)]
pub(super) struct Positive {
    pub(super) packed: View,
    /// The most numbers of a row.
    pub(super) room: usize,
}

/// The output of a branch before its norm.
#[derive(Clone, Copy)]
pub(super) struct Branch {
    /// (R, C).
    pub(super) output: View,
    /// Of the norm. (R, 2).
    pub(super) statistics: View,
}

/// The activations of a block that are common to its slices, and those of each slice.
const OF_BLOCK: usize = 3;
const OF_SLICE: usize = 5;

/// Takes places for the activations of a chunk, in the stash or in workspace.
struct Places<'s> {
    rows: usize,
    stashed: Option<Scratch<'static>>,
    scratch: &'s Scratch<'s>,
}

impl Places<'_> {
    fn of(&self, is_saved: bool) -> &Scratch<'_> {
        self.stashed.as_ref().filter(|_| is_saved).unwrap_or(self.scratch)
    }

    fn take(&self, is_saved: bool, width: usize) -> View {
        self.of(is_saved).take(self.rows, width)
    }

    fn take_floats(&self, is_saved: bool, width: usize) -> View {
        self.of(is_saved).take_floats(self.rows, width)
    }
}

impl TransformerBlock {
    /// The places of a chunk's activations: in `saved` if they are saved, and else in workspace.
    pub(super) fn activations(
        &self,
        chunk: &BatchView<'_>,
        saved: Option<(Save, View)>,
        scratch: &Scratch<'_>,
    ) -> Activations {
        let shape = &self.shape;
        let stashed = saved.map(|(_, view)| Scratch::new(view, scratch.dtype()));
        let places = Places { rows: chunk.rows(), stashed, scratch };
        let attention = matches!(saved, Some((Save::All, _)));
        let heads = self.head_statistics();
        let widths = self.widths();
        let relu_room = self.relu_room.filter(|_| saved.is_some());
        Activations {
            norm1: places.take_floats(true, 2),
            qkv: places.take(attention, widths.qkv),
            gates: (widths.gates > 0).then(|| places.take(attention, widths.gates)),
            qk_norm: (heads > 0).then(|| places.take_floats(attention, heads)),
            attention_output: places.take(attention, widths.output),
            lse: places.take_floats(attention, widths.statistics),
            attention_sum: places.take(true, shape.hidden),
            norm2: places.take_floats(true, 2),
            up: places.take(relu_room.is_none(), self.common_up()),
            experts_up: saved.and(self.experts()).filter(|_| !self.is_apart()).map(|experts| {
                let width = shape.up_of(experts.intermediate);
                places.take(true, experts.per_token * width).with_columns(width)
            }),
            positive: relu_room.map(|room| {
                let width = packed_row(shape.intermediate, room, scratch.dtype());
                Positive { packed: places.take_floats(true, width), room }
            }),
            feed_forward_sum: self
                .reads_feed_forward_sum()
                .then(|| places.take(true, shape.hidden)),
            branches: shape.norms.are_behind().then(|| {
                [(); 2].map(|()| Branch {
                    output: places.take(true, shape.hidden),
                    statistics: places.take_floats(true, 2),
                })
            }),
        }
    }

    /// The places of a chunk's activations, slice by slice: norms and the sum are common to all.
    pub(super) fn activations_of_slices(
        &self,
        slices: &[TransformerBlock],
        chunk: &BatchView<'_>,
        saved: Option<(Save, View)>,
        of: &PassOf<'_>,
        scratch: &Scratch<'_>,
    ) -> Vec<Activations> {
        let stashed = saved.map(|(_, view)| Scratch::new(view, scratch.dtype()));
        let places = Places { rows: chunk.rows(), stashed, scratch };
        let attention = matches!(saved, Some((Save::All, _)));
        // Pieces save nothing of what is common to them.
        let is_whole = of.half == Half::Both;
        let norm1 = places.take_floats(is_whole, 2);
        let attention_sum = of.attention_sum;
        let attention_sum = attention_sum.unwrap_or_else(|| places.take(true, self.shape.hidden));
        let norm2 = places.take_floats(is_whole, 2);
        let attends = of.half != Half::Feed;
        let feeds = of.half != Half::Attend;
        let if_so = |is_so: bool, width: usize| if is_so { width } else { 0 };
        let activations = |slice: &TransformerBlock| {
            let heads = if_so(attends, slice.head_statistics());
            let widths = slice.widths();
            Activations {
                norm1,
                qkv: places.take(attention, if_so(attends, widths.qkv)),
                gates: None,
                qk_norm: (heads > 0).then(|| places.take_floats(attention, heads)),
                attention_output: places.take(attention, if_so(attends, widths.output)),
                lse: places.take_floats(attention, if_so(attends, widths.statistics)),
                attention_sum,
                norm2,
                up: places.take(true, if_so(feeds, slice.common_up())),
                experts_up: None,
                positive: None,
                feed_forward_sum: None,
                branches: None,
            }
        };
        slices.iter().map(activations).collect()
    }

    /// The activations that a piece saves of sequences that are cut into this many chunks at most.
    pub(super) fn saved_by_piece(
        &self,
        piece: &Piece,
        save: Save,
        dtype: Dtype,
        chunks: usize,
    ) -> Option<Boundary> {
        let slice = self.slice(0);
        let heads = slice.head_statistics();
        let widths = slice.widths();
        let [numbers, floats, views] = match (piece.half, save) {
            (Half::Feed, _) => [slice.common_up(), 0, 1],
            (_, Save::All) => [widths.qkv + widths.output, heads + widths.statistics, 4],
            (_, Save::AllButAttention) => return None,
        };
        let count = piece.slices.len();
        let token_bytes = (count * (numbers * dtype.size() + floats * size_of::<f32>())) as u64;
        let padding = chunks * count * views * ALIGNED;
        let aligned = Boundary::of_sequences(Role::SavedActivations, padding, size_of::<f32>());
        Some(Boundary { token_bytes, stashed_token_bytes: token_bytes, ..aligned })
    }

    /// True when a norm or another branch reads the sum behind the feed-forward.
    fn reads_feed_forward_sum(&self) -> bool {
        self.shape.norms.are_behind_sums() || self.shape.block_inputs.is_some()
    }

    /// Channels before the activation function of the feed-forward that all rows use.
    pub(super) fn common_up(&self) -> usize {
        let shape = &self.shape;
        self.experts().map_or(shape.up(), |experts| shape.up_of(experts.shared))
    }

    /// Channels before the activation function of a row's experts, if they are saved. Apart from
    /// the base block they are recomputed: how many rows a part has is not known before.
    fn experts_up(&self) -> usize {
        let of_row = |experts: Experts| experts.per_token * self.shape.up_of(experts.intermediate);
        self.experts().filter(|_| !self.is_apart()).map_or(0, of_row)
    }

    /// The saved activations of sequences that are cut into this many chunks at most.
    pub(super) fn saved_activations(&self, save: Save, dtype: Dtype, chunks: usize) -> Boundary {
        let shape = &self.shape;
        let heads = self.head_statistics();
        let widths = self.widths();
        let feed_forward_sum = if self.reads_feed_forward_sum() { shape.hidden } else { 0 };
        let [branches, of_branches] =
            if shape.norms.are_behind() { [2 * shape.hidden, 4] } else { [0, 0] };
        let [attention, statistics] = match save {
            Save::All => [widths.qkv + widths.gates + widths.output, heads + widths.statistics],
            Save::AllButAttention => [0, 0],
        };
        let sums = shape.hidden + feed_forward_sum + branches;
        let experts = self.experts_up();
        let [up, packed] = match self.relu_room {
            None => [self.common_up() + experts, 0],
            Some(room) => [0, packed_row(shape.intermediate, room, dtype)],
        };
        let numbers = attention + up + sums;
        let floats = 4 + statistics + of_branches + packed;
        let token_bytes = (numbers * dtype.size() + floats * size_of::<f32>()) as u64;
        // Each of at most fifteen views of a chunk is aligned by itself. The padding is counted by
        // sequence.
        let views = 9
            + if shape.norms.are_behind() { 4 } else { 0 }
            + usize::from(experts > 0)
            + usize::from(widths.gates > 0);
        let views = match shape.slices {
            1 => views,
            slices => OF_BLOCK + OF_SLICE * slices,
        };
        let padding = chunks * views * ALIGNED;
        let aligned = Boundary::of_sequences(Role::SavedActivations, padding, size_of::<f32>());
        Boundary { token_bytes, stashed_token_bytes: token_bytes, ..aligned }
    }
}
