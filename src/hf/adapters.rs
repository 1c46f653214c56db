//! Adapters in PEFT's layout: `adapter_config.json` and `adapter_model.safetensors`.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::json;
use super::weights::WeightFile;
use crate::error::Error;
use crate::models::{Head, Lora, Model, adapters};

/// The file that describes adapters.
pub(crate) const ADAPTER_CONFIG: &str = "adapter_config.json";

/// The file with the adapters' tensors.
pub(super) const WEIGHTS: &str = "adapter_model.safetensors";

/// The prefix that PEFT writes before the name of each tensor.
pub(super) const PREFIX: &str = "base_model.model.";

/// Whether a directory holds adapters.
pub(crate) fn has_adapters(directory: &Path) -> bool {
    directory.join(ADAPTER_CONFIG).is_file()
}

/// The directory of the model that adapters belong to, if the adapters name it.
pub(crate) fn base_of(directory: &Path) -> Option<PathBuf> {
    let config: Map<String, Value> = json::read(&directory.join(ADAPTER_CONFIG)).ok()?;
    Some(config.get("base_model_name_or_path")?.as_str()?.into())
}

/// The adapters of a directory, and the tensors that were trained beside them.
pub(crate) fn read_lora(directory: &Path) -> Result<(Lora, Vec<String>), Error> {
    let path = directory.join(ADAPTER_CONFIG);
    let config: Map<String, Value> = json::read(&path)?;
    let refuse = |what: String| Error::bad_model(path.display(), what);
    let given = |key: &str| config.get(key).filter(|value| !value.is_null());
    let kind = given("peft_type").and_then(Value::as_str).unwrap_or_default();
    if kind != "LORA" {
        return Err(refuse(format!("peft_type is {kind:?}, and l2l only reads LORA")));
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
    let mut modules = Vec::new();
    let mut saved = Vec::new();
    let file = WeightFile::open(&directory.join(WEIGHTS))?;
    for name in file.tensors().names() {
        let bare = name.strip_prefix(PREFIX).ok_or_else(|| {
            file.refuse(format_args!("{name}: the names of adapters' tensors begin with {PREFIX}"))
        })?;
        match adapters::ENDS.iter().find_map(|end| bare.strip_suffix(end)) {
            Some(module) => push_once(&mut modules, module.into()),
            None if bare.contains(".lora_") => {
                let what = format_args!("{name} is of a kind of adapter that l2l cannot do");
                return Err(file.refuse(what));
            }
            None => saved.push(bare.into()),
        }
    }
    Ok((modules, saved))
}

/// Writes the description of a model's adapters. `base` is the directory of the model without them.
pub(crate) fn write_adapter_config(
    directory: &Path,
    model: &Model,
    lora: &Lora,
    base: Option<&Path>,
) -> Result<(), Error> {
    let targets: Vec<&str> = model.adapted_modules().collect();
    let mut saved = Vec::new();
    for tensor in model.blocks.iter().flat_map(|block| block.trained()) {
        let is_adapter = adapters::is_of_adapter(&tensor.name);
        if let Some((module, _)) = tensor.name.rsplit_once('.').filter(|_| !is_adapter) {
            push_once(&mut saved, module.into());
        }
    }
    let ties = model.shape.tied && model.shape.scores_vocabulary();
    let trains_table =
        saved.iter().any(|module| model.shape.names.embedding == format!("{module}.weight"));
    let task = match model.shape.head {
        Head::Tokens => json!("CAUSAL_LM"),
        Head::Classes { .. } => json!("SEQ_CLS"),
        Head::TokenClasses { .. } => json!("TOKEN_CLS"),
        Head::Masked => Value::Null,
    };
    let written = json!({
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": base,
        "inference_mode": true,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rank_stabilised,
        "lora_dropout": lora.dropout,
        "target_modules": targets,
        "ensure_weight_tying": ties && trains_table,
        "modules_to_save": if saved.is_empty() { Value::Null } else { json!(saved) },
        "fan_in_fan_out": !model.shape.transposed,
        "bias": "none",
        "init_lora_weights": true,
    });
    json::write(&directory.join(ADAPTER_CONFIG), &written)
}

fn push_once(all: &mut Vec<String>, name: String) {
    if !all.contains(&name) {
        all.push(name);
    }
}
