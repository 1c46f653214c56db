//! The model that a config names, and what of it is trained.

use super::head_counts::{check_portions, check_sliced_adapters};
use super::shape_of;
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
        saved: Vec::new(),
        base: *base,
        dtype: config.device.dtype,
        masters: config.master_format()?,
        relu_density: config.stash.relu_density,
    };
    let Some(lora) = lora else { return Ok(training) };
    let LoraConfig { rank, alpha, rank_stabilised, dropout, targets, path, .. } = lora;
    let mut adapters = match path {
        None => Lora {
            rank: rank.unwrap_or(8),
            alpha: alpha.unwrap_or(16.0),
            rank_pattern: lora.rank_pattern.clone().unwrap_or_default(),
            alpha_pattern: lora.alpha_pattern.clone().unwrap_or_default(),
            rank_stabilised: *rank_stabilised,
            dropout: 0.0,
            targets: targets.clone().unwrap_or_else(|| vec!["all-linear".into()]),
        },
        Some(path) => {
            let hf::SavedAdapters { lora, saved } = hf::read_lora(path)?;
            training.saved = saved;
            training.keeps_tied = hf::keeps_tied(path)?;
            lora
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
    let training = training_of(config)?;
    check_sliced_adapters(&shape, &training)?;
    let model = Model::for_training(shape, &training);
    let mut model = match config.train.adapters() {
        Some(path) => model.map_err(|error| hf::refused_adapters(path, error)),
        None => model,
    }?;
    check_portions(config, &model)?;
    set_objective(config, &mut model);
    Ok(model)
}

/// Gives a model the objective of a config, if it has none of its own.
pub(crate) fn set_objective(config: &Config, model: &mut Model) {
    model.objective = model.objective.take().or_else(|| config.objective.built());
}

/// Freezes what a config does not train of a model that the program built by itself.
///
/// # Errors
/// The config asks for adapters or slices, or as [`Model::freeze`].
pub(crate) fn freeze_own(config: &Config, model: &mut Model) -> Result<(), Error> {
    if config.train.lora.is_some() {
        let problem = "is for a model that the config names: give a model of your own its \
                       adapters as tensors of its layers";
        return Err(Error::config("train.lora", problem));
    }
    if config.parallel.slices > 1 {
        let problem = "is for a model that the config names: give the blocks of your own model \
                       their slices in its Shape, and leave it out";
        return Err(Error::config("parallel.slices", problem));
    }
    let training = training_of(config)?;
    model.freeze(&training)?;
    check_portions(config, model)
}

/// The names of the model's classes, from the config or from the model's directory. Empty if
/// neither names them.
///
/// # Errors
/// The config names the model's own classes in another order.
pub(crate) fn label_names(config: &Config) -> Result<Vec<String>, Error> {
    let own = own_label_names(config)?;
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

/// The names of the classes in the model's directory, or in that of adapters which bring the head.
fn own_label_names(config: &Config) -> Result<Vec<String>, Error> {
    let of_model = match &config.model.path {
        Some(path) => hf::label_names(&hf::read_config(path)?),
        None => Vec::new(),
    };
    let Some(adapters) = config.train.adapters() else { return Ok(of_model) };
    let of_adapters = hf::labels(adapters);
    let named = [of_adapters, of_model].into_iter().find(|names| !names.is_empty());
    // Adapters may bring a head of more or fewer classes than the model's.
    let labels = shape_of(config)?.head.labels();
    Ok(named.filter(|names| Some(names.len()) == labels).unwrap_or_default())
}
