//! The config as written: every key, its default, and what it must be. The plan is made from it.

mod check;
mod checkpoint;
mod compression;
mod data;
mod depth;
mod keys;
mod optimizer;
mod parallel;
mod precision;
mod schedule;
mod sizes;
mod stash;
mod train;

use std::path::Path;

pub use checkpoint::{CheckpointConfig, OnError};
pub use compression::{CompressionConfig, CompressionKind};
pub use data::{DataConfig, DataFile, FieldsConfig, Files, TooLong};
pub use depth::{DepthConfig, DropRule, NewLayers};
pub use keys::{
    BestMetric, ChannelsConfig, Config, DeviceConfig, DeviceKind, EpsConfig, EpsTier, ExportConfig,
    Format, GradientDtype, Labels, LogConfig, MetricsConfig, ModelConfig, StepConfig, Task,
    ValidationConfig, WatchdogConfig, WeightDtype,
};
pub use optimizer::{GroupConfig, MuonRateRule, OptimizerConfig, OptimizerKind, RateSchedule};
pub use parallel::{Deal, FabricKind, ParallelConfig, Transfer};
pub use precision::{LossScaleConfig, LossScaleKind, MasterDtype, NonFinite};
pub use schedule::{Recompute, RecomputedPart, ScheduleConfig, ScheduleKind};
pub use sizes::ByteSize;
pub use stash::{StashConfig, StashDtype, StashPlace};
pub use train::{LoraConfig, TrainConfig};

use crate::error::Error;
use crate::models::Shape;
use crate::optimizers::{Decay, LearningRate, UpdateRule};
pub use crate::tensor::Dtype;

impl Config {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// The key, what it must be, and where it stands.
    pub fn read(path: &Path) -> Result<Config, Error> {
        let at = format!("config {}", path.display());
        let text = std::fs::read_to_string(path).map_err(|error| Error::unusable(&at, error))?;
        Config::parse(&text).map_err(|error| Error::ConfigText(format!("{at}: {error}")))
    }

    /// Parses and checks a text.
    ///
    /// # Errors
    /// As [`read`](Config::read).
    pub fn parse(text: &str) -> Result<Config, Error> {
        let config: Result<Config, _> = toml::from_str(text);
        let config = config.map_err(|error| Error::ConfigText(error.to_string()))?;
        config.check()?;
        Ok(config)
    }

    /// `device.link` in bytes a second.
    ///
    /// # Errors
    /// It is no rate.
    pub fn link_bytes_per_second(&self) -> Result<Option<f64>, Error> {
        rate("device.link", self.device.link.as_deref())
    }

    /// `device.flop_rate` in FLOP/s.
    ///
    /// # Errors
    /// It is no rate.
    pub fn flops_per_second(&self) -> Result<Option<f64>, Error> {
        let Some(text) = self.device.flop_rate.as_deref() else { return Ok(None) };
        // The number and its unit are written as those of bytes are.
        let bytes = text.strip_suffix("FLOP/s").map(|number| format!("{number}B/s"));
        let parsed = bytes.and_then(|bytes| rate("device.flop_rate", Some(&bytes)).ok());
        parsed.map_or_else(
            || {
                let must = format_args!("must be a rate such as \"200GFLOP/s\", not {text:?}");
                Err(Error::config("device.flop_rate", must))
            },
            Ok,
        )
    }

    /// How many devices there are.
    pub fn devices(&self) -> u32 {
        match self.device.kind {
            DeviceKind::Cpu => self.device.count.unwrap_or(1),
            DeviceKind::Cuda => self.device.gpus().len() as u32,
        }
    }

    /// The devices' names in metrics: `cpu0`, or `cuda` with its ordinal.
    pub fn device_names(&self) -> Vec<String> {
        match self.device.kind {
            DeviceKind::Cpu => (0..self.devices()).map(|device| format!("cpu{device}")).collect(),
            DeviceKind::Cuda => {
                self.device.gpus().into_iter().map(|ordinal| format!("cuda{ordinal}")).collect()
            }
        }
    }

