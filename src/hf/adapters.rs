//! Adapters in PEFT's layout: `adapter_config.json` and `adapter_model.safetensors`.

use std::fs;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use serde_json::{Map, Value, json};

use super::weights::{check_format, map};
use crate::config::{Config, LoraConfig, TrainConfig};
use crate::error::Error;
use crate::models::{Head, Lora, Model, Shape, Training, adapters};

/// The file that says what adapters are.
const CONFIG: &str = "adapter_config.json";

/// The file that holds them.
pub(super) const WEIGHTS: &str = "adapter_model.safetensors";

/// What PEFT writes before the name of each tensor.
pub(super) const PREFIX: &str = "base_model.model.";

/// Whether a directory holds adapters.
pub(crate) fn has_adapters(directory: &Path) -> bool {
    directory.join(CONFIG).is_file()
}

/// The model that adapters in a directory are of, if they say which.
pub(crate) fn base_of(directory: &Path) -> Option<PathBuf> {
    let config = read(directory).ok()?;
    Some(config.get("base_model_name_or_path")?.as_str()?.into())
}

/// What a config trains.
///
/// # Errors
/// Adapters that it names cannot be read, or are of another kind.
pub fn training_of(config: &Config) -> Result<Training, Error> {
    let TrainConfig { only, frozen, lora, base, .. } = &config.train;
    let (only, frozen, dtype) = (only.clone(), frozen.clone(), config.device.dtype);
    let masters = config.master_format()?;
    let relu_density = config.stash.relu_density;
    let mut training =
        Training { only, frozen, lora: None, base: *base, dtype, masters, relu_density };
    let Some(lora) = lora else { return Ok(training) };
    let LoraConfig { rank, alpha, rank_stabilised, dropout, targets, path } = lora;
    let (mut adapters, saved) = match path {
        None => {
            let targets = targets.clone().unwrap_or_else(|| vec!["all-linear".into()]);
            let (rank, alpha) = (rank.unwrap_or(8), alpha.unwrap_or(16.0));
            let rank_stabilised = *rank_stabilised;
            (Lora { rank, alpha, rank_stabilised, dropout: 0.0, targets }, Vec::new())
        }
        Some(path) => read_lora(path)?,
    };
    adapters.dropout = *dropout;
    training.only.extend(saved);
    training.lora = Some(adapters);
    Ok(training)
}

/// The model of a shape, of which a config trains some tensors.
///
/// # Errors
/// As [`training_of`] and [`Model::for_training`].
pub fn model_of(config: &Config, shape: Shape) -> Result<Model, Error> {
    let located = |error| match (error, config.train.lora.as_ref().and_then(|l| l.path.as_ref())) {
        // The config did not set this key, so the value comes from the adapters.
        (Error::Config { key, problem }, Some(path))
            if key.starts_with("train.lora") || config.train.only.is_empty() =>
        {
            let what = format_args!("{key} {problem}");
            Error::bad_model(path.join(CONFIG).display(), what)
        }
        (error, _) => error,
    };
    if let Some(path) = config.model.path.as_ref().filter(|_| !config.model.random_weights) {
        check_format(path)?;
    }
    Model::for_training(shape, &training_of(config)?).map_err(located)
}

fn read(directory: &Path) -> Result<Map<String, Value>, Error> {
    let path = directory.join(CONFIG);
    let refuse = |what: String| Error::bad_model(path.display(), what);
    let text = fs::read_to_string(&path).map_err(|error| refuse(error.to_string()))?;
    serde_json::from_str(&text).map_err(|error| refuse(error.to_string()))
}

