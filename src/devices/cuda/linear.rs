//! Products, and sums over rows.

use super::driver::{Argument, Matrix, Product};
use super::kernels::On;
use super::launches::{PART, int, parts_of};
use crate::models::{Linear, View};

impl On<'_> {
    fn matrix(&self, view: View, stride: usize, turned: bool) -> Matrix {
        Matrix { at: self.at(view), stride, turned }
    }

    /// c (+)= a b + bias, of matrices that lie close: `turned` ones with columns for rows. The sizes are
    /// rows, inner and columns.
    pub(super) fn product(
        &self,
        c: View,
        [(a, a_turned), (b, b_turned)]: [(View, bool); 2],
        [rows, inner, columns]: [usize; 3],
        bias: Option<View>,
        accumulate: bool,
    ) {
        let a = self.matrix(a, if a_turned { rows } else { inner }, a_turned);
        let b = self.matrix(b, if b_turned { inner } else { columns }, b_turned);
        let (c, bias) = (self.at(c), bias.map(|bias| self.at(bias)));
        self.queue.product(&Product { rows, inner, columns, a, b, c, bias, accumulate });
    }

    /// y = x w + b.
    pub(super) fn linear(&self, y: View, x: View, w: View, b: Option<View>, size: Linear) {
        let Linear { rows, inputs, outputs, turned } = size;
        self.product(y, [(x, false), (w, turned)], [rows, inputs, outputs], b, false);
    }

    /// dx = dy wᵀ, dw (+)= xᵀ dy.
    pub(super) fn linear_backward(
        &self,
        [dx, dw]: [View; 2],
        [dy, x, w]: [View; 3],
        size: Linear,
        accumulate: bool,
    ) {
        let Linear { rows, inputs, outputs, turned } = size;
        self.product(dx, [(dy, false), (w, !turned)], [rows, outputs, inputs], None, false);
        let ((a, m), (b, n)) =
            if turned { ((dy, outputs), (x, inputs)) } else { ((x, inputs), (dy, outputs)) };
        self.product(dw, [(a, true), (b, false)], [m, rows, n], None, accumulate);
    }

    /// out (+)= the sum over rows of x, over some rows at a time, then in order.
    pub(super) fn sum_columns(
        &self,
        out: View,
        x: View,
        [rows, columns]: [usize; 2],
        parts: View,
        accumulate: bool,
    ) {
        let (count, to) = (parts_of(rows), self.at(parts));
        let arguments: [&dyn Argument; 5] =
            [&to, &self.at(x), &int(rows), &int(columns), &int(PART)];
        self.queue.columns("column_parts", [count, 1], columns, &arguments);
        self.queue.fold(self.at(out), to, [count, columns, columns], accumulate);
    }
}
