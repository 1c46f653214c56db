//! Frozen weights that are stored in fewer bits.

use super::views::{Call, Compute};
use crate::kernels::Dequantise;
use crate::simd::Level;

impl Compute for Dequantise {
    fn compute(&self, level: Level, call: &Call<'_>) {
        let Dequantise { y, x, quantisation, origin } = *self;
        quantisation.decode_at(level, call.read(x), y.shape(), origin, call.write(y));
    }
}
