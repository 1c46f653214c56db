//! What a layer is: tensors, and what it does to one micro-batch forward and backward.
//!
//! A layer says which kernels run on which views; it holds no memory. Between forward and backward
//! it keeps nothing but its input and what it writes to `kept` when nothing is recomputed, so
//! recomputing or not is one choice in one place and gives the same bits.

use std::cell::Cell;
use std::ops::Range;

use super::kernels::{Document, Dropout, Kernels, Places, Rows};
use super::own::Own;
use super::view::{Dtype, View};

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
pub enum Keep {
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

/// A stack of views in a device's workspace, let go of all at once. Its height is its only state,
/// so the same walk on a device that does nothing tells how much a layer needs.
#[derive(Debug)]
pub struct Scratch<'a> {
    of: Dtype,
    /// All of these count floats.
    at: usize,
    capacity: usize,
    used: Cell<usize>,
    peak: Cell<usize>,
    outer: Option<&'a Scratch<'a>>,
}

impl Scratch<'_> {
    /// All of a workspace, which is of floats, to take numbers from that are of a kind.
    pub fn new(workspace: View, of: Dtype) -> Scratch<'static> {
        assert_eq!(workspace.of, Dtype::F32, "a workspace is of floats");
        let (used, peak) = (Cell::new(0), Cell::new(0));
        Scratch { of, at: workspace.at, capacity: workspace.len, used, peak, outer: None }
    }

    /// What is left of it, for somebody who gives it back before anybody takes more.
    pub fn nested(&self) -> Scratch<'_> {
        let (at, capacity) = (self.at + self.used.get(), self.capacity - self.used.get());
        let (used, peak) = (Cell::new(0), Cell::new(0));
        Scratch { of: self.of, at, capacity, used, peak, outer: Some(self) }
    }

    /// The next `len` elements of the device's [`Dtype`], aligned.
    ///
    /// # Panics
    /// The plan was made for less.
    pub fn take(&self, len: usize) -> View {
        self.take_floats(self.of.floats(len)).place(len, self.of)
    }

    /// The next `len` floats, aligned.
    ///
    /// # Panics
    /// As [`take`](Scratch::take).
    pub fn take_floats(&self, len: usize) -> View {
        let from = self.used.get();
        let to = from + len.next_multiple_of(16);
        assert!(to <= self.capacity, "workspace of {} asked for {to}", self.capacity);
        self.used.set(to);
        self.rise(to);
        View::floats(self.at + from, len)
    }

    fn rise(&self, height: usize) {
        self.peak.set(self.peak.get().max(height));
        if let Some(outer) = self.outer {
            outer.rise(outer.used.get() + height);
        }
    }

    /// What the device's numbers are.
    pub fn dtype(&self) -> Dtype {
        self.of
    }

    /// The most floats that were taken at once.
    pub fn peak(&self) -> usize {
        self.peak.get()
    }
}

/// What a micro-batch is to a layer.
#[derive(Clone, Copy, Debug)]
pub struct Micro<'a> {
    /// Its sizes.
    pub rows: Rows,
    /// Tokens of each sequence.
    pub lengths: &'a [usize],
    /// Kinds of its tokens. (B, T).
    pub kinds: &'a [u8],
    /// As [`Places::documents`].
    pub documents: &'a [Document],
    /// As [`Places::past`].
    pub past: &'a [usize],
    /// What dropout masks are drawn from; `None`: nothing is dropped.
    pub draw: Option<Draw>,
}

/// Positions of a sequence that are walked at once, at most, where none sees those behind it. A
/// longer sequence takes no more workspace than this. Whole tiles of attention.
pub const STRETCH: usize = 2048;

/// Rows of a micro-batch that are walked at once: all of them, or positions of one sequence.
#[derive(Clone, Debug)]
pub struct Stretch {
    /// The rows.
    pub rows: Range<usize>,
    /// Of which sequence, and how many of its positions came before; `None`: they are all rows.
    pub part_of: Option<(usize, [usize; 1])>,
}

impl Stretch {
    /// Its rows of a (R, `width`) tensor.
    pub fn of(&self, view: View, width: usize) -> View {
        view.part(self.rows.start * width..self.rows.end * width)
    }

    /// What the micro-batch is to it.
    pub fn micro<'a>(&'a self, whole: &Micro<'a>) -> Micro<'a> {
        let Some((sequence, ref past)) = self.part_of else { return *whole };
        let Micro { rows: Rows { positions, .. }, lengths, kinds, documents, .. } = *whole;
        let to = past[0] + self.rows.len();
        let documents = documents.get(sequence * positions..sequence * positions + to);
        let draw = whole.draw.map(|draw| Draw {
            first_sequence: draw.first_sequence + sequence as u32,
            first_position: past[0] as u32,
            ..draw
        });
        Micro {
            rows: Rows { sequences: 1, positions: self.rows.len() },
            lengths: &lengths[sequence..=sequence],
            kinds: &kinds[self.rows.clone()],
            documents: documents.unwrap_or_default(),
            past,
            draw,
        }
    }
}

