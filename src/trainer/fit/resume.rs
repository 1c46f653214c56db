//! Where a run begins: with a new model, at a checkpoint, or at the state that `eps.path` holds.

use std::path::PathBuf;

use crate::checkpoint::Keeper;
use crate::config::{Config, EpsTier};
use crate::error::Error;

/// See the [module](self).
pub(super) enum Beginning {
    New,
    /// Where the builder was told to resume from.
    AsBuilt,
    Checkpoint(PathBuf),
    /// The state in the EPS's own file.
    StateOnFile,
}

impl Beginning {
    /// What a run resumes from: of checkpoints and the state `on_file`, whichever has more steps. A
    /// run that does not resume must not find the checkpoints of another. `warn` is called when
    /// the state on file cannot be used and a checkpoint takes its place.
    ///
    /// # Errors
    /// There is nothing that it could ever resume from; there is a run that it would overwrite.
    pub(super) fn find(
        config: &Config,
        keeper: Option<&Keeper>,
        on_file: Result<Option<u64>, Error>,
        resume: bool,
        warn: &mut dyn FnMut(String),
    ) -> Result<Beginning, Error> {
        let checkpoint = keeper.and_then(Keeper::newest);
        if !resume {
            on_file?; // it must be readable, also for a run that does not use it
            return match checkpoint {
                None => Ok(Beginning::New),
                Some(found) => Err(Error::config(
                    "checkpoint.directory",
                    format_args!(
                        "has the checkpoints of a run, {} the newest: continue with --resume, \
                         or give this run another checkpoint.directory",
                        found.display()
                    ),
                )),
            };
        }
        let checkpoint_step = keeper.and_then(Keeper::newest_step);
        let on_file = match on_file {
            Err(error) if checkpoint_step.is_some() => {
                warn(format!("{error}: resumes from a checkpoint instead"));
                None
            }
            found => found?,
        };
        if on_file.is_some_and(|step| checkpoint_step.is_none_or(|other| other <= step)) {
            return Ok(Beginning::StateOnFile);
        }
        if keeper.is_none() && config.eps.tier == EpsTier::Memory {
            let what = "--resume: from where? Set checkpoint.directory, or eps.tier to file";
            return Err(Error::argument(what));
        }
        Ok(checkpoint.map_or(Beginning::New, Beginning::Checkpoint))
    }
}
