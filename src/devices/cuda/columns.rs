//! Some columns of a tensor.

use super::kernels::{On, arguments};
use crate::kernels::{AddColumns, CopyColumns, TakeColumns};
use crate::tensor::{Dtype, View};

impl On<'_> {
    pub(super) fn add_columns(&self, &AddColumns { y, x, first, scale }: &AddColumns) {
        let kernel = match y.dtype {
            Dtype::F32 => "add_columns_of_floats",
            _ => "add_columns",
        };
        self.some_columns(kernel, [y, x], [y.columns, x.columns], first, scale);
    }

    pub(super) fn copy_columns(&self, &CopyColumns { y, x, to, from, columns }: &CopyColumns) {
        let kernel = match y.dtype {
            Dtype::F32 => "copy_columns_of_floats",
            _ => "copy_columns",
        };
        let arguments = arguments!(self; y, x, x.rows, y.columns, x.columns, to, from, columns);
        self.queue.columns(kernel, [x.rows, 1], columns, arguments);
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
