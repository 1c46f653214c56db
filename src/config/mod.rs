//! The config as written: every key, its default, and what it must be. The plan is made from it.

mod data;
mod keys;
mod schedule;
mod sizes;

use std::path::Path;

pub use data::{DataConfig, DataFile, Files, TooLong};
pub use keys::{
    ChannelsConfig, CheckpointConfig, Config, DeviceConfig, DeviceKind, EpsConfig, EpsTier, Format,
    Labels, LogConfig, MetricsConfig, ModelConfig, OptimizerConfig, OptimizerKind, RateSchedule,
    StashConfig, StashDtype, StashPlace, StepConfig, Task, ValidationConfig, WatchdogConfig,
};
pub use schedule::{Recompute, RecomputedPart, ScheduleConfig, ScheduleKind};
pub use sizes::ByteSize;

use crate::error::Error;
use crate::models::Shape;
use crate::optimizers::{AdamW, Decay, LearningRate};
pub use crate::tensor::Dtype;

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

    /// Checks what each key must be.
    ///
    /// # Errors
    /// The first that is not.
    pub fn check(&self) -> Result<(), Error> {
        let OptimizerConfig { learning_rate, min_learning_rate, betas, epsilon, .. } =
            self.optimizer;
        let (decay, clip) = (self.optimizer.weight_decay, self.optimizer.clip_norm);
        let share = |beta: f64| (0.0..1.0).contains(&beta);
        let positive = |value: f64| value.is_finite() && value > 0.0;
        let not_negative = |value: f64| value.is_finite() && value >= 0.0;
        let dropout = self.model.dropout.unwrap_or(0.0);
        let ChannelsConfig { weights, gradients, reduced, stash } = self.channels;
        let threads = self.device.threads.unwrap_or(1);
        let split = self.data.validation_split.unwrap_or(0.0);
        let mask = self.data.mask_probability;
        let is_weight = |(_, weight): (&str, f64)| (1e-6..=1e6).contains(&weight);
        let weighs = |files: &Files| files.each().into_iter().all(is_weight);
        let validation = self.data.validation.as_ref();
        let names = match &self.model.labels {
            Some(Labels::Names(names)) => &names[..],
            _ => &[],
        };
        let differ = |at: usize| !names[at].is_empty() && !names[..at].contains(&names[at]);
        let rules: [(bool, &str, &str); 38] = [
            (self.step.batch >= 1, "step.batch", "at least 1"),
            (self.step.micro_batch >= 1, "step.micro_batch", "at least 1"),
            (self.step.batch <= 1 << 20, "step.batch", "at most 1048576"),
            (self.step.steps != Some(0), "step.steps", "at least 1"),
            (self.step.epochs.is_none_or(positive), "step.epochs", "above 0"),
            ((0.0..1.0).contains(&split), "data.validation_split", "in [0, 1)"),
            (self.validation.every_steps != Some(0), "validation.every_steps", "at least 1"),
            (self.validation.batches >= 1, "validation.batches", "at least 1"),
            (self.validation.patience != Some(0), "validation.patience", "at least 1"),
            (self.checkpoint.every_steps != Some(0), "checkpoint.every_steps", "at least 1"),
            (self.checkpoint.keep >= 1, "checkpoint.keep", "at least 1"),
            (self.step.steps.is_none_or(|s| s <= 1 << 40), "step.steps", "at most 1099511627776"),
            (self.step.epochs.is_none_or(|e| e <= 1e9), "step.epochs", "at most 1e9"),
            (self.data.sequence_length != Some(0), "data.sequence_length", "at least 1"),
            (not_negative(learning_rate), "optimizer.learning_rate", "a finite number, at least 0"),
            (not_negative(min_learning_rate), "optimizer.min_learning_rate", "at least 0"),
            (share(betas.0) && share(betas.1), "optimizer.betas", "two numbers in [0, 1)"),
            (positive(epsilon), "optimizer.epsilon", "above 0"),
            (epsilon <= 1.0, "optimizer.epsilon", "at most 1"),
            (threads <= 1024, "device.threads", "at most 1024"),
            (self.validation.batches <= 1 << 30, "validation.batches", "at most 1073741824"),
            (epsilon as f32 > 0.0, "optimizer.epsilon", "at least 1e-45, for it is used in f32"),
            (not_negative(decay), "optimizer.weight_decay", "a finite number, at least 0"),
            (clip.is_none_or(positive), "optimizer.clip_norm", "above 0"),
            (clip.is_none_or(|clip| clip >= 1e-30), "optimizer.clip_norm", "at least 1e-30"),
            ((0.0..1.0).contains(&dropout), "model.dropout", "in [0, 1)"),
            (weights >= 1, "channels.weights", "at least 1"),
            (gradients >= 1, "channels.gradients", "at least 1"),
            (reduced >= 1, "channels.reduced", "at least 1"),
            (stash >= 1, "channels.stash", "at least 1"),
            (positive(self.watchdog.seconds), "watchdog.seconds", "above 0"),
            (self.watchdog.seconds <= 1e9, "watchdog.seconds", "at most 1e9"),
            (self.device.threads != Some(0), "device.threads", "at least 1"),
            (mask > 0.0 && mask <= 1.0, "data.mask_probability", "above 0 and at most 1"),
            (weighs(&self.data.train), "data.train", "of weights from 1e-6 to 1e6"),
            (validation.is_none_or(weighs), "data.validation", "of weights from 1e-6 to 1e6"),
            ((0..names.len()).all(differ), "model.labels", "names that differ, none empty"),
            (!self.data.train.each().is_empty(), "data.train", "at least one file"),
        ];
        for (holds, key, must) in rules {
            if !holds {
                return Err(Error::config(key, format_args!("must be {must}")));
            }
        }
        let ValidationConfig { every_steps, patience, .. } = self.validation;
        let on_cuda = self.device.kind == DeviceKind::Cuda;
        let in_bf16 = self.device.dtype == Dtype::Bf16;
        let contradictions = [
            (
                on_cuda && self.device.link.is_some(),
                "device.link",
                "is emulated on the CPU alone: leave it out, or set device.kind = \"cpu\"",
            ),
            (
                on_cuda && self.stash.place == StashPlace::Device,
                "stash.place",
                "is the host with device.kind = \"cuda\": set \"host\"",
            ),
            (
                on_cuda && !in_bf16 && self.stash.dtype == StashDtype::Bf16,
                "stash.dtype",
                "is the device's with device.kind = \"cuda\": set device.dtype = \"bf16\", or leave it out",
            ),
            (
                in_bf16 && !on_cuda,
                "device.dtype",
                "is bf16, and the CPU computes in f32: set device.kind = \"cuda\", or leave it out \
                 (stash.dtype = \"bf16\" halves the stash)",
            ),
            (
                self.model.path.is_some() && self.model.preset.is_some(),
                "model.preset",
                "is given beside model.path: give one of them",
            ),
            (
                self.model.random_weights && self.model.path.is_none(),
                "model.random_weights",
                "is for a directory's shape: set model.path",
            ),
            (
                self.step.steps.is_some() && self.step.epochs.is_some(),
                "step.epochs",
                "is given beside step.steps: give one of them",
            ),
            (
                patience.is_some() && every_steps.is_none(),
                "validation.patience",
                "counts looks that do not happen: set validation.every_steps",
            ),
            (
                self.checkpoint.every_steps.is_some() && self.checkpoint.directory.is_none(),
                "checkpoint.every_steps",
                "has no place to write to: set checkpoint.directory",
            ),
            (
                self.eps.tier == EpsTier::File && self.eps.path.is_none(),
                "eps.path",
                "is missing: with eps.tier = \"file\" it is the folder to hold the file",
            ),
            (
                self.eps.path.as_ref().is_some_and(|path| path.as_os_str().is_empty()),
                "eps.path",
                "is empty: give a folder",
            ),
            (
                self.data.attend_across && !self.data.packing,
                "data.attend_across",
                "is about texts that share a sequence: set data.packing",
            ),
        ];
        if let Some((_, key, problem)) = contradictions.iter().find(|(is, ..)| *is) {
            return Err(Error::config(key, problem));
        }
        self.link_bytes_per_second()?;
        self.update_bytes_per_second()?;
        self.disk_bytes_per_second().map(|_| ())
    }

    /// `device.link` in bytes a second.
    ///
    /// # Errors
    /// It is no rate.
    pub fn link_bytes_per_second(&self) -> Result<Option<f64>, Error> {
        rate("device.link", self.device.link.as_deref())
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

    /// The update rule.
    pub fn update_rule(&self) -> AdamW {
        let OptimizerConfig { betas, epsilon, weight_decay, no_decay, .. } = &self.optimizer;
        let (betas, epsilon, weight_decay) = (*betas, *epsilon, *weight_decay);
        AdamW { betas, epsilon, weight_decay, no_decay: no_decay.clone() }
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
                format_args!("is {positions}: it must be 1 to the model's {most} positions");
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
                "of random data, which has no end: set step.steps",
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
            },
        }
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
