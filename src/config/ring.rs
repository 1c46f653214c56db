//! `[channels]` and `[watchdog]`: the slots of the ring, and how long it may stand still.

use serde::{Deserialize, Serialize};

use super::check::{is_positive, must};
use crate::error::Error;

/// `[channels]`
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct ChannelsConfig {
    /// Weight slots on the device. 1 works; 2 let the next block arrive while a layer computes.
    pub weights: u32,
    /// Gradient slots on the device. 2 let one gradient leave while the next layer computes.
    pub gradients: u32,
    /// Slots on the host for gradients that wait to be added or applied. 2 let one arrive while
    /// another is used.
    pub reduced: u32,
    /// Slots for activations that are uploaded ahead, beside those in use.
    pub stash: u32,
}

impl Default for ChannelsConfig {
    fn default() -> ChannelsConfig {
        ChannelsConfig { weights: 2, gradients: 2, reduced: 2, stash: 4 }
    }
}

impl ChannelsConfig {
    pub(super) fn check(&self) -> Result<(), Error> {
        must(self.weights >= 1, "channels.weights", "at least 1")?;
        must(self.gradients >= 1, "channels.gradients", "at least 1")?;
        must(self.reduced >= 1, "channels.reduced", "at least 1")?;
        must(self.stash >= 1, "channels.stash", "at least 1")
    }
}

/// `[watchdog]`
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct WatchdogConfig {
    /// The run fails after this many seconds without any progress, and reports for what each actor
    /// waits. Raise it if single operations take longer than the default of a minute.
    pub seconds: f64,
}

impl Default for WatchdogConfig {
    fn default() -> WatchdogConfig {
        WatchdogConfig { seconds: 60.0 }
    }
}

impl WatchdogConfig {
    pub(super) fn check(&self) -> Result<(), Error> {
        must(is_positive(self.seconds), "watchdog.seconds", "above 0")?;
        must(self.seconds <= 1e9, "watchdog.seconds", "at most 1e9")
    }
}
