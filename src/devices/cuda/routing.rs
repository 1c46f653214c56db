//! Sums of a router's probabilities and choices, the gradient of its losses, and capacities.

use super::experts::WARPS;
use super::kernels::{On, arguments};
use super::launches::dropout_words;
use crate::kernels::{LimitExperts, MeasureRoutes, RouteSlopes};
use crate::tensor::{Scratch, View};

/// The log-sum-exp of each row.
pub(super) fn measure_scratch(op: &MeasureRoutes<'_>, scratch: &Scratch<'_>) -> View {
    scratch.take_floats(1, op.logits.rows)
}

impl On<'_> {
    pub(super) fn measure_routes(&self, op: &MeasureRoutes<'_>, lse: View) {
        let MeasureRoutes { statistics: out, logits, chosen, first_choice, batch, accumulate } =
            *op;
        let [rows, experts] = logits.shape();
        let k = chosen.columns / 2;
        let b = batch.sequences();
        let starts = self.metadata.starts(&batch);
        let of_rows = arguments!(self; lse, logits, rows, experts);
        self.queue.launch("route_lse", [rows.div_ceil(WARPS), 1, 1], [256, 1, 1], 0, of_rows);
        let sums = arguments!(
            self;
            out, logits, lse, chosen, starts, b, rows, experts, k, first_choice, accumulate
        );
        self.queue.launch("measure_routes", [experts + 2, b, 1], [256, 1, 1], 0, sums);
    }

    pub(super) fn limit_experts(&self, op: &LimitExperts<'_>) {
        let LimitExperts { limited, chosen, logits, factor_millionths, second, batch } = *op;
        let [rows, experts] = logits.shape();
        let k = chosen.columns / 2;
        let b = batch.sequences();
        let starts = self.metadata.starts(&batch);
        let millionths = factor_millionths.unwrap_or(0) as usize;
        let draws = dropout_words(second);
        let arguments = arguments!(
            self; limited, chosen, logits, starts, b, rows, experts, k, millionths, draws
        );
        self.queue.launch("limit_experts", [experts, b, 1], [512, 1, 1], 0, arguments);
    }

    /// Adds the gradients of a router's losses to those of its logits.
    pub(super) fn add_slopes(&self, dl: View, logits: View, slopes: RouteSlopes<'_>) {
        let RouteSlopes { of_sequences: slopes, batch } = slopes;
        let [rows, experts] = logits.shape();
        let b = batch.sequences();
        let starts = self.metadata.starts(&batch);
        let added = arguments!(self; dl, logits, slopes, starts, b, rows, experts);
        self.queue.launch("route_slopes", [rows.div_ceil(WARPS), 1, 1], [256, 1, 1], 0, added);
    }
}
