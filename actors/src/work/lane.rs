//! Lanes and their queues.

use crate::schedule::{DeviceId, Pools};

/// A kind of in-order queue of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Lane {
    /// Host to device, and stash to device.
    Upload,
    /// Kernels.
    Compute,
    /// Device to host, and device to stash.
    Download,
    /// Gathers, losses, sums of gradients, scatters.
    Host,
    /// Updates in the EPS.
    Update,
    /// Files under the EPS.
    File,
    /// Device to device.
    Peer,
    /// Parts of blocks, between the processes of a run.
    Fetch,
    /// Gradients and sums, between the processes of a run.
    Exchange,
}

/// A queue of operations that run in order: a lane of a device, or one of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Queue {
    /// The lane.
    pub lane: Lane,
    /// The device; `None`: the host.
    pub device: Option<DeviceId>,
}

impl Queue {
    /// All queues of a ring with these pools.
    pub fn all(pools: &Pools) -> Vec<Queue> {
        let of_lane = |lane: Lane| -> Vec<Queue> {
            if lane.is_of_device() {
                (0..pools.devices)
                    .map(|device| Queue { lane, device: Some(device as DeviceId) })
                    .collect()
            } else {
                vec![Queue { lane, device: None }]
            }
        };
        let is_there = |lane: &Lane| match lane {
            Lane::Peer => pools.shards > 1,
            Lane::Fetch | Lane::Exchange => pools.ranks > 1,
            _ => true,
        };
        Lane::ALL.into_iter().filter(is_there).flat_map(of_lane).collect()
    }
}

impl Lane {
    /// True for a lane that each device has, false for one of the host.
    pub fn is_of_device(self) -> bool {
        matches!(self, Lane::Upload | Lane::Peer | Lane::Compute | Lane::Download)
    }

    /// True for a lane that every ring has. Others are there only with shards or several processes.
    pub fn is_always_there(self) -> bool {
        !matches!(self, Lane::Peer | Lane::Fetch | Lane::Exchange)
    }

    /// All lanes, in flow order; behind them those that not every ring has.
    pub const ALL: [Lane; 9] = [
        Lane::Upload,
        Lane::Compute,
        Lane::Download,
        Lane::Host,
        Lane::Update,
        Lane::File,
        Lane::Peer,
        Lane::Fetch,
        Lane::Exchange,
    ];

    /// The name of the lane in metrics and timelines.
    pub fn name(self) -> &'static str {
        match self {
            Lane::Upload => "upload",
            Lane::Compute => "compute",
            Lane::Download => "download",
            Lane::Host => "host",
            Lane::Update => "update",
            Lane::File => "file",
            Lane::Peer => "peer",
            Lane::Fetch => "fetch",
            Lane::Exchange => "exchange",
        }
    }
}
