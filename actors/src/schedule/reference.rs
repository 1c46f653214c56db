//! The reference of an objective in the visits of the step: the model without what it trains.
//!
//! From the first layer on that the reference computes in another way, each step of the forward
//! pass has a second visit, directly behind the first and on the same device. So a block that was
//! uploaded for the one serves the other, and the reference's hidden states are stashed until the
//! next layer alone. Below that layer, both read the same boundaries.

use std::collections::BTreeMap;

use super::chain::Chained;
use super::model::RingStep;
use super::{BoundaryId, LayerId, Refusal, Role, Visit};

/// The reference while the legs are laid.
pub(super) struct Reference {
    /// The place in the chain where it begins.
    from: usize,
    /// The boundary of each role that it wrote last.
    latest: BTreeMap<Role, BoundaryId>,
}

impl Reference {
    /// The reference that computes this layer, and those above it, in another way.
    ///
    /// # Errors
    /// The chain has none of these layers.
    pub(super) fn of(chain: &[Chained<'_>], layer: LayerId) -> Result<Reference, Refusal> {
        let differs = |one: &Chained<'_>| one.step.kind.on_device() && one.layer >= layer;
        let same = || {
            let reason =
                format!("the reference differs from {layer} on, and no such layer is visited");
            Refusal::of(reason)
        };
        let from = chain.iter().position(differs).ok_or_else(same)?;
        Ok(Reference { from, latest: BTreeMap::new() })
    }

    /// True if it has a visit at this place of the chain.
    pub(super) fn visits(&self, at: usize) -> bool {
        at >= self.from
    }

    /// What its visit reads beside one of the policy that reads `policy`: of each role what it
    /// wrote itself, if it did.
    pub(super) fn reads(&self, step: &RingStep, policy: &[BoundaryId]) -> Vec<BoundaryId> {
        let of_role = |role, id: &BoundaryId| self.latest.get(&role).copied().unwrap_or(*id);
        let inputs = step.reads.iter().zip(policy);
        inputs.map(|(input, id)| of_role(input.boundary.role, id)).collect()
    }

    /// Notes a boundary that it writes.
    pub(super) fn writes(&mut self, role: Role, id: BoundaryId) {
        self.latest.insert(role, id);
    }

    /// The boundary of this role that it wrote last.
    pub(super) fn last(&self, role: Role) -> Option<BoundaryId> {
        self.latest.get(&role).copied()
    }
}

/// Puts each visit of the reference directly behind the visit of the same step.
pub(super) fn beside(forward: Vec<Visit>, reference: Vec<Visit>) -> Vec<Visit> {
    let mut reference = reference.into_iter().peekable();
    let with_own = |visit: Visit| {
        let place = (visit.layer, visit.step);
        let is_own = |own: &Visit| visit.on_device() && (own.layer, own.step) == place;
        let own = reference.next_if(is_own);
        [visit].into_iter().chain(own)
    };
    forward.into_iter().flat_map(with_own).collect()
}
