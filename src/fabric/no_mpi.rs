//! In a program that was built without MPI: what to do.

use std::time::Duration;

use super::Fabric;
use crate::error::Error;

/// The fabric of MPI.
///
/// # Errors
/// This program was built without MPI.
pub fn open(_patience: Duration) -> Result<Box<dyn Fabric>, Error> {
    let what = "this program was built without MPI: build it with `--features mpi`, which needs a \
                compiler for MPI (`mpicc`) and libclang";
    Err(Error::argument(what))
}
