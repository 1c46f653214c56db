//! `[checkpoint]` and `[export]`: files of weights that a run and `l2l export` write.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::ByteSize;
use super::check::{must, refuse};
use crate::error::Error;

/// `[checkpoint]`
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct CheckpointConfig {
    /// Directory of the run's checkpoints; none are written when absent. One run uses it at a time.
    pub directory: Option<PathBuf>,
    /// Steps between checkpoints; when absent, the only checkpoint is at the end of the run.
    pub every_steps: Option<u64>,
    /// Number of newest checkpoints to keep. The one of the best validation is kept as well.
    pub keep: usize,
    /// What happens if a checkpoint cannot be written, for instance to a full disk: `stop` ends the
    /// run, `continue` warns and trains on; the run ends with the error if it was the last one. The
    /// checkpoints before are untouched.
    pub on_error: OnError,
    /// The most bytes of a file of weights; `auto`: 5 GB, as transformers has it. If no step has
    /// updated the layers of a file since the checkpoint before, the file is a hard link to the
    /// file of that checkpoint. Smaller files are links more often.
    pub shard_size: ByteSize,
}

/// What happens if a checkpoint cannot be written.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum OnError {
    /// The run ends with the error.
    #[default]
    Stop,
    /// The run warns, and trains on.
    Continue,
}

impl Default for CheckpointConfig {
    fn default() -> CheckpointConfig {
        CheckpointConfig {
            directory: None,
            every_steps: None,
            keep: 2,
            on_error: OnError::Stop,
            shard_size: ByteSize::default(),
        }
    }
}

impl CheckpointConfig {
    pub(super) fn check(&self) -> Result<(), Error> {
        let has_bytes = self.shard_size.bytes() != Some(0);
        must(self.every_steps != Some(0), "checkpoint.every_steps", "at least 1")?;
        must(self.keep >= 1, "checkpoint.keep", "at least 1")?;
        must(has_bytes, "checkpoint.shard_size", "above 0")?;
        refuse(
            self.every_steps.is_some() && self.directory.is_none(),
            "checkpoint.every_steps",
            "has no place to write to: set checkpoint.directory, or leave the section out \
             (`--set checkpoint=`)",
        )
    }
}

/// `[export]`
#[derive(Clone, Debug, Default, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct ExportConfig {
    /// The dtype of the weights that are written; `source`: the dtype of `model.path`, or f32
    /// without a `model.path`.
    pub dtype: WeightDtype,
    /// The most bytes of a file of weights, for instance `2GB`; more weights are written to several
    /// files and an index. `auto`: 5 GB, as transformers has it.
    pub shard_size: ByteSize,
}

/// The dtype of exported weights.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum WeightDtype {
    /// The dtype of the model that training began with.
    #[default]
    Source,
    /// 32-bit floats.
    F32,
    /// 16-bit floats.
    F16,
    /// 16-bit brain floats.
    Bf16,
}

impl ExportConfig {
    pub(super) fn check(&self) -> Result<(), Error> {
        must(self.shard_size.bytes() != Some(0), "export.shard_size", "above 0")
    }
}
