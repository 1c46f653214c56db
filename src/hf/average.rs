//! Moving averages of weights, which a checkpoint keeps beside the optimizer's states. An export
//! may write them in place of the weights.

use std::path::Path;

use safetensors::tensor::TensorView;

use super::sealed::STATES;
use super::weight_file::WeightFile;
use super::weights::decode_all;
use crate::error::Error;
use crate::optimizers::Ema;

/// The averages of a checkpoint.
pub(super) struct Averages(WeightFile);

impl Averages {
    /// Opens the averages of a checkpoint's directory.
    pub(super) fn open(directory: &Path) -> Result<Averages, Error> {
        let file = WeightFile::open(&directory.join(STATES))?;
        let suffix = format!(".{}", Ema::NAME);
        if !file.tensors().names().iter().any(|name| name.ends_with(&suffix)) {
            let what = "it holds no average of the weights: train with optimizer.ema set";
            return Err(file.refuse(what));
        }
        Ok(Averages(file))
    }

    /// The average of a tensor. A tensor that was never updated has none.
    pub(super) fn of_tensor(
        &self,
        name: &str,
        tensor: &TensorView<'_>,
    ) -> Result<Option<Vec<f32>>, String> {
        let averages = self.0.tensors();
        let Ok(average) = averages.tensor(&format!("{name}.{}", Ema::NAME)) else {
            return Ok(None);
        };
        if tensor.shape() != average.shape() {
            return Err(format!("{name} has not the shape of its average"));
        }
        let is_updated = average.data().iter().any(|&byte| byte != 0);
        Ok(is_updated.then(|| decode_all(&average)))
    }
}
