//! What is found out about GPUs before a run: libraries, GPUs, kernels, rates.

use std::path::PathBuf;

use crate::error::Error;

/// A library that a CUDA device needs, and what was found of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Library {
    /// Its file's name without version.
    pub name: &'static str,
    /// The file that was loaded, where the system tells.
    pub path: Option<PathBuf>,
    /// Its version; `None`: it is not there, or cannot be loaded.
    pub version: Option<(u32, u32)>,
    /// What to do where it is not there.
    pub install: &'static str,
}

/// A GPU, as the driver tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Its name.
    pub name: String,
    /// Its architecture: 90 of 9.0.
    pub architecture: u32,
    /// Bytes of memory.
    pub memory: u64,
}

/// How a kernel of a GPU compares with the CPU's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Check {
    /// Its name.
    pub kernel: &'static str,
    /// Sizes that it was run at.
    pub cases: usize,
    /// The largest difference, relative to values above 1; infinite where it wrote what is not its
    /// own.
    pub off: f64,
    /// The most that it may be: in bf16, some roundings.
    pub most: f64,
}

impl Check {
    /// Fails for the first that is off by more.
    ///
    /// # Errors
    /// Which, and by how much.
    pub fn judge(checks: &[Check]) -> Result<(), Error> {
        match checks.iter().find(|check| check.off > check.most) {
            None => Ok(()),
            Some(Check { kernel, off, most, .. }) => {
                Err(Error::Device(format!("{kernel} is off by {off:e}, of at most {most:e}")))
            }
        }
    }
}

/// How fast a GPU is, as measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GpuRates {
    /// Bytes a second to the device and from it, of memory as it comes.
    pub pageable: [f64; 2],
    /// The same of pinned memory, where the system gives some.
    pub pinned: Option<[f64; 2]>,
    /// FLOP/s of a large product of the config's `device.dtype`.
    pub product: f64,
}
