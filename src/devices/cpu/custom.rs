//! Kernels that a program brings along: calls their function for the CPU.

use super::views::{Call, Compute};
use crate::kernels::Custom;
use crate::simd::Level;

impl Compute for Custom<'_> {
    fn compute(&self, _: Level, call: &Call<'_>) {
        let mut outputs: Vec<_> = self.writes.iter().map(|view| call.write(*view)).collect();
        let inputs: Vec<_> = self.reads.iter().map(|view| call.read(*view)).collect();
        (self.kernel.cpu)(&mut outputs, &inputs, self.numbers);
    }
}
