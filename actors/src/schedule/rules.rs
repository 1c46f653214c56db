//! The static rules of a schedule, one function each; every refusal names the visit.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::{
    BlockId, BoundaryId, Copied, GroupId, MicroBatch, Phase, Place, Portion, Refusal, Role,
    Schedule, Visit, VisitKind, batches, portions, runs, sums,
};

/// Checks everything that does not depend on pools.
pub(super) fn check(schedule: &Schedule) -> Result<(), Refusal> {
    if schedule.micro_batches.is_empty() || schedule.micro_batches.contains(&0) {
        return Err(Refusal::of("a step needs micro-batches, each of at least one sequence"));
    }
    groups(schedule)?;
    portions::cuts(schedule)?;
    runs::check_groups(schedule)?;
    if !schedule.visits.iter().any(Visit::on_device) {
        return Err(Refusal::of("no visit of a device"));
    }
    for (index, visit) in schedule.visits.iter().enumerate() {
        names(schedule, visit).map_err(|reason| Refusal::at(schedule, index, reason))?;
    }
    boundaries(schedule)?;
    micro_batch_order(schedule)?;
    runs::check(schedule)?;
    gradients(schedule)?;
    portions::check(schedule)?;
    sums::check(schedule)?;
    gathers(schedule)?;
    batches::check(schedule)
}

/// Checks that groups follow each other from the first micro-batch to the last, and that none is
/// empty.
fn groups(schedule: &Schedule) -> Result<(), Refusal> {
    let mut next = 0;
    for group in &schedule.groups {
        if group.start != next || group.is_empty() {
            let reason = format!("a group of micro-batches is {group:?}, and {next} comes next");
            return Err(Refusal::of(reason));
        }
        next = group.end;
    }
    let count = schedule.micro_batches.len() as MicroBatch;
    if next == count {
        Ok(())
    } else {
        Err(Refusal::of(format!("groups end at micro-batch {next} of {count}")))
    }
}

/// Checks that everything a visit names exists, once, and that its kind is known.
fn names(schedule: &Schedule, visit: &Visit) -> Result<(), String> {
    let count = schedule.micro_batches.len() as MicroBatch;
    if visit.micro_batches.is_empty() || visit.micro_batches.end > count {
        return Err(format!("micro-batches {:?} of {count}", visit.micro_batches));
    }
    let Range { start, end } = visit.micro_batches;
    let groups = [start, end - 1].map(|m| schedule.group_of(m));
    if visit.on_device() && groups[0] != groups[1] {
        return Err(format!(
            "micro-batches {start}..{end} of groups {groups:?}: a visit is of one"
        ));
    }
    let blocks: BTreeSet<_> = visit.blocks.iter().collect();
    if blocks.len() < visit.blocks.len() {
        return Err("names a block twice".into());
    }
    if let Some(id) = blocks.iter().find(|id| id.0 as usize >= schedule.blocks.len()) {
        return Err(format!("{id} is unknown: the schedule has {}", schedule.blocks.len()));
    }
    portions::names(&schedule.cuts, visit.portions())?;
    let met: BTreeSet<_> = visit.all_reads().chain(visit.all_writes()).collect();
    if met.len() < visit.all_reads().count() + visit.all_writes().count() {
        return Err("names a boundary twice".into());
    }
    let named = met.iter().chain(&visit.chosen_by);
    if let Some(id) = named.into_iter().find(|id| id.0 as usize >= schedule.boundaries.len()) {
        return Err(format!("{id} is unknown: the schedule has {}", schedule.boundaries.len()));
    }
    let is_whole = visit.micro_batches == (0..count);
    if visit.kind.is_of_step() && !is_whole {
        return Err("answers for the whole step, and has a part of its micro-batches".into());
    }
    shape(visit)?;
    sums::shape(schedule, visit)?;
    copies(schedule, visit)?;
    roles(schedule, visit)
}

/// Checks that a visit copies what it reads or writes.
fn copies(schedule: &Schedule, visit: &Visit) -> Result<(), String> {
    let met: BTreeSet<_> = visit.all_reads().chain(visit.writes.iter().copied()).collect();
    for &Copied { from, to } in &visit.copies {
        if !met.contains(&from) {
            return Err(format!("copies {from}, which it neither reads nor writes"));
        }
        let [from, to] = [from, to].map(|id| schedule.boundary(id));
        if from != to {
            return Err(format!("copies {} of {from} to {} of {to}", from.role, to.role));
        }
    }
    Ok(())
}

