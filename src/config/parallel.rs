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
}

impl Default for ParallelConfig {
    fn default() -> ParallelConfig {
        ParallelConfig { deal: Deal::Layers, groups: 1, weights: None }
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
