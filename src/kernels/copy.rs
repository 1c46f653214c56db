//! Copies between dtypes, and zeros.

use super::operation::{KernelOperation, Views};
use crate::tensor::View;

/// y = x. One may hold floats and the other elements of the device's dtype.
#[derive(Clone, Copy, Debug)]
pub struct Cast {
    /// Output. (R, C).
    pub y: View,
    /// Input. (R, C).
    pub x: View,
}

/// y = 0.
#[derive(Clone, Copy, Debug)]
pub struct Clear {
    /// Output, of any shape.
    pub y: View,
}

impl KernelOperation for Cast {
    fn views(&self, views: &mut Views<'_>) {
        let Cast { y, x } = *self;
        views.writes("y", y, y.shape(), y.dtype);
        views.reads("x", x, y.shape(), x.dtype);
    }
}

impl KernelOperation for Clear {
    fn views(&self, views: &mut Views<'_>) {
        views.writes("y", self.y, self.y.shape(), self.y.dtype);
    }
}
