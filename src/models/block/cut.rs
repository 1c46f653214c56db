//! The cut of a block's tensors into slices: which rows and columns of each tensor a slice has
//! (Shoeybi et al. 2019). A slice's tensors are packed, so that its products are those of a smaller
//! block.

use std::ops::Range;

use super::TransformerBlock;
use super::tensors::{FeedForward, Mlp, Product, Tensors};
use crate::kernels::{AddColumns, Cast, Clear, CopyColumns, Kernels};
use crate::models::low_rank::Adapter;
use crate::models::norms::Affine;
use crate::models::shape::Shape;
use crate::tensor::{Dtype, Scratch, View};

/// A slice's part of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Part {
    /// These rows, one range behind the other.
    Rows(Vec<Range<usize>>),
    /// These columns, one range behind the other.
    Columns(Vec<Range<usize>>),
    /// All of it, and no other slice has any.
    Alone,
    /// All of it, as every slice. Its gradient is the sum of the slices' gradients.
    Shared,
}

/// The cut of a product between its inputs and its outputs.
enum ProductCut {
    /// By outputs: ranges that lie one behind the other in a slice.
    Outputs(Vec<Range<usize>>),
    /// By inputs. The slices' outputs are partial sums, and the first slice has the bias.
    Inputs { range: Range<usize>, is_first: bool },
}

impl<V: Copy> Product<V> {
    /// The product of a slice, with what `of` makes of each tensor and its part.
    fn cut<W>(&self, cut: &ProductCut, of: &mut dyn FnMut(V, Part) -> W) -> Product<W> {
        let Affine { weight, bias } = self.affine;
        let transposed = self.transposed;
        let by = |ranges: &[Range<usize>], rows: bool| match rows {
            true => Part::Rows(ranges.to_vec()),
            false => Part::Columns(ranges.to_vec()),
        };
        let (affine, adapters) = match cut {
            ProductCut::Outputs(ranges) => {
                let weight = of(weight, by(ranges, transposed));
                let bias = bias.map(|bias| of(bias, by(ranges, false)));
                let adapters = self.adapters.iter().map(|one| one.with_outputs(ranges, of));
                (Affine { weight, bias }, adapters.collect())
            }
            ProductCut::Inputs { range, is_first } => {
                let ranges = std::slice::from_ref(range);
                let weight = of(weight, by(ranges, !transposed));
                let bias = bias.filter(|_| *is_first).map(|bias| of(bias, Part::Alone));
                let adapters = self
                    .adapters
                    .iter()
                    .map(|one| one.with(of(one.a, by(ranges, false)), of(one.b, Part::Shared)));
                (Affine { weight, bias }, adapters.collect())
            }
        };
        Product { affine, adapters, transposed }
    }
}

impl<V: Copy> Adapter<V> {
    /// The adapter of a slice that has these outputs of the product.
    fn with_outputs<W>(
        &self,
        ranges: &[Range<usize>],
        of: &mut dyn FnMut(V, Part) -> W,
    ) -> Adapter<W> {
        let own = self.first..self.first + self.outputs;
        let mut rows = Vec::new();
        let mut before = 0;
        let mut first = 0;
        for range in ranges {
            let from = range.start.max(own.start);
            let to = range.end.min(own.end);
            if from < to {
                if rows.is_empty() {
                    first = before + from - range.start;
                }
                rows.push(from - own.start..to - own.start);
            }
            before += range.len();
        }
        let outputs = rows.iter().map(Range::len).sum();
        let one = self.with(of(self.a, Part::Shared), of(self.b, Part::Rows(rows)));
        Adapter { first, outputs, ..one }
    }
}

/// The part of `whole` that a slice has.
fn share(whole: usize, slice: usize, slices: usize) -> Range<usize> {
    let each = whole / slices;
    slice * each..(slice + 1) * each
}

/// A range behind `by` others.
fn behind(range: &Range<usize>, by: usize) -> Range<usize> {
    range.start + by..range.end + by
}

