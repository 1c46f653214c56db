//! Checkpoints: everything that a run resumes from, in a directory that is complete or not there.
//!
//! `config.json` and `model.safetensors` are in transformers' format, so the directory loads there
//! as it is. `optimizer.safetensors` has the optimizer's states under the same names, and
//! `l2l.json` the record of the run, with the digests of all files. A directory is written under
//! another name, flushed to the disk, and renamed.

mod identity;
mod keeper;
mod space;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use l2l_actors::schedule::BlockId;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::config::{BestMetric, TrainConfig};
use crate::eps::Eps;
use crate::error::Error;
use crate::folder::{parent, sync};
use crate::hf::{self, Before, Load, RECORD, Sealed, TensorFiles};
use crate::models::{Base, Model, families};
use crate::optimizers::ScaleState;
use crate::resolve;

pub(crate) use identity::Identity;
use identity::{as_value, changes};
pub use keeper::Keeper;
pub use space::Space;

/// How far a run is, and its validations. Checkpoints keep it beside the parameters.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Progress {
    /// The number of training steps done.
    pub step: u64,
    /// The best validation so far.
    pub best: Option<Best>,
    /// Validations since then.
    #[serde(rename = "looks_since")]
    pub validations_since: u64,
    /// The step of the last validation.
    #[serde(rename = "looked_at")]
    pub validated_at: Option<u64>,
    /// The model's layers, where a run can add some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layers: Option<LayerCount>,
    /// Steps that changed nothing, as their gradients were not finite.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub skipped: u64,
    /// The loss scale, of a run that has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<ScaleState>,
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// The layers of a model to which a run adds some.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerCount {
    /// How many there were when the run began.
    pub first: usize,
    /// How many there are.
    pub now: usize,
}

/// The best validation: by its loss, or by the metric that `validation.best` names.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Best {
    /// Its step.
    pub step: u64,
    /// Its loss, or the metric.
    #[serde(alias = "loss")]
    pub value: f64,
}

impl Progress {
    /// Records a validation by its value, of which less is better where `metric` is a loss.
    /// Returns true when it is the best so far.
    pub fn note(&mut self, metric: BestMetric, value: f64) -> bool {
        self.validated_at = Some(self.step);
        let is_better = |best: Best| match metric.is_loss() {
            true => value < best.value,
            false => value > best.value,
        };
        let is_best = value.is_finite() && self.best.is_none_or(is_better);
        if is_best {
            self.best = Some(Best { step: self.step, value });
            self.validations_since = 0;
        } else {
            self.validations_since += 1;
        }
        is_best
    }
}

/// The record of a run in a checkpoint: `l2l.json`.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RunRecord {
    /// The format of this file.
    format: u32,
    progress: Progress,
    /// The number of updates of each block.
    updates: Vec<u64>,
    /// Steps of the whole run, which a decaying learning rate depends on.
    steps: u64,
    /// The fingerprint of the training data.
    data: String,
    /// The resolved config.
    config: Value,
    /// SHA-256 of each other file. A record of format 1 has none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    files: BTreeMap<String, String>,
    /// SHA-256 of this text with an empty seal. Of format 1: of all above, and of parameters and
    /// optimizer states.
    seal: String,
}

impl RunRecord {
    /// The seal that it must have in format 1, for an EPS that holds its parameters.
    ///
    /// # Errors
    /// They cannot be read.
    fn first_seal(&self, model: &Model, eps: &Eps) -> Result<String, Error> {
        let open = serde_json::json!({
            "format": self.format,
            "progress": self.progress,
            "updates": self.updates,
            "steps": self.steps,
            "data": self.data,
            "config": self.config,
            "weights": eps.full_digest(model)?,
        });
        let digest = Sha256::digest(open.to_string().as_bytes());
        Ok(digest.iter().map(|byte| format!("{byte:02x}")).collect())
    }
}

/// The format of records that are written, and the one before, which is read too.
const FORMAT: u32 = 2;
const FIRST_FORMAT: u32 = 1;

/// No run is longer.
const MOST_STEPS: u64 = 1 << 40;

/// A checkpoint that is being written. Its directory has another name until it is complete.
pub(crate) struct Draft {
    directory: PathBuf,
    files: TensorFiles,
    record: RunRecord,
    /// The digests of the files that some of its files are links to.
    linked_digests: BTreeMap<String, String>,
}

