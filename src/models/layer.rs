//! What a layer is: tensors, and what it does to one micro-batch forward and backward.
//!
//! A layer says which kernels run on which views; it holds no memory. Between forward and backward
//! it keeps its input, and what it writes to `saved` when activations are not recomputed. So
//! recomputation is one choice in one place, and gives the same bits.

use std::ops::Range;

use super::ports::{LayerStep, PortViews, StepContext};
use crate::kernels::{BatchView, CustomKernel, Kernels};
use crate::tensor::{Dtype, Scratch, View};

/// The initial values of a tensor in a model of random weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// 0.
    Zeros,
    /// 1.
    Ones,
    /// Normal, of this standard deviation.
    Normal(f32),
    /// Uniform in ± this bound.
    Uniform(f32),
}

/// The kind of a tensor, for weight decay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Of a matrix product inside the model.
    Weight,
    /// A table of embeddings, or the matrix of a head. Patterns name it `weight`, too; a rule for
    /// matrices (Muon) leaves it to another rule.
    Table,
    /// A bias.
    Bias,
    /// Scale or shift of a norm.
    Norm,
}

/// Which activations are saved from forward to backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Save {
    /// All.
    All,
    /// All but attention's: its norm, queries, keys, values and output are recomputed.
    AllButAttention,
}

/// One tensor of a block.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Its name in a checkpoint.
    pub name: String,
    /// Its sizes, outermost first.
    pub shape: Vec<usize>,
    /// Its kind.
    pub kind: Kind,
    /// Its initial values.
    pub init: Init,
    /// True when it lies right behind the one before, so that both are one matrix of a product.
    pub joined: bool,
}

impl Kind {
    /// True for a matrix of a product, and for a table.
    pub fn is_weight(self) -> bool {
        matches!(self, Kind::Weight | Kind::Table)
    }
}

impl Tensor {
    /// Its elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// True when it has no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The arguments of a layer's forward on one micro-batch.
#[derive(Debug)]
pub struct Forward<'a> {
    /// The micro-batch.
    pub batch: BatchView<'a>,
    /// Which of the layer's [steps](Layer::steps) this is.
    pub step: usize,
    /// The tensors of the step's blocks, in the layer's order. Joined tensors are one view.
    pub weights: &'a [View],
    /// The first input that the step declares, to be read only: the backward may read it again.
    /// (R, C).
    pub x: View,
    /// The first output that the step declares. (R, C).
    pub y: View,
    /// All that the step reads and writes, by role.
    pub ports: PortViews<'a>,
    /// Where to save activations, in floats, and which; `None`: all are recomputed.
    pub saved: Option<(Save, View)>,
    /// The KV cache, when tokens come a few at a time.
    pub kv_cache: Option<KvCache>,
    /// What the chunks of a sequence leave to later chunks, as long as the layer asked for.
    pub chunk_state: View,
    /// Workspace.
    pub scratch: &'a Scratch<'a>,
}

/// A layer's KV cache for the sequences of a micro-batch.
#[derive(Clone, Copy, Debug)]
pub struct KvCache {
    /// Where the new keys and values go. (R, 2 K D).
    pub new: View,
    /// Keys and values of earlier positions, if there are any. (B P, 2 K D).
    pub cached: Option<View>,
}

/// The arguments of a layer's backward on one micro-batch.
#[derive(Debug)]
pub struct Backward<'a> {
    /// The micro-batch.
    pub batch: BatchView<'a>,
    /// Which of the layer's [steps](Layer::steps) this is.
    pub step: usize,
    /// The tensors of the step's blocks, in the layer's order. Joined tensors are one view.
    pub weights: &'a [View],
    /// For each of them its gradient, in floats; `None` where it is frozen.
    pub gradients: &'a [Option<View>],
    /// True when the gradients hold contributions of this step already.
    pub accumulate: bool,
    /// The forward's first input. (R, C).
    pub x: View,
    /// The activations that were saved; `None`: all are recomputed.
    pub saved: Option<(Save, View)>,
    /// The gradient of the first output. (R, C).
    pub dy: View,
    /// Where the gradient of `x` goes, if a layer below needs it.
    pub dx: Option<View>,
    /// All that the step's backward reads and writes, by role: inputs of the forward, gradients of
    /// its outputs, and gradients of its inputs.
    pub ports: PortViews<'a>,
    /// As in [`Forward`].
    pub chunk_state: View,
    /// Workspace.
    pub scratch: &'a Scratch<'a>,
}

