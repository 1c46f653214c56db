//! The labels of gradients: how many contributions each has, and how portions and groups join.

use super::touch::{Cell, Label, Touch};
use crate::schedule::{BlockId, DeviceVisit, GroupId, Portion, StepPlan, Version};
use crate::work::{GradientAt, MasterAt};

/// Looks up contributions in a gradient that is of this portion and version.
pub(super) trait Contributions: Fn(Cell, Portion, Version) -> usize {}

impl<F: Fn(Cell, Portion, Version) -> usize> Contributions for F {}

impl Touch {
    /// Adds a contribution to a gradient, or replaces it where `first`.
    pub(super) fn add(
        &mut self,
        cell: Cell,
        portion: Portion,
        now: Version,
        first: bool,
        count: &impl Contributions,
    ) {
        let before = (!first).then(|| count(cell, portion, now));
        let after = Label::Gradient(portion, now, before.unwrap_or(0) + 1);
        let before = before.map(|count| Label::Gradient(portion, now, count));
        self.writes.push((cell, before, after));
    }

    pub(super) fn join(
        &mut self,
        portion: Portion,
        now: Version,
        reduced: u32,
        parts: &[u32],
        keep: Option<u32>,
        count: &impl Contributions,
    ) {
        let of = |cell| count(cell, portion, now);
        let label = |count| Label::Gradient(portion, now, count);
        let landed = of(Cell::Landing(reduced));
        let mut sum = landed;
        for &part in parts {
            let contributions = of(Cell::Part(part));
            self.read(Cell::Part(part), label(contributions));
            sum += contributions;
        }
        self.writes.push((Cell::Landing(reduced), Some(label(landed)), label(sum)));
        keep.into_iter().for_each(|part| self.write(Cell::Part(part), label(sum)));
    }

    /// A portion comes behind those of higher numbers, each once. With the first portion the
    /// gradient of the block is complete.
    pub(super) fn merge(
        &mut self,
        plan: &StepPlan,
        portion: Portion,
        now: Version,
        reduced: u32,
        into: u32,
    ) {
        let own = of_groups(plan, portion, None);
        self.read(Cell::Landing(reduced), Label::Gradient(portion, now, own));
        let cut = portion.cut.unwrap_or(0);
        let of = |cut| Portion { cut: Some(cut), ..portion };
        let cuts = plan.schedule.cuts.get(&portion.block).map_or(1, Vec::len) as u16;
        let behind: usize = (cut + 1..cuts).map(|cut| of_groups(plan, of(cut), None)).sum();
        let before = (cut + 1 < cuts).then(|| Label::Merged(of(cut + 1), now, behind));
        let after = match cut {
            0 => Label::Gradient(portion.block.into(), now, behind + own),
            _ => Label::Merged(portion, now, behind + own),
        };
        self.writes.push((Cell::Landing(into), before, after));
    }
}

/// The label of a block's gradient that has all contributions of devices.
pub(super) fn complete(plan: &StepPlan, block: BlockId, now: Version) -> Label {
    let cuts = plan.schedule.cuts.get(&block).map_or(0, Vec::len) as u16;
    let parts = (0..cuts).map(|cut| Portion { block, cut: Some(cut) });
    let all = parts.chain((cuts == 0).then_some(block.into()));
    let contributions = all.map(|portion| of_groups(plan, portion, None)).sum();
    Label::Gradient(block.into(), now, contributions)
}

/// The place of a block's gradient on the host.
pub(super) fn gradient_cell(block: BlockId, at: GradientAt, master: MasterAt) -> Cell {
    match (at, master) {
        (GradientAt::Landing(slot), _) => Cell::Landing(slot),
        (GradientAt::Region, MasterAt::Memory) => Cell::Region(block),
        (GradientAt::Region, MasterAt::Slot(slot)) => Cell::StateGradient(slot),
    }
}

/// The number of operations that add to a portion's gradient of a group, or of all groups.
pub(super) fn of_groups(plan: &StepPlan, portion: Portion, group: Option<GroupId>) -> usize {
    let schedule = &plan.schedule;
    let adds = |(index, visit): &(usize, &DeviceVisit)| {
        let first = plan.visit(*index).micro_batches.start;
        group.is_none_or(|group| schedule.group_of(first) == group)
            && visit.accumulates.iter().any(|(one, _)| *one == portion)
    };
    let visits = plan.device_visits.iter().enumerate().filter(adds);
    visits.map(|(index, _)| plan.visit(index).micro_batches.len()).sum()
}
