//! A window: a step of several batches, each with an update of its own (PipeDream, Narayanan et al.
//! 2019, arXiv 1806.03377).
//!
//! The batches are the schedule's groups. They pass the stages of a pipeline in the order of 1F1B,
//! and nothing waits for the end of a batch: when a stage has gone backward with one, the stage's
//! blocks are updated. A batch reads in each stage the version that is ready when its first
//! micro-batch comes there, and the same version when it comes back, although newer ones are there
//! by then. With `n` stages and one micro-batch a batch, batch `j` in stage `s` lacks the updates
//! of the last `n - 1 - s` batches before it; the first batches of a window lack none.
//!
//! A visit says by [`Visit::ahead`] which version it reads. The old versions are not kept on the
//! host: each stays in a weight slot of its device from the first visit that reads it to the last.
//! The upload stands before the visit whose gradient moves the block on, on the same device. So no
//! upload can come too late, and the pool of weights has a slot for each version in use.
//!
//! PipeDream-2BW (Narayanan et al. 2021, arXiv 2006.09503) has one rule for all stages: a batch
//! lacks the update of the batch before it, also of the last one of the window before. The host
//! keeps two versions of each block, as with any delay. Batch `j` reads the older one until its own
//! gradient makes a version that replaces it. So uploads may come again, and none comes too late.
//! A version is then counted from the one before the newest, by [`Schedule::lag`].
//!
//! A window ends flushed. Behind it all blocks have one version, which has the updates of all
//! batches.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::device_visits::DeviceVisit;
use super::model::{RingModel, Selection};
use super::pipeline::Pipeline;
use super::residency::Needed;
use super::spans::{gradient_spans, most_open};
use super::{
    BlockId, DeviceId, GroupId, LayerId, MicroBatch, Place, Refusal, Schedule, Version, Visit,
    VisitKind, pipeline,
};

/// A window of PipeDream: the selection's groups are batches, and pass `stages` stages, which are
/// dealt to the devices by turns. What it computes depends on the stages, and not on the devices.
///
/// # Errors
/// As [`pipeline`](super::pipeline()).
pub fn pipedream(
    model: &RingModel,
    selection: &Selection,
    stages: u32,
    devices: u32,
) -> Result<Schedule, Refusal> {
    window(model, selection, stages, devices, ready)
}

/// A window of PipeDream-2BW: as [`pipedream`], but in all stages each batch lacks the update of
/// the batch before it. What it computes depends on the batches alone.
///
/// # Errors
/// As [`pipeline`](super::pipeline()). The checks of a plan refuse batches of fewer micro-batches
/// than there are stages behind the first one.
pub fn pipedream_2bw(
    model: &RingModel,
    selection: &Selection,
    stages: u32,
    devices: u32,
) -> Result<Schedule, Refusal> {
    let schedule = window(model, selection, stages, devices, |_, batch, _| batch as u32)?;
    let lag = u32::from(schedule.in_batches);
    Ok(Schedule { lag, ..schedule })
}

/// A window in which a batch in a stage reads the weights that `ahead` says, by the groups, the
/// batch and the number of stages behind this one.
fn window(
    model: &RingModel,
    selection: &Selection,
    stages: u32,
    devices: u32,
    ahead: impl Fn(&[Range<MicroBatch>], usize, u32) -> u32,
) -> Result<Schedule, Refusal> {
    let all = selection.micro_batches.len() as MicroBatch;
    let order = Pipeline::one_forward_one_backward(stages, all);
    // Each stage has a device of its own at first.
    let mut schedule = pipeline(model, selection, &order)?;
    schedule.in_batches = schedule.trains;
    let groups = schedule.groups.clone();
    for visit in &mut schedule.visits {
        let Some(stage) = visit.device() else { continue };
        visit.place = Place::Device((u32::from(stage) % devices.max(1)) as DeviceId);
        if schedule.in_batches {
            let at = groups.partition_point(|group| group.end <= visit.micro_batches.start);
            let behind = stages - 1 - u32::from(stage);
            visit.ahead = ahead(&groups, at, behind);
        }
    }
    if schedule.in_batches {
        by_batch(&mut schedule, |batch| ahead(&groups, batch, stages - 1));
    }
    Ok(schedule)
}

/// The batches whose gradients are complete in a stage with `behind` stages behind it, when the
/// first micro-batch of a batch comes there.
fn ready(groups: &[Range<MicroBatch>], batch: usize, behind: u32) -> u32 {
    let first = groups[batch].start;
    groups.partition_point(|group| group.end + behind <= first) as u32
}

