//! Some columns of a tensor.

use super::driver::Argument;
use super::kernels::On;
use super::launches::int;
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
        let [r, width, columns, first] = [rows, all, some, first].map(int);
        let arguments: [&dyn Argument; 7] =
            [&self.at(y), &self.at(x), &r, &width, &columns, &first, &scale];
        self.queue.columns(kernel, [rows, 1], some, &arguments);
    }
}
