//! Adapters in PEFT's layout: `adapter_config.json` and `adapter_model.safetensors`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::adapter_config::{ADAPTER_CONFIG, AdapterConfig};
use super::json;
use super::sealed::RECORD;
use super::weight_file::WeightFile;
use crate::error::Error;
use crate::kernels::ProblemType;
use crate::models::{BlockTensors, Head, Lora, Model, Shape, adapters, families};

/// The file with the adapters' tensors.
pub(super) const WEIGHTS: &str = "adapter_model.safetensors";

/// The prefix that PEFT writes before the name of each tensor.
pub(super) const PREFIX: &str = "base_model.model.";

/// The modules that PEFT trains with the adapters of a classifier, whatever its settings name.
const PEFT_HEADS: [&str; 2] = ["classifier", "score"];

/// Adapters that were read, and the names of the tensors that were trained beside them.
pub(crate) struct SavedAdapters {
    pub(crate) lora: Lora,
    pub(crate) saved: Vec<String>,
}

/// Whether a directory holds adapters.
pub(crate) fn has_adapters(directory: &Path) -> bool {
    directory.join(ADAPTER_CONFIG).is_file()
}

/// The directory of the model that adapters belong to, if the adapters name it.
pub(crate) fn base_of(directory: &Path) -> Option<PathBuf> {
    let config: Map<String, Value> = json::read(&directory.join(ADAPTER_CONFIG)).ok()?;
    Some(config.get("base_model_name_or_path")?.as_str()?.into())
}

/// The adapters of a directory, with the ranks of their tensors.
///
/// # Errors
/// A file cannot be read; the adapters are of a kind that is not built; or their tensors are not as
/// their settings say.
pub(crate) fn read_lora(directory: &Path) -> Result<SavedAdapters, Error> {
    let config = AdapterConfig::read(directory)?;
    let AdapterConfig { rank, alpha, rank_stabilised, .. } = config;
    let file = WeightFile::open(&directory.join(WEIGHTS))?;
    let AdapterTensors { ranks, saved } = AdapterTensors::of(&file)?;
    let mut lora = Lora { rank, alpha, rank_stabilised, ..Lora::default() };
    for (module, found) in ranks {
        let refuse = |what| Error::bad_model(directory.join(ADAPTER_CONFIG).display(), what);
        let said = config.rank_of(&module).map_err(refuse)?;
        if said != found as f64 {
            return Err(refuse(format!(
                "r and rank_pattern give {module} rank {said}, and its tensors in {WEIGHTS} have \
                 rank {found}: the two files do not belong together"
            )));
        }
        let own = config.alpha_of(&module).map_err(refuse)?;
        if found != rank {
            lora.rank_pattern.insert(module.clone(), found);
        }
        if own != alpha {
            lora.alpha_pattern.insert(module.clone(), own);
        }
        lora.targets.push(module);
    }
    Ok(SavedAdapters { lora, saved })
}

/// The tensors of a file of adapters.
struct AdapterTensors {
    /// The rank of each module with an adapter, in the order of names.
    ranks: BTreeMap<String, usize>,
    /// The names of the other tensors.
    saved: Vec<String>,
}

impl AdapterTensors {
    fn of(file: &WeightFile) -> Result<AdapterTensors, Error> {
        let mut ranks = BTreeMap::new();
        let mut saved = Vec::new();
        let tensors = file.tensors();
        let [a, b] = adapters::ENDS;
        for name in tensors.names() {
            let bare = name.strip_prefix(PREFIX).ok_or_else(|| {
                let must = format_args!("the names of adapters' tensors begin with {PREFIX}");
                file.refuse(format_args!("{name}: {must}"))
            })?;
            let ends = [(a, b), (b, a)];
            let found = ends
                .iter()
                .find_map(|(end, other)| Some((bare.strip_suffix(end)?, *other, *end == a)));
            let Some((module, other, is_a)) = found else {
                check_kind(name).map_err(|what| file.refuse(what))?;
                saved.push(bare.into());
                continue;
            };
            let other = format!("{PREFIX}{module}{other}");
            if tensors.tensor(&other).is_err() {
                return Err(file.refuse(format_args!("{other} is missing")));
            }
            if is_a {
                let shape = tensors.tensor(name).map_or(Vec::new(), |view| view.shape().to_vec());
                ranks.insert(module.into(), shape.first().copied().unwrap_or(0));
            }
        }
        saved.sort();
        Ok(AdapterTensors { ranks, saved })
    }
}

