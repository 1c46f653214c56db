//! The weights that a config's model begins with.

use crate::config::{Config, ModelConfig};
use crate::eps::Eps;
use crate::error::Error;
use crate::hf::{self, Load, Sealed};
use crate::models::adapters::is_of_adapter;
use crate::models::{BlockTensors, Model};

/// Fills the EPS with the weights of the directory that the config names, and with the adapters
/// that it names. All other tensors get random numbers. Returns the names of tensors that neither
/// directory has. Seals of the directories are checked before, unless the config allows changed
/// files.
///
/// # Errors
/// A directory is not as its seal says, or its weights are not those of the model.
pub(crate) fn load_first(
    config: &Config,
    model: &Model,
    eps: &Eps,
    how: Load,
) -> Result<Vec<String>, Error> {
    let Some(adapters) = config.train.adapters() else {
        return load_base(config, model, eps, how, &[]);
    };
    if !config.model.unsealed {
        hf::check_seal(adapters, Sealed::Model)?;
    }
    let saved = hf::saved_tensors(adapters)?;
    let saved: Vec<String> = saved.iter().map(|name| model.shape.name_of(name)).collect();
    let missing = load_base(config, model, eps, how, &saved)?;
    hf::load_adapters(adapters, &saved, model, eps, Load::to_use(!config.model.unsealed))?;
    Ok(missing)
}

/// Fills the EPS as [`load_first`], but without adapters. Tensors that adapters bring later
/// (`brought`) are not read.
fn load_base(
    config: &Config,
    model: &Model,
    eps: &Eps,
    how: Load,
    brought: &[String],
) -> Result<Vec<String>, Error> {
    let ModelConfig { path, random_weights, unsealed, .. } = &config.model;
    let path = path.as_ref().filter(|_| !random_weights);
    if let Some(path) = path.filter(|_| !unsealed) {
        hf::check_seal(path, Sealed::Model)?;
    }
    let seed = config.step.seed;
    let Some(path) = path else {
        eps.randomise(model, seed, |_| true)?;
        return Ok(Vec::new());
    };
    let missing = hf::load(path, model, eps, how, brought)?;
    let lacks = |name: &String| missing.contains(name) || brought.contains(name);
    eps.randomise(model, seed, |tensor| is_of_adapter(&tensor.name) || lacks(&tensor.name))?;
    Ok(missing)
}

/// Refuses tensors that the model's directory does not have (`missing`) and that a run with
/// adapters would not train: they would stay random, and no checkpoint of adapters would have them.
///
/// # Errors
/// The names of these tensors.
pub(crate) fn check_missing(
    config: &Config,
    model: &Model,
    missing: &[String],
) -> Result<(), Error> {
    let is_trained = |name: &String| {
        let mut trained = model.blocks.iter().flat_map(BlockTensors::trained);
        trained.any(|tensor| tensor.name == *name)
    };
    let lost: Vec<&str> =
        missing.iter().filter(|name| !is_trained(name)).map(|name| &name[..]).collect();
    let Some(path) = config.model.path.as_ref().filter(|_| !lost.is_empty()) else { return Ok(()) };
    if config.train.lora.is_none() {
        return Ok(()); // Its checkpoints have all tensors.
    }
    let what = format_args!(
        "it lacks {}, which would begin at random and not be trained, and a checkpoint of adapters \
         has what is trained alone: name {} in train.only, or set model.path to a model that has \
         it",
        lost.join(", "),
        if lost.len() == 1 { "it" } else { "them" }
    );
    Err(Error::bad_model(path.display(), what))
}
