//! Frozen weights that are stored in fewer bits.

use super::views::CpuKernels;
use crate::kernels::{Dequantise, Runs};

impl Runs<Dequantise> for CpuKernels<'_> {
    fn run(&self, op: &Dequantise) {
        let Dequantise { y, x, quantisation } = *op;
        let Some(call) = self.call(op) else { return };
        quantisation.decode_at(self.level, call.read(x), y.shape(), call.write(y));
    }
}