impl TransformerBlock {
    /// A slice of the block: a block with some of its heads and channels of its feed-forward.
    pub(super) fn slice(&self, slice: usize) -> TransformerBlock {
        let Shape { slices, heads, kv_heads, intermediate, .. } = self.shape;
        let shape = Shape {
            heads: heads / slices,
            kv_heads: kv_heads / slices,
            intermediate: intermediate / slices,
            slices: 1,
            ..self.shape
        };
        let first_head = slice * shape.heads;
        TransformerBlock { shape, first_head, adapters: None, ..self.clone() }
    }

    /// The outputs of the projection that belong to a slice: its heads of queries, of keys, of
    /// values.
    fn qkv_of(&self, slice: usize) -> Vec<Range<usize>> {
        let Shape { slices, heads, kv_heads, head_size: d, qkv_by_head, .. } = self.shape;
        if qkv_by_head {
            return vec![share(3 * heads * d, slice, slices)];
        }
        let queries = share(heads * d, slice, slices);
        let keys = share(kv_heads * d, slice, slices);
        let of_keys = behind(&keys, heads * d);
        let of_values = behind(&keys, (heads + kv_heads) * d);
        vec![queries, of_keys, of_values]
    }

    /// The outputs of the first product of the feed-forward that belong to a slice: channels of the
    /// gate, and the same channels of what is gated.
    fn up_of(&self, slice: usize) -> Vec<Range<usize>> {
        let Shape { slices, intermediate, gated, .. } = self.shape;
        let channels = share(intermediate, slice, slices);
        let of_gated = gated.then(|| behind(&channels, intermediate));
        [channels].into_iter().chain(of_gated).collect()
    }

    /// The tensors of a slice's attention, with what `of` makes of each and its part. The norms are
    /// those of the whole block.
    pub(super) fn attention_of<V: Copy, W, E, F>(
        &self,
        slice: usize,
        whole: &Tensors<V, E>,
        of: &mut dyn FnMut(V, Part) -> W,
    ) -> Tensors<W, F> {
        let Shape { slices, heads, head_size, .. } = self.shape;
        let columns = share(heads * head_size, slice, slices);
        let of_output = ProductCut::Inputs { range: columns, is_first: slice == 0 };
        let own_heads = Part::Columns(vec![share(heads, slice, slices)]);
        let mut norm = |norm: Affine<V>| Affine {
            weight: of(norm.weight, Part::Alone),
            bias: norm.bias.map(|shift| of(shift, Part::Alone)),
        };
        let [norm1, norm2] = [whole.norm1, whole.norm2].map(&mut norm);
        Tensors {
            norm1,
            qkv: whole.qkv.cut(&ProductCut::Outputs(self.qkv_of(slice)), of),
            qk_norm: whole.qk_norm.map(|norms| norms.map(|norm| of(norm, Part::Shared))),
            projection: whole.projection.cut(&of_output, of),
            norm2,
            feed_forward: FeedForward::Apart,
            branch_norms: None,
            sinks: whole.sinks.map(|sinks| of(sinks, own_heads)),
            linear: None,
        }
    }

    /// The tensors of a slice's feed-forward, with what `of` makes of each and its part.
    pub(super) fn mlp_of<V: Copy, W>(
        &self,
        slice: usize,
        whole: &Mlp<V>,
        of: &mut dyn FnMut(V, Part) -> W,
    ) -> Mlp<W> {
        let range = share(self.shape.intermediate, slice, self.shape.slices);
        let down = ProductCut::Inputs { range, is_first: slice == 0 };
        Mlp {
            up: whole.up.cut(&ProductCut::Outputs(self.up_of(slice)), of),
            down: whole.down.cut(&down, of),
        }
    }
}

/// Copies a slice's tensors to workspace, and their gradients back.
pub(super) struct Packer<'p> {
    pub(super) k: &'p dyn Kernels,
    pub(super) scratch: &'p Scratch<'p>,
}

