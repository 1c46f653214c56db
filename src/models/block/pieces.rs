//! A block in pieces, for blocks that are larger than a device. A piece is some slices that follow
//! each other, of attention or of the feed-forward. Each piece is a step of the layer, and needs
//! its own portion of the block. It hands the sum of the outputs so far to the next one, which adds
//! its own; the last one makes a hidden state of it. In the backward it is the other way round,
//! with the gradients of the common input and of what slices share. So each sum has the order of
//! [`slices`](super::slices), and its bits: they depend on the slices, and not on the pieces.

use std::ops::Range;

use l2l_actors::schedule::{Boundary, Encoding, Input, Role};

use super::backward::{Buffers, ChunkGradients};
use super::cut::{SharedRoom, shared_len};
use super::slices::{GradientSums, PassOf, SlicedKv, SlicedPass};
use super::state::ChunkState;
use super::tensors::{Gradients, Mlp, Tensors, Weights};
use super::{ChunkInputs, TransformerBlock};
use crate::kernels::{Cast, Kernels, Residual};
use crate::models::block_tensors::BlockTensors;
use crate::models::layer::{Backward, Cuts, Forward, Keys, Layer, Save};
use crate::models::portions::{LayerPortion, Part};
use crate::models::ports::{Behind, LayerStep, PortViews, StepContext};
use crate::tensor::{Dtype, Scratch, View};

/// The half of a block that a pass computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Half {
    /// All of it.
    Both,
    /// Attention, and the sum behind it.
    Attend,
    /// The feed-forward, and the sum behind it.
    Feed,
}

/// A piece of a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) half: Half,
    pub(super) slices: Range<usize>,
    /// True for the piece with the first slice, where sums begin, and those of gradients end.
    is_first: bool,
    /// True for the piece with the last slice.
    is_last: bool,
}

/// The tensors of a portion as a visit has them.
pub(super) struct PortionViews {
    /// The number of each tensor among those of the block.
    pub(super) indices: Tensors<usize, usize>,
    parts: Vec<(usize, Part)>,
    weights: Vec<View>,
    /// Empty in a forward.
    gradients: Vec<Option<View>>,
}

impl PortionViews {
    fn find(&self, index: usize, part: &Part) -> Option<usize> {
        self.parts.iter().position(|(own, has)| *own == index && has == part)
    }

    /// The part of a weight. A norm that the piece does not read is empty.
    pub(super) fn weight(&self, index: usize, part: &Part) -> View {
        self.find(index, part).map_or(View::floats(0, 0), |at| self.weights[at])
    }

    /// The place for the gradient of a part.
    fn gradient(&self, index: usize, part: &Part) -> Option<View> {
        self.find(index, part).and_then(|at| self.gradients.get(at).copied().flatten())
    }

    /// The place where a slice's backward puts the gradient of a part.
    pub(super) fn place(&self, index: usize, part: &Part, room: &SharedRoom<'_>) -> Option<View> {
        match part {
            Part::Shared => Some(room.take(self.weight(index, part).shape())),
            _ => self.gradient(index, part),
        }
    }

    /// The sizes of what slices share, and the places for their gradients.
    pub(super) fn shared(&self) -> Vec<([usize; 2], Option<View>)> {
        let shared = self.parts.iter().filter(|(_, part)| *part == Part::Shared);
        let size = |(index, part): &(usize, Part)| {
            (self.weight(*index, part).shape(), self.gradient(*index, part))
        };
        shared.map(size).collect()
    }

    pub(super) fn mlp(&self) -> &Mlp<usize> {
        self.indices.mlp()
    }
}

impl TransformerBlock {
    /// True if the block is visited in pieces.
    pub(super) fn is_in_pieces(&self) -> bool {
        self.shape.pieces > 1
    }

    /// The pieces of attention: as few as there may be with none larger than a piece of the
    /// feed-forward.
    fn attention_pieces(&self) -> usize {
        let shape = &self.shape;
        if shape.pieces == 1 {
            return 1;
        }
        let attention = shape.qkv() + shape.attention_width();
        let feed_forward = shape.up() + shape.intermediate;
        let is_enough = |count: usize| {
            shape.slices.is_multiple_of(count) && attention * shape.pieces <= feed_forward * count
        };
        (1..=shape.slices).find(|&count| is_enough(count)).unwrap_or(shape.slices)
    }

