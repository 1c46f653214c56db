//! The weights that a config's model begins with.

use std::path::PathBuf;

use crate::config::{Config, ModelConfig};
use crate::eps::Eps;
use crate::error::Error;
use crate::hf::{self, Load, Sealed};
use crate::models::Model;

/// The directory that a config's adapters come from.
fn adapters_path(config: &Config) -> Option<&PathBuf> {
    config.train.lora.as_ref().and_then(|lora| lora.path.as_ref())
}

/// Fills the EPS with random numbers, and over them the weights of the directory that the config
/// names. Returns the names of tensors that the directory does not have. Seals of that directory
/// and of the adapters' are checked before, unless the config allows changed files.
///
/// # Errors
/// A directory is not as its seal says, or its weights are not those of the model.
pub(crate) fn load_base(
    config: &Config,
    model: &Model,
    eps: &Eps,
    how: Load,
) -> Result<Vec<String>, Error> {
    let ModelConfig { path, random_weights, unsealed, .. } = &config.model;
    let path = path.as_ref().filter(|_| !random_weights);
    let mut directories = path.into_iter().chain(adapters_path(config)).filter(|_| !unsealed);
    directories.try_for_each(|directory| hf::check_seal(directory, Sealed::Model))?;
    eps.randomise(model, config.step.seed)?;
    path.map_or(Ok(Vec::new()), |path| hf::load(path, model, eps, how))
}

/// Reads the adapters that the config names into the EPS, if it names any.
pub(crate) fn load_adapters(config: &Config, model: &Model, eps: &Eps) -> Result<(), Error> {
    let Some(path) = adapters_path(config) else { return Ok(()) };
    hf::load_adapters(path, model, eps, Load::to_use(!config.model.unsealed))
}
