//! Directories of sentence-transformers: the modules that follow the transformer, which pool its
//! hidden states, multiply embeddings by matrices, and scale them to length 1.
//!
//! Two layouts are read: that of versions 2 to 5, and that of version 6. The first is written,
//! because all versions read it.

use std::io;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::json;
use super::prompts::{Prompts, write_prompts};
use crate::error::Error;
use crate::folder;
use crate::models::{DENSE_FOLDERS, DenseModule, EmbeddingPooling, Head, MOST_DENSE, Shape};

const MODULES: &str = "modules.json";
const POOLING: &str = "1_Pooling";
const SETTINGS: &str = "sentence_bert_config.json";

/// What a directory's modules make of hidden states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SentenceModules {
    pub(crate) pooling: EmbeddingPooling,
    pub(crate) dense: [Option<DenseModule>; MOST_DENSE],
    /// Whether embeddings are scaled to length 1.
    pub(crate) normalises: bool,
    /// Whether the tokens of a prompt count for the embedding.
    pub(crate) includes_prompt: bool,
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
    let normalises = kinds.last() == Some(&"Normalize");
    let last = kinds.len() - usize::from(normalises);
    let is_built = matches!(kinds[..last], ["Transformer", "Pooling", ref dense @ ..]
        if dense.len() <= MOST_DENSE && dense.iter().all(|kind| *kind == "Dense"));
    if !is_built {
        return Err(refuse(format!(
            "its modules are {}: only Transformer, Pooling, up to two of Dense, and perhaps \
             Normalize are built",
            kinds.join(", ")
        )));
    }
    let mut dense = [None; MOST_DENSE];
    for ((module, folder), dense) in modules[2..last].iter().zip(DENSE_FOLDERS).zip(&mut dense) {
        let path = module.get("path").and_then(Value::as_str).unwrap_or(folder);
        if path != folder {
            return Err(refuse(format!("the folder of Dense is {path}: only {folder} is read")));
        }
        let of_dense = directory.join(folder).join("config.json");
        let read = dense_of(&json::read(&of_dense)?);
        *dense = Some(read.map_err(|what| Error::bad_model(of_dense.display(), what))?);
    }
    let settings = directory.join(SETTINGS);
    if settings.is_file() {
        let settings: Map<String, Value> = json::read(&settings)?;
        if settings.get("do_lower_case") == Some(&Value::Bool(true)) {
            let what = "do_lower_case is true: only texts as they are, and what tokenizer.json \
                        makes of them, are built";
            return Err(Error::bad_model(directory.join(SETTINGS).display(), what));
        }
        if settings.get("modality_config").is_some_and(|all| all.get("message").is_some()) {
            let what = "modality_config has message: sentence-transformers then puts texts into \
                        the chat template, which is not built. Remove message from \
                        modality_config if the model embeds plain texts";
            return Err(Error::bad_model(directory.join(SETTINGS).display(), what));
        }
    }
    let path = modules[1].get("path").and_then(Value::as_str).unwrap_or(POOLING);
    let of_pooling = directory.join(path).join("config.json");
    let keys = json::read(&of_pooling)?;
    let refuse = |what| Error::bad_model(of_pooling.display(), what);
    let pooling = pooling_of(&keys).map_err(refuse)?;
    let includes_prompt = includes_prompt(&keys).map_err(refuse)?;
    Ok(Some(SentenceModules { pooling, dense, normalises, includes_prompt }))
}

/// The activation function of a dense module that has none.
const IDENTITY: &str = "torch.nn.modules.linear.Identity";

/// The dense module of these settings.
fn dense_of(keys: &Map<String, Value>) -> Result<DenseModule, String> {
    let activation = keys.get("activation_function").and_then(Value::as_str);
    let activation = activation.unwrap_or("torch.nn.modules.activation.Tanh");
    if activation != IDENTITY {
        return Err(format!("activation_function is {activation}: only {IDENTITY} is built"));
    }
    if keys.get("use_residual") == Some(&Value::Bool(true)) {
        return Err("use_residual is true: only false is built".into());
    }
    for key in ["module_input_name", "module_output_name"] {
        let name = keys.get(key).and_then(Value::as_str).unwrap_or(EMBEDDING);
        if name != EMBEDDING {
            return Err(format!("{key} is {name}: only {EMBEDDING} is built"));
        }
    }
    let outputs = keys.get("out_features").and_then(Value::as_u64).unwrap_or_default();
    if outputs == 0 || outputs > 1 << 20 {
        return Err(format!("out_features is {outputs}: it must be 1 to 1048576"));
    }
    let bias = keys.get("bias").and_then(Value::as_bool).unwrap_or(true);
    Ok(DenseModule { outputs: outputs as usize, bias })
}

