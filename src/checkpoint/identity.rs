//! Compares a run that resumes with the run of a checkpoint.

use std::sync::Arc;

use serde_json::Value;

use super::record::{FIRST_FORMAT, FORMAT, RunRecord};
use crate::config::{Config, EpsTier, Files, OnResume, OptimizerKind, RateSchedule};
use crate::data::References;
use crate::models::Model;

/// The values that identify a run. Checkpoints keep them, and a run that resumes must have the
/// same.
#[derive(Clone)]
pub(crate) struct Identity {
    pub(crate) config: Config,
    /// The model, with the layers that it has now.
    pub(crate) model: Arc<Model>,
    /// The `config.json` that the model was read with, or null.
    pub(crate) source_config: Value,
    /// The steps of the run.
    pub(crate) steps: u64,
    /// The fingerprint of the training data, or empty.
    pub(crate) data: String,
    /// What a preference compares the data with, if it was measured.
    pub(crate) references: Arc<References>,
    /// True if the run may resume a run that had other values of some keys.
    pub(crate) changes: bool,
}

impl Identity {
    /// True if what a run keeps depends on how the vocabulary is cut into tiles, which follows from
    /// `parallel.slices`.
    fn has_states_of_tiles(&self) -> bool {
        let Config { optimizer, eps, .. } = &self.config;
        let mut kinds = optimizer.groups.iter().filter_map(|group| group.kind);
        let is_of_blocks =
            |kind| matches!(kind, OptimizerKind::Adafactor | OptimizerKind::Adamw8bit);
        let is_on_file = eps.tier == EpsTier::File;
        let has_errors = self.config.compression().is_some();
        is_on_file || has_errors || is_of_blocks(optimizer.kind) || kinds.any(is_of_blocks)
    }
}

/// The `step.chunk_positions` of runs that were recorded before the key existed.
const CHUNK_BEFORE: u64 = 2048;

/// The keys of a config that are compared, with their values.
fn compared(config: &Value) -> Vec<(String, &Value)> {
    // With PipeDream alone a result depends on these.
    let of_windows = |key: &str| ["schedule.stages", "schedule.window"].contains(&key);
    let is_pipedream = config["schedule"]["kind"] == "pipedream";
    let mut all = Vec::new();
    for (section, keys) in config.as_object().into_iter().flatten() {
        let on_resume = OnResume::of(section);
        let keys = keys.as_object().into_iter().flatten();
        let keys = keys.filter(|(key, _)| !on_resume.is_free(key));
        let keys = keys.map(|(key, value)| (format!("{section}.{key}"), value));
        all.extend(keys.map(|(key, value)| match of_windows(&key) && !is_pipedream {
            true => (key, &Value::Null),
            false => (key, value),
        }));
    }
    all
}

pub(super) fn as_value(config: &Config) -> Value {
    serde_json::to_value(config).expect("a config is plain data")
}

/// A difference between the run of a record and the run that resumes.
struct Difference {
    /// A key of the config, or `data`.
    key: String,
    /// A sentence with the value that it had and the value that it has.
    text: String,
}

impl Difference {
    /// True if a run that resumes with changes may have it. The weights and the optimizer's states
    /// stay valid.
    fn may_change(&self, run: &Identity) -> bool {
        let key = &*self.key;
        // Error feedback is kept for each group of micro-batches.
        let is_of_errors = key == "parallel.groups" && run.config.compression().is_some();
        let is_of_tiles = key == "parallel.slices" && run.has_states_of_tiles();
        let is_changeable =
            key.split_once('.').is_some_and(|(section, key)| OnResume::of(section).may_change(key));
        !is_of_errors && !is_of_tiles && (is_changeable || ["data", "step.steps"].contains(&key))
    }

    /// True for a setting that the optimizer's states depend on.
    fn is_of_states(&self) -> bool {
        const KEYS: [&str; 8] = [
            "compression.kind",
            "compression.rank",
            "experts.idle",
            "optimizer.block_size",
            "optimizer.ema",
            "optimizer.groups",
            "optimizer.kind",
            "optimizer.momentum",
        ];
        KEYS.contains(&&*self.key)
    }
}