/// Checks that a visit reads, writes and runs as its kind does.
fn shape(visit: &Visit) -> Result<(), String> {
    if visit.on_device() != visit.kind.on_device() {
        let places = "a host visit gathers, scatters, balances, takes the loss or computes an \
                      objective; a device visits layers";
        return Err(format!("{:?} in the wrong place: {places}", visit.kind));
    }
    let stays = visit.stays().next().is_some() || !visit.kept.is_empty();
    if stays && !visit.on_device() {
        return Err("keeps a boundary on a device, and runs on the host".into());
    }
    let is_keys = visit.phase == Phase::Keys;
    if (visit.reach > 0 || is_keys) && visit.kind != VisitKind::Layer {
        return Err("leaves keys on a device, and visits no layer of the stack".into());
    }
    if is_keys && visit.all_reads().next().is_none() {
        return Err(
            "computes keys from no boundary: a layer that leaves keys reads its input again \
                    in the backward pass"
                .into(),
        );
    }
    let reads = !visit.reads.is_empty();
    let writes = !visit.writes.is_empty();
    let is_right = match visit.kind {
        VisitKind::Layer | VisitKind::Tile => true,
        VisitKind::Gather => visit.phase == Phase::Forward && writes && !reads,
        VisitKind::Balance { .. } | VisitKind::Objective { .. } => {
            visit.phase == Phase::Forward && reads && visit.blocks.is_empty()
        }
        VisitKind::Loss => {
            visit.phase == Phase::Forward && reads && !writes && visit.blocks.is_empty()
        }
        VisitKind::Scatter => visit.phase == Phase::Backward && reads && !writes,
    };
    let rule = "a gather writes only, a scatter reads only, a loss reads only and has no block, a \
                balance or an objective reads and has no block";
    if is_right { Ok(()) } else { Err(rule.into()) }
}

/// Checks that a visit of a device reads at most one boundary of each role, and writes at most one.
fn roles(schedule: &Schedule, visit: &Visit) -> Result<(), String> {
    if !visit.on_device() {
        return Ok(());
    }
    let role = |id: BoundaryId| schedule.boundary(id).role;
    let read: Vec<Role> = visit.all_reads().map(role).collect();
    let written = visit.writes.iter().chain(&visit.keeps).copied().map(role).collect();
    for roles in [read, written] {
        let mut met = BTreeSet::new();
        if let Some(role) = roles.into_iter().find(|&role| !met.insert(role)) {
            return Err(format!("has two boundaries that are {role}"));
        }
    }
    Ok(())
}

/// Checks that a boundary is written once, before it is read, and that some visit reads it. One
/// that a device keeps is read there and nowhere else.
fn boundaries(schedule: &Schedule) -> Result<(), Refusal> {
    let mut written = BTreeMap::new(); // -> (writer, read yet)
    for (index, visit) in schedule.visits.iter().enumerate() {
        for m in visit.micro_batches.clone() {
            for id in visit.all_reads().chain(visit.chosen_by) {
                let refused = |what| {
                    let reason = format!("reads {id} of micro-batch {m} {what}");
                    Err(Refusal::at(schedule, index, reason))
                };
                let Some((writer, read)) = written.get_mut(&(id, m)) else {
                    return refused("before it is written");
                };
                *read = true;
                let writer: &Visit = &schedule.visits[*writer];
                let is_kept = writer.stays().any(|stays| stays == id);
                if is_kept != visit.kept.contains(&id) {
                    return refused("in another place than where it was written");
                }
                if is_kept && writer.place != visit.place {
                    return refused("on another device than the one that keeps it");
                }
            }
            for id in visit.all_writes() {
                if written.insert((id, m), (index, false)).is_some() {
                    let reason = format!("writes {id} of micro-batch {m} again");
                    return Err(Refusal::at(schedule, index, reason));
                }
            }
        }
    }
    let met: BTreeSet<_> = written.keys().map(|(id, _)| id.0 as usize).collect();
    if let Some(id) = (0..schedule.boundaries.len()).find(|id| !met.contains(id)) {
        return Err(Refusal::of(format!("boundary {id} is written by no visit")));
    }
    match written.iter().find(|(_, (_, read))| !read) {
        None => Ok(()),
        Some(((id, m), (index, _))) => {
            let reason = format!("writes {id} of micro-batch {m}, which nobody reads");
            Err(Refusal::at(schedule, *index, reason))
        }
    }
}

/// Checks that a layer meets its micro-batches in order, once a phase; on a device in the backward
/// pass, each run from its end. Gradients are summed in this order. Keys are met where runs are.
fn micro_batch_order(schedule: &Schedule) -> Result<(), Refusal> {
    let mut next = BTreeMap::new();
    let visits = schedule.visits.iter().enumerate();
    for (index, visit) in visits.filter(|(_, visit)| visit.phase != Phase::Keys) {
        let met = next.entry((visit.layer, visit.step, visit.phase, visit.kind)).or_insert(0);
        for unit in schedule.units(visit) {
            let expected = schedule.in_order(visit, *met);
            if unit != expected {
                let reason = format!("micro-batch order: meets {unit}, expected {expected}");
                return Err(Refusal::at(schedule, index, reason));
            }
            *met += 1;
        }
    }
    Ok(())
}