/// The name under which modules find embeddings.
const EMBEDDING: &str = "sentence_embedding";

/// The settings of a dense module with these inputs.
fn of_dense(inputs: usize, module: DenseModule) -> Value {
    json!({
        "in_features": inputs,
        "out_features": module.outputs,
        "bias": module.bias,
        "activation_function": IDENTITY,
        "module_input_name": EMBEDDING,
        "module_output_name": EMBEDDING,
    })
}

/// The pooling of a module's settings.
fn pooling_of(keys: &Map<String, Value>) -> Result<EmbeddingPooling, String> {
    let named = keys.get("pooling_mode").and_then(Value::as_str);
    let is_true = |key: &str| keys.get(key) == Some(&Value::Bool(true));
    let found: Vec<_> = match named {
        Some(named) => MODES.iter().filter(|(_, name, _)| *name == named).collect(),
        None => MODES.iter().filter(|(key, ..)| is_true(key)).collect(),
    };
    match found[..] {
        [(_, _, Some(pooling))] => Ok(*pooling),
        _ => {
            let has: Vec<&str> = found.iter().map(|(_, name, _)| *name).collect();
            let has = named.map_or_else(|| has.join(" and "), str::to_string);
            Err(format!("pooling is {has:?}: one of mean, cls and lasttoken is built"))
        }
    }
}

/// Whether a module's settings count the tokens of a prompt.
fn includes_prompt(keys: &Map<String, Value>) -> Result<bool, String> {
    match keys.get("include_prompt") {
        None => Ok(true),
        Some(Value::Bool(includes)) => Ok(*includes),
        Some(other) => Err(format!("include_prompt is {other}: it must be true or false")),
    }
}

/// What is written of a model that makes embeddings beside its shape.
pub(crate) struct OfSentences<'a> {
    /// The most tokens of a text.
    pub(crate) positions: usize,
    pub(crate) prompts: &'a Prompts,
    /// The directories that the model was read from.
    pub(crate) from: &'a [&'a Path],
}

/// Writes the modules and the prompts of a model that makes embeddings, and waits until they are on
/// the disk. Other models have none.
pub(crate) fn write_sentence_modules(
    directory: &Path,
    shape: &Shape,
    of: &OfSentences<'_>,
) -> Result<(), Error> {
    let Head::Embedding { pooling, normalise, include_prompt, .. } = shape.head else {
        return Ok(());
    };
    write_prompts(directory, of.from, of.prompts)?;
    let failed = |error: io::Error| Error::storage(directory.display(), error);
    let mut folders = vec![("", "Transformer"), (POOLING, "Pooling")];
    let dense: Vec<DenseModule> = shape.dense().collect();
    folders.extend(DENSE_FOLDERS[..dense.len()].iter().map(|folder| (*folder, "Dense")));
    let last = format!("{}_Normalize", folders.len());
    folders.extend(normalise.then_some((&last[..], "Normalize")));
    let module = |(at, &(path, kind)): (usize, &(&str, &str))| {
        let of = format!("sentence_transformers.models.{kind}");
        json!({ "idx": at, "name": at.to_string(), "path": path, "type": of })
    };
    let modules: Vec<Value> = folders.iter().enumerate().map(module).collect();
    for (folder, _) in &folders[1..] {
        folder::create(&directory.join(folder)).map_err(failed)?;
    }
    let mut of_pooling =
        json!({ "word_embedding_dimension": shape.hidden, "include_prompt": include_prompt });
    for (key, _, mode) in MODES {
        of_pooling[key] = (mode == Some(pooling)).into();
    }
    let settings = json!({ "max_seq_length": of.positions, "do_lower_case": false });
    let mut inputs = shape.hidden;
    for (folder, module) in DENSE_FOLDERS.iter().zip(dense) {
        json::write(&directory.join(folder).join("config.json"), &of_dense(inputs, module))?;
        inputs = module.outputs;
    }
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
