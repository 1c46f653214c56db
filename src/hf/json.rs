//! JSON files of a model's directory.

use std::fs;
use std::path::Path;

use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::error::Error;
use crate::{folder, lfs};

/// Reads a file. Some editors begin a file with a byte order mark, which is no JSON.
pub(super) fn read<T: DeserializeOwned>(path: &Path) -> Result<T, Error> {
    let text = fs::read_to_string(path).map_err(|error| Error::bad_model(path.display(), error))?;
    let json = text.strip_prefix('\u{feff}').unwrap_or(&text);
    serde_json::from_str(json).map_err(|error| match lfs::is_pointer(text.as_bytes()) {
        true => Error::bad_model(path.display(), lfs::INSTEAD),
        false => Error::bad_model(path.display(), error),
    })
}

/// Writes a file, and waits until it is on the disk.
pub(super) fn write(path: &Path, value: &Value) -> Result<(), Error> {
    let text = serde_json::to_string_pretty(value).expect("it is plain JSON");
    let written = fs::write(path, text).and_then(|()| folder::sync(path));
    written.map_err(|error| Error::storage(path.display(), error))
}
