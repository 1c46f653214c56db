//! Seconds that operations take whatever their size.

use std::collections::HashMap;

use l2l_actors::schedule::Phase;
use l2l_actors::work::WorkKind;

/// What each operation takes beside what grows with its size. What is not in it takes nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Fixed {
    /// Of kernels: one micro-batch, or chunk, in a layer and a phase.
    pub(super) compute: HashMap<(u32, Phase), f64>,
    /// Of other work.
    pub(super) work: HashMap<WorkKind, f64>,
}

impl Fixed {
    /// Of kernels.
    pub(super) fn of_compute(&self, layer: u32, phase: Phase) -> f64 {
        let phase = if phase == Phase::Reference { Phase::Forward } else { phase };
        self.compute.get(&(layer, phase)).copied().unwrap_or(0.0)
    }

    /// Of other work.
    pub(super) fn of(&self, kind: WorkKind) -> f64 {
        self.work.get(&kind).copied().unwrap_or(0.0)
    }
}