    /// The share of the work of each device, where sequences are dealt.
    pub(crate) fn device_weights(&self) -> Vec<u32> {
        self.parallel.weights.clone().unwrap_or_else(|| vec![1; self.devices() as usize])
    }

    /// `eps.update_rate` in bytes a second.
    ///
    /// # Errors
    /// It is no rate.
    pub fn update_bytes_per_second(&self) -> Result<Option<f64>, Error> {
        rate("eps.update_rate", self.eps.update_rate.as_deref())
    }

    /// `eps.disk_rate` in bytes a second.
    ///
    /// # Errors
    /// It is no rate.
    pub fn disk_bytes_per_second(&self) -> Result<Option<f64>, Error> {
        rate("eps.disk_rate", self.eps.disk_rate.as_deref())
    }

    /// `parallel.fabric_rate` in bytes a second.
    ///
    /// # Errors
    /// It is no rate.
    pub fn fabric_bytes_per_second(&self) -> Result<Option<f64>, Error> {
        rate("parallel.fabric_rate", self.parallel.fabric_rate.as_deref())
    }

    /// The update rule.
    pub fn update_rule(&self) -> Box<dyn UpdateRule> {
        self.optimizer.rule(self.step.seed)
    }

    /// Tokens of a sequence at most.
    ///
    /// # Errors
    /// The model has fewer positions.
    pub fn sequence_length(&self, shape: &Shape) -> Result<usize, Error> {
        let positions = self.data.sequence_length.unwrap_or(shape.positions.min(1024));
        if positions == 0 || positions > shape.positions {
            let most = shape.positions;
            let problem =
                format_args!("is {positions}: it must be from 1 to the model's {most} positions");
            return Err(Error::config("data.sequence_length", problem));
        }
        Ok(positions)
    }

    /// Steps of a run over so many sequences, `None` of them: endless.
    ///
    /// # Errors
    /// Epochs of what has no end.
    pub fn steps(&self, sequences: Option<u64>) -> Result<u64, Error> {
        const DEFAULT: u64 = 100;
        match (self.step.epochs, sequences) {
            (None, _) => Ok(self.step.steps.unwrap_or(DEFAULT)),
            (Some(_), None) => Err(Error::config(
                "step.epochs",
                "cannot count random data, which has no end: set step.steps",
            )),
            (Some(epochs), Some(count)) => {
                Ok(((epochs * count as f64 / self.step.batch as f64).ceil() as u64).max(1))
            }
        }
    }

    /// The learning rate of each step of a run.
    pub fn learning_rate(&self, steps: u64) -> LearningRate {
        LearningRate {
            peak: self.optimizer.learning_rate,
            minimum: self.optimizer.min_learning_rate,
            warmup: self.optimizer.warmup_steps,
            steps,
            decay: match self.optimizer.schedule {
                RateSchedule::Constant => Decay::Constant,
                RateSchedule::Linear => Decay::Linear,
                RateSchedule::Cosine => Decay::Cosine,
                RateSchedule::Wsd => Decay::Wsd,
                RateSchedule::Polynomial => Decay::Polynomial { power: self.optimizer.power },
                RateSchedule::InverseSqrt => Decay::InverseSqrt,
            },
        }
    }
}

impl DeviceConfig {
    /// The numbers of the GPUs that compute, where the device is one.
    pub fn gpus(&self) -> Vec<usize> {
        self.ordinals.clone().unwrap_or_else(|| vec![self.ordinal])
    }
}

/// Bytes a second, as a key says.
fn rate(key: &str, text: Option<&str>) -> Result<Option<f64>, Error> {
    let Some(text) = text else { return Ok(None) };
    let rate = text.strip_suffix("/s").and_then(|size| size.parse::<ByteSize>().ok());
    match rate.and_then(|rate| rate.bytes()).filter(|&bytes| bytes > 0) {
        Some(bytes) => Ok(Some(bytes as f64)),
        None => {
            let must = format_args!("must be a rate such as \"12GB/s\", not {text:?}");
            Err(Error::config(key, must))
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
