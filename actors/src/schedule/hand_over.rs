//! What the next visit of a device reads stays there.
//!
//! Where a layer has one micro-batch, a device could compute nothing while the output of one visit
//! went to the stash and came back as the input of the next. Such a boundary stays on the device:
//! it takes no slot there, and no lane copies it. If later visits read it, too, it goes to the
//! stash as well. The device holds at most a few boundaries of one micro-batch for this, however
//! many layers there are.

use std::collections::BTreeMap;

use super::{BoundaryId, Copied, DeviceId, Encoding, Place, Role, Schedule};

/// Keeps on the device what a visit of one micro-batch hands to the next visit of the same device.
/// It changes no result. What the stash rounds is left alone, because all readers of a boundary
/// must find the same numbers. So is what has a place by other rules: a KV cache, saved
/// activations, and the partial sums of pieces.
#[must_use]
pub fn hand_over(mut schedule: Schedule) -> Schedule {
    let next = next_visits(&schedule);
    let mut writers: BTreeMap<BoundaryId, Vec<usize>> = BTreeMap::new();
    let mut readers: BTreeMap<BoundaryId, usize> = BTreeMap::new();
    for (index, visit) in schedule.visits.iter().enumerate() {
        visit.writes.iter().for_each(|&id| writers.entry(id).or_default().push(index));
        let read = visit.all_reads().chain(visit.chosen_by);
        read.for_each(|id| *readers.entry(id).or_default() += visit.micro_batches.len());
    }
    for (id, writers) in writers {
        let boundary = *schedule.boundary(id);
        if boundary.encoding != Encoding::Plain || has_a_place(boundary.role) {
            continue;
        }
        let takers: Option<Vec<usize>> =
            writers.iter().map(|&writer| taker(&schedule, &next, writer, id)).collect();
        let Some(takers) = takers else { continue };
        let mut stays = id;
        if readers[&id] > takers.len() {
            stays = BoundaryId(schedule.boundaries.len() as u32);
            schedule.boundaries.push(boundary);
        }
        for (writer, taker) in writers.into_iter().zip(takers) {
            let writer = &mut schedule.visits[writer];
            if stays == id {
                writer.writes.retain(|written| *written != id);
                writer.keeps.push(id);
            } else {
                writer.copies.push(Copied { from: id, to: stays });
            }
            let taker = &mut schedule.visits[taker];
            taker.reads.retain(|read| *read != id);
            taker.kept.push(stays);
            // What the taker copies for later steps of its layer has the new id, too.
            for copied in taker.copies.iter_mut().filter(|copied| copied.from == id) {
                copied.from = stays;
            }
        }
    }
    schedule
}

/// True for a role whose place other rules choose.
fn has_a_place(role: Role) -> bool {
    use Role::{Partial, PartialGradient, SavedActivations};
    role.is_kv() || matches!(role, Partial | PartialGradient | SavedActivations)
}

/// For each visit of a device, the one that the device has next.
fn next_visits(schedule: &Schedule) -> Vec<Option<usize>> {
    let mut next = vec![None; schedule.visits.len()];
    let mut last: BTreeMap<DeviceId, usize> = BTreeMap::new();
    for (index, visit) in schedule.visits.iter().enumerate() {
        let Place::Device(device) = visit.place else { continue };
        if let Some(before) = last.insert(device, index) {
            next[before] = Some(index);
        }
    }
    next
}

/// The next visit of the writer's device, if it reads the boundary of the same one micro-batch.
fn taker(
    schedule: &Schedule,
    next: &[Option<usize>],
    writer: usize,
    id: BoundaryId,
) -> Option<usize> {
    let taker = next[writer]?;
    let [from, to] = [writer, taker].map(|index| &schedule.visits[index]);
    let is_one = from.micro_batches.len() == 1 && from.micro_batches == to.micro_batches;
    (is_one && to.reads.contains(&id)).then_some(taker)
}
