//! Which layers and pieces each device computes.

use std::collections::BTreeSet;

use l2l_actors::schedule::{Portion, StepPlan, Visit};

/// What one device computes of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DevicePart {
    /// Its layers, each once, in order. Of a layer in pieces, the numbers of its pieces.
    pub layers: Vec<(usize, Option<u16>)>,
    /// Bytes of their weights on a device. They share the slots.
    pub weight_bytes: u64,
    /// The slots for weights.
    pub weight_slots: u32,
}

impl DevicePart {
    /// The parts of all devices of a step.
    pub(super) fn all(walked: &StepPlan) -> Vec<DevicePart> {
        let schedule = &walked.schedule;
        let of_device = |device: usize| {
            let visits = schedule.visits.iter();
            let own = visits.filter(|visit| visit.device().map(usize::from) == Some(device));
            let layer = |visit: &Visit| (visit.layer.0 as usize, visit.cut.map(|_| visit.step));
            let layers: BTreeSet<_> = own.clone().map(layer).collect();
            let portions: BTreeSet<Portion> = own.flat_map(|visit| visit.portions()).collect();
            DevicePart {
                layers: layers.into_iter().collect(),
                weight_bytes: portions.into_iter().map(|one| schedule.cut(one).weight_bytes).sum(),
                weight_slots: walked.pools.weights,
            }
        };
        (0..walked.walks.len()).map(of_device).collect()
    }
}
