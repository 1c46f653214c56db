//! What the device counts while it works, inside its copies and kernels.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::plan::LinkBytes;

/// Bytes that one device moved over its link, or what stands for it.
#[derive(Debug, Default)]
pub(super) struct LinkUsed {
    pub(super) uploaded: AtomicU64,
    pub(super) downloaded: AtomicU64,
    /// From other devices.
    pub(super) peers: AtomicU64,
}

/// What was used so far.
#[derive(Debug)]
pub(crate) struct Used {
    /// By device.
    pub(super) links: Vec<LinkUsed>,
    /// Floats of workspace that were in use at once, at most.
    pub(super) workspace: AtomicU64,
}

impl Used {
    /// Of so many devices.
    pub(super) fn of(devices: usize) -> Used {
        let links = (0..devices).map(|_| LinkUsed::default()).collect();
        Used { links, workspace: AtomicU64::default() }
    }

    /// Bytes moved, by device.
    pub(crate) fn links(&self) -> Vec<LinkBytes> {
        let bytes = |link: &LinkUsed| LinkBytes {
            upload: link.uploaded.load(Relaxed),
            download: link.downloaded.load(Relaxed),
            peers: link.peers.load(Relaxed),
        };
        self.links.iter().map(bytes).collect()
    }

    /// Bytes moved, of all devices.
    pub(crate) fn all_links(&self) -> LinkBytes {
        self.links().into_iter().fold(LinkBytes::default(), LinkBytes::plus)
    }

    /// Floats of workspace that were in use at once, at most.
    pub(crate) fn workspace(&self) -> u64 {
        self.workspace.load(Relaxed)
    }
}
