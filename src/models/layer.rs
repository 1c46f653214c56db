//! Layers: their tensors, and their forward and backward on one micro-batch.
//!
//! A layer says which kernels run on which views; it holds no memory. Between forward and backward
//! the ring keeps the layer's input, and the activations that it writes to `saved`. The backward
//! recomputes the others with the same kernels, so recomputation changes no bits.

use std::ops::Range;

use super::block_tensors::SlotWeight;
use super::portions::LayerPortion;
use super::ports::{LayerStep, PortViews, StepContext};
use crate::kernels::{BatchView, CustomKernel, Kernels};
use crate::tensor::{ALIGNED, Dtype, Scratch, View};

/// The initial values of a tensor in a model of random weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// All elements are 0.
    Zeros,
    /// All elements are 1.
    Ones,
    /// Normal, with this standard deviation.
    Normal(f32),
    /// Uniform between − and + this bound.
    Uniform(f32),
    /// The logarithm of uniform numbers between 0.01 and 16: decays of the gated delta rule.
    LogOfUniform,
}

/// The kind of a tensor, for weight decay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The weight of a matrix product inside the model.
    Weight,
    /// A table of embeddings, or the matrix of a head. Patterns name it `weight`, too. A rule for
    /// matrices (Muon) leaves it to another rule.
    Table,
    /// A bias.
    Bias,
    /// Scale or shift of a norm.
    Norm,
    /// A constant: it is never trained, whatever a config says.
    Buffer,
}

/// The activations that are saved from forward to backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Save {
    /// All activations.
    All,
    /// All but those of attention: its norm, queries, keys, values and output are recomputed.
    AllButAttention,
}

/// How a sequence may be cut into chunks that a layer computes one by one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cuts {
    /// It may not be cut: a position may depend on any other, or the layer does not say.
    Never,
    /// Each position is computed by itself. The layer may add to the gradients of its tensors.
    ByPosition,
    /// A position depends on earlier ones, through keys and values, or a state, in the chunk state.
    Causal,
}

/// One tensor of a block.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// The name in a checkpoint.
    pub name: String,
    /// The sizes, outermost first.
    pub shape: Vec<usize>,
    /// The kind, for weight decay and patterns.
    pub kind: Kind,
    /// The initial values.
    pub init: Init,
    /// True when it lies right behind the tensor before, so that both are one matrix of a product.
    pub joined: bool,
    /// True when files have one tensor for all tensors of this name, such as the experts of a
    /// block. Its first size counts them.
    pub stacked: bool,
    /// The expert that the tensor belongs to, if a step that gives this expert no row leaves the
    /// tensor alone, with its states and the count of its updates. Experts of
    /// [`TransformerBlock`](super::TransformerBlock) set it where
    /// [`Experts::idle`](super::Experts::idle) says so. `None`: each update changes the tensor.
    pub kept_with: Option<usize>,
}

impl Kind {
    /// True for a matrix of a product, and for a table.
    pub fn is_weight(self) -> bool {
        matches!(self, Kind::Weight | Kind::Table)
    }
}

impl Tensor {
    /// A tensor that is not joined to the tensor before.
    pub fn new(name: impl Into<String>, shape: Vec<usize>, kind: Kind, init: Init) -> Tensor {
        Tensor {
            name: name.into(),
            shape,
            kind,
            init,
            joined: false,
            stacked: false,
            kept_with: None,
        }
    }

