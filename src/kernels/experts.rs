//! Mixtures of experts (Shazeer et al. 2017): the router's choice, the rows that each expert gets,
//! and the sum of the experts' outputs.
//!
//! Legend: R rows, C hidden channels, E experts, k experts that a row chooses, S = R k assignments
//! of a row to an expert, I channels of an expert, N rows of one expert, N ≤ R, perhaps 0.
//!
//! Experts, rows and places are integers. They are stored as the bits of floats, as labels are.

use super::operation::{KernelOperation, Named, Views};
use super::routing::RouteSlopes;
use crate::tensor::{Dtype, View};

/// logits = h wᵀ, and the choice of each row. All of it is in f32, never rounded to 16 bits.
///
/// A row chooses the k largest logits. Of equal ones it takes the smaller expert, and NaN comes
/// last, so a row's experts always differ. Its weights are the softmax over the chosen logits, or
/// over all. They are NaN if one of the row's logits is NaN, so that the error is found.
#[derive(Clone, Copy, Debug)]
pub struct Route {
    /// Output: k experts in ascending order, then the weight of each. Floats. (R, 2 k).
    pub chosen: View,
    /// Output: floats. (R, E).
    pub logits: View,
    /// The experts' input. (R, C).
    pub h: View,
    /// The router's weights. (E, C).
    pub w: View,
    /// k.
    pub per_token: usize,
    /// True: the softmax runs over the chosen logits; false: over all.
    pub normalised: bool,
}

/// The backward of [`Route`]: dh += dl w, dw (+)= dlᵀ h. dl is the gradient of the logits.
#[derive(Clone, Copy, Debug)]
pub struct RouteBackward<'a> {
    /// Floats, added to. (R, C).
    pub dh: View,
    /// Floats; `None`: the router is frozen. (E, C).
    pub dw: Option<View>,
    /// The forward's logits: floats. (R, E).
    pub logits: View,
    /// The forward's choice: floats. (R, 2 k).
    pub chosen: View,
    /// The gradient of each weight, 0 for a dropped assignment: floats. (R, k).
    pub dchosen: View,
    /// The forward's input. (R, C).
    pub h: View,
    /// The router's weights. (E, C).
    pub w: View,
    /// As in [`Route`].
    pub normalised: bool,
    /// The gradients of the router's losses; `None`: it has none.
    pub slopes: Option<RouteSlopes<'a>>,
    /// True when `dw` is added to; false when it is replaced.
    pub accumulate: bool,
}

/// Sorts the assignments by expert, and those of an expert by row. Dropped ones are left out.
///
/// [`Kernels::dispatch`](super::Kernels::dispatch) returns the number of rows of each expert. An
/// expert's assignments come behind those of the experts before it.
#[derive(Clone, Copy, Debug)]
pub struct Dispatch {
    /// Output: the row of each assignment. Floats. (1, S).
    pub rows: View,
    /// Output: the place of each assignment in the choice, row · k + j. Floats. (1, S).
    pub places: View,
    /// Floats, as [`Route`] writes them. (R, 2 k).
    pub chosen: View,
    /// E.
    pub experts: usize,
}

/// y\[i\] = x\[rows\[i\]\].
#[derive(Clone, Copy, Debug)]
pub struct GatherRows {
    /// Output. (N, C).
    pub y: View,
    /// Input. (R, C).
    pub x: View,
    /// As [`Dispatch`] writes them: floats. (1, N).
    pub rows: View,
}

/// y\[rows\[i\]\] += w\[i\] · x\[i\]. Product and sum are rounded apart, so the order of such sums
/// decides the bits, and how experts are grouped does not.
#[derive(Clone, Copy, Debug)]
pub struct CombineRows {
    /// Floats, added to. (R, C).
    pub y: View,
    /// Input. (N, C).
    pub x: View,
    /// The rows of one expert, in ascending order: floats, (1, N). `None`: all rows, and N is R.
    pub rows: Option<View>,
    /// w; `None`: 1.
    pub weights: Option<RowWeights>,
}

/// The weights of an expert's rows.
#[derive(Clone, Copy, Debug)]
pub struct RowWeights {
    /// The place of each weight in the choice, as [`Dispatch`] writes it: floats. (1, N).
    pub places: View,
    /// Floats, as [`Route`] writes them. (R, 2 k).
    pub chosen: View,
}

/// y\[i\] = w\[i\] · x\[i\].
#[derive(Clone, Copy, Debug)]
pub struct WeighRows {
    /// Output. (N, I).
    pub y: View,
    /// Input. (N, I).
    pub x: View,
    /// w.
    pub weights: RowWeights,
}

/// out\[places\[i\]\] = the sum over the channels of x\[i\] · y\[i\].
#[derive(Clone, Copy, Debug)]
pub struct RowDots {
    /// Floats; only the named places are written. (R, k).
    pub out: View,
    /// (N, I).
    pub x: View,
    /// (N, I).
    pub y: View,
    /// As [`Dispatch`] writes them: floats. (1, N).
    pub places: View,
}

/// y = sigmoid(gate) · x, with one gate a row.
#[derive(Clone, Copy, Debug)]
pub struct GateRows {
    /// Output: floats. (R, C).
    pub y: View,
    /// Input. (R, C).
    pub x: View,
    /// (R, 1).
    pub gate: View,
}

/// The backward of [`GateRows`].
#[derive(Clone, Copy, Debug)]
pub struct GateRowsBackward {
    /// (R, C).
    pub dx: View,
    /// (R, 1).
    pub dgate: View,
    /// (R, C).
    pub dy: View,
    /// The forward's input. (R, C).
    pub x: View,
    /// The forward's gate. (R, 1).
    pub gate: View,
}

