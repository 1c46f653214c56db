//! Which parts of a block rows choose: what an upload or a download waits for, and may leave out.
//!
//! A layer may have blocks of which each row uses some parts (experts), and a boundary that says
//! which. Once the stash has it for all micro-batches that use an upload, the parts that no row
//! chose need not be uploaded. The visit never reads what its slot holds there. The gradient of
//! such a part is zero, and need not be downloaded. So bytes change, and results do not.
//!
//! A block stays in its slot for several visits, perhaps for those of other groups or of the
//! backward pass. So an upload is cut only if all these visits say what they need, and if all of it
//! was written by visits before the first of them: else the upload would wait for a visit that
//! waits for the upload.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;

use super::device_visits::DeviceVisit;
use super::{BoundaryId, MicroBatch, Phase, Portion, Schedule, Visit};

/// What says which parts of a block rows choose: a boundary of these micro-batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChosenBy {
    /// The boundary. The stash has it.
    pub boundary: BoundaryId,
    /// The first micro-batch.
    pub first: MicroBatch,
    /// The micro-batch behind the last.
    pub end: MicroBatch,
}

impl ChosenBy {
    fn of(boundary: BoundaryId, micro_batches: &Range<MicroBatch>) -> ChosenBy {
        ChosenBy { boundary, first: micro_batches.start, end: micro_batches.end }
    }

    /// The micro-batches.
    pub fn micro_batches(&self) -> Range<MicroBatch> {
        self.first..self.end
    }

    /// What two visits need. `None`: one needs all of the block, or micro-batches between theirs
    /// are unknown.
    fn joined(self, other: ChosenBy) -> Option<ChosenBy> {
        let is_joined =
            self.boundary == other.boundary && self.first <= other.end && other.first <= self.end;
        let first = self.first.min(other.first);
        let end = self.end.max(other.end);
        is_joined.then_some(ChosenBy { first, end, ..self })
    }
}

/// An upload, and what the visits need that use it.
struct Upload {
    device_visit: usize,
    residence: usize,
    needs: Option<ChosenBy>,
}

/// Says of each upload which parts its visits need. A block that comes in shards is needed whole:
/// other devices copy their parts of it.
pub(super) fn cut_uploads(schedule: &Schedule, device_visits: &mut [DeviceVisit]) {
    let has_choice = schedule.visits.iter().any(|visit| visit.chosen_by.is_some());
    if schedule.shards > 1 || !has_choice {
        return;
    }
    let mut uploads: Vec<Upload> = Vec::new();
    let mut in_slots = HashMap::new(); // device and portion -> the upload
    for (device_visit, resolved) in device_visits.iter().enumerate() {
        let visit = &schedule.visits[resolved.visit];
        let own = visit.chosen_by.map(|id| ChosenBy::of(id, &visit.micro_batches));
        for (residence, of) in resolved.residences.iter().enumerate() {
            let at = (visit.device(), of.portion);
            if of.upload {
                in_slots.insert(at, uploads.len());
                uploads.push(Upload { device_visit, residence, needs: own });
            } else {
                let upload = &mut uploads[in_slots[&at]];
                upload.needs = upload.needs.zip(own).and_then(|(all, own)| all.joined(own));
            }
        }
    }
    let writers = writers(schedule);
    for Upload { device_visit, residence, needs } in uploads {
        let now = device_visits[device_visit].visit;
        let is_before = |m| writers.get(&m).is_some_and(|&writer| writer < now);
        let is_known = |all: &ChosenBy| all.micro_batches().all(|m| is_before((all.boundary, m)));
        device_visits[device_visit].residences[residence].chosen_by = needs.filter(is_known);
    }
}

/// The visit that writes each boundary by which rows choose.
fn writers(schedule: &Schedule) -> BTreeMap<(BoundaryId, MicroBatch), usize> {
    let chosen: BTreeSet<BoundaryId> =
        schedule.visits.iter().filter_map(|visit| visit.chosen_by).collect();
    let mut writers = BTreeMap::new();
    for (index, visit) in schedule.visits.iter().enumerate() {
        for &id in visit.writes.iter().filter(|id| chosen.contains(id)) {
            writers.extend(visit.micro_batches.clone().map(|m| ((id, m), index)));
        }
    }
    writers
}

/// What says which parts of a group's gradient of a block have contributions. The gradient is
/// complete behind the visit `last`. `None`: all parts may have some.
pub(super) fn of_gradient(schedule: &Schedule, last: &Visit, portion: Portion) -> Option<ChosenBy> {
    let choice = last.chosen_by?;
    let group = schedule.group_of(last.micro_batches.start);
    let micro_batches = schedule.groups[group as usize].clone();
    let adds = |visit: &&Visit| {
        visit.phase == Phase::Backward
            && visit.on_device()
            && visit.portions().any(|one| one == portion)
            && micro_batches.contains(&visit.micro_batches.start)
    };
    let mut adding = schedule.visits.iter().filter(adds);
    let is_one = adding.all(|visit| visit.chosen_by == Some(choice));
    is_one.then(|| ChosenBy::of(choice, &micro_batches))
}
