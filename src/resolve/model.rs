//! The model that a config names, and what of it is trained.

use crate::config::{Config, Labels, LoraConfig, TrainConfig};
use crate::error::Error;
use crate::hf;
use crate::models::{Lora, Model, Shape, Training};

/// What a config trains.
///
/// # Errors
/// Adapters that the config names cannot be read, or are of an unknown kind.
pub fn training_of(config: &Config) -> Result<Training, Error> {
    let TrainConfig { only, frozen, lora, base, .. } = &config.train;
    let mut training = Training {
        only: only.clone(),
        frozen: frozen.clone(),
        lora: None,
        keeps_tied: false,
        base: *base,
        dtype: config.device.dtype,
        masters: config.master_format()?,
        relu_density: config.stash.relu_density,
    };
    let Some(lora) = lora else { return Ok(training) };
    let LoraConfig { rank, alpha, rank_stabilised, dropout, targets, path } = lora;
    let mut adapters = match path {
        None => Lora {
            rank: rank.unwrap_or(8),
            alpha: alpha.unwrap_or(16.0),
            rank_stabilised: *rank_stabilised,
            dropout: 0.0,
            targets: targets.clone().unwrap_or_else(|| vec!["all-linear".into()]),
        },
        Some(path) => {
            let (adapters, saved) = hf::read_lora(path)?;
            training.only.extend(saved);
            training.keeps_tied = hf::keeps_tied(path)?;
            adapters
        }
    };
    adapters.dropout = *dropout;
    training.lora = Some(adapters);
    Ok(training)
}

/// The model of a shape, of which a config trains some tensors.
///
/// # Errors
/// As [`training_of`] and [`Model::for_training`]; or the weights have a format that is not read.
pub fn model_of(config: &Config, shape: Shape) -> Result<Model, Error> {
    if let Some(path) = config.model.path.as_ref().filter(|_| !config.model.random_weights) {
        hf::check_format(path)?;
    }
    Model::for_training(shape, &training_of(config)?).map_err(|error| {
        let adapters = config.train.lora.as_ref().and_then(|lora| lora.path.as_ref());
        match (error, adapters) {
            // The config did not set this key, so the value comes from the adapters.
            (Error::Config { key, problem }, Some(path))
                if key.starts_with("train.lora") || config.train.only.is_empty() =>
            {
                let file = path.join(hf::ADAPTER_CONFIG);
                Error::bad_model(file.display(), format_args!("{key} {problem}"))
            }
            (error, _) => error,
        }
    })
}

/// Freezes what a config does not train of a model that the program built by itself.
///
/// # Errors
/// The config asks for adapters, or as [`Model::freeze`].
pub(crate) fn freeze_own(config: &Config, model: &mut Model) -> Result<(), Error> {
    if config.train.lora.is_some() {
        let problem = "is for a model that the config names: give a model of your own its \
                       adapters as tensors of its layers";
        return Err(Error::config("train.lora", problem));
    }
    model.freeze(&training_of(config)?)
}

/// The names of the model's classes, from the config or from the model's directory. Empty if
/// neither names them.
///
/// # Errors
/// The config names the model's own classes in another order.
pub(crate) fn label_names(config: &Config) -> Result<Vec<String>, Error> {
    let own = match &config.model.path {
        Some(path) => hf::label_names(&hf::read_config(path)?),
        None => Vec::new(),
    };
    let Some(Labels::Names(names)) = &config.model.labels else { return Ok(own) };
    let sorted = |names: &Vec<String>| {
        let mut names = names.clone();
        names.sort();
        names
    };
    if own != *names && sorted(&own) == sorted(names) {
        let own = own.join(", ");
        return Err(Error::config(
            "model.labels",
            format_args!("must have the order of the model's own labels, {own}"),
        ));
    }
    Ok(names.clone())
}
