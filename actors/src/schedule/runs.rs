//! Runs: the chunks of one long sequence as micro-batches of their own.
//!
//! A layer begins with a run as soon as the layer below has done the first chunk, so one sequence
//! keeps several devices busy. Attention is causal: a chunk needs the keys and values of the chunks
//! before it, which a layer leaves on its device, in one region. In the backward pass a chunk's
//! gradient is complete when all chunks behind it have added to it, so a run begins at its end.
//! Before that, a visit of [`Phase::Keys`] fills the region again: by then other layers have used
//! it.
//!
//! A layer with a window does not attend to all earlier chunks: [`Visit::reach`] says to how many.
//! Its region has room for these and one more, however long the run is. The forward pass drops the
//! first chunk that is there when it goes on. The backward pass of such a run is cut in parts: the
//! keys of the last chunks, the last chunk, the keys of the next chunk below, the next to last
//! chunk, and so on; the first chunks, which fit the region together, are one part.
//!
//! The region is why the rules here are strict: a visit has a run or a part whole, or nothing of
//! it, and nothing else of a device stands between the keys of a run and its backward pass.

use std::collections::BTreeMap;
use std::ops::Range;

use super::{BoundaryId, DeviceId, MicroBatch, Phase, Refusal, Schedule, Selection, Visit};

impl Schedule {
    /// The run that a micro-batch is a chunk of.
    pub fn run_of(&self, m: MicroBatch) -> Option<Range<MicroBatch>> {
        run_of(&self.runs, m)
    }

    /// The micro-batches of a visit in the order in which it runs them: ascending; on a device in
    /// the backward pass, each run from its end.
    pub fn units(&self, visit: &Visit) -> impl Iterator<Item = MicroBatch> + use<'_> {
        let is_reversed = is_reversed(visit);
        let all = visit.micro_batches.clone();
        all.clone().map(move |m| self.mirrored(m, &all, is_reversed))
    }

    /// The `nth` of [`units`](Schedule::units), found without the ones before it.
    pub(crate) fn unit(&self, visit: &Visit, nth: usize) -> MicroBatch {
        let all = &visit.micro_batches;
        self.mirrored(all.start + nth as MicroBatch, all, is_reversed(visit))
    }

    /// The micro-batch in whose turn a visit of `all` runs `m`, if it takes runs from their ends.
    fn mirrored(&self, m: MicroBatch, all: &Range<MicroBatch>, is_reversed: bool) -> MicroBatch {
        match self.run_of(m) {
            Some(run) if is_reversed => {
                let part = run.start.max(all.start)..run.end.min(all.end);
                part.start + (part.end - 1 - m)
            }
            _ => m,
        }
    }

    /// The micro-batch that comes at this place when visits such as this one have met all.
    pub(super) fn in_order(&self, visit: &Visit, place: MicroBatch) -> MicroBatch {
        match self.run_of(place) {
            Some(run) if is_reversed(visit) => run.start + (run.end - 1 - place),
            _ => place,
        }
    }
}

/// Refuses a selection with runs for an order that meets one micro-batch after another: between two
/// chunks of a run other layers would use the region of its keys.
pub(super) fn refuse(selection: &Selection, order: &str) -> Result<(), Refusal> {
    match selection.runs.first() {
        None => Ok(()),
        Some(run) => Err(Refusal::of(format!(
            "{order} takes sequences whole, and run {run:?} is the chunks of one: use the relay"
        ))),
    }
}

/// Whether a visit takes each run from its end.
fn is_reversed(visit: &Visit) -> bool {
    visit.phase == Phase::Backward && visit.on_device()
}

fn run_of(runs: &[Range<MicroBatch>], m: MicroBatch) -> Option<Range<MicroBatch>> {
    let at = runs.partition_point(|run| run.end <= m);
    runs.get(at).filter(|run| run.contains(&m)).cloned()
}

