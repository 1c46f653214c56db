//! The report of a training step: its results, and what its time went to.

use std::time::{Duration, Instant};

use l2l_actors::work::Lane;

use super::{State, Tally, WaitCause, Watch};
use crate::engine::{Bottleneck, Outcome, StepReport};

/// Makes the reports of the training steps of a run, one after another.
pub(crate) struct StepReports {
    watch: Watch,
    last_end: Instant,
    /// The time that checkpoints had taken at the end of the last step.
    last_disk: Duration,
}

/// The sums and the time when a training step began.
pub(crate) struct StepBegin {
    tally: Tally,
    time: Duration,
}

/// What the trainer knows of a step that ended.
pub(crate) struct StepEnd<'o> {
    /// The number of the step.
    pub(crate) step: u64,
    /// The number of the step in the ring, which also counts steps that do not train.
    pub(crate) ring_step: u64,
    pub(crate) outcome: &'o Outcome,
    pub(crate) learning_rate: f64,
    pub(crate) tokens: usize,
    pub(crate) model_flops: f64,
    /// The time so far that updates waited for a checkpoint to be written.
    pub(crate) waited_for_saving: Duration,
}

impl StepReports {
    pub(crate) fn new(watch: Watch) -> StepReports {
        StepReports { watch, last_end: Instant::now(), last_disk: Duration::ZERO }
    }

    /// Notes that a training step begins.
    pub(crate) fn begin(&self) -> StepBegin {
        self.watch.status().state = State::Training;
        StepBegin { tally: self.watch.tally(), time: self.watch.0.observer.now() }
    }

    /// Makes the report of the step, and tells it to all that watch the run.
    pub(crate) fn end(&mut self, begin: StepBegin, end: StepEnd<'_>) -> StepReport {
        let now = Instant::now();
        let seconds = (now - std::mem::replace(&mut self.last_end, now)).as_secs_f64();
        let before = begin.tally;
        let tally = self.watch.tally();
        let waited = std::array::from_fn(|cause| tally.waited[cause] - before.waited[cause]);
        let computed = |device: usize| {
            let busy = |tally: &Tally| tally.devices[device].lanes[Lane::Compute as usize].busy;
            busy(&tally).saturating_sub(busy(&before))
        };
        let devices = tally.devices.len();
        let slowest = (0..devices).rev().max_by_key(|&device| computed(device));
        let slowest = slowest.filter(|_| devices > 1);
        let routers = end.outcome.routers.as_ref();
        let losses = routers.and_then(|routers| routers.losses);
        let share = |device| (device as u8, computed(device).as_secs_f64() / seconds);
        let disk = tally.checkpoints + end.waited_for_saving;
        let of_disk = disk - std::mem::replace(&mut self.last_disk, disk);
        let report = StepReport {
            step: end.step,
            loss: end.outcome.loss,
            balance_loss: losses.map(|losses| losses.balance),
            z_loss: losses.map(|losses| losses.z),
            metrics: end.outcome.metrics,
            grad_norm: end.outcome.norm,
            loss_scale: end.outcome.loss_scale,
            skipped: end.outcome.skipped,
            learning_rate: end.learning_rate,
            tokens: end.tokens,
            model_flops: end.model_flops,
            seconds,
            exposed_wait_seconds: waited.iter().sum::<Duration>().as_secs_f64(),
            bottleneck: bottleneck(seconds, waited, of_disk),
            device_peak_bytes: self.watch.device_memory().iter().map(|term| term.used).sum(),
            slowest_device: slowest.map(share),
        };
        let mut status = self.watch.status();
        status.stepped(&report);
        routers.into_iter().for_each(|routers| status.routed(routers));
        status.bound(end.ring_step, begin.time, self.watch.0.observer.now());
        drop(status);
        self.watch.0.ledger.stepped(&report);
        report
    }
}

/// The bottleneck of a step: what the compute lane waited for most, or the kernels if no wait took
/// a tenth of the step's `seconds`. `disk` is the time that checkpoints took.
fn bottleneck(
    seconds: f64,
    waited: [Duration; WaitCause::ALL.len()],
    disk: Duration,
) -> Bottleneck {
    let of = |cause: WaitCause| waited[cause as usize];
    let waits = [
        (Bottleneck::Upload, of(WaitCause::Upload)),
        (Bottleneck::Download, of(WaitCause::Download)),
        (Bottleneck::Host, of(WaitCause::Host) + of(WaitCause::Ring)),
        (Bottleneck::Update, of(WaitCause::Update)),
        (Bottleneck::Disk, disk + of(WaitCause::File)),
    ];
    let longest = waits.into_iter().max_by_key(|(_, time)| *time);
    let (bottleneck, time) = longest.expect("the list is not empty");
    if time.as_secs_f64() < 0.1 * seconds { Bottleneck::Compute } else { bottleneck }
}
