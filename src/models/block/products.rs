//! The products of a block with their activation functions and adapters, forward and backward.

use std::ops::Range;

use super::TransformerBlock;
use super::tensors::{Mlp, Product};
use crate::kernels::{
    Activate, ActivateBackward, ApplyDropout, BiasRows, Cast, Dropout, Gate, GateBackward, Kernels,
    Linear, LinearBackward, RowDots, RowWeights, Scale, SumRows, WeighRows,
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

/// Rows that have a feed-forward of their own, with its weights and gradients.
pub(super) struct MlpPart<'a> {
    pub(super) rows: Range<usize>,
    pub(super) w: &'a Mlp<View>,
    pub(super) d: &'a Mlp<Option<View>>,
}

/// A feed-forward on some rows, for its backward, or several experts, one behind the other.
#[derive(Clone, Copy)]
pub(super) struct MlpPass<'a> {
    pub(super) parts: &'a [MlpPart<'a>],
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

impl ProductBackward<'_> {
    fn linear(&self) -> LinearBackward {
        let ProductBackward { dx, d, dy, x, w, dbias, accumulate, .. } = *self;
        LinearBackward {
            dx,
            dw: d.affine.weight,
            dbias,
            dy,
            x,
            w: w.affine.weight,
            transposed: w.transposed,
            accumulate,
        }
    }
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

    /// Products with some rows each, at once.
    pub(super) fn linears(&self, y: View, x: View, parts: &[(Range<usize>, &Product<View>)]) {
        let of = |rows: &Range<usize>| [y, x].map(|view| view.row_range(rows.clone()));
        let ops = parts.iter().map(|(rows, product)| {
            let Affine { weight: w, bias } = product.affine;
            let [y, x] = of(rows);
            Linear { y, x, w, bias, transposed: product.transposed }
        });
        self.k.linears(&ops.collect::<Vec<_>>());
        let Some(low_rank) = &self.low_rank else { return };
        for (rows, product) in parts {
            let [y, x] = of(rows);
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
        let MlpPass { parts, x, up, activated, weighted, accumulate } = mlp;
        let dup = scratch.take_like(up);
        let mut dactivated = if gated { scratch.take_like(activated) } else { dup };
        let mut input = activated;
        if let Some(Weighted { weights, .. }) = weighted {
            input = scratch.take_like(activated);
            k.weigh_rows(&WeighRows { y: input, x: activated, weights });
        }
        let down = parts.iter().map(|MlpPart { rows, w, d }| {
            let [dx, dy, x] = [dactivated, dy, input].map(|view| view.row_range(rows.clone()));
            let dbias = d.down.bias().filter(|_| weighted.is_none());
            let w = &w.down;
            ProductBackward { dx, d: &d.down, dy, x, w, dbias, activate: None, accumulate }
        });
        self.backwards(&down.collect::<Vec<_>>(), scratch);
        if let Some(weighted) = weighted {
            self.weights_backward(&mlp, weighted, [dactivated, dy]);
            let weights = weighted.weights;
            k.weigh_rows(&WeighRows { y: input, x: dactivated, weights });
            dactivated = input;
        }
        if gated {
            let form = self.block.shape.gate_form();
            k.gate_backward(&GateBackward { dx: dup, dy: dactivated, x: up, form });
        } else if weighted.is_some() {
            k.cast(&Cast { y: dup, x: dactivated });
        }
        let up = parts.iter().map(|MlpPart { rows, w, d }| {
            let [dx, dy, x, up] = [dx, dup, x, up].map(|view| view.row_range(rows.clone()));
            let activate = (!gated).then_some(ActivateBackward { dx: dy, x: up, activation });
            let dbias = d.up.bias();
            ProductBackward { dx, d: &d.up, dy, x, w: &w.up, dbias, activate, accumulate }
        });
        self.backwards(&up.collect::<Vec<_>>(), scratch);
    }

    /// The gradients of the rows' weights, and of the biases behind the second products, from the
    /// gradients of what the activation function and the outputs are.
    fn weights_backward(
        &self,
        mlp: &MlpPass<'_>,
        Weighted { weights, dchosen: out }: Weighted,
        [dactivated, dy]: [View; 2],
    ) {
        let MlpPass { parts, activated, accumulate, .. } = *mlp;
        let [x, y] = [dactivated, activated];
        if parts.iter().all(|MlpPart { w, .. }| w.down.affine.bias.is_none()) {
            let places = weights.places;
            return self.k.row_dots(&RowDots { out, x, y, places, bias: None });
        }
        for MlpPart { rows, w, d } in parts {
            let [x, y, dy] = [x, y, dy].map(|view| view.row_range(rows.clone()));
            let places = weights.places.part(rows.clone());
            let bias = w.down.affine.bias.map(|bias| BiasRows { dy, bias });
            self.k.row_dots(&RowDots { out, x, y, places, bias });
            if let Some(y) = d.down.bias() {
                let weights = RowWeights { places, ..weights };
                self.k.sum_rows(&SumRows { y, x: dy, weights, accumulate });
            }
        }
    }

    /// The backwards of products with some rows each, at once.
    fn backwards(&self, ops: &[ProductBackward<'_>], scratch: &Scratch<'_>) {
        if ops.len() == 1 || ops.iter().any(|op| op.activate.is_some()) {
            return ops.iter().for_each(|op| self.backward(op, scratch));
        }
        let linears: Vec<LinearBackward> = ops.iter().map(|op| op.linear()).collect();
        self.k.linears_backward(&linears, scratch);
        ops.iter().for_each(|op| self.adapters_backward(op, scratch));
    }

    /// The backward of the dropout and of the factor of a branch's output, to `dx`. Without both it
    /// returns `dy`.
    pub(super) fn dropout_backward(
        &self,
        dx: View,
        dy: View,
        dropout: Option<Dropout<'_>>,
    ) -> View {
        let factor = self.block.shape.residual_scale;
        let mut x = dy;
        if factor != 1.0 {
            self.k.scale(&Scale { y: dx, x, factor, by: None });
            x = dx;
        }
        if dropout.is_some() {
            self.k.dropout(&ApplyDropout { y: dx, x, dropout });
            x = dx;
        }
        x
    }

    /// The gradients of a product's input, weights and adapters.
    pub(super) fn backward(&self, op: &ProductBackward<'_>, scratch: &Scratch<'_>) {
        let linear = op.linear();
        match op.activate {
            Some(activate) => self.k.activate_linear_backward(&activate, &linear, scratch),
            None => self.k.linear_backward(&linear, scratch),
        }
        self.adapters_backward(op, scratch);
    }

    fn adapters_backward(&self, op: &ProductBackward<'_>, scratch: &Scratch<'_>) {
        let ProductBackward { dx, d, dy, x, w, accumulate, .. } = *op;
        if let Some(low_rank) = &self.low_rank {
            low_rank.backward([dx, dy, x], &w.adapters, &d.adapters, accumulate, scratch);
        }
    }
}
