//! Workspace: a stack of views that a layer takes while it runs.

use std::cell::Cell;

use super::view::{Dtype, View};

/// A stack of views in a device's workspace, all given back at once. Its height is its only state,
/// so running a layer on kernels without memory measures the workspace that the layer needs.
#[derive(Debug)]
pub struct Scratch<'a> {
    dtype: Dtype,
    /// This and the following counts are in floats.
    at: usize,
    capacity: usize,
    used: Cell<usize>,
    peak: Cell<usize>,
    outer: Option<&'a Scratch<'a>>,
}

impl Scratch<'_> {
    /// A stack on all of a workspace, which is a vector of floats. [`take`](Scratch::take) returns
    /// elements of `dtype`.
    pub fn new(workspace: View, dtype: Dtype) -> Scratch<'static> {
        assert_eq!(workspace.dtype, Dtype::F32, "a workspace holds floats");
        let used = Cell::new(0);
        let peak = Cell::new(0);
        Scratch { dtype, at: workspace.at, capacity: workspace.len(), used, peak, outer: None }
    }

    /// The rest of the workspace, for a callee that gives its views back before the caller takes
    /// more.
    pub fn nested(&self) -> Scratch<'_> {
        let at = self.at + self.used.get();
        let capacity = self.capacity - self.used.get();
        let used = Cell::new(0);
        let peak = Cell::new(0);
        Scratch { dtype: self.dtype, at, capacity, used, peak, outer: Some(self) }
    }

    /// The next (`rows`, `columns`) elements of the device's [`Dtype`], aligned.
    ///
    /// # Panics
    /// The workspace is too small: the plan was made for less.
    pub fn take(&self, rows: usize, columns: usize) -> View {
        let floats = self.dtype.floats(rows * columns);
        self.take_vector(floats).hold(rows, columns, self.dtype)
    }

    /// The next (`rows`, `columns`) floats, aligned.
    ///
    /// # Panics
    /// As [`take`](Scratch::take).
    pub fn take_floats(&self, rows: usize, columns: usize) -> View {
        View { rows, columns, ..self.take_vector(rows * columns) }
    }

    /// Elements of the device's [`Dtype`] in the shape of another view.
    ///
    /// # Panics
    /// As [`take`](Scratch::take).
    pub fn take_like(&self, view: View) -> View {
        self.take(view.rows, view.columns)
    }

    fn take_vector(&self, floats: usize) -> View {
        let from = self.used.get();
        let to = from + floats.next_multiple_of(16);
        assert!(to <= self.capacity, "workspace of {} floats, {to} are needed", self.capacity);
        self.used.set(to);
        self.rise(to);
        View::floats(self.at + from, floats)
    }

    fn rise(&self, height: usize) {
        self.peak.set(self.peak.get().max(height));
        if let Some(outer) = self.outer {
            outer.rise(outer.used.get() + height);
        }
    }

    /// The dtype of the device's elements.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The most floats that were taken at once.
    pub fn peak(&self) -> usize {
        self.peak.get()
    }
}
