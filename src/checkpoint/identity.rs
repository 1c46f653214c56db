//! What a run that resumes has in common with the run of a checkpoint, and what it may change.

use serde_json::Value;

use super::{FIRST_FORMAT, FORMAT, RunRecord};
use crate::config::{Config, RateSchedule};
use crate::models::Model;

/// What identifies a run: a checkpoint is of this run if all of it agrees.
#[derive(Clone, Copy)]
pub(crate) struct Identity<'r> {
    pub(crate) config: &'r Config,
    pub(crate) model: &'r Model,
    /// The `config.json` that the model was read with, or null.
    pub(crate) source_config: &'r Value,
    /// Steps of the run.
    pub(crate) steps: u64,
    /// The fingerprint of the training data, or empty.
    pub(crate) data: &'r str,
    /// Whether it may resume a run of which [`CHANGEABLE`] differs.
    pub(crate) changes: bool,
}

/// Keys that may have another value when a run resumes: they change when and where something is
/// computed, and not what; or what they change is checked separately.
const FREE: [&str; 30] = [
    "checkpoint",
    "channels",
    "data.validation",
    "depth.freezes",
    "device.count",
    "device.cuda_libraries",
    "device.flop_rate",
    "device.kernel_cache",
    "device.kind",
    "device.link",
    "device.memory",
    "device.ordinal",
    "device.ordinals",
    "device.threads",
    "eps",
    "export",
    "log",
    "metrics",
    "model.path",
    "model.unsealed",
    "parallel.deal",
    "parallel.transfer",
    "parallel.weights",
    "schedule",
    "stash.place",
    "stash.relu_density",
    "step.epochs",
    "step.steps",
    "validation",
    "watchdog",
];

/// Keys that a run may change when it is asked to resume with changes, and the data: weights and
/// states of the optimizer are as good as before.
const CHANGEABLE: [&str; 49] = [
    "compression.block_size",
    "compression.density",
    "data",
    "data.attend_across",
    "data.end_of_text",
    "data.fields",
    "data.group_by_length",
    "data.mask_probability",
    "data.packing",
    "data.sequence_length",
    "data.shuffle",
    "data.too_long",
    "data.train",
    "data.validation_split",
    "depth.drop",
    "depth.ramp_steps",
    "device.dtype",
    "device.gradient_dtype",
    "loss_scale.backoff_factor",
    "loss_scale.growth_factor",
    "loss_scale.growth_interval",
    "model.dropout",
    "optimizer.betas",
    "optimizer.clip_norm",
    "optimizer.clip_threshold",
    "optimizer.decay_rate",
    "optimizer.epsilon",
    "optimizer.learning_rate",
    "optimizer.masters",
    "optimizer.min_learning_rate",
    "optimizer.muon_rate",
    "optimizer.no_decay",
    "optimizer.power",
    "optimizer.relative_step",
    "optimizer.scale_parameter",
    "optimizer.schedule",
    "optimizer.warmup_steps",
    "optimizer.weight_decay",
    "parallel.groups",
    "stash.block_size",
    "stash.dtype",
    "step.batch",
    "step.chunk_positions",
    "step.micro_batch",
    "step.non_finite",
    "step.seed",
    "step.steps",
    "train.label_smoothing",
    "train.neftune_alpha",
];

/// `step.chunk_positions` of runs from before that key.
const CHUNK_BEFORE: u64 = 2048;

/// The keys that must keep their values, with the values.
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

pub(super) fn as_value(config: &Config) -> Value {
    serde_json::to_value(config).expect("a config is plain data")
}

/// What a run changes of that of a record, which it may change. The error says why the record is
/// not of this run, and what to do.
pub(super) fn changes(record: &RunRecord, run: &Identity<'_>) -> Result<Vec<String>, String> {
    if ![FIRST_FORMAT, FORMAT].contains(&record.format) {
        return Err(format!(
            "it has format {}, and this program reads format {FORMAT}: use the program that \
             wrote it",
            record.format
        ));
    }
    let differ = differences(record, run);
    let compresses = run.config.compression().is_some();
    let may_change = |(key, _): &(String, String)| {
        // Errors of gradients are those of its groups.
        CHANGEABLE.contains(&key.as_str()) && !(compresses && key == "parallel.groups")
    };
    let all_may = differ.iter().all(may_change);
    if differ.is_empty() || all_may && run.changes {
        let mut changes: Vec<String> =
            differ.into_iter().map(|(_, difference)| difference).collect();
        // Under a constant rate, other steps are a reason for nothing.
        if run.changes && record.steps != run.steps && !falls(run.config) {
            changes.push(format!("step.steps was {}, is {}", record.steps, run.steps));
        }
        return Ok(changes);
    }
    // States of one rule are of no use to another.
    let of_states = ["kind", "block_size", "groups", "ema", "momentum"];
    let is_of_states = |(key, _): &(String, String)| {
        let is_of_rule = key.strip_prefix("optimizer.").is_some_and(|key| of_states.contains(&key));
        is_of_rule || ["compression.kind", "compression.rank"].contains(&key.as_str())
    };
    let remedy = if differ.iter().any(is_of_states) {
        "The states are of that setting. Set it back, set model.path to the checkpoint to \
         begin a new run with its weights and new states"
    } else if all_may {
        "Set it back, resume with --resume-with-changes to go on with these changes"
    } else {
        "Set it back"
    };
    // What may change is no reason where changes are allowed.
    let reasons = differ.iter().filter(|one| !run.changes || !may_change(one));
    let reasons: Vec<&str> = reasons.map(|(_, difference)| difference.as_str()).collect();
    Err(format!("it was made by another run: {}. {remedy}", reasons.join("; ")))
}

