//! Some columns of a tensor.

use super::kernels::{On, arguments};
use crate::kernels::{AddColumns, TakeColumns};
use crate::tensor::View;

impl On<'_> {
    pub(super) fn add_columns(&self, &AddColumns { y, x, first, scale }: &AddColumns) {
        self.some_columns("add_columns", [y, x], [y.columns, x.columns], first, scale);
    }

    pub(super) fn take_columns(&self, &TakeColumns { y, x, first, scale }: &TakeColumns) {
        self.some_columns("take_columns", [y, x], [x.columns, y.columns], first, scale);
    }

    fn some_columns(
        &self,
        kernel: &'static str,
        [y, x]: [View; 2],
        [all, some]: [usize; 2],
        first: usize,
        scale: f32,
    ) {
        let rows = y.rows;
        let arguments = arguments!(self; y, x, rows, all, some, first, scale);
        self.queue.columns(kernel, [rows, 1], some, arguments);
    }
}
