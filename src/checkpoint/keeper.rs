//! The checkpoints of a run: finds them, names the next, and removes old ones.

use std::cmp::Reverse;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::{OLD, PARTIAL, recover, remove, with_suffix};
use crate::error::Error;
use crate::folder;
use crate::hf::RECORD;
use crate::lock::DirectoryLock;

/// The checkpoints in the config's `checkpoint.directory`: `step-00000100` and so on, the newest
/// few, and `best-00000100`, one. The directory is this run's alone while it lives.
#[derive(Debug)]
pub struct Keeper {
    directory: PathBuf,
    keep: usize,
    /// None for a directory that is only read.
    lock: Option<DirectoryLock>,
}

impl Keeper {
    /// Creates and locks the directory, checks that it can be written, and repairs what a kill
    /// left.
    ///
    /// # Errors
    /// It cannot be written to, or another run has it.
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

    /// Only reads a directory, which another run may be writing to.
    pub fn peek(directory: &Path) -> Keeper {
        Keeper { directory: directory.to_path_buf(), keep: usize::MAX, lock: None }
    }

    /// Checks that the directory is still this run's. Whoever writes a checkpoint there asks before
    /// and after.
    ///
    /// # Errors
    /// It was removed, renamed or replaced.
    pub fn still_held(&self) -> Result<(), Error> {
        let held = self.lock.as_ref().map_or(Ok(()), DirectoryLock::still_held);
        held.map_err(|error| {
            let what = format!(
                "{error}; nothing is written there any more. The checkpoints that it held went \
                 with it: where they are still, --resume goes on from them"
            );
            Error::storage("checkpoint.directory", io::Error::other(what))
        })
    }

    /// The path of the checkpoint of a step.
    pub fn place(&self, step: u64) -> PathBuf {
        self.directory.join(format!("step-{step:08}"))
    }

    /// The path of the best checkpoint, of this step.
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

    /// The complete checkpoints of a kind, oldest first. What cannot be read is an error: a run
    /// that took it for absent would begin anew over it.
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

    /// All checkpoints with their steps, newest first. The best one is complete, too.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn newest_first(&self) -> Result<Vec<(u64, PathBuf)>, Error> {
        // Of one step the best comes first: its validation came after the other was written.
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

    /// Removes the checkpoints that one replaces which has just been written: all but the newest
    /// `checkpoint.keep`, or the best ones of before.
    ///
    /// # Errors
    /// They cannot be removed.
    pub fn tidy(&self, written: &Path) -> Result<(), Error> {
        self.still_held()?;
        let name = written.file_name().and_then(|name| name.to_str()).and_then(step_of);
        let all = |kind| self.all(kind).map_err(|error| self.failed(error));
        match name {
            Some(("best", step)) => {
                let mut bests = all("best")?;
                bests.retain(|(of, _)| *of != step);
                remove_all(bests)
            }
            _ => {
                let mut steps = all("step")?;
                steps.truncate(steps.len().saturating_sub(self.keep));
                remove_all(steps)
            }
        }
    }

    fn failed(&self, error: io::Error) -> Error {
        Error::storage(self.directory.display(), error)
    }
}

/// What is absent is `None`, and no error.
fn if_there<T>(found: io::Result<T>) -> io::Result<Option<T>> {
    let absent = [io::ErrorKind::NotFound, io::ErrorKind::NotADirectory];
    match found {
        Err(error) if absent.contains(&error.kind()) => Ok(None),
        found => found.map(Some),
    }
}

/// Removes checkpoints. They lose their names before their files, so that none is ever there in
/// part.
fn remove_all(checkpoints: Vec<(u64, PathBuf)>) -> Result<(), Error> {
    for (_, old) in checkpoints {
        let partial = with_suffix(&old, PARTIAL);
        let removed = remove(&partial)
            .and_then(|()| fs::rename(&old, &partial))
            .and_then(|()| folder::sync(folder::parent(&old)))
            .and_then(|()| remove(&partial));
        removed.map_err(|error| Error::storage(old.display(), error))?;
    }
    Ok(())
}

/// The kind and step of a checkpoint's name.
fn step_of(name: &str) -> Option<(&str, u64)> {
    let (kind, step) = name.split_once('-')?;
    Some((kind, step.parse().ok()?)).filter(|(kind, _)| ["step", "best"].contains(kind))
}
