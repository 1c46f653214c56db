//! What several steps of a layer use stays on the device between their visits.
//!
//! The visits of a layer's steps follow each other on one device. So the first of them brings a
//! boundary, or writes it, and the others find it on the device: it takes no other slot, and no
//! lane copies it again. What says which parts of a block rows choose goes to the stash as well:
//! uploads and downloads look there. Pieces of a layer bring each their own: so their bytes do not
//! depend on the devices that they are dealt to. So do the visits of a reference.

use std::collections::{BTreeMap, BTreeSet};

use super::generate::Legs;
use super::{Boundary, BoundaryId, Copied, Encoding, Schedule, Visit};

/// Keeps on the device what several steps of a layer use in the forward pass, or in the backward
/// pass.
pub(super) fn stay(schedule: &mut Schedule, legs: &mut Legs) {
    let mut readers: BTreeMap<BoundaryId, usize> = BTreeMap::new();
    let all = legs.forward.iter().chain(&legs.reference).chain(&legs.backward);
    let read = all.flat_map(|visit| visit.reads.iter().chain(&visit.chosen_by));
    read.for_each(|id| *readers.entry(*id).or_default() += 1);
    for legs in [&mut legs.forward, &mut legs.reference, &mut legs.backward] {
        let is_one_layer = |a: &Visit, b: &Visit| (a.stop(), a.place) == (b.stop(), b.place);
        for visits in legs.chunk_by_mut(is_one_layer).filter(|visits| visits.len() > 1) {
            let read: BTreeSet<_> = visits.iter().flat_map(|visit| &visit.reads).copied().collect();
            for id in read {
                stay_between(&mut schedule.boundaries, visits, id, readers[&id]);
            }
        }
    }
}

/// Keeps a boundary on the device between the visits of one layer. `readers` is the number of all
/// its readers, on the device or on the host.
fn stay_between(
    boundaries: &mut Vec<Boundary>,
    visits: &mut [Visit],
    id: BoundaryId,
    readers: usize,
) {
    let boundary = boundaries[id.0 as usize];
    let has = |visit: &Visit| visit.reads.contains(&id) || visit.writes.contains(&id);
    let Some(first) = visits.iter().position(has) else { return };
    let (visits, later) = visits.split_at_mut(first + 1);
    let first = &mut visits[first];
    let writes = first.writes.contains(&id);
    if writes && boundary.encoding != Encoding::Plain {
        return; // all readers must find the same numbers, and the stash rounds them
    }
    let mut later: Vec<&mut Visit> =
        later.iter_mut().filter(|visit| visit.reads.contains(&id)).collect();
    if later.is_empty() {
        return;
    }
    let mut stays = id;
    if writes && later.len() == readers {
        first.writes.retain(|written| *written != id);
        first.keeps.push(id);
    } else {
        stays = BoundaryId(boundaries.len() as u32);
        boundaries.push(boundary);
        first.copies.push(Copied { from: id, to: stays });
    }
    for visit in &mut later {
        visit.reads.retain(|read| *read != id);
        visit.kept.push(stays);
    }
}
