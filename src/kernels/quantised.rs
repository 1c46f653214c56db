//! Frozen weights that are stored in fewer bits.

use super::operation::{KernelOperation, Views};
use crate::tensor::{Dtype, Origin, Quantisation, View};

/// y = the matrix that x stores. Each element is computed in f32, then rounded once to y's dtype.
#[derive(Clone, Copy, Debug)]
pub struct Dequantise {
    /// Output. (rows, columns).
    pub y: View,
    /// Storage, as [`Quantisation::encode`] writes it: floats. (1, [`Quantisation::floats_of`]).
    pub x: View,
    /// The format of the storage.
    pub quantisation: Quantisation,
    /// The place of y in the matrix of which x stores a part, if its scales are of that one.
    pub origin: Option<Origin>,
}

impl KernelOperation for Dequantise {
    fn views(&self, views: &mut Views<'_>) {
        let Dequantise { y, x, quantisation, origin } = *self;
        views.writes("y", y, y.shape(), y.dtype);
        views.reads("x", x, [1, quantisation.floats_of(y.shape(), origin)], Dtype::F32);
    }
}