    /// The slices whose attention one visit computes.
    pub(super) fn slices_of_attention(&self) -> usize {
        self.shape.slices / self.attention_pieces()
    }

    /// All pieces, in the order of the steps.
    fn all_pieces(&self) -> impl Iterator<Item = Piece> + use<> {
        let slices = self.shape.slices;
        let halves = [(Half::Attend, self.attention_pieces()), (Half::Feed, self.shape.pieces)];
        halves.into_iter().flat_map(move |(half, count)| {
            let each = slices / count;
            (0..count).map(move |nth| Piece {
                half,
                slices: nth * each..(nth + 1) * each,
                is_first: nth == 0,
                is_last: nth + 1 == count,
            })
        })
    }

    /// The piece that a step computes.
    pub(super) fn piece(&self, step: usize) -> Piece {
        self.all_pieces().nth(step).expect("the layer has this step")
    }

    /// The number of each tensor of the block, sorted as tensors are.
    fn indices(&self) -> Tensors<usize, usize> {
        let all: Vec<usize> = self.base_tensors().iter().enumerate().map(|(at, _)| at).collect();
        self.sorted(&all, &[])
    }

    /// The parts of the block's tensors that a piece needs, each once.
    fn parts_of_piece(&self, indices: &Tensors<usize, usize>, piece: &Piece) -> Vec<(usize, Part)> {
        let mut parts: Vec<(usize, Part)> = Vec::new();
        let mut add = |index: usize, part: Part| {
            if !parts.contains(&(index, part.clone())) {
                parts.push((index, part));
            }
        };
        let norms = [&indices.norm1, &indices.norm2];
        let of_norm = |norm: usize| [Some(norms[norm].weight), norms[norm].bias];
        for slice in piece.slices.clone() {
            if piece.half == Half::Feed {
                of_norm(1).into_iter().flatten().for_each(|index| add(index, Part::Alone));
                self.mlp_of(slice, indices.mlp(), &mut add);
                continue;
            }
            let has_norm = self.shape.norms_attention_input(self.number);
            let is_left = |index: usize| {
                of_norm(1).contains(&Some(index)) || !has_norm && of_norm(0).contains(&Some(index))
            };
            let _: Tensors<(), ()> = self.attention_of(slice, indices, &mut |index, part| {
                if !is_left(index) {
                    add(index, part);
                }
            });
        }
        parts
    }

    /// The portions of the block, one for each piece.
    pub(super) fn portions_of_pieces(&self) -> Vec<LayerPortion> {
        if !self.is_in_pieces() {
            return Vec::new();
        }
        let indices = self.indices();
        let portion = |piece: Piece| LayerPortion {
            sum: if piece.half == Half::Attend { 0 } else { 1 },
            parts: self.parts_of_piece(&indices, &piece),
        };
        self.all_pieces().map(portion).collect()
    }

    /// The steps of the layer: one for each piece. `whole` is that of the layer in one visit.
    pub(super) fn steps_of_pieces(
        &self,
        context: &StepContext,
        whole: &LayerStep,
    ) -> Vec<LayerStep> {
        let floats = |role| Boundary::of_tokens(role, context.channels, Dtype::F32.size());
        let chunks = context.chunks(self.cuts(0)).count();
        // What is rounded in one visit alone is rounded the same way here: nothing is packed
        // between attention and feed-forward.
        let between = Boundary {
            encoding: Encoding::Plain,
            stashed_token_bytes: context.hidden.token_bytes,
            ..context.hidden
        };
        let step = |(number, piece): (usize, Piece)| {
            let is_feed = piece.half == Half::Feed;
            let read = if is_feed { between } else { context.hidden };
            let written = if is_feed { context.hidden } else { between };
            let down = match piece.is_first {
                true => Boundary { role: Role::HiddenGradient, ..read },
                false => Boundary {
                    sequence_bytes: (chunks * self.shared_floats(&piece) * size_of::<f32>()) as u64,
                    ..floats(Role::PartialGradient)
                },
            };
            let mut reads = vec![Input::new(read, Some(down))];
            reads.extend((!piece.is_first).then(|| Input::partial(floats(Role::Partial))));
            let writes = vec![if piece.is_last { written } else { floats(Role::Partial) }];
            let saves = context
                .save
                .and_then(|save| self.saved_by_piece(&piece, save, context.dtype, chunks));
            let mut step =
                LayerStep { cut: Some(number as u16), reads, writes, saves, ..whole.clone() };
            if !is_feed {
                context.add_kv(&mut step, self.kv_width() / self.attention_pieces());
            }
            step
        };
        self.all_pieces().enumerate().map(step).collect()
    }

