//! What a layer is: tensors, and what it does to one micro-batch forward and backward.
//!
//! A layer says which kernels run on which views; it holds no memory. Between forward and backward
//! it keeps nothing but its input and what it writes to `kept` when nothing is recomputed, so
//! recomputing or not is one choice in one place and gives the same bits.

use std::ops::Range;

use crate::kernels::{BatchView, CustomKernel, Kernels};
use crate::tensor::{Dtype, Scratch, View};

/// How a tensor begins in a model of random weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// 0.
    Zeros,
    /// 1.
    Ones,
    /// Normal, of this standard deviation.
    Normal(f32),
}

/// What a tensor is to weight decay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Of a product, or an embedding.
    Weight,
    /// Added.
    Bias,
    /// Scale or shift of a norm.
    Norm,
}

/// Which intermediates wait in the stash from forward to backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Save {
    /// All.
    All,
    /// All but attention's: its norm, queries, keys, values, and what it comes to are computed again.
    AllButAttention,
}

/// One tensor of a block.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Its name in a checkpoint of the family.
    pub name: String,
    /// Its sizes, outermost first.
    pub shape: Vec<usize>,
    /// What it is.
    pub kind: Kind,
    /// How it begins.
    pub init: Init,
    /// True when it lies right behind the one before, so that both are one matrix of a product.
    pub joined: bool,
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

/// One micro-batch forward.
#[derive(Debug)]
pub struct Forward<'a> {
    /// The micro-batch.
    pub batch: BatchView<'a>,
    /// The layer's block.
    pub weights: View,
    /// What comes in. (R, C).
    pub x: View,
    /// What goes out. (R, C).
    pub y: View,
    /// Where to keep intermediates, in floats, and which, unless all are recomputed.
    pub saved: Option<(Save, View)>,
    /// What attention is to remember of this micro-batch, and what it remembers of those before
    /// it, when tokens come a few at a time. See [`Kernels::attention_to_past`].
    pub memory: Option<KvCache>,
    /// What chunks leave to later ones, as long as the layer asked for.
    pub chunk_state: View,
    /// Workspace.
    pub scratch: &'a Scratch<'a>,
}

/// A layer's memory of a micro-batch's sequences.
#[derive(Clone, Copy, Debug)]
pub struct KvCache {
    /// Where its keys and values go. (R, 2 K D).
    pub fresh: View,
    /// Those from before, if there are any. (B, P, 2 K D).
    pub past: Option<View>,
}

/// One micro-batch backward.
#[derive(Debug)]
pub struct Backward<'a> {
    /// The micro-batch.
    pub batch: BatchView<'a>,
    /// The layer's block.
    pub weights: View,
    /// Its gradient; `None` when it is frozen.
    pub gradient: Option<View>,
    /// True when the gradient holds contributions of this step already.
    pub accumulate: bool,
    /// What came in. (R, C).
    pub x: View,
    /// What was kept, unless all is recomputed.
    pub saved: Option<(Save, View)>,
    /// The gradient of what went out. (R, C).
    pub dy: View,
    /// Where the gradient of `x` goes, if anybody needs it.
    pub dx: Option<View>,
    /// As in [`Forward`].
    pub chunk_state: View,
    /// Workspace.
    pub scratch: &'a Scratch<'a>,
}

/// A layer of the stack: from hidden states to hidden states.
pub trait Layer: Send + Sync {
    /// The tensors of its block.
    fn tensors(&self) -> Vec<Tensor>;

    /// Elements of weights that every token is multiplied by, for counting FLOPs.
    fn products(&self) -> usize {
        let weights = |tensor: &Tensor| if tensor.kind == Kind::Weight { tensor.len() } else { 0 };
        self.tensors().iter().map(weights).sum()
    }

    /// Numbers that its attention remembers of a position; 0: it remembers nothing.
    fn kv_width(&self) -> usize {
        0
    }

    /// Channels of its causal attention, for counting FLOPs.
    fn attention_channels(&self) -> usize {
        0
    }

    /// Whether its backward casts `dy` by itself, which a head's tiles hand on in floats.
    fn takes_floats(&self) -> bool {
        false
    }

    /// Kernels of its own that it runs, so that a device can make them ready.
    fn custom_kernels(&self) -> Vec<CustomKernel> {
        Vec::new()
    }

    /// Floats that [chunks](BatchView::chunks) of one sequence of so many `positions` leave to
    /// each other, in training or without, on a device of this kind; 0: it walks all at once, or they
    /// leave nothing.
    fn chunk_state_len(&self, _positions: usize, _trains: bool, _of: Dtype) -> usize {
        0
    }

    /// Floats that what it keeps for one sequence of `positions` takes, when it is to keep this, on a
    /// device of this kind.
    fn saved_len(&self, positions: usize, save: Save, of: Dtype) -> usize;

    /// Runs it.
    fn forward(&self, kernels: &dyn Kernels, pass: &Forward<'_>);

    /// Runs it back.
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

/// Views of a block's tensors, in their order; joined ones are one.
pub fn tensor_views(tensors: &[Tensor], block: View) -> Vec<View> {
    let mut views: Vec<View> = Vec::new();
    for (tensor, range) in tensors.iter().zip(tensor_ranges(tensors)) {
        match views.last_mut().filter(|_| tensor.joined) {
            Some(last) => last.columns += range.len(),
            None => views.push(block.part(range)),
        }
    }
    views
}

/// Elements of a block with these tensors.
pub fn block_len(tensors: &[Tensor]) -> usize {
    tensor_ranges(tensors).last().map_or(0, |range| range.end.next_multiple_of(16))
}
