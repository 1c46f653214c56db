//! Gates of attention's output.

use super::kernels::{On, arguments};
use super::launches::{NEIGHBOURS, attention_words, long};
use crate::kernels::{JoinGates, SigmoidGate, SigmoidGateBackward, SplitGates};

impl On<'_> {
    pub(super) fn split_gates(&self, &SplitGates { qkv, gates, x, ref shape }: &SplitGates<'_>) {
        let [rows, width] = x.shape();
        let arguments = arguments!(self; qkv, gates, x, width, attention_words(shape));
        self.queue.columns("split_gates", [rows, 1], width, arguments);
    }

    pub(super) fn join_gates(&self, &JoinGates { y, qkv, gates, ref shape }: &JoinGates<'_>) {
        let [rows, width] = y.shape();
        let arguments = arguments!(self; y, qkv, gates, width, attention_words(shape));
        self.queue.columns("join_gates", [rows, 1], width, arguments);
    }

    pub(super) fn sigmoid_gate(&self, &SigmoidGate { y, x, gates }: &SigmoidGate) {
        let count = x.len();
        let arguments = arguments!(self; y, x, gates, long(count));
        self.queue.each("sigmoid_gate", count, NEIGHBOURS, arguments);
    }

    pub(super) fn sigmoid_gate_backward(&self, op: &SigmoidGateBackward) {
        let SigmoidGateBackward { dx, dgates, dy, x, gates } = *op;
        let count = x.len();
        let arguments = arguments!(self; dx, dgates, dy, x, gates, long(count));
        self.queue.each("sigmoid_gate_backward", count, NEIGHBOURS, arguments);
    }
}
