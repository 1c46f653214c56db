//! A safetensors file that is read: its pages come from the disk when they are first used.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::tensor::SafeTensors;

use crate::error::Error;
use crate::lfs;

/// A safetensors file, mapped to memory to be read.
pub(super) struct WeightFile {
    path: PathBuf,
    map: Mmap,
}

impl WeightFile {
    /// Maps a file, and checks its header.
    pub(super) fn open(path: &Path) -> Result<WeightFile, Error> {
        let refuse = |error: io::Error| Error::bad_model(path.display(), error);
        let file = File::open(path).map_err(refuse)?;
        // SAFETY: the map is only read. Nothing protects it from another process that truncates the
        // file meanwhile. The documentation asks users not to do that.
        let map = unsafe { Mmap::map(&file) }.map_err(refuse)?;
        let file = WeightFile { path: path.into(), map };
        SafeTensors::read_metadata(&file.map).map_err(|error| {
            match lfs::is_pointer(&file.map) {
                true => file.refuse(lfs::INSTEAD),
                false => file.refuse(error),
            }
        })?;
        Ok(file)
    }

    /// The file's tensors.
    pub(super) fn tensors(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.map).expect("open() read its header")
    }

    /// The names of the file's tensors, in the order of their data.
    pub(super) fn names_in_order(&self) -> Vec<String> {
        let (_, metadata) = SafeTensors::read_metadata(&self.map).expect("open() read it");
        metadata.offset_keys()
    }

    /// Whether a tensor with these bytes is one of this file's.
    pub(super) fn has(&self, data: &[u8]) -> bool {
        self.map.as_ptr_range().contains(&data.as_ptr())
    }

    /// An error about the file's content.
    pub(super) fn refuse(&self, what: impl std::fmt::Display) -> Error {
        Error::bad_model(self.path.display(), what)
    }

    /// Lets the system drop the pages that were read from memory.
    pub(super) fn forget_pages(&self) {
        // SAFETY: the map is of a file and is not written to, so the system reads the same pages
        // again when they are next used.
        #[cfg(target_os = "linux")]
        let _ = unsafe { self.map.unchecked_advise(memmap2::UncheckedAdvice::DontNeed) };
    }
}
