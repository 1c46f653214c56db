//! The adapters of a layer's products, forward and backward.
//!
//! The backward of an adapter recomputes its activations from the product's input: they are small.

use super::adapters::{AdaptedModule, Adapters};
use crate::kernels::{
    AddColumns, ApplyDropout, BatchView, Cast, Dropout, Kernels, Linear, LinearBackward, MaskRows,
    TakeColumns,
};
use crate::tensor::{Dtype, Scratch, View};

/// The adapter of one module of a product.
#[derive(Clone, Copy)]
pub(super) struct Adapter<V> {
    /// (r, C).
    pub(super) a: V,
    /// (outputs, r).
    pub(super) b: V,
    /// r.
    pub(super) rank: usize,
    /// s: the factor of the adapter's output.
    pub(super) scale: f32,
    /// The module's first column in the product's output.
    pub(super) first: usize,
    /// The number of the module's columns.
    pub(super) outputs: usize,
    /// The index of the module in its layer, for dropout.
    pub(super) site: u32,
}

impl<V> Adapter<V> {
    /// The same adapter with other tensors.
    pub(super) fn with<W>(&self, a: W, b: W) -> Adapter<W> {
        let Adapter { rank, scale, first, outputs, site, .. } = *self;
        Adapter { a, b, rank, scale, first, outputs, site }
    }
}

/// The adapters of a layer on a micro-batch or a chunk, with their workspace.
#[derive(Clone, Copy)]
pub(super) struct LowRank<'a> {
    k: &'a dyn Kernels,
    adapters: &'a Adapters,
    batch: BatchView<'a>,
    /// The layer's index, for dropout.
    index: u32,
    /// Whether the rows of products are sequences instead of positions.
    of_sequences: bool,
    /// The input of A: the product's input behind dropout. (R, C).
    dropped: View,
    /// The input of B. (R, r), with the highest rank of the layer.
    low: View,
    /// Floats that hold the output of B. (R, outputs).
    sum: View,
}

/// The size of a product: (rows, inputs) by (inputs, outputs).
#[derive(Clone, Copy)]
pub(super) struct ProductSize {
    pub(super) rows: usize,
    pub(super) inputs: usize,
    pub(super) outputs: usize,
}

/// Added to a layer's index for the dropout of its adapters, so that their masks are others.
const FIRST_INDEX: u32 = 1 << 24;

/// The first `rows` × `columns` elements of a vector.
fn columns(vector: View, rows: usize, columns: usize) -> View {
    vector.part(0..rows * columns).with_columns(columns)
}

impl<'a> LowRank<'a> {
    /// Takes the workspace that products of up to this size need. `index` is that of the layer.
    pub(super) fn new(
        k: &'a dyn Kernels,
        adapters: &'a Adapters,
        batch: BatchView<'a>,
        index: u32,
        size: ProductSize,
        scratch: &Scratch<'_>,
    ) -> LowRank<'a> {
        let ProductSize { rows, inputs, outputs } = size;
        let [dropped, low] =
            [inputs, adapters.most_rank()].map(|columns| scratch.take(rows, columns));
        let sum = scratch.take_floats(1, scratch.dtype().floats(rows * outputs));
        LowRank { k, adapters, batch, index, of_sequences: false, dropped, low, sum }
    }

    /// The place of the output of B, of this dtype.
    fn sum(&self, rows: usize, columns: usize, dtype: Dtype) -> View {
        self.sum.hold(rows, columns, dtype)
    }

    /// Adapters of products whose rows are sequences.
    pub(super) fn of_sequences(self) -> LowRank<'a> {
        LowRank { of_sequences: true, ..self }
    }

    /// The dropout of an adapter's input.
    fn dropout(&self, site: u32) -> Option<Dropout<'a>> {
        let dropout = self.batch.dropout(self.adapters.dropout, FIRST_INDEX + self.index, site)?;
        let rows = if self.of_sequences { MaskRows::Sequences } else { dropout.rows };
        Some(Dropout { rows, ..dropout })
    }

    /// The inputs of A and B of an adapter.
    fn inputs(&self, one: &Adapter<View>, x: View) -> [View; 2] {
        let low = columns(self.low, x.rows, one.rank);
        let mut input = x;
        let dropout = self.dropout(one.site);
        if dropout.is_some() {
            input = columns(self.dropped, x.rows, x.columns);
            self.k.dropout(&ApplyDropout { y: input, x, dropout });
        }
        let op = Linear { y: low, x: input, w: one.a, bias: None, transposed: true };
        self.k.linear(&op);
        [input, low]
    }

    /// Adds the outputs of a product's adapters to the product's output.
    pub(super) fn add(&self, y: View, x: View, adapters: &[Adapter<View>]) {
        for one in adapters {
            let [_, low] = self.inputs(one, x);
            let sum = self.sum(x.rows, one.outputs, y.dtype);
            let op = Linear { y: sum, x: low, w: one.b, bias: None, transposed: true };
            self.k.linear(&op);
            let Adapter { first, scale, .. } = *one;
            self.k.add_columns(&AddColumns { y, x: sum, first, scale });
        }
    }

    /// Adds the contribution of a product's adapters to `dx`, and computes the gradients of their
    /// tensors.
    pub(super) fn backward(
        &self,
        [dx, dy, x]: [View; 3],
        w: &[Adapter<View>],
        d: &[Adapter<Option<View>>],
        accumulate: bool,
        scratch: &Scratch<'_>,
    ) {
        for (one, d) in w.iter().zip(d) {
            let scratch = &scratch.nested();
            let [input, low] = self.inputs(one, x);
            let dsum = self.sum(x.rows, one.outputs, dy.dtype);
            let Adapter { first, scale, .. } = *one;
            self.k.take_columns(&TakeColumns { y: dsum, x: dy, first, scale });
            let dlow = scratch.take_like(low);
            let dinput = scratch.take_like(x);
            let product = |dx, dw, dy, x, w| LinearBackward {
                dx,
                dw,
                dbias: None,
                dy,
                x,
                w,
                transposed: true,
                accumulate,
            };
            self.k.linear_backward(&product(dlow, d.b, dsum, low, one.b), scratch);
            self.k.linear_backward(&product(dinput, d.a, dlow, input, one.a), scratch);
            let dropout = self.dropout(one.site);
            if dropout.is_some() {
                self.k.dropout(&ApplyDropout { y: dinput, x: dinput, dropout });
            }
            let mut added = dinput;
            if dx.dtype != dinput.dtype {
                added = scratch.take_floats(dx.rows, dx.columns);
                self.k.cast(&Cast { y: added, x: dinput });
            }
            self.k.add_columns(&AddColumns { y: dx, x: added, first: 0, scale: 1.0 });
        }
    }
}

impl Adapters {
    /// The adapter of the only module of a product, whose two tensors begin here among a layer's.
    pub(super) fn only<V: Copy>(&self, views: &[V], at: usize, outputs: usize) -> [Adapter<V>; 1] {
        let AdaptedModule { rank, scale, .. } = self.modules[0];
        [Adapter { a: views[at], b: views[at + 1], rank, scale, first: 0, outputs, site: 0 }]
    }
}