/// The visits of a backward leg in one group. Where the layer leaves keys, each part of a run
/// begins a visit, behind the visit of its keys; micro-batches behind a run of one part join its
/// visit.
pub(super) fn with_keys(schedule: &Schedule, leg: Visit) -> Vec<Visit> {
    if !meets_keys(&leg) {
        return vec![leg];
    }
    let Range { start, end } = leg.micro_batches;
    let runs = met(&schedule.runs, &leg.micro_batches);
    let mut visits = Vec::new();
    let mut next = start;
    for run in runs {
        visits.extend((next < run.start).then(|| leg.of_micro_batches(next..run.start)));
        for part in parts(run, leg.reach) {
            visits.push(keys_of(schedule, &leg, run, &part));
            visits.push(leg.of_micro_batches(part));
        }
        next = run.end;
        if let Some(last) = visits.last_mut().filter(|last| last.micro_batches == *run) {
            next = runs.iter().map(|run| run.start).find(|&start| start >= next).unwrap_or(end);
            last.micro_batches.end = next;
        }
    }
    visits.extend((next < end).then(|| leg.of_micro_batches(next..end)));
    visits
}

/// The parts of a run that the backward pass of a layer with this reach takes one by one. The
/// region has room for the first chunks, which are the last part.
fn parts(run: &Range<MicroBatch>, reach: u32) -> impl Iterator<Item = Range<MicroBatch>> + use<> {
    let Range { start, end } = *run;
    let together = start.saturating_add(reach).saturating_add(1).min(end);
    (together..end).rev().map(|m| m..m + 1).chain(std::iter::once(start..together))
}

/// The runs that have a chunk in this range.
fn met<'r>(runs: &'r [Range<MicroBatch>], range: &Range<MicroBatch>) -> &'r [Range<MicroBatch>] {
    let first = runs.partition_point(|run| run.end <= range.start);
    let end = runs.partition_point(|run| run.start < range.end);
    &runs[first..end.max(first)]
}

/// True for a visit that needs the keys of a run on its device before it begins the run.
fn meets_keys(visit: &Visit) -> bool {
    visit.reach > 0 && visit.phase == Phase::Backward
}

/// The visit that computes the keys again which a part of a run attends to and which are not on the
/// device. It reads the activations that the backward visit recomputes from. No chunk stands behind
/// the last one of a run and needs its keys.
fn keys_of(
    schedule: &Schedule,
    backward: &Visit,
    run: &Range<MicroBatch>,
    part: &Range<MicroBatch>,
) -> Visit {
    let last = part.end - 1;
    let first = run.start.max(last.saturating_sub(backward.reach));
    let end = if part.end == run.end { last } else { first + 1 };
    let activations = |ids: &[BoundaryId]| -> Vec<BoundaryId> {
        let all = ids.iter().copied();
        all.filter(|&id| schedule.boundary(id).role.has_gradient()).collect()
    };
    Visit {
        phase: Phase::Keys,
        micro_batches: first..end,
        reads: activations(&backward.reads),
        kept: activations(&backward.kept),
        writes: Vec::new(),
        keeps: Vec::new(),
        copies: Vec::new(),
        ..backward.clone()
    }
}

/// Checks that runs are sorted and disjoint, each of two chunks or more.
pub(super) fn check_order(runs: &[Range<MicroBatch>], count: MicroBatch) -> Result<(), Refusal> {
    let mut next = 0;
    for run in runs {
        let problem = if run.len() < 2 {
            "has less than two chunks: a sequence of one chunk is no run"
        } else if run.start < next {
            "begins before the run in front of it ends"
        } else if run.end > count {
            "ends behind the last of them"
        } else {
            next = run.end;
            continue;
        };
        return Err(Refusal::of(format!("run {run:?} of {count} micro-batches {problem}")));
    }
    Ok(())
}

