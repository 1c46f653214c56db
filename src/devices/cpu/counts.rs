//! What the device counts while it works: bytes, workspace, time.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use l2l_actors::ports::Lane;

/// What was counted.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    /// Bytes moved over the link, or what stands for it.
    pub(crate) uploaded: AtomicU64,
    pub(crate) downloaded: AtomicU64,
    /// Floats of workspace that were in use at once, at most.
    pub(crate) workspace: AtomicU64,
    /// Nanoseconds that each lane worked.
    lanes: [AtomicU64; Lane::ALL.len()],
    /// Since when the compute lane is idle within a step, and for how long it was before.
    idle: Mutex<(Option<Instant>, Duration)>,
}

impl Counts {
    /// The compute lane falls idle, or a step begins.
    pub(super) fn rests(&self) {
        self.idle.lock().expect("nothing panics inside").0 = Some(Instant::now());
    }

    /// The compute lane begins an operation.
    pub(super) fn works(&self) {
        let mut idle = self.idle.lock().expect("nothing panics inside");
        let waited = idle.0.take().map_or(Duration::ZERO, |since| since.elapsed());
        idle.1 += waited;
    }

    pub(super) fn lane(&self, lane: Lane) -> &AtomicU64 {
        &self.lanes[Lane::ALL.iter().position(|one| *one == lane).expect("all are listed")]
    }

    /// Nanoseconds that each lane worked.
    pub(crate) fn lanes(&self) -> [u64; Lane::ALL.len()] {
        std::array::from_fn(|index| self.lanes[index].load(Relaxed))
    }

    /// How long the compute lane was idle within steps.
    pub(crate) fn waited(&self) -> Duration {
        self.idle.lock().expect("nothing panics inside").1
    }
}
