//! All tensor memory of a device: one allocation, made at start, read and written by range.
//!
//! The ring grants ranges: while an operation runs, no other operation touches the slots that it
//! writes, or writes the slots that it reads (kept by credits and fences of crate `l2l-actors`, and
//! tested there). This file checks that ranges lie inside the arena.

use std::cell::UnsafeCell;
use std::hint::black_box;
use std::io;
use std::ops::{Deref, DerefMut, Range};
use std::thread;

use memmap2::{MmapMut, MmapOptions};

use super::guards::Guards;
use super::slots::ArenaPlan;
use super::view::View;
use crate::machine;

/// Floats on pages of their own, in huge pages where the system has them.
#[derive(Debug)]
pub(crate) struct Pages {
    memory: MmapMut,
    bytes: usize,
}

impl Pages {
    /// `length` zeros.
    ///
    /// # Errors
    /// The system does not have that much.
    pub(crate) fn new(length: usize) -> io::Result<Pages> {
        let bytes = length * size_of::<f32>();
        let memory = MmapOptions::new().len(bytes.max(1)).map_anon()?;
        // Miri does not support `madvise`.
        #[cfg(all(target_os = "linux", not(miri)))]
        let _ = memory.advise(memmap2::Advice::HugePage); // without them it is slower, not wrong
        Ok(Pages { memory, bytes })
    }
}

/// Bytes of a page.
const PAGE: usize = 4096;

/// The least words that a thread of their own is worth: its start costs as much as some pages.
const SHARE: usize = 1 << 20;

/// Makes the system give all pages of a memory, by all threads. They would otherwise be given when
/// they are first written, perhaps by one thread.
pub(crate) fn touch(memory: &mut [f32]) {
    let words: &mut [u32] = bytemuck::cast_slice_mut(memory);
    let each = |share: &mut [u32]| {
        for page in share.chunks_mut(PAGE / size_of::<u32>()) {
            page[0] = black_box(page[0]);
        }
    };
    let share = words.len().div_ceil(machine::cores()).next_multiple_of(PAGE).max(SHARE);
    if words.len() <= share {
        return each(words);
    }
    thread::scope(|scope| {
        for share in words.chunks_mut(share) {
            // Pages that no thread touches come when they are first written.
            _ = thread::Builder::new().spawn_scoped(scope, move || each(share));
        }
    });
}

/// The number of pages of a memory that the system has given.
#[cfg(all(test, target_os = "linux"))]
pub(crate) fn given_pages(memory: &[f32]) -> usize {
    use std::os::unix::fs::FileExt;
    let map = std::fs::File::open("/proc/self/pagemap").expect("every process has one");
    let first = memory.as_ptr().addr() / PAGE;
    let pages = size_of_val(memory).div_ceil(PAGE);
    let mut entries = vec![0_u64; pages];
    let at = (first * size_of::<u64>()) as u64;
    map.read_exact_at(bytemuck::cast_slice_mut(&mut entries), at).expect("it has all pages");
    // Bit 63: the page is in memory. Bit 62: it is swapped out.
    entries.iter().filter(|&&entry| entry >> 62 != 0).count()
}

impl Deref for Pages {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        bytemuck::cast_slice(&self.memory[..self.bytes])
    }
}

impl DerefMut for Pages {
    fn deref_mut(&mut self) -> &mut [f32] {
        bytemuck::cast_slice_mut(&mut self.memory[..self.bytes])
    }
}

/// The memory of a device, or of the host and the devices that share it.
#[derive(Debug)]
pub(crate) struct Arena {
    /// Owns the pages, which are accessed through `base` alone.
    _memory: UnsafeCell<Pages>,
    base: *mut f32,
    /// Floats, as planned: without guard zones.
    length: usize,
    guards: Guards,
}

// SAFETY: only the memory behind `base` is shared, and callers of `read` and `write` promise that
// no two accesses conflict.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

impl Arena {
    /// Zeroed memory for `length` floats.
    ///
    /// # Errors
    /// The system does not have that much.
    pub(crate) fn new(length: usize) -> io::Result<Arena> {
        Arena::planned(&ArenaPlan { floats: length, slots: Vec::new() })
    }

    /// Zeroed memory for a plan, with guard zones between its slots where there are debug
    /// assertions. Then a view must lie in one slot.
    ///
    /// # Errors
    /// The system does not have that much.
    pub(crate) fn planned(plan: &ArenaPlan) -> io::Result<Arena> {
        let guards = Guards::of(plan);
        let mut memory = Pages::new(guards.floats())?;
        guards.lay(&mut memory);
        let base = memory.as_mut_ptr();
        Ok(Arena { _memory: UnsafeCell::new(memory), base, length: plan.floats, guards })
    }

