//! The third branch of a block with an input of its own (Gemma Team 2026): a gate of hidden states
//! multiplies the input, and a product of that, which is normed, is added to them.
//!
//! The backward computes the branch again: it has few channels.

use super::TransformerBlock;
use super::backward::ChunkGradients;
use super::chunk::ChunkPass;
use super::products::ProductBackward;
use super::tensors::{Modules, Product};
use crate::kernels::{CopyColumns, Gate, GateBackward, GateForm, Residual, TakeColumns};
use crate::models::families::InputNames;
use crate::models::layer::Tensor;
use crate::models::norms::{Affine, AffineBackward};
use crate::tensor::{Scratch, View};

/// The tensors of the branch, or their gradients.
pub(super) struct InputTensors<V> {
    pub(super) gate: Product<V>,
    pub(super) output: Product<V>,
    pub(super) norm: Affine<V>,
}

/// What the branch computes.
struct InputBranch {
    /// The gate, before its activation function, and the input beside it. (R, 2 P).
    gated: View,
    /// The product of both. (R, P).
    activated: View,
    /// (R, C).
    output: View,
    /// The output's norm. (R, C).
    normed: View,
    /// (R, 2).
    statistics: View,
}

impl TransformerBlock {
    /// The modules of the branch: its gate, and its output.
    pub(super) fn input_modules(&self) -> Option<[Modules; 2]> {
        let channels = self.shape.block_inputs?.channels;
        let InputNames { gate, output, .. } = self.shape.names.inputs;
        let hidden = self.shape.hidden;
        let of = |inputs, onto| self.product_of(inputs, false, onto);
        Some([
            self.product_modules(&[(gate, channels)], None, of(hidden, false)),
            self.product_modules(&[(output, hidden)], None, of(channels, true)),
        ])
    }

    /// The tensors of the branch, without adapters.
    pub(super) fn input_tensors(&self) -> Vec<Tensor> {
        let Some(modules) = self.input_modules() else { return Vec::new() };
        let products = modules.iter().flat_map(|modules| self.product_tensors(modules));
        let name = self.name(self.shape.names.inputs.output_norm);
        let norm = self.shape.norm_tensors(&name, self.shape.hidden, false);
        products.chain(norm).collect()
    }

    fn input_form(&self) -> GateForm {
        GateForm::Plain(self.shape.activation)
    }
}

impl ChunkPass<'_> {
    fn input_branch(&self, x: View, w: &InputTensors<View>, scratch: &Scratch<'_>) -> InputBranch {
        let ChunkPass { block, k, own, .. } = *self;
        let input = own.input.expect("the step declares it");
        let [rows, columns] = input.shape();
        let gate = scratch.take_like(input);
        let gated = scratch.take(rows, 2 * columns);
        let activated = scratch.take_like(input);
        let [output, normed] = [(); 2].map(|()| scratch.take_like(x));
        let statistics = scratch.take_floats(rows, 2);
        self.products.linear(gate, x, &w.gate);
        for (to, x) in [(0, gate), (columns, input)] {
            k.copy_columns(&CopyColumns { y: gated, x, to, from: 0, columns });
        }
        k.gate(&Gate { y: activated, x: gated, form: block.input_form() });
        self.products.linear(output, activated, &w.output);
        self.norm(normed, statistics, output, w.norm);
        InputBranch { gated, activated, output, normed, statistics }
    }

    /// Adds the output of the branch to hidden states, to `y`.
    pub(super) fn add_input(
        &self,
        y: View,
        x: View,
        w: &InputTensors<View>,
        scratch: &Scratch<'_>,
    ) {
        let InputBranch { normed, .. } = self.input_branch(x, w, scratch);
        self.k.residual(&Residual { y, a: x, x: normed, dropout: None });
    }

    /// The gradient of the hidden states `x` that the branch is added to. That of its input goes to
    /// its place, if a layer below needs it.
    pub(super) fn input_backward_to(
        &self,
        g: &ChunkGradients<'_>,
        x: View,
        w: &InputTensors<View>,
        d: &InputTensors<Option<View>>,
        scratch: &Scratch<'_>,
    ) -> View {
        let ChunkPass { block, k, own, .. } = *self;
        let dx = scratch.take_like(x);
        let scratch = &scratch.nested();
        let branch = self.input_branch(x, w, scratch);
        let columns = branch.activated.columns;
        let doutput = branch.normed; // nothing reads it any more
        let op = AffineBackward {
            dx: doutput,
            d: d.norm,
            dy: g.dy,
            x: branch.output,
            statistics: branch.statistics,
            w: w.norm,
            residual: None,
        };
        self.norm_backward(g, &op, scratch);
        let dactivated = scratch.take_like(branch.activated);
        let backward = |dx, d, dy, x, w| {
            let accumulate = g.accumulate;
            let op = ProductBackward { dx, d, dy, x, w, dbias: None, activate: None, accumulate };
            self.products.backward(&op, scratch);
        };
        backward(dactivated, &d.output, doutput, branch.activated, &w.output);
        let dgated = scratch.take_like(branch.gated);
        let form = block.input_form();
        k.gate_backward(&GateBackward { dx: dgated, dy: dactivated, x: branch.gated, form });
        if let Some(y) = own.dinput {
            k.take_columns(&TakeColumns { y, x: dgated, first: columns, scale: 1.0 });
        }
        let dgate = dactivated;
        k.take_columns(&TakeColumns { y: dgate, x: dgated, first: 0, scale: 1.0 });
        backward(dx, &d.gate, dgate, x, &w.gate);
        k.residual(&Residual { y: dx, a: g.dy, x: dx, dropout: None });
        dx
    }
}
