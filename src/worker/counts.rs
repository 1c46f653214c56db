//! Counts of copied bytes and used workspace, which devices add to while they work.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use l2l_actors::schedule::DeviceId;
use l2l_actors::work::Lane;

use crate::plan::LinkBytes;

/// Bytes that one device copied over its link, or left in memory that it shares with the host.
#[derive(Debug, Default)]
pub(super) struct LinkUsed {
    pub(super) uploaded: AtomicU64,
    pub(super) downloaded: AtomicU64,
    /// From other devices.
    pub(super) peers: AtomicU64,
}

/// Counts of a run until now.
#[derive(Debug)]
pub(crate) struct Used {
    /// By device.
    pub(super) links: Vec<LinkUsed>,
    /// The peak of the workspace, in floats.
    pub(super) workspace: AtomicU64,
}

impl Used {
    /// Zeros for this number of devices.
    pub(super) fn of(devices: usize) -> Used {
        let links = (0..devices).map(|_| LinkUsed::default()).collect();
        Used { links, workspace: AtomicU64::default() }
    }

    /// Bytes that a device's lane has copied; 0 for a lane that copies nothing.
    pub(super) fn copied(&self, lane: Lane, device: DeviceId) -> u64 {
        let link = &self.links[usize::from(device)];
        match lane {
            Lane::Upload => link.uploaded.load(Relaxed),
            Lane::Peer => link.peers.load(Relaxed),
            Lane::Download => link.downloaded.load(Relaxed),
            _ => 0,
        }
    }

    /// Bytes that each device copied.
    pub(crate) fn links(&self) -> Vec<LinkBytes> {
        let bytes = |link: &LinkUsed| LinkBytes {
            upload: link.uploaded.load(Relaxed),
            download: link.downloaded.load(Relaxed),
            peers: link.peers.load(Relaxed),
        };
        self.links.iter().map(bytes).collect()
    }

    /// Bytes that all devices copied.
    pub(crate) fn all_links(&self) -> LinkBytes {
        self.links().into_iter().fold(LinkBytes::default(), LinkBytes::plus)
    }

    /// The peak of the workspace, in floats.
    pub(crate) fn workspace(&self) -> u64 {
        self.workspace.load(Relaxed)
    }
}
