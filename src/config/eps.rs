//! `[eps]`: the eager param-server, in memory or on file.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::Config;
use super::check::{rate, refuse};
use crate::error::Error;

/// `[eps]`
#[derive(Clone, Debug, Default, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct EpsConfig {
    /// The place of weights, optimizer state and waiting gradients: `memory`, or a `file` of which
    /// a few blocks at a time are in memory.
    pub tier: EpsTier,
    /// Folder of the file of `tier = "file"`. One run uses it at a time, and `--resume` continues
    /// from it without a checkpoint. With several processes, each has a folder of its own there.
    pub path: Option<PathBuf>,
    /// For experiments: emulates a slow optimizer, so that each update takes at least as long as at
    /// this many bytes of gradient a second, for instance `1GB/s`.
    pub update_rate: Option<String>,
    /// For experiments: emulates a slow disk for checkpoints and for `tier = "file"`, for instance
    /// `200MB/s`.
    pub disk_rate: Option<String>,
}

/// The place of weights and optimizer state.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum EpsTier {
    /// In host memory.
    #[default]
    Memory,
    /// In a file.
    File,
}

impl EpsConfig {
    pub(super) fn check(&self) -> Result<(), Error> {
        let problem = "is missing: with eps.tier = \"file\" it names the folder of the file";
        refuse(self.tier == EpsTier::File && self.path.is_none(), "eps.path", problem)?;
        refuse(
            self.path.as_ref().is_some_and(|path| path.as_os_str().is_empty()),
            "eps.path",
            "is empty: give a folder",
        )
    }
}

impl Config {
    /// `eps.update_rate` in bytes a second. A text that is no rate is an error.
    pub fn update_bytes_per_second(&self) -> Result<Option<f64>, Error> {
        rate("eps.update_rate", self.eps.update_rate.as_deref())
    }

    /// `eps.disk_rate` in bytes a second. A text that is no rate is an error.
    pub fn disk_bytes_per_second(&self) -> Result<Option<f64>, Error> {
        rate("eps.disk_rate", self.eps.disk_rate.as_deref())
    }
}
