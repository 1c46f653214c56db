//! The config as written: every key, its default, and what it must be. The plan is made from it.

mod plan;
mod sizes;

use std::path::{Path, PathBuf};

use serde::Deserialize;

pub(crate) use plan::schedule_of;
pub use plan::{Plan, Term};
pub use sizes::ByteSize;

use crate::error::Error;
use crate::optimizers::{AdamW, Decay, LearningRate};

/// All of it.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// What is trained.
    pub model: ModelConfig,
    /// On what.
    pub data: DataConfig,
    /// One step, and how many.
    pub step: StepConfig,
    /// The update rule.
    pub optimizer: OptimizerConfig,
    /// The device.
    pub device: DeviceConfig,
    /// The order of visits.
    pub schedule: ScheduleConfig,
    /// Where boundaries wait.
    pub stash: StashConfig,
    /// Depths of the ring's pools.
    pub channels: ChannelsConfig,
    /// When a standstill is a failure.
    pub watchdog: WatchdogConfig,
}

/// `[model]`
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default, deny_unknown_fields)]
pub struct ModelConfig {
    /// A directory with `config.json` and `model.safetensors`, as transformers writes it.
    pub path: Option<PathBuf>,
    /// Random weights of a known shape: `gpt-small` (the default without a path).
    pub preset: Option<String>,
    /// Overrides of a preset's shape.
    pub layers: Option<usize>,
    /// Channels.
    pub hidden: Option<usize>,
    /// Attention heads.
    pub heads: Option<usize>,
    /// Channels of the feed-forward; 4 × `hidden` when that is given and this is not.
    pub intermediate: Option<usize>,
    /// Tokens.
    pub vocabulary: Option<usize>,
    /// The longest sequence.
    pub positions: Option<usize>,
    /// Every dropout; the model's own when absent.
    pub dropout: Option<f32>,
    /// `causal-lm`.
    pub task: Task,
}

/// What the model is trained to do.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Task {
    /// To predict the next token.
    #[default]
    CausalLm,
}

/// `[data]`
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(default, deny_unknown_fields)]
pub struct DataConfig {
    /// `random`, or a `.jsonl` file of `input_ids` and, if they differ, `labels`.
    pub train: String,
    /// Tokens of a sequence at most; the model's positions, up to 1024, when absent.
    pub sequence_length: Option<usize>,
    /// Whether sequences are drawn in an order of their own each epoch.
    pub shuffle: bool,
    /// What happens to a sequence that is too long.
    pub too_long: TooLong,
}

impl Default for DataConfig {
    fn default() -> DataConfig {
        let train = "random".to_string();
        DataConfig { train, sequence_length: None, shuffle: true, too_long: TooLong::Error }
    }
}

/// See [`DataConfig::too_long`].
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum TooLong {
    /// It is refused.
    #[default]
    Error,
    /// Its end is cut off.
    Cut,
}

/// `[step]`
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(default, deny_unknown_fields)]
pub struct StepConfig {
    /// Sequences a step.
    pub batch: usize,
    /// Sequences of a micro-batch; the last of a step may have fewer.
    pub micro_batch: usize,
    /// Steps of the run.
    pub steps: u64,
    /// What all chance is drawn from.
    pub seed: u64,
}

impl Default for StepConfig {
    fn default() -> StepConfig {
        StepConfig { batch: 32, micro_batch: 4, steps: 100, seed: 0 }
    }
}

/// `[optimizer]`
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(default, deny_unknown_fields)]
pub struct OptimizerConfig {
    /// `adamw`.
    pub kind: OptimizerKind,
    /// At its highest.
    pub learning_rate: f64,
    /// What it does behind the warm-up.
    pub schedule: RateSchedule,
    /// Steps in which it rises.
    pub warmup_steps: u64,
    /// Where it ends.
    pub min_learning_rate: f64,
    /// Decay of the moments.
    pub betas: (f64, f64),
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Decay of parameters.
    pub weight_decay: f64,
    /// Kinds (`bias`, `norm`) or name patterns that do not decay.
    pub no_decay: Vec<String>,
    /// The most the global gradient norm may be.
    pub clip_norm: Option<f64>,
}

impl Default for OptimizerConfig {
    fn default() -> OptimizerConfig {
        OptimizerConfig {
            kind: OptimizerKind::Adamw,
            learning_rate: 3e-4,
            schedule: RateSchedule::Constant,
            warmup_steps: 0,
            min_learning_rate: 0.0,
            betas: (0.9, 0.999),
            epsilon: 1e-8,
            weight_decay: 0.01,
            no_decay: vec!["bias".into(), "norm".into()],
            clip_norm: None,
        }
    }
}

