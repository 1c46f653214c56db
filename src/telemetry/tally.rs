//! The sums that the ledger keeps: times by lane, by device and by layer, and waits by cause.

use std::time::Duration;

use l2l_actors::work::Lane;

/// The reason that a compute lane was idle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WaitCause {
    /// A copy to the device.
    Upload,
    /// A copy from the device.
    Download,
    /// Work of the host: gathers, losses, sums.
    Host,
    /// An update.
    Update,
    /// The file under the EPS.
    File,
    /// Kernels of other devices.
    Devices,
    /// Exchanges with other processes.
    Fabric,
    /// The latency of the ring: the time between the end of an operation and the begin of the one
    /// that waited for it.
    Ring,
}

impl WaitCause {
    /// All causes, in the order of their numbers.
    pub const ALL: [WaitCause; 8] = [
        WaitCause::Upload,
        WaitCause::Download,
        WaitCause::Host,
        WaitCause::Update,
        WaitCause::File,
        WaitCause::Devices,
        WaitCause::Fabric,
        WaitCause::Ring,
    ];

    /// The name of the cause in metrics and events.
    pub fn name(self) -> &'static str {
        ["upload", "download", "host", "update", "file", "devices", "fabric", "ring"][self as usize]
    }

    /// True for copies over the link.
    pub fn is_transfer(self) -> bool {
        matches!(self, WaitCause::Upload | WaitCause::Download)
    }

    pub(super) fn of(lane: Lane) -> WaitCause {
        match lane {
            Lane::Upload => WaitCause::Upload,
            Lane::Download => WaitCause::Download,
            Lane::Host => WaitCause::Host,
            Lane::Update => WaitCause::Update,
            Lane::File => WaitCause::File,
            Lane::Compute | Lane::Peer => WaitCause::Devices,
            Lane::Fetch | Lane::Exchange => WaitCause::Fabric,
        }
    }
}

/// The work of one lane.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LaneTally {
    /// The time it worked.
    pub busy: Duration,
    /// The number of operations.
    pub operations: u64,
}

/// The work for one layer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LayerTally {
    /// Time of visits, forward and backward, on the lanes of upload, compute, download and host
    /// (gathers and scatters).
    pub visits: [[Duration; 4]; 2],
    /// Time in which the compute lane was idle at this layer, by [`WaitCause`].
    pub waited: [Duration; WaitCause::ALL.len()],
    /// The number of updates of its blocks.
    pub updates: u64,
}

impl LayerTally {
    /// Time that its transfers took.
    pub fn transfer(&self) -> Duration {
        self.visits.iter().map(|phase| phase[0] + phase[2]).sum()
    }

    /// Time in which the compute lane was idle at this layer, for transfers or for other causes.
    pub fn waited(&self, transfer: bool) -> Duration {
        let of = |cause: &&WaitCause| cause.is_transfer() == transfer;
        WaitCause::ALL.iter().filter(of).map(|&cause| self.waited[cause as usize]).sum()
    }
}

/// The work of one device.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DeviceTally {
    /// The work of each [`Lane`]; the host's lanes are zero.
    pub lanes: [LaneTally; Lane::ALL.len()],
    /// Time in which its compute lane was idle within steps, by [`WaitCause`].
    pub waited: [Duration; WaitCause::ALL.len()],
}

/// All sums of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tally {
    /// The work of each [`Lane`], the sum over all devices.
    pub lanes: [LaneTally; Lane::ALL.len()],
    /// Time in which a compute lane was idle within steps, by [`WaitCause`], the mean over the
    /// devices.
    pub waited: [Duration; WaitCause::ALL.len()],
    /// The work of each device.
    pub devices: Vec<DeviceTally>,
    /// Time outside steps in which the run waited for a checkpoint.
    pub checkpoints: Duration,
    /// Time outside steps: between the end of one and the begin of the next.
    pub outside: Duration,
    /// The work for each layer.
    pub layers: Vec<LayerTally>,
}

impl Tally {
    /// Exposed wait: the sum of [`waited`](Tally::waited).
    pub fn exposed(&self) -> Duration {
        self.waited.iter().sum()
    }
}
