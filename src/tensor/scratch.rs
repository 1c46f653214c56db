//! Workspace: a stack of views that a layer takes while it runs.

use std::cell::Cell;

use super::view::{Dtype, View};

/// A stack of views in a device's workspace, let go of all at once. Its height is its only state,
/// so the same walk on a device that does nothing tells how much a layer needs.
#[derive(Debug)]
pub struct Scratch<'a> {
    dtype: Dtype,
    /// All of these count floats.
    at: usize,
    capacity: usize,
    used: Cell<usize>,
    peak: Cell<usize>,
    outer: Option<&'a Scratch<'a>>,
}

impl Scratch<'_> {
    /// All of a workspace, which is of floats, to take numbers from that are of a kind.
    pub fn new(workspace: View, dtype: Dtype) -> Scratch<'static> {
        assert_eq!(workspace.dtype, Dtype::F32, "a workspace is of floats");
        let (used, peak) = (Cell::new(0), Cell::new(0));
        Scratch { dtype, at: workspace.at, capacity: workspace.len(), used, peak, outer: None }
    }

    /// What is left of it, for somebody who gives it back before anybody takes more.
    pub fn nested(&self) -> Scratch<'_> {
        let (at, capacity) = (self.at + self.used.get(), self.capacity - self.used.get());
        let (used, peak) = (Cell::new(0), Cell::new(0));
        Scratch { dtype: self.dtype, at, capacity, used, peak, outer: Some(self) }
    }

    /// The next `len` elements of the device's [`Dtype`], aligned.
    ///
    /// # Panics
    /// The plan was made for less.
    pub fn take(&self, len: usize) -> View {
        self.take_floats(self.dtype.floats(len)).hold(len, self.dtype)
    }

    /// The next `len` floats, aligned.
    ///
    /// # Panics
    /// As [`take`](Scratch::take).
    pub fn take_floats(&self, len: usize) -> View {
        let from = self.used.get();
        let to = from + len.next_multiple_of(16);
        assert!(to <= self.capacity, "workspace of {} asked for {to}", self.capacity);
        self.used.set(to);
        self.rise(to);
        View::floats(self.at + from, len)
    }

    fn rise(&self, height: usize) {
        self.peak.set(self.peak.get().max(height));
        if let Some(outer) = self.outer {
            outer.rise(outer.used.get() + height);
        }
    }

    /// What the device's numbers are.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The most floats that were taken at once.
    pub fn peak(&self) -> usize {
        self.peak.get()
    }
}