/// The update rules there are.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum OptimizerKind {
    /// [`AdamW`].
    Adamw,
}

/// See [`Decay`].
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs, reason = "named after the shapes of Decay")]
pub enum RateSchedule {
    Constant,
    Linear,
    Cosine,
    Wsd,
}

/// `[device]`
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default, deny_unknown_fields)]
pub struct DeviceConfig {
    /// `cpu`.
    pub kind: DeviceKind,
    /// The most its memory may hold; `auto`: what the plan needs.
    pub memory: ByteSize,
    /// `f32`.
    pub dtype: Dtype,
    /// Threads; all cores when absent.
    pub threads: Option<usize>,
    /// A transfer takes at least as long as over a link this fast, say `12GB/s`.
    pub link: Option<String>,
}

/// The devices there are.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceKind {
    /// The host's processor.
    #[default]
    Cpu,
}

/// What tensors on the device are made of.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Dtype {
    /// 32-bit floats.
    #[default]
    F32,
}

/// `[schedule]`
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(default, deny_unknown_fields)]
pub struct ScheduleConfig {
    /// Layer by layer, or micro-batch by micro-batch.
    pub kind: ScheduleKind,
    /// False: what a layer's backward needs waits in the stash.
    pub recompute: bool,
}

impl Default for ScheduleConfig {
    fn default() -> ScheduleConfig {
        ScheduleConfig { kind: ScheduleKind::Relay, recompute: true }
    }
}

/// The schedules there are.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum ScheduleKind {
    /// All micro-batches through a layer, then the next.
    Relay,
    /// One micro-batch through all layers, then the next.
    Resident,
}

/// `[stash]`
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default, deny_unknown_fields)]
pub struct StashConfig {
    /// Where boundaries wait between visits.
    pub place: StashPlace,
}

/// See [`StashConfig::place`].
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum StashPlace {
    /// The host.
    #[default]
    Auto,
    /// In the device's memory, which then grows with depth.
    Device,
    /// In the host's.
    Host,
}

/// `[channels]`
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(default, deny_unknown_fields)]
pub struct ChannelsConfig {
    /// Blocks on the device.
    pub weights: u32,
    /// Gradient accumulators on the device.
    pub gradients: u32,
    /// Landing blocks on the host.
    pub reduced: u32,
    /// Boundaries on their way.
    pub stash: u32,
}

impl Default for ChannelsConfig {
    fn default() -> ChannelsConfig {
        ChannelsConfig { weights: 2, gradients: 2, reduced: 2, stash: 4 }
    }
}

/// `[watchdog]`
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(default, deny_unknown_fields)]
pub struct WatchdogConfig {
    /// Nothing moved for this long.
    pub seconds: f64,
}

impl Default for WatchdogConfig {
    fn default() -> WatchdogConfig {
        WatchdogConfig { seconds: 60.0 }
    }
}

impl Config {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// The key, what it must be, and where it stands.
    pub fn read(path: &Path) -> Result<Config, Error> {
        let at = path.display();
        let text = std::fs::read_to_string(path)
            .map_err(|error| Error::refused(format_args!("config {at}: {error}")))?;
        Config::parse(&text).map_err(|error| Error::refused(format_args!("config {at}: {error}")))
    }

