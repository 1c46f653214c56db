//! Products, and sums over rows.

use super::driver::{Matrix, Product};
use super::kernels::{On, arguments};
use super::launches::{PART, parts_of};
use crate::kernels::{Linear, LinearBackward, LinearSize};
use crate::tensor::{Scratch, View};

/// Rows of a tensor, `stride` elements apart; a product may read it transposed.
#[derive(Clone, Copy)]
pub(super) struct Table {
    view: View,
    stride: usize,
    transposed: bool,
}

impl Table {
    /// The table of a whole view.
    pub(super) fn of(view: View) -> Table {
        Table { view, stride: view.columns, transposed: false }
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
        let stride = c.stride;
        let c = self.at(c.view);
        let bias = bias.map(|bias| self.at(bias));
        self.queue.product(&Product { rows, inner, columns, a, b, c, stride, bias, accumulate });
    }

    /// y = x w + bias. The library adds no bias of 16 bits to floats, so it is added behind.
    pub(super) fn linear(&self, op: &Linear) {
        let LinearSize { rows, inputs, outputs, .. } = op.size();
        let y = Table::of(op.y);
        let x = Table::of(op.x);
        let w = weights(op.w, op.transposed);
        let joined = op.bias.filter(|bias| bias.dtype == op.y.dtype);
        self.product(y, [x, w], [rows, inputs, outputs], joined, false);
        if let Some(bias) = op.bias.filter(|_| joined.is_none()) {
            let arguments = arguments!(self; op.y, bias, rows, outputs, outputs);
            self.queue.columns("add_bias_to_floats", [rows, 1], outputs, arguments);
        }
    }

    /// dx = dy wᵀ, dw (+)= xᵀ dy, dbias (+)= Σ dy by partial sums.
    pub(super) fn linear_backward(&self, op: &LinearBackward, parts: View) {
        let LinearBackward { dx, dw, dbias, dy, x, w, transposed, accumulate } = *op;
        let LinearSize { rows, inputs, outputs, .. } = op.size();
        let [dx, x, dy] = [dx, x, dy].map(Table::of);
        let w = weights(w, transposed).transposed();
        self.product(dx, [dy, w], [rows, outputs, inputs], None, false);
        let ((a, m), (b, n)) =
            if transposed { ((dy, outputs), (x, inputs)) } else { ((x, inputs), (dy, outputs)) };
        if let Some(dw) = dw {
            self.product(Table::of(dw), [a.transposed(), b], [m, rows, n], None, accumulate);
        }
        if let Some(dbias) = dbias {
            self.sum_columns(dbias, dy, [rows, outputs], parts, accumulate);
        }
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
        let count = parts_of(rows);
        let arguments = arguments!(self; parts, x.view, rows, columns, x.stride, PART);
        self.queue.columns("column_parts", [count, 1], columns, arguments);
        self.queue.fold(self.at(out), self.at(parts), [count, columns, columns], accumulate);
    }
}

/// w as the product of a layer reads it: (C, N).
fn weights(w: View, transposed: bool) -> Table {
    if transposed { Table::of(w).transposed() } else { Table::of(w) }
}

/// Partial sums of dbias.
pub(super) fn backward_scratch(op: &LinearBackward, scratch: &Scratch<'_>) -> View {
    let rows = op.dbias.map_or(0, |_| parts_of(op.dy.rows));
    scratch.take_floats(rows, op.dy.columns)
}
