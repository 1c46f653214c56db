//! The Prefetcher's list: what is gathered, staged and uploaded in a step, in order.
//!
//! **The upload lane's order.** Inputs of each visit in order; the blocks of a coming visit stand
//! (a) behind the last input of the visit that last used their slot, (b) behind the last input of
//! the visit `visit credits` before their own, (c) never before their own step. What is behind
//! can complete without what is in front, so the list cannot end in a circle. Within that, a
//! block stands behind as many inputs of the visit running meanwhile as the pool fetches ahead:
//! the lane is in order, and a whole block in front of them would starve the compute lane.
//! A block is one piece; when long visits with few stash slots ask for it, a piece becomes a
//! share and this list is the one place that changes.
//!
//! **Staging.** A staged block is read into a staging slot before a piece takes it from there.
//! Reads stand as far ahead of their piece as staging slots allow.

use super::device_visits::DeviceVisit;
use super::{BlockId, MicroBatch, Pools, Schedule, VisitKind};

/// The part of a gather that one operation does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// All blocks, for one micro-batch.
    MicroBatch(MicroBatch),
    /// One block, for all micro-batches of the visit: so a staging slot is needed once.
    Block(BlockId),
}

/// One entry of the Prefetcher's list. Visits are indices in [`Schedule::visits`], device visits
/// in [`StepPlan::device_visits`](super::StepPlan::device_visits).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece {
    /// A share of the gather of a host visit.
    Gather {
        /// Index of the host visit.
        visit: usize,
        /// Which share.
        share: Share,
    },
    /// The read of a staged block that a coming piece takes. Blocks are taken in the order in
    /// which they are staged.
    Stage {
        /// Index of the visit that needs it.
        visit: usize,
        /// The block.
        block: BlockId,
    },
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

/// The whole list.
pub(super) fn pieces(
    schedule: &Schedule,
    pools: &Pools,
    device_visits: &[DeviceVisit],
) -> Vec<Piece> {
    let list = in_upload_order(schedule, pools, device_visits);
    with_stages(list, schedule, pools, device_visits)
}

/// The list without staging: see the head of this file.
fn in_upload_order(
    schedule: &Schedule,
    pools: &Pools,
    device_visits: &[DeviceVisit],
) -> Vec<Piece> {
    let places = earliest_places(schedule, pools, device_visits);
    let mut coming = places.into_iter().enumerate().peekable();
    let mut list = Vec::new();
    let mut own = 0;
    for (index, visit) in schedule.visits.iter().enumerate() {
        if !visit.on_device() {
            if visit.kind == VisitKind::Gather {
                push_gather(&mut list, schedule, index);
            }
            continue;
        }
        for (before, micro_batch) in (0..).zip(visit.micro_batches.clone()) {
            while let Some((device_visit, _)) = coming.next_if(|(_, place)| *place <= (own, before))
            {
                list.push(Piece::Weights { device_visit });
            }
            if !visit.reads.is_empty() {
                list.push(Piece::Inputs { device_visit: own, micro_batch });
            }
        }
        own += 1;
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

/// By micro-batch, so that the first one can go on early; with a staged block, by block.
fn push_gather(list: &mut Vec<Piece>, schedule: &Schedule, index: usize) {
    let visit = &schedule.visits[index];
    let share = |share| Piece::Gather { visit: index, share };
    if schedule.staged(visit.blocks()) == 0 {
        list.extend(visit.micro_batches.clone().map(|m| share(Share::MicroBatch(m))));
    } else {
        list.extend(visit.blocks().iter().map(|&block| share(Share::Block(block))));
    }
}

/// Puts the read of each staged block in front of the piece that takes it, as far ahead as slots
/// allow: a piece's own, and those of the pieces behind it for which slots are left. Those slots
/// were freed by uploads of pieces before, so no read waits for what comes behind it.
fn with_stages(
    pieces: Vec<Piece>,
    schedule: &Schedule,
    pools: &Pools,
    device_visits: &[DeviceVisit],
) -> Vec<Piece> {
    let taken = |piece: &Piece| staged_blocks(piece, schedule, device_visits);
    let stages = pieces.iter().flat_map(|piece| {
        let (visit, blocks) = taken(piece);
        blocks.into_iter().map(move |block| Piece::Stage { visit, block })
    });
    let stages: Vec<Piece> = stages.collect();
    let mut stages = stages.into_iter().enumerate().peekable();
    let (mut list, mut count) = (Vec::with_capacity(pieces.len()), 0);
    for piece in pieces {
        let (_, blocks) = taken(&piece);
        let limit = count + pools.reads as usize;
        if !blocks.is_empty() {
            list.extend(
                std::iter::from_fn(|| stages.next_if(|(nth, _)| *nth < limit)).map(|s| s.1),
            );
            count += blocks.len();
        }
        list.push(piece);
    }
    list
}

/// The staged blocks that a piece takes, and the visit that it is for.
fn staged_blocks(
    piece: &Piece,
    schedule: &Schedule,
    device_visits: &[DeviceVisit],
) -> (usize, Vec<BlockId>) {
    let is_staged = |id: &BlockId| schedule.block(*id).staged;
    match *piece {
        Piece::Gather { visit, share: Share::Block(block) } => {
            (visit, Some(block).filter(is_staged).into_iter().collect())
        }
        Piece::Weights { device_visit } => {
            let DeviceVisit { visit, residences, .. } = &device_visits[device_visit];
            let fetched = residences.iter().filter(|residence| residence.fetch);
            (*visit, fetched.map(|residence| residence.block).filter(is_staged).collect())
        }
        Piece::Gather { visit, share: Share::MicroBatch(_) } => (visit, Vec::new()),
        Piece::Stage { visit, .. } => (visit, Vec::new()),
        Piece::Inputs { device_visit, .. } => (device_visits[device_visit].visit, Vec::new()),
    }
}