/// Refuses a tensor of an adapter that is no product of two matrices.
fn check_kind(name: &str) -> Result<(), String> {
    let kind = match name {
        _ if name.contains(".lora_embedding_") => "an adapter of an embedding, which is not built",
        _ if name.contains(".lora_magnitude_vector") => "DoRA's, which is not built",
        _ if name.contains(".lora_") => "of a kind of adapter that is not built",
        _ => return Ok(()),
    };
    Err(format!("{name} is {kind}: only adapters of linear modules are, of two matrices"))
}

/// The names of the tensors that were trained beside the adapters of a directory.
pub(crate) fn saved_tensors(directory: &Path) -> Result<Vec<String>, Error> {
    Ok(AdapterTensors::of(&WeightFile::open(&directory.join(WEIGHTS))?)?.saved)
}

/// The head of a model of this shape with the adapters of a directory: the head that they bring, or
/// else the model's own.
///
/// # Errors
/// A file of the adapters cannot be read.
pub(crate) fn adapters_head(directory: &Path, shape: &Shape) -> Result<Head, Error> {
    // A checkpoint describes its head itself. A config.json beside PEFT's adapters may be the base
    // model's, which need not have the head of the adapters.
    let config = directory.join("config.json");
    if config.is_file() {
        let described = families::read(&json::read(&config)?);
        let described = described.map_err(|what| Error::bad_model(config.display(), what))?.head;
        if described.labels().is_some() || directory.join(RECORD).is_file() {
            return Ok(described);
        }
    }
    let task = AdapterConfig::read(directory)?.task().map(str::to_string);
    let names = shape.names;
    let file = WeightFile::open(&directory.join(WEIGHTS))?;
    let rows = |layer: &str| {
        let view = file.tensors().tensor(&format!("{PREFIX}{layer}.weight")).ok()?.shape().to_vec();
        view.first().copied().filter(|_| !layer.is_empty())
    };
    let of_sequences = rows(names.class_out)
        .map(|labels| Head::Classes { labels, problem: ProblemType::of_labels(labels) });
    let of_tokens = rows(names.token_classes).map(|labels| Head::TokenClasses { labels });
    let brought = match (task.as_deref(), of_sequences, of_tokens) {
        (Some("SEQ_CLS"), of_sequences, _) => of_sequences,
        (Some("TOKEN_CLS"), _, of_tokens) => of_tokens,
        (_, of_sequences, None) => of_sequences,
        (_, None, of_tokens) => of_tokens,
        // Both tasks have a head of this name: the model or the config says which.
        (_, Some(_), Some(_)) => None,
    };
    Ok(match brought {
        // The model's own config may say more about the same head.
        Some(head) if head.labels() == shape.head.labels() => shape.head,
        Some(head) => head,
        None => shape.head,
    })
}

/// An error about a model with the adapters of a directory: a key that the directory's file set is
/// named as it is there.
pub(crate) fn refused_adapters(directory: &Path, error: Error) -> Error {
    let Error::Config { key, problem } = error else { return error };
    let own = match &*key {
        "train.lora.targets" => "target_modules",
        "train.lora.rank" => "r",
        "train.lora.rank_pattern" => "rank_pattern",
        "train.lora.alpha_pattern" => "alpha_pattern",
        adapters::SAVED => adapters::SAVED,
        _ => return Error::Config { key, problem },
    };
    let file = directory.join(ADAPTER_CONFIG);
    Error::bad_model(file.display(), format_args!("{own} {problem}"))
}

