//! Folders that are there after a power loss: an entry is on the disk when the folder that it is in
//! was synced.

use std::fs::{self, File};
use std::io;
use std::path::Path;

/// Makes a folder, and those above it, and waits until they are on the disk.
///
/// # Errors
/// It cannot be made, or the disk fails.
pub(crate) fn create(path: &Path) -> io::Result<()> {
    let mut made = vec![path]; // also if it is there: a run that was killed may have made it
    for above in path.ancestors().skip(1).filter(|above| !above.as_os_str().is_empty()) {
        if above.try_exists()? {
            break;
        }
        made.push(above);
    }
    fs::create_dir_all(path)?;
    made.into_iter().rev().try_for_each(|folder| match sync(parent(folder)) {
        // It may be entered and not listed: then nobody but its owner can sync it.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
        synced => synced,
    })
}

/// Waits until a folder's entries are on the disk, or a file.
///
/// # Errors
/// The disk fails.
pub(crate) fn sync(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// The folder that a path is in.
pub(crate) fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) => parent,
        None => path,
    }
}
