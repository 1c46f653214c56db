//! What the device counts while it works, inside its copies and kernels.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// What was used so far.
#[derive(Debug, Default)]
pub(crate) struct Used {
    /// Bytes moved over the link, or what stands for it.
    pub(super) uploaded: AtomicU64,
    pub(super) downloaded: AtomicU64,
    /// Floats of workspace that were in use at once, at most.
    pub(super) workspace: AtomicU64,
}

impl Used {
    /// Bytes to the device.
    pub(crate) fn uploaded(&self) -> u64 {
        self.uploaded.load(Relaxed)
    }

    /// Bytes from the device.
    pub(crate) fn downloaded(&self) -> u64 {
        self.downloaded.load(Relaxed)
    }

    /// Floats of workspace that were in use at once, at most.
    pub(crate) fn workspace(&self) -> u64 {
        self.workspace.load(Relaxed)
    }
}
