//! The Fetcher's list: reads from file and gathers of a step, in order.
//!
//! A staged block is read into a staging slot before a gather or an upload takes it from there.
//! Both stand in the order of their visits; with several devices, in the order in which the
//! Prefetchers take blocks, because these run ahead of each other. Reads run as far ahead as
//! staging slots allow: each waits for the slot of an earlier read, which becomes free without
//! anything that is read later. Uploads that follow each other, each of another portion of one
//! block, share a read, on one device or on several.

use std::collections::{BTreeMap, BTreeSet};

use super::device_visits::DeviceVisit;
use super::{BlockId, DeviceId, MicroBatch, Pools, Portion, Schedule, VisitKind};

/// The part of a gather that one operation does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// All blocks, for one micro-batch.
    MicroBatch(MicroBatch),
    /// One block, for all micro-batches of the visit: so a staging slot is needed once.
    Block(BlockId),
}

/// One entry of the Fetcher's list. Visits are indices in [`Schedule::visits`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fetch {
    /// The read of a staged block, for a gather or for uploads of device visits. Blocks are taken
    /// in the order in which they are read.
    Read {
        /// The visits that it is for: several, if each uploads another portion of the block.
        visits: Vec<usize>,
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

impl Fetch {
    /// The block that is read.
    pub(super) fn read(&self) -> Option<BlockId> {
        match self {
            Fetch::Read { block, .. } => Some(*block),
            Fetch::Gather { .. } => None,
        }
    }
}

/// The uploads of a device that share a read for these visits. If blocks come in shards, each
/// device uploads its part for each visit.
pub(crate) fn uses(schedule: &Schedule, visits: &[usize], device: DeviceId) -> u32 {
    let is_own =
        |index: &&usize| schedule.shards > 1 || schedule.visits[**index].device() == Some(device);
    visits.iter().filter(is_own).count() as u32
}

/// Staged blocks that are taken at once, by a share of a gather or by a visit's uploads.
struct Take {
    visit: usize,
    share: Option<Share>,
    portions: Vec<Portion>,
}

/// A read, and the uploads that have taken from it.
struct Read {
    block: BlockId,
    first_take: usize,
    last_take: usize,
    visits: Vec<usize>,
    taken: BTreeSet<(Option<DeviceId>, Portion)>,
}

/// The reads of some takes, in the order of their first uses. A take shares a read with the take
/// before it alone: else the read would hold its slot while others wait for slots.
fn reads(schedule: &Schedule, takes: &[Take]) -> Vec<Read> {
    let mut reads: Vec<Read> = Vec::new();
    let mut of_block: BTreeMap<BlockId, usize> = BTreeMap::new();
    let mut before = 0; // the last take before this one that has portions
    let of_portions = takes.iter().enumerate().filter(|(_, take)| !take.portions.is_empty());
    for (take, &Take { visit, ref portions, .. }) in of_portions {
        let device = schedule.visits[visit].device();
        for &portion in portions {
            let block = portion.block;
            let taken = (device, portion);
            let shared = of_block.get(&block).copied().filter(|&at| {
                let Read { last_take, taken: others, .. } = &reads[at];
                portion.cut.is_some() && *last_take >= before && !others.contains(&taken)
            });
            let at = shared.unwrap_or_else(|| {
                let visits = Vec::new();
                let taken = BTreeSet::new();
                reads.push(Read { block, first_take: take, last_take: take, visits, taken });
                reads.len() - 1
            });
            reads[at].visits.push(visit);
            reads[at].taken.insert(taken);
            reads[at].last_take = take;
            of_block.insert(block, at);
        }
        before = take;
    }
    reads
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
    let reads = reads(schedule, &takes);
    let firsts: Vec<usize> = reads.iter().map(|read| read.first_take).collect();
    let mut reads = reads.into_iter().enumerate().peekable();
    let mut list = Vec::new();
    for (nth, &Take { visit, share, ref portions }) in takes.iter().enumerate() {
        if !portions.is_empty() {
            // Its own reads, and those behind them for which slots are left.
            let limit = firsts.partition_point(|&first| first < nth) + pools.reads as usize;
            let ahead = std::iter::from_fn(|| reads.next_if(|(nth, _)| *nth < limit));
            list.extend(ahead.map(|(_, Read { block, visits, .. })| Fetch::Read { visits, block }));
        }
        list.extend(share.map(|share| Fetch::Gather { visit, share }));
    }
    list
}

/// The blocks that gathers and uploads take, in the order of visits.
fn takes(schedule: &Schedule, device_visits: &[DeviceVisit]) -> Vec<Take> {
    let staged = |portions: Vec<Portion>| -> Vec<Portion> {
        let portions = portions.into_iter();
        portions.filter(|portion| schedule.passes_host_slot(portion.block)).collect()
    };
    let mut device = device_visits.iter();
    let mut takes = Vec::new();
    for (index, visit) in schedule.visits.iter().enumerate() {
        if visit.on_device() {
            let resolved = device.next().into_iter().filter(|visit| reads_for(schedule, visit));
            let uploads = resolved.flat_map(DeviceVisit::uploads);
            let portions = staged(uploads.map(|residence| residence.portion).collect());
            takes.push(Take { visit: index, share: None, portions });
        } else if visit.kind == VisitKind::Gather {
            let take = |share, portions| Take { visit: index, share: Some(share), portions };
            if schedule.host_slots(&visit.blocks) == 0 {
                // By micro-batch, so that the first one can go on early.
                let shares = visit.micro_batches.clone().map(Share::MicroBatch);
                takes.extend(shares.map(|share| take(share, Vec::new())));
            } else {
                let shares = visit.blocks.iter();
                takes.extend(shares.map(|&id| take(Share::Block(id), staged(vec![id.into()]))));
            }
        }
    }
    takes
}
