//! Some columns of a tensor.

use super::kernels::{On, arguments};
use super::launches::Words;
use crate::kernels::{
    AddColumns, ColumnGroups, CopyColumns, GroupedColumns, RegroupColumns, TakeColumns,
};
use crate::tensor::{Dtype, View};

/// The text's `ColumnGroups`.
fn words_of(groups: &ColumnGroups) -> Words<{ 1 + 4 * ColumnGroups::KINDS }> {
    let sizes = groups.kinds.iter().flat_map(|kind| {
        let GroupedColumns { columns, first, stride, by_kind } = *kind;
        [columns, first, stride, by_kind]
    });
    let mut words = [0; 1 + 4 * ColumnGroups::KINDS];
    for (to, size) in words.iter_mut().zip([groups.count].into_iter().chain(sizes)) {
        *to = u32::try_from(size).expect("sizes are checked");
    }
    Words { name: "ColumnGroups", words }
}

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

    pub(super) fn regroup_columns(&self, op: &RegroupColumns) {
        let RegroupColumns { y, x, ref groups, back } = *op;
        let [rows, width] = y.shape();
        let arguments = arguments!(self; y, x, rows, width, back, words_of(groups));
        self.queue.columns("regroup_columns", [rows, 1], width, arguments);
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
