//! The order in which the relay meets the legs of a pass.
//!
//! Each leg meets all micro-batches, group by group, before the next one. A *light* layer computes
//! less than the copies of its boundaries take, such as the last norm, so a device would wait in
//! it. It goes in rounds with a neighbour: both meet a micro-batch before the next one. The copies
//! of the light layer then hide behind what the neighbour computes, and what the two hand to each
//! other can stay on the device ([`hand_over`](super::hand_over())). Each layer still meets its
//! micro-batches in order, so sums are the same.

use std::ops::Range;

use super::{LayerId, MicroBatch, Schedule, Visit, VisitKind};

/// The visits of a pass, made from one leg for each step.
pub(super) fn of_pass(schedule: &Schedule, legs: &[Visit], light: &[LayerId]) -> Vec<Visit> {
    let light = if schedule.runs.is_empty() { light } else { &[] };
    let groups = &schedule.groups;
    let mut visits = Vec::new();
    let mut left = legs;
    while let [leg, others @ ..] = left {
        left = others;
        match others.first().filter(|other| is_round(legs, leg, other, light)) {
            None => visits.extend(by_group(groups, leg)),
            Some(other) => {
                let each = groups.iter().cloned().flatten();
                let round = |m| [leg, other].map(|leg| leg.of_micro_batches(m..m + 1));
                visits.extend(each.flat_map(round));
                left = &others[1..];
            }
        }
    }
    visits
}

impl Schedule {
    /// True if a device alternates between two layers, each of which meets the next micro-batch.
    pub fn has_rounds(&self) -> bool {
        let visits: Vec<&Visit> = self.device_visits().collect();
        visits.windows(3).any(|visits| {
            let [first, other, next] = visits else { return false };
            let Range { start, end } = first.micro_batches;
            let is_one = end - start == 1 && other.micro_batches == first.micro_batches;
            let is_next = next.layer == first.layer && next.micro_batches == (end..end + 1);
            is_one && is_next && other.layer != first.layer && other.place == first.place
        })
    }
}

/// The visits of a leg that meets a group at a time.
fn by_group(groups: &[Range<MicroBatch>], leg: &Visit) -> Vec<Visit> {
    // A group goes on as soon as it has its own answers.
    let answers = matches!(leg.kind, VisitKind::Balance { .. } | VisitKind::Objective { .. });
    let is_cut = leg.on_device() || answers && !leg.kind.is_of_step();
    match is_cut {
        true => groups.iter().map(|group| leg.of_micro_batches(group.clone())).collect(),
        false => vec![leg.clone()],
    }
}

/// True for two legs that follow each other, of which one is light. Both are the only legs of their
/// layers, so nothing else stands between them. Each has one block, so that a round needs two slots
/// for weights and for gradients.
fn is_round(legs: &[Visit], leg: &Visit, other: &Visit, light: &[LayerId]) -> bool {
    let is_alone = |leg: &Visit| {
        let of_layer = legs.iter().filter(|one| one.layer == leg.layer && one.on_device());
        leg.kind == VisitKind::Layer && leg.blocks.len() <= 1 && of_layer.count() == 1
    };
    light.contains(&leg.layer) != light.contains(&other.layer) && is_alone(leg) && is_alone(other)
}
