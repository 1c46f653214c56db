//! Copies between dtypes, and zeros.

use super::check::Check;
use crate::tensor::View;

/// y = x, of which one may be floats where the other is of the device's dtype.
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

impl Cast {
    /// Panics unless shapes agree.
    pub fn check(&self) {
        Check("cast").view("x", self.x, [self.y.rows, self.y.columns], self.x.dtype);
    }
}
