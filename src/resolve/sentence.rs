//! How the model that a config names makes embeddings of sequences.

use std::path::Path;

use crate::config::Config;
use crate::error::Error;
use crate::hf;
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
    Ok(Head::Embedding { pooling, dense, normalise })
}
