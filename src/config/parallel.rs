//! The keys of `[parallel]`: how several devices share a step.

use serde::{Deserialize, Serialize};

/// `[parallel]`
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct ParallelConfig {
    /// What each device gets of a step. `layers`: every device some of the layers, by turns, and
    /// all sequences. `sequences`: every device all layers, and some groups of micro-batches (data
    /// parallelism). Results do not depend on it.
    pub deal: Deal,
    /// Groups of micro-batches, a divisor of the number of micro-batches. Each group adds up
    /// gradients of its own; then the groups' gradients are added in pairs. With `deal =
    /// "sequences"` set at least as many as there are devices. Results depend on it in the last
    /// bits, for sums are rounded in another order: 1 is the order of one device.
    pub groups: u32,
    /// With `deal = "sequences"`: how much of the work each device gets, one number for each, for
    /// devices of different speed. All the same when absent. Results do not depend on it.
    pub weights: Option<Vec<u32>>,
    /// How blocks come to devices that visit the same layers, with `deal = "sequences"`. `whole`:
    /// each device uploads all of them. `sharded`: each device uploads an equal part of a block
    /// over its own link, and copies the other parts from the devices that have them (the paper's
    /// L2L-p). Results do not depend on it.
    pub transfer: Transfer,
    /// What moves bytes between the processes that `mpirun` or `srun` started. `auto`: MPI, if they
    /// started several. `mpi`: MPI. `none`: several processes are refused. Results do not depend on
    /// the number of processes.
    pub fabric: FabricKind,
    /// For experiments: emulates a slow fabric. The parts of a block, and those of a gradient, take
    /// at least as long as at this many bytes a second, for instance `1GB/s`.
    pub fabric_rate: Option<String>,
}

impl Default for ParallelConfig {
    fn default() -> ParallelConfig {
        ParallelConfig {
            deal: Deal::Layers,
            groups: 1,
            weights: None,
            transfer: Transfer::Whole,
            fabric: FabricKind::Auto,
            fabric_rate: None,
        }
    }
}

/// See [`ParallelConfig::deal`].
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Deal {
    /// Layers, by turns.
    Layers,
    /// Groups of micro-batches.
    Sequences,
}

/// See [`ParallelConfig::transfer`].
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Transfer {
    /// Each device uploads whole blocks.
    Whole,
    /// Each device uploads a part, and copies the others from other devices.
    Sharded,
}

/// See [`ParallelConfig::fabric`].
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
