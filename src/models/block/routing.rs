//! What a block's router measures, drops and learns from in training, beside its choice.

use l2l_actors::schedule::Role;

use super::TransformerBlock;
use super::chunk::ChunkPass;
use crate::kernels::{DROPPED, LimitExperts, MeasureRoutes, RouteSlopes};
use crate::models::layer::{Init, Kind, Tensor};
use crate::models::ports::PortViews;
use crate::models::{Balance, BalanceOf, Experts};
use crate::tensor::{Scratch, View};

/// The place of the draws of second choices among the random numbers of a block.
const SECOND_CHOICE: u32 = 3;

/// The boundaries of a router in a training step.
#[derive(Clone, Copy)]
pub(super) struct RoutingViews {
    /// In the forward: the place for the sums of each sequence. (B, 2 E + 2).
    measured: Option<View>,
    /// True if earlier chunks of the sequence have written there.
    accumulate: bool,
    /// In the backward: the gradients of the router's losses. (B, E + 1).
    slopes: Option<View>,
}

impl RoutingViews {
    pub(super) const NONE: RoutingViews =
        RoutingViews { measured: None, accumulate: false, slopes: None };

    pub(super) fn of_forward(ports: &PortViews<'_>) -> RoutingViews {
        let accumulate = ports.chunk.first_position() > ports.held.first_position();
        RoutingViews { measured: ports.written(Role::Routing), accumulate, slopes: None }
    }

    pub(super) fn of_backward(ports: &PortViews<'_>) -> RoutingViews {
        RoutingViews { slopes: ports.read(Role::Balance), ..RoutingViews::NONE }
    }
}

impl TransformerBlock {
    /// A matrix of the router, or of the gate of the shared expert. A rule for matrices leaves it
    /// to another rule, and a quantised base keeps it as it is.
    pub(super) fn routing_tensor(&self, module: &str, rows: usize) -> Tensor {
        let name = format!("{}.weight", self.name(module));
        let init = Init::Normal(self.shape.initializer_range);
        Tensor::new(name, vec![rows, self.shape.hidden], Kind::Table, init)
    }
}

/// For each expert, whether it has a row: from the choice of some rows, (R, 2 k).
pub(super) fn with_rows(experts: Experts, choice: &[f32]) -> Vec<bool> {
    let Experts { count, per_token, .. } = experts;
    let mut has_rows = vec![false; count];
    for row in choice.chunks_exact(2 * per_token) {
        let kept = row[..per_token].iter().map(|expert| expert.to_bits());
        kept.filter(|bits| bits & DROPPED == 0).for_each(|bits| has_rows[bits as usize] = true);
    }
    has_rows
}

impl ChunkPass<'_> {
    fn balance(&self) -> Balance {
        self.experts().balance
    }

    /// True if this pass drops choices.
    pub(super) fn drops(&self) -> bool {
        self.batch.trains() && self.balance().drops()
    }

    /// The choice that is left after the limits of training.
    pub(super) fn limited(&self, chosen: View, logits: View, scratch: &Scratch<'_>) -> View {
        if !self.drops() {
            return chosen;
        }
        let Balance { capacity_millionths: factor_millionths, second_at_random, .. } =
            self.balance();
        let batch = self.batch;
        // The probability is not read: each draw is compared with a weight.
        let draws = batch.dropout(0.5, self.block.index, SECOND_CHOICE);
        let second = draws.filter(|_| second_at_random);
        let limited = scratch.take_floats(chosen.rows, chosen.columns);
        self.k.limit_experts(&LimitExperts {
            limited,
            chosen,
            logits,
            factor_millionths,
            second,
            batch,
        });
        limited
    }

    /// Writes the sums of each sequence, where a forward pass measures them. The chunks of a
    /// sequence add to each other.
    pub(super) fn measure(&self, chosen: View, logits: View, scratch: &Scratch<'_>) {
        let Some(measured) = self.routing.measured else { return };
        let op = MeasureRoutes {
            statistics: measured,
            logits,
            chosen,
            first_choice: self.balance().of == BalanceOf::FirstChoice,
            batch: self.batch,
            accumulate: self.routing.accumulate,
        };
        self.k.measure_routes(&op, scratch);
    }

    /// The gradients of the router's losses.
    pub(super) fn slopes(&self) -> Option<RouteSlopes<'_>> {
        let of_sequences = self.routing.slopes?;
        Some(RouteSlopes { of_sequences, batch: self.batch })
    }
}
