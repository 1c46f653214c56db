//! The names of the actors.

use std::fmt;

use crate::schedule::{DeviceId, Pools};

/// One actor of a ring. Some serve one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ActorName {
    /// Reads blocks that are on file, and gathers.
    Fetcher,
    /// Uploads.
    Prefetcher(DeviceId),
    /// Copies shards of blocks from other devices.
    PeerCopier(DeviceId),
    /// Computes.
    Executor(DeviceId),
    /// Downloads boundaries.
    Stasher(DeviceId),
    /// Downloads and joins gradients.
    Reducer,
    /// Updates.
    Optimizer,
}

impl ActorName {
    /// All actors of a ring with these pools, in flow order; behind them PeerCopiers, if it has
    /// any.
    pub fn all(pools: &Pools) -> Vec<ActorName> {
        let of_device =
            |d| [ActorName::Prefetcher(d), ActorName::Executor(d), ActorName::Stasher(d)];
        let devices = || (0..pools.devices).map(|device| device as DeviceId);
        let mut all = vec![ActorName::Fetcher];
        all.extend(devices().flat_map(of_device));
        all.extend([ActorName::Reducer, ActorName::Optimizer]);
        all.extend(devices().filter(|_| pools.shards > 1).map(ActorName::PeerCopier));
        all
    }

    /// Its place in [`all`](ActorName::all).
    pub(crate) fn index(self, devices: usize) -> usize {
        match self {
            ActorName::Fetcher => 0,
            ActorName::Prefetcher(device) => 1 + 3 * usize::from(device),
            ActorName::Executor(device) => 2 + 3 * usize::from(device),
            ActorName::Stasher(device) => 3 + 3 * usize::from(device),
            ActorName::Reducer => 1 + 3 * devices,
            ActorName::Optimizer => 2 + 3 * devices,
            ActorName::PeerCopier(device) => 3 + 3 * devices + usize::from(device),
        }
    }

    /// The device it serves; `None`: all.
    pub fn device(self) -> Option<DeviceId> {
        match self {
            ActorName::Prefetcher(device)
            | ActorName::PeerCopier(device)
            | ActorName::Executor(device)
            | ActorName::Stasher(device) => Some(device),
            ActorName::Fetcher | ActorName::Reducer | ActorName::Optimizer => None,
        }
    }

    /// The name of its role in metrics, the same on every device.
    pub fn role(self) -> &'static str {
        match self {
            ActorName::Fetcher => "fetcher",
            ActorName::Prefetcher(_) => "prefetcher",
            ActorName::PeerCopier(_) => "peer_copier",
            ActorName::Executor(_) => "executor",
            ActorName::Stasher(_) => "stasher",
            ActorName::Reducer => "reducer",
            ActorName::Optimizer => "optimizer",
        }
    }
}

impl fmt::Display for ActorName {
    /// The first device is not named: most rings have no other.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.device().filter(|&device| device > 0) {
            Some(device) => write!(f, "{} of device {device}", self.role()),
            None => f.write_str(self.role()),
        }
    }
}
