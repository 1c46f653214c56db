//! Copies, and zeros. During an operation all elements are floats, so a cast is a copy.

use super::views::CpuKernels;
use crate::kernels::{Cast, Clear};

pub(super) fn cast(on: &CpuKernels<'_>, &Cast { y, x }: &Cast) {
    let Some(call) = on.call([y], &[x]) else { return };
    let [y] = call.write();
    y.copy_from_slice(call.read(x));
}

pub(super) fn clear(on: &CpuKernels<'_>, &Clear { y }: &Clear) {
    let Some(call) = on.call([y], &[]) else { return };
    let [y] = call.write();
    y.fill(0.0);
}
