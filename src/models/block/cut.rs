//! The cut of a block's tensors into slices: which rows and columns of each tensor a slice has
//! (Shoeybi et al. 2019). A slice's tensors are packed, so that its products are those of a smaller
//! block.

use std::ops::Range;

use super::TransformerBlock;
use super::tensors::{FeedForward, Mlp, Product, Tensors};
use crate::kernels::{Cast, Clear, CopyColumns, Kernels, QkNorm};
use crate::models::low_rank::Adapter;
use crate::models::norms::Affine;
use crate::models::portions::Part;
use crate::models::shape::Shape;
use crate::tensor::{ALIGNED, Dtype, Scratch, View};

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

impl<V, E> Tensors<V, E> {
    /// The feed-forward of a block that is cut.
    pub(super) fn mlp(&self) -> &Mlp<V> {
        let FeedForward::Dense(mlp) = &self.feed_forward else {
            unreachable!("blocks with experts are not cut")
        };
        mlp
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
            pieces: 1,
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
        let Shape { slices, heads, kv_heads, head_size, qk_norm, .. } = self.shape;
        let columns = share(heads * head_size, slice, slices);
        let of_output = ProductCut::Inputs { range: columns, is_first: slice == 0 };
        let own_heads = Part::Columns(vec![share(heads, slice, slices)]);
        let of_norm = |heads| match qk_norm {
            // Each head has scales of its own.
            Some(QkNorm::LayerNorm) => Part::Rows(vec![share(heads, slice, slices)]),
            Some(QkNorm::ByHead | QkNorm::Joint) | None => Part::Shared,
        };
        let mut norm = |norm: Affine<V>| Affine {
            weight: of(norm.weight, Part::Alone),
            bias: norm.bias.map(|shift| of(shift, Part::Alone)),
        };
        let [norm1, norm2] = [whole.norm1, whole.norm2].map(&mut norm);
        Tensors {
            norm1,
            qkv: whole.qkv.cut(&ProductCut::Outputs(self.qkv_of(slice)), of),
            qk_norm: whole
                .qk_norm
                .map(|[query, key]| [of(query, of_norm(heads)), of(key, of_norm(kv_heads))]),
            projection: whole.projection.cut(&of_output, of),
            norm2,
            feed_forward: FeedForward::Apart,
            branch_norms: None,
            sinks: whole.sinks.map(|sinks| of(sinks, own_heads)),
            output_scalar: None,
            linear: None,
            input: None,
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
        if matches!(part, Part::Alone | Part::Shared) {
            return x;
        }
        let y = self.take(x, part);
        self.copy(y, x, part, false);
        y
    }

    /// Room for a part of a view.
    fn take(&self, x: View, part: &Part) -> View {
        let [rows, columns] = part.size_of(x.shape());
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

/// The gradients of a slice of a whole block while its backward runs.
pub(super) struct PackedGradients<'p> {
    packer: Packer<'p>,
    /// True if the gradients of the block hold contributions already.
    accumulate: bool,
    /// Packed gradients, and the gradients and parts that they are of.
    packed: Vec<(View, View, Part)>,
}

impl<'p> PackedGradients<'p> {
    pub(super) fn new(packer: Packer<'p>, accumulate: bool) -> PackedGradients<'p> {
        PackedGradients { packer, accumulate, packed: Vec::new() }
    }

    /// The place for the gradient of a slice's part of a tensor, with what it holds already.
    /// `own`: room for the slice's gradients of what slices share.
    pub(super) fn of(&mut self, d: View, part: Part, own: &SharedRoom<'_>) -> View {
        match part {
            Part::Alone => d,
            Part::Shared => own.take(d.shape()),
            Part::Rows(_) | Part::Columns(_) => {
                let packed = self.packer.take(d, &part);
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

/// Room for a slice's gradients of what slices share. They are not added to anything.
pub(super) struct SharedRoom<'s> {
    pub(super) k: &'s dyn Kernels,
    pub(super) room: Scratch<'s>,
    /// True if the slice's backward adds to its gradients.
    pub(super) accumulate: bool,
}

impl SharedRoom<'_> {
    /// The room for the next gradient.
    pub(super) fn take(&self, [rows, columns]: [usize; 2]) -> View {
        let y = self.room.take_floats(rows, columns);
        if self.accumulate {
            self.k.clear(&Clear { y });
        }
        y
    }
}

/// Floats of the gradients of tensors of these sizes, which slices share.
pub(super) fn shared_len(sizes: impl IntoIterator<Item = [usize; 2]>) -> usize {
    sizes.into_iter().map(|[rows, columns]| (rows * columns).next_multiple_of(ALIGNED)).sum()
}
