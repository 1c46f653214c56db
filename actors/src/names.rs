//! The names of the actors.

use std::fmt;

use crate::schedule::DeviceId;

/// One actor of a ring. Some serve one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ActorName {
    /// Reads what is on file, and gathers.
    Fetcher,
    /// Uploads.
    Prefetcher(DeviceId),
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
    /// All actors of a ring with so many devices, in flow order.
    pub fn all(devices: u32) -> Vec<ActorName> {
        let of_device =
            |d| [ActorName::Prefetcher(d), ActorName::Executor(d), ActorName::Stasher(d)];
        let mut all = vec![ActorName::Fetcher];
        all.extend((0..devices).flat_map(|device| of_device(device as DeviceId)));
        all.extend([ActorName::Reducer, ActorName::Optimizer]);
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
        }
    }

    /// The device it serves; `None`: all.
    pub fn device(self) -> Option<DeviceId> {
        match self {
            ActorName::Prefetcher(device)
            | ActorName::Executor(device)
            | ActorName::Stasher(device) => Some(device),
            ActorName::Fetcher | ActorName::Reducer | ActorName::Optimizer => None,
        }
    }

    /// What it does, whichever device it serves: its name in metrics.
    pub fn role(self) -> &'static str {
        match self {
            ActorName::Fetcher => "fetcher",
            ActorName::Prefetcher(_) => "prefetcher",
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
