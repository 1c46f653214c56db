//! A checkpoint that is read stays until its reader has ended: the run that would remove it leaves
//! it for the next time.
//!
//! A reader has a shared lock of the checkpoint's record, and the run that removes it an exclusive
//! one. A file system without locks gives no such promise.

use std::fs::{File, TryLockError};
use std::path::Path;

use crate::hf::RECORD;

/// A checkpoint that is not removed while this value lives.
#[derive(Debug)]
pub struct Hold {
    _record: Option<File>,
}

impl Hold {
    /// Holds the checkpoint in a directory. `None` if it is being removed, or is gone.
    pub fn of(directory: &Path) -> Option<Hold> {
        let record = directory.join(RECORD);
        let Ok(file) = File::open(&record) else {
            // A model without a record is no checkpoint, and no run removes it.
            return directory.is_dir().then_some(Hold { _record: None });
        };
        match file.try_lock_shared() {
            Err(TryLockError::WouldBlock) => None,
            _ => record.exists().then_some(Hold { _record: Some(file) }),
        }
    }
}

/// Calls `remove`, unless a reader holds the checkpoint.
pub(super) fn unless_held<E>(
    directory: &Path,
    remove: impl FnOnce() -> Result<(), E>,
) -> Result<(), E> {
    let record = File::open(directory.join(RECORD)).ok();
    let locked = record.as_ref().map(File::try_lock);
    match locked {
        Some(Err(TryLockError::WouldBlock)) => Ok(()),
        _ => remove(),
    }
}