    /// The sizes in a file, of the tensor or of one of its states. Tensors of one name are joined
    /// along the first of them.
    pub(crate) fn sizes_in_file(&self, sizes: &[usize]) -> Vec<usize> {
        let first = self.stacked.then_some(1);
        first.into_iter().chain(sizes.iter().copied()).collect()
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// True when it has no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The arguments of a layer's forward on one micro-batch, or on a chunk of one of its sequences if
/// the layer [cuts](Layer::cuts) them. R and B of all views are those of `batch`.
#[derive(Debug)]
pub struct Forward<'a> {
    /// The micro-batch, or the chunk.
    pub batch: BatchView<'a>,
    /// The index among the layer's [steps](Layer::steps).
    pub step: usize,
    /// The tensors of the step's blocks, in the layer's order. Joined tensors are one view.
    pub weights: &'a [View],
    /// The [last tensors](Layer::stored_weights), which the layer dequantises by itself.
    pub stored: &'a [SlotWeight<'a>],
    /// The first input that the step declares, to be read only: the backward may read it again.
    /// (R, C).
    pub x: View,
    /// The first output that the step declares. (R, C).
    pub y: View,
    /// All boundaries that the step reads and writes, by role.
    pub ports: PortViews<'a>,
    /// Where to save activations, in floats, and which activations. `None`: all are recomputed.
    pub saved: Option<(Save, View)>,
    /// The KV cache, when tokens come a few at a time.
    pub kv_cache: Option<KvCache>,
    /// What the chunks of a sequence pass on.
    pub chunk_state: ChunkMemory,
    /// Workspace.
    pub scratch: &'a Scratch<'a>,
}

/// A layer's KV cache for the sequences of a micro-batch.
#[derive(Clone, Copy, Debug)]
pub struct KvCache {
    /// Where the new keys and values go. (R, 2 K D). Of a layer that keeps
    /// [floats of a sequence](Layer::state_len): their place. (B, `state_len`).
    pub new: View,
    /// Keys and values of earlier positions, if there are any. (B P, 2 K D). Or what the earlier
    /// positions have left. (B, `state_len`).
    pub cached: Option<View>,
}

/// The state that the chunks of a sequence pass on.
#[derive(Clone, Copy, Debug)]
pub struct ChunkMemory {
    /// [`chunk_state_len`](Layer::chunk_state_len) floats.
    pub memory: View,
    /// Positions before a chunk that it has room for, beside those of the chunk: whole chunks, as
    /// far as the layer's [`window`](Layer::window) reaches. Without a window: more than a sequence
    /// can have.
    pub before: usize,
}

/// The arguments of [`Layer::keys`] on one chunk.
#[derive(Debug)]
pub struct Keys<'a> {
    /// The chunk.
    pub batch: BatchView<'a>,
    /// The index among the layer's [steps](Layer::steps).
    pub step: usize,
    /// The tensors of the step's blocks, as in [`Forward`].
    pub weights: &'a [View],
    /// The last tensors, as in [`Forward`].
    pub stored: &'a [SlotWeight<'a>],
    /// The forward's first input. (R, C).
    pub x: View,
    /// All boundaries that the visit reads, by role.
    pub ports: PortViews<'a>,
    /// The activations that were saved; `None`: keys and values are computed from `x`.
    pub saved: Option<(Save, View)>,
    /// Where keys and values go.
    pub chunk_state: ChunkMemory,
    /// Workspace.
    pub scratch: &'a Scratch<'a>,
}

/// The arguments of a layer's backward on one micro-batch, or on a chunk, as in [`Forward`].
#[derive(Debug)]
pub struct Backward<'a> {
    /// The micro-batch, or the chunk.
    pub batch: BatchView<'a>,
    /// The index among the layer's [steps](Layer::steps).
    pub step: usize,
    /// The tensors of the step's blocks, in the layer's order. Joined tensors are one view.
    pub weights: &'a [View],
    /// The last tensors, as in [`Forward`].
    pub stored: &'a [SlotWeight<'a>],
    /// The gradient of each tensor, in floats; `None` for a frozen tensor.
    pub gradients: &'a [Option<View>],
    /// True when the gradients already hold contributions of this step.
    pub accumulate: bool,
    /// The forward's first input. (R, C).
    pub x: View,
    /// The activations that were saved; `None`: all are recomputed.
    pub saved: Option<(Save, View)>,
    /// The gradient of the first output. (R, C).
    pub dy: View,
    /// The place for the gradient of `x`, if a layer below needs it.
    pub dx: Option<View>,
    /// All boundaries that the step's backward reads and writes, by role: inputs of the forward,
    /// gradients of its outputs, and gradients of its inputs.
    pub ports: PortViews<'a>,
    /// What the chunks of a sequence pass on.
    pub chunk_state: ChunkMemory,
    /// Workspace.
    pub scratch: &'a Scratch<'a>,
}