/// Has each batch gathered just before its first visit, from the weights that `ahead` says, and
/// scattered just behind its last one.
fn by_batch(schedule: &mut Schedule, ahead: impl Fn(usize) -> u32) {
    let groups = schedule.groups.clone();
    let visits = std::mem::take(&mut schedule.visits);
    let of_rows = |visit: &Visit| matches!(visit.kind, VisitKind::Gather | VisitKind::Scatter);
    let (of_rows, visits): (Vec<Visit>, Vec<Visit>) = visits.into_iter().partition(of_rows);
    let batches: Vec<usize> =
        visits.iter().map(|visit| schedule.group_of(visit.micro_batches.start) as usize).collect();
    let mut ends: BTreeMap<usize, (usize, usize)> = BTreeMap::new(); // batch -> first, last
    for (index, &batch) in batches.iter().enumerate() {
        ends.entry(batch).or_insert((index, index)).1 = index;
    }
    let of_batch = |kind: VisitKind, batch: usize, ahead: u32| {
        let group = groups[batch].clone();
        let all = of_rows.iter().filter(move |visit| visit.kind == kind);
        all.map(move |visit| Visit { ahead, ..visit.of_micro_batches(group.clone()) })
    };
    for (index, (visit, batch)) in visits.into_iter().zip(batches).enumerate() {
        let (first, last) = ends[&batch];
        if index == first {
            schedule.visits.extend(of_batch(VisitKind::Gather, batch, ahead(batch)));
        }
        schedule.visits.push(visit);
        if index == last {
            schedule.visits.extend(of_batch(VisitKind::Scatter, batch, 0));
        }
    }
}

impl Schedule {
    /// The batches of the step, each with an update of its own.
    pub fn batches(&self) -> u32 {
        if self.in_batches { self.groups.len() as u32 } else { 1 }
    }

    /// The batch of a group.
    pub fn batch(&self, group: GroupId) -> u32 {
        if self.in_batches { group } else { 0 }
    }

    /// The batch of a micro-batch.
    pub fn batch_of(&self, micro_batch: MicroBatch) -> u32 {
        if self.in_batches { self.group_of(micro_batch) } else { 0 }
    }

    /// The version that a visit of a step in batches reads, if it is `ahead` updates
    /// [ahead](Visit::ahead), by the newest when the step began. A run has none before its first.
    pub(crate) fn version_read(&self, newest: Version, ahead: u32) -> Version {
        (newest + u64::from(ahead)).saturating_sub(self.lag.into())
    }

    /// How far [ahead](Visit::ahead) a block is when a visit reads it.
    pub fn ahead(&self, visit: &Visit, block: BlockId) -> u32 {
        if self.is_trained(block) { visit.ahead } else { 0 }
    }
}

/// All micro-batches of a visit's batch.
pub(super) fn whole(schedule: &Schedule, visit: &Visit) -> Range<MicroBatch> {
    match schedule.in_batches {
        true => schedule.groups[schedule.group_of(visit.micro_batches.start) as usize].clone(),
        false => 0..schedule.micro_batches.len() as MicroBatch,
    }
}

/// What a visit needs in weight slots.
pub(super) fn needs<'s>(
    schedule: &'s Schedule,
    visit: &'s Visit,
) -> impl Iterator<Item = Needed> + use<'s> {
    visit.portions().map(|portion| (portion, schedule.ahead(visit, portion.block)))
}

/// The weight slots of a device that hold versions in use, at most. 0: blocks may come again,
/// because the host has the versions that the step reads.
pub(super) fn versions_in_use(schedule: &Schedule) -> u32 {
    if !schedule.in_batches || schedule.lag > 0 {
        return 0;
    }
    let mut spans: BTreeMap<(DeviceId, Needed), (usize, usize)> = BTreeMap::new();
    for (index, visit) in schedule.device_visits().enumerate() {
        let device = visit.device().unwrap_or_default();
        for needed in needs(schedule, visit) {
            spans.entry((device, needed)).or_insert((index, index)).1 = index;
        }
    }
    most_open(spans.into_iter().map(|((device, _), (first, last))| (device, first, last)))
}

/// Checks a step in batches. Of other steps, that no visit waits for an update.
pub(super) fn check(schedule: &Schedule) -> Result<(), Refusal> {
    if schedule.lag > u32::from(schedule.in_batches) {
        let lag = schedule.lag;
        return Err(Refusal::of(format!(
            "has a lag of {lag}: it is 0 or 1 in a step in batches, and 0 in others"
        )));
    }
    if !schedule.in_batches {
        let waits = schedule.visits.iter().position(|visit| visit.ahead > 0);
        let reason = "reads a version that its own step makes, and the step is not in batches";
        return waits.map_or(Ok(()), |index| Err(Refusal::at(schedule, index, reason)));
    }
    supported(schedule)?;
    one_place(schedule)?;
    one_version(schedule)?;
    let ends = ends(schedule)?;
    for (index, visit) in schedule.visits.iter().enumerate().filter(|(_, visit)| reads(visit)) {
        let trained = visit.blocks.iter().filter(|id| schedule.is_trained(**id));
        let Some(update) = visit.ahead.checked_sub(1 + schedule.lag) else { continue };
        for &block in trained {
            if ends.get(&(block, update)).is_none_or(|&end| end >= index) {
                let updates = update + 1;
                let reason = format!(
                    "reads {block} behind {updates} updates, before batch {update} has gone \
                     backward"
                );
                return Err(Refusal::at(schedule, index, reason));
            }
        }
    }
    gathers(schedule, &ends)
}

