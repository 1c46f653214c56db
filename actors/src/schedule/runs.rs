//! Runs: the chunks of one long sequence as micro-batches of their own.
//!
//! A layer begins with a run as soon as the layer below has done the first chunk, so one sequence
//! keeps several devices busy. Attention is causal: a chunk needs the keys and values of the chunks
//! before it, which a layer leaves on its device, in one region. In the backward pass a chunk's
//! gradient is complete when all chunks behind it have added to it, so a run begins at its end.
//! Before that, a visit of [`Phase::Keys`] fills the region again: by then other layers have used
//! it.
//!
//! The region is why the rules here are strict: a visit has a run whole, or nothing of it, and
//! nothing else of a device stands between the keys of a run and its backward pass.

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
        visit.micro_batches.clone().map(move |m| self.mirrored(m, is_reversed))
    }

    /// The `nth` of [`units`](Schedule::units), found without the ones before it.
    pub(crate) fn unit(&self, visit: &Visit, nth: usize) -> MicroBatch {
        self.mirrored(visit.micro_batches.start + nth as MicroBatch, is_reversed(visit))
    }

    /// The micro-batch in whose turn a visit runs `m`, if it takes runs from their ends.
    fn mirrored(&self, m: MicroBatch, is_reversed: bool) -> MicroBatch {
        match self.run_of(m) {
            Some(run) if is_reversed => run.start + (run.end - 1 - m),
            _ => m,
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

/// The visits of a backward leg in one group. Where the layer leaves keys, each run begins a visit,
/// behind the visit of its keys; micro-batches behind a run join its visit.
pub(super) fn with_keys(schedule: &Schedule, leg: Visit) -> Vec<Visit> {
    if !meets_keys(&leg) {
        return vec![leg];
    }
    let Range { start, end } = leg.micro_batches;
    let runs = met(&schedule.runs, &leg.micro_batches);
    let first = runs.first().map_or(end, |run| run.start);
    let before = (start < first).then(|| leg.of_micro_batches(start..first));
    let ends = runs.iter().skip(1).map(|run| run.start).chain([end]);
    let each = runs.iter().zip(ends).flat_map(|(run, end)| {
        [keys_of(schedule, &leg, run), leg.of_micro_batches(run.start..end)]
    });
    before.into_iter().chain(each).collect()
}

/// The runs that have a chunk in this range.
fn met<'r>(runs: &'r [Range<MicroBatch>], range: &Range<MicroBatch>) -> &'r [Range<MicroBatch>] {
    let first = runs.partition_point(|run| run.end <= range.start);
    let end = runs.partition_point(|run| run.start < range.end);
    &runs[first..end.max(first)]
}

/// True for a visit that needs the keys of a run on its device before it begins the run.
fn meets_keys(visit: &Visit) -> bool {
    visit.keys && visit.phase == Phase::Backward
}

/// The visit that fills the keys of a run again. It reads the activations that the backward visit
/// recomputes from. No chunk stands behind the last one and needs its keys.
fn keys_of(schedule: &Schedule, backward: &Visit, run: &Range<MicroBatch>) -> Visit {
    let activations = |ids: &[BoundaryId]| -> Vec<BoundaryId> {
        let all = ids.iter().copied();
        all.filter(|&id| schedule.boundary(id).role.has_gradient()).collect()
    };
    Visit {
        phase: Phase::Keys,
        micro_batches: run.start..run.end - 1,
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

/// Checks that no visit cuts a run, and that the keys of a run are on a device when its backward
/// pass begins there.
pub(super) fn check(schedule: &Schedule) -> Result<(), Refusal> {
    let mut latest: BTreeMap<DeviceId, usize> = BTreeMap::new(); // the visit before, by device
    for (index, visit) in schedule.visits.iter().enumerate() {
        let run = begins(schedule, visit).map_err(|why| Refusal::at(schedule, index, why))?;
        let before = visit.device().and_then(|device| latest.insert(device, index));
        let keys = before.filter(|&before| schedule.visits[before].phase == Phase::Keys);
        match (keys, run) {
            (None, None) => {}
            (Some(keys), None) => return Err(Refusal::at(schedule, keys, UNUSED)),
            (keys, Some(run)) => {
                let expected = keys_of(schedule, visit, run);
                if keys.is_none_or(|keys| schedule.visits[keys] != expected) {
                    let range = expected.micro_batches;
                    let reason = format!(
                        "begins run {run:?} without its keys: the visit before it on its device \
                         must compute those of {range:?}, from the same blocks and activations"
                    );
                    return Err(Refusal::at(schedule, index, reason));
                }
            }
        }
    }
    let is_unused = |&last: &usize| schedule.visits[last].phase == Phase::Keys;
    let unused = latest.into_values().find(is_unused);
    unused.map_or(Ok(()), |keys| Err(Refusal::at(schedule, keys, UNUSED)))
}

const UNUSED: &str = "computes keys, and the next visit of its device is not the backward pass of \
                      their run: the device has one region for keys";

/// The run whose keys a visit needs on its device before it begins, or why it may not meet its
/// runs as it does.
fn begins<'s>(
    schedule: &'s Schedule,
    visit: &Visit,
) -> Result<Option<&'s Range<MicroBatch>>, String> {
    if visit.phase == Phase::Keys {
        return Ok(None);
    }
    let all = &visit.micro_batches;
    let runs = met(&schedule.runs, all);
    if let Some(run) = runs.iter().find(|run| run.start < all.start || run.end > all.end) {
        let rule = "a visit has all chunks of a run, or none";
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
        None => Ok(runs.first()),
    }
}
