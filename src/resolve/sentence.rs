//! How the model that a config names makes embeddings of sequences, and its prompts.

use std::path::Path;

use crate::config::Config;
use crate::error::Error;
use crate::hf::{self, Prompts};
use crate::models::{EmbeddingPooling, Head, MOST_DENSE, Shape};

/// How a model makes embeddings: as the config says, else as `modules.json` says.
///
/// # Errors
/// `modules.json` has a module that is not built, or cannot be read.
pub(super) fn embedding(config: &Config, shape: &Shape) -> Result<Head, Error> {
    let model = &config.model;
    let of = |directory: Option<&Path>| directory.map_or(Ok(None), hf::sentence_modules);
    let own = of(config.train.adapters())?;
    let own = own.map_or_else(|| of(model.path.as_deref()), |own| Ok(Some(own)))?;
    let usual = if shape.causal { EmbeddingPooling::Last } else { EmbeddingPooling::Mean };
    let pooling = model.pooling.or(own.map(|own| own.pooling)).unwrap_or(usual);
    let normalise = model.normalise.or(own.map(|own| own.normalises)).unwrap_or(true);
    let dense = own.map_or([None; MOST_DENSE], |own| own.dense);
    let width = dense.iter().flatten().last().map_or(shape.hidden, |last| last.outputs);
    if width != shape.hidden {
        let path = model.path.as_deref().unwrap_or(Path::new("modules.json"));
        let what = format!(
            "its Dense modules make embeddings of {width} numbers: only hidden_size, which is {}, \
             is built",
            shape.hidden
        );
        return Err(Error::bad_model(path.display(), what));
    }
    let include_prompt = model.include_prompt.or(own.map(|own| own.includes_prompt));
    let include_prompt = include_prompt.unwrap_or(true);
    prompts_of(config)?;
    Ok(Head::Embedding { pooling, dense, normalise, include_prompt })
}

/// The directories that a config's model is read from, those of adapters first.
pub(crate) fn directories_of(config: &Config) -> Vec<&Path> {
    config.train.adapters().into_iter().chain(config.model.path.as_deref()).collect()
}

/// The prompts that a directory's model always has in sentence-transformers: where it has no text
/// of such a name, an empty one.
const ALWAYS: [&str; 2] = ["query", "document"];

/// The prompts of a model that makes embeddings: those of its directories, and those of the config.
///
/// # Errors
/// A directory's cannot be read, or there is none of the default's name.
pub(crate) fn prompts_of(config: &Config) -> Result<Prompts, Error> {
    let mut prompts = Prompts::default();
    let mut of_default = None;
    for directory in directories_of(config).into_iter().rev() {
        let own = hf::read_prompts(directory)?;
        of_default = own.default.as_ref().map(|_| directory).or(of_default);
        prompts.default = own.default.or(prompts.default);
        prompts.texts.extend(own.texts);
    }
    prompts.texts.extend(config.model.prompts.clone());
    if let Some(name) = &config.model.default_prompt {
        of_default = None;
        prompts.default = (!name.is_empty()).then(|| name.clone());
    }
    let is_empty = |name: &String| of_default.is_some() && ALWAYS.contains(&&name[..]);
    if let Some(name) = prompts.default.clone().filter(is_empty) {
        prompts.texts.entry(name).or_default();
    }
    let Some(name) = prompts.default.as_ref().filter(|name| !prompts.texts.contains_key(*name))
    else {
        return Ok(prompts);
    };
    let names: Vec<&str> = prompts.texts.keys().map(String::as_str).collect();
    let known = match names[..] {
        [] => "it has none (model.prompts adds some)".into(),
        _ => format!("it has {}", names.join(", ")),
    };
    let what = format!(
        "is {name:?}, and the model has no prompt of that name: {known}. For no prompt, set \
         model.default_prompt = \"\""
    );
    Err(match of_default {
        Some(directory) => {
            Error::bad_model(directory.display(), format_args!("default_prompt_name {what}"))
        }
        None => Error::config("model.default_prompt", what),
    })
}
