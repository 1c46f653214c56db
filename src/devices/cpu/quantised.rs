//! Frozen weights that are stored in fewer bits.

use super::views::CpuKernels;
use crate::kernels::Dequantise;

pub(super) fn dequantise(on: &CpuKernels<'_>, op: &Dequantise) {
    let Dequantise { y, x, quantisation } = *op;
    let Some(call) = on.call([y], &[x]) else { return };
    let (shape, [y]) = ([y.rows, y.columns], call.write());
    quantisation.decode_at(on.level, call.read(x), shape, y);
}
