//! Activation functions: alone, with the gradient of a bias before them, and as gates.

use super::driver::Argument;
use super::kernels::On;
use super::launches::{PART, activation_number, int, long, parts_of, wide};
use crate::kernels::{Activate, ActivateBackward, Gate, GateBackward, LinearBackward};
use crate::tensor::View;

impl On<'_> {
    pub(super) fn activate(&self, &Activate { y, x, activation }: &Activate) {
        let arguments: [&dyn Argument; 4] =
            [&self.at(y), &self.at(x), &long(x.len()), &activation_number(activation)];
        self.queue.each("activate", x.len(), wide(x.dtype), &arguments);
    }

    pub(super) fn activate_backward(&self, op: &ActivateBackward) {
        let ActivateBackward { dx, x, activation } = *op;
        let arguments: [&dyn Argument; 4] =
            [&self.at(dx), &self.at(x), &long(x.len()), &activation_number(activation)];
        self.queue.each("activate_backward", x.len(), wide(x.dtype), &arguments);
    }

    /// If there is a bias, one kernel computes the function's backward and sums the bias' gradient.
    pub(super) fn activate_linear_backward(
        &self,
        activate: &ActivateBackward,
        linear: &LinearBackward,
        parts: View,
    ) {
        match linear.dbias {
            Some(dbias) => self.activate_bias_backward(activate, dbias, parts, linear.accumulate),
            None => self.activate_backward(activate),
        }
        self.linear_backward(&LinearBackward { dbias: None, ..*linear }, parts);
    }

    fn activate_bias_backward(
        &self,
        &ActivateBackward { dx, x, activation }: &ActivateBackward,
        dbias: View,
        parts: View,
        accumulate: bool,
    ) {
        let rows = dx.rows;
        let columns = dx.columns;
        let [r, c, part] = [rows, columns, PART].map(int);
        let count = parts_of(rows);
        let to = self.at(parts);
        let arguments: [&dyn Argument; 7] =
            [&self.at(dx), &to, &self.at(x), &r, &c, &part, &activation_number(activation)];
        let wide = wide(dx.dtype);
        self.queue.wide_columns("activate_backward_parts", [count, 1], columns, wide, &arguments);
        self.queue.fold(self.at(dbias), to, [count, columns, columns], accumulate);
    }

    pub(super) fn gate(&self, &Gate { y, x, activation }: &Gate) {
        let rows = y.rows;
        let channels = y.columns;
        let arguments: [&dyn Argument; 5] =
            [&self.at(y), &self.at(x), &int(rows), &int(channels), &activation_number(activation)];
        self.queue.wide_columns("gate", [rows, 1], channels, wide(y.dtype), &arguments);
    }

    pub(super) fn gate_backward(&self, op: &GateBackward) {
        let GateBackward { dx, dy, x, activation } = *op;
        let rows = dy.rows;
        let channels = dy.columns;
        let wide = wide(dy.dtype);
        let dy = self.at(dy);
        let x = self.at(x);
        let arguments: [&dyn Argument; 6] =
            [&self.at(dx), &dy, &x, &int(rows), &int(channels), &activation_number(activation)];
        self.queue.wide_columns("gate_backward", [rows, 1], channels, wide, &arguments);
    }
}