/// True for a visit that reads weights.
fn reads(visit: &Visit) -> bool {
    visit.on_device() || visit.kind == VisitKind::Gather
}

fn supported(schedule: &Schedule) -> Result<(), Refusal> {
    let any = |is: fn(&Visit) -> bool| schedule.visits.iter().any(is);
    let answers = |visit: &Visit| {
        matches!(visit.kind, VisitKind::Balance { .. } | VisitKind::Objective { .. })
    };
    let missing = [
        (!schedule.trains, "without a block that trains"),
        (schedule.shards > 1, "with blocks in shards"),
        (schedule.ranks.count > 1, "of several processes"),
        (schedule.blocks.iter().any(|block| block.staged), "with blocks on file"),
        (!schedule.cuts.is_empty(), "with blocks in portions"),
        (!schedule.runs.is_empty(), "with sequences in chunks"),
        (any(answers), "with a balance or an objective"),
        (any(|visit| visit.chosen_by.is_some()), "with blocks of which rows choose parts"),
    ];
    match missing.into_iter().find(|(is, _)| *is) {
        Some((_, what)) => Err(Refusal::of(format!("a step in batches {what} is not supported"))),
        None => Ok(()),
    }
}

/// Checks that one layer needs a block that trains, on one device, and that rows are gathered and
/// scattered batch by batch.
fn one_place(schedule: &Schedule) -> Result<(), Refusal> {
    let mut layers: BTreeMap<BlockId, LayerId> = BTreeMap::new();
    let mut devices: BTreeMap<BlockId, DeviceId> = BTreeMap::new();
    for (index, visit) in schedule.visits.iter().enumerate() {
        let refused = |reason: String| Err(Refusal::at(schedule, index, reason));
        let is_of_rows = matches!(visit.kind, VisitKind::Gather | VisitKind::Scatter);
        let batches = [visit.micro_batches.start, visit.micro_batches.end - 1];
        let batches = batches.map(|m| schedule.batch_of(m));
        if is_of_rows && batches[0] != batches[1] {
            return refused(format!("has rows of batches {batches:?}: a visit is of one"));
        }
        for &block in visit.blocks.iter().filter(|id| schedule.is_trained(**id)) {
            let layer = *layers.entry(block).or_insert(visit.layer);
            if layer != visit.layer {
                return refused(format!(
                    "needs {block}, as {layer} does: in batches, they would read two versions"
                ));
            }
            let Some(device) = visit.device() else { continue };
            if *devices.entry(block).or_insert(device) != device {
                return refused(format!("needs {block} on another device than visits before it"));
            }
        }
    }
    Ok(())
}

/// Checks that a micro-batch goes backward through the version that it went forward through.
fn one_version(schedule: &Schedule) -> Result<(), Refusal> {
    let mut read = BTreeMap::new();
    for (index, visit) in schedule.visits.iter().enumerate().filter(|(_, visit)| reads(visit)) {
        for m in visit.micro_batches.clone() {
            let ahead = visit.ahead;
            let before = *read.entry((visit.layer, visit.step, m)).or_insert(ahead);
            if before != ahead {
                let reason = format!(
                    "reads its blocks behind {ahead} updates, and went forward with micro-batch \
                     {m} behind {before}"
                );
                return Err(Refusal::at(schedule, index, reason));
            }
        }
    }
    Ok(())
}

/// For each block that trains and each batch, the visit that ends the batch's gradient.
type Ends = BTreeMap<(BlockId, u32), usize>;