/// Checks that a gradient ends once, on the device or in the host's scatter after it. Checks that
/// no visit of a device meets the block after that, because it may be the next version by then.
fn gradients(schedule: &Schedule) -> Result<(), Refusal> {
    let mut scattered = BTreeSet::new();
    let mut last_backward = BTreeMap::new();
    let mut first_of: BTreeMap<Portion, &Visit> = BTreeMap::new();
    let mut places: BTreeMap<(Portion, GroupId), Place> = BTreeMap::new();
    for (index, visit) in schedule.visits.iter().enumerate() {
        for portion in visit.portions().filter(|one| schedule.is_trained(one.block)) {
            let id = portion.block;
            if scattered.contains(&id) && !schedule.in_batches {
                let reason = format!("meets {id} after its gradient was scattered");
                return Err(Refusal::at(schedule, index, reason));
            }
            match (visit.kind, visit.phase) {
                (VisitKind::Scatter, _) => {
                    if visit.micro_batches != batches::whole(schedule, visit) {
                        let reason = "a scatter takes all micro-batches of the step at once";
                        return Err(Refusal::at(schedule, index, reason));
                    }
                    scattered.insert(id);
                }
                (_, Phase::Backward) => {
                    let first = *first_of.entry(portion).or_insert(visit);
                    if (first.layer, first.step) != (visit.layer, visit.step) {
                        let order = "the order of their sum would depend on the schedule";
                        let other = match first.layer == visit.layer {
                            true => "another step of the layer".to_string(),
                            false => first.layer.to_string(),
                        };
                        let reason = format!("trains {portion}, as {other} does: {order}");
                        return Err(Refusal::at(schedule, index, reason));
                    }
                    let group = schedule.group_of(visit.micro_batches.start);
                    if *places.entry((portion, group)).or_insert(visit.place) != visit.place {
                        let one = "a group's gradient is added up on one device";
                        let reason = format!("trains {portion} on another device: {one}");
                        return Err(Refusal::at(schedule, index, reason));
                    }
                    last_backward.insert(id, index);
                }
                _ => {}
            }
        }
    }
    // In batches, a visit says which version it meets.
    if schedule.in_batches { Ok(()) } else { no_forward_after(schedule, &last_backward) }
}

/// Checks that no visit meets a block behind the last one that adds to its gradient.
fn no_forward_after(
    schedule: &Schedule,
    last_backward: &BTreeMap<BlockId, usize>,
) -> Result<(), Refusal> {
    for (index, visit) in schedule.visits.iter().enumerate() {
        let ended = |id: &&BlockId| last_backward.get(id).is_some_and(|&last| index > last);
        if let Some(id) = visit.blocks.iter().find(ended)
            && !visit.phase.is_backward()
        {
            let reason = format!("meets {id} after its gradient ended");
            return Err(Refusal::at(schedule, index, reason));
        }
    }
    Ok(())
}

/// Checks that a gather uses a block that it trains before the block's gradient ends, because then
/// the block may be updated.
fn gathers(schedule: &Schedule) -> Result<(), Refusal> {
    if schedule.in_batches {
        return Ok(()); // its visits say which version they meet
    }
    let mut first_read = BTreeMap::new();
    let mut ends = BTreeMap::new(); // block -> last visit that adds to its gradient
    for (index, visit) in schedule.visits.iter().enumerate() {
        for m in visit.micro_batches.clone() {
            for &id in &visit.reads {
                first_read.entry((id, m)).or_insert(index);
            }
        }
        if visit.phase == Phase::Backward {
            ends.extend(visit.blocks.iter().map(|&id| (id, index)));
        }
    }
    let is_gather = |visit: &&Visit| visit.kind == VisitKind::Gather;
    for gather in schedule.visits.iter().filter(is_gather) {
        for &block in gather.blocks.iter().filter(|&&id| schedule.is_trained(id)) {
            let Some(&end) = ends.get(&block) else { continue };
            for m in gather.micro_batches.clone() {
                for &id in &gather.writes {
                    if first_read[&(id, m)] > end {
                        let reason = format!(
                            "ends the gradient of {block} before {id}, gathered from it, was read"
                        );
                        return Err(Refusal::at(schedule, end, reason));
                    }
                }
            }
        }
    }
    Ok(())
}
