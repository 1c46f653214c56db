//! A tensor that was found in weight files: as it is stored there, or in MXFP4.

use safetensors::Dtype;
use safetensors::tensor::TensorView;

use super::mxfp4::Mxfp4;
use super::weights::{check_finite, decode};

/// A tensor of files.
pub(super) enum Found<'t> {
    Stored(TensorView<'t>),
    Mxfp4(Mxfp4<'t>),
}

impl<'t> Found<'t> {
    pub(super) fn shape(&self) -> &[usize] {
        match self {
            Found::Stored(view) => view.shape(),
            Found::Mxfp4(tensor) => tensor.shape(),
        }
    }

    /// The dtype of its elements. Those of MXFP4 are exact in bf16.
    pub(super) fn dtype(&self) -> Dtype {
        match self {
            Found::Stored(view) => view.dtype(),
            Found::Mxfp4(_) => Dtype::BF16,
        }
    }

    /// The bytes that are stored.
    pub(super) fn data(&self) -> &'t [u8] {
        match self {
            Found::Stored(view) => view.data(),
            Found::Mxfp4(tensor) => tensor.data(),
        }
    }

    /// Fills `to` with the elements from `from` on, as f32.
    pub(super) fn decode(&self, to: &mut [f32], from: usize) {
        match self {
            Found::Stored(view) => decode(to, view, from),
            Found::Mxfp4(tensor) => tensor.decode(to, from),
        }
    }

    /// Refuses a tensor with an infinite value or NaN.
    ///
    /// # Errors
    /// The value, and what to do.
    pub(super) fn check_finite(&self, name: &str) -> Result<(), String> {
        match self {
            Found::Stored(view) => check_finite(name, view),
            Found::Mxfp4(tensor) => tensor.first_infinite().map_or(Ok(()), |value| {
                Err(format!(
                    "tensor {name} has the value {value}: the file is damaged. Use another copy, \
                     or read it all the same with --unsealed (model.unsealed = true)"
                ))
            }),
        }
    }
}
