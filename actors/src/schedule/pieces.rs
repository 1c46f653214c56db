//! A Prefetcher's list: the uploads to its device in a step, in order.
//!
//! **The upload lane's order.** Inputs of each visit in order. The blocks of a coming visit stand
//! (a) behind the last input of the visit that last used their slot, (b) behind the last input of
//! the visit `visit credits` before their own, (c) never before their own step, (d) if they wait
//! for what rows choose of them, behind the last input of the visit that writes it, (e) if they
//! wait for an update of their own step, behind the last input of the visit that ends its gradient.
//! An entry can complete without those in front of it, so the list cannot end in a circle. Within
//! these rules, a block stands behind as many inputs of the running visit as the pool fetches
//! ahead: the lane is in order, and a whole block in front of them would starve the compute lane. A
//! block is one piece. If long visits with few stash slots ask for it, a piece becomes a share, and
//! this list is the one place that changes.

use std::ops::Range;

use super::choice::ChosenBy;
use super::device_visits::DeviceVisit;
use super::{MicroBatch, Pools, Schedule, Visit, batches};

/// One entry of a Prefetcher's list. Device visits are indices in
/// [`StepPlan::device_visits`](super::StepPlan::device_visits).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece {
    /// The blocks of a device visit that are not there yet, and its announcement.
    Weights {
        /// Index of the device visit.
        device_visit: usize,
    },
    /// The boundaries that one micro-batch brings to a device visit.
    Inputs {
        /// Index of the device visit.
        device_visit: usize,
        /// The micro-batch.
        micro_batch: MicroBatch,
    },
}

/// The list of the device that has these visits. The head of this file gives the order.
pub(super) fn pieces(
    schedule: &Schedule,
    pools: &Pools,
    device_visits: &[DeviceVisit],
    visits: &[usize],
) -> Vec<Piece> {
    let places = earliest_places(schedule, pools, device_visits, visits);
    let mut coming = visits.iter().zip(places).peekable();
    let mut list = Vec::new();
    for (own, &device_visit) in visits.iter().enumerate() {
        let visit = &schedule.visits[device_visits[device_visit].visit];
        for (before, micro_batch) in (0..).zip(schedule.units(visit)) {
            while let Some((&device_visit, _)) = coming.next_if(|(_, at)| *at <= (own, before)) {
                list.push(Piece::Weights { device_visit });
            }
            if !visit.reads.is_empty() {
                list.push(Piece::Inputs { device_visit, micro_batch });
            }
        }
    }
    list
}

/// For each visit of the device, the earliest place of its blocks in the list: behind how many
/// inputs of which of the device's visits.
fn earliest_places(
    schedule: &Schedule,
    pools: &Pools,
    device_visits: &[DeviceVisit],
    visits: &[usize],
) -> Vec<(usize, u32)> {
    let mut places = Vec::with_capacity(visits.len());
    let mut earliest = (0, 0);
    for (own, &device_visit) in visits.iter().enumerate() {
        let residences = device_visits[device_visit].residences.iter();
        let freed = residences.filter_map(|residence| residence.after);
        let freed = freed.map(|after| visits.partition_point(|&visit| visit < after));
        let behind = freed.chain(own.checked_sub(pools.visits as usize)).max();
        let meanwhile = behind.map_or(0, |visit| visit + 1);
        let place = if meanwhile >= own {
            (own, 0)
        } else {
            let between = visits[meanwhile..own].iter().map(|&at| {
                let uploads = device_visits[at].uploads().next().is_some();
                (&schedule.visits[device_visits[at].visit], uploads)
            });
            let between: Vec<_> = between.collect();
            let (further, inputs) = behind_inputs(pools.ahead, &between);
            (meanwhile + further, inputs)
        };
        let choice = chosen_behind(schedule, device_visits, &visits[..own], device_visit);
        let updated = batches::waits_behind(schedule, device_visits, &visits[..own], device_visit);
        let updated = updated.map_or((0, 0), |at| (at + 1, 0));
        earliest = place.max(choice).max(updated).max(earliest);
        places.push(earliest);
    }
    places
}

/// The place behind as many inputs as are fetched ahead, and at least one. They are those of the
/// first of these visits, and of further ones that upload no blocks, as long as they meet the same
/// blocks or take turns. Inputs of other visits may wait for what runs, and the link would, too.
fn behind_inputs(ahead: u32, visits: &[(&Visit, bool)]) -> (usize, u32) {
    let mut place = (0, 1);
    let mut left = ahead;
    let is_alike = |at: Option<usize>, other: usize| {
        let visits = at.and_then(|at| visits.get(at)).zip(visits.get(other));
        visits.is_some_and(|((a, _), (b, _))| a.portions().eq(b.portions()))
    };
    for (at, (visit, _)) in visits.iter().enumerate() {
        let all = visit.micro_batches.len() as u32;
        let slots = visit.reads.len() as u32;
        let inputs = left.checked_div(slots).unwrap_or(all).min(all);
        left -= inputs * slots;
        if inputs > 0 {
            place = (at, inputs);
        }
        let next = at + 1;
        let goes_on = is_alike(Some(at), next)
            || is_alike(Some(at), at + 2)
            || is_alike(at.checked_sub(1), next);
        if inputs < all || !goes_on || visits.get(next).is_some_and(|(_, uploads)| *uploads) {
            break;
        }
    }
    place
}

/// The place behind the last input of the device's visit that writes what rows choose of the blocks
/// of a visit. `before`: the device's earlier visits.
fn chosen_behind(
    schedule: &Schedule,
    device_visits: &[DeviceVisit],
    before: &[usize],
    device_visit: usize,
) -> (usize, u32) {
    let visit = |index: usize| &schedule.visits[device_visits[index].visit];
    let choices = device_visits[device_visit].uploads().filter_map(|residence| residence.chosen_by);
    let behind = |ChosenBy { boundary, first, end }: ChosenBy| {
        before.iter().rposition(|&earlier| {
            let Range { start, end: last } = visit(earlier).micro_batches;
            visit(earlier).writes.contains(&boundary) && start < end && first < last
        })
    };
    let place = |at: usize| (at, visit(before[at]).micro_batches.len() as u32);
    choices.filter_map(behind).max().map_or((0, 0), place)
}
