//! The layout of the stash, where boundaries wait between visits, on the host or on the device, and
//! of what visits keep on their device beside it.
//!
//! A boundary has a place for each group of micro-batches. If devices meet one micro-batch at a
//! time (resident, pipelines), and in what a device keeps, it has a place for each micro-batch. A
//! place is used again by a boundary of the same size, once an earlier visit of the same device has
//! read it for the last time. No lock is needed: one lane of a device computes its visits in their
//! order, and a visit's outputs are written while it computes (on the CPU) or downloaded after it.
//! By then all earlier visits of the device have read their inputs. A visit never writes where it
//! reads: its outputs get their places before the places of its inputs are free. A boundary that
//! the host reads (loss, scatter, what rows choose), or that several devices read, keeps its place
//! for the whole step.
//!
//! A boundary may be *packed*: the stash holds its numbers in bf16 or int8 (`tensor::packed`).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::{Range, RangeInclusive};

use l2l_actors::schedule::{BoundaryId, DeviceId, MicroBatch, Schedule, Visit};

use crate::tensor::ALIGNED;

/// Where each boundary of a step lies in the stash, or in what its device keeps, in floats.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct StashLayout {
    /// The number of sequences before each micro-batch; the last entry is the number of all.
    before: Vec<usize>,
    stash: Places,
    kept: Places,
    pub(crate) floats: usize,
    /// Floats of what a device keeps, of the device that keeps the most.
    pub(crate) kept_floats: usize,
}

/// The places of boundaries.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Places {
    /// Units: micro-batches that share a place.
    units: Vec<Range<MicroBatch>>,
    /// For each boundary and unit: its first float, and its floats for a sequence.
    of: Vec<(usize, usize)>,
}

type UnitBoundary = (BoundaryId, usize);

/// Where places are counted: the stash, or what this device keeps.
type Side = Option<DeviceId>;

impl StashLayout {
    /// The first float of one micro-batch of a boundary in the stash, and the number of floats that
    /// it has room for.
    pub(crate) fn place(&self, id: BoundaryId, m: MicroBatch) -> (usize, usize) {
        self.stash.of(id, m, &self.before)
    }

    /// The same of a boundary that a device keeps.
    pub(crate) fn kept_place(&self, id: BoundaryId, m: MicroBatch) -> (usize, usize) {
        self.kept.of(id, m, &self.before)
    }
}

impl Places {
    fn of(&self, id: BoundaryId, m: MicroBatch, before: &[usize]) -> (usize, usize) {
        let unit = unit_of(&self.units, m);
        let (at, floats) = self.of[id.0 as usize * self.units.len() + unit];
        let first = before[self.units[unit].start as usize];
        let from = before[m as usize];
        let to = before[m as usize + 1];
        (at + (from - first) * floats, (to - from) * floats)
    }
}

/// Gives every boundary of a schedule a place, except keys and values, which lie in the KV cache.
pub(crate) fn layout(schedule: &Schedule) -> StashLayout {
    let mut before = vec![0];
    for &sequences in &schedule.micro_batches {
        before.push(before[before.len() - 1] + sequences as usize);
    }
    let walk = |units, is_kept| Walk::new(schedule, &before, units, is_kept).places();
    // What a device keeps is read and written by its compute lane alone, so each micro-batch can
    // have a place of its own there.
    let each = (0..schedule.micro_batches.len() as MicroBatch).map(|m| m..m + 1).collect();
    let (stash, floats) = walk(units(schedule), false);
    let keeps = schedule.visits.iter().any(|visit| visit.stays().next().is_some());
    let (kept, kept_floats) = if keeps { walk(each, true) } else { (Places::default(), 0) };
    StashLayout { before, stash, kept, floats, kept_floats }
}

/// A walk over the visits of a schedule that gives places to boundaries: to those in the stash, or
/// to those that devices keep.
struct Walk<'s> {
    schedule: &'s Schedule,
    units: Vec<Range<MicroBatch>>,
    is_kept: bool,
    /// Sequences of the largest unit: any unit can use a place again.
    sequences: usize,
    last_reads: HashMap<UnitBoundary, Option<usize>>,
    places: Vec<Option<(usize, usize)>>,
    /// Places that are free again, by side, device, and floats for a sequence.
    free: HashMap<(Side, Option<DeviceId>, usize), Vec<usize>>,
    ends: BTreeMap<Side, usize>,
}

