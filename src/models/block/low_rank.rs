//! The adapters of a block's products, forward and backward.
//!
//! An adapter recomputes the little that its backward needs from the product's input.

use super::TransformerBlock;
use super::backward::ChunkGradients;
use super::chunk::ChunkPass;
use super::tensors::{Adapter, Product};
use crate::kernels::{AddColumns, ApplyDropout, Dropout, Linear, LinearBackward, TakeColumns};
use crate::models::adapters::Adapters;
use crate::tensor::{Scratch, View};

/// Workspace of adapters, in vectors as long as the largest of them needs.
#[derive(Clone, Copy)]
pub(super) struct Buffers {
    /// What A reads: the product's input behind dropout. (R, C).
    dropped: View,
    /// What B reads. (R, r).
    low: View,
    /// What B writes. (R, outputs).
    sum: View,
}

/// The dropouts of adapters are numbered apart from those of layers.
const FIRST_INDEX: u32 = 1 << 24;

impl Buffers {
    /// Workspace for so many rows, if a block has adapters.
    pub(super) fn take(
        block: &TransformerBlock,
        rows: usize,
        scratch: &Scratch<'_>,
    ) -> Option<Buffers> {
        let Adapters { rank, .. } = block.adapters.as_ref()?;
        let modules = block.modules();
        let outputs =
            modules.iter().flat_map(|modules| &modules.parts).map(|(_, outputs)| *outputs);
        let inputs = modules.iter().map(|modules| modules.inputs);
        Some(Buffers {
            dropped: scratch.take(rows, inputs.max()?),
            low: scratch.take(rows, *rank),
            sum: scratch.take(rows, outputs.max()?),
        })
    }
}

/// The first rows of so many columns in a vector.
fn columns(vector: View, rows: usize, columns: usize) -> View {
    vector.part(0..rows * columns).with_columns(columns)
}

impl ChunkPass<'_> {
    /// The dropout of what an adapter reads.
    fn adapter_dropout(&self, adapters: &Adapters, site: u32) -> Option<Dropout<'_>> {
        self.batch.dropout(adapters.dropout, FIRST_INDEX + self.block.index, site)
    }

    /// What A and B of an adapter read.
    fn adapter_inputs(&self, adapters: &Adapters, one: &Adapter<View>, x: View) -> [View; 2] {
        let Buffers { dropped, low, .. } = self.low_rank.expect("a block with adapters has them");
        let mut input = x;
        let dropout = self.adapter_dropout(adapters, one.site);
        if dropout.is_some() {
            input = columns(dropped, x.rows, x.columns);
            self.k.dropout(&ApplyDropout { y: input, x, dropout });
        }
        let op = Linear { y: low, x: input, w: one.a, bias: None, transposed: true };
        self.k.linear(&op);
        [input, low]
    }

    /// Adds what a product's adapters compute to its output.
    pub(super) fn add_adapters(&self, y: View, x: View, product: &Product<View>) {
        let (Some(adapters), Some(buffers)) = (&self.block.adapters, self.low_rank) else { return };
        for one in &product.adapters {
            let [_, low] = self.adapter_inputs(adapters, one, x);
            let sum = columns(buffers.sum, x.rows, one.outputs);
            let op = Linear { y: sum, x: low, w: one.b, bias: None, transposed: true };
            self.k.linear(&op);
            let (first, scale) = (one.first, adapters.scale);
            self.k.add_columns(&AddColumns { y, x: sum, first, scale });
        }
    }

    /// Adds to `dx` what a product's adapters do, and computes the gradients of their tensors.
    pub(super) fn adapters_backward(
        &self,
        g: &ChunkGradients<'_>,
        [dx, dy, x]: [View; 3],
        (w, d): (&Product<View>, &Product<Option<View>>),
        scratch: &Scratch<'_>,
    ) {
        let (Some(adapters), Some(buffers)) = (&self.block.adapters, self.low_rank) else { return };
        for (one, d) in w.adapters.iter().zip(&d.adapters) {
            let scratch = &scratch.nested();
            let [input, low] = self.adapter_inputs(adapters, one, x);
            let dsum = columns(buffers.sum, x.rows, one.outputs);
            let (first, scale) = (one.first, adapters.scale);
            self.k.take_columns(&TakeColumns { y: dsum, x: dy, first, scale });
            let (dlow, dinput) = (scratch.take_like(low), scratch.take_like(x));
            let product = |dx, dw, dy, x, w| LinearBackward {
                dx,
                dw,
                dbias: None,
                dy,
                x,
                w,
                transposed: true,
                accumulate: g.accumulate,
            };
            self.k.linear_backward(&product(dlow, d.b, dsum, low, one.b), scratch);
            self.k.linear_backward(&product(dinput, d.a, dlow, input, one.a), scratch);
            let dropout = self.adapter_dropout(adapters, one.site);
            if dropout.is_some() {
                self.k.dropout(&ApplyDropout { y: dinput, x: dinput, dropout });
            }
            self.k.add_columns(&AddColumns { y: dx, x: dinput, first: 0, scale: 1.0 });
        }
    }
}
