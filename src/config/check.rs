//! What each key must be by itself, and which keys contradict each other. Whether the model and the
//! machine allow what the keys say is the plan's question.

use l2l_actors::schedule;

use super::{
    ChannelsConfig, Config, DataConfig, Deal, DeviceKind, EpsTier, Files, GradientDtype, Labels,
    NewLayers, ScheduleConfig, ScheduleKind, StepConfig, Transfer, ValidationConfig,
};
use crate::error::Error;
use crate::models::Shape;

/// Refuses a key that is not what it must be.
pub(super) fn must(holds: bool, key: &str, be: &str) -> Result<(), Error> {
    if holds { Ok(()) } else { Err(Error::config(key, format_args!("must be {be}"))) }
}

/// Refuses a key that contradicts another.
pub(super) fn refuse(contradicts: bool, key: &str, problem: &str) -> Result<(), Error> {
    if contradicts { Err(Error::config(key, problem)) } else { Ok(()) }
}

pub(super) fn is_positive(value: f64) -> bool {
    value.is_finite() && value > 0.0
}

pub(super) fn is_not_negative(value: f64) -> bool {
    value.is_finite() && value >= 0.0
}

impl Config {
    /// Checks what each key must be.
    ///
    /// # Errors
    /// The first that is not.
    pub fn check(&self) -> Result<(), Error> {
        self.step.check()?;
        self.data.check()?;
        self.optimizer.check()?;
        self.train.check()?;
        self.channels.check()?;
        self.check_model()?;
        self.check_run()?;
        self.check_device()?;
        self.check_stash()?;
        self.check_precision()?;
        self.check_parallel()?;
        self.check_compression()?;
        self.check_schedule()?;
        must((0.0..1.0).contains(&self.depth.drop), "depth.drop", "in [0, 1)")?;
        must(self.depth.ramp_steps != Some(0), "depth.ramp_steps", "at least 1")?;
        refuse(
            self.depth.drop == 0.0 && self.depth.ramp_steps.is_some(),
            "depth.ramp_steps",
            "has no effect: set depth.drop above 0",
        )?;
        must(self.model.max_layers != Some(0), "model.max_layers", "at least 1")?;
        let stacks = !self.depth.stack_at.is_empty();
        refuse(
            stacks && self.model.max_layers.is_none(),
            "depth.stack_at",
            "adds layers: set model.max_layers to how many there can be",
        )?;
        refuse(
            !stacks && self.depth.new_layers != NewLayers::Copy,
            "depth.new_layers",
            "has no effect: set depth.stack_at",
        )?;
        refuse(
            !self.depth.stack_at.is_sorted_by(|a, b| a < b),
            "depth.stack_at",
            "must be numbers of steps, each larger than the one before",
        )?;
        self.check_contradictions()?;
        self.link_bytes_per_second()?;
        self.flops_per_second()?;
        self.update_bytes_per_second()?;
        self.disk_bytes_per_second()?;
        self.fabric_bytes_per_second().map(|_| ())
    }

    fn check_model(&self) -> Result<(), Error> {
        let dropout = self.model.dropout.unwrap_or(0.0);
        must((0.0..1.0).contains(&dropout), "model.dropout", "in [0, 1)")?;
        let names = match &self.model.labels {
            Some(Labels::Names(names)) => &names[..],
            _ => &[],
        };
        let differs = |at: usize| !names[at].is_empty() && !names[..at].contains(&names[at]);
        must((0..names.len()).all(differs), "model.labels", "names that differ, none empty")
    }

    /// Validation, checkpoints, the watchdog, the listener.
    fn check_run(&self) -> Result<(), Error> {
        let ValidationConfig { every_steps, batches, patience, .. } = self.validation;
        must(every_steps != Some(0), "validation.every_steps", "at least 1")?;
        must(batches >= 1, "validation.batches", "at least 1")?;
        must(batches <= 1 << 30, "validation.batches", "at most 1073741824")?;
        must(patience != Some(0), "validation.patience", "at least 1")?;
        must(self.checkpoint.every_steps != Some(0), "checkpoint.every_steps", "at least 1")?;
        must(self.checkpoint.keep >= 1, "checkpoint.keep", "at least 1")?;
        for (key, size) in [
            ("export.shard_size", self.export.shard_size),
            ("checkpoint.shard_size", self.checkpoint.shard_size),
        ] {
            must(size.bytes().is_none_or(|bytes| bytes > 0), key, "above 0")?;
        }
        let is_name = |name: &String| {
            let is_part = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
            !name.is_empty() && name.bytes().all(is_part)
        };
        let be = "names of this machine, as \"gpu1.lab\": without a scheme, a port or a *";
        must(self.metrics.hosts.iter().all(is_name), "metrics.hosts", be)?;
        must(is_positive(self.watchdog.seconds), "watchdog.seconds", "above 0")?;
        must(self.watchdog.seconds <= 1e9, "watchdog.seconds", "at most 1e9")
    }

