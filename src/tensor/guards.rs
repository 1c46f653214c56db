//! Guard zones: in builds with debug assertions the slots of an arena lie a page apart.
//!
//! All slots are in one allocation, so a kernel that writes a few floats too many writes into the
//! next slot, and no tool sees it. The zones between slots hold a pattern, which is compared after
//! each operation ([`Arena::check_zones`](super::Arena::check_zones)). Under AddressSanitizer
//! (`.ci/sanitize`) they are poisoned instead. Plans and views do not contain zones: the arena adds
//! them to addresses. Without debug assertions there are none.

use std::ops::Range;

use super::slots::ArenaPlan;

/// Floats of a zone: a page, so that slots that begin a page still do; less for Miri, which is slow
/// and needs no pages.
const ZONE: usize = if cfg!(miri) { 16 } else { 1024 };

/// The pattern of zones: NaN as a float, and NaN in each half.
const PATTERN: u32 = 0x7fd1_7fd1;

/// The guard zones of an arena.
#[derive(Debug, Default)]
pub(super) struct Guards {
    /// Slots that are not empty, in order: the name, and the floats of the plan.
    slots: Vec<(String, Range<usize>)>,
    /// Floats of the arena, with its zones.
    floats: usize,
}

impl Guards {
    /// Zones between all slots of a plan, before the first and behind the last.
    pub(super) fn of(plan: &ArenaPlan) -> Guards {
        let mut slots = Vec::new();
        if cfg!(debug_assertions) {
            for (holder, region) in &plan.slots {
                for slot in 0..region.count {
                    let at = region.at + slot * region.slot_floats;
                    let name = format!("slot {slot} of {holder}");
                    slots.push((name, at..at + region.slot_floats));
                }
            }
            slots.retain(|(_, floats)| !floats.is_empty());
            slots.sort_by_key(|(_, floats)| floats.start);
        }
        let zones = if slots.is_empty() { 0 } else { slots.len() + 1 };
        Guards { slots, floats: plan.floats + zones * ZONE }
    }

    pub(super) fn floats(&self) -> usize {
        self.floats
    }

    /// Floats of the zones before some bytes of the plan.
    ///
    /// # Panics
    /// The bytes are not all in one slot.
    pub(super) fn before(&self, bytes: Range<usize>) -> usize {
        if self.slots.is_empty() || bytes.is_empty() {
            return 0;
        }
        let of_bytes = |floats: &Range<usize>| floats.start * FLOAT..floats.end * FLOAT;
        let index = self.slots.partition_point(|(_, floats)| of_bytes(floats).end <= bytes.start);
        let slot = self.slots.get(index).map(|(_, floats)| of_bytes(floats));
        let is_in = slot.is_some_and(|slot| slot.start <= bytes.start && bytes.end <= slot.end);
        assert!(is_in, "bytes {bytes:?} of the arena are not in one slot: {:?}", self.near(index));
        (index + 1) * ZONE
    }

    /// The zones: each in floats of the arena, and the index of the slot behind it.
    fn zones(&self) -> impl Iterator<Item = (usize, Range<usize>)> {
        let count = if self.slots.is_empty() { 0 } else { self.slots.len() + 1 };
        (0..count).map(|index| {
            let from = index.checked_sub(1).map_or(0, |before| self.slots[before].1.end);
            let to = self.slots.get(index).map(|(_, floats)| floats.start + (index + 1) * ZONE);
            (index, from + index * ZONE..to.unwrap_or(self.floats))
        })
    }

    /// The slots before and behind a zone.
    fn near(&self, index: usize) -> &[(String, Range<usize>)] {
        &self.slots[index.saturating_sub(1)..self.slots.len().min(index + 1)]
    }

    /// Fills the zones of a new arena.
    pub(super) fn lay(&self, arena: &mut [f32]) {
        for (_, zone) in self.zones() {
            arena[zone.clone()].fill(f32::from_bits(PATTERN));
            poison::set(&arena[zone], true);
        }
    }

    /// Unpoisons the zones, so that the memory can be freed.
    pub(super) fn lift(&self, arena: &[f32]) {
        self.zones().for_each(|(_, zone)| poison::set(&arena[zone], false));
    }

    /// Panics if a zone does not hold the pattern. `read` returns floats of the arena.
    pub(super) fn check<'a>(&self, read: impl Fn(Range<usize>) -> &'a [f32]) {
        if cfg!(l2l_asan) {
            return; // a write has ended the process already, and a read of a zone would, too
        }
        for (index, zone) in self.zones() {
            let is_written = |values: &[f32]| {
                bytemuck::cast_slice::<f32, u32>(values) != &FILLED[..values.len()]
            };
            if read(zone).chunks(ZONE).any(is_written) {
                panic!("the guard zone beside {:?} was written", self.near(index));
            }
        }
    }
}

/// A filled zone. Zones are compared with it after each operation, so the comparison must be quick.
static FILLED: [u32; ZONE] = [PATTERN; ZONE];

const FLOAT: usize = size_of::<f32>();

/// Marks of memory that AddressSanitizer lets no code touch.
mod poison {
    #[cfg(l2l_asan)]
    unsafe extern "C" {
        fn __asan_poison_memory_region(begin: *const f32, bytes: usize);
        fn __asan_unpoison_memory_region(begin: *const f32, bytes: usize);
    }

    #[cfg(l2l_asan)]
    pub(super) fn set(zone: &[f32], is_poisoned: bool) {
        let begin = zone.as_ptr();
        let bytes = size_of_val(zone);
        // SAFETY: these calls change AddressSanitizer's notes about the memory, not the memory.
        unsafe {
            match is_poisoned {
                true => __asan_poison_memory_region(begin, bytes),
                false => __asan_unpoison_memory_region(begin, bytes),
            }
        }
    }

    #[cfg(not(l2l_asan))]
    pub(super) fn set(_: &[f32], _: bool) {}
}
