//! The settings of a ring.

use std::time::Duration;

use crate::context::FaultInjection;
use crate::schedule::Pools;

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
    /// The ring fails when nothing moved for this long.
    pub watchdog: Option<Patience>,
    /// A fault to inject, for tests.
    pub inject: Option<FaultInjection>,
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
