//! Kernels that are not built in: their function for a CPU.

use super::views::CpuKernels;
use crate::kernels::Custom;

pub(super) fn custom(on: &CpuKernels<'_>, op: &Custom<'_>) {
    let function = |writes: &mut [&mut [f32]], reads: &[&[f32]]| {
        (op.kernel.cpu)(writes, reads, op.numbers);
    };
    on.with_slices(op.writes, op.reads, function);
}