impl Draft {
    /// Reserves the space for all blocks, each of which is of the step that `progress` says. The
    /// folder above is there: one that was taken away is not made again. `before` is a checkpoint
    /// that this process wrote: files of frozen tensors, and of blocks that were not updated since,
    /// are links to its files.
    ///
    /// # Errors
    /// A file cannot be made, or the disk is full.
    pub(crate) fn begin(
        directory: &Path,
        before: Option<&Path>,
        run: Identity<'_>,
        eps: &Eps,
        progress: &Progress,
    ) -> Result<Draft, Error> {
        let failed = |error: io::Error| Error::storage(directory.display(), error);
        recover(directory).map_err(failed)?;
        let partial = with_suffix(directory, PARTIAL);
        fs::create_dir(&partial).map_err(failed)?;
        let before = before.filter(|before| *before != directory);
        let before = before.and_then(|before| Some((before, record_in(before)?)));
        let files = match run.config.train.lora {
            Some(_) => TensorFiles::of_adapters(&partial, run.model, eps)?,
            None => {
                let before = before.as_ref();
                let before = before
                    .map(|(directory, record)| Before { directory, updates: &record.updates });
                let most = run.config.checkpoint.shard_size.bytes();
                TensorFiles::of_checkpoint(&partial, run.model, eps, most, before)?
            }
        };
        let files = files.with_states(partial.join(hf::STATES), run.model, eps)?;
        let record = record_of(run, progress, eps.updates());
        let linked_digests = before.map(|(_, record)| record.files).unwrap_or_default();
        Ok(Draft { directory: directory.into(), files, record, linked_digests })
    }

    /// Writes a block; the number of its bytes.
    ///
    /// # Errors
    /// It cannot be read or written.
    pub(crate) fn write_block(&self, id: BlockId, eps: &Eps) -> Result<u64, Error> {
        self.files.write_block(id, eps)
    }

    /// Adds all other files, once the blocks are written, seals the directory and gives it its
    /// name. Waits until all of it is on the disk.
    ///
    /// # Errors
    /// A file cannot be written.
    pub(crate) fn publish(self, run: Identity<'_>, eps: &Eps) -> Result<(), Error> {
        let Draft { directory, files, mut record, linked_digests } = self;
        let failed = |error: io::Error| Error::storage(directory.display(), error);
        let partial = with_suffix(&directory, PARTIAL);
        let linked = files.publish()?;
        hf::write_config(&partial, &run.model.shape, run.source_config)?;
        sync(&partial.join("config.json")).map_err(failed)?;
        if let Some(path) = &run.config.model.path {
            hf::copy_companions(path, &partial).map_err(failed)?;
        }
        if let Some(lora) = resolve::training_of(run.config)?.lora {
            let base = run.config.model.path.as_deref();
            hf::write_adapter_config(&partial, run.model, &lora, base)?;
        }
        record.files = hf::file_digests(&partial).map_err(failed)?;
        for file in linked {
            let name = file.name();
            if record.files.get(&name) != linked_digests.get(&name) {
                record.files.insert(name, file.write_anew(eps)?);
            }
        }
        let text = serde_json::to_string_pretty(&record).expect("it is plain data");
        fs::write(partial.join(RECORD), hf::seal(&text)).map_err(failed)?;
        sync(&partial.join(RECORD)).map_err(failed)?;
        name(&partial, &directory).map_err(failed)
    }
}

/// A checkpoint's record, if it can be read.
fn record_in(directory: &Path) -> Option<RunRecord> {
    let text = fs::read_to_string(directory.join(RECORD)).ok()?;
    serde_json::from_str(&text).ok()
}

/// Removes what was written of a checkpoint that failed: its space may be needed.
pub(crate) fn discard(directory: &Path) {
    _ = remove(&with_suffix(directory, PARTIAL)); // the next one tries again
}

/// Gives a complete directory its name, and waits until that is on the disk. A checkpoint that has
/// the name is kept until then.
fn name(partial: &Path, directory: &Path) -> io::Result<()> {
    let old = with_suffix(directory, OLD);
    sync(partial)?;
    if directory.try_exists()? {
        fs::rename(directory, &old)?;
    }
    fs::rename(partial, directory)?;
    sync(parent(directory))?;
    remove(&old)
}

