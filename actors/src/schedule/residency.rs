//! Which weight slot each block takes, decided once: the farthest next use is evicted.
//!
//! The future of a step is known, so Belady's rule applies as written (1966, "A study of
//! replacement algorithms for a virtual-storage computer"). It fetches the fewest blocks, but for
//! small ones: beside large blocks one such as that of a norm costs nothing to fetch, so it is
//! evicted before any large one that is used again. A step's versions are its own, so residency
//! begins cold with each step. In a step in batches, each version of a block has a place of its
//! own. Ties (never used again) go to the slot that fell idle first, so that its upload can start
//! earliest.

use std::collections::HashMap;

use super::Portion;
use super::choice::ChosenBy;

/// What one device visit needs of a block: where it lies and whether it must be uploaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Residence {
    /// The block, or its portion.
    pub portion: Portion,
    /// The updates of this step that it has had: see [`Visit::ahead`](super::Visit).
    pub ahead: u32,
    /// Its weight slot.
    pub slot: u32,
    /// True when it is uploaded for this visit; false when the slot holds it already.
    pub upload: bool,
    /// The upload waits for this visit, the last to use the slot for another block. An
    /// index among the visits of all devices, once each has its own.
    pub after: Option<usize>,
    /// True when the slot holds something else, or nothing, after this visit.
    pub last_use: bool,
    /// What says which parts of the block its visits need, from this upload to the last use.
    /// `None`: they need all of it.
    pub chosen_by: Option<ChosenBy>,
}

/// What a slot holds: a portion, and the updates of the step that it has had.
pub(super) type Needed = (Portion, u32);

/// A slot's tenant while the visits are walked.
#[derive(Clone, Copy)]
struct Tenant {
    needed: Needed,
    last_visit: usize,
}

/// Places the blocks of each visit in turn. Needs as many slots as the largest visit has blocks.
/// `is_small` says what costs nothing to fetch.
pub(super) fn residency(
    visits: &[Vec<Needed>],
    slots: u32,
    is_small: impl Fn(Portion) -> bool,
) -> Vec<Vec<Residence>> {
    let mut uses: HashMap<Needed, Vec<usize>> = HashMap::new();
    for (index, blocks) in visits.iter().enumerate() {
        for &needed in blocks {
            uses.entry(needed).or_default().push(index);
        }
    }
    let next_use = |needed: Needed, now: usize| {
        let at = uses[&needed].partition_point(|&visit| visit <= now);
        uses[&needed].get(at).copied().unwrap_or(usize::MAX)
    };

    let mut tenants: Vec<Option<Tenant>> = vec![None; slots as usize];
    let mut placed = HashMap::new(); // what is needed -> slot
    let mut used_at: HashMap<u32, (usize, usize)> = HashMap::new(); // slot -> its last residence
    let mut all: Vec<Vec<Residence>> = Vec::with_capacity(visits.len());
    for (now, blocks) in visits.iter().enumerate() {
        let mut residences = Vec::with_capacity(blocks.len());
        // Blocks that are here already are pinned before others look for a place.
        for &needed in blocks {
            if let Some(&slot) = placed.get(&needed) {
                tenants[slot as usize] = Some(Tenant { needed, last_visit: now });
            }
        }
        for (position, &needed) in blocks.iter().enumerate() {
            let (slot, upload, after) = match placed.get(&needed) {
                Some(&slot) => (slot, false, None),
                None => {
                    let free = (0..slots).filter(|&s| match tenants[s as usize] {
                        Some(tenant) => tenant.last_visit != now,
                        None => true,
                    });
                    let farthest = free.max_by_key(|&s| match tenants[s as usize] {
                        None => (true, usize::MAX, usize::MAX, slots - s),
                        Some(t) => {
                            let next = next_use(t.needed, now);
                            let is_cheap = next == usize::MAX || is_small(t.needed.0);
                            (is_cheap, next, usize::MAX - 1 - t.last_visit, slots - s)
                        }
                    });
                    let slot = farthest.expect("no visit has more blocks than there are slots");
                    let tenant = Tenant { needed, last_visit: now };
                    let evicted = tenants[slot as usize].replace(tenant);
                    if let Some(tenant) = evicted {
                        placed.remove(&tenant.needed);
                    }
                    placed.insert(needed, slot);
                    (slot, true, evicted.map(|tenant| tenant.last_visit))
                }
            };
            if let Some((visit, at)) = used_at.insert(slot, (now, position)).filter(|_| upload) {
                all[visit][at].last_use = true;
            }
            let last_use = false;
            let chosen_by = None;
            let (portion, ahead) = needed;
            residences.push(Residence { portion, ahead, slot, upload, after, last_use, chosen_by });
        }
        all.push(residences);
    }
    for (visit, at) in used_at.into_values() {
        all[visit][at].last_use = true;
    }
    all
}
