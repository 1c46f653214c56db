//! Moving averages of weights, which a checkpoint keeps beside the optimizer's states: exported in
//! the place of the weights.

use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::tensor::{SafeTensors, TensorView};

use super::weights::{decode, map};
use crate::error::Error;
use crate::optimizers::Ema;

/// The averages of a checkpoint.
pub(super) struct Averages {
    path: PathBuf,
    map: Mmap,
}

impl Averages {
    /// Those of a directory.
    ///
    /// # Errors
    /// It has none.
    pub(super) fn of(directory: &Path) -> Result<Averages, Error> {
        let path = directory.join("optimizer.safetensors");
        let map = map(&path)?;
        let averages = Averages { path, map };
        let suffix = format!(".{}", Ema::NAME);
        let tensors = averages.tensors()?;
        if !tensors.names().iter().any(|name| name.ends_with(&suffix)) {
            let what = "it holds no average of the weights: train with optimizer.ema set";
            return Err(Error::bad_model(averages.path.display(), what));
        }
        Ok(averages)
    }

    fn tensors(&self) -> Result<SafeTensors<'_>, Error> {
        let refuse = |error| Error::bad_model(self.path.display(), error);
        SafeTensors::deserialize(&self.map).map_err(refuse)
    }

    /// The average of a tensor. One that was never updated has none.
    ///
    /// # Errors
    /// The average has another shape.
    pub(super) fn of_tensor(
        &self,
        name: &str,
        tensor: &TensorView<'_>,
    ) -> Result<Option<Vec<f32>>, String> {
        let averages = SafeTensors::deserialize(&self.map).expect("it was read before");
        let Ok(average) = averages.tensor(&format!("{name}.{}", Ema::NAME)) else {
            return Ok(None);
        };
        if tensor.shape() != average.shape() {
            return Err(format!("{name} has not the shape of its average"));
        }
        if average.data().iter().all(|&byte| byte == 0) {
            return Ok(None);
        }
        let mut values = vec![0.0; average.shape().iter().product()];
        decode(&mut values, &average, 0);
        Ok(Some(values))
    }
}
