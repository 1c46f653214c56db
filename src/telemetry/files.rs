//! Files that a run writes once, at its end.

use std::fs::{self, OpenOptions};
use std::io;
use std::path::Path;

/// Checks that a file can be written, and leaves its content as it is.
pub(crate) fn may_write(path: &Path) -> io::Result<()> {
    OpenOptions::new().append(true).create(true).open(path).map(drop)
}

/// Replaces a file's content as a whole, wherever a link leads: a reader sees the old content or
/// the new. What is no regular file is written to.
pub(crate) fn replace(path: &Path, text: &str) -> io::Result<()> {
    let path = &path.canonicalize()?;
    if !path.is_file() {
        return fs::write(path, text);
    }
    let mut beside = path.as_os_str().to_owned();
    beside.push(".partial");
    fs::write(&beside, text)?;
    fs::rename(&beside, path)
}
