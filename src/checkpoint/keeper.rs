//! The checkpoints of a run: which there are, where the next goes, which are let go.

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

use super::{OLD, PARTIAL, REST, recover, remove};
use crate::error::Error;

/// The checkpoints in the config's `checkpoint.directory`: `step-00000100` and so on, the newest
/// few, and `best-00000100`, one. The directory is this run's alone while it lives.
#[derive(Debug)]
pub struct Keeper {
    directory: PathBuf,
    keep: usize,
    _lock: File,
}

impl Keeper {
    /// Of a directory, which is made, found to be writable, and cleared of what a kill left.
    ///
    /// # Errors
    /// It cannot be written to, or another run has it.
    pub fn open(directory: &Path, keep: usize) -> Result<Keeper, Error> {
        let at = directory.display();
        let bad = |what: &dyn std::fmt::Display| {
            let problem = format!("{:?} cannot be written to: {what}", at.to_string());
            Error::config("checkpoint.directory", problem)
        };
        fs::create_dir_all(directory).map_err(|error| bad(&error))?;
        let lock = File::create(directory.join(".l2l-lock")).map_err(|error| bad(&error))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(bad(&"another run has it")),
            Err(TryLockError::Error(error)) => return Err(bad(&error)),
        }
        let keeper = Keeper { directory: directory.to_path_buf(), keep, _lock: lock };
        for name in keeper.names() {
            let base = name.strip_suffix(PARTIAL).or_else(|| name.strip_suffix(OLD));
            if let Some(base) = base.filter(|base| step_of(base).is_some()) {
                recover(&directory.join(base)).map_err(|error| bad(&error))?;
            }
        }
        Ok(keeper)
    }

    /// Where the checkpoint of a step goes.
    pub fn place(&self, step: u64) -> PathBuf {
        self.directory.join(format!("step-{step:08}"))
    }

    /// Where the best goes.
    pub fn best_place(&self, step: u64) -> PathBuf {
        self.directory.join(format!("best-{step:08}"))
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.directory).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
    }

    /// Whole checkpoints of a kind, oldest first.
    fn all(&self, kind: &str) -> Vec<(u64, PathBuf)> {
        let of_kind = |name: String| {
            let (found, step) = step_of(&name)?;
            let path = self.directory.join(&name);
            (found == kind && path.join(REST).is_file()).then_some((step, path))
        };
        let mut all: Vec<(u64, PathBuf)> = self.names().into_iter().filter_map(of_kind).collect();
        all.sort();
        all
    }

    /// The newest, if there is one.
    pub fn newest(&self) -> Option<PathBuf> {
        self.all("step").pop().map(|(_, path)| path)
    }

    /// The best, if there is one.
    pub fn best(&self) -> Option<PathBuf> {
        self.all("best").pop().map(|(_, path)| path)
    }

    /// Any that is there: the newest, or a best that was left alone.
    pub fn any(&self) -> Option<PathBuf> {
        self.newest().or_else(|| self.best())
    }

    /// Lets go of what need not be kept: all but the newest, and the best, which is of this step.
    ///
    /// # Errors
    /// It cannot be removed.
    pub fn tidy(&self, best: Option<u64>) -> Result<(), Error> {
        let (mut steps, mut bests) = (self.all("step"), self.all("best"));
        steps.truncate(steps.len().saturating_sub(self.keep));
        bests.retain(|(step, _)| Some(*step) != best);
        for (_, old) in steps.into_iter().chain(bests) {
            remove(&old)
                .map_err(|error| Error::failed(format_args!("{}: {error}", old.display())))?;
        }
        Ok(())
    }
}

/// The kind and step of a checkpoint's name.
fn step_of(name: &str) -> Option<(&str, u64)> {
    let (kind, step) = name.split_once('-')?;
    Some((kind, step.parse().ok()?)).filter(|(kind, _)| ["step", "best"].contains(kind))
}
