//! Files that a run writes once, at its end.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Checks that a file can be written, and does not change its content.
pub(crate) fn may_write(path: &Path) -> io::Result<()> {
    OpenOptions::new().append(true).create(true).open(path).map(drop)
}

/// Checks that there is room for a text of this length beside a file, where [`replace`] writes
/// first.
///
/// # Errors
/// There is no room, or the folder cannot be written.
pub fn has_room(path: &Path, like: &str) -> io::Result<()> {
    let beside = beside(&target(path));
    let written = write(&beside, like);
    let removed = fs::remove_file(&beside);
    written.and(removed)
}

/// Replaces a file's content as a whole, also behind a symbolic link: a reader sees the old content
/// or the new. A device or a pipe is written to.
///
/// # Errors
/// The file cannot be written; its old content is kept.
pub fn replace(path: &Path, text: &str) -> io::Result<()> {
    let path = &target(path);
    if path.exists() && !path.is_file() {
        return OpenOptions::new().write(true).open(path)?.write_all(text.as_bytes());
    }
    let beside = beside(path);
    let written = write(&beside, text).and_then(|()| {
        if let Ok(there) = fs::metadata(path) {
            fs::set_permissions(&beside, there.permissions())?;
        }
        fs::rename(&beside, path)
    });
    written.inspect_err(|_| _ = fs::remove_file(&beside))
}

/// The path behind all symbolic links.
fn target(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_path_buf()) // there is nothing yet
}

fn beside(path: &Path) -> PathBuf {
    let mut beside = path.as_os_str().to_owned();
    beside.push(".partial");
    beside.into()
}

/// Writes a file, and waits until it is on the disk: some disks report only then that they are
/// full.
fn write(path: &Path, text: &str) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()
}