    /// Panics if a float between slots was written. Without debug assertions it does nothing.
    pub(crate) fn check_zones(&self) {
        // SAFETY: no view has memory between slots, so no operation writes it.
        self.guards.check(|zone| unsafe { self.floats(zone) });
    }

    /// All floats, guard zones included.
    pub(crate) fn all_mut(&mut self) -> &mut [f32] {
        // SAFETY: these are all floats of the memory, and `&mut self` is the only access to it.
        unsafe { std::slice::from_raw_parts_mut(self.base, self.guards.floats()) }
    }

    /// Floats by their place in memory, where guard zones count.
    ///
    /// # Safety
    /// The floats lie inside the arena, and are not written while the slice lives.
    unsafe fn floats(&self, range: Range<usize>) -> &[f32] {
        // SAFETY: inside and not written, by the caller; initialised, for pages are zeroed.
        unsafe { std::slice::from_raw_parts(self.base.add(range.start), range.len()) }
    }

    /// The address of a view's first element. Panics unless the view lies inside the arena.
    fn place<T>(&self, view: View) -> *mut T {
        let size = size_of::<T>();
        assert_eq!(view.dtype.size(), size, "elements are read by their size");
        let elements = self.length * (size_of::<f32>() / size);
        let end = view.at.checked_add(view.len()).filter(|&end| end <= elements);
        let end = end.unwrap_or_else(|| panic!("{view:?} of {} floats", self.length));
        let zones = self.guards.before(view.at * size..end * size);
        self.base.wrapping_add(zones).cast::<T>().wrapping_add(view.at)
    }

    /// Writes a float `by` floats behind a view's first one, as a wrong kernel would.
    #[cfg(test)]
    pub(crate) fn stray(&self, view: View, by: isize) {
        // SAFETY: the float lies in a guard zone of the same memory, which only the test reads.
        unsafe { self.place::<f32>(view).offset(by).write(1.0) }
    }

    /// Copies floats to a view.
    pub(crate) fn fill(&mut self, view: View, values: &[f32]) {
        self.values_mut(view).copy_from_slice(values);
    }

    /// The floats of a view, to write. `&mut self` makes it safe.
    pub(crate) fn values_mut(&mut self, view: View) -> &mut [f32] {
        // SAFETY: `&mut self` is the only access to the memory.
        unsafe { self.write(view) }
    }

    /// The floats of a view. `&mut self` makes it safe.
    pub(crate) fn values(&mut self, view: View) -> &[f32] {
        // SAFETY: as in `values_mut`.
        unsafe { self.read(view) }
    }

    /// The floats of a view.
    ///
    /// # Safety
    /// They are not written while the slice lives.
    pub(crate) unsafe fn read(&self, view: View) -> &[f32] {
        // SAFETY: inside, as `place` checks; aligned, for a page is; initialised, for pages are
        // zeroed; not written meanwhile, by the caller.
        unsafe { std::slice::from_raw_parts(self.place(view), view.len()) }
    }

    /// The floats of a view, to write.
    ///
    /// # Safety
    /// No other access reads or writes them while the slice lives.
    #[allow(clippy::mut_from_ref, reason = "the ring gives each range to one operation at a time")]
    pub(crate) unsafe fn write(&self, view: View) -> &mut [f32] {
        // SAFETY: as in `read`, and there is no other access, by the caller.
        unsafe { std::slice::from_raw_parts_mut(self.place(view), view.len()) }
    }

    /// The elements of a view of 16 bits, as bits.
    ///
    /// # Safety
    /// As for [`read`](Arena::read).
    pub(crate) unsafe fn read_halves(&self, view: View) -> &[u16] {
        // SAFETY: as in `read`.
        unsafe { std::slice::from_raw_parts(self.place(view), view.len()) }
    }

