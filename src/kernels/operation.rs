//! How an operation declares the views that it reads and writes, each with the shape and dtype
//! that the other fields ask for.
//!
//! Three things follow from this one declaration: the check of arguments, the slices that the CPU
//! device makes for a call, and [`Inspected`]. So a view that was swapped with another one, or was
//! cut from the wrong place, is found where it is used and not in the numbers.

use super::Kernels;
use crate::tensor::{Dtype, View};

/// The name of an operation: the method of [`Kernels`] that computes it. The table of operations
/// gives each its name.
pub trait Named {
    /// Its name.
    fn name(&self) -> &'static str;
}

/// An operation on views of a device's memory.
pub trait KernelOperation: Named {
    /// Declares the views that it writes, then the views that it reads.
    fn views(&self, views: &mut Views<'_>);

    /// Panics unless the shapes and dtypes of its views agree.
    #[track_caller]
    fn check(&self) {
        self.views(&mut Views { operation: self.name(), then: Then::Check });
    }
}

/// The use of a view by an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// It reads its elements.
    Read,
    /// It writes a number to each of its elements.
    Write,
    /// It writes elements that are no numbers (labels, bits), or leaves some as they were.
    WriteOpaque,
}

/// Receives the views of one operation.
pub struct Views<'v> {
    operation: &'static str,
    then: Then<'v>,
}

/// The use of a declaration of views.
enum Then<'v> {
    Check,
    Call(&'v mut dyn FnMut(Access, View)),
}

/// Calls `each` with every view of an operation, in the order of its declaration.
pub(crate) fn each_view(op: &dyn KernelOperation, each: &mut dyn FnMut(Access, View)) {
    op.views(&mut Views { operation: op.name(), then: Then::Call(each) });
}

impl Views<'_> {
    /// A view that is read.
    #[track_caller]
    pub fn reads(
        &mut self,
        field: &str,
        view: impl Into<Option<View>>,
        shape: [usize; 2],
        dtype: Dtype,
    ) {
        self.declare(Access::Read, field, view.into(), shape, dtype);
    }

    /// A view that is written: each of its elements gets a number. It may be read, too.
    #[track_caller]
    pub fn writes(
        &mut self,
        field: &str,
        view: impl Into<Option<View>>,
        shape: [usize; 2],
        dtype: Dtype,
    ) {
        self.declare(Access::Write, field, view.into(), shape, dtype);
    }

    /// A view that is written with labels or bits, or only in part. `Inspected` leaves it out.
    #[track_caller]
    pub fn writes_opaque(&mut self, field: &str, view: View, shape: [usize; 2], dtype: Dtype) {
        self.declare(Access::WriteOpaque, field, Some(view), shape, dtype);
    }

    /// A rule that is not about a single view.
    #[track_caller]
    pub fn rule(&self, holds: bool, rule: &str) {
        assert!(holds, "{}: {rule}", self.operation);
    }

    #[track_caller]
    fn declare(
        &mut self,
        access: Access,
        field: &str,
        view: Option<View>,
        shape: [usize; 2],
        dtype: Dtype,
    ) {
        let Some(view) = view else { return };
        match &mut self.then {
            Then::Check => assert!(
                view.shape() == shape && view.dtype == dtype,
                "{}: {field} is {view}, but the other fields ask for ({}, {}) of {dtype}",
                self.operation,
                shape[0],
                shape[1],
            ),
            Then::Call(each) => each(access, view),
        }
    }
}

/// Kernels that call `on_write` after each operation, with the operation's name and each view of
/// numbers that it wrote.
pub(crate) struct Inspected<'k> {
    pub(crate) kernels: &'k dyn Kernels,
    pub(crate) on_write: &'k dyn Fn(&'static str, View),
}

impl Inspected<'_> {
    pub(super) fn inspect(&self, op: &dyn KernelOperation) {
        each_view(op, &mut |access, view| {
            if access == Access::Write {
                (self.on_write)(op.name(), view);
            }
        });
    }
}
