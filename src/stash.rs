//! The layout of the stash, where boundaries wait between visits, on the host or on the device, and
//! of what visits keep on their device beside it.
//!
//! A boundary has a place for each group of micro-batches. If devices meet one micro-batch at a
//! time (resident, pipelines), it has a place for each micro-batch. A place is used again by a
//! boundary of the same size, once an earlier visit of the same device has read it for the last
//! time. No lock is needed: one lane of a device computes its visits in their order, and a visit's
//! outputs are written while it computes (on the CPU) or downloaded after it. By then all earlier
//! visits of the device have read their inputs. A visit never writes where it reads: its outputs
//! get their places before the places of its inputs are free. A boundary that the host reads (loss,
//! scatter), or that several devices read, keeps its place for the whole step.
//!
//! A boundary may be *packed*: the stash holds its numbers in bf16 or int8 (`tensor::packed`).

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use l2l_actors::schedule::{BoundaryId, DeviceId, MicroBatch, Schedule, Visit};

use crate::tensor::ALIGNED;

/// Where each boundary of a step lies in the stash, or in what its device keeps, in floats.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct StashLayout {
    /// For each boundary and unit: its first float, and its floats for a sequence.
    places: Vec<(usize, usize)>,
    /// The number of sequences before each micro-batch; the last entry is the number of all.
    before: Vec<usize>,
    /// Units: micro-batches that share a place.
    units: Vec<Range<MicroBatch>>,
    pub(crate) floats: usize,
    /// Floats of what a device keeps, of the device that keeps the most.
    pub(crate) kept_floats: usize,
}

type UnitBoundary = (BoundaryId, usize);

/// Where places are counted: the stash, or what this device keeps.
type Side = Option<DeviceId>;

impl StashLayout {
    /// The first float of one micro-batch of a boundary, and the number of floats that it has room
    /// for.
    pub(crate) fn place(&self, id: BoundaryId, m: MicroBatch) -> (usize, usize) {
        let unit = unit_of(&self.units, m);
        let (at, floats) = self.places[id.0 as usize * self.units.len() + unit];
        let first = self.before[self.units[unit].start as usize];
        let from = self.before[m as usize];
        let to = self.before[m as usize + 1];
        (at + (from - first) * floats, (to - from) * floats)
    }
}

/// Gives every boundary of a schedule a place, except keys and values, which lie in the KV cache.
pub(crate) fn layout(schedule: &Schedule) -> StashLayout {
    let mut before = vec![0];
    for &sequences in &schedule.micro_batches {
        before.push(before[before.len() - 1] + sequences as usize);
    }
    let units = units(schedule);
    let index = |(id, unit): UnitBoundary| id.0 as usize * units.len() + unit;
    let last_reads = last_reads(schedule, &units);
    let mut places: Vec<Option<(usize, usize)>> =
        vec![None; schedule.boundaries.len() * units.len()];
    // Side, device, and floats per sequence -> places.
    let mut free: HashMap<(Side, Option<DeviceId>, usize), Vec<usize>> = HashMap::new();
    // Each place has room for the largest group, so that any unit can reuse it.
    let sequences =
        |unit: &Range<MicroBatch>| before[unit.end as usize] - before[unit.start as usize];
    let sequences = units.iter().map(sequences).max().unwrap_or(0);
    let mut ends: BTreeMap<Side, usize> = BTreeMap::new();
    for (now, visit) in schedule.visits.iter().enumerate() {
        let device = visit.device();
        let stays: Vec<BoundaryId> = visit.stays().collect();
        for (side, written) in [(None, &visit.writes), (device, &stays)] {
            for met in in_units(&units, visit, written) {
                let place = &mut places[index(met)];
                if place.is_some() || schedule.boundary(met.0).role.is_kv() {
                    continue; // another micro-batch of the unit was written before
                }
                let per_sequence = floats_of_sequence(schedule, met.0, side);
                let reused = free.get_mut(&(side, device, per_sequence)).and_then(Vec::pop);
                let at = reused.unwrap_or_else(|| {
                    let end = ends.entry(side).or_default();
                    let at = *end;
                    *end += (per_sequence * sequences).next_multiple_of(ALIGNED);
                    at
                });
                *place = Some((at, per_sequence));
            }
        }
        for (side, read) in [(None, &visit.reads), (device, &visit.kept)] {
            for met in in_units(&units, visit, read) {
                if last_reads.get(&met) == Some(&Some(now))
                    && let Some((at, per_sequence)) = places[index(met)]
                {
                    free.entry((side, device, per_sequence)).or_default().push(at);
                }
            }
        }
    }
    let places = places.into_iter().map(Option::unwrap_or_default).collect();
    let floats = ends.remove(&None).unwrap_or(0);
    let kept_floats = ends.into_values().max().unwrap_or(0);
    StashLayout { places, before, units, floats, kept_floats }
}

/// Floats of one sequence of a boundary. Kernels read and write in place what a device keeps, so
/// there each sequence is aligned.
fn floats_of_sequence(schedule: &Schedule, id: BoundaryId, side: Side) -> usize {
    let boundary = schedule.boundary(id);
    let positions = u64::from(schedule.positions);
    let floats = |bytes: u64| bytes as usize / size_of::<f32>();
    match side {
        None => floats(boundary.stashed_bytes(1, positions)),
        Some(_) => floats(boundary.bytes(1, positions)).next_multiple_of(ALIGNED),
    }
}

/// The units of a schedule: its groups, or single micro-batches if devices meet one at a time
/// (resident, pipelines). Then the places of one are free for others before the step ends.
fn units(schedule: &Schedule) -> Vec<Range<MicroBatch>> {
    match schedule.device_visits().all(|visit| visit.micro_batches.len() == 1) {
        true => (0..schedule.micro_batches.len() as MicroBatch).map(|m| m..m + 1).collect(),
        false => schedule.groups.clone(),
    }
}

fn unit_of(units: &[Range<MicroBatch>], m: MicroBatch) -> usize {
    units.partition_point(|unit| unit.end <= m)
}

/// These boundaries, in each unit that a visit meets.
fn in_units(
    units: &[Range<MicroBatch>],
    visit: &Visit,
    boundaries: &[BoundaryId],
) -> Vec<UnitBoundary> {
    let Range { start, end } = visit.micro_batches;
    let units = unit_of(units, start)..=unit_of(units, end - 1);
    boundaries.iter().flat_map(|&id| units.clone().map(move |unit| (id, unit))).collect()
}

/// The visit that reads each boundary of a unit last. `None`: the host or several devices read it.
fn last_reads(
    schedule: &Schedule,
    units: &[Range<MicroBatch>],
) -> HashMap<UnitBoundary, Option<usize>> {
    let mut last_reads: HashMap<UnitBoundary, Option<usize>> = HashMap::new();
    for (index, visit) in schedule.visits.iter().enumerate() {
        let read: Vec<BoundaryId> = visit.all_reads().collect();
        for met in in_units(units, visit, &read) {
            let before = last_reads.insert(met, Some(index).filter(|_| visit.on_device()));
            let is_ours = |before: Option<usize>| {
                before.is_some_and(|before| schedule.visits[before].place == visit.place)
            };
            if before.is_some_and(|before| !is_ours(before)) {
                last_reads.insert(met, None);
            }
        }
    }
    last_reads
}