    /// The elements of a view of 16 bits, as bits, to write.
    ///
    /// # Safety
    /// As for [`write`](Arena::write).
    #[allow(clippy::mut_from_ref, reason = "as for `write`")]
    pub(crate) unsafe fn write_halves(&self, view: View) -> &mut [u16] {
        // SAFETY: as in `write`.
        unsafe { std::slice::from_raw_parts_mut(self.place(view), view.len()) }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: the range is the whole arena, and `&mut self` is the only access to it.
        let all = unsafe { self.floats(0..self.guards.floats()) };
        self.guards.lift(all);
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;
    use crate::tensor::{Dtype, Slots};

    /// An arena with a region of two slots, a region of one, and floats behind them in no slot.
    fn arena() -> (Arena, [View; 3]) {
        let regions = [
            Slots { at: 0, count: 2, slot_floats: 40 },
            Slots { at: 80, count: 1, slot_floats: 7 },
        ];
        let slots = vec![("weights", regions[0]), ("landing", regions[1])];
        let arena = Arena::planned(&ArenaPlan { floats: 96, slots }).expect("little");
        (arena, [regions[0].whole(0), regions[0].whole(1), regions[1].whole(0)])
    }

    #[test]
    #[cfg(target_os = "linux")]
    #[cfg_attr(miri, ignore = "Miri has no pages")]
    fn touched_pages_are_there_and_keep_their_values() {
        for len in [1, PAGE / 4, PAGE / 4 + 1, 2 * SHARE + 5] {
            let mut pages = Pages::new(len).expect("little");
            let all = (len * size_of::<f32>()).div_ceil(PAGE);
            assert_eq!(given_pages(&pages), 0, "{len}");
            pages[len - 1] = f32::NAN;
            touch(&mut pages);
            assert_eq!(given_pages(&pages), all, "{len}");
            assert!(pages[..len - 1].iter().all(|&value| value == 0.0) && pages[len - 1].is_nan());
        }
    }

    #[test]
    fn slots_hold_what_was_written_to_them() {
        let (mut arena, slots) = arena();
        for (index, &slot) in slots.iter().enumerate() {
            arena.values_mut(slot).fill(index as f32);
        }
        for (index, &slot) in slots.iter().enumerate() {
            assert!(arena.values(slot).iter().all(|&value| value == index as f32));
        }
        let halves = slots[2].hold(1, 13, Dtype::Bf16);
        // SAFETY: this test has the only access.
        unsafe { arena.write_halves(halves) }.fill(0x3f80);
        assert_eq!(arena.values(slots[2])[6].to_bits() & 0xffff, 0x3f80);
        assert_eq!(arena.values(slots[1])[39], 1.0);
        arena.check_zones();
    }

    fn panic_of(call: impl FnOnce()) -> String {
        let panic = catch_unwind(AssertUnwindSafe(call)).expect_err("it is found");
        *panic.downcast::<String>().expect("it says what")
    }

    #[test]
    fn a_view_of_two_slots_is_refused() {
        if cfg!(debug_assertions) {
            let (mut arena, _) = arena();
            let says = panic_of(|| _ = arena.values(View::floats(39, 2)));
            assert!(says.contains("are not in one slot"), "{says}");
        }
    }

    /// Writes behind each slot and before it: the slot, and the offset from its first float.
    const STRAYS: [(usize, isize); 6] = [(0, 40), (0, -1), (1, 40), (1, -1), (2, 7), (2, -1)];

    #[test]
    fn one_float_beside_a_slot_is_found() {
        if cfg!(l2l_asan) {
            return one_float_beside_a_slot_ends_the_process();
        }
        for (slot, by) in STRAYS.into_iter().filter(|_| cfg!(debug_assertions)) {
            let (arena, slots) = arena();
            arena.check_zones();
            arena.stray(slots[slot], by);
            let says = panic_of(|| arena.check_zones());
            let name = ["slot 0 of weights", "slot 1 of weights", "slot 0 of landing"][slot];
            assert!(says.contains(name), "{slot} by {by}: {says}");
        }
    }

    /// AddressSanitizer ends the process that writes the float.
    fn one_float_beside_a_slot_ends_the_process() {
        const STRAY: &str = "L2L_STRAY";
        if let Ok(index) = std::env::var(STRAY) {
            let (slot, by) = STRAYS[index.parse::<usize>().expect("an index")];
            let (arena, slots) = arena();
            return arena.stray(slots[slot], by);
        }
        for (index, stray) in STRAYS.iter().enumerate() {
            let program = std::env::current_exe().expect("it runs");
            let test = "tensor::arena::tests::one_float_beside_a_slot_is_found";
            let mut program = std::process::Command::new(program);
            let ended = program.args(["--exact", test]).env(STRAY, index.to_string()).output();
            let ended = ended.expect("it can be run again");
            let says = String::from_utf8_lossy(&ended.stderr);
            assert!(!ended.status.success(), "{stray:?} was not found");
            assert!(says.contains("use-after-poison"), "{stray:?}: {says}");
        }
    }
}
