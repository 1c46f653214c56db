//! Products, and sums over rows.

use super::driver::{Argument, Matrix, Product};
use super::kernels::On;
use super::launches::{PART, int, parts_of};
use crate::kernels::Linear;
use crate::tensor::View;

/// Rows of a tensor, so many elements apart; a product may read them turned.
#[derive(Clone, Copy)]
pub(super) struct Table {
    view: View,
    stride: usize,
    transposed: bool,
}

impl Table {
    pub(super) fn of(view: View, stride: usize) -> Table {
        Table { view, stride, transposed: false }
    }

    pub(super) fn transposed(self) -> Table {
        Table { transposed: !self.transposed, ..self }
    }
}

impl On<'_> {
    fn matrix(&self, table: Table) -> Matrix {
        Matrix { at: self.at(table.view), stride: table.stride, transposed: table.transposed }
    }

    /// c (+)= a b + bias. The sizes are rows, inner and columns.
    pub(super) fn product(
        &self,
        c: Table,
        [a, b]: [Table; 2],
        [rows, inner, columns]: [usize; 3],
        bias: Option<View>,
        accumulate: bool,
    ) {
        let [a, b] = [a, b].map(|table| self.matrix(table));
        let (stride, c, bias) = (c.stride, self.at(c.view), bias.map(|bias| self.at(bias)));
        self.queue.product(&Product { rows, inner, columns, a, b, c, stride, bias, accumulate });
    }

    /// y = x w + b.
    pub(super) fn linear(&self, y: View, x: View, w: View, b: Option<View>, size: Linear) {
        let Linear { rows, inputs, outputs, .. } = size;
        let (y, x) = (Table::of(y, outputs), Table::of(x, inputs));
        self.product(y, [x, weights(w, size)], [rows, inputs, outputs], b, false);
    }

    /// dx = dy wᵀ, dw (+)= xᵀ dy.
    pub(super) fn linear_backward(
        &self,
        [dx, dw]: [View; 2],
        [dy, x, w]: [View; 3],
        size: Linear,
        accumulate: bool,
    ) {
        let Linear { rows, inputs, outputs, transposed } = size;
        let [dx, x] = [dx, x].map(|view| Table::of(view, inputs));
        let dy = Table::of(dy, outputs);
        let w = weights(w, size).transposed();
        self.product(dx, [dy, w], [rows, outputs, inputs], None, false);
        let ((a, m), (b, n)) =
            if transposed { ((dy, outputs), (x, inputs)) } else { ((x, inputs), (dy, outputs)) };
        self.product(Table::of(dw, n), [a.transposed(), b], [m, rows, n], None, accumulate);
    }

    /// out (+)= the sum over rows of x, over some rows at a time, then in order.
    pub(super) fn sum_columns(
        &self,
        out: View,
        x: Table,
        [rows, columns]: [usize; 2],
        parts: View,
        accumulate: bool,
    ) {
        let (count, to) = (parts_of(rows), self.at(parts));
        let (x, [r, c, stride, part]) = (self.at(x.view), [rows, columns, x.stride, PART].map(int));
        let arguments: [&dyn Argument; 6] = [&to, &x, &r, &c, &stride, &part];
        self.queue.columns("column_parts", [count, 1], columns, &arguments);
        self.queue.fold(self.at(out), to, [count, columns, columns], accumulate);
    }
}

/// w as the product of a layer reads it.
fn weights(w: View, size: Linear) -> Table {
    if size.transposed {
        Table::of(w, size.inputs).transposed()
    } else {
        Table::of(w, size.outputs)
    }
}
