//! Activation functions, alone and as gates.

use super::driver::Argument;
use super::kernels::On;
use super::launches::{NEIGHBOURS, activation_number, int, long};
use crate::kernels::{Activate, ActivateBackward, Gate, GateBackward};

impl On<'_> {
    pub(super) fn activate(&self, &Activate { y, x, activation }: &Activate) {
        let (count, number) = (long(x.len()), activation_number(activation));
        let arguments: [&dyn Argument; 4] = [&self.at(y), &self.at(x), &count, &number];
        self.queue.each("activate", x.len(), NEIGHBOURS, &arguments);
    }

    pub(super) fn activate_backward(&self, op: &ActivateBackward) {
        let ActivateBackward { dx, x, activation } = *op;
        let (count, number) = (long(x.len()), activation_number(activation));
        let arguments: [&dyn Argument; 4] = [&self.at(dx), &self.at(x), &count, &number];
        self.queue.each("activate_backward", x.len(), NEIGHBOURS, &arguments);
    }

    pub(super) fn gate(&self, &Gate { y, x, activation }: &Gate) {
        let (rows, channels, number) = (y.rows, y.columns, activation_number(activation));
        let arguments: [&dyn Argument; 5] =
            [&self.at(y), &self.at(x), &int(rows), &int(channels), &number];
        self.queue.columns("gate", [rows, 1], channels, &arguments);
    }

    pub(super) fn gate_backward(&self, op: &GateBackward) {
        let GateBackward { dx, dy, x, activation } = *op;
        let (rows, channels, number) = (dy.rows, dy.columns, activation_number(activation));
        let (dx, dy, x) = (self.at(dx), self.at(dy), self.at(x));
        let arguments: [&dyn Argument; 6] = [&dx, &dy, &x, &int(rows), &int(channels), &number];
        self.queue.columns("gate_backward", [rows, 1], channels, &arguments);
    }
}
