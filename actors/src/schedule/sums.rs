//! Partial sums: what the pieces of a layer hand to each other.
//!
//! Each piece of a sum reads what the pieces before it have added up, adds its own term, and hands
//! the sum on. So one running sum passes through all of them, and it has the same bits wherever
//! they are. These rules make sure that no term is missing, twice in it, or out of order.

use std::collections::BTreeMap;
use std::ops::Range;

use super::{LayerId, Phase, Portion, Refusal, Role, Schedule, Visit};

impl Schedule {
    /// The portions of a block that belong to one sum with this one.
    pub(crate) fn sum_of(&self, Portion { block, cut }: Portion) -> Range<u16> {
        let Some(cut) = cut else { return 0..0 };
        let cuts = &self.cuts[&block];
        let sum = cuts[usize::from(cut)].sum;
        let start = cuts.iter().position(|cut| cut.sum == sum).unwrap_or(0);
        let end = cuts.iter().rposition(|cut| cut.sum == sum).unwrap_or(0);
        start as u16..end as u16 + 1
    }

    /// The portions whose terms a visit finds in the partial sum that it reads.
    pub(crate) fn added_before(&self, visit: &Visit) -> Range<u16> {
        let Some(portion) = visit.portions().next() else { return 0..0 };
        let Range { start, end } = self.sum_of(portion);
        let own = portion.cut.unwrap_or(0);
        if visit.phase.is_backward() { own + 1..end.max(own + 1) } else { start..own }
    }
}

/// The role of partial sums in a phase; `None`: such visits have none.
fn role_in(phase: Phase) -> Option<Role> {
    match phase {
        Phase::Forward | Phase::Reference => Some(Role::Partial),
        Phase::Keys => None,
        Phase::Backward => Some(Role::PartialGradient),
    }
}

/// Checks that a visit reads and writes partial sums as its place among the pieces of a sum says.
pub(super) fn shape(schedule: &Schedule, visit: &Visit) -> Result<(), String> {
    let sums: Vec<Range<u16>> = visit.portions().map(|one| schedule.sum_of(one)).collect();
    let sum = sums.first().cloned().unwrap_or(0..0);
    if sums.iter().any(|other| *other != sum) {
        return Err("needs portions of blocks that are cut in different ways".into());
    }
    let before = schedule.added_before(visit).len();
    let is_first = visit.cut.is_none() || before == 0;
    let is_last = visit.cut.is_none() || before + 1 == sum.len();
    let reads: Vec<_> = visit.all_reads().collect();
    let writes: Vec<_> = visit.all_writes().collect();
    for role in [Role::Partial, Role::PartialGradient] {
        let is_own = role_in(visit.phase) == Some(role);
        for (ids, expected, does) in [(&reads, !is_first, "reads"), (&writes, !is_last, "writes")] {
            let expected = expected && is_own;
            if schedule.with_role(ids, role).is_some() != expected {
                let not = if expected { "no" } else { "a" };
                let place = visit.cut.map_or("no portion".into(), |cut| format!("portion {cut}"));
                return Err(format!("{does} {not} {role}, and is {place} of a sum over {sum:?}"));
            }
        }
    }
    Ok(())
}

/// Checks that each piece reads the partial sum of the piece before it, in the order of its phase.
pub(super) fn check(schedule: &Schedule) -> Result<(), Refusal> {
    let mut writers: BTreeMap<_, (LayerId, Phase, Option<u16>)> = BTreeMap::new();
    for (index, visit) in schedule.visits.iter().enumerate() {
        let Some((role, cut)) = role_in(visit.phase).zip(visit.cut) else { continue };
        let is_sum = |id: &_| schedule.boundary(*id).role == role;
        let before = if visit.phase.is_backward() { cut + 1 } else { cut.wrapping_sub(1) };
        for id in visit.all_reads().filter(is_sum) {
            let writer = writers.get(&id).copied();
            if writer != Some((visit.layer, visit.phase, Some(before))) {
                let reason =
                    format!("reads {role} {id}, which portion {before} of it does not write");
                return Err(Refusal::at(schedule, index, reason));
            }
        }
        let own = (visit.layer, visit.phase, visit.cut);
        writers.extend(visit.all_writes().filter(is_sum).map(|id| (id, own)));
    }
    Ok(())
}
