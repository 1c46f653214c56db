//! The devices' visits with every choice made: which slot each block takes, and where each
//! gradient opens and closes.

use super::choice::cut_uploads;
use super::residency::{Residence, residency};
use super::spans::gradient_spans;
use super::{Phase, Pools, Portion, Schedule, Visit, batches};

/// A visit of a device, resolved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceVisit {
    /// Index in [`Schedule::visits`].
    pub visit: usize,
    /// The visit's blocks and their slots, in the visit's order.
    pub residences: Vec<Residence>,
    /// Blocks whose gradient it adds to, and whether it is the first of its group to do so. The
    /// visit's other blocks are frozen.
    pub accumulates: Vec<(Portion, bool)>,
    /// Blocks whose gradient of its group is complete when it ends.
    pub closes: Vec<Portion>,
}

impl DeviceVisit {
    /// The blocks that are uploaded for it.
    pub fn uploads(&self) -> impl Iterator<Item = &Residence> {
        self.residences.iter().filter(|residence| residence.upload)
    }
}

/// A block with fewer bytes than this part of the largest is small: to fetch it again in each visit
/// of a step takes less time than one large block. Of a transformer it is a norm's, whose share is
/// far below this, and no layer's.
const SMALL: u64 = 256;

/// All devices' visits, in the order of the schedule.
pub(super) fn device_visits(schedule: &Schedule, pools: &Pools) -> Vec<DeviceVisit> {
    let visits: Vec<(usize, &Visit)> =
        schedule.visits.iter().enumerate().filter(|(_, visit)| visit.on_device()).collect();
    let mut residences = vec![Vec::new(); visits.len()];
    let largest = schedule.blocks.iter().map(|block| block.weight_bytes).max().unwrap_or(0);
    let is_small = |portion| schedule.cut(portion).weight_bytes < largest / SMALL;
    for own in by_device(schedule, pools) {
        let portions: Vec<_> =
            own.iter().map(|&at| batches::needs(schedule, visits[at].1).collect()).collect();
        for (&at, mut placed) in own.iter().zip(residency(&portions, pools.weights, is_small)) {
            placed.iter_mut().for_each(|residence| {
                residence.after = residence.after.map(|before| own[before]);
            });
            residences[at] = placed;
        }
    }
    let spans = gradient_spans(schedule);
    let mut resolved = Vec::with_capacity(visits.len());
    for (now, ((index, visit), residences)) in visits.into_iter().zip(residences).enumerate() {
        let adds = visit.phase == Phase::Backward;
        let group = schedule.group_of(visit.micro_batches.start);
        let span = |id: Portion| spans.get(&(id, group)).filter(|_| adds);
        let trained = || visit.portions().filter_map(|id| Some((id, *span(id)?)));
        resolved.push(DeviceVisit {
            visit: index,
            residences,
            accumulates: trained().map(|(id, (first, _))| (id, first == now)).collect(),
            closes: trained().filter(|(_, (_, last))| *last == now).map(|(id, _)| id).collect(),
        });
    }
    cut_uploads(schedule, &mut resolved);
    resolved
}

/// The visits of each device, as indices among the visits of all devices.
pub(super) fn by_device(schedule: &Schedule, pools: &Pools) -> Vec<Vec<usize>> {
    let mut visits = vec![Vec::new(); pools.devices as usize];
    for (index, device) in schedule.device_visits().filter_map(Visit::device).enumerate() {
        visits[usize::from(device)].push(index);
    }
    visits
}