/// Gives a checkpoint a second name, under which its files are links to the same bytes, or copies
/// where the file system has no links.
///
/// # Errors
/// The disk fails or is full.
pub(crate) fn link(from: &Path, to: &Path) -> Result<(), Error> {
    let partial = with_suffix(to, PARTIAL);
    let linked = recover(to).and_then(|()| link_all(from, &partial));
    linked.and_then(|()| name(&partial, to)).map_err(|error| Error::storage(to.display(), error))
}

fn link_all(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (from, to) = (entry.path(), to.join(entry.file_name()));
        if entry.file_type()?.is_dir() {
            link_all(&from, &to)?;
        } else if fs::hard_link(&from, &to).is_err() {
            fs::copy(&from, &to)?;
            sync(&to)?;
        }
    }
    sync(to)
}

fn record_of(run: Identity<'_>, progress: &Progress, updates: Vec<u64>) -> RunRecord {
    RunRecord {
        format: FORMAT,
        progress: progress.clone(),
        updates,
        steps: run.steps,
        data: run.data.into(),
        config: as_value(run.config),
        files: BTreeMap::new(),
        seal: String::new(),
    }
}

/// What an EPS on file keeps of its run.
pub(crate) fn remembered(run: Identity<'_>, progress: &Progress) -> Value {
    let record = record_of(run, progress, Vec::new());
    let shape = families::write(&run.model.shape, &Value::Null);
    serde_json::json!({ "rest": record, "shape": shape })
}

/// Reads what an EPS on file kept of its run, and checks that it is this run.
///
/// # Errors
/// Which keys differ.
pub(crate) fn recall(
    mut remembered: Value,
    step: u64,
    run: Identity<'_>,
) -> Result<Progress, Error> {
    let place = run.config.eps.path.clone().unwrap_or_default();
    let refuse =
        |what: String| Error::bad_checkpoint(format_args!("eps.path {}", place.display()), what);
    let record: RunRecord = serde_json::from_value(remembered["rest"].take())
        .map_err(|error| refuse(error.to_string()))?;
    changes(&record, &run).map_err(|why| refuse(format!("{why}, or remove the folder")))?;
    // Blocks on file are read as they were stored.
    if let Some(key) = identity::storage_change(&record, run.config) {
        return Err(refuse(format!(
            "its blocks are stored for another {key}: set it back, or resume from a checkpoint, \
             with another eps.path"
        )));
    }
    families::shorten(&mut remembered["shape"]); // older states have longer numbers
    if remembered["shape"] != families::write(&run.model.shape, &Value::Null) {
        let what = "it holds the state of a model of another shape: set the model back, or remove \
                    the folder";
        return Err(refuse(what.into()));
    }
    Ok(Progress { step, ..record.progress })
}

/// The suffix of a checkpoint while it is written, and of one that a new one replaces.
const PARTIAL: &str = ".l2l-partial";
const OLD: &str = ".l2l-old";

/// Checks that a checkpoint is as it was written, by the digests of its files. One of format 1 has
/// none: [`read`] checks it.
///
/// # Errors
/// It is damaged, or somebody changed it: which file.
pub(crate) fn check_seal(directory: &Path) -> Result<(), Error> {
    recover(directory).map_err(|error| Error::storage(directory.display(), error))?;
    hf::check_seal(directory, Sealed::All)
}

/// Repairs what a kill left: a checkpoint that was being replaced comes back, and one that was
/// being written is removed.
fn recover(directory: &Path) -> io::Result<()> {
    let (partial, old) = (with_suffix(directory, PARTIAL), with_suffix(directory, OLD));
    if old.try_exists()? {
        if !directory.try_exists()? {
            fs::rename(&old, directory)?;
        }
        // The names are on the disk before the files of the other one go.
        sync(parent(directory))?;
        remove(&old)?;
    }
    remove(&partial)
}

fn with_suffix(directory: &Path, suffix: &str) -> PathBuf {
    // By components, so that a slash at the end is dropped.
    let mut name = directory.components().collect::<PathBuf>().into_os_string();
    name.push(suffix);
    PathBuf::from(name)
}

fn remove(directory: &Path) -> io::Result<()> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// The layers of a checkpoint's model, if its run could add some.
pub(crate) fn layers_of(directory: &Path) -> Option<LayerCount> {
    recover(directory).ok()?;
    let text = fs::read_to_string(directory.join(RECORD)).ok()?;
    let record: RunRecord = serde_json::from_str(&text).ok()?;
    record.progress.layers
}