/// The adapters of a directory, and the tensors that were trained beside them.
pub(super) fn read_lora(directory: &Path) -> Result<(Lora, Vec<String>), Error> {
    let config = read(directory)?;
    let refuse = |what: String| Error::bad_model(directory.join(CONFIG).display(), what);
    let given = |key: &str| config.get(key).filter(|value| !value.is_null());
    let kind = given("peft_type").and_then(Value::as_str).unwrap_or_default();
    if kind != "LORA" {
        return Err(refuse(format!("peft_type is {kind:?}, and l2l reads LORA alone")));
    }
    let is_set = |key: &&&str| match given(key) {
        None | Some(Value::Bool(false)) => false,
        Some(Value::String(value)) => value != "none",
        Some(Value::Array(values)) => !values.is_empty(),
        Some(Value::Object(values)) => !values.is_empty(),
        Some(_) => true,
    };
    const UNKNOWN: [&str; 9] = [
        "use_dora",
        "bias",
        "lora_bias",
        "rank_pattern",
        "alpha_pattern",
        "layers_to_transform",
        "target_parameters",
        "trainable_token_indices",
        "exclude_modules",
    ];
    if let Some(key) = UNKNOWN.iter().find(is_set) {
        return Err(refuse(format!(
            "{key} is set, and l2l cannot do that: train adapters without"
        )));
    }
    let rank = given("r").and_then(Value::as_u64).filter(|rank| (1..1 << 20).contains(rank));
    let rank = rank.ok_or_else(|| refuse("r is no rank".into()))? as usize;
    let alpha = given("lora_alpha").and_then(Value::as_f64).filter(|alpha| alpha.is_finite());
    let alpha = alpha.ok_or_else(|| refuse("lora_alpha is no number".into()))?;
    let rank_stabilised = given("use_rslora").and_then(Value::as_bool).unwrap_or(false);
    let (targets, saved) = tensors_of(directory)?;
    Ok((Lora { rank, alpha, rank_stabilised, dropout: 0.0, targets }, saved))
}

/// The modules that have adapters in a directory, and the tensors that were trained beside them.
fn tensors_of(directory: &Path) -> Result<(Vec<String>, Vec<String>), Error> {
    let path = directory.join(WEIGHTS);
    let refuse = |what: String| Error::bad_model(path.display(), what);
    let (mut modules, mut saved) = (Vec::new(), Vec::new());
    let map = map(&path)?;
    let tensors = SafeTensors::deserialize(&map).map_err(|error| refuse(error.to_string()))?;
    for name in tensors.names() {
        let bare = name.strip_prefix(PREFIX).ok_or_else(|| {
            refuse(format!("{name}: the names of adapters' tensors begin with {PREFIX}"))
        })?;
        match adapters::ENDS.iter().find_map(|end| bare.strip_suffix(end)) {
            Some(module) => push_once(&mut modules, module.into()),
            None if bare.contains(".lora_") => {
                return Err(refuse(format!("{name} is of a kind of adapter that l2l cannot do")));
            }
            None => saved.push(bare.into()),
        }
    }
    Ok((modules, saved))
}

/// Writes what the adapters of a model are.
///
/// # Errors
/// The file cannot be written.
pub(crate) fn write_adapter_config(
    directory: &Path,
    model: &Model,
    config: &Config,
) -> Result<(), Error> {
    let Some(lora) = training_of(config)?.lora else { return Ok(()) };
    let targets: Vec<&str> = model.adapted_modules().collect();
    let mut saved = Vec::new();
    for tensor in model.blocks.iter().flat_map(|block| block.trained()) {
        let is_adapter = adapters::is_of_adapter(&tensor.name);
        if let Some((module, _)) = tensor.name.rsplit_once('.').filter(|_| !is_adapter) {
            push_once(&mut saved, module.into());
        }
    }
    let task = match model.shape.head {
        Head::Tokens => json!("CAUSAL_LM"),
        Head::Classes { .. } => json!("SEQ_CLS"),
        Head::TokenClasses { .. } => json!("TOKEN_CLS"),
        Head::Masked => Value::Null,
    };
    let written = json!({
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": config.model.path,
        "inference_mode": true,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rank_stabilised,
        "lora_dropout": lora.dropout,
        "target_modules": targets,
        "modules_to_save": if saved.is_empty() { Value::Null } else { json!(saved) },
        "fan_in_fan_out": !model.shape.transposed,
        "bias": "none",
        "init_lora_weights": true,
    });
    let path = directory.join(CONFIG);
    let text = serde_json::to_string_pretty(&written).expect("it is plain JSON");
    let written = fs::write(&path, text).and_then(|()| fs::File::open(&path)?.sync_all());
    written.map_err(|error| Error::storage(path.display(), error))
}

fn push_once(all: &mut Vec<String>, name: String) {
    if !all.contains(&name) {
        all.push(name);
    }
}