    /// Floats of the gradients of what the slices of a piece share.
    fn shared_floats(&self, piece: &Piece) -> usize {
        let tensors = BlockTensors::from(self.base_tensors());
        let sizes: Vec<[usize; 2]> = tensors.joined().map(|(_, _, size)| size).collect();
        let parts = self.parts_of_piece(&self.indices(), piece);
        let shared = parts.iter().filter(|(_, part)| *part == Part::Shared);
        shared_len(shared.map(|(index, _)| sizes[*index]))
    }

    /// How a step may cut long sequences.
    pub(super) fn cuts_of_piece(&self, step: usize) -> Cuts {
        if self.piece(step).half == Half::Attend { Cuts::Causal } else { Cuts::ByPosition }
    }

    fn portion_views(
        &self,
        piece: &Piece,
        weights: &[View],
        gradients: &[Option<View>],
    ) -> PortionViews {
        let indices = self.indices();
        let parts = self.parts_of_piece(&indices, piece);
        PortionViews { indices, parts, weights: weights.into(), gradients: gradients.into() }
    }

    /// Begins the pass of a piece over a chunk.
    fn piece_pass<'a>(
        &'a self,
        k: &'a dyn Kernels,
        inputs: &ChunkInputs<'a>,
        kv: &SlicedKv,
        piece: &Piece,
        portion: &'a PortionViews,
        scratch: &Scratch<'_>,
    ) -> SlicedPass<'a> {
        let Piece { half, slices, .. } = piece;
        let x = inputs.x;
        // The feed-forward reads attention's sum; attention needs none before its last piece.
        let of = PassOf {
            slices: slices.clone(),
            half: *half,
            portion: Some(portion),
            attention_sum: Some(x),
        };
        self.pass_of_slices(k, inputs, kv, of, scratch)
    }

    /// The piece's forward.
    pub(super) fn piece_forward(&self, k: &dyn Kernels, pass: &Forward<'_>) {
        let Forward { batch, x, y, saved, kv_cache, chunk_state, ports, scratch, .. } = *pass;
        let piece = &self.piece(pass.step);
        let views = &self.portion_views(piece, pass.weights, &[]);
        let weights = &self.norms_of(views, piece);
        let inputs = ChunkInputs::without_kv(weights, batch, x, saved);
        let kv = SlicedKv { kv_cache, chunk_state, begin: ChunkState::move_on };
        let of_chunk = self.piece_pass(k, &inputs, &kv, piece, views, scratch);
        let whole = &of_chunk.whole;
        let sum = if piece.is_last { of_chunk.take_sum(scratch) } else { y };
        if let Some(x) = ports.read(Role::Partial) {
            k.cast(&Cast { y: sum, x });
        }
        let dropout = if piece.half == Half::Attend {
            of_chunk.attend(of_chunk.all(), sum, whole.attention_input(), scratch);
            self.attention_dropout(&batch)
        } else {
            whole.norm_saved_sum();
            of_chunk.feed(of_chunk.all(), sum, scratch);
            self.feed_forward_dropout(&batch)
        };
        if piece.is_last {
            of_chunk.branch(sum);
            k.residual(&Residual { y, a: x, x: whole.hidden, dropout });
        }
    }

    /// Computes the keys and values of a piece's slices again.
    pub(super) fn piece_keys(&self, k: &dyn Kernels, pass: &Keys<'_>) {
        let Keys { batch, x, saved, chunk_state, scratch, .. } = *pass;
        let piece = &self.piece(pass.step);
        let views = &self.portion_views(piece, pass.weights, &[]);
        let weights = &self.norms_of(views, piece);
        let inputs = ChunkInputs::without_kv(weights, batch, x, saved);
        let kv = SlicedKv { kv_cache: None, chunk_state, begin: ChunkState::move_back };
        let save = saved.map(|(save, _)| save);
        let of_chunk = self.piece_pass(k, &inputs, &kv, piece, views, scratch);
        of_chunk.keys(save, scratch);
    }

    /// The piece's backward.
    pub(super) fn piece_backward(&self, k: &dyn Kernels, pass: &Backward<'_>) {
        let Backward { batch, x, saved, dy, dx, chunk_state, accumulate, scratch, .. } = *pass;
        let piece = &self.piece(pass.step);
        let views = &self.portion_views(piece, pass.weights, pass.gradients);
        let weights = &self.norms_of(views, piece);
        let d = &self.norm_gradients(views, piece);
        let inputs = ChunkInputs::without_kv(weights, batch, x, saved);
        let kv = SlicedKv { kv_cache: None, chunk_state, begin: |state, _| state };
        let of_chunk = self.piece_pass(k, &inputs, &kv, piece, views, scratch);
        let save = saved.map(|(save, _)| save);
        let dx = dx.filter(|_| piece.is_first).unwrap_or_else(|| scratch.take_like(x));
        let g = &ChunkGradients { d, dy, dx, chunk_kv: None, save, accumulate, passed: None };
        let sums = self.gradient_sums(k, &pass.ports, piece, &of_chunk, scratch);
        let of_piece = PieceGradients { piece, g, sums };
        match piece.half {
            Half::Feed => of_chunk.feed_piece_backward(&of_piece, scratch),
            _ => of_chunk.attend_piece_backward(&of_piece, scratch),
        }
    }

    /// The sums of gradients, with what the pieces above have added: in what this piece hands down,
    /// or in workspace.
    fn gradient_sums(
        &self,
        k: &dyn Kernels,
        ports: &PortViews<'_>,
        piece: &Piece,
        of_chunk: &SlicedPass<'_>,
        scratch: &Scratch<'_>,
    ) -> GradientSums {
        let floats = self.shared_floats(piece);
        let behind = Behind { floats, positions: self.shape.chunk_positions };
        let [input, shared] = ports
            .written_sum(Role::PartialGradient, behind)
            .unwrap_or_else(|| [of_chunk.take_sum(scratch), scratch.take_floats(1, floats)]);
        if let Some([of_input, of_shared]) = ports.read_sum(Role::PartialGradient, behind) {
            k.cast(&Cast { y: input, x: of_input });
            if floats > 0 {
                k.cast(&Cast { y: shared, x: of_shared });
            }
        }
        GradientSums { input, shared: Some(shared) }
    }

    /// The norms of a piece, in place of the tensors of a block.
    fn norms_of(&self, views: &PortionViews, piece: &Piece) -> Weights<'static> {
        let first = piece.slices.start;
        self.attention_of(first, &views.indices, &mut |at, part| views.weight(at, &part))
    }

    /// The gradients of a piece's norms.
    fn norm_gradients(&self, views: &PortionViews, piece: &Piece) -> Gradients {
        let first = piece.slices.start;
        self.attention_of(first, &views.indices, &mut |at, part| views.gradient(at, &part))
    }
}

