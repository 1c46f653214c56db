//! What an operation declares, once: its name, and each view that it reads or writes, with the
//! shape and dtype that the other fields ask for.
//!
//! The check of arguments, the memory that the CPU resolves for a call, and [`Inspected`] follow
//! from this. So views that were swapped, or cut from the wrong place, are found where they are
//! used and not in the numbers.

use super::Kernels;
use crate::tensor::{Dtype, View};

/// The name of an operation: the method of [`Kernels`] that computes it. The table of operations
/// gives each its name.
pub trait Named {
    /// Its name.
    fn name(&self) -> &'static str;
}

/// An operation on views of a device's memory.
pub trait Operation: Named {
    /// Declares its views, those that it writes first.
    fn views(&self, views: &mut Views<'_>);

    /// Panics unless the shapes and dtypes of its views agree.
    #[track_caller]
    fn check(&self) {
        self.views(&mut Views { operation: self.name(), then: Then::Check });
    }
}

/// What an operation does with a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// It reads its elements.
    Read,
    /// It makes each of its elements a number.
    Write,
    /// It writes elements that are no numbers (labels, bits), or leaves some as they were.
    WriteOpaque,
}

/// Receives the views of one operation.
pub struct Views<'v> {
    operation: &'static str,
    then: Then<'v>,
}

/// What is done with each declared view.
enum Then<'v> {
    Check,
    Call(&'v mut dyn FnMut(Access, View)),
}

/// Calls `each` with every view of an operation, in the order of its declaration.
pub(crate) fn each_view(op: &dyn Operation, each: &mut dyn FnMut(Access, View)) {
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

    /// A view of numbers, each of which is written. It may be read, too.
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

    /// A view that is written with elements that are no numbers, or not whole: nobody may look for
    /// numbers in it after this operation.
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

/// Kernels that call a function with each view of numbers that an operation wrote, and with the
/// operation's name.
pub(crate) struct Inspected<'k> {
    pub(crate) kernels: &'k dyn Kernels,
    pub(crate) on_write: &'k dyn Fn(&'static str, View),
}

impl Inspected<'_> {
    pub(super) fn inspect(&self, op: &dyn Operation) {
        each_view(op, &mut |access, view| {
            if access == Access::Write {
                (self.on_write)(op.name(), view);
            }
        });
    }
}
