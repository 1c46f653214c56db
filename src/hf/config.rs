//! `config.json`: read as a model's shape, and written back with all keys that l2l does not know.

use std::fs;
use std::path::Path;

use serde_json::Value;

use super::json;
use crate::error::Error;
use crate::models::{Shape, families};

/// Reads a directory's `config.json`.
pub(crate) fn read_config(directory: &Path) -> Result<Value, Error> {
    json::read(&directory.join("config.json"))
}

/// The shape that a directory's `config.json` describes.
///
/// # Errors
/// As [`read_config`]; or the family is unknown, or the model needs something that l2l does not
/// have.
pub(crate) fn read_shape(directory: &Path) -> Result<Shape, Error> {
    let config = read_config(directory)?;
    let at = directory.join("config.json");
    let shape = families::read(&config);
    shape.map_err(|what| Error::bad_model(at.display(), what))
}

/// The names of the classes in a `config.json`, in the order of their numbers. Empty when the
/// classes have no names.
pub(crate) fn label_names(config: &Value) -> Vec<String> {
    let names = config["id2label"].as_object();
    let name = |class: usize| names?.get(&class.to_string())?.as_str().map(str::to_string);
    let names: Vec<String> = (0..names.map_or(0, serde_json::Map::len)).map_while(name).collect();
    // transformers writes these names for classes without names.
    let is_generic =
        names.iter().enumerate().all(|(class, name)| *name == format!("LABEL_{class}"));
    if is_generic { Vec::new() } else { names }
}

/// The key of a `config.json` that says that the model's tokens are bytes.
const BYTES_KEY: &str = "l2l_tokens";

/// Whether the tokens of a directory's model are bytes.
pub(crate) fn reads_bytes(directory: &Path) -> bool {
    read_config(directory).is_ok_and(|config| config[BYTES_KEY] == "bytes")
}

/// Writes into a `config.json` that the model's tokens are bytes.
pub(crate) fn mark_byte_tokens(config: &mut Value) {
    config[BYTES_KEY] = "bytes".into();
}

/// The names of the classes of a directory's model. Empty when they have none.
pub fn labels(directory: &Path) -> Vec<String> {
    read_config(directory).map_or_else(|_| Vec::new(), |config| label_names(&config))
}

/// The tokens that end generated text, from `config.json` and `generation_config.json`. The
/// tokenizer may name another.
pub fn ends(directory: &Path) -> Vec<u32> {
    let mut ends = Vec::new();
    for file in ["config.json", "generation_config.json"] {
        let config: Value = json::read(&directory.join(file)).unwrap_or_default();
        let id = &config["eos_token_id"];
        let ids = id.as_array().map_or(std::slice::from_ref(id), Vec::as_slice);
        ends.extend(ids.iter().filter_map(Value::as_u64).map(|id| id as u32));
    }
    ends
}

/// Writes the names of the classes into a `config.json`.
pub(crate) fn set_label_names(config: &mut Value, names: &[String]) {
    let by_id = names.iter().enumerate().map(|(id, name)| (id.to_string(), Value::from(&**name)));
    let by_name = names.iter().enumerate().map(|(id, name)| (name.clone(), Value::from(id)));
    config["id2label"] = Value::Object(by_id.collect());
    config["label2id"] = Value::Object(by_name.collect());
}

/// Writes a directory's `config.json` for transformers. Other keys are kept from `source`, the
/// config that the model was read with, which may be null.
pub(crate) fn write_config(directory: &Path, shape: &Shape, source: &Value) -> Result<(), Error> {
    let path = directory.join("config.json");
    let config = families::write(shape, source);
    let text = serde_json::to_string_pretty(&config).expect("it is plain JSON");
    let written = fs::write(&path, text + "\n");
    written.map_err(|error| Error::storage(path.display(), error))
}
