//! `[parallel]`: how several devices and processes share a step.

use l2l_actors::schedule;
use serde::{Deserialize, Serialize};

use super::check::{must, rate, refuse};
use super::{Config, OnResume, ScheduleKind};
use crate::error::Error;

/// `[parallel]`
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct ParallelConfig {
    /// How devices share a step. `layers`: a device computes some of the layers, by turns, for all
    /// sequences. `sequences`: a device computes all layers for some groups of micro-batches (data
    /// parallelism). Results do not depend on it.
    pub deal: Deal,
    /// The number of groups of micro-batches, a divisor of the number of micro-batches. Each group
    /// sums its own gradients; then the groups' gradients are added in pairs. With `deal =
    /// "sequences"` set at least the number of devices. Results depend on it in the last bits,
    /// because sums are rounded in another order: 1 is the order of one device.
    pub groups: u32,
    /// The number of slices into which the heads and the channels of each block are cut, as
    /// Megatron-LM's tensor parallelism cuts them: a divisor of the number of heads, of heads of
    /// keys and values and of channels of the feed-forward, at most 64. The output of attention or
    /// of the feed-forward is a sum over the slices, rounded once. Slices alone gain nothing: set
    /// `parallel.tensor` for layers that are larger than a device. Results depend on it in the last
    /// bits, because sums are rounded in another order: 1 cuts nothing.
    pub slices: u32,
    /// The number of pieces in which the feed-forward of each block is visited, a divisor of
    /// `parallel.slices`: a device holds one piece of a block at a time, of attention or of the
    /// feed-forward. It is for blocks that are larger than a device, because pieces hand each other
    /// their sums through the host. Attention is visited in as few pieces as there may be with none
    /// larger than those of the feed-forward. Results do not depend on it.
    pub tensor: u32,
    /// With `deal = "sequences"`: the share of the work of each device, as one number for each, for
    /// devices of different speed. When absent, all shares are equal. Results do not depend on it.
    pub weights: Option<Vec<u32>>,
    /// With `deal = "sequences"`: how devices receive blocks. `whole`: each device uploads all of
    /// each block. `sharded`: each device uploads an equal part of a block over its own link, and
    /// copies the other parts from the other devices (the paper's L2L-p). Results do not depend on
    /// it.
    pub transfer: Transfer,
    /// The fabric that moves bytes between the processes that `mpirun` or `srun` started. `auto`:
    /// MPI, if they started several. `mpi`: MPI. `none`: several processes are refused. Results do
    /// not depend on the number of processes.
    pub fabric: FabricKind,
    /// For experiments: emulates a slow fabric, so that the parts of a block or a gradient take at
    /// least as long as at this rate, for instance `1GB/s`.
    pub fabric_rate: Option<String>,
}

impl Default for ParallelConfig {
    fn default() -> ParallelConfig {
        ParallelConfig {
            deal: Deal::Layers,
            groups: 1,
            slices: 1,
            tensor: 1,
            weights: None,
            transfer: Transfer::Whole,
            fabric: FabricKind::Auto,
            fabric_rate: None,
        }
    }
}

/// How devices share a step.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Deal {
    /// Layers, by turns.
    Layers,
    /// Groups of micro-batches.
    Sequences,
}

/// How devices receive blocks.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Transfer {
    /// Each device uploads whole blocks.
    Whole,
    /// Each device uploads a part of a block, and copies the other parts from the other devices.
    Sharded,
}

/// The kinds of fabric between processes.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum FabricKind {
    /// MPI, if a launcher started several processes.
    Auto,
    /// None: one process.
    None,
    /// MPI.
    Mpi,
}

impl ParallelConfig {
    pub(super) const ON_RESUME: OnResume =
        OnResume::free("deal tensor transfer weights").with_changes("groups slices");
}

impl Config {
    /// `parallel.fabric_rate` in bytes a second. A text that is no rate is an error.
    pub fn fabric_bytes_per_second(&self) -> Result<Option<f64>, Error> {
        rate("parallel.fabric_rate", self.parallel.fabric_rate.as_deref())
    }

    /// The share of the work that each device gets, if groups are dealt.
    pub(crate) fn device_weights(&self) -> Vec<u32> {
        self.parallel.weights.clone().unwrap_or_else(|| vec![1; self.devices() as usize])
    }

    fn check_tensor(&self) -> Result<(), Error> {
        let ParallelConfig { slices, tensor, .. } = self.parallel;
        must(tensor >= 1, "parallel.tensor", "at least 1")?;
        if !slices.is_multiple_of(tensor) {
            let divisors = (1..=slices).filter(|&pieces| slices.is_multiple_of(pieces));
            let divisors: Vec<String> = divisors.map(|pieces| pieces.to_string()).collect();
            let problem = format_args!(
                "is {tensor}, and parallel.slices is {slices}: set a divisor of it ({}), or other \
                 parallel.slices",
                divisors.join(", ")
            );
            return Err(Error::config("parallel.tensor", problem));
        }
        if tensor > 1 { self.check_whole_gradients() } else { Ok(()) }
    }

    /// Refuses what needs the gradients of whole blocks.
    pub(crate) fn check_whole_gradients(&self) -> Result<(), Error> {
        refuse(
            self.compression().is_some(),
            "compression.kind",
            "compresses gradients of whole blocks: leave it out, or set parallel.tensor = 1",
        )
    }

    pub(super) fn check_parallel(&self) -> Result<(), Error> {
        let groups = self.parallel.groups;
        let devices = self.devices();
        let turns = self.sequences().div_ceil(self.step.micro_batch);
        must(groups >= 1, "parallel.groups", "at least 1")?;
        must((1..=64).contains(&self.parallel.slices), "parallel.slices", "from 1 to 64")?;
        refuse(
            self.parallel.slices > 1 && self.stash.relu_density.is_some(),
            "stash.relu_density",
            "is for whole blocks: leave it out, or set parallel.slices = 1",
        )?;
        self.check_tensor()?;
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
}
