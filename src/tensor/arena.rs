//! All tensor memory of a device: one allocation, made at start, read and written by range.
//!
//! The ring grants ranges: while an operation runs, nobody else touches the slots it writes, and
//! nobody writes those it reads (crate `l2l-actors`, kept by credits and fences and tested
//! there). What is left to this file is that ranges lie inside.

use std::cell::UnsafeCell;
use std::io;
use std::ops::{Deref, DerefMut};

use memmap2::{MmapMut, MmapOptions};

use crate::tensor::View;

/// Floats on pages of their own, in huge pages where the system has them.
#[derive(Debug)]
pub(crate) struct Pages {
    memory: MmapMut,
    bytes: usize,
}

impl Pages {
    /// So many zeros.
    ///
    /// # Errors
    /// The system does not have that much.
    pub(crate) fn new(length: usize) -> io::Result<Pages> {
        let bytes = length * size_of::<f32>();
        let memory = MmapOptions::new().len(bytes.max(1)).map_anon()?;
        #[cfg(target_os = "linux")]
        let _ = memory.advise(memmap2::Advice::HugePage); // without them it is slower, not wrong
        Ok(Pages { memory, bytes })
    }
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

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Arena {
    /// Keeps the pages; touched through `base` only.
    _memory: UnsafeCell<Pages>,
    base: *mut f32,
    length: usize,
}

// SAFETY: nothing is shared but the memory `base` points to; whoever calls `read` and `write`
// answers for it.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

impl Arena {
    /// Zeroed memory for so many floats.
    ///
    /// # Errors
    /// The system does not have that much.
    pub(crate) fn new(length: usize) -> io::Result<Arena> {
        let mut memory = Pages::new(length)?;
        let base = memory.as_mut_ptr();
        Ok(Arena { _memory: UnsafeCell::new(memory), base, length })
    }

    fn check(&self, view: View, size: usize) {
        assert_eq!(view.dtype.size(), size, "elements are read by their size");
        let elements = self.length * (size_of::<f32>() / size);
        let end = view.at.checked_add(view.len());
        assert!(end.is_some_and(|end| end <= elements), "{view:?} of {} floats", self.length);
    }

    /// Copies floats to a view, for whoever has the arena to itself.
    pub(crate) fn fill(&mut self, view: View, values: &[f32]) {
        self.values_mut(view).copy_from_slice(values);
    }

    /// The floats of a view, to write, for whoever has the arena to itself.
    pub(crate) fn values_mut(&mut self, view: View) -> &mut [f32] {
        // SAFETY: `&mut self` says that nobody else has it.
        unsafe { self.write(view) }
    }

    /// The floats of a view, for whoever has the arena to itself.
    pub(crate) fn values(&mut self, view: View) -> &[f32] {
        // SAFETY: as in `values_mut`.
        unsafe { self.read(view) }
    }

    /// The floats of a view.
    ///
    /// # Safety
    /// Nobody writes them while the slice lives.
    pub(crate) unsafe fn read(&self, view: View) -> &[f32] {
        self.check(view, size_of::<f32>());
        // SAFETY: inside, by the check; aligned, for a page is; initialised, for pages are zeroed;
        // not written meanwhile, by the caller.
        unsafe { std::slice::from_raw_parts(self.base.add(view.at), view.len()) }
    }

    /// The floats of a view, to write.
    ///
    /// # Safety
    /// Nobody else reads or writes them while the slice lives.
    #[allow(clippy::mut_from_ref, reason = "the ring gives each range to one operation at a time")]
    pub(crate) unsafe fn write(&self, view: View) -> &mut [f32] {
        self.check(view, size_of::<f32>());
        // SAFETY: as in `read`, and nobody else has it, by the caller.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(view.at), view.len()) }
    }

    /// The elements of a view of 16 bits, as bits.
    ///
    /// # Safety
    /// As for [`read`](Arena::read).
    pub(crate) unsafe fn read_halves(&self, view: View) -> &[u16] {
        self.check(view, size_of::<u16>());
        // SAFETY: as in `read`.
        unsafe { std::slice::from_raw_parts(self.base.cast::<u16>().add(view.at), view.len()) }
    }

    /// The elements of a view of 16 bits, as bits, to write.
    ///
    /// # Safety
    /// As for [`write`](Arena::write).
    #[allow(clippy::mut_from_ref, reason = "as for `write`")]
    pub(crate) unsafe fn write_halves(&self, view: View) -> &mut [u16] {
        self.check(view, size_of::<u16>());
        // SAFETY: as in `write`.
        unsafe { std::slice::from_raw_parts_mut(self.base.cast::<u16>().add(view.at), view.len()) }
    }
}