/// Writes the description of a model's adapters. `base` is the directory of the model without them.
pub(crate) fn write_adapter_config(
    directory: &Path,
    model: &Model,
    lora: &Lora,
    base: Option<&Path>,
) -> Result<(), Error> {
    let targets: Vec<&str> = model.adapted_modules().collect();
    let saved = saved_modules(model);
    let is_whole = |layer: &str| saved.iter().any(|one| is_below(layer, one) && is_peft_head(one));
    let names = model.shape.names;
    let ties = model.shape.tied && model.shape.scores_vocabulary();
    let mut trained = model.blocks.iter().flat_map(|block| block.trained());
    let trains_table = trained.any(|tensor| tensor.name == names.embedding);
    let task = match model.shape.head {
        Head::Tokens => json!("CAUSAL_LM"),
        Head::Classes { .. } if is_whole(names.class_out) => json!("SEQ_CLS"),
        Head::TokenClasses { .. } if is_whole(names.token_classes) => json!("TOKEN_CLS"),
        Head::Embedding { .. } => json!("FEATURE_EXTRACTION"),
        // With the task of a classifier, PEFT expects the whole head in the file.
        Head::Classes { .. } | Head::TokenClasses { .. } | Head::Masked => Value::Null,
    };
    let ranks = targets.iter().map(|module| (*module, lora.rank_of(module))).collect();
    let alphas = targets.iter().map(|module| (*module, lora.alpha_of(module))).collect();
    let written = json!({
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": base,
        "inference_mode": true,
        "r": lora.rank,
        "rank_pattern": pattern_of(ranks, lora.rank),
        "lora_alpha": lora.alpha,
        "alpha_pattern": pattern_of(alphas, lora.alpha),
        "use_rslora": lora.rank_stabilised,
        "lora_dropout": lora.dropout,
        "target_modules": short_targets(model, &targets),
        "ensure_weight_tying": ties && trains_table,
        "modules_to_save": if saved.is_empty() { Value::Null } else { json!(saved) },
        "fan_in_fan_out": !model.shape.transposed,
        "bias": "none",
        "init_lora_weights": true,
    });
    json::write(&directory.join(ADAPTER_CONFIG), &written)
}

/// The names of modules with adapters. A model with experts has thousands of them, so the last part
/// of a name stands for all modules with this part where all of them have adapters.
fn short_targets<'t>(model: &Model, targets: &[&'t str]) -> BTreeSet<&'t str> {
    let all = model.linear_modules();
    let last = |name: &'t str| name.rsplit('.').next().unwrap_or(name);
    let adapted: BTreeSet<&str> = targets.iter().copied().collect();
    let lacks = all.iter().filter(|(name, ..)| !adapted.contains(&name[..]));
    let lacks: BTreeSet<&str> =
        lacks.map(|(name, ..)| name.rsplit('.').next().unwrap_or(name)).collect();
    let is_short = |name: &'t str| model.shape.experts.is_some() && !lacks.contains(last(name));
    targets.iter().map(|&name| if is_short(name) { last(name) } else { name }).collect()
}

/// Whether a name is a module's, or that of something in it.
fn is_below(name: &str, module: &str) -> bool {
    name.strip_prefix(module).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

fn is_peft_head(module: &str) -> bool {
    PEFT_HEADS.contains(&module)
}

/// The modules whose tensors are trained beside adapters. A head that PEFT saves as one module is
/// one if it is trained as a whole.
fn saved_modules(model: &Model) -> Vec<String> {
    let trained = model.blocks.iter().flat_map(BlockTensors::trained);
    let is_trained = |name: &str| trained.clone().any(|tensor| tensor.name == name);
    let whole = PEFT_HEADS.into_iter().filter(|head| {
        let tensors = model.blocks.iter().flatten().filter(|tensor| is_below(&tensor.name, head));
        tensors.clone().all(|one| is_trained(&one.name) && !adapters::is_of_adapter(&one.name))
    });
    let whole: Vec<&str> = whole.collect();
    let mut saved: Vec<String> = Vec::new();
    for tensor in trained.filter(|tensor| !adapters::is_of_adapter(&tensor.name)) {
        let Some((module, _)) = tensor.name.rsplit_once('.') else { continue };
        let head = whole.iter().find(|head| is_below(module, head));
        let module = head.map_or(module, |head| head);
        if !saved.iter().any(|one| one == module) {
            saved.push(module.into());
        }
    }
    saved
}

/// PEFT's pattern for the values of modules that differ from the default. The last part of a name
/// stands for all modules that end with it, if all have one value.
fn pattern_of<V: Copy + PartialEq + Into<Value>>(modules: Vec<(&str, V)>, default: V) -> Value {
    let last = |module: &str| module.rsplit('.').next().unwrap_or_default().to_string();
    let mut pattern = Map::new();
    for (module, value) in modules.iter().filter(|(_, value)| *value != default) {
        let end = last(module);
        let mut others = modules.iter().filter(|(other, _)| last(other) == end);
        let is_of_all = others.all(|(_, other)| other == value);
        let key = if is_of_all { end } else { module.to_string() };
        pattern.insert(key, (*value).into());
    }
    Value::Object(pattern)
}
