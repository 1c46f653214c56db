//! Copies, and zeros. During an operation all elements are floats, so a cast is a copy.

use super::views::CpuKernels;
use crate::kernels::{Cast, Clear, Runs};

impl Runs<Cast> for CpuKernels<'_> {
    fn run(&self, op: &Cast) {
        let Cast { y, x } = *op;
        let Some(call) = self.call(op) else { return };
        call.write(y).copy_from_slice(call.read(x));
    }
}

impl Runs<Clear> for CpuKernels<'_> {
    fn run(&self, op: &Clear) {
        let Some(call) = self.call(op) else { return };
        call.write(op.y).fill(0.0);
    }
}
