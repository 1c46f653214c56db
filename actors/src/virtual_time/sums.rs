//! The labels of boundaries in slots: a partial sum has the set of portions in it.

use super::memory::Memory;
use super::touch::{Cell, Label, Touch};
use crate::schedule::{BoundaryId, MicroBatch, Phase, Role, StepPlan, Version, Visit};

fn is_sum(plan: &StepPlan, id: BoundaryId) -> bool {
    matches!(plan.schedule.boundary(id).role, Role::Partial | Role::PartialGradient)
}

impl Touch {
    /// The label of a boundary that is copied from a cell. A copy of a partial sum has the
    /// portions that are there.
    pub(super) fn boundary(
        plan: &StepPlan,
        memory: &Memory,
        from: Cell,
        id: BoundaryId,
        m: MicroBatch,
        now: Version,
    ) -> Label {
        if is_sum(plan, id) {
            Label::Sum(id, m, now, memory.parts(from, id, m, now))
        } else {
            Label::Boundary(id, m, now)
        }
    }

    /// Reads the slots of a visit's inputs, and writes those of its outputs. A piece finds in a
    /// partial sum the portions before its own, each once, and adds its own.
    pub(super) fn ports(
        &mut self,
        plan: &StepPlan,
        visit: &Visit,
        m: MicroBatch,
        now: Version,
        inputs: impl Iterator<Item = (BoundaryId, Cell)>,
        outputs: impl Iterator<Item = (BoundaryId, Cell)>,
    ) {
        let bit = |cut: u16| 1_u128 << cut;
        let before: u128 = plan.schedule.added_before(visit).map(bit).sum();
        let own = visit.cut.map_or(0, bit);
        let label = |id, parts| match is_sum(plan, id) {
            true => Label::Sum(id, m, now, parts),
            false => Label::Boundary(id, m, now),
        };
        let mut has_sum = before == 0 || visit.phase == Phase::Keys;
        for (id, cell) in inputs {
            has_sum |= is_sum(plan, id);
            self.read(cell, label(id, before));
        }
        assert!(has_sum, "{visit:?} of micro-batch {m} has no sum of the portions before its own");
        outputs.for_each(|(id, cell)| self.write(cell, label(id, before | own)));
    }
}
