//! The Prefetcher's list: what is uploaded in a step, in order.
//!
//! **The upload lane's order.** Inputs of each visit in order; the blocks of a coming visit stand
//! (a) behind the last input of the visit that last used their slot, (b) behind the last input of
//! the visit `visit credits` before their own, (c) never before their own step. What is behind
//! can complete without what is in front, so the list cannot end in a circle. Within that, a
//! block stands behind as many inputs of the visit running meanwhile as the pool fetches ahead:
//! the lane is in order, and a whole block in front of them would starve the compute lane.
//! A block is one piece; when long visits with few stash slots ask for it, a piece becomes a
//! share and this list is the one place that changes.

use super::device_visits::DeviceVisit;
use super::{MicroBatch, Pools, Schedule};

/// One entry of the Prefetcher's list. Device visits are indices in
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

/// The whole list: see the head of this file.
pub(super) fn pieces(
    schedule: &Schedule,
    pools: &Pools,
    device_visits: &[DeviceVisit],
) -> Vec<Piece> {
    let places = earliest_places(schedule, pools, device_visits);
    let mut coming = places.into_iter().enumerate().peekable();
    let mut list = Vec::new();
    for (own, visit) in schedule.device_visits().enumerate() {
        for (before, micro_batch) in (0..).zip(visit.micro_batches.clone()) {
            while let Some((device_visit, _)) = coming.next_if(|(_, place)| *place <= (own, before))
            {
                list.push(Piece::Weights { device_visit });
            }
            if !visit.reads.is_empty() {
                list.push(Piece::Inputs { device_visit: own, micro_batch });
            }
        }
    }
    list
}

/// For each device visit, the earliest place of its blocks in the list: behind how many inputs of
/// which visit.
fn earliest_places(
    schedule: &Schedule,
    pools: &Pools,
    device_visits: &[DeviceVisit],
) -> Vec<(usize, u32)> {
    let mut places = Vec::with_capacity(device_visits.len());
    let mut earliest = (0, 0);
    for (own, resolved) in device_visits.iter().enumerate() {
        let freed = resolved.residences.iter().filter_map(|residence| residence.after);
        let behind = freed.chain(own.checked_sub(pools.visits as usize)).max();
        let meanwhile = behind.map_or(0, |visit| visit + 1);
        let place = if meanwhile >= own {
            (own, 0)
        } else {
            let visit = &schedule.visits[device_visits[meanwhile].visit];
            let slots = schedule.slots(&visit.reads).max(1);
            let inputs = (pools.ahead / slots).max(1).min(visit.micro_batches.len() as u32);
            (meanwhile, inputs)
        };
        earliest = place.max(earliest);
        places.push(earliest);
    }
    places
}