impl<'s> Walk<'s> {
    fn new(
        schedule: &'s Schedule,
        before: &[usize],
        units: Vec<Range<MicroBatch>>,
        is_kept: bool,
    ) -> Walk<'s> {
        let sequences =
            |unit: &Range<MicroBatch>| before[unit.end as usize] - before[unit.start as usize];
        Walk {
            schedule,
            is_kept,
            sequences: units.iter().map(sequences).max().unwrap_or(0),
            last_reads: last_reads(schedule, &units),
            places: vec![None; schedule.boundaries.len() * units.len()],
            units,
            free: HashMap::new(),
            ends: BTreeMap::new(),
        }
    }

    /// The places, and the floats of the largest side.
    fn places(mut self) -> (Places, usize) {
        for (now, visit) in self.schedule.visits.iter().enumerate() {
            // A place is free for the next micro-batch of the visit as soon as this one is read.
            let mut met: Vec<usize> =
                self.schedule.units(visit).map(|m| unit_of(&self.units, m)).collect();
            met.dedup();
            for unit in met {
                self.visit(now, visit, unit);
            }
        }
        let of = self.places.into_iter().map(Option::unwrap_or_default).collect();
        let floats = self.ends.into_values().max().unwrap_or(0);
        (Places { units: self.units, of }, floats)
    }

    /// Takes places for what a visit writes of a unit, then frees those that it reads last.
    fn visit(&mut self, now: usize, visit: &Visit, unit: usize) {
        let device = visit.device();
        let side = if self.is_kept { device } else { None };
        let written: Vec<BoundaryId> =
            if self.is_kept { visit.stays().collect() } else { visit.writes.clone() };
        for id in written {
            let at = id.0 as usize * self.units.len() + unit;
            if self.places[at].is_some() || self.schedule.boundary(id).role.is_kv() {
                continue; // another micro-batch of the unit was written before
            }
            let per_sequence = floats_of_sequence(self.schedule, id, side);
            let reused = self.free.get_mut(&(side, device, per_sequence)).and_then(Vec::pop);
            let first = reused.unwrap_or_else(|| {
                let end = self.ends.entry(side).or_default();
                let first = *end;
                *end += (per_sequence * self.sequences).next_multiple_of(ALIGNED);
                first
            });
            self.places[at] = Some((first, per_sequence));
        }
        for &id in if self.is_kept { &visit.kept } else { &visit.reads } {
            if self.last_reads.get(&(id, unit)) == Some(&Some(now))
                && let Some((first, per_sequence)) =
                    self.places[id.0 as usize * self.units.len() + unit]
            {
                self.free.entry((side, device, per_sequence)).or_default().push(first);
            }
        }
    }
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

/// The units that a visit meets.
fn units_of(units: &[Range<MicroBatch>], visit: &Visit) -> RangeInclusive<usize> {
    let Range { start, end } = visit.micro_batches;
    unit_of(units, start)..=unit_of(units, end - 1)
}

/// The visit that reads each boundary of a unit last. `None`: the host or several devices read it.
fn last_reads(
    schedule: &Schedule,
    units: &[Range<MicroBatch>],
) -> HashMap<UnitBoundary, Option<usize>> {
    let mut last_reads: HashMap<UnitBoundary, Option<usize>> = HashMap::new();
    let chosen = schedule.visits.iter().filter_map(|visit| visit.chosen_by);
    let of_all = |id| (0..units.len()).map(move |unit| ((id, unit), None));
    last_reads.extend(chosen.collect::<BTreeSet<_>>().into_iter().flat_map(of_all));
    for (index, visit) in schedule.visits.iter().enumerate() {
        let met = |id| units_of(units, visit).map(move |unit| (id, unit));
        for met in visit.all_reads().flat_map(met) {
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
