//! Checkpoints: everything that a run goes on from, in a directory that is there whole or not at
//! all.
//!
//! `config.json` and `model.safetensors` are transformers' (the directory loads there as it is),
//! `optimizer.safetensors` has the optimizer's states under the same names, `l2l.json` the rest. A
//! directory is written beside its place, flushed to the disk, and renamed.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::config::Config;
use crate::eps::Eps;
use crate::error::Error;
use crate::hf;
use crate::models::Model;

/// What a run remembers beside its parameters.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Progress {
    /// Training steps done.
    pub step: u64,
    /// The best validation so far.
    pub best: Option<Best>,
    /// Validations since then.
    pub looks_since: u64,
}

/// A validation that none before was better than.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Best {
    /// Its step.
    pub step: u64,
    /// Its loss.
    pub loss: f64,
}

impl Progress {
    /// Notes a validation; true when it is the best so far.
    pub fn note(&mut self, loss: f64) -> bool {
        let is_best = loss.is_finite() && self.best.is_none_or(|best| loss < best.loss);
        if is_best {
            self.best = Some(Best { step: self.step, loss });
            self.looks_since = 0;
        } else {
            self.looks_since += 1;
        }
        is_best
    }
}

/// The rest.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Rest {
    /// Of this file.
    format: u32,
    progress: Progress,
    /// Updates of each block.
    updates: Vec<u64>,
    /// SHA-256 of parameters and optimizer states.
    digest: String,
    /// As it was resolved.
    config: Value,
}

const FORMAT: u32 = 1;

/// No run is longer.
const MOST_STEPS: u64 = 1 << 40;

/// Keys that a run may go on with other values of: they change when and where, not what.
const FREE: [&str; 13] = [
    "checkpoint",
    "channels",
    "data.validation",
    "device",
    "log",
    "metrics",
    "model.path",
    "schedule",
    "stash",
    "step.epochs",
    "step.steps",
    "validation",
    "watchdog",
];

/// The keys that both must agree on, with their values.
fn fixed(config: &Value) -> Vec<(String, &Value)> {
    let sections = config.as_object().into_iter().flatten();
    let keys = sections.filter_map(|(section, keys)| Some((section, keys.as_object()?)));
    keys.flat_map(|(section, keys)| {
        keys.iter().map(move |(key, value)| (format!("{section}.{key}"), section, value))
    })
    .filter(|(key, section, _)| !FREE.contains(&key.as_str()) && !FREE.contains(&section.as_str()))
    .map(|(key, _, value)| (key, value))
    .collect()
}

fn as_value(config: &Config) -> Value {
    serde_json::to_value(config).expect("a config is plain data")
}

/// Writes a checkpoint; see [`Trainer::checkpoint`](crate::Trainer::checkpoint). `over`: the
/// `config.json` the model came with.
pub(crate) fn write(
    directory: &Path,
    config: &Config,
    model: &Model,
    over: &Value,
    eps: &Eps,
    version: u64,
    progress: &Progress,
) -> Result<(), Error> {
    let failed = |error: io::Error| Error::failed(format_args!("{}: {error}", directory.display()));
    let partial = with_suffix(directory, ".partial");
    let old = with_suffix(directory, ".old");
    remove(&partial).map_err(failed)?;
    fs::create_dir_all(&partial).map_err(failed)?;
    hf::write_config(&partial, &model.shape, over)?;
    hf::save(&partial, model, eps, version)?;
    hf::save_states(&partial.join("optimizer.safetensors"), model, eps, version)?;
    let rest = Rest {
        format: FORMAT,
        progress: progress.clone(),
        updates: eps.updates(),
        digest: eps.full_digest(),
        config: as_value(config),
    };
    let text = serde_json::to_string_pretty(&rest).expect("it is plain data");
    fs::write(partial.join("l2l.json"), text).map_err(failed)?;
    for file in ["config.json", "l2l.json"] {
        sync(&partial.join(file)).map_err(failed)?;
    }
    sync(&partial).map_err(failed)?;
    // One that has this name already makes way, and is gone once the new one is there.
    remove(&old).map_err(failed)?;
    if directory.exists() {
        fs::rename(directory, &old).map_err(failed)?;
    }
    fs::rename(&partial, directory).map_err(failed)?;
    sync(directory.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new(".")))
        .map_err(failed)?;
    remove(&old).map_err(failed)
}

