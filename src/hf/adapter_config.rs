//! The settings of adapters that PEFT wrote: `adapter_config.json`. Settings that change what
//! adapters compute are read or refused, none is ignored.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::json;
use super::pattern::Pattern;
use crate::error::Error;

/// The file that describes adapters.
pub(crate) const ADAPTER_CONFIG: &str = "adapter_config.json";

/// The settings of the adapters in a directory.
pub(super) struct AdapterConfig {
    keys: Map<String, Value>,
    /// r of modules that no pattern names.
    pub(super) rank: usize,
    /// alpha of modules that no pattern names.
    pub(super) alpha: f64,
    pub(super) rank_stabilised: bool,
    patterns: Patterns,
}

/// Values of some modules in place of those of all.
#[derive(Deserialize)]
struct Patterns {
    rank_pattern: Option<Pattern>,
    alpha_pattern: Option<Pattern>,
}

/// Settings that are refused when they are set, and why.
const REFUSED: [(&str, &str); 13] = [
    ("use_dora", "DoRA, which also scales the rows of weights, is not built"),
    ("bias", "biases that are trained beside adapters are not read"),
    ("lora_bias", "adapters with a bias are not built"),
    (
        "target_parameters",
        "adapters of whole parameters, as PEFT has them of all experts of a block, are not built: \
         gates and up projections share matrices there, and each expert has its own here",
    ),
    ("trainable_token_indices", "rows of an embedding that are trained alone are not built"),
    ("layer_replication", "layers that are made of copies are not built"),
    ("alora_invocation_tokens", "aLoRA, whose adapters act from some tokens on, is not built"),
    ("arrow_config", "routing between adapters is not built"),
    ("use_qalora", "QALoRA is not built"),
    ("use_bdlora", "block-diagonal adapters are not built"),
    ("kasa_config", "KaSA is not built"),
    ("monteclora_config", "MonteCLoRA is not built"),
    ("megatron_config", "Megatron's layers are not built"),
];

/// Settings that say how adapters began, were trained or are stored, or which modules have them,
/// and those that are read below. The modules follow from the tensors.
const KNOWN: [&str; 29] = [
    "alpha_pattern",
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_alpha",
    "lora_ga_config",
    "lora_dropout",
    "megatron_core",
    "modules_to_save",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "rank_pattern",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "use_rslora",
    "velora_config",
];

/// Beginnings of adapters that leave the model's weights as they are.
const PLAIN_BEGINNINGS: [&str; 4] = ["eva", "gaussian", "mica", "orthogonal"];

/// The end of a refusal: what to do.
const REMEDY: &str = "Add the adapters to the model with PEFT (merge_and_unload) and set \
                      model.path to that, or train them without";

/// Whether a setting is given and not off.
fn is_set(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => false,
        Value::String(value) => value != "none" && !value.is_empty(),
        Value::Array(values) => !values.is_empty(),
        Value::Object(values) => !values.is_empty(),
        Value::Bool(true) | Value::Number(_) => true,
    }
}

impl AdapterConfig {
    /// Reads the file of a directory.
    ///
    /// # Errors
    /// It cannot be read; the adapters are of another kind; or a setting is not built or unknown.
    pub(super) fn read(directory: &Path) -> Result<AdapterConfig, Error> {
        let path = directory.join(ADAPTER_CONFIG);
        let keys: Map<String, Value> = json::read(&path)?;
        let patterns: Patterns = json::read(&path)?;
        let read = AdapterConfig::of(keys, patterns);
        read.map_err(|what| Error::bad_model(path.display(), what))
    }

    fn of(keys: Map<String, Value>, patterns: Patterns) -> Result<AdapterConfig, String> {
        let given = |key: &str| keys.get(key).filter(|value| !value.is_null());
        let kind = given("peft_type").and_then(Value::as_str).unwrap_or_default();
        if kind != "LORA" {
            return Err(format!("peft_type is {kind:?}, and l2l only reads LORA"));
        }
        check_keys(&keys)?;
        check_beginning(given("init_lora_weights"))?;
        let rank = given("r").and_then(Value::as_u64).filter(|rank| (1..1 << 20).contains(rank));
        let rank = rank.ok_or("r is no rank: it must be a whole number, at least 1")? as usize;
        let alpha = given("lora_alpha").and_then(Value::as_f64).filter(|alpha| alpha.is_finite());
        let alpha = alpha.ok_or("lora_alpha is no number")?;
        let rank_stabilised = given("use_rslora").and_then(Value::as_bool).unwrap_or(false);
        Ok(AdapterConfig { keys, rank, alpha, rank_stabilised, patterns })
    }

    /// The task that the adapters were trained for, if they name one.
    pub(super) fn task(&self) -> Option<&str> {
        self.keys.get("task_type").and_then(Value::as_str)
    }

    /// The rank that the settings give a module.
    pub(super) fn rank_of(&self, module: &str) -> Result<f64, String> {
        let own = self.patterns.rank_pattern.as_ref().map_or(Ok(None), |all| all.of(module));
        let own = own.map_err(|what| format!("rank_pattern {what}"))?;
        Ok(own.unwrap_or(self.rank as f64))
    }

    /// The alpha that the settings give a module.
    pub(super) fn alpha_of(&self, module: &str) -> Result<f64, String> {
        let own = self.patterns.alpha_pattern.as_ref().map_or(Ok(None), |all| all.of(module));
        let own = own.map_err(|what| format!("alpha_pattern {what}"))?;
        Ok(own.unwrap_or(self.alpha))
    }
}

/// Refuses settings that are set and not built, or that nobody here knows.
fn check_keys(keys: &Map<String, Value>) -> Result<(), String> {
    for (key, value) in keys.iter().filter(|(_, value)| is_set(value)) {
        if let Some((_, why)) = REFUSED.iter().find(|(refused, _)| refused == key) {
            return Err(format!("{key} is {value}: {why}. {REMEDY}"));
        }
        if !KNOWN.contains(&&key[..]) {
            return Err(format!(
                "{key} is {value}, and l2l does not know this setting: remove it from the file if \
                 it does not change what the adapters compute. Else: {REMEDY}"
            ));
        }
    }
    Ok(())
}

/// Refuses adapters that belong to other weights than those of the model's files.
fn check_beginning(value: Option<&Value>) -> Result<(), String> {
    match value {
        None | Some(Value::Bool(_)) => Ok(()),
        Some(Value::String(name)) if PLAIN_BEGINNINGS.contains(&&name[..]) => Ok(()),
        Some(value) => Err(format!(
            "init_lora_weights is {value}: such adapters belong to a model from which their \
             beginning was taken, and not to the model's own files. Save them in PEFT with \
             path_initial_model_for_weight_conversion, which makes plain adapters of them, or add \
             them to the model there (merge_and_unload) and set model.path to that"
        )),
    }
}
