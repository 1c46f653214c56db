//! Comparing the shapes and dtypes of an operation's views.
//!
//! Every operation has a `check`, which devices call first. So views that were swapped, or cut from
//! the wrong place, are found where they are used and not in the numbers.

use crate::tensor::{Dtype, View};

/// Checks the views of one operation.
#[derive(Clone, Copy)]
pub(super) struct Check(pub(super) &'static str);

impl Check {
    /// Panics unless a view has this shape and dtype.
    #[track_caller]
    pub(super) fn view(self, field: &str, view: View, [rows, columns]: [usize; 2], dtype: Dtype) {
        let is_right = view.rows == rows && view.columns == columns && view.dtype == dtype;
        assert!(
            is_right,
            "{}: {field} is {view}, but the other fields ask for ({rows}, {columns}) of {dtype}",
            self.0
        );
    }

    /// The same of a view that may be absent.
    #[track_caller]
    pub(super) fn optional(self, field: &str, view: Option<View>, shape: [usize; 2], dtype: Dtype) {
        if let Some(view) = view {
            self.view(field, view, shape, dtype);
        }
    }

    /// Panics unless a rule holds that is not about a single view.
    #[track_caller]
    pub(super) fn rule(self, holds: bool, rule: &str) {
        assert!(holds, "{}: {rule}", self.0);
    }
}
