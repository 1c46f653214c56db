//! Directories of sentence-transformers: the modules that follow the transformer, which pool its
//! hidden states and scale embeddings to length 1.
//!
//! Two layouts are read: that of versions 2 to 5, and that of version 6. The first is written,
//! because all versions read it.

use std::io;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::json;
use crate::error::Error;
use crate::folder;
use crate::models::{EmbeddingPooling, Head, Shape};

const MODULES: &str = "modules.json";
const POOLING: &str = "1_Pooling";
const NORMALISE: &str = "2_Normalize";
const SETTINGS: &str = "sentence_bert_config.json";

/// What a directory's modules make of hidden states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SentenceModules {
    pub(crate) pooling: EmbeddingPooling,
    /// Whether embeddings are scaled to length 1.
    pub(crate) normalises: bool,
}

/// The keys of the pooling modes, up to version 5, and their names since.
const MODES: [(&str, &str, Option<EmbeddingPooling>); 6] = [
    ("pooling_mode_mean_tokens", "mean", Some(EmbeddingPooling::Mean)),
    ("pooling_mode_cls_token", "cls", Some(EmbeddingPooling::Cls)),
    ("pooling_mode_lasttoken", "lasttoken", Some(EmbeddingPooling::Last)),
    ("pooling_mode_max_tokens", "max", None),
    ("pooling_mode_mean_sqrt_len_tokens", "mean_sqrt_len_tokens", None),
    ("pooling_mode_weightedmean_tokens", "weightedmean", None),
];

/// The modules of a directory; `None`: it has no `modules.json`.
///
/// # Errors
/// A file cannot be read, or names a module, a pooling or a setting that is not built.
pub(crate) fn sentence_modules(directory: &Path) -> Result<Option<SentenceModules>, Error> {
    let at = directory.join(MODULES);
    if !at.is_file() {
        return Ok(None);
    }
    let refuse = |what: String| Error::bad_model(at.display(), what);
    let modules: Vec<Map<String, Value>> = json::read(&at)?;
    let kind = |module: &Map<String, Value>| {
        let kind = module.get("type").and_then(Value::as_str).unwrap_or_default();
        kind.rsplit('.').next().unwrap_or_default().to_string()
    };
    let kinds: Vec<String> = modules.iter().map(kind).collect();
    let kinds: Vec<&str> = kinds.iter().map(String::as_str).collect();
    let normalises = match kinds[..] {
        ["Transformer", "Pooling"] => false,
        ["Transformer", "Pooling", "Normalize"] => true,
        _ => {
            return Err(refuse(format!(
                "its modules are {}: only Transformer, Pooling and perhaps Normalize are built",
                kinds.join(", ")
            )));
        }
    };
    let settings = directory.join(SETTINGS);
    if settings.is_file() {
        let settings: Map<String, Value> = json::read(&settings)?;
        if settings.get("do_lower_case") == Some(&Value::Bool(true)) {
            let what = "do_lower_case is true: only texts as they are, and what tokenizer.json \
                        makes of them, are built";
            return Err(Error::bad_model(directory.join(SETTINGS).display(), what));
        }
    }
    let path = modules[1].get("path").and_then(Value::as_str).unwrap_or(POOLING);
    let of_pooling = directory.join(path).join("config.json");
    let pooling = pooling_of(&json::read(&of_pooling)?);
    let pooling = pooling.map_err(|what| Error::bad_model(of_pooling.display(), what))?;
    Ok(Some(SentenceModules { pooling, normalises }))
}

/// The pooling of a module's settings.
fn pooling_of(keys: &Map<String, Value>) -> Result<EmbeddingPooling, String> {
    let named = keys.get("pooling_mode").and_then(Value::as_str);
    let is_true = |key: &str| keys.get(key) == Some(&Value::Bool(true));
    let found: Vec<_> = match named {
        Some(named) => MODES.iter().filter(|(_, name, _)| *name == named).collect(),
        None => MODES.iter().filter(|(key, ..)| is_true(key)).collect(),
    };
    match (&found[..], keys.get("include_prompt")) {
        (_, Some(Value::Bool(false))) => {
            Err("include_prompt is false: only embeddings of all tokens are built".into())
        }
        ([(_, _, Some(pooling))], _) => Ok(*pooling),
        _ => {
            let has: Vec<&str> = found.iter().map(|(_, name, _)| *name).collect();
            let has = named.map_or_else(|| has.join(" and "), str::to_string);
            Err(format!("pooling is {has:?}: one of mean, cls and lasttoken is built"))
        }
    }
}

/// Writes the modules of a model that makes embeddings of texts of up to `positions` tokens, and
/// waits until they are on the disk. Other models have none.
pub(crate) fn write_sentence_modules(
    directory: &Path,
    shape: &Shape,
    positions: usize,
) -> Result<(), Error> {
    let Head::Embedding { pooling, normalise } = shape.head else { return Ok(()) };
    let failed = |error: io::Error| Error::storage(directory.display(), error);
    let mut folders = vec![("", "Transformer"), (POOLING, "Pooling")];
    folders.extend(normalise.then_some((NORMALISE, "Normalize")));
    let module = |(at, &(path, kind)): (usize, &(&str, &str))| {
        let of = format!("sentence_transformers.models.{kind}");
        json!({ "idx": at, "name": at.to_string(), "path": path, "type": of })
    };
    let modules: Vec<Value> = folders.iter().enumerate().map(module).collect();
    for (folder, _) in &folders[1..] {
        folder::create(&directory.join(folder)).map_err(failed)?;
    }
    let mut of_pooling =
        json!({ "word_embedding_dimension": shape.hidden, "include_prompt": true });
    for (key, _, mode) in MODES {
        of_pooling[key] = (mode == Some(pooling)).into();
    }
    let settings = json!({ "max_seq_length": positions, "do_lower_case": false });
    let all = [
        (directory.join(POOLING).join("config.json"), of_pooling),
        (directory.join(SETTINGS), settings),
        (directory.join(MODULES), modules.into()),
    ];
    for (path, value) in all {
        json::write(&path, &value)?;
    }
    for (folder, _) in &folders {
        folder::sync(&directory.join(folder)).map_err(failed)?;
    }
    Ok(())
}