/// A layer of the stack: from hidden states to hidden states.
///
/// `tensors`, `saved_len`, `forward` and `backward` are to be written. The defaults of all others
/// are right for a layer that computes each position by itself, from tensors that each token is
/// multiplied by. A layer that attends to other positions has a KV cache
/// ([`kv_width`](Layer::kv_width)), or the model cannot generate text with one; a layer with
/// dropout says its index.
pub trait Layer: Send + Sync {
    /// Its tensors.
    fn tensors(&self) -> Vec<Tensor>;

    /// How its tensors are cut into blocks: the number of tensors of each, in their order. A block
    /// moves and is updated as a whole; joined tensors are of one block.
    fn blocks(&self) -> Vec<usize> {
        vec![self.tensors().len()]
    }

    /// Its visits in the forward pass, in order: what each needs, reads, writes and saves. By
    /// default one, from hidden states to hidden states, with all blocks.
    fn steps(&self, context: &StepContext) -> Vec<LayerStep> {
        let StepContext { positions, dtype, save, .. } = *context;
        let mut step = LayerStep::on_hidden(context, (0..self.blocks().len()).collect());
        let saved_len = save.map_or(0, |save| self.saved_len(positions, save, dtype));
        step.saves = context.saved(saved_len);
        context.add_kv(&mut step, self.kv_width());
        vec![step]
    }

    /// Elements of weights that every token is multiplied by, for counting FLOPs.
    fn products(&self) -> usize {
        let weights = |tensor: &Tensor| if tensor.kind.is_weight() { tensor.len() } else { 0 };
        self.tensors().iter().map(weights).sum()
    }

    /// Numbers that its KV cache holds for each position; 0: it has none.
    fn kv_width(&self) -> usize {
        0
    }

    /// Channels of its causal attention, for counting FLOPs.
    fn attention_channels(&self) -> usize {
        0
    }

    /// The index of its dropout masks, if it drops anything: each layer has its own, not 0.
    fn dropout_index(&self) -> Option<u32> {
        None
    }

    /// Whether its backward accepts `dy` in floats on a device of another dtype, as a head's tiles
    /// sum it.
    fn takes_floats(&self) -> bool {
        false
    }

    /// Whether a step can leave it out, so that hidden states pass it unchanged.
    fn is_optional(&self) -> bool {
        true
    }

    /// Kernels of its own that it runs, so that a device can compile them.
    fn custom_kernels(&self) -> Vec<CustomKernel> {
        Vec::new()
    }

    /// Floats that the [chunks](BatchView::chunks) of one sequence of so many `positions` leave to
    /// each other, in training or without, for elements of this dtype. 0: it walks the whole
    /// sequence at once, or its chunks leave nothing.
    fn chunk_state_len(&self, _positions: usize, _trains: bool, _dtype: Dtype) -> usize {
        0
    }

    /// Floats that the saved activations of one sequence of `positions` take, for elements of this
    /// dtype. Those of a micro-batch take the sum over its sequences.
    fn saved_len(&self, positions: usize, save: Save, dtype: Dtype) -> usize;

    /// Saves of what a ReLU reads only the positive numbers, up to this share of a row; signs alone
    /// where the gradients of these trained tensors need no more; all with `None`. Whether it has
    /// such a ReLU.
    fn pack_relu(&mut self, _density: Option<f64>, _trained: &[Tensor]) -> bool {
        false
    }

    /// Computes `y`.
    fn forward(&self, kernels: &dyn Kernels, pass: &Forward<'_>);

    /// Computes `dx` and the gradients of the tensors that are trained.
    fn backward(&self, kernels: &dyn Kernels, pass: &Backward<'_>);
}

/// Where a block's tensors lie in it, in their order: each aligned, or joined to the one before.
pub fn tensor_ranges(tensors: &[Tensor]) -> impl Iterator<Item = Range<usize>> {
    let mut end = 0_usize;
    tensors.iter().map(move |tensor| {
        let from = if tensor.joined { end } else { end.next_multiple_of(16) };
        end = from + tensor.len();
        from..end
    })
}

/// Views of a block's tensors, in their order. Joined tensors are one view, with the rows of all;
/// or, where they are vectors, with the elements of all.
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
    tensor_ranges(tensors).last().map_or(0, |range| range.end.next_multiple_of(16))
}

/// The tensors of each of a layer's blocks.
pub(crate) fn tensors_of_blocks(layer: &dyn Layer) -> Vec<Vec<Tensor>> {
    let mut tensors = layer.tensors().into_iter();
    let blocks = layer.blocks().into_iter();
    blocks.map(|count| tensors.by_ref().take(count).collect()).collect()
}
