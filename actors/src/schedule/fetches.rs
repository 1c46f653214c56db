//! The Fetcher's list: reads from file and gathers of a step, in order.
//!
//! A staged block is read into a staging slot before a gather or an upload takes it from there.
//! Both stand in the order of their visits; with several devices, in the order in which the
//! Prefetchers take blocks, because these run ahead of each other. Reads run as far ahead as
//! staging slots allow: each waits for the slot of an earlier read, which becomes free without
//! anything that is read later.

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

/// One entry of the Fetcher's list. Visits are indices in [`Schedule::visits`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fetch {
    /// The read of a staged block, for a gather or for the upload of a device visit. Blocks are
    /// taken in the order in which they are read.
    Read {
        /// Index of the visit that needs it.
        visit: usize,
        /// The block.
        block: BlockId,
    },
    /// A share of the gather of a host visit.
    Gather {
        /// Index of the host visit.
        visit: usize,
        /// The share.
        share: Share,
    },
}

/// Staged blocks that are taken at once, by a share of a gather or by a visit's uploads.
struct Take {
    visit: usize,
    share: Option<Share>,
    blocks: Vec<BlockId>,
}

/// True if blocks are read for a visit of a device. Where they come in shards, all devices take
/// theirs from the masters that are read for the first.
pub(super) fn reads_for(schedule: &Schedule, resolved: &DeviceVisit) -> bool {
    schedule.shards == 1 || schedule.visits[resolved.visit].device() == Some(0)
}

/// The whole list. `order` is the order in which device visits take blocks; by default, that of the
/// visits.
pub(super) fn fetches(
    schedule: &Schedule,
    pools: &Pools,
    device_visits: &[DeviceVisit],
    order: Option<&[usize]>,
) -> Vec<Fetch> {
    let mut takes = takes(schedule, device_visits);
    if let Some(order) = order {
        // Gathers need no device: they come first, in their order.
        let mut nth = vec![0; schedule.visits.len()];
        for (position, &device_visit) in order.iter().enumerate() {
            nth[device_visits[device_visit].visit] = position + 1;
        }
        takes.sort_by_key(|take| nth[take.visit]);
    }
    let read = |visit: usize| move |&block: &BlockId| Fetch::Read { visit, block };
    let reads = takes.iter().flat_map(|take| take.blocks.iter().map(read(take.visit)));
    let mut reads = reads.enumerate().peekable();
    let mut list = Vec::new();
    let mut count = 0;
    for &Take { visit, share, ref blocks } in &takes {
        // Its own reads, and those behind them for which slots are left.
        let limit = count + pools.reads as usize;
        if !blocks.is_empty() {
            let ahead = std::iter::from_fn(|| reads.next_if(|(nth, _)| *nth < limit));
            list.extend(ahead.map(|(_, read)| read));
            count += blocks.len();
        }
        list.extend(share.map(|share| Fetch::Gather { visit, share }));
    }
    list
}

/// The blocks that gathers and uploads take, in the order of visits.
fn takes(schedule: &Schedule, device_visits: &[DeviceVisit]) -> Vec<Take> {
    let staged = |ids: Vec<BlockId>| -> Vec<BlockId> {
        ids.into_iter().filter(|&id| schedule.passes_host_slot(id)).collect()
    };
    let mut device = device_visits.iter();
    let mut takes = Vec::new();
    for (index, visit) in schedule.visits.iter().enumerate() {
        if visit.on_device() {
            let resolved = device.next().into_iter().filter(|visit| reads_for(schedule, visit));
            let uploads = resolved.flat_map(DeviceVisit::uploads);
            let blocks = staged(uploads.map(|residence| residence.block).collect());
            takes.push(Take { visit: index, share: None, blocks });
        } else if visit.kind == VisitKind::Gather {
            let take = |share: Share, blocks| Take { visit: index, share: Some(share), blocks };
            if schedule.host_slots(&visit.blocks) == 0 {
                // By micro-batch, so that the first one can go on early.
                let shares = visit.micro_batches.clone().map(Share::MicroBatch);
                takes.extend(shares.map(|share| take(share, Vec::new())));
            } else {
                let shares = visit.blocks.iter();
                takes.extend(shares.map(|&id| take(Share::Block(id), staged(vec![id]))));
            }
        }
    }
    takes
}
