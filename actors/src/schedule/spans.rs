//! From which visit to which a gradient lies open on its device, and how many wait on the host.

use std::collections::BTreeMap;
use std::ops::Range;

use super::{GroupId, Phase, Portion, Schedule, Visit};

/// First and last backward visit of every trained portion by each group, as indices among the
/// devices' visits.
pub(super) fn gradient_spans(schedule: &Schedule) -> BTreeMap<(Portion, GroupId), (usize, usize)> {
    let mut spans = BTreeMap::new();
    for (index, visit) in schedule.device_visits().enumerate() {
        if visit.phase == Phase::Backward {
            let group = schedule.group_of(visit.micro_batches.start);
            for id in visit.portions().filter(|id| schedule.is_trained(id.block)) {
                spans.entry((id, group)).or_insert((index, index)).1 = index;
            }
        }
    }
    spans
}

/// The most gradients that are open at once on one device.
pub(super) fn open_gradients(schedule: &Schedule) -> u32 {
    let devices: Vec<_> = schedule.device_visits().map(Visit::device).collect();
    let spans = gradient_spans(schedule).into_values();
    most_open(spans.map(|(first, last)| (devices[first], first, last)))
}

/// The most spans that are open at once on one device. Each is from one visit to another.
pub(super) fn most_open<D: Ord + Copy>(spans: impl Iterator<Item = (D, usize, usize)>) -> u32 {
    let mut changes = BTreeMap::new(); // (device, visit, ended) -> opened, closed
    for (device, first, last) in spans {
        *changes.entry((device, first, false)).or_insert(0_i64) += 1;
        *changes.entry((device, last, true)).or_insert(0) -= 1;
    }
    // Each device ends with none open, so the next one begins with none.
    let mut open = 0;
    let levels = changes.into_values().map(|change| {
        open += change;
        open as u32
    });
    levels.max().unwrap_or(0)
}

/// The join of one group's gradient of a block with those of other groups, on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Join {
    /// The number of the block's kept gradients that are added to it, the youngest first.
    pub adds: u32,
    /// True: the sum is kept for a later group. False: it is the block's gradient.
    pub keeps: bool,
}

/// The join of contribution `nth` of `count`. Sums merge like the carries of a binary counter, and
/// the last contribution takes all that are left. So sums form a binary tree.
pub(super) fn join(nth: u32, count: u32) -> Join {
    if nth + 1 == count {
        Join { adds: nth.count_ones(), keeps: false }
    } else {
        Join { adds: nth.trailing_ones(), keeps: true }
    }
}

/// Cuts groups into `count` spans of about equal size, each a subtree of the tree in which the
/// Reducer adds gradients. So any process can add the gradients of a span, and [`sums_of_spans`]
/// says how the sums of spans are added: to the bits of one process that has all groups.
///
/// # Panics
/// There are fewer groups than spans.
pub fn group_spans(groups: u32, count: u32) -> Vec<Range<u32>> {
    assert!(count >= 1 && groups >= count, "{groups} groups in {count} spans");
    let mut spans: Vec<Range<u32>> = std::iter::once(0..groups).collect();
    while spans.len() < count as usize {
        let largest = spans.iter().map(|span| span.len()).max().expect("there is one");
        let at = spans.iter().position(|span| span.len() == largest).expect("it is one of them");
        let Range { start, end } = spans[at].clone();
        let middle = start + left_of(end - start);
        spans.splice(at..=at, [start..middle, middle..end]);
    }
    spans
}

/// The number of contributions, at least two, that the left side of their tree has.
fn left_of(count: u32) -> u32 {
    1 << (count - 1).ilog2()
}

/// The order in which the sums of spans that cover all groups are added. In each pair, the sum of
/// the second span is added to that of the first. The sum of the first span becomes the sum of all.
pub fn sums_of_spans(spans: &[Range<u32>]) -> Vec<(usize, usize)> {
    let (Some(first), Some(last)) = (spans.first(), spans.last()) else { return Vec::new() };
    if spans.len() == 1 {
        return Vec::new();
    }
    let middle = first.start + left_of(last.end - first.start);
    let at = spans.partition_point(|span| span.start < middle);
    let right = sums_of_spans(&spans[at..]).into_iter().map(|(to, from)| (to + at, from + at));
    let sides = sums_of_spans(&spans[..at]).into_iter().chain(right);
    sides.chain([(0, at)]).collect()
}

/// The most gradients that are kept on the host at once for later groups.
pub(super) fn kept_gradients(schedule: &Schedule) -> u32 {
    let spans = gradient_spans(schedule);
    if schedule.in_batches {
        return 0; // each has an update of its own
    }
    let mut closed: Vec<Portion> = Vec::new(); // in the order of reductions
    for (index, visit) in schedule.device_visits().enumerate() {
        let group = schedule.group_of(visit.micro_batches.start);
        let ends = |id: &Portion| spans.get(&(*id, group)).is_some_and(|span| span.1 == index);
        closed.extend(visit.portions().filter(ends));
    }
    let mut counts = BTreeMap::new(); // portion -> contributions, all of them
    closed.iter().for_each(|&portion| *counts.entry(portion).or_insert(0) += 1);
    let mut came = BTreeMap::new();
    let mut kept = 0;
    let mut most = 0;
    for portion in closed {
        let nth = came.entry(portion).or_insert(0);
        let Join { adds, keeps } = join(*nth, counts[&portion]);
        *nth += 1;
        // It is kept before the slots of its terms are free.
        most = most.max(kept + u32::from(keeps));
        kept = kept + u32::from(keeps) - adds;
    }
    most
}

#[cfg(test)]
mod tests {
    use super::{group_spans, join, sums_of_spans};

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

    /// The sums of spans, each added by itself, are the tree of all groups.
    #[test]
    fn spans_are_subtrees() {
        assert_eq!(group_spans(4, 2), [0..2, 2..4]);
        assert_eq!(group_spans(4, 3), [0..1, 1..2, 2..4]);
        assert_eq!(group_spans(12, 3), [0..4, 4..8, 8..12]);
        let shifted = |span: &std::ops::Range<u32>| {
            let term = term(span.len() as u32);
            let parts = term.split_inclusive(|c: char| !c.is_ascii_digit());
            let shift = |part: &str| {
                let digits = part.trim_end_matches(|c: char| !c.is_ascii_digit());
                let rest = &part[digits.len()..];
                let number = digits.parse::<u32>().map(|n| (n + span.start).to_string());
                number.unwrap_or_default() + rest
            };
            parts.map(shift).collect::<String>()
        };
        for groups in 1..=17 {
            for count in 1..=groups {
                let spans = group_spans(groups, count);
                let mut sums: Vec<String> = spans.iter().map(shifted).collect();
                for (to, from) in sums_of_spans(&spans) {
                    sums[to] = format!("({}+{})", sums[to], sums[from]);
                }
                assert_eq!(sums[0], term(groups), "{spans:?}");
            }
        }
    }
}
