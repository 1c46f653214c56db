//! Which weight slot each block takes, decided once: the farthest next use is evicted.
//!
//! The future of a step is known, so Belady's rule applies as written (1966, "A study of
//! replacement algorithms for a virtual-storage computer"): it fetches the fewest blocks. A step's
//! versions are its own, so residency begins cold with each step. Ties (never used again) go to the
//! slot that fell idle first, so that its upload can start earliest.

use std::collections::HashMap;

use super::Portion;
use super::choice::ChosenBy;

/// What one device visit needs of a block: where it lies and whether it must be uploaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Residence {
    /// The block, or its portion.
    pub portion: Portion,
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

/// A slot's tenant while the visits are walked.
#[derive(Clone, Copy)]
struct Tenant {
    portion: Portion,
    last_visit: usize,
}

/// Places the blocks of each visit in turn. Needs as many slots as the largest visit has blocks.
pub(super) fn residency(visits: &[Vec<Portion>], slots: u32) -> Vec<Vec<Residence>> {
    let mut uses: HashMap<Portion, Vec<usize>> = HashMap::new();
    for (index, blocks) in visits.iter().enumerate() {
        for &portion in blocks {
            uses.entry(portion).or_default().push(index);
        }
    }
    let next_use = |portion: Portion, now: usize| {
        let at = uses[&portion].partition_point(|&visit| visit <= now);
        uses[&portion].get(at).copied().unwrap_or(usize::MAX)
    };

    let mut tenants: Vec<Option<Tenant>> = vec![None; slots as usize];
    let mut placed = HashMap::new(); // portion -> slot
    let mut used_at: HashMap<u32, (usize, usize)> = HashMap::new(); // slot -> its last residence
    let mut all: Vec<Vec<Residence>> = Vec::with_capacity(visits.len());
    for (now, blocks) in visits.iter().enumerate() {
        let mut residences = Vec::with_capacity(blocks.len());
        // Blocks that are here already are pinned before others look for a place.
        for &portion in blocks {
            if let Some(&slot) = placed.get(&portion) {
                tenants[slot as usize] = Some(Tenant { portion, last_visit: now });
            }
        }
        for (position, &portion) in blocks.iter().enumerate() {
            let (slot, upload, after) = match placed.get(&portion) {
                Some(&slot) => (slot, false, None),
                None => {
                    let free = (0..slots).filter(|&s| match tenants[s as usize] {
                        Some(tenant) => tenant.last_visit != now,
                        None => true,
                    });
                    let farthest = free.max_by_key(|&s| match tenants[s as usize] {
                        None => (usize::MAX, usize::MAX, slots - s),
                        Some(t) => {
                            (next_use(t.portion, now), usize::MAX - 1 - t.last_visit, slots - s)
                        }
                    });
                    let slot = farthest.expect("no visit has more blocks than there are slots");
                    let tenant = Tenant { portion, last_visit: now };
                    let evicted = tenants[slot as usize].replace(tenant);
                    if let Some(tenant) = evicted {
                        placed.remove(&tenant.portion);
                    }
                    placed.insert(portion, slot);
                    (slot, true, evicted.map(|tenant| tenant.last_visit))
                }
            };
            if let Some((visit, at)) = used_at.insert(slot, (now, position)).filter(|_| upload) {
                all[visit][at].last_use = true;
            }
            let last_use = false;
            let chosen_by = None;
            residences.push(Residence { portion, slot, upload, after, last_use, chosen_by });
        }
        all.push(residences);
    }
    for (visit, at) in used_at.into_values() {
        all[visit][at].last_use = true;
    }
    all
}
