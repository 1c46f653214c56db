//! Keys of checkpoints.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::ByteSize;

/// `[checkpoint]`
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct CheckpointConfig {
    /// Directory of the run's checkpoints; none are written when absent. One run uses it at a time.
    pub directory: Option<PathBuf>,
    /// Steps between checkpoints; when absent there is one, at the end of the run.
    pub every_steps: Option<u64>,
    /// Number of newest checkpoints to keep. That of the best validation is kept as well.
    pub keep: usize,
    /// What a checkpoint does to the run that cannot be written, for instance to a full disk. Those
    /// before it are untouched.
    pub on_error: OnError,
    /// The most bytes of a file of weights; `auto`: 5 GB, as transformers has it. If no step has
    /// updated the layers of a file since the checkpoint before, the file is a hard link to that
    /// checkpoint's. Smaller files are links more often.
    pub shard_size: ByteSize,
}

/// What follows a checkpoint that could not be written.
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
