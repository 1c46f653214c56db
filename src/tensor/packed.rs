//! Packed floats: each number rounded to bf16, at half the size of f32.
//!
//! A packed place holds whole sequences. Each sequence begins at a float of its own, so that a
//! sequence of an odd count of numbers leaves the last half of its last float unused.

use half::bf16;
use half::slice::HalfFloatSliceExt;

/// Bytes that `floats` numbers of one sequence take when they are packed: whole floats.
pub(crate) fn packed_bytes(floats: usize) -> u64 {
    (floats.div_ceil(2) * size_of::<f32>()) as u64
}

/// The packed numbers of each sequence; the last number of a sequence may be unused.
pub(crate) fn packed(place: &[f32], sequences: usize) -> impl Iterator<Item = &[bf16]> {
    place.chunks_exact(place.len() / sequences).map(bytemuck::cast_slice)
}

/// The packed numbers of each sequence, to write.
pub(crate) fn packed_mut(place: &mut [f32], sequences: usize) -> impl Iterator<Item = &mut [bf16]> {
    place.chunks_exact_mut(place.len() / sequences).map(bytemuck::cast_slice_mut)
}

/// Rounds the floats of `from` to bf16 and writes them to a packed place.
pub(crate) fn pack(place: &mut [f32], from: &[f32], sequences: usize) {
    let floats = from.len() / sequences;
    for (place, from) in packed_mut(place, sequences).zip(from.chunks_exact(floats)) {
        place[..floats].convert_from_f32_slice(from);
    }
}

/// Widens the numbers of a packed place to floats.
pub(crate) fn unpack(to: &mut [f32], place: &[f32], sequences: usize) {
    let floats = to.len() / sequences;
    for (place, to) in packed(place, sequences).zip(to.chunks_exact_mut(floats)) {
        place[..floats].convert_to_f32_slice(to);
    }
}
