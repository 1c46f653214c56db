//! Starts a trainer in three stages: everything that can be checked is checked, then what the run
//! begins from is opened, then memory, threads and actors are made.

mod check;
mod launch;
mod open;

use check::CheckedRun;

use super::{Builder, Trainer};
use crate::error::Error;

/// Makes a trainer. Blocks, and needs a tokio runtime.
pub(super) fn start(builder: Builder) -> Result<Trainer, Error> {
    CheckedRun::new(builder)?.open()?.launch()
}
