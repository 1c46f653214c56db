//! Frozen weights that are stored in fewer bits.

use super::check::Check;
use crate::tensor::{Dtype, Quantisation, View};

/// y = the matrix that x stores. Each element is computed in f32 and rounded once.
#[derive(Clone, Copy, Debug)]
pub struct Dequantise {
    /// Output. (rows, columns).
    pub y: View,
    /// Storage, as [`Quantisation::encode`] writes it: floats. (1, [`Quantisation::floats`]).
    pub x: View,
    /// How it is stored.
    pub quantisation: Quantisation,
}

impl Dequantise {
    /// Panics unless shapes and dtypes agree.
    pub fn check(&self) {
        let Dequantise { y, x, quantisation } = *self;
        let floats = quantisation.floats(y.rows, y.columns);
        Check("dequantise").view("x", x, [1, floats], Dtype::F32);
    }
}
