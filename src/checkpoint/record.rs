//! The record of a run, in a checkpoint or beside an EPS on file, and how a run resumes from it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::directory::recover;
use super::identity::{self, as_value};
use super::{Identity, LayerCount, Progress};
use crate::config::TrainConfig;
use crate::eps::Eps;
use crate::error::Error;
use crate::hf::{self, Load, RECORD, Sealed};
use crate::models::{Base, Model, families};
use crate::resolve;

/// The record of a run in a checkpoint: `l2l.json`.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RunRecord {
    /// The format of this file.
    pub(super) format: u32,
    pub(super) progress: Progress,
    /// The number of updates of each block.
    pub(super) updates: Vec<u64>,
    /// The steps of the whole run, which a decaying learning rate depends on.
    pub(super) steps: u64,
    /// The fingerprint of the training data.
    pub(super) data: String,
    /// The resolved config.
    pub(super) config: Value,
    /// SHA-256 of each other file. A record of format 1 has none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) files: BTreeMap<String, String>,
    /// SHA-256 of this text with an empty seal. In format 1: SHA-256 of the values above, the
    /// parameters and the optimizer's states.
    seal: String,
}

/// The format of new records.
pub(super) const FORMAT: u32 = 2;

/// The format before, which can be read.
pub(super) const FIRST_FORMAT: u32 = 1;

/// The most steps of a run. `step.steps` has the same bound.
const MOST_STEPS: u64 = 1 << 40;

impl RunRecord {
    /// True if the checkpoint does not have the weights before the last update.
    fn lacks_older(&self) -> bool {
        !self.files.contains_key(hf::OLDER)
    }

    pub(super) fn new(run: &Identity, progress: &Progress, updates: Vec<u64>) -> RunRecord {
        RunRecord {
            format: FORMAT,
            progress: progress.clone(),
            updates,
            steps: run.steps,
            data: run.data.clone(),
            config: as_value(&run.config),
            files: BTreeMap::new(),
            seal: String::new(),
        }
    }

    /// The seal that a record of format 1 must have, for an EPS that holds its parameters.
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

/// The record of a checkpoint, if it can be read.
pub(super) fn record_in(directory: &Path) -> Option<RunRecord> {
    serde_json::from_str(&fs::read_to_string(directory.join(RECORD)).ok()?).ok()
}

/// Compares a checkpoint with the digests of its files. A checkpoint of format 1 has no digests:
/// [`Checkpoint::read`] checks it.
///
/// # Errors
/// A file was damaged or changed.
pub(crate) fn check_seal(directory: &Path) -> Result<(), Error> {
    recover(directory).map_err(|error| Error::storage(directory.display(), error))?;
    hf::check_seal(directory, Sealed::All)
}

/// A complete checkpoint.
pub(crate) struct Checkpoint {
    directory: PathBuf,
    record: RunRecord,
}

impl Checkpoint {
    /// Reads the record of the checkpoint in a directory.
    ///
    /// # Errors
    /// It is not there, or cannot be read.
    pub(crate) fn open(directory: &Path) -> Result<Checkpoint, Error> {
        let refuse = |what: String| refused(directory, what);
        recover(directory).map_err(|error| refuse(error.to_string()))?;
        let text = fs::read_to_string(directory.join(RECORD));
        let text = text.map_err(|error| refuse(error.to_string()))?;
        let record = serde_json::from_str(&text).map_err(|error| refuse(error.to_string()))?;
        Ok(Checkpoint { directory: directory.into(), record })
    }

    /// True if it does not have the weights before the last update.
    pub(crate) fn lacks_older(&self) -> bool {
        self.record.lacks_older()
    }

    /// The layers of its model, if its run could add some.
    pub(crate) fn layers(&self) -> Option<LayerCount> {
        self.record.progress.layers
    }

