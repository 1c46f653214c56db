//! Emulated rates, and runs without copies: a decorator of the lanes' work.
//!
//! An operation is done as ever, and its lane then sleeps for the rest of the time that slower
//! hardware would take. A run without copies skips the copies between host and device, to measure
//! the time that they cost.

use std::sync::Arc;
use std::time::{Duration, Instant};

use l2l_actors::schedule::Role;
use l2l_actors::threads::{LaneWork, Pending};
use l2l_actors::work::{Lane, Queue, Work};
use l2l_actors::{BoxedError, Operation, Step};

use super::{StepInput, Worker};
use crate::config::Config;
use crate::error::Error;
use crate::plan::share_of_piece;

/// A worker that works at the rates of slower hardware, or without copies.
pub(crate) struct Emulated {
    worker: Worker,
    rates: Rates,
    /// True if only the first step copies between host and device.
    without_copies: bool,
}

/// Rates of emulated hardware; `None`: as fast as it is.
struct Rates {
    /// Bytes a second between host and device, and between devices.
    link: Option<f64>,
    /// FLOP/s of kernels.
    kernels: Option<f64>,
    /// Bytes of gradients a second.
    updates: Option<f64>,
    /// Bytes a second.
    disk: Option<f64>,
    /// Bytes a second.
    fabric: Option<f64>,
}

impl Emulated {
    /// # Errors
    /// A rate of the config is none.
    pub(crate) fn new(
        config: &Config,
        worker: Worker,
        without_copies: bool,
    ) -> Result<Emulated, Error> {
        let rates = Rates {
            link: config.link_bytes_per_second()?,
            kernels: config.flops_per_second()?,
            updates: config.update_bytes_per_second()?,
            disk: config.disk_bytes_per_second()?,
            fabric: config.fabric_bytes_per_second()?,
        };
        Ok(Emulated { worker, rates, without_copies })
    }

    /// The worker that does the work.
    pub(crate) fn worker(&self) -> &Worker {
        &self.worker
    }

    /// True for work that a run `without_copies` skips: copies, and the host's work that reads
    /// their results. Statistics are still copied: they are small, and kernels read labels there.
    fn skips(&self, operation: &Operation) -> bool {
        let step = operation.step();
        if !self.without_copies || step.number == 0 {
            return false;
        }
        match operation.work() {
            Work::UploadBoundary { inputs: placed, .. }
            | Work::DownloadBoundary { outputs: placed, .. } => {
                step.plan.schedule.boundary(placed.boundary).role != Role::Statistics
            }
            Work::UploadBlock { .. } | Work::CopyShards { .. } | Work::DownloadGradient { .. } => {
                true
            }
            Work::Measure { .. } | Work::Answer { .. } => true,
            Work::Loss { .. } | Work::Scatter { .. } => true,
            Work::Join { .. } | Work::Merge { .. } => true,
            _ => false,
        }
    }

    /// Bytes that an operation's lane has copied until now, if it is a lane of copies. No other
    /// lane adds to this count.
    fn copied(&self, operation: &Operation) -> u64 {
        let device = operation.device().unwrap_or_default();
        self.worker.used().copied(operation.work().lane(), device)
    }

    /// True if an operation's copy crosses the link: a block or a gradient always does, a boundary
    /// only if the stash is on the host.
    fn crosses_link(&self, operation: &Operation) -> bool {
        let is_boundary =
            matches!(operation.work(), Work::UploadBoundary { .. } | Work::DownloadBoundary { .. });
        !is_boundary || !self.worker.plan().stash_on_device()
    }

    /// FLOPs of an operation of the compute lane.
    fn flops(&self, operation: &Operation) -> u64 {
        let &Work::Compute { device_visit, micro_batch, .. } = operation.work() else {
            unreachable!("{} is not work of the compute lane", operation.work())
        };
        let visit = operation.step().plan.visit(device_visit);
        let state = self.worker.shared.state(operation);
        let positions = state.positions(micro_batch);
        // How much of it a backward pass recomputes depends on what the layer saves.
        let save = self.worker.plan().saves(visit.layer);
        let layer = visit.layer.0 as usize;
        let mean = self.worker.model().visit_flops(layer, visit.phase, positions, save);
        (mean * share_of_piece(&operation.step().plan.schedule, visit)) as u64
    }

    /// Bytes of the gradient that an operation of the update lane applies.
    fn updated_bytes(&self, operation: &Operation) -> u64 {
        let shared = &self.worker.shared;
        match *operation.work() {
            Work::Update { block, norm, .. } if !shared.skips_update(norm) => {
                (shared.own_trained_len(block) * size_of::<f32>()) as u64
            }
            _ => 0,
        }
    }

    /// Sleeps for the rest of the time that an operation would take. It began at `begin`, and
    /// copied `copied` bytes between host and device, or between devices.
    fn throttle(&self, operation: &Operation, begin: Instant, copied: u64) {
        let rates = &self.rates;
        let moved = || operation.work().bytes(&operation.step().plan.schedule);
        match operation.work().lane() {
            Lane::Upload | Lane::Peer | Lane::Download if self.crosses_link(operation) => {
                throttle(begin, || copied, rates.link);
            }
            Lane::Compute => throttle(begin, || self.flops(operation), rates.kernels),
            Lane::Update => throttle(begin, || self.updated_bytes(operation), rates.updates),
            Lane::File => throttle(begin, moved, rates.disk),
            Lane::Fetch | Lane::Exchange => throttle(begin, moved, rates.fabric),
            Lane::Upload | Lane::Peer | Lane::Download | Lane::Host => {}
        }
    }
}

impl LaneWork for Emulated {
    type Batch = StepInput;

    fn begin(&self, step: &Arc<Step>, input: StepInput, now: Duration) {
        self.worker.begin(step, input, now);
    }

    fn perform(&self, operation: &Operation) -> Result<f64, BoxedError> {
        if self.skips(operation) {
            return Ok(0.0);
        }
        let begin = Instant::now();
        let copied = self.copied(operation);
        let value = self.worker.perform(operation)?;
        self.throttle(operation, begin, self.copied(operation) - copied);
        Ok(value)
    }

    fn issues(&self, queue: Queue) -> bool {
        self.worker.issues(queue)
    }

    /// Rates are not emulated here: devices that issue their work are as fast as they are.
    fn issue(&self, operation: &Operation, now: Duration) -> Result<Pending, BoxedError> {
        if self.skips(operation) {
            return self.worker.issue_work(operation, now, || Ok(0.0));
        }
        self.worker.issue(operation, now)
    }
}

/// Sleeps for what is left of `amount / rate` since `begin`, if a rate is emulated.
pub(crate) fn throttle(begin: Instant, amount: impl FnOnce() -> u64, rate: Option<f64>) {
    if let Some(rate) = rate {
        let takes = Duration::from_secs_f64(amount() as f64 / rate);
        std::thread::sleep(takes.saturating_sub(begin.elapsed()));
    }
}
