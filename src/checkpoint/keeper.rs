//! The checkpoints of a run: finds them, names the next, and removes old ones.

use std::cmp::Reverse;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::directory::{OLD, PARTIAL, recover, remove};
use super::hold::unless_held;
use crate::error::Error;
use crate::hf::RECORD;
use crate::lock::DirectoryLock;

/// The checkpoints in `checkpoint.directory`: the newest few, such as `step-00000100`, and the best
/// one, such as `best-00000100`. While the keeper lives, no other run can use the directory.
#[derive(Debug)]
pub struct Keeper {
    directory: PathBuf,
    keep: usize,
    /// `None` for a directory that is only read.
    lock: Option<DirectoryLock>,
}

impl Keeper {
    /// Creates and locks the directory, checks that it can be written to, and repairs what a killed
    /// process left.
    ///
    /// # Errors
    /// It cannot be written to, or another run uses it.
    pub fn open(directory: &Path, keep: usize) -> Result<Keeper, Error> {
        let at = directory.display();
        let bad = |what: &dyn std::fmt::Display| {
            let problem = format!("{:?} cannot be written to: {what}", at.to_string());
            Error::config("checkpoint.directory", problem)
        };
        let lock = DirectoryLock::open(directory, ".l2l-lock").map_err(|error| bad(&error))?;
        let keeper = Keeper { directory: directory.to_path_buf(), keep, lock: Some(lock) };
        for name in keeper.names().map_err(|error| bad(&error))? {
            let base = name.strip_suffix(PARTIAL).or_else(|| name.strip_suffix(OLD));
            if let Some(base) = base.filter(|base| step_of(base).is_some()) {
                recover(&directory.join(base)).map_err(|error| bad(&error))?;
            }
        }
        Ok(keeper)
    }

    /// Only reads the directory, which another run may be writing to.
    pub fn peek(directory: &Path) -> Keeper {
        Keeper { directory: directory.to_path_buf(), keep: usize::MAX, lock: None }
    }

    /// Checks that the path still leads to the directory that this run has locked. It is called
    /// before and after each checkpoint.
    ///
    /// # Errors
    /// The directory was removed, renamed or replaced.
    pub fn still_held(&self) -> Result<(), Error> {
        let held = self.lock.as_ref().map_or(Ok(()), DirectoryLock::still_held);
        held.map_err(|error| {
            let what = format!(
                "{error}, so this run writes nothing there any more. If its checkpoints are still \
                 elsewhere, set checkpoint.directory to that place and continue with --resume"
            );
            Error::storage("checkpoint.directory", io::Error::other(what))
        })
    }

    /// The path of the checkpoint of a step.
    pub fn place(&self, step: u64) -> PathBuf {
        self.directory.join(format!("step-{step:08}"))
    }

    /// The path of the best checkpoint, if it is that of this step.
    pub fn best_place(&self, step: u64) -> PathBuf {
        self.directory.join(format!("best-{step:08}"))
    }

    fn names(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in if_there(fs::read_dir(&self.directory))?.into_iter().flatten() {
            names.extend(entry?.file_name().into_string().ok());
        }
        Ok(names)
    }

    /// The complete checkpoints of a kind, oldest first. A directory that cannot be read is an
    /// error: a run that took it for empty would begin anew and replace its checkpoints.
    fn all(&self, kind: &str) -> io::Result<Vec<(u64, PathBuf)>> {
        let mut all = Vec::new();
        for name in self.names()? {
            let Some((_, step)) = step_of(&name).filter(|(found, _)| *found == kind) else {
                continue;
            };
            let path = self.directory.join(&name);
            if if_there(fs::metadata(path.join(RECORD)))?.is_some_and(|record| record.is_file()) {
                all.push((step, path));
            }
        }
        all.sort();
        Ok(all)
    }

    /// All checkpoints with their steps, newest first. The best one is among them.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn newest_first(&self) -> Result<Vec<(u64, PathBuf)>, Error> {
        // Of two checkpoints of one step the best is newer: it also has the step's validation.
        let all = self.all("best").and_then(|all| Ok([all, self.all("step")?].concat()));
        let mut all = all.map_err(|error| self.unusable(error))?;
        all.sort_by_key(|(step, _)| Reverse(*step));
        Ok(all)
    }

    fn unusable(&self, error: io::Error) -> Error {
        let place = format!("checkpoint.directory {}", self.directory.display());
        Error::unusable(place, error)
    }

    /// The newest checkpoint, if there is one.
    ///
    /// # Errors
    /// As [`newest_first`](Keeper::newest_first).
    pub fn newest(&self) -> Result<Option<PathBuf>, Error> {
        Ok(self.newest_first()?.into_iter().next().map(|(_, path)| path))
    }

    /// The best checkpoint, if there is one.
    ///
    /// # Errors
    /// As [`newest_first`](Keeper::newest_first).
    pub fn best(&self) -> Result<Option<PathBuf>, Error> {
        let mut all = self.all("best").map_err(|error| self.unusable(error))?;
        Ok(all.pop().map(|(_, path)| path))
    }

    /// Removes the checkpoints that the one at `written` replaces: those of earlier steps but the
    /// last `checkpoint.keep - 1`, or the other best ones. A checkpoint of a later step stays: the
    /// run cannot use it, since it resumed from an earlier one. So does a checkpoint that a
    /// [`Hold`](super::Hold) keeps, until the next time.
    ///
    /// # Errors
    /// They cannot be removed.
    pub fn tidy(&self, written: &Path) -> Result<(), Error> {
        self.still_held()?;
        let name = written.file_name().and_then(|name| name.to_str()).and_then(step_of);
        let failed = |error| Error::storage(self.directory.display(), error);
        let all = |kind| self.all(kind).map_err(failed);
        let replaced = match name {
            Some(("best", step)) => {
                let mut bests = all("best")?;
                bests.retain(|(of, _)| *of != step);
                bests
            }
            Some((_, step)) => {
                let mut steps = all("step")?;
                steps.retain(|(of, _)| *of <= step);
                steps.truncate(steps.len().saturating_sub(self.keep));
                steps
            }
            None => Vec::new(),
        };
        replaced.iter().try_for_each(|(_, old)| unless_held(old, || remove(old)))
    }
}

/// Makes `None` of an error that says that a file is not there.
fn if_there<T>(found: io::Result<T>) -> io::Result<Option<T>> {
    let absent = [io::ErrorKind::NotFound, io::ErrorKind::NotADirectory];
    match found {
        Err(error) if absent.contains(&error.kind()) => Ok(None),
        found => found.map(Some),
    }
}

/// The kind and the step in the name of a checkpoint.
fn step_of(name: &str) -> Option<(&str, u64)> {
    let (kind, step) = name.split_once('-')?;
    Some((kind, step.parse().ok()?)).filter(|(kind, _)| ["step", "best"].contains(kind))
}