/// A layer of the stack: from hidden states to hidden states.
///
/// A layer must implement `tensors`, `saved_len`, `forward` and `backward`. The other methods have
/// defaults that fit a layer which computes each position by itself and multiplies each token by
/// all its weights. A layer that attends to other positions needs a KV cache
/// ([`kv_width`](Layer::kv_width)), or the model cannot generate text. A layer with dropout has an
/// index. A layer gets long sequences whole, unless it says how they may be cut
/// ([`cuts`](Layer::cuts)).
pub trait Layer: Send + Sync {
    /// The tensors of the layer.
    fn tensors(&self) -> Vec<Tensor>;

    /// How the tensors are cut into blocks: the number of tensors of each, in their order. A block
    /// moves and is updated as a whole. Joined tensors must be in one block.
    fn blocks(&self) -> Vec<usize> {
        vec![self.tensors().len()]
    }

    /// The steps of the layer in the forward pass, in order. By default there is one step, from
    /// hidden states to hidden states, with all blocks.
    fn steps(&self, context: &StepContext) -> Vec<LayerStep> {
        let StepContext { dtype, save, .. } = *context;
        let mut step = LayerStep::on_hidden(context, (0..self.blocks().len()).collect());
        let chunks = context.chunks(self.cuts(0));
        let saved_len =
            save.map_or(0, |save| chunks.map(|rows| self.saved_len(rows, save, dtype)).sum());
        step.saves = context.saved(saved_len);
        context.add_kv(&mut step, self.kv_width());
        context.add_state(&mut step, self.state_len());
        vec![step]
    }

    /// The portions of a block, in the order of the [cuts](LayerStep::cut) of the steps that need
    /// them. Empty: steps need the whole block.
    fn portions(&self, _block: usize) -> Vec<LayerPortion> {
        Vec::new()
    }

    /// The number of a step's weights, the last ones, that the layer dequantises when it needs
    /// them, so that workspace need not hold all of them. Joined tensors count once. All others are
    /// dequantised before a visit.
    fn stored_weights(&self, _step: usize) -> usize {
        0
    }

    /// The parts of a block that rows [choose](LayerStep::chosen_by), as numbers among the parts of
    /// the layer. Each has as many tensors of the block as the others, which follow each other.
    /// Empty: rows use all of the block.
    fn parts_of_block(&self, _block: usize) -> Range<usize> {
        0..0
    }

    /// For each part of the layer, whether a row chose it, as the boundary
    /// [`chosen_by`](LayerStep::chosen_by) of a micro-batch says.
    fn chosen_parts(&self, _choice: &[f32]) -> Vec<bool> {
        Vec::new()
    }

    /// The number of elements of weights that every token is multiplied by, for counting FLOPs.
    fn products(&self) -> usize {
        let weights = |tensor: &Tensor| if tensor.kind.is_weight() { tensor.len() } else { 0 };
        self.tensors().iter().map(weights).sum()
    }

    /// Numbers of a position in the layer's KV cache. 0: it has no KV cache.
    fn kv_width(&self) -> usize {
        0
    }

    /// Floats that a sequence keeps in the layer's KV cache, however long it is, in place of
    /// numbers of each position: a recurrent state. 0: it keeps none.
    fn state_len(&self) -> usize {
        0
    }

    /// Channels of the products that [`keys`](Layer::keys) computes, for counting FLOPs.
    fn key_channels(&self) -> usize {
        self.kv_width()
    }

    /// Channels of causal attention, for counting FLOPs. A channel of attention to both sides
    /// counts twice.
    fn attention_channels(&self) -> usize {
        0
    }

    /// The index of the layer's dropout masks, if it has dropout. Each layer needs an index of its
    /// own, from 1.
    fn dropout_index(&self) -> Option<u32> {
        None
    }

    /// Whether the backward accepts `dy` in floats on a device of another dtype. The tiles of a
    /// head sum it in floats.
    fn takes_floats(&self) -> bool {
        false
    }

    /// Whether a step can leave the layer out, so that hidden states pass it unchanged.
    fn is_optional(&self) -> bool {
        true
    }

    /// Custom kernels that the layer runs. A device compiles them when it is opened.
    fn custom_kernels(&self) -> Vec<CustomKernel> {
        Vec::new()
    }