impl RowWeights {
    /// Declares the weights of some rows.
    fn views(self, views: &mut Views<'_>, rows: usize) {
        let RowWeights { places, chosen } = self;
        views.reads("weights.places", places, [1, rows], Dtype::F32);
        views.reads("weights.chosen", chosen, chosen.shape(), Dtype::F32);
        views.rule(chosen.columns.is_multiple_of(2), "each chosen expert has a weight");
    }
}

impl KernelOperation for Route {
    fn views(&self, views: &mut Views<'_>) {
        let Route { chosen, logits, h, w, per_token, .. } = *self;
        // The experts are no numbers.
        views.writes_opaque("chosen", chosen, [h.rows, 2 * per_token], Dtype::F32);
        views.writes("logits", logits, [h.rows, w.rows], Dtype::F32);
        views.reads("h", h, h.shape(), h.dtype);
        views.reads("w", w, [w.rows, h.columns], h.dtype);
        views.rule((1..=w.rows).contains(&per_token), "a row chooses from 1 to all experts");
    }
}

impl KernelOperation for RouteBackward<'_> {
    fn views(&self, views: &mut Views<'_>) {
        let RouteBackward { dh, dw, logits, chosen, dchosen, h, w, slopes, .. } = *self;
        views.writes("dh", dh, h.shape(), Dtype::F32);
        views.writes("dw", dw, w.shape(), Dtype::F32);
        views.reads("logits", logits, [h.rows, w.rows], Dtype::F32);
        views.reads("chosen", chosen, [h.rows, 2 * dchosen.columns], Dtype::F32);
        views.reads("dchosen", dchosen, [h.rows, chosen.columns / 2], Dtype::F32);
        views.reads("h", h, h.shape(), h.dtype);
        views.reads("w", w, [w.rows, h.columns], h.dtype);
        if let Some(RouteSlopes { of_sequences, batch }) = slopes {
            let shape = [batch.sequences(), w.rows + 1];
            views.reads("slopes.of_sequences", of_sequences, shape, Dtype::F32);
            views.rule(batch.rows() == h.rows, "each row is of a sequence");
        }
    }
}

impl Named for Dispatch {
    fn name(&self) -> &'static str {
        "dispatch"
    }
}

impl KernelOperation for Dispatch {
    fn views(&self, views: &mut Views<'_>) {
        let Dispatch { rows, places, chosen, .. } = *self;
        let assignments = chosen.rows * (chosen.columns / 2);
        views.writes_opaque("rows", rows, [1, assignments], Dtype::F32);
        views.writes_opaque("places", places, [1, assignments], Dtype::F32);
        views.reads("chosen", chosen, chosen.shape(), Dtype::F32);
        views.rule(chosen.columns.is_multiple_of(2), "each chosen expert has a weight");
    }
}

impl KernelOperation for GatherRows {
    fn views(&self, views: &mut Views<'_>) {
        let GatherRows { y, x, rows } = *self;
        views.writes("y", y, [rows.columns, x.columns], x.dtype);
        views.reads("x", x, [x.rows, y.columns], y.dtype);
        views.reads("rows", rows, [1, y.rows], Dtype::F32);
    }
}

impl KernelOperation for CombineRows {
    fn views(&self, views: &mut Views<'_>) {
        let CombineRows { y, x, rows, weights } = *self;
        views.writes("y", y, [y.rows, x.columns], Dtype::F32);
        views.reads("x", x, [rows.map_or(y.rows, |rows| rows.columns), y.columns], x.dtype);
        views.reads("rows", rows, [1, x.rows], Dtype::F32);
        if let Some(weights) = weights {
            weights.views(views, x.rows);
            views.rule(weights.chosen.rows == y.rows, "each row has a choice");
        }
    }
}

impl KernelOperation for WeighRows {
    fn views(&self, views: &mut Views<'_>) {
        let WeighRows { y, x, weights } = *self;
        views.writes("y", y, x.shape(), x.dtype);
        views.reads("x", x, y.shape(), y.dtype);
        weights.views(views, x.rows);
    }
}

impl KernelOperation for RowDots {
    fn views(&self, views: &mut Views<'_>) {
        let RowDots { out, x, y, places } = *self;
        views.writes_opaque("out", out, out.shape(), Dtype::F32);
        views.reads("x", x, y.shape(), y.dtype);
        views.reads("y", y, x.shape(), x.dtype);
        views.reads("places", places, [1, x.rows], Dtype::F32);
    }
}

impl KernelOperation for GateRows {
    fn views(&self, views: &mut Views<'_>) {
        let GateRows { y, x, gate } = *self;
        views.writes("y", y, x.shape(), Dtype::F32);
        views.reads("x", x, y.shape(), x.dtype);
        views.reads("gate", gate, [x.rows, 1], x.dtype);
    }
}

impl KernelOperation for GateRowsBackward {
    fn views(&self, views: &mut Views<'_>) {
        let GateRowsBackward { dx, dgate, dy, x, gate } = *self;
        views.writes("dx", dx, x.shape(), x.dtype);
        views.writes("dgate", dgate, [x.rows, 1], x.dtype);
        views.reads("dy", dy, x.shape(), x.dtype);
        views.reads("x", x, dx.shape(), dx.dtype);
        views.reads("gate", gate, [x.rows, 1], x.dtype);
    }
}
