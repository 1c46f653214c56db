//! From which visit to which a gradient lies open on its device, and how many wait on the host.

use std::collections::BTreeMap;

use super::{BlockId, GroupId, Schedule, Visit};

/// First and last backward visit of every trained block by each group, as indices among the
/// devices' visits.
pub(super) fn gradient_spans(schedule: &Schedule) -> BTreeMap<(BlockId, GroupId), (usize, usize)> {
    let mut spans = BTreeMap::new();
    for (index, visit) in schedule.device_visits().enumerate() {
        if visit.phase.adds_gradients() {
            let group = schedule.group_of(visit.micro_batches.start);
            for &id in visit.blocks().iter().filter(|&&id| schedule.trains(id)) {
                spans.entry((id, group)).or_insert((index, index)).1 = index;
            }
        }
    }
    spans
}

/// The most gradients that are open at once on one device.
pub(super) fn open_gradients(schedule: &Schedule) -> u32 {
    let devices: Vec<_> = schedule.device_visits().map(Visit::device).collect();
    let mut changes = BTreeMap::new(); // (device, visit, ended) -> opened, closed
    for (first, last) in gradient_spans(schedule).into_values() {
        *changes.entry((devices[first], first, false)).or_insert(0_i64) += 1;
        *changes.entry((devices[first], last, true)).or_insert(0) -= 1;
    }
    // Each device ends with none open, so the next one begins with none.
    let mut open = 0;
    let levels = changes.into_values().map(|change| {
        open += change;
        open as u32
    });
    levels.max().unwrap_or(0)
}

/// What becomes of the gradient that one group contributes to a block, once it is on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Join {
    /// How many of the block's kept gradients are added to it, the youngest first.
    pub adds: u32,
    /// True: the sum is kept for a later group. False: it is the block's gradient.
    pub keeps: bool,
}

/// The join of the contribution `nth` of `count`: two sums of as many groups each become one, and
/// the last contribution takes whatever is left. So sums form a binary tree.
pub(super) fn join(nth: u32, count: u32) -> Join {
    if nth + 1 == count {
        Join { adds: nth.count_ones(), keeps: false }
    } else {
        Join { adds: nth.trailing_ones(), keeps: true }
    }
}

/// The most gradients that are kept on the host at once for later groups.
pub(super) fn kept_gradients(schedule: &Schedule) -> u32 {
    let spans = gradient_spans(schedule);
    let mut closed: Vec<BlockId> = Vec::new(); // in the order of reductions
    for (index, visit) in schedule.device_visits().enumerate() {
        let group = schedule.group_of(visit.micro_batches.start);
        let ends = |id: &&BlockId| spans.get(&(**id, group)).is_some_and(|span| span.1 == index);
        closed.extend(visit.blocks().iter().filter(ends));
    }
    let mut counts = BTreeMap::new(); // block -> contributions, all of them
    closed.iter().for_each(|&block| *counts.entry(block).or_insert(0) += 1);
    let mut came = BTreeMap::new();
    let (mut kept, mut most) = (0, 0);
    for block in closed {
        let nth = came.entry(block).or_insert(0);
        let Join { adds, keeps } = join(*nth, counts[&block]);
        *nth += 1;
        // It is kept before the slots of what it was added from are free.
        most = most.max(kept + u32::from(keeps));
        kept = kept + u32::from(keeps) - adds;
    }
    most
}

#[cfg(test)]
mod tests {
    use super::join;

    /// Runs the joins of `count` contributions; the sum as a term.
    fn term(count: u32) -> String {
        let mut kept: Vec<String> = Vec::new();
        for nth in 0..count {
            let mut sum = nth.to_string();
            let join = join(nth, count);
            for _ in 0..join.adds {
                sum = format!("({}+{sum})", kept.pop().expect("as many are kept"));
            }
            if !join.keeps {
                assert!(kept.is_empty());
                return sum;
            }
            kept.push(sum);
        }
        unreachable!("the last is not kept")
    }

    #[test]
    fn joins_form_a_binary_tree() {
        assert_eq!(term(1), "0");
        assert_eq!(term(2), "(0+1)");
        assert_eq!(term(4), "((0+1)+(2+3))");
        assert_eq!(term(7), "(((0+1)+(2+3))+((4+5)+6))");
    }
}
