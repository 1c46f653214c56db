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
    let refuse = |what: String| Error::bad_model(path.display(), what);
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
    let shape = shape.map_err(|what| Error::bad_model(at.display(), what))?;
    check_tokenizer(directory, shape.vocabulary)?;
    Ok(shape)
}

/// What a `config.json` calls its classes, by number; none when it does not say.
pub(crate) fn label_names(config: &Value) -> Vec<String> {
    let names = config["id2label"].as_object();
    let of = |class: usize| names?.get(&class.to_string())?.as_str().map(str::to_string);
    let names: Vec<String> = (0..names.map_or(0, serde_json::Map::len)).map_while(of).collect();
    // What transformers calls classes that nobody named.
    let is_generic =
        names.iter().enumerate().all(|(class, name)| *name == format!("LABEL_{class}"));
    if is_generic { Vec::new() } else { names }
}

/// Says in a model's `config.json` that its tokens are bytes.
const BYTES_KEY: &str = "l2l_tokens";

/// True when a directory's model was made to read bytes.
pub(crate) fn reads_bytes(directory: &Path) -> bool {
    read_config(directory).is_ok_and(|config| config[BYTES_KEY] == "bytes")
}

/// Lets a `config.json` say so.
pub(crate) fn let_read_bytes(config: &mut Value) {
    config[BYTES_KEY] = "bytes".into();
}

/// What the classes of a directory's model are called; none when it does not say.
pub fn labels(directory: &Path) -> Vec<String> {
    read_config(directory).map_or_else(|_| Vec::new(), |config| label_names(&config))
}

/// Tokens that end what a directory's model writes, beside its tokenizer's.
pub fn ends(directory: &Path) -> Vec<u32> {
    let mut ends = Vec::new();
    for file in ["config.json", "generation_config.json"] {
        let text = fs::read_to_string(directory.join(file)).unwrap_or_default();
        let config: Value = serde_json::from_str(&text).unwrap_or_default();
        let of = &config["eos_token_id"];
        let several = of.as_array().map_or(std::slice::from_ref(of), Vec::as_slice);
        ends.extend(several.iter().filter_map(Value::as_u64).map(|id| id as u32));
    }
    ends
}

/// Lets a `config.json` call its classes so.
pub(crate) fn name_labels(config: &mut Value, names: &[String]) {
    let by_id = names.iter().enumerate().map(|(id, name)| (id.to_string(), Value::from(&**name)));
    let by_name = names.iter().enumerate().map(|(id, name)| (name.clone(), Value::from(id)));
    config["id2label"] = Value::Object(by_id.collect());
    config["label2id"] = Value::Object(by_name.collect());
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
    written.map_err(|error| Error::storage(path.display(), error))
}