impl Packer<'_> {
    /// A slice's part of a weight, packed.
    pub(super) fn weight(&self, x: View, part: &Part) -> View {
        let y = match part {
            Part::Alone | Part::Shared => return x,
            Part::Rows(ranges) => self.take(x, ranges.iter().map(Range::len).sum(), x.columns),
            Part::Columns(ranges) => self.take(x, x.rows, ranges.iter().map(Range::len).sum()),
        };
        self.copy(y, x, part, false);
        y
    }

    /// Room for a part of a view.
    fn take(&self, x: View, rows: usize, columns: usize) -> View {
        match x.dtype {
            Dtype::F32 => self.scratch.take_floats(rows, columns),
            _ => self.scratch.take(rows, columns),
        }
    }

    /// Copies a part of `x` to the packed `y`; or, `back`, the packed part to its place.
    fn copy(&self, y: View, x: View, part: &Part, back: bool) {
        let mut to = 0;
        match part {
            Part::Alone | Part::Shared => {}
            Part::Rows(ranges) => {
                for range in ranges {
                    let packed = y.row_range(to..to + range.len());
                    let own = x.row_range(range.clone());
                    let [y, x] = if back { [own, packed] } else { [packed, own] };
                    self.k.cast(&Cast { y, x });
                    to += range.len();
                }
            }
            Part::Columns(ranges) => {
                for range in ranges {
                    let columns = range.len();
                    let from = range.start;
                    self.k.copy_columns(&match back {
                        true => CopyColumns { y: x, x: y, to: from, from: to, columns },
                        false => CopyColumns { y, x, to, from, columns },
                    });
                    to += columns;
                }
            }
        }
    }
}

/// The gradients of a slice while its backward runs.
pub(super) struct PackedGradients<'p> {
    pub(super) packer: Packer<'p>,
    /// Room for the gradients of what the slices share.
    pub(super) shared: Scratch<'p>,
    /// True if the gradients of the block hold contributions already.
    pub(super) accumulate: bool,
    /// Packed gradients, and the gradients and parts that they are of.
    pub(super) packed: Vec<(View, View, Part)>,
}

impl PackedGradients<'_> {
    /// The place for the gradient of a slice's part of a tensor, with what it holds already.
    pub(super) fn of(&mut self, d: View, part: Part) -> View {
        let Packer { k, .. } = self.packer;
        match &part {
            Part::Alone => d,
            Part::Shared => {
                let own = self.shared.take_floats(d.rows, d.columns);
                if self.accumulate {
                    k.clear(&Clear { y: own });
                }
                own
            }
            Part::Rows(ranges) | Part::Columns(ranges) => {
                let count = ranges.iter().map(Range::len).sum();
                let is_of_rows = matches!(part, Part::Rows(_));
                let [rows, columns] = if is_of_rows { [count, d.columns] } else { [d.rows, count] };
                let packed = self.packer.take(d, rows, columns);
                if self.accumulate {
                    self.packer.copy(packed, d, &part, false);
                }
                self.packed.push((packed, d, part));
                packed
            }
        }
    }

    /// Puts the packed gradients in their places.
    pub(super) fn unpack(self) {
        for (packed, d, part) in &self.packed {
            self.packer.copy(*packed, *d, part, true);
        }
    }
}

/// Floats of the gradients of these tensors that slices share, for one slice.
pub(super) fn shared_len(shared: &[View]) -> usize {
    shared.iter().map(|d| d.len().next_multiple_of(crate::tensor::ALIGNED)).sum()
}

/// Adds the slices' gradients of what they share, in the order of the slices. `all` has a row for
/// each slice.
pub(super) fn add_shared(k: &dyn Kernels, shared: &[View], all: View, accumulate: bool) {
    let mut at = 0;
    for &d in shared {
        let of = |slice: usize| {
            let from = slice * all.columns + at;
            all.part(from..from + d.len()).with_columns(d.columns)
        };
        let sum = of(0);
        let add = |y, x| k.add_columns(&AddColumns { y, x, first: 0, scale: 1.0 });
        (1..all.rows).for_each(|slice| add(sum, of(slice)));
        if accumulate {
            add(d, sum);
        } else {
            k.cast(&Cast { y: d, x: sum });
        }
        at += d.len().next_multiple_of(crate::tensor::ALIGNED);
    }
}
