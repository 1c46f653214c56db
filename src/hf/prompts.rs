//! The prompts of a directory of sentence-transformers: texts by name that come before a text.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::json;
use crate::error::Error;

const FILE: &str = "config_sentence_transformers.json";
const PROMPTS: &str = "prompts";
const DEFAULT: &str = "default_prompt_name";

/// The prompts of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Prompts {
    pub(crate) texts: BTreeMap<String, String>,
    /// The name of the prompt that comes before a text unless another is asked for.
    pub(crate) default: Option<String>,
}

/// The prompts of a directory; none if it has no such file.
///
/// # Errors
/// The file cannot be read, or has prompts that are no texts.
pub(crate) fn read_prompts(directory: &Path) -> Result<Prompts, Error> {
    let keys = keys_of(directory)?;
    let refuse = |what: String| Error::bad_model(directory.join(FILE).display(), what);
    let mut texts = BTreeMap::new();
    match keys.get(PROMPTS) {
        None | Some(Value::Null) => {}
        Some(Value::Object(prompts)) => {
            for (name, text) in prompts {
                let text = match text {
                    Value::Null => "",
                    Value::String(text) => text,
                    _ => return Err(refuse(format!("{PROMPTS}: {name} is {text}, and no text"))),
                };
                texts.insert(name.clone(), text.to_string());
            }
        }
        Some(prompts) => {
            return Err(refuse(format!("{PROMPTS} is {prompts}: it must be texts by name")));
        }
    }
    let default = match keys.get(DEFAULT) {
        None | Some(Value::Null) => None,
        Some(Value::String(name)) => Some(name.clone()),
        Some(name) => return Err(refuse(format!("{DEFAULT} is {name}, and no name"))),
    };
    Ok(Prompts { texts, default })
}

/// Writes the prompts of a model, if it has any, with the other settings of the directories that
/// it was read from. The first directory that has settings is taken.
pub(super) fn write_prompts(to: &Path, from: &[&Path], prompts: &Prompts) -> Result<(), Error> {
    let mut keys = Map::new();
    for from in from {
        if keys.is_empty() {
            keys = keys_of(from)?;
        }
    }
    if *prompts == Prompts::default() && keys.is_empty() {
        return Ok(());
    }
    keys.insert(PROMPTS.into(), json!(prompts.texts));
    keys.insert(DEFAULT.into(), json!(prompts.default));
    json::write(&to.join(FILE), &keys.into())
}

/// The settings of a directory.
fn keys_of(directory: &Path) -> Result<Map<String, Value>, Error> {
    let at = directory.join(FILE);
    if at.is_file() { json::read(&at) } else { Ok(Map::new()) }
}