    fn check_device(&self) -> Result<(), Error> {
        let threads = self.device.threads;
        must(threads != Some(0), "device.threads", "at least 1")?;
        must(threads.is_none_or(|threads| threads <= 1024), "device.threads", "at most 1024")?;
        let count = self.device.count;
        must(count != Some(0), "device.count", "at least 1")?;
        must(count.is_none_or(|count| count <= 255), "device.count", "at most 255")?;
        self.check_ordinals()?;
        let on_cuda = self.device.kind == DeviceKind::Cuda;
        refuse(
            on_cuda && count.is_some(),
            "device.count",
            "is for device.kind = \"cpu\": leave it out, device.ordinals says which GPUs",
        )?;
        refuse(
            on_cuda && self.device.link.is_some(),
            "device.link",
            "is only emulated on the CPU: leave it out, or set device.kind = \"cpu\"",
        )?;
        refuse(
            on_cuda && self.device.flop_rate.is_some(),
            "device.flop_rate",
            "is only emulated on the CPU: leave it out, or set device.kind = \"cpu\"",
        )?;
        refuse(
            on_cuda && self.device.gradient_dtype == GradientDtype::Bf16,
            "device.gradient_dtype",
            "is bf16, which is for device.kind = \"cpu\": set \"f32\"",
        )
    }

    fn check_ordinals(&self) -> Result<(), Error> {
        let Some(ordinals) = &self.device.ordinals else { return Ok(()) };
        must(!ordinals.is_empty(), "device.ordinals", "at least one number")?;
        let be = "of at most 255 numbers";
        must(ordinals.len() <= 255, "device.ordinals", be)?;
        if let Some(twice) = (1..ordinals.len()).find(|&at| ordinals[..at].contains(&ordinals[at]))
        {
            let problem = format_args!("has GPU {} twice", ordinals[twice]);
            return Err(Error::config("device.ordinals", problem));
        }
        refuse(
            self.device.kind == DeviceKind::Cpu,
            "device.ordinals",
            "is for device.kind = \"cuda\": leave it out, or set device.count",
        )?;
        refuse(
            self.device.ordinal != 0,
            "device.ordinal",
            "is set together with device.ordinals: set only one of them",
        )
    }

    fn check_parallel(&self) -> Result<(), Error> {
        let (groups, devices) = (self.parallel.groups, self.devices());
        let turns = self.step.batch.div_ceil(self.step.micro_batch);
        must(groups >= 1, "parallel.groups", "at least 1")?;
        if !turns.is_multiple_of(groups as usize) {
            let divisors = (1..=turns).filter(|&groups| turns.is_multiple_of(groups));
            let divisors: Vec<String> = divisors.take(12).map(|d| d.to_string()).collect();
            let problem = format_args!(
                "is {groups}, and a step has {turns} micro-batches: set a divisor ({})",
                divisors.join(", ")
            );
            return Err(Error::config("parallel.groups", problem));
        }
        if let Some(weights) = &self.parallel.weights {
            let is_weight = |weight: &u32| (1..=1 << 20).contains(weight);
            let be = "of numbers from 1 to 1048576";
            must(weights.iter().all(is_weight), "parallel.weights", be)?;
            if weights.len() != devices as usize {
                let problem = format_args!("has {} numbers for {devices} devices", weights.len());
                return Err(Error::config("parallel.weights", problem));
            }
        }
        if self.parallel.deal == Deal::Layers {
            let problem = "is for parallel.deal = \"sequences\": leave it out";
            refuse(self.parallel.weights.is_some(), "parallel.weights", problem)?;
            let is_sharded = self.parallel.transfer == Transfer::Sharded;
            let problem = "is \"sharded\", which needs parallel.deal = \"sequences\": dealt layers \
                           are on one device each";
            return refuse(is_sharded, "parallel.transfer", problem);
        }
        refuse(
            self.parallel.transfer == Transfer::Sharded
                && self.schedule.kind != ScheduleKind::Relay,
            "parallel.transfer",
            "is \"sharded\", which needs schedule.kind = \"relay\": only there all devices need a \
             block at the same time",
        )?;
        let dealt = schedule::devices_of_groups(groups, &self.device_weights());
        match (0..devices).find(|&device| !dealt.contains(&(device as u8))) {
            None => Ok(()),
            Some(device) => {
                let problem = format_args!(
                    "is {groups}, and device {device} of {devices} gets none of them: set more \
                     groups, fewer devices, or other parallel.weights"
                );
                Err(Error::config("parallel.groups", problem))
            }
        }
    }