    /// Parses and checks a text.
    ///
    /// # Errors
    /// As [`read`](Config::read).
    pub fn parse(text: &str) -> Result<Config, Error> {
        let config: Config = toml::from_str(text).map_err(Error::refused)?;
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> Result<(), Error> {
        let OptimizerConfig { learning_rate, min_learning_rate, betas, epsilon, .. } =
            self.optimizer;
        let (decay, clip) = (self.optimizer.weight_decay, self.optimizer.clip_norm);
        let share = |beta: f64| (0.0..1.0).contains(&beta);
        let positive = |value: f64| value.is_finite() && value > 0.0;
        let not_negative = |value: f64| value.is_finite() && value >= 0.0;
        let dropout = self.model.dropout.unwrap_or(0.0);
        let ChannelsConfig { weights, gradients, reduced, stash } = self.channels;
        let rules: [(bool, &str, &str); 19] = [
            (self.step.batch >= 1, "step.batch", "at least 1"),
            (self.step.micro_batch >= 1, "step.micro_batch", "at least 1"),
            (self.step.batch <= 1 << 20, "step.batch", "at most 1048576"),
            (self.step.steps >= 1, "step.steps", "at least 1"),
            (not_negative(learning_rate), "optimizer.learning_rate", "a finite number, at least 0"),
            (not_negative(min_learning_rate), "optimizer.min_learning_rate", "at least 0"),
            (share(betas.0) && share(betas.1), "optimizer.betas", "two numbers in [0, 1)"),
            (positive(epsilon), "optimizer.epsilon", "above 0"),
            (epsilon as f32 > 0.0, "optimizer.epsilon", "at least 1e-45, for it is used in f32"),
            (not_negative(decay), "optimizer.weight_decay", "a finite number, at least 0"),
            (clip.is_none_or(positive), "optimizer.clip_norm", "above 0"),
            ((0.0..1.0).contains(&dropout), "model.dropout", "in [0, 1)"),
            (weights >= 1, "channels.weights", "at least 1"),
            (gradients >= 1, "channels.gradients", "at least 1"),
            (reduced >= 1, "channels.reduced", "at least 1"),
            (stash >= 1, "channels.stash", "at least 1"),
            (positive(self.watchdog.seconds), "watchdog.seconds", "above 0"),
            (self.watchdog.seconds <= 1e9, "watchdog.seconds", "at most 1e9"),
            (self.device.threads != Some(0), "device.threads", "at least 1"),
        ];
        for (holds, key, must) in rules {
            if !holds {
                return Err(Error::refused(format_args!("{key} must be {must}")));
            }
        }
        if self.model.path.is_some() && self.model.preset.is_some() {
            return Err(Error::refused("model.path and model.preset: give one of them"));
        }
        self.link_bytes_per_second().map(|_| ())
    }

    /// `device.link` in bytes a second.
    ///
    /// # Errors
    /// It is no rate.
    pub fn link_bytes_per_second(&self) -> Result<Option<f64>, Error> {
        let Some(link) = &self.device.link else { return Ok(None) };
        let rate = link.strip_suffix("/s").and_then(|size| size.parse::<ByteSize>().ok());
        match rate.and_then(|rate| rate.bytes()).filter(|&bytes| bytes > 0) {
            Some(bytes) => Ok(Some(bytes as f64)),
            None => Err(Error::refused(format_args!(
                "device.link must be a rate such as \"12GB/s\", not {link:?}"
            ))),
        }
    }

    /// The update rule.
    pub fn update_rule(&self) -> AdamW {
        let OptimizerConfig { betas, epsilon, weight_decay, no_decay, .. } = &self.optimizer;
        let (betas, epsilon, weight_decay) = (*betas, *epsilon, *weight_decay);
        AdamW { betas, epsilon, weight_decay, no_decay: no_decay.clone() }
    }

    /// The learning rate of each step.
    pub fn learning_rate(&self) -> LearningRate {
        LearningRate {
            peak: self.optimizer.learning_rate,
            minimum: self.optimizer.min_learning_rate,
            warmup: self.optimizer.warmup_steps,
            steps: self.step.steps,
            decay: match self.optimizer.schedule {
                RateSchedule::Constant => Decay::Constant,
                RateSchedule::Linear => Decay::Linear,
                RateSchedule::Cosine => Decay::Cosine,
                RateSchedule::Wsd => Decay::Wsd,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_config_is_the_default() {
        assert_eq!(Config::parse("").expect("all keys have defaults"), Config::default());
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, says) in [
            ("[step]\nbach = 3", "unknown field `bach`"),
            ("[step]\nbatch = 0", "step.batch must be at least 1"),
            ("[step]\nbatch = -1", "batch"),
            ("[optimizer]\nlearning_rate = nan", "optimizer.learning_rate"),
            ("[optimizer]\nclip_norm = 0.0", "optimizer.clip_norm must be above 0"),
            ("[optimizer]\nkind = \"sgd\"", "unknown variant `sgd`"),
            ("[channels]\nstash = 0", "channels.stash must be at least 1"),
            ("[device]\nlink = \"fast\"", "\"12GB/s\""),
            ("[device]\nmemory = \"12 apples\"", "12 apples"),
            ("[model]\npath = \"x\"\npreset = \"gpt-small\"", "give one of them"),
        ] {
            let error = Config::parse(text).expect_err(text).to_string();
            assert!(error.contains(says), "{error}");
        }
    }
}