/// What dropout masks are drawn from, but for the site.
#[derive(Clone, Copy, Debug)]
pub struct Draw {
    /// The run's seed.
    pub seed: u64,
    /// The step.
    pub step: u64,
    /// The index in the step of the micro-batch's first sequence.
    pub first_sequence: u32,
    /// The position in its sequence of the micro-batch's first row.
    pub first_position: u32,
}

impl<'a> Micro<'a> {
    /// Its rows, cut where sequences are longer than a [`STRETCH`], and may be cut.
    pub fn stretches(&self, may_be_cut: bool) -> Vec<Stretch> {
        let Rows { sequences, positions } = self.rows;
        if !may_be_cut || positions <= STRETCH {
            return vec![Stretch { rows: 0..self.rows.count(), part_of: None }];
        }
        let pasts = || (0..positions).step_by(STRETCH);
        let of_sequence = |sequence: usize| {
            pasts().map(move |past| Stretch {
                rows: sequence * positions + past
                    ..sequence * positions + positions.min(past + STRETCH),
                part_of: Some((sequence, [past])),
            })
        };
        (0..sequences).flat_map(of_sequence).collect()
    }

    /// Which position each row is.
    pub fn places(&self) -> Places<'a> {
        Places { rows: self.rows, documents: self.documents, past: self.past }
    }

    /// The dropout of one site of a layer, if it drops anything.
    pub fn dropout(&self, probability: f32, layer: u32, site: u32) -> Option<Dropout> {
        let Draw { seed, step, first_sequence, first_position } =
            self.draw.filter(|_| probability > 0.0)?;
        let site = layer * 8 + site;
        Some(Dropout { probability, seed, step, site, first_sequence, first_position })
    }
}

/// One micro-batch forward.
#[derive(Debug)]
pub struct Forward<'a> {
    /// The micro-batch.
    pub micro: Micro<'a>,
    /// The layer's block.
    pub weights: View,
    /// What comes in. (R, C).
    pub x: View,
    /// What goes out. (R, C).
    pub y: View,
    /// Where to keep intermediates, in floats, and which, unless all are recomputed.
    pub kept: Option<(Keep, View)>,
    /// What attention is to remember of this micro-batch, and what it remembers of those before
    /// it, when tokens come a few at a time. See [`Kernels::attention_to_past`].
    pub memory: Option<Memory>,
    /// What stretches leave to later ones, as long as the layer asked for.
    pub carried: View,
    /// Workspace.
    pub scratch: &'a Scratch<'a>,
}

/// A layer's memory of a micro-batch's sequences.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    /// Where its keys and values go. (R, 2 K D).
    pub fresh: View,
    /// Those from before, if there are any. (B, P, 2 K D).
    pub past: Option<View>,
}

/// One micro-batch backward.
#[derive(Debug)]
pub struct Backward<'a> {
    /// The micro-batch.
    pub micro: Micro<'a>,
    /// The layer's block.
    pub weights: View,
    /// Its gradient; `None` when it is frozen.
    pub gradient: Option<View>,
    /// True when the gradient holds contributions of this step already.
    pub accumulate: bool,
    /// What came in. (R, C).
    pub x: View,
    /// What was kept, unless all is recomputed.
    pub kept: Option<(Keep, View)>,
    /// The gradient of what went out. (R, C).
    pub dy: View,
    /// Where the gradient of `x` goes, if anybody needs it.
    pub dx: Option<View>,
    /// As in [`Forward`].
    pub carried: View,
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
    fn remembered(&self) -> usize {
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
    fn own_kernels(&self) -> Vec<Own> {
        Vec::new()
    }

    /// Floats that [stretches](Micro::stretches) of one sequence of so many `positions` leave to
    /// each other, in training or without, on a device of this kind; 0: it walks all at once, or they
    /// leave nothing.
    fn carried_len(&self, _positions: usize, _trains: bool, _of: Dtype) -> usize {
        0
    }

    /// Floats that what it keeps for one sequence of `positions` takes, when it is to keep this, on a
    /// device of this kind.
    fn kept_len(&self, positions: usize, keep: Keep, of: Dtype) -> usize;

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
            Some(last) => last.len += range.len(),
            None => views.push(block.part(range)),
        }
    }
    views
}

/// Elements of a block with these tensors.
pub fn block_len(tensors: &[Tensor]) -> usize {
    tensor_ranges(tensors).last().map_or(0, |range| range.end.next_multiple_of(16))
}