/// Finds them, and checks that each block has a gradient of each batch, in order.
fn ends(schedule: &Schedule) -> Result<Ends, Refusal> {
    let visits = schedule.visits.iter().enumerate();
    let on_device: Vec<usize> =
        visits.clone().filter(|(_, visit)| visit.on_device()).map(|(index, _)| index).collect();
    let spans = gradient_spans(schedule).into_iter();
    let mut ends: Ends = spans
        .map(|((portion, group), (_, last))| ((portion.block, group), on_device[last]))
        .collect();
    for (index, visit) in visits.filter(|(_, visit)| visit.kind == VisitKind::Scatter) {
        let batch = schedule.batch_of(visit.micro_batches.start);
        for &block in visit.blocks.iter().filter(|id| schedule.is_trained(**id)) {
            if ends.insert((block, batch), index).is_some() {
                let reason = format!("ends the gradient of {block} of batch {batch} again");
                return Err(Refusal::at(schedule, index, reason));
            }
        }
    }
    let blocks: BTreeSet<BlockId> = ends.keys().map(|(block, _)| *block).collect();
    for block in blocks {
        let mut before = None;
        for batch in 0..schedule.batches() {
            let end = ends.get(&(block, batch)).copied();
            if end.is_none() || end <= before {
                let reason = format!("{block} has no gradient of batch {batch} in its turn");
                return Err(Refusal::of(reason));
            }
            before = end;
        }
    }
    Ok(ends)
}

/// Checks that rows are gathered before the next version of their blocks is there: a device meets
/// them before it ends the gradient of these rows that makes this version.
fn gathers(schedule: &Schedule, ends: &Ends) -> Result<(), Refusal> {
    let gathers: Vec<(usize, &Visit)> = schedule
        .visits
        .iter()
        .enumerate()
        .filter(|(_, visit)| visit.kind == VisitKind::Gather)
        .collect();
    let written: BTreeSet<_> = gathers.iter().flat_map(|(_, gather)| &gather.writes).collect();
    let mut met = BTreeMap::new(); // rows of a micro-batch -> the first visit that reads them
    for (index, visit) in schedule.visits.iter().enumerate() {
        for id in visit.reads.iter().filter(|id| written.contains(id)) {
            for m in visit.micro_batches.clone() {
                met.entry((*id, m)).or_insert(index);
            }
        }
    }
    for (index, gather) in gathers {
        for &block in gather.blocks.iter().filter(|id| schedule.is_trained(**id)) {
            let Some(&end) = ends.get(&(block, gather.ahead)) else { continue };
            let scatter = &schedule.visits[end];
            let ended = |device: Option<DeviceId>, from: usize| {
                schedule.visits[from..end].iter().any(|visit| {
                    visit.on_device()
                        && visit.device() == device
                        && scatter.micro_batches.contains(&visit.micro_batches.start)
                        && scatter.reads.iter().any(|id| visit.writes.contains(id))
                })
            };
            let is_late = |m: MicroBatch| {
                let first = gather.writes.iter().filter_map(|id| met.get(&(*id, m)).copied()).min();
                first.is_none_or(|at| at >= end || !ended(schedule.visits[at].device(), at))
            };
            if gather.micro_batches.clone().any(is_late) {
                let ahead = gather.ahead;
                let reason = format!(
                    "gathers from {block} behind {ahead} updates, where batch {ahead} may have \
                     made the next version"
                );
                return Err(Refusal::at(schedule, index, reason));
            }
        }
    }
    Ok(())
}

/// Checks that each version is uploaded before another one has its place on the host: the next one,
/// or with a lag the one behind that. Either is made by the batch whose number is that of
/// [`Visit::ahead`].
pub(super) fn check_uploads(
    schedule: &Schedule,
    device_visits: &[DeviceVisit],
) -> Result<(), Refusal> {
    if !schedule.in_batches {
        return Ok(());
    }
    let ends = ends(schedule)?;
    for resolved in device_visits {
        for residence in resolved.uploads() {
            let block = residence.portion.block;
            let ahead = residence.ahead;
            if ends.get(&(block, ahead)).is_some_and(|&end| end < resolved.visit) {
                let reason = format!(
                    "uploads {block} behind {ahead} updates, when the next one has replaced this \
                     version: pool weights needs a slot for each version in use, here {}",
                    versions_in_use(schedule)
                );
                return Err(Refusal::at(schedule, resolved.visit, reason));
            }
        }
    }
    Ok(())
}

/// For a visit of a device, the visit before it that ends the last gradient that its uploads wait
/// for, as an index among `before`, the visits of the same device.
pub(super) fn waits_behind(
    schedule: &Schedule,
    device_visits: &[DeviceVisit],
    before: &[usize],
    device_visit: usize,
) -> Option<usize> {
    let waits = |residence: &&super::Residence| residence.ahead > schedule.lag;
    let uploads = device_visits[device_visit].uploads().filter(waits);
    let closes = |at: usize, residence: &super::Residence| {
        let earlier = &device_visits[at];
        let batch = schedule.batch_of(schedule.visits[earlier.visit].micro_batches.start);
        batch + 1 + schedule.lag == residence.ahead && earlier.closes.contains(&residence.portion)
    };
    let behind = |residence| before.iter().rposition(|&at| closes(at, residence));
    uploads.filter_map(behind).max()
}
