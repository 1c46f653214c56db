//! Moving averages of weights, which a checkpoint keeps beside the optimizer's states: exported in
//! the place of the weights.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::Dtype;
use safetensors::tensor::SafeTensors;

use super::weights::map;
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

    /// Writes the averages over the weights of a file. A tensor that was never updated has none.
    ///
    /// # Errors
    /// The file cannot be written, or has other tensors.
    pub(super) fn write_over(&self, weights: &Path) -> Result<(), Error> {
        let refuse = |what: String| Error::bad_model(weights.display(), what);
        let failed = |error| Error::storage(weights.display(), error);
        let averages = self.tensors()?;
        let read = map(weights)?;
        let (header, metadata) =
            SafeTensors::read_metadata(&read).map_err(|error| refuse(error.to_string()))?;
        let begin = size_of::<u64>() + header;
        let file = OpenOptions::new().write(true).open(weights).map_err(failed)?;
        for (name, info) in metadata.tensors() {
            let Ok(average) = averages.tensor(&format!("{name}.{}", Ema::NAME)) else { continue };
            if info.shape != average.shape() || info.dtype != Dtype::F32 {
                return Err(refuse(format!("{name} is not as its average: {info:?}")));
            }
            if average.data().iter().any(|&byte| byte != 0) {
                let at = (begin + info.data_offsets.0) as u64;
                file.write_all_at(average.data(), at).map_err(failed)?;
            }
        }
        file.sync_all().map_err(failed)
    }
}
