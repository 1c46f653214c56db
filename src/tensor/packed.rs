//! Packed floats: each number rounded to bf16, at half the size of f32.
//!
//! A packed place holds whole floats: the last half of the last one may be unused.

use half::bf16;
use half::slice::HalfFloatSliceExt;

/// Floats that so many numbers take when they are packed.
pub(crate) fn packed_floats(numbers: usize) -> usize {
    numbers.div_ceil(2)
}

/// Rounds floats to bf16 and writes them to a packed place.
pub(crate) fn pack(place: &mut [f32], from: &[f32]) {
    let place: &mut [bf16] = bytemuck::cast_slice_mut(place);
    place[..from.len()].convert_from_f32_slice(from);
}

/// Widens the first numbers of a packed place to floats.
pub(crate) fn unpack(to: &mut [f32], place: &[f32]) {
    let place: &[bf16] = bytemuck::cast_slice(place);
    place[..to.len()].convert_to_f32_slice(to);
}
