//! The directory of a checkpoint: it gets its name when it is complete, and loses its name before
//! its files are removed. So a killed process leaves a whole checkpoint or none.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::folder::{parent, sync};

/// The suffix of a directory that is being written or removed.
pub(super) const PARTIAL: &str = ".l2l-partial";

/// The suffix of a checkpoint that is being replaced.
pub(super) const OLD: &str = ".l2l-old";

/// The path of a directory with a suffix after its name.
pub(super) fn with_suffix(directory: &Path, suffix: &str) -> PathBuf {
    // Collecting the components drops a slash at the end.
    let mut name = directory.components().collect::<PathBuf>().into_os_string();
    name.push(suffix);
    PathBuf::from(name)
}

/// Gives a complete directory its name, and waits until the name is on the disk. A checkpoint that
/// has this name already is kept until then.
pub(super) fn publish(partial: &Path, directory: &Path) -> io::Result<()> {
    let old = with_suffix(directory, OLD);
    sync(partial)?;
    if directory.try_exists()? {
        fs::rename(directory, &old)?;
    }
    fs::rename(partial, directory)?;
    sync(parent(directory))?;
    remove_files(&old)
}

/// Repairs what a killed process left: restores a checkpoint that was being replaced, and removes
/// one that was being written.
pub(super) fn recover(directory: &Path) -> io::Result<()> {
    let old = with_suffix(directory, OLD);
    if old.try_exists()? {
        if !directory.try_exists()? {
            fs::rename(&old, directory)?;
        }
        // The names are on the disk before the files of the old checkpoint are removed.
        sync(parent(directory))?;
        remove_files(&old)?;
    }
    remove_files(&with_suffix(directory, PARTIAL))
}

/// Removes a checkpoint.
pub(super) fn remove(directory: &Path) -> Result<(), Error> {
    let partial = with_suffix(directory, PARTIAL);
    let removed = remove_files(&partial)
        .and_then(|()| fs::rename(directory, &partial))
        .and_then(|()| sync(parent(directory)))
        .and_then(|()| remove_files(&partial));
    removed.map_err(|error| Error::storage(directory.display(), error))
}

/// Removes the files of a checkpoint that could not be completed, because the run may need their
/// space.
pub(crate) fn discard(directory: &Path) {
    // An error is dropped, because the next checkpoint removes the files first.
    _ = remove_files(&with_suffix(directory, PARTIAL));
}

fn remove_files(directory: &Path) -> io::Result<()> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Gives a checkpoint a second name. Its files there are links to the same bytes, or copies if the
/// file system has no links.
pub(crate) fn link(from: &Path, to: &Path) -> Result<(), Error> {
    let partial = with_suffix(to, PARTIAL);
    let linked = recover(to).and_then(|()| link_files(from, &partial));
    linked.and_then(|()| publish(&partial, to)).map_err(|error| Error::storage(to.display(), error))
}

fn link_files(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let from = entry.path();
        let to = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            link_files(&from, &to)?;
        } else if fs::hard_link(&from, &to).is_err() {
            fs::copy(&from, &to)?;
            sync(&to)?;
        }
    }
    sync(to)
}
