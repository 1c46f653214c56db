//! Folders that survive a power loss. An entry is on the disk once the folder that has it is
//! synced.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// Makes a folder and the folders above it, and waits until they are on the disk.
pub(crate) fn create(path: &Path) -> io::Result<()> {
    // A folder that exists is synced, too: a run that was killed may have made it.
    let mut made = vec![path];
    for above in path.ancestors().skip(1).filter(|above| !above.as_os_str().is_empty()) {
        if above.try_exists()? {
            break;
        }
        made.push(above);
    }
    fs::create_dir_all(path)?;
    made.into_iter().rev().try_for_each(|folder| match sync(parent(folder)) {
        // A folder that this process may enter and not list can only be synced by its owner.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
        synced => synced,
    })
}

/// Waits until a folder's entries, or a file's bytes, are on the disk.
pub(crate) fn sync(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// True if two paths lead to one file, which may not exist yet.
pub(crate) fn is_same(one: &Path, other: &Path) -> bool {
    let real = |path: &Path| -> Option<PathBuf> {
        path.canonicalize().ok().or_else(|| {
            let name = path.file_name()?;
            Some(parent(path).canonicalize().ok()?.join(name))
        })
    };
    one == other || real(one).is_some_and(|one| real(other) == Some(one))
}

/// The folder that contains a path.
pub(crate) fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) => parent,
        None => path,
    }
}
