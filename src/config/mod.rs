//! The config as written. Each section has a file with its keys, their defaults and their checks.
//! The plan is made from the config.
//!
//! The JSON schema and CONFIG.md are generated from the doc comments of the keys, so users read
//! them.

mod check;
mod checkpoint;
mod compression;
mod data;
mod depth;
mod device;
mod eps;
mod experts;
mod model;
mod objective;
mod optimizer;
mod parallel;
mod precision;
mod reports;
mod resume;
mod ring;
mod schedule;
mod sizes;
mod stash;
mod step;
mod train;
mod validation;
mod windows;

use std::path::Path;

use serde::{Deserialize, Serialize};

pub use checkpoint::{CheckpointConfig, ExportConfig, OnError, WeightDtype};
pub use compression::{CompressionConfig, CompressionKind};
pub use data::{BadRecords, DataConfig, DataFile, FieldsConfig, Files, PromptsConfig, TooLong};
pub use depth::{DepthConfig, DropRule, NewLayers};
pub use device::{DeviceConfig, DeviceKind, GradientDtype};
pub use eps::{EpsConfig, EpsTier};
pub use experts::ExpertsConfig;
pub use model::{Labels, ModelConfig, Task};
pub use objective::{Duplicates, ObjectiveConfig, ObjectiveKind, ReferenceKind};
pub(crate) use objective::{ScoreRecord, TextRecord};
pub use optimizer::{GroupConfig, MuonRateRule, OptimizerConfig, OptimizerKind, RateSchedule};
pub use parallel::{Deal, FabricKind, ParallelConfig, Transfer};
pub use precision::{LossScaleConfig, LossScaleKind, MasterDtype, NonFinite};
pub use reports::{Format, LogConfig, MetricsConfig};
pub(crate) use resume::OnResume;
pub use ring::{ChannelsConfig, WatchdogConfig};
pub use schedule::{Recompute, RecomputedPart, ScheduleConfig, ScheduleKind};
pub use sizes::ByteSize;
pub(crate) use sizes::{bytes_per_second, flops_per_second};
pub use stash::{StashConfig, StashDtype, StashPlace};
pub use step::StepConfig;
pub use train::{LoraConfig, TrainConfig};
pub use validation::{BestMetric, ValidationConfig};

use crate::error::Error;
pub use crate::tensor::Dtype;

/// A whole config file.
#[derive(Clone, Debug, Default, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The model to train: its weights or its shape, and its task.
    pub model: ModelConfig,
    /// The text or tokens to train on, and how they become sequences.
    pub data: DataConfig,
    /// The size of a training step, and the number of steps.
    pub step: StepConfig,
    /// The tensors of the model that are trained, or adapters.
    pub train: TrainConfig,
    /// What a step minimises: the cross entropy of tokens, or a preference loss.
    pub objective: ObjectiveConfig,
    /// Losses that balance the experts of a model, and limits of their choice.
    pub experts: ExpertsConfig,
    /// The optimizer and its learning rate.
    pub optimizer: OptimizerConfig,
    /// The factor of the loss on a device of f16.
    pub loss_scale: LossScaleConfig,
    /// The device that computes the layers.
    pub device: DeviceConfig,
    /// The order in which the device visits layers, and what backward recomputes.
    pub schedule: ScheduleConfig,
    /// Layers that training steps leave out at random.
    pub depth: DepthConfig,
    /// How several devices share a step.
    pub parallel: ParallelConfig,
    /// How gradients are compressed.
    pub compression: CompressionConfig,
    /// The activations that wait between forward and backward.
    pub stash: StashConfig,
    /// The number of slots of each kind. More slots allow more overlap and take more memory.
    pub channels: ChannelsConfig,
    /// The eager param-server (EPS): weights and optimizer state on the host.
    pub eps: EpsConfig,
    /// The loss on data that is not trained on, measured during training.
    pub validation: ValidationConfig,
    /// Checkpoints: complete states that a later run can resume from.
    pub checkpoint: CheckpointConfig,
    /// The files that `l2l export` writes.
    pub export: ExportConfig,
    /// Metrics for Prometheus, and the live page.
    pub metrics: MetricsConfig,
    /// The watchdog: it ends a run in which nothing moves.
    pub watchdog: WatchdogConfig,
    /// The printed events and the log files.
    pub log: LogConfig,
}

impl Config {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// The file cannot be read, or a key has a value that it cannot have.
    pub fn read(path: &Path) -> Result<Config, Error> {
        let at = format!("config {}", path.display());
        let text = std::fs::read_to_string(path).map_err(|error| Error::unusable(&at, error))?;
        Config::parse(&text).map_err(|error| Error::ConfigText(format!("{at}: {error}")))
    }