/// The same of what an EPS on file kept.
pub(crate) fn remembered_layers(remembered: &Value) -> Option<LayerCount> {
    serde_json::from_value(remembered["rest"]["progress"]["layers"].clone()).ok()
}

/// A checkpoint that fits this run, as far as its record and its shape say.
pub(crate) struct Checked<'c> {
    directory: &'c Path,
    record: RunRecord,
    /// What is not as it was in the checkpoint's run.
    pub(crate) changes: Vec<String>,
}

/// Checks a checkpoint before anything is replaced by it. Its files were compared with its seal
/// already: see [`check_seal`].
///
/// # Errors
/// What is not there, or was made with another config (which keys).
pub(crate) fn check<'c>(directory: &'c Path, run: Identity<'_>) -> Result<Checked<'c>, Error> {
    let path = directory.join(RECORD);
    let refuse =
        |what: String| Error::bad_checkpoint(format_args!("checkpoint {}", path.display()), what);
    recover(directory).map_err(|error| refuse(error.to_string()))?;
    let text = fs::read_to_string(&path).map_err(|error| refuse(error.to_string()))?;
    let record: RunRecord =
        serde_json::from_str(&text).map_err(|error| refuse(error.to_string()))?;
    let changes = changes(&record, &run);
    let changes = changes
        .map_err(|why| refuse(format!("{why}, or give this run another checkpoint.directory")))?;
    // Shapes are compared as far as a config.json describes them.
    let written = |shape| families::write(shape, &Value::Null);
    if written(&hf::read_shape(directory)?) != written(&run.model.shape) {
        return Err(refuse("it is of a model of another shape".into()));
    }
    let (found, blocks) = (record.updates.len(), run.model.blocks.len());
    if found != blocks {
        return Err(refuse(format!("it has {found} blocks, and the model has {blocks}")));
    }
    if record.progress.step > MOST_STEPS {
        return Err(refuse(format!(
            "it is at step {}, and a run has at most {MOST_STEPS}",
            record.progress.step
        )));
    }
    Ok(Checked { directory, record, changes })
}

/// Reads a checkpoint into the EPS.
///
/// # Errors
/// It is not whole.
pub(crate) fn read(checked: Checked<'_>, run: Identity<'_>, eps: &Eps) -> Result<Progress, Error> {
    let Checked { directory, record, .. } = checked;
    let path = directory.join(RECORD);
    let refuse =
        |what: String| Error::bad_checkpoint(format_args!("checkpoint {}", path.display()), what);
    let TrainConfig { lora, base, .. } = &run.config.train;
    if lora.is_some() || *base != Base::AsIs {
        // What is frozen is what the run began with.
        let how = Load::to_train(!run.config.model.unsealed);
        resolve::load_base(run.config, run.model, eps, how)?;
    }
    match (lora, base) {
        (Some(_), _) => hf::load_adapters(directory, run.model, eps, Load::AS_WRITTEN)?,
        (None, Base::AsIs) => drop(hf::load(directory, run.model, eps, Load::AS_WRITTEN)?),
        (None, _) => hf::load_trained(directory, run.model, eps)?,
    }
    hf::load_states(&directory.join(hf::STATES), run.model, eps)?;
    eps.set_updates(&record.updates);
    if record.format == FIRST_FORMAT && record.first_seal(run.model, eps)? != record.seal {
        return Err(refuse(
            "it is damaged: its content is not what was written. Remove it to resume from the one \
             before it"
                .into(),
        ));
    }
    Ok(record.progress)
}

/// Checks that the state on file is of a run with these keys, before its blocks are opened.
///
/// # Errors
/// Which keys differ.
pub(crate) fn check_keys(remembered: &Value, run: Identity<'_>) -> Result<Vec<String>, Error> {
    let Ok(record) = serde_json::from_value::<RunRecord>(remembered["rest"].clone()) else {
        return Ok(Vec::new()); // recall() says what is wrong with it
    };
    let place = run.config.eps.path.clone().unwrap_or_default();
    changes(&record, &run).map_err(|why| {
        let what = format!("{why}, or remove the folder");
        Error::bad_checkpoint(format_args!("eps.path {}", place.display()), what)
    })
}
