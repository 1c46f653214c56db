//! What the ledger adds up: times by lane, by device and by layer, and waits by cause.

use std::time::Duration;

use l2l_actors::work::Lane;

/// What the compute lane stood still for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WaitCause {
    /// Something on its way to the device.
    Upload,
    /// Something on its way from it.
    Download,
    /// The host's work: gathers, losses, sums.
    Host,
    /// An update.
    Update,
    /// The file under the EPS.
    File,
    /// Kernels of other devices.
    Devices,
    /// Exchanges with other processes.
    Fabric,
    /// The ring itself: between an end and the begin that it allows.
    Ring,
}

impl WaitCause {
    /// All.
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

    /// Its name in metrics and events.
    pub fn name(self) -> &'static str {
        match self {
            WaitCause::Upload => "upload",
            WaitCause::Download => "download",
            WaitCause::Host => "host",
            WaitCause::Update => "update",
            WaitCause::File => "file",
            WaitCause::Devices => "devices",
            WaitCause::Fabric => "fabric",
            WaitCause::Ring => "ring",
        }
    }

    /// True for what crosses the link.
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

/// What a track did.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LaneTally {
    /// Time it worked.
    pub busy: Duration,
    /// Operations.
    pub operations: u64,
}

/// What was done for a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LayerTally {
    /// Time of visits, forward and backward, on the lanes of upload, compute, download and host
    /// (gathers and scatters).
    pub visits: [[Duration; 4]; 2],
    /// Time in which the compute lane stood still for it, by [`WaitCause`].
    pub waited: [Duration; WaitCause::ALL.len()],
    /// Updates of its blocks.
    pub updates: u64,
}

impl LayerTally {
    /// Time that its transfers took.
    pub fn transfer(&self) -> Duration {
        self.visits.iter().map(|phase| phase[0] + phase[2]).sum()
    }

    /// Time in which the compute lane stood still for it, because of transfers or not.
    pub fn waited(&self, transfer: bool) -> Duration {
        let of = |cause: &&WaitCause| cause.is_transfer() == transfer;
        WaitCause::ALL.iter().filter(of).map(|&cause| self.waited[cause as usize]).sum()
    }
}

/// What one device did.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DeviceTally {
    /// By [`Lane`]; of the device's own.
    pub lanes: [LaneTally; Lane::ALL.len()],
    /// Time in which its compute lane stood still within steps, by [`WaitCause`].
    pub waited: [Duration; WaitCause::ALL.len()],
}

/// Everything added up.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tally {
    /// By [`Lane`], those of all devices in one.
    pub lanes: [LaneTally; Lane::ALL.len()],
    /// Time in which a compute lane stood still within steps, by [`WaitCause`], in the mean of
    /// devices.
    pub waited: [Duration; WaitCause::ALL.len()],
    /// By device.
    pub devices: Vec<DeviceTally>,
    /// Time in which the run stood still for a checkpoint, outside steps.
    pub checkpoints: Duration,
    /// Time outside steps: between the end of one and the begin of the next.
    pub outside: Duration,
    /// By layer.
    pub layers: Vec<LayerTally>,
}

impl Tally {
    /// Exposed wait: all of [`waited`](Tally::waited).
    pub fn exposed(&self) -> Duration {
        self.waited.iter().sum()
    }
}