    /// Parses and checks a text.
    ///
    /// # Errors
    /// A key is unknown, or has a value that it cannot have.
    pub fn parse(text: &str) -> Result<Config, Error> {
        let config: Result<Config, _> = toml::from_str(text);
        let config = config.map_err(|error| Error::ConfigText(error.to_string()))?;
        config.check()?;
        Ok(config)
    }

    /// Checks each key by itself and beside the others.
    ///
    /// # Errors
    /// The first key that has a value that it cannot have.
    pub fn check(&self) -> Result<(), Error> {
        self.step.check()?;
        self.data.check()?;
        self.optimizer.check()?;
        self.train.check()?;
        self.experts.check()?;
        self.channels.check()?;
        self.model.check()?;
        self.validation.check()?;
        self.checkpoint.check()?;
        self.export.check()?;
        self.metrics.check()?;
        self.check_reports()?;
        self.watchdog.check()?;
        self.device.check()?;
        self.check_stash()?;
        self.check_precision()?;
        self.check_parallel()?;
        self.check_compression()?;
        self.check_schedule()?;
        self.check_depth()?;
        self.check_objective()?;
        self.eps.check()?;
        self.link_bytes_per_second()?;
        self.flops_per_second()?;
        self.update_bytes_per_second()?;
        self.disk_bytes_per_second()?;
        self.fabric_bytes_per_second().map(|_| ())
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
            ("[step]\nchunk_positions = 0", "step.chunk_positions must be a multiple of 128"),
            ("[step]\nchunk_positions = 200", "step.chunk_positions must be a multiple of 128"),
            ("[optimizer]\nlearning_rate = nan", "optimizer.learning_rate"),
            ("[optimizer]\nclip_norm = 0.0", "optimizer.clip_norm must be above 0"),
            ("[optimizer]\nkind = \"adagrad\"", "unknown variant `adagrad`"),
            ("[optimizer]\nmomentum = 0.9", "optimizer.kind = \"sgd\" or \"muon\""),
            ("[optimizer]\nkind = \"sgd\"\nnesterov = true", "needs momentum"),
            ("[optimizer]\nblock_size = 128", "optimizer.kind = \"adamw-8bit\""),
            ("[optimizer]\nblock_size = 100", "a power of two from 16 to 4096"),
            ("[optimizer]\nrelative_step = true", "optimizer.kind = \"adafactor\""),
            ("[optimizer]\nema = 1.0", "optimizer.ema must be in [0, 1)"),
            ("[[optimizer.groups]]\nmatch = []", "optimizer.groups"),
            ("[experts]\nbalance_loss = -0.1", "experts.balance_loss must be a finite number"),
            ("[experts]\nz_loss = nan", "experts.z_loss must be a finite number"),
            ("[experts]\ncapacity_factor = 0.0", "experts.capacity_factor must be from 0.001"),
            ("[experts]\nbalance_over = \"batch\"", "unknown variant `batch`"),
            ("[objective]\nkind = \"kto\"", "unknown variant `kto`"),
            ("[objective]\nkind = \"dpo\"\nbeta = 0.0", "objective.beta must be a finite number"),
            ("[objective]\nbeta = 0.1", "objective.beta is for a preference"),
            ("[objective]\nsft = 1.0", "objective.sft is for a preference"),
            ("[objective]\nkind = \"cpo\"\nreference = \"before\"", "objective.reference is for"),
            ("[objective]\nkind = \"cpo\"\nsft = -1.0", "objective.sft must be a finite number"),
            ("[objective]\nkind = \"dpo\"\ngamma = 0.5", "is for kind = \"simpo\""),
            ("[objective]\nkind = \"ipo\"\nlabel_smoothing = 0.1", "is for kind = \"dpo\" or"),
            ("[objective]\nkind = \"dpo\"\nlabel_smoothing = 0.6", "must be from 0 to 0.5"),
            ("[objective]\nkind = \"cpo\"\nrobust = true", "is for kind = \"dpo\""),
            ("[objective]\nkind = \"dpo\"\nrobust = true", "is for a label_smoothing above 0"),
            ("[objective]\nkind = \"dpo\"\n[data]\npacking = true", "data.packing"),
            ("[objective]\nkind = \"dpo\"\n[data]\ntoo_long = \"split\"", "data.too_long"),
            ("[objective]\nkind = \"dpo\"\n[depth]\ndrop = 0.1", "depth.drop"),
            ("[channels]\nstash = 0", "channels.stash must be at least 1"),
            ("[device]\nlink = \"fast\"", "\"12GB/s\""),
            ("[device]\nmemory = \"12 apples\"", "12 apples"),
            ("[model]\npath = \"x\"\npreset = \"gpt-small\"", "set only one of them"),
        ] {
            let error = Config::parse(text).expect_err(text).to_string();
            assert!(error.contains(says), "{error}");
        }
    }
}
