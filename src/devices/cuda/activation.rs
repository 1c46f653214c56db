//! Activation functions, alone and as gates.

use super::driver::Argument;
use super::kernels::On;
use super::launches::{activation_number, int, long, wide};
use crate::kernels::{Activate, ActivateBackward, Gate, GateBackward};

impl On<'_> {
    pub(super) fn activate(&self, &Activate { y, x, activation }: &Activate) {
        let (count, number) = (long(x.len()), activation_number(activation));
        let arguments: [&dyn Argument; 4] = [&self.at(y), &self.at(x), &count, &number];
        self.queue.each("activate", x.len(), wide(x.dtype), &arguments);
    }

    pub(super) fn activate_backward(&self, op: &ActivateBackward) {
        let ActivateBackward { dx, x, activation } = *op;
        let (count, number) = (long(x.len()), activation_number(activation));
        let arguments: [&dyn Argument; 4] = [&self.at(dx), &self.at(x), &count, &number];
        self.queue.each("activate_backward", x.len(), wide(x.dtype), &arguments);
    }

    pub(super) fn gate(&self, &Gate { y, x, activation }: &Gate) {
        let (rows, channels, number) = (y.rows, y.columns, activation_number(activation));
        let arguments: [&dyn Argument; 5] =
            [&self.at(y), &self.at(x), &int(rows), &int(channels), &number];
        self.queue.wide_columns("gate", [rows, 1], channels, wide(y.dtype), &arguments);
    }

    pub(super) fn gate_backward(&self, op: &GateBackward) {
        let GateBackward { dx, dy, x, activation } = *op;
        let (rows, channels, number) = (dy.rows, dy.columns, activation_number(activation));
        let wide = wide(dy.dtype);
        let (dx, dy, x) = (self.at(dx), self.at(dy), self.at(x));
        let arguments: [&dyn Argument; 6] = [&dx, &dy, &x, &int(rows), &int(channels), &number];
        self.queue.wide_columns("gate_backward", [rows, 1], channels, wide, &arguments);
    }
}
