//! A slice of which several threads write different pieces: rows of a tile, columns of a head.

use std::marker::PhantomData;

/// A slice that is written in pieces.
#[derive(Clone, Copy)]
pub(crate) struct Scattered<'a> {
    base: *mut f32,
    len: usize,
    _slice: PhantomData<&'a mut [f32]>,
}

// SAFETY: it gives access only by `piece`, whose caller promises that pieces are disjoint.
unsafe impl Send for Scattered<'_> {}
// SAFETY: as above.
unsafe impl Sync for Scattered<'_> {}

impl<'a> Scattered<'a> {
    /// Makes the pieces of a slice.
    pub(crate) fn new(slice: &'a mut [f32]) -> Scattered<'a> {
        Scattered { base: slice.as_mut_ptr(), len: slice.len(), _slice: PhantomData }
    }

    /// The address of its first element, for pieces that are no slices.
    pub(crate) fn base(self) -> *mut f32 {
        self.base
    }

    /// A piece of the slice.
    ///
    /// # Safety
    /// Pieces that live at the same time do not overlap.
    #[allow(clippy::mut_from_ref, reason = "pieces are disjoint, by the caller")]
    pub(crate) unsafe fn piece(&self, at: usize, len: usize) -> &'a mut [f32] {
        assert!(at + len <= self.len, "{at} + {len} of {}", self.len);
        // SAFETY: inside, by the assertion; alone, by the caller.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(at), len) }
    }
}
