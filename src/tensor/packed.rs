//! Numbers of 16 bits: f32 rounded to the nearest of them, ties to even, and widened again.
//!
//! A packed place of the stash holds whole floats: the last half of the last one may be unused.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::view::Dtype;

/// An element of a [`Dtype`], as the host computes with it.
pub(crate) trait Element: bytemuck::Pod + Send + Sync {
    /// The nearest one, ties to even.
    fn from_f32(value: f32) -> Self;
    /// Its value.
    fn to_f32(self) -> f32;
}

impl Element for f32 {
    #[inline(always)]
    fn from_f32(value: f32) -> f32 {
        value
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
}

macro_rules! half_element {
    ($half:ident) => {
        impl Element for $half {
            #[inline(always)]
            fn from_f32(value: f32) -> $half {
                $half::from_f32(value)
            }

            #[inline(always)]
            fn to_f32(self) -> f32 {
                $half::to_f32(self)
            }
        }
    };
}
half_element!(bf16);
half_element!(f16);

/// Floats that so many numbers take when they are packed.
pub(crate) fn packed_floats(numbers: usize) -> usize {
    numbers.div_ceil(2)
}

/// Rounds floats to bf16 and writes them to a packed place.
pub(crate) fn pack(place: &mut [f32], from: &[f32]) {
    let place: &mut [u16] = bytemuck::cast_slice_mut(place);
    narrow(Dtype::Bf16, &mut place[..from.len()], from);
}

/// Widens the first numbers of a packed place to floats.
pub(crate) fn unpack(to: &mut [f32], place: &[f32]) {
    let place: &[u16] = bytemuck::cast_slice(place);
    widen(Dtype::Bf16, to, &place[..to.len()]);
}

/// Rounds floats to a dtype of 16 bits.
///
/// # Panics
/// It is not one of 16 bits, or the lengths differ.
pub(crate) fn narrow(dtype: Dtype, to: &mut [u16], from: &[f32]) {
    match dtype {
        Dtype::Bf16 => bytemuck::cast_slice_mut::<_, bf16>(to).convert_from_f32_slice(from),
        Dtype::F16 => bytemuck::cast_slice_mut::<_, f16>(to).convert_from_f32_slice(from),
        Dtype::F32 => unreachable!("floats are not rounded"),
    }
}

/// Widens numbers of a dtype of 16 bits to floats.
///
/// # Panics
/// As [`narrow`].
pub(crate) fn widen(dtype: Dtype, to: &mut [f32], from: &[u16]) {
    match dtype {
        Dtype::Bf16 => bytemuck::cast_slice::<_, bf16>(from).convert_to_f32_slice(to),
        Dtype::F16 => bytemuck::cast_slice::<_, f16>(from).convert_to_f32_slice(to),
        Dtype::F32 => unreachable!("floats are as wide as they can be"),
    }
}
