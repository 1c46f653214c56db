//! The stash: where boundaries wait on the host (or the device) between visits.
//!
//! Its places are planned: a boundary takes over the place of one that was read for the last time
//! by an earlier visit of the device. That is safe without a lock, for what a visit writes is
//! downloaded after it ran, and it ran after all inputs of the visits before it had arrived. What
//! the host reads (loss, scatter) keeps its place.
//!
//! A boundary may be *packed*: each number is rounded to bf16 (`tensor::packed`).

use std::collections::HashMap;

use l2l_actors::schedule::{BoundaryId, MicroBatch, Schedule};

/// Where each boundary lies, in floats.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct StashLayout {
    /// By boundary: its first float, and floats of a sequence.
    places: Vec<(usize, usize)>,
    /// Sequences before each micro-batch, and all.
    before: Vec<usize>,
    /// All of it.
    pub(crate) floats: usize,
}

impl StashLayout {
    /// First float and floats of one micro-batch of a boundary.
    pub(crate) fn place(&self, id: BoundaryId, m: MicroBatch) -> (usize, usize) {
        let (at, floats) = self.places[id.0 as usize];
        let (from, to) = (self.before[m as usize], self.before[m as usize + 1]);
        (at + from * floats, (to - from) * floats)
    }

    /// First float and floats of all micro-batches of a boundary.
    pub(crate) fn whole(&self, id: BoundaryId) -> (usize, usize) {
        let (at, floats) = self.places[id.0 as usize];
        (at, self.before.last().expect("it begins with 0") * floats)
    }
}

/// Places every boundary of a schedule but keys and values, whose place is the KV cache.
pub(crate) fn layout(schedule: &Schedule) -> StashLayout {
    let mut before = vec![0];
    for &sequences in &schedule.micro_batches {
        before.push(before[before.len() - 1] + sequences as usize);
    }
    let sequences = before[before.len() - 1];
    let mut last_read = HashMap::new(); // -> device visit, or never
    for (index, visit) in schedule.visits.iter().enumerate() {
        for &id in &visit.reads {
            let read = if visit.on_device() { index } else { usize::MAX };
            let last = last_read.entry(id).or_insert(read);
            *last = read.max(*last);
        }
    }
    let mut places: Vec<Option<(usize, usize)>> = vec![None; schedule.boundaries.len()];
    let mut free: HashMap<usize, Vec<usize>> = HashMap::new(); // floats of a sequence -> places
    let mut floats = 0;
    for (index, visit) in schedule.visits.iter().enumerate() {
        for &id in &visit.writes {
            let stashed = schedule.boundary(id).stashed_per_sequence as usize;
            let per_sequence = stashed / size_of::<f32>();
            let place = &mut places[id.0 as usize];
            if place.is_some() || schedule.boundary(id).role.is_kv() {
                continue; // another micro-batch of it was written before
            }
            let at = free.entry(per_sequence).or_default().pop().unwrap_or_else(|| {
                let at = floats;
                floats += (per_sequence * sequences).next_multiple_of(16);
                at
            });
            *place = Some((at, per_sequence));
        }
        for id in visit.reads.iter().filter(|id| last_read[id] == index) {
            if let Some((at, per_sequence)) = places[id.0 as usize] {
                free.entry(per_sequence).or_default().push(at);
            }
        }
    }
    let places = places.into_iter().map(Option::unwrap_or_default).collect();
    StashLayout { places, before, floats }
}
