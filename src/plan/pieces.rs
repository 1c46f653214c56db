//! Layers that are visited in pieces: what a piece costs, and what pieces are good for.

use l2l_actors::schedule::{Phase, Portion, Schedule, Visit};

/// The work of a visit, divided by that of the mean step of its layer: in proportion to the weights
/// of its portion. 1 if the layer is visited whole. Pieces that compute keys are equal.
pub(crate) fn share_of_piece(schedule: &Schedule, visit: &Visit) -> f64 {
    let (Some(portion), true) = (visit.portions().next(), visit.phase != Phase::Keys) else {
        return 1.0;
    };
    let Portion { block, cut: Some(_) } = portion else { return 1.0 };
    let all = &schedule.cuts[&block];
    let sum: u64 = all.iter().map(|cut| cut.weight_bytes).sum();
    schedule.cut(portion).weight_bytes as f64 * all.len() as f64 / sum.max(1) as f64
}
