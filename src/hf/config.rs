//! `config.json`: read into a shape, and written back over the keys it had.

use std::fs;
use std::path::Path;

use serde_json::Value;

use super::carry::check_tokenizer;
use crate::error::Error;
use crate::models::{Shape, families};

/// A directory's `config.json`.
///
/// # Errors
/// The file is not there, or is no JSON.
pub(crate) fn read_config(directory: &Path) -> Result<Value, Error> {
    let path = directory.join("config.json");
    let refuse = |what: String| Error::refused(format_args!("{}: {what}", path.display()));
    let text = fs::read_to_string(&path).map_err(|error| refuse(error.to_string()))?;
    serde_json::from_str(&text).map_err(|error| refuse(error.to_string()))
}

/// The shape that a directory's `config.json` describes.
///
/// # Errors
/// As [`read_config`]; or it is of no family that is known, or asks for what is not built.
pub(crate) fn read_shape(directory: &Path) -> Result<Shape, Error> {
    let config = read_config(directory)?;
    let at = directory.join("config.json");
    let shape = families::read(&config);
    let shape = shape.map_err(|what| Error::refused(format_args!("{}: {what}", at.display())))?;
    check_tokenizer(directory, shape.vocabulary)?;
    Ok(shape)
}

/// Writes a directory's `config.json`, as transformers reads it: over the keys of another, which
/// may be null.
///
/// # Errors
/// The file cannot be written.
pub(crate) fn write_config(directory: &Path, shape: &Shape, over: &Value) -> Result<(), Error> {
    let path = directory.join("config.json");
    let config = families::write(shape, over);
    let text = serde_json::to_string_pretty(&config).expect("it is plain JSON");
    let written = fs::write(&path, text + "\n");
    written.map_err(|error| Error::failed(format_args!("{}: {error}", path.display())))
}
