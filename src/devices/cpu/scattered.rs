//! A slice whose pieces several threads write, each its own: rows of a tile, columns of a head.

use std::marker::PhantomData;

/// See the [module](self).
#[derive(Clone, Copy)]
pub(super) struct Scattered<'a> {
    base: *mut f32,
    len: usize,
    _slice: PhantomData<&'a mut [f32]>,
}

// SAFETY: it gives out nothing but by `piece`, whose caller answers for it.
unsafe impl Send for Scattered<'_> {}
// SAFETY: as above.
unsafe impl Sync for Scattered<'_> {}

impl<'a> Scattered<'a> {
    /// Of all of a slice.
    pub(super) fn new(slice: &'a mut [f32]) -> Scattered<'a> {
        Scattered { base: slice.as_mut_ptr(), len: slice.len(), _slice: PhantomData }
    }

    /// Its first element, for pieces that are no slices.
    pub(super) fn base(self) -> *mut f32 {
        self.base
    }

    /// A piece of it.
    ///
    /// # Safety
    /// No other piece that lives at the same time overlaps it.
    #[allow(clippy::mut_from_ref, reason = "pieces are disjoint, by the caller")]
    pub(super) unsafe fn piece(&self, at: usize, len: usize) -> &'a mut [f32] {
        assert!(at + len <= self.len, "{at} + {len} of {}", self.len);
        // SAFETY: inside, by the assertion; alone, by the caller.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(at), len) }
    }
}
