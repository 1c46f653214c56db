//! The positive numbers of a tensor and their places. A ReLU's backward needs nothing else (Jain et
//! al. 2018, "Gist", sections 3.1 and 3.2).
//!
//! A packed row consists of floats: the count of positive numbers, as bits; one bit for each
//! number, set if it is positive; the positive numbers in their own dtype, as far as there is room.
//! With no room at all, only the bits are packed, and each positive number becomes 1.

use super::operation::{KernelOperation, Named, Views};
use crate::tensor::{Dtype, View};

/// packed = the positive numbers of x and their places.
#[derive(Clone, Copy, Debug)]
pub struct PackPositive {
    /// Output, in floats. (R, [`packed_row`]).
    pub packed: View,
    /// Input. (R, I).
    pub x: View,
    /// The most positive numbers that a packed row holds; 0: bits alone.
    pub room: usize,
}

/// y = max(x, 0), of the x that was packed.
#[derive(Clone, Copy, Debug)]
pub struct UnpackPositive {
    /// Output. (R, I).
    pub y: View,
    /// Input: packed rows, in floats. (R, [`packed_row`]).
    pub packed: View,
    /// As in [`PackPositive`].
    pub room: usize,
}

/// Floats of a packed row, from the numbers of the row and the positive ones that it has room for.
pub fn packed_row(numbers: usize, room: usize, dtype: Dtype) -> usize {
    1 + numbers.div_ceil(32) + dtype.floats(room)
}

impl KernelOperation for PackPositive {
    fn views(&self, views: &mut Views<'_>) {
        let PackPositive { packed, x, room } = *self;
        let row = packed_row(x.columns, room, x.dtype);
        views.writes_opaque("packed", packed, [x.rows, row], Dtype::F32);
        views.reads("x", x, x.shape(), x.dtype);
    }
}

impl Named for UnpackPositive {
    fn name(&self) -> &'static str {
        "unpack_positive"
    }
}

impl KernelOperation for UnpackPositive {
    fn views(&self, views: &mut Views<'_>) {
        let UnpackPositive { y, packed, room } = *self;
        let row = packed_row(y.columns, room, y.dtype);
        views.writes("y", y, y.shape(), y.dtype);
        views.reads("packed", packed, [y.rows, row], Dtype::F32);
    }
}