    /// Checks that a run can resume from it, before anything is replaced. Returns what the run
    /// changes of the checkpoint's run. [`check_seal`] has compared the files already.
    ///
    /// # Errors
    /// The checkpoint is of another run (which keys differ), or of another model.
    pub(crate) fn check(&self, run: &Identity) -> Result<Vec<String>, Error> {
        let Checkpoint { directory, record } = self;
        let refuse = |what: String| Err(refused(directory, what));
        let changes = match identity::changes(record, run) {
            Ok(changes) => changes,
            Err(why) => {
                return refuse(format!("{why}, or give this run another checkpoint.directory"));
            }
        };
        // Shapes are compared as far as a config.json describes them.
        let written = |shape| families::write(shape, &Value::Null);
        let mut found = hf::read_shape(directory)?;
        if run.model.shape.embeds() {
            found.head = run.model.shape.head; // a config.json names no head then
        }
        if written(&found) != written(&run.model.shape) {
            return refuse("it is of a model of another shape".into());
        }
        let found = record.updates.len();
        let blocks = run.model.blocks.len();
        if found != blocks {
            return refuse(format!("it has {found} blocks, and the model has {blocks}"));
        }
        let step = record.progress.step;
        if step > MOST_STEPS {
            return refuse(format!("it is at step {step}, and a run has at most {MOST_STEPS}"));
        }
        let window = u64::from(run.config.window());
        if !step.is_multiple_of(window) {
            return refuse(format!(
                "it is at step {step}, and windows of {window} begin at multiples of {window}: set \
                 a schedule.window that divides {step}, or reach such a step with another \
                 schedule.kind first"
            ));
        }
        Ok(changes)
    }

    /// Reads its parameters and optimizer states into the EPS.
    pub(crate) fn read(self, run: &Identity, eps: &Eps) -> Result<Progress, Error> {
        let Checkpoint { directory, record } = self;
        let model = &*run.model;
        let TrainConfig { lora, base, .. } = &run.config.train;
        if lora.is_some() || *base != Base::AsIs {
            // A checkpoint does not have the frozen weights: they are those that the run began
            // with.
            let how = Load::to_train(!run.config.model.unsealed);
            resolve::load_first(&run.config, model, eps, how)?;
        }
        match (lora, base) {
            (Some(_), _) => hf::load_own_adapters(&directory, model, eps)?,
            (None, Base::AsIs) => drop(hf::load(&directory, model, eps, Load::AS_WRITTEN, &[])?),
            (None, _) => hf::load_trained(&directory, model, eps)?,
        }
        hf::load_states(&directory.join(hf::STATES), model, eps)?;
        if eps.has_older() && !record.lacks_older() {
            hf::load_older(&directory.join(hf::OLDER), model, eps)?;
        }
        eps.set_updates(&record.updates);
        if record.format == FIRST_FORMAT && record.first_seal(model, eps)? != record.seal {
            let what = "it is damaged: its content is not what was written. Remove it to resume \
                        from the one before it";
            return Err(refused(&directory, what.into()));
        }
        Ok(record.progress)
    }
}

fn refused(directory: &Path, what: String) -> Error {
    let record = directory.join(RECORD);
    Error::bad_checkpoint(format_args!("checkpoint {}", record.display()), what)
}

/// The record of its run that an EPS on file keeps.
pub(crate) fn remembered(run: &Identity, progress: &Progress) -> Value {
    let record = RunRecord::new(run, progress, Vec::new());
    let shape = families::write(&run.model.shape, &Value::Null);
    serde_json::json!({ "rest": record, "shape": shape })
}

/// The layers of the model in such a record, if its run could add some.
pub(crate) fn remembered_layers(remembered: &Value) -> Option<LayerCount> {
    serde_json::from_value(remembered["rest"]["progress"]["layers"].clone()).ok()
}

/// Checks that a run can resume from the state on file after step `step`, before its blocks are
/// opened. Returns the progress, and what the run changes of the state's run.
///
/// # Errors
/// The state is of another run (which keys differ), or of another model.
pub(crate) fn recall(
    mut remembered: Value,
    step: u64,
    run: &Identity,
) -> Result<(Progress, Vec<String>), Error> {
    let place = run.config.eps.path.clone().unwrap_or_default();
    let refuse =
        |what: String| Error::bad_checkpoint(format_args!("eps.path {}", place.display()), what);
    let record: RunRecord = serde_json::from_value(remembered["rest"].take())
        .map_err(|error| refuse(error.to_string()))?;
    let changes = identity::changes(&record, run)
        .map_err(|why| refuse(format!("{why}, or remove the folder")))?;
    // Blocks on file are read as they were stored.
    if let Some(key) = identity::storage_change(&record, &run.config) {
        return Err(refuse(format!(
            "its blocks are stored for another {key}: set it back, or resume from a checkpoint, \
             with another eps.path"
        )));
    }
    families::shorten(&mut remembered["shape"]); // States of older versions have longer numbers.
    if remembered["shape"] != families::write(&run.model.shape, &Value::Null) {
        let what = "it holds the state of a model of another shape: set the model back, or remove \
                    the folder";
        return Err(refuse(what.into()));
    }
    Ok((Progress { step, ..record.progress }, changes))
}
