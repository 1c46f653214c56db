//! Mixtures of experts. The router's sums are kernels of our own, and not products of the library,
//! so that they are in floats and a row's bits do not depend on the number of rows.

use super::kernels::{On, arguments};
use super::launches::{NEIGHBOURS, PART};
use crate::kernels::{
    CombineRows, Dispatch, GateRows, GateRowsBackward, GatherRows, Route, RouteBackward, RowDots,
    RowWeights, WeighRows,
};
use crate::tensor::{Scratch, View};

/// Rows of a block that has a warp for each, and experts of a block that has a warp for four.
pub(super) const WARPS: usize = 8;

/// Rows and experts of a warp's tile of logits; also the experts of a block of their gradient.
const TILE: usize = 4;

/// Rows of a block that computes gradients of the router's input.
const ROWS: usize = 8;

/// The gradient of the logits.
pub(super) fn backward_scratch(op: &RouteBackward<'_>, scratch: &Scratch<'_>) -> View {
    scratch.take_floats(op.logits.rows, op.logits.columns)
}

impl On<'_> {
    pub(super) fn route(&self, op: &Route) {
        let Route { chosen, logits, h, w, per_token, normalised } = *op;
        let [rows, experts] = logits.shape();
        let sums = arguments!(self; logits, h, w, rows, experts, w.columns);
        let grid = [rows.div_ceil(TILE), experts.div_ceil(TILE * WARPS), 1];
        self.queue.launch("route_logits", grid, [256, 1, 1], 0, sums);
        let choice = arguments!(self; chosen, logits, rows, experts, per_token, normalised);
        self.queue.launch("choose_experts", [rows.div_ceil(WARPS), 1, 1], [256, 1, 1], 0, choice);
    }

    pub(super) fn route_backward(&self, op: &RouteBackward<'_>, dl: View) {
        let RouteBackward { dh, dw, logits, chosen, dchosen, h, w, .. } = *op;
        let [rows, experts] = logits.shape();
        let channels = w.columns;
        let k = dchosen.columns;
        let normalised = op.normalised;
        let slopes = arguments!(self; dl, logits, chosen, dchosen, rows, experts, k, normalised);
        self.queue.launch("route_gradient", [rows.div_ceil(WARPS), 1, 1], [256, 1, 1], 0, slopes);
        if let Some(slopes) = op.slopes {
            self.add_slopes(dl, logits, slopes);
        }
        let to_rows = arguments!(self; dh, dl, w, rows, experts, channels);
        self.queue.columns("route_rows", [rows.div_ceil(ROWS), 1], channels, to_rows);
        if let Some(dw) = dw {
            let accumulate = op.accumulate;
            let to_w = arguments!(self; dw, dl, h, rows, experts, channels, PART, accumulate);
            self.queue.columns("route_weights", [experts.div_ceil(TILE), 1], channels, to_w);
        }
    }

    /// Returns the number of rows of each expert, for which it waits. After an error, experts have
    /// no rows.
    pub(super) fn dispatch(&self, op: &Dispatch) -> Vec<usize> {
        let Dispatch { rows, places, chosen, experts } = *op;
        let k = chosen.columns / 2;
        // The stream's products, whose workspace it is, come before or behind.
        let counts = self.queue.workspace();
        let [to_rows, to_places] = [rows, places].map(|view| self.at(view).at);
        let sorted = arguments!(self; to_rows, to_places, counts, chosen, chosen.rows, experts, k);
        self.queue.launch("dispatch", [experts, 1, 1], [512, 1, 1], 0, sorted);
        let counts = self.queue.read(counts, experts);
        counts.into_iter().map(|count| count.to_bits() as usize).collect()
    }

    pub(super) fn gather_rows(&self, &GatherRows { y, x, rows }: &GatherRows) {
        let [count, channels] = y.shape();
        let rows = self.at(rows).at;
        let arguments = arguments!(self; y, x, rows, count, channels);
        self.queue.columns("gather_rows", [count, 1], channels, arguments);
    }

    pub(super) fn combine_rows(&self, op: &CombineRows) {
        let CombineRows { y, x, rows, weights } = *op;
        let [count, channels] = x.shape();
        let rows = self.at_if(rows).at;
        let places = self.at_if(weights.map(|of| of.places));
        let chosen = weights.map(|of| of.chosen);
        let k = chosen.map_or(1, |chosen| chosen.columns / 2);
        let arguments = arguments!(self; y, x, rows, places.at, chosen, k, count, channels);
        self.queue.columns("combine_rows", [count, 1], channels, arguments);
    }

    pub(super) fn weigh_rows(&self, op: &WeighRows) {
        let WeighRows { y, x, weights: RowWeights { places, chosen } } = *op;
        let [count, channels] = x.shape();
        let places = self.at(places).at;
        let k = chosen.columns / 2;
        let arguments = arguments!(self; y, x, places, chosen, k, count, channels);
        self.queue.columns("weigh_rows", [count, 1], channels, arguments);
    }

    pub(super) fn row_dots(&self, &RowDots { out, x, y, places }: &RowDots) {
        let [count, channels] = x.shape();
        let places = self.at(places).at;
        let arguments = arguments!(self; out, x, y, places, count, channels);
        self.queue.launch("row_dots", [count.div_ceil(WARPS), 1, 1], [256, 1, 1], 0, arguments);
    }

    pub(super) fn gate_rows(&self, &GateRows { y, x, gate }: &GateRows) {
        let [rows, channels] = x.shape();
        let arguments = arguments!(self; y, x, gate, rows, channels);
        self.queue.columns("gate_rows", [rows, 1], channels, arguments);
    }

    pub(super) fn gate_rows_backward(&self, op: &GateRowsBackward) {
        let GateRowsBackward { dx, dgate, dy, x, gate } = *op;
        let [rows, channels] = x.shape();
        let arguments = arguments!(self; dx, dgate, dy, x, gate, rows, channels);
        self.queue.rows("gate_rows_backward", rows, channels, NEIGHBOURS, arguments);
    }
}
