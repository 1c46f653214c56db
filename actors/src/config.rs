//! The settings of a ring.

use std::time::Duration;

use crate::context::FaultInjection;
use crate::schedule::{Pools, Version};

/// The settings of a ring.
#[derive(Clone, Debug)]
pub struct RingConfig {
    /// Slots of every pool: [`Pools::of`] the largest schedule it will run.
    pub pools: Pools,
    /// Blocks of the model.
    pub blocks: u32,
    /// The most layers a step visits.
    pub max_layers: u32,
    /// The most micro-batches a step has.
    pub max_micro_batches: u32,
    /// False: eager, a block is updated as soon as its gradient is complete. True: deferred,
    /// when the norm is known (clipping, loss scaling, skipping).
    pub deferred: bool,
    /// Training steps before this run: the version of every block at the start.
    pub trained: Version,
    /// `Some(k)`: training steps from version `k` on read the version before the newest. Updates
    /// are then [deferred](RingConfig::deferred), and run while the next step computes; those of
    /// steps in batches, which have such a lag, run inside them. `None`: all steps read the newest
    /// version.
    pub delay_from: Option<Version>,
    /// The ring fails when nothing moved for this long.
    pub watchdog: Option<Patience>,
    /// A fault to inject, for tests.
    pub inject: Option<FaultInjection>,
}

impl RingConfig {
    /// The version that a training step reads when this is the newest.
    pub(crate) fn reads(&self, newest: Version) -> Version {
        let is_delayed = self.delay_from.is_some_and(|from| newest >= from);
        newest.saturating_sub(u64::from(is_delayed))
    }

    /// The versions of a block that are published at a time.
    pub(crate) fn copies(&self) -> u64 {
        if self.delay_from.is_some() { 2 } else { 1 }
    }
}

/// The times after which a standstill is a hang.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// While anything but the file lane works.
    pub ring: Duration,
    /// While an operation of the file lane runs: storage that stalls may go on.
    pub storage: Duration,
}

impl From<Duration> for Patience {
    /// The same patience with all operations.
    fn from(patience: Duration) -> Patience {
        Patience { ring: patience, storage: patience }
    }
}