/// Checks that runs are in order, and each inside one group.
pub(super) fn check_groups(schedule: &Schedule) -> Result<(), Refusal> {
    check_order(&schedule.runs, schedule.micro_batches.len() as MicroBatch)?;
    let group = |m| schedule.group_of(m);
    let is_cut = |run: &&Range<MicroBatch>| group(run.start) != group(run.end - 1);
    if let Some(run) = schedule.runs.iter().find(is_cut) {
        let one = "the chunks of a sequence add to one gradient";
        return Err(Refusal::of(format!("run {run:?} lies in two groups: {one}")));
    }
    Ok(())
}

/// Checks that no visit cuts a run, or a part of it, and that its keys are on a device when its
/// backward pass begins there.
pub(super) fn check(schedule: &Schedule) -> Result<(), Refusal> {
    let visits = &schedule.visits;
    let mut latest: BTreeMap<DeviceId, [Option<usize>; 2]> = BTreeMap::new(); // its last two visits
    for (index, visit) in visits.iter().enumerate() {
        let begun = begins(schedule, visit).map_err(|why| Refusal::at(schedule, index, why))?;
        let own = visit.device().map(|device| latest.entry(device).or_default());
        let [before, last] = own.as_ref().map_or([None; 2], |own| **own);
        let keys = last.filter(|&last| visits[last].phase == Phase::Keys);
        own.into_iter().for_each(|own| *own = [last, Some(index)]);
        let Some((run, part)) = begun else {
            match keys {
                Some(keys) => return Err(Refusal::at(schedule, keys, UNUSED)),
                None => continue,
            }
        };
        let expected = keys_of(schedule, visit, run, &part);
        if keys.is_none_or(|keys| visits[keys] != expected) {
            let range = expected.micro_batches;
            let reason = format!(
                "begins run {run:?} at {part:?} without its keys: the visit before it on its \
                 device must compute those of {range:?}, from the same blocks and activations"
            );
            return Err(Refusal::at(schedule, index, reason));
        }
        let behind = visit.of_micro_batches(part.end..part.end + 1);
        if part.end < run.end && before.is_none_or(|before| visits[before] != behind) {
            let reason = format!(
                "goes on with run {run:?} at {part:?}: the visit before its keys on its device \
                 must be the backward pass of {:?}",
                behind.micro_batches
            );
            return Err(Refusal::at(schedule, index, reason));
        }
    }
    let last = latest.into_values().filter_map(|[_, last]| last);
    let unused = last.into_iter().find(|&last| visits[last].phase == Phase::Keys);
    unused.map_or(Ok(()), |keys| Err(Refusal::at(schedule, keys, UNUSED)))
}

const UNUSED: &str = "computes keys, and the next visit of its device is not the backward pass of \
                      their run: the device has one region for keys";

/// A run, and the part of it that a visit has.
type Begun<'s> = (&'s Range<MicroBatch>, Range<MicroBatch>);

/// The part of a run whose keys a visit needs on its device before it begins, or why it may not
/// meet its runs as it does.
fn begins<'s>(schedule: &'s Schedule, visit: &Visit) -> Result<Option<Begun<'s>>, String> {
    if visit.phase == Phase::Keys {
        return Ok(None);
    }
    let all = &visit.micro_batches;
    let runs = met(&schedule.runs, all);
    let part = |run: &Range<MicroBatch>| all.start.max(run.start)..all.end.min(run.end);
    let reach = if meets_keys(visit) { visit.reach } else { u32::MAX };
    let is_cut = |run: &&Range<MicroBatch>| parts(run, reach).all(|one| one != part(run));
    if let Some(run) = runs.iter().find(is_cut) {
        let rule = "a visit has all chunks of a run, or none; with a window, the chunks that the \
                    device has room for";
        return Err(format!("has micro-batches {all:?}, a part of run {run:?}: {rule}"));
    }
    if !meets_keys(visit) {
        return Ok(None);
    }
    match runs.iter().find(|run| run.start > all.start) {
        Some(run) => Err(format!(
            "has run {run:?} behind other micro-batches: its keys come directly before it, so it \
             begins a visit"
        )),
        None => Ok(runs.first().map(|run| (run, part(run)))),
    }
}