    /// How a step may cut sequences of more than `step.chunk_positions` positions. If it may, its
    /// forward gets one chunk at a time, from the first to the last, and its backward from the last
    /// to the first.
    fn cuts(&self, _step: usize) -> Cuts {
        Cuts::Never
    }

    /// The most positions that a position depends on, its own included, of a layer with causal cuts
    /// that keeps no more between chunks: see [`ChunkMemory::before`]. `None`: all of them. A layer
    /// that wraps another passes it on, or leaves it: then nothing is dropped.
    fn window(&self) -> Option<usize> {
        None
    }

    /// Floats that the chunks of one sequence pass on, with or without training, for elements of
    /// this dtype. They have room for `positions`: those of the sequence, or as many as its
    /// [`window`](Layer::window) needs at once. 0: sequences are not cut, or their chunks pass
    /// nothing on.
    fn chunk_state_len(&self, _positions: usize, _trains: bool, _dtype: Dtype) -> usize {
        0
    }

    /// Floats of the saved activations of one sequence, or chunk, of `positions`, for elements of
    /// this dtype. A micro-batch has the sum over its sequences.
    fn saved_len(&self, positions: usize, save: Save, dtype: Dtype) -> usize;

    /// The same, of what one step saves.
    fn saved_len_of(&self, _step: usize, positions: usize, save: Save, dtype: Dtype) -> usize {
        self.saved_len(positions, save, dtype)
    }

    /// Sets how the input of a ReLU is saved: its positive numbers, up to this share of a row; or
    /// signs alone, if the gradients of these trained tensors need no more. `None`: all numbers.
    /// Returns whether the layer has such a ReLU.
    fn pack_relu(&mut self, _density: Option<f64>, _trained: &[Tensor]) -> bool {
        false
    }

    /// Computes `y`.
    fn forward(&self, kernels: &dyn Kernels, pass: &Forward<'_>);

    /// Computes the keys and values of a chunk, or the states behind it, again, to the chunk state.
    /// It is called for all chunks of a sequence but the last, before the backward of the last
    /// chunk that attends to them. Before the backward of the sequence's last chunk it is called
    /// for the chunks within the [`window`](Layer::window), in their order; then for the one below
    /// these before each.
    fn keys(&self, _kernels: &dyn Kernels, _pass: &Keys<'_>) {
        unreachable!("a layer whose cuts are causal implements it")
    }

    /// Computes `dx`, and the gradients of trained tensors.
    fn backward(&self, kernels: &dyn Kernels, pass: &Backward<'_>);
}

/// Where the tensors of a block lie, in their order: each aligned, or joined to the tensor before.
pub fn tensor_ranges(tensors: &[Tensor]) -> impl Iterator<Item = Range<usize>> {
    let mut end = 0_usize;
    tensors.iter().map(move |tensor| {
        let from = if tensor.joined { end } else { end.next_multiple_of(ALIGNED) };
        end = from + tensor.len();
        from..end
    })
}

/// Views of a block's tensors, in their order. Joined tensors are one view, with the rows of all,
/// or with the elements of all if they are vectors.
pub fn tensor_views(tensors: &[Tensor], block: View) -> Vec<View> {
    let mut views: Vec<View> = Vec::new();
    for (tensor, range) in tensors.iter().zip(tensor_ranges(tensors)) {
        let is_vector = tensor.shape.len() == 1;
        match views.last_mut().filter(|_| tensor.joined) {
            Some(last) if is_vector => last.columns += range.len(),
            Some(last) => last.rows += tensor.shape[0],
            None => {
                let rows = if is_vector { 1 } else { tensor.shape[0] };
                views.push(block.part(range.clone()).with_columns(range.len() / rows));
            }
        }
    }
    views
}

/// Elements of a block with these tensors.
pub fn block_len(tensors: &[Tensor]) -> usize {
    tensor_ranges(tensors).last().map_or(0, |range| range.end.next_multiple_of(ALIGNED))
}

/// The tensors of each of a layer's blocks.
pub(crate) fn tensors_of_blocks(layer: &dyn Layer) -> Vec<Vec<Tensor>> {
    let mut tensors = layer.tensors().into_iter();
    let blocks = layer.blocks().into_iter();
    blocks.map(|count| tensors.by_ref().take(count).collect()).collect()
}
