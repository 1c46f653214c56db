//! Kernels that a program brings along: calls their function for the CPU.

use super::views::CpuKernels;
use crate::kernels::{Custom, Runs};

impl Runs<Custom<'_>> for CpuKernels<'_> {
    fn run(&self, op: &Custom<'_>) {
        let Some(call) = self.call(op) else { return };
        let mut outputs: Vec<_> = op.writes.iter().map(|view| call.write(*view)).collect();
        let inputs: Vec<_> = op.reads.iter().map(|view| call.read(*view)).collect();
        (op.kernel.cpu)(&mut outputs, &inputs, op.numbers);
    }
}
