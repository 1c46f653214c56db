//! One visit of the host, with the memory that its operation may use.

use std::sync::Arc;

use l2l_actors::schedule::{BoundaryId, MicroBatch, Schedule, Visit};

use crate::worker::boundaries::Filled;
use crate::worker::memory::HostLease;
use crate::worker::step::StepState;

/// A visit of the host as one operation sees it.
pub(super) struct HostVisit<'a> {
    pub(super) state: Arc<StepState>,
    pub(super) visit: &'a Visit,
    pub(super) host: HostLease<'a>,
}

impl<'a> HostVisit<'a> {
    pub(super) fn schedule(&self) -> &Schedule {
        self.state.schedule()
    }

    /// A micro-batch of a boundary in the stash, to read.
    pub(super) fn stashed(&self, boundary: BoundaryId, m: MicroBatch) -> &'a [f32] {
        self.host.stashed(self.filled(boundary, m).stash_range())
    }

    /// A micro-batch of a boundary in the stash, to write.
    pub(super) fn stashed_mut(&self, boundary: BoundaryId, m: MicroBatch) -> &'a mut [f32] {
        self.host.stashed_mut(self.filled(boundary, m).stash_range())
    }

    fn filled(&self, boundary: BoundaryId, micro_batch: MicroBatch) -> Filled<'_> {
        let layer = self.visit.layer;
        Filled { state: &self.state, layer, boundary, micro_batch }
    }
}