/// What the backward of a piece needs.
struct PieceGradients<'g> {
    piece: &'g Piece,
    g: &'g ChunkGradients<'g>,
    sums: GradientSums,
}

impl SlicedPass<'_> {
    fn feed_piece_backward(&self, of: &PieceGradients<'_>, scratch: &Scratch<'_>) {
        let PieceGradients { piece, g, sums } = *of;
        let whole = &self.whole;
        let buffers = Buffers { dattention_sum: g.dx, ..Buffers::new(whole.x, scratch) };
        whole.norm_saved_sum();
        let dropout = whole.block.feed_forward_dropout(&whole.batch);
        let dy = whole.products.dropout_backward(buffers.dbranch, g.dy, dropout);
        self.feed_backward(sums, dy, g, scratch);
        if piece.is_first {
            whole.k.cast(&Cast { y: buffers.dbranch, x: sums.input });
            whole.middle_norm_backward(g, buffers, g.dy, scratch);
        }
    }

    fn attend_piece_backward(&self, of: &PieceGradients<'_>, scratch: &Scratch<'_>) {
        let PieceGradients { piece, g, sums } = *of;
        let whole = &self.whole;
        let buffers = Buffers { dattention_sum: g.dy, ..Buffers::new(whole.x, scratch) };
        if g.save != Some(Save::All) {
            self.recompute_attention(whole.attention_input(), scratch);
        }
        let dropout = whole.block.attention_dropout(&whole.batch);
        let dy = whole.products.dropout_backward(buffers.dbranch, g.dy, dropout);
        self.attend_backward(sums, dy, g, scratch);
        if piece.is_first {
            whole.k.cast(&Cast { y: buffers.dbranch, x: sums.input });
            whole.input_backward(g, buffers, scratch);
        }
    }
}
