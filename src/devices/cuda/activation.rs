//! Activation functions: alone, with the gradient of a bias before them, and as gates.

use super::kernels::{On, arguments};
use super::launches::{PART, activation_number, long, parts_of, wide};
use crate::kernels::{
    Activate, ActivateBackward, ClampedGate, Gate, GateBackward, GateForm, LinearBackward,
};
use crate::tensor::View;

/// Pairs of gate and up of one thread: their four numbers are read at once.
const PAIRS: usize = 2;

impl On<'_> {
    pub(super) fn activate(&self, &Activate { y, x, activation }: &Activate) {
        let arguments = arguments!(self; y, x, long(x.len()), activation_number(activation));
        self.queue.each("activate", x.len(), wide(x.dtype), arguments);
    }

    pub(super) fn activate_backward(&self, op: &ActivateBackward) {
        let ActivateBackward { dx, x, activation } = *op;
        let arguments = arguments!(self; dx, x, long(x.len()), activation_number(activation));
        self.queue.each("activate_backward", x.len(), wide(x.dtype), arguments);
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
        let [rows, columns] = dx.shape();
        let count = parts_of(rows);
        let form = activation_number(activation);
        let arguments = arguments!(self; dx, parts, x, rows, columns, PART, form);
        let wide = wide(dx.dtype);
        self.queue.wide_columns("activate_backward_parts", [count, 1], columns, wide, arguments);
        let sizes = [count, columns, columns];
        self.queue.fold(self.at(dbias), self.at(parts), sizes, accumulate);
    }

    pub(super) fn gate(&self, &Gate { y, x, form }: &Gate) {
        let [rows, channels] = y.shape();
        match form {
            GateForm::Plain(activation) => {
                let form = activation_number(activation);
                let arguments = arguments!(self; y, x, rows, channels, form);
                self.queue.wide_columns("gate", [rows, 1], channels, wide(y.dtype), arguments);
            }
            GateForm::Clamped(ClampedGate { alpha, limit }) => {
                let arguments = arguments!(self; y, x, long(y.len()), alpha, limit);
                self.queue.each("clamped_gate", y.len(), PAIRS, arguments);
            }
        }
    }

    pub(super) fn gate_backward(&self, op: &GateBackward) {
        let GateBackward { dx, dy, x, form } = *op;
        let [rows, channels] = dy.shape();
        match form {
            GateForm::Plain(activation) => {
                let form = activation_number(activation);
                let arguments = arguments!(self; dx, dy, x, rows, channels, form);
                let wide = wide(dy.dtype);
                self.queue.wide_columns("gate_backward", [rows, 1], channels, wide, arguments);
            }
            GateForm::Clamped(ClampedGate { alpha, limit }) => {
                let arguments = arguments!(self; dx, dy, x, long(dy.len()), alpha, limit);
                self.queue.each("clamped_gate_backward", dy.len(), PAIRS, arguments);
            }
        }
    }
}