    fn check_schedule(&self) -> Result<(), Error> {
        let ScheduleConfig { kind, chunks, ref path, .. } = self.schedule;
        must(chunks != Some(0), "schedule.chunks", "at least 1")?;
        must(chunks.is_none_or(|chunks| chunks <= 1 << 16), "schedule.chunks", "at most 65536")?;
        let takes_chunks = matches!(kind, ScheduleKind::Gpipe | ScheduleKind::Interleaved);
        refuse(
            chunks.is_some() && !takes_chunks,
            "schedule.chunks",
            "is for schedule.kind = \"gpipe\" or \"interleaved\": leave it out",
        )?;
        let on_file = kind == ScheduleKind::File;
        refuse(
            on_file && path.is_none(),
            "schedule.path",
            "is missing: with schedule.kind = \"file\" it names the file",
        )?;
        refuse(
            !on_file && path.is_some(),
            "schedule.path",
            "is for schedule.kind = \"file\": leave it out",
        )?;
        refuse(
            kind.is_pipeline() && self.parallel.deal == Deal::Sequences,
            "parallel.deal",
            "must be \"layers\" with a pipeline, which says itself what each device does",
        )
    }

    fn check_contradictions(&self) -> Result<(), Error> {
        refuse(
            self.model.path.is_some() && self.model.preset.is_some(),
            "model.preset",
            "is set together with model.path: set only one of them",
        )?;
        refuse(
            self.model.random_weights && self.model.path.is_none(),
            "model.random_weights",
            "needs a directory that gives the shape: set model.path",
        )?;
        refuse(
            self.step.steps.is_some() && self.step.epochs.is_some(),
            "step.epochs",
            "is set together with step.steps: set only one of them",
        )?;
        refuse(
            self.validation.patience.is_some() && self.validation.every_steps.is_none(),
            "validation.patience",
            "counts validations that never happen: set validation.every_steps",
        )?;
        refuse(
            self.checkpoint.every_steps.is_some() && self.checkpoint.directory.is_none(),
            "checkpoint.every_steps",
            "has no place to write to: set checkpoint.directory, or leave the section out \
             (`--set checkpoint=`)",
        )?;
        refuse(
            self.eps.tier == EpsTier::File && self.eps.path.is_none(),
            "eps.path",
            "is missing: with eps.tier = \"file\" it names the folder of the file",
        )?;
        refuse(
            self.eps.path.as_ref().is_some_and(|path| path.as_os_str().is_empty()),
            "eps.path",
            "is empty: give a folder",
        )?;
        refuse(
            self.data.attend_across && !self.data.packing,
            "data.attend_across",
            "needs texts that share a sequence: set data.packing",
        )
    }
}

impl StepConfig {
    fn check(&self) -> Result<(), Error> {
        let Self { batch, micro_batch, chunk_positions, steps, epochs, .. } = *self;
        must(batch >= 1, "step.batch", "at least 1")?;
        must(batch <= 1 << 20, "step.batch", "at most 1048576")?;
        must(micro_batch >= 1, "step.micro_batch", "at least 1")?;
        let is_whole = chunk_positions > 0 && chunk_positions.is_multiple_of(Shape::CHUNK_TILE);
        must(is_whole, "step.chunk_positions", "a multiple of 128, at least 128")?;
        must(steps != Some(0), "step.steps", "at least 1")?;
        must(steps.is_none_or(|steps| steps <= 1 << 40), "step.steps", "at most 1099511627776")?;
        must(epochs.is_none_or(is_positive), "step.epochs", "above 0")?;
        must(epochs.is_none_or(|epochs| epochs <= 1e9), "step.epochs", "at most 1e9")
    }
}

impl DataConfig {
    fn check(&self) -> Result<(), Error> {
        let split = self.validation_split.unwrap_or(0.0);
        must((0.0..1.0).contains(&split), "data.validation_split", "in [0, 1)")?;
        must(self.sequence_length != Some(0), "data.sequence_length", "at least 1")?;
        let mask = self.mask_probability;
        let be = "above 0 and at most 1";
        must(mask > 0.0 && mask <= 1.0, "data.mask_probability", be)?;
        let is_weight = |(_, weight): (&str, f64)| (1e-6..=1e6).contains(&weight);
        let have_weights = |files: &Files| files.each().into_iter().all(is_weight);
        let be = "of weights from 1e-6 to 1e6";
        must(have_weights(&self.train), "data.train", be)?;
        must(self.validation.as_ref().is_none_or(have_weights), "data.validation", be)?;
        let names = self.validation.as_ref().map(Files::names).unwrap_or_default();
        let named = names.iter().filter(|name| name.is_some()).count();
        must(
            named == 0 || named == names.len(),
            "data.validation",
            "entries that all have a name, or none",
        )?;
        must(!names.contains(&Some("")), "data.validation", "names that are not empty")?;
        refuse(
            self.train.names().iter().any(Option::is_some),
            "data.train",
            "has an entry with a name: only validation sets have names",
        )?;
        must(!self.train.each().is_empty(), "data.train", "at least one file")
    }
}

impl ChannelsConfig {
    fn check(&self) -> Result<(), Error> {
        must(self.weights >= 1, "channels.weights", "at least 1")?;
        must(self.gradients >= 1, "channels.gradients", "at least 1")?;
        must(self.reduced >= 1, "channels.reduced", "at least 1")?;
        must(self.stash >= 1, "channels.stash", "at least 1")
    }
}