fn with_suffix(directory: &Path, suffix: &str) -> PathBuf {
    let mut name = directory.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

fn sync(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

fn remove(directory: &Path) -> io::Result<()> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Reads a checkpoint into the EPS.
///
/// # Errors
/// What is not there, or not whole, or was made with another config (which keys).
pub(crate) fn read(
    directory: &Path,
    config: &Config,
    model: &Model,
    eps: &Eps,
) -> Result<Progress, Error> {
    let path = directory.join("l2l.json");
    let refuse =
        |what: String| Error::refused(format_args!("checkpoint {}: {what}", path.display()));
    let text = fs::read_to_string(&path).map_err(|error| refuse(error.to_string()))?;
    let rest: Rest = serde_json::from_str(&text).map_err(|error| refuse(error.to_string()))?;
    if rest.format != FORMAT {
        return Err(refuse(format!("format {}, this program reads {FORMAT}", rest.format)));
    }
    let now = as_value(config);
    let (then, now) = (fixed(&rest.config), fixed(&now));
    let differ: Vec<String> = now
        .iter()
        .map(|(key, now)| {
            let then = then.iter().find(|(of_then, _)| of_then == key);
            (key, then.map_or(&Value::Null, |(_, then)| then), now)
        })
        .filter(|(_, then, now)| then != *now)
        .map(|(key, then, now)| format!("{key} was {then}, is {now}"))
        .collect();
    if !differ.is_empty() {
        let differ = differ.join("; ");
        return Err(refuse(format!(
            "made with another config: {differ}: set it back, or do without --resume"
        )));
    }
    if hf::read_shape(directory)? != model.shape {
        return Err(refuse("of a model of another shape".into()));
    }
    if rest.updates.len() != model.blocks.len() {
        return Err(refuse(format!(
            "{} blocks, the model has {}",
            rest.updates.len(),
            model.blocks.len()
        )));
    }
    let steps = rest.progress.step;
    if steps > MOST_STEPS || rest.updates.iter().any(|&updates| updates > steps) {
        return Err(refuse(format!(
            "{steps} steps, and some block with more updates, or too many"
        )));
    }
    hf::load(directory, model, eps)?;
    hf::load_states(&directory.join("optimizer.safetensors"), model, eps)?;
    eps.set_updates(&rest.updates);
    if eps.full_digest() != rest.digest {
        return Err(refuse(
            "its weights are not those that were written: remove it to go on from the one before"
                .into(),
        ));
    }
    Ok(rest.progress)
}

/// The checkpoints of a run, in the config's `checkpoint.directory`: `step-00000100` and so on,
/// the newest few, and `best-00000100`, one.
#[derive(Clone, Debug)]
pub struct Keeper {
    directory: PathBuf,
    keep: usize,
}

impl Keeper {
    /// Of a directory, which is made, and found to be writable.
    ///
    /// # Errors
    /// It is not.
    pub fn open(directory: &Path, keep: usize) -> Result<Keeper, Error> {
        let trial = directory.join(".l2l-trial");
        let tried = fs::create_dir_all(directory)
            .and_then(|()| fs::write(&trial, "l2l"))
            .and_then(|()| fs::remove_file(&trial));
        tried.map_err(|error| {
            let what =
                format_args!("{:?} cannot be written to: {error}", directory.display().to_string());
            Error::config("checkpoint.directory", what)
        })?;
        Ok(Keeper { directory: directory.to_path_buf(), keep })
    }

    /// Where the checkpoint of a step goes.
    pub fn place(&self, step: u64) -> PathBuf {
        self.directory.join(format!("step-{step:08}"))
    }

    /// Where the best goes.
    pub fn best_place(&self, step: u64) -> PathBuf {
        self.directory.join(format!("best-{step:08}"))
    }

    /// Whole checkpoints of a kind, oldest first.
    fn all(&self, kind: &str) -> Vec<(u64, PathBuf)> {
        let entries = fs::read_dir(&self.directory).into_iter().flatten().flatten();
        let mut all: Vec<(u64, PathBuf)> = entries
            .filter_map(|entry| {
                let step = entry.file_name().to_str()?.strip_prefix(kind)?.parse().ok()?;
                Some((step, entry.path()))
            })
            .collect();
        all.sort();
        all
    }

    /// The newest, if there is one.
    pub fn newest(&self) -> Option<PathBuf> {
        self.all("step-").pop().map(|(_, path)| path)
    }

    /// Lets go of what need not be kept.
    ///
    /// # Errors
    /// It cannot be removed.
    pub fn tidy(&self) -> Result<(), Error> {
        let (mut steps, mut best) = (self.all("step-"), self.all("best-"));
        steps.truncate(steps.len().saturating_sub(self.keep));
        best.pop();
        for (_, old) in steps.into_iter().chain(best) {
            remove(&old)
                .map_err(|error| Error::failed(format_args!("{}: {error}", old.display())))?;
        }
        Ok(())
    }
}
