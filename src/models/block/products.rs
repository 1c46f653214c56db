//! The products of a block with their activation functions and adapters, forward and backward.

use super::TransformerBlock;
use super::tensors::{Mlp, Product};
use crate::kernels::{
    Activate, ActivateBackward, ApplyDropout, BiasRows, Dropout, Gate, GateBackward, Kernels,
    Linear, LinearBackward, RowDots, RowWeights, SumRows, WeighRows,
};
use crate::models::low_rank::LowRank;
use crate::models::norms::Affine;
use crate::models::shape::Shape;
use crate::tensor::{Scratch, View};

/// Runs the products of a block on the rows of a chunk.
pub(super) struct Products<'a> {
    pub(super) block: &'a TransformerBlock,
    pub(super) k: &'a dyn Kernels,
    /// The adapters, if the block has any.
    pub(super) low_rank: Option<LowRank<'a>>,
}

/// A feed-forward on some rows, for its backward.
#[derive(Clone, Copy)]
pub(super) struct MlpPass<'a> {
    pub(super) w: &'a Mlp<View>,
    pub(super) d: &'a Mlp<Option<View>>,
    /// Its input. (N, C).
    pub(super) x: View,
    /// What stands before the activation function. (N, I or 2 I).
    pub(super) up: View,
    /// What stands behind it. (N, I).
    pub(super) activated: View,
    /// The weights of its rows, if it is an expert's.
    pub(super) weighted: Option<Weighted>,
    /// True to add to the gradients of its tensors; false to overwrite them.
    pub(super) accumulate: bool,
}

/// Rows whose outputs are multiplied by weights.
#[derive(Clone, Copy)]
pub(super) struct Weighted {
    pub(super) weights: RowWeights,
    /// The place for the gradients of the weights. (R, k).
    pub(super) dchosen: View,
}

/// The backward of a product with some weights, whose gradients are `d`.
#[derive(Clone, Copy)]
pub(super) struct ProductBackward<'a> {
    pub(super) dx: View,
    pub(super) d: &'a Product<Option<View>>,
    pub(super) dy: View,
    pub(super) x: View,
    pub(super) w: &'a Product<View>,
    /// The place for the gradient of the bias. `None`: it is not computed here.
    pub(super) dbias: Option<View>,
    /// The activation function behind the product. Then `dy` is the gradient of its output, and its
    /// backward runs first and overwrites `dy`.
    pub(super) activate: Option<ActivateBackward>,
    /// True to add to `d`; false to overwrite it.
    pub(super) accumulate: bool,
}

impl Products<'_> {
    pub(super) fn linear(&self, y: View, x: View, product: &Product<View>) {
        let Affine { weight: w, bias } = product.affine;
        let transposed = product.transposed;
        self.k.linear(&Linear { y, x, w, bias, transposed });
        if let Some(low_rank) = &self.low_rank {
            low_rank.add(y, x, &product.adapters);
        }
    }

    /// The feed-forward's activation function, gated or not.
    pub(super) fn activate(&self, y: View, x: View) {
        let Shape { gated, activation, .. } = self.block.shape;
        if gated {
            self.k.gate(&Gate { y, x, form: self.block.shape.gate_form() });
        } else {
            self.k.activate(&Activate { y, x, activation });
        }
    }

    /// The gradient of a feed-forward's input, to `dx`, from that of its output. Both may be one.
    ///
    /// Where outputs are weighted, the input of the second product is weighted instead. So the
    /// gradient of a weight needs no output: it is the product of that input with its gradient.
    pub(super) fn mlp_backward(
        &self,
        mlp: MlpPass<'_>,
        [dx, dy]: [View; 2],
        scratch: &Scratch<'_>,
    ) {
        let k = self.k;
        let Shape { gated, activation, .. } = self.block.shape;
        let MlpPass { w, d, x, up, activated, weighted, accumulate } = mlp;
        let dup = scratch.take_like(up);
        let mut dactivated = if gated { scratch.take_like(activated) } else { dup };
        let mut input = activated;
        if let Some(Weighted { weights, .. }) = weighted {
            input = scratch.take_like(activated);
            k.weigh_rows(&WeighRows { y: input, x: activated, weights });
        }
        let down = ProductBackward {
            dx: dactivated,
            d: &d.down,
            dy,
            x: input,
            w: &w.down,
            dbias: d.down.bias().filter(|_| weighted.is_none()),
            activate: None,
            accumulate,
        };
        self.backward(&down, scratch);
        if let Some(Weighted { weights, dchosen }) = weighted {
            let places = weights.places;
            let bias = w.down.affine.bias.map(|bias| BiasRows { dy, bias });
            k.row_dots(&RowDots { out: dchosen, x: dactivated, y: activated, places, bias });
            if let Some(y) = d.down.bias() {
                k.sum_rows(&SumRows { y, x: dy, weights, accumulate });
            }
            k.weigh_rows(&WeighRows { y: input, x: dactivated, weights });
            dactivated = input;
        }
        if gated {
            let form = self.block.shape.gate_form();
            k.gate_backward(&GateBackward { dx: dup, dy: dactivated, x: up, form });
        }
        let activate = (!gated).then_some(ActivateBackward { dx: dup, x: up, activation });
        let dbias = d.up.bias();
        let op =
            ProductBackward { dx, d: &d.up, dy: dup, x, w: &w.up, dbias, activate, accumulate };
        self.backward(&op, scratch);
    }

    /// The backward of the dropout of a branch's output, to `dx`. Without dropout it returns `dy`.
    pub(super) fn dropout_backward(
        &self,
        dx: View,
        dy: View,
        dropout: Option<Dropout<'_>>,
    ) -> View {
        if dropout.is_none() {
            return dy;
        }
        self.k.dropout(&ApplyDropout { y: dx, x: dy, dropout });
        dx
    }

    /// The gradients of a product's input, weights and adapters.
    pub(super) fn backward(&self, op: &ProductBackward<'_>, scratch: &Scratch<'_>) {
        let ProductBackward { dx, d, dy, x, w, dbias, activate, accumulate } = *op;
        let op = LinearBackward {
            dx,
            dw: d.affine.weight,
            dbias,
            dy,
            x,
            w: w.affine.weight,
            transposed: w.transposed,
            accumulate,
        };
        match activate {
            Some(activate) => self.k.activate_linear_backward(&activate, &op, scratch),
            None => self.k.linear_backward(&op, scratch),
        }
        if let Some(low_rank) = &self.low_rank {
            low_rank.backward([dx, dy, x], &w.adapters, &d.adapters, accumulate, scratch);
        }
    }
}