/// The differences from the run of a record, as sentences, if the run may have them.
///
/// # Errors
/// The reason why the run cannot resume from the record, and what to do.
pub(super) fn changes(record: &RunRecord, run: &Identity) -> Result<Vec<String>, String> {
    if ![FIRST_FORMAT, FORMAT].contains(&record.format) {
        return Err(format!(
            "it has format {}, and this program reads format {FORMAT}: use the program that \
             wrote it",
            record.format
        ));
    }
    let differ = differences(record, run);
    let all_may = differ.iter().all(|one| one.may_change(run));
    if differ.is_empty() || all_may && run.changes {
        let mut changes: Vec<String> = differ.into_iter().map(|one| one.text).collect();
        // Under a constant rate, another number of steps is no difference, and still a change.
        if run.changes && record.steps != run.steps && !decays(&run.config) {
            changes.push(format!("step.steps was {}, is {}", record.steps, run.steps));
        }
        return Ok(changes);
    }
    let remedy = if differ.iter().any(Difference::is_of_states) {
        "The states are of that setting. Set it back, set model.path to the checkpoint to \
         begin a new run with its weights and new states"
    } else if all_may {
        "Set it back, resume with --resume-with-changes to go on with these changes"
    } else {
        "Set it back"
    };
    let reasons = differ.iter().filter(|one| !run.changes || !one.may_change(run));
    let reasons: Vec<&str> = reasons.map(|one| &*one.text).collect();
    Err(format!("it was made by another run: {}. {remedy}", reasons.join("; ")))
}

/// The key that decides how blocks are stored and has not the value that it had, if there is one.
pub(super) fn storage_change(record: &RunRecord, config: &Config) -> Option<&'static str> {
    let now = as_value(config);
    let default = as_value(&Config::default());
    let differs = |path: &&str| {
        let (section, key) = path.split_once('.').expect("a key has a section");
        let then = record.config[section].get(key).unwrap_or(&default[section][key]);
        *then != now[section][key]
    };
    ["device.dtype", "optimizer.masters"].into_iter().find(differs)
}

/// True if the learning rate depends on the number of steps.
fn decays(config: &Config) -> bool {
    config.optimizer.schedule != RateSchedule::Constant
}

/// The weights of the entries of `data.train`.
fn weights(train: &Value) -> Option<Vec<f64>> {
    let files: Files = serde_json::from_value(train.clone()).ok()?;
    Some(files.each().into_iter().map(|(_, weight)| weight).collect())
}

/// All differences between the run of a record and the run that resumes.
fn differences(record: &RunRecord, run: &Identity) -> Vec<Difference> {
    let now = as_value(&run.config);
    let mut default = as_value(&Config::default());
    default["step"]["chunk_positions"] = CHUNK_BEFORE.into();
    let then = compared(&record.config);
    let default = compared(&default);
    // A key that did not exist yet had its default.
    let value = |key: &String| {
        then.iter().chain(&default).find(|(then, _)| then == key).map(|(_, value)| *value)
    };
    // The size of chunks has no effect on sequences that are not cut.
    let longest = run.config.sequence_length(&run.model.shape).unwrap_or(usize::MAX) as u64;
    let is_whole = |most: &Value| most.as_u64().is_some_and(|most| longest <= most);
    let is_known = !record.data.is_empty() && !run.data.is_empty();
    let is_other_data = is_known && record.data != run.data;
    let is_same = |key: &str, then: &Value, now: &Value| match key {
        _ if then == now => true,
        "step.chunk_positions" => is_whole(then) && is_whole(now),
        // The same data may lie elsewhere: its fingerprint identifies it.
        "data.train" => is_known && !is_other_data && weights(then) == weights(now),
        _ => false,
    };
    let mut differ = Vec::new();
    for (key, now) in compared(&now) {
        let then = value(&key).unwrap_or(&Value::Null);
        if !is_same(&key, then, now) {
            let text = format!("{key} was {then}, is {now}");
            differ.push(Difference { key, text });
        }
    }
    if decays(&run.config) && record.steps != run.steps {
        let text = format!(
            "step.steps was {}, is {}{}, and the learning rate follows from it",
            record.steps,
            run.steps,
            if run.config.step.epochs.is_some() { " (of step.epochs)" } else { "" }
        );
        differ.push(Difference { key: "step.steps".into(), text });
    }
    if is_other_data {
        let text = format!("the data was {}, is {}", record.data, run.data);
        differ.push(Difference { key: "data".into(), text });
    }
    differ
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::Progress;
    use crate::models::families::gpt2;

    #[test]
    fn runs_from_before_the_key_had_chunks_of_their_own_size() {
        let mut run = Identity {
            config: Config::default(),
            model: Arc::new(Model::new(gpt2([1, 16, 2, 24, 50, 4096]))),
            source_config: Value::Null,
            steps: 1,
            data: String::new(),
            references: Arc::default(),
            changes: true,
        };
        for (length, chunk_positions, says) in [
            (2048, 8192, ""),
            (4096, 2048, ""),
            (4096, 8192, "step.chunk_positions was 2048, is 8192"),
        ] {
            run.config.data.sequence_length = Some(length);
            run.config.step.chunk_positions = chunk_positions;
            let mut record = RunRecord::new(&run, &Progress::default(), Vec::new());
            let step = record.config["step"].as_object_mut().expect("a section");
            step.remove("chunk_positions").expect("a key");
            assert_eq!(changes(&record, &run).expect("what may change").concat(), says);
        }
    }
}
