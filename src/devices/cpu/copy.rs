//! Copies, and zeros. During an operation all elements are floats, so a cast is a copy.

use super::views::{Call, Compute};
use crate::kernels::{Cast, Clear};
use crate::simd::Level;

impl Compute for Cast {
    fn compute(&self, _: Level, call: &Call<'_>) {
        call.write(self.y).copy_from_slice(call.read(self.x));
    }
}

impl Compute for Clear {
    fn compute(&self, _: Level, call: &Call<'_>) {
        call.write(self.y).fill(0.0);
    }
}
