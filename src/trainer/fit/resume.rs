//! Where a run begins: with a new model, at a checkpoint, or at the state that `eps.path` holds.

use std::io;
use std::path::PathBuf;

use crate::checkpoint::{Keeper, check_seal};
use crate::config::{Config, EpsTier};
use crate::error::Error;

/// A run that resumes.
#[derive(Clone, Copy, Default)]
pub(super) struct Resume {
    /// True if a damaged state or checkpoint is an error. Else a run skips it.
    pub(super) strict: bool,
}

/// The place where a run begins.
pub(super) enum Beginning {
    New,
    /// The place that the program gave to the builder.
    AsBuilt,
    Checkpoint(PathBuf),
    /// The state in the EPS's own file.
    StateOnFile,
}

impl Beginning {
    /// Chooses between the newest checkpoint and the state `on_file`: a run resumes from the one
    /// with more steps. It skips a damaged state or checkpoint with a warning, unless it is strict.
    ///
    /// # Errors
    /// The config names no place to resume from; a new run would overwrite the checkpoints of
    /// another; all checkpoints are damaged, or a strict run finds a damaged one.
    pub(super) fn find(
        config: &Config,
        keeper: Option<&Keeper>,
        on_file: Result<Option<u64>, Error>,
        resume: Option<Resume>,
        warn: &mut dyn FnMut(String),
    ) -> Result<Beginning, Error> {
        let Some(Resume { strict }) = resume else {
            on_file?; // A new run, too, is refused beside a state that is damaged.
            return match keeper.map(Keeper::newest).transpose()?.flatten() {
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
        };
        let checkpoint = newest_undamaged(keeper, strict, warn)?;
        let checkpoint_step = checkpoint.as_ref().map(|(step, _)| *step);
        let on_file = match on_file {
            Err(error) if checkpoint_step.is_some() && !strict && !cannot_be_read(&error) => {
                warn(format!("{error}: resumes from a checkpoint instead"));
                None
            }
            found => found?,
        };
        if on_file.is_some_and(|step| checkpoint_step.is_none_or(|other| other <= step)) {
            return Ok(Beginning::StateOnFile);
        }
        if keeper.is_none() && config.eps.tier == EpsTier::Memory {
            let what = "--resume: the config names no place to resume from: set \
                        checkpoint.directory, or eps.tier = \"file\"";
            return Err(Error::argument(what));
        }
        Ok(checkpoint.map_or(Beginning::New, |(_, path)| Beginning::Checkpoint(path)))
    }
}

/// The newest checkpoint that is not damaged, with its step.
///
/// # Errors
/// All checkpoints are damaged, or the newest one is and the run is strict; or the disk fails.
fn newest_undamaged(
    keeper: Option<&Keeper>,
    strict: bool,
    warn: &mut dyn FnMut(String),
) -> Result<Option<(u64, PathBuf)>, Error> {
    let mut damaged = None;
    for (step, path) in keeper.map(Keeper::newest_first).transpose()?.unwrap_or_default() {
        match check_seal(&path) {
            Ok(()) => {
                if damaged.is_some() {
                    warn(format!("resumes from step {step}, the newest that is not damaged"));
                }
                return Ok(Some((step, path)));
            }
            Err(error) if strict || cannot_be_read(&error) => return Err(error),
            Err(error) => {
                warn(error.to_string());
                damaged.get_or_insert(error);
            }
        }
    }
    damaged.map_or(Ok(None), Err)
}

/// True if the disk failed. Then the state may be whole, and newer than any checkpoint.
fn cannot_be_read(error: &Error) -> bool {
    matches!(error, Error::Storage { source, .. } if source.kind() != io::ErrorKind::InvalidData)
}