/// The key that says how blocks are stored and has another value than in a record, if one has.
pub(super) fn storage_change(record: &RunRecord, config: &Config) -> Option<&'static str> {
    let (now, default) = (as_value(config), as_value(&Config::default()));
    let differs = |[section, key]: &[&str; 2]| {
        let then = record.config[*section].get(*key).unwrap_or(&default[*section][*key]);
        *then != now[*section][*key]
    };
    let keys =
        [(["device", "dtype"], "device.dtype"), (["optimizer", "masters"], "optimizer.masters")];
    keys.into_iter().find(|(path, _)| differs(path)).map(|(_, key)| key)
}

/// Whether the learning rate follows from the number of steps.
fn falls(config: &Config) -> bool {
    config.optimizer.schedule != RateSchedule::Constant
}

/// The keys that are not as they were, and for each what it was and is.
fn differences(record: &RunRecord, run: &Identity<'_>) -> Vec<(String, String)> {
    let now = as_value(run.config);
    let mut default = as_value(&Config::default());
    default["step"]["chunk_positions"] = CHUNK_BEFORE.into();
    let (then, now, default) = (fixed(&record.config), fixed(&now), fixed(&default));
    // A key that did not exist yet had its default.
    let value = |key: &String| {
        then.iter().chain(&default).find(|(then, _)| then == key).map(|(_, value)| *value)
    };
    let pairs = now.iter().map(|(key, now)| (key, value(key).unwrap_or(&Value::Null), *now));
    // Chunks of another size are the same where no sequence is cut.
    let longest = run.config.sequence_length(&run.model.shape).unwrap_or(usize::MAX) as u64;
    let is_whole = |most: &Value| most.as_u64().is_some_and(|most| longest <= most);
    let is_same = |key: &str, then: &Value, now: &Value| {
        then == now || key == "step.chunk_positions" && is_whole(then) && is_whole(now)
    };
    let mut differ: Vec<(String, String)> = pairs
        .filter(|(key, then, now)| !is_same(key, then, now))
        .map(|(key, then, now)| (key.clone(), format!("{key} was {then}, is {now}")))
        .collect();
    if falls(run.config) && record.steps != run.steps {
        let difference = format!(
            "step.steps was {}, is {}{}, and the learning rate follows from it",
            record.steps,
            run.steps,
            if run.config.step.epochs.is_some() { " (of step.epochs)" } else { "" }
        );
        differ.push(("step.steps".into(), difference));
    }
    let is_known = !record.data.is_empty() && !run.data.is_empty();
    if is_known && record.data != run.data {
        differ.push(("data".into(), format!("the data was {}, is {}", record.data, run.data)));
    }
    differ
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::{Progress, record_of};
    use crate::models::families::gpt2;

    #[test]
    fn runs_from_before_the_key_had_chunks_of_their_own_size() {
        let model = Model::new(gpt2([1, 16, 2, 24, 50, 4096]));
        let mut config = Config::default();
        for (length, chunk_positions, says) in [
            (2048, 8192, ""),
            (4096, 2048, ""),
            (4096, 8192, "step.chunk_positions was 2048, is 8192"),
        ] {
            config.data.sequence_length = Some(length);
            config.step.chunk_positions = chunk_positions;
            let (source_config, steps, data) = (&Value::Null, 1, "");
            let run = Identity {
                config: &config,
                model: &model,
                source_config,
                steps,
                data,
                changes: true,
            };
            let mut record = record_of(run, &Progress::default(), Vec::new());
            let step = record.config["step"].as_object_mut().expect("a section");
            step.remove("chunk_positions").expect("a key");
            assert_eq!(changes(&record, &run).expect("what may change").concat(), says);
        }
    }
}
