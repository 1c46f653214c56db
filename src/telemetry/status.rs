//! The course of a run beside its operations: its steps, losses, checkpoints and failures.

use std::collections::VecDeque;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use l2l_actors::{BoxedError, Problem};
use serde::Serialize;

use crate::engine::StepReport;
use crate::error::NotFinite;
use crate::worker::RouterReport;

/// The present state of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// Memory, weights and threads are being made.
    #[default]
    Starting,
    /// Training steps run.
    Training,
    /// A validation runs.
    Validating,
    /// A checkpoint is being written.
    Checkpointing,
    /// It ended well.
    Ended,
    /// It failed.
    Failed,
}

impl State {
    /// All states, in the order of their numbers.
    pub const ALL: [State; 6] = [
        State::Starting,
        State::Training,
        State::Validating,
        State::Checkpointing,
        State::Ended,
        State::Failed,
    ];

    /// The name of the state in metrics.
    pub fn name(self) -> &'static str {
        ["starting", "training", "validating", "checkpointing", "ended", "failed"][self as usize]
    }
}

/// A point of a loss curve.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Point {
    /// The step.
    pub step: u64,
    /// The loss.
    pub loss: f64,
}

/// A curve of at most [`POINTS`] points. When it is full, every second point is dropped.
#[derive(Clone, Debug, Default)]
pub(crate) struct Curve {
    points: Vec<Point>,
    every: u64,
}

const POINTS: usize = 1024;

impl Curve {
    pub(crate) fn push(&mut self, point: Point) {
        self.every = self.every.max(1);
        if self.points.len() == POINTS {
            self.every *= 2;
            let every = self.every;
            self.points.retain(|point| point.step.is_multiple_of(every));
        }
        if point.step.is_multiple_of(self.every) {
            self.points.push(point);
        }
    }

    pub(crate) fn points(&self) -> &[Point] {
        &self.points
    }
}

/// The kinds of failures: a loss that is not finite, an error, a panic, a hang.
pub(crate) const FAULTS: [&str; 4] = ["not_finite", "error", "panic", "hang"];

/// The steps, losses, checkpoints and failures of a run so far.
#[derive(Clone, Debug, Default)]
pub(crate) struct RunStatus {
    pub(crate) state: State,
    pub(crate) steps: u64,
    /// Training steps in each of the ring's.
    pub(crate) window: u64,
    pub(crate) last: Option<StepReport>,
    /// What the routers of layers with experts did in the last step.
    pub(crate) routers: Option<RouterReport>,
    /// Choices of experts that were dropped.
    pub(crate) dropped: u64,
    pub(crate) last_step: Option<f64>,
    pub(crate) validation: Curve,
    pub(crate) validation_loss: Option<f64>,
    /// The values of each set's last validation: set, metric, value.
    pub(crate) measured: Vec<(String, &'static str, f64)>,
    /// Steps that were done before the run resumed.
    pub(crate) resumed: u64,
    pub(crate) losses: Curve,
    /// The last steps: number in the ring, begin and end by the lanes' clock.
    pub(crate) bounds: VecDeque<(u64, Duration, Duration)>,
    pub(crate) tokens: u64,
    /// Steps that changed nothing, because their gradients were not finite.
    pub(crate) skipped: u64,
    pub(crate) model_flops: f64,
    pub(crate) checkpoint: Option<f64>,
    pub(crate) checkpoints_since: Option<f64>,
    pub(crate) checkpoint_failures: u64,
    /// Bytes of the last checkpoint, and bytes that were free on its disk afterwards.
    pub(crate) checkpoint_disk: Option<(u64, u64)>,
    pub(crate) faults: [u64; FAULTS.len()],
    pub(crate) started: f64,
}

/// Steps whose begin and end are kept.
const BOUNDS: usize = 64;

/// Makes up a name for a run, which no other run is likely to have.
pub fn made_up_name() -> String {
    let millis = (unix_seconds() * 1e3) as u64;
    format!("{millis:x}-{:x}", std::process::id())
}

/// The Unix time now, in seconds.
pub(crate) fn unix_seconds() -> f64 {
    seconds_of(SystemTime::now())
}

/// A Unix time in seconds.
pub(crate) fn seconds_of(time: SystemTime) -> f64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

impl RunStatus {
    pub(crate) fn new(steps: u64, window: u32) -> RunStatus {
        RunStatus { steps, window: window.into(), started: unix_seconds(), ..RunStatus::default() }
    }

    /// Training steps done.
    pub(crate) fn step(&self) -> u64 {
        self.last.map_or(self.resumed, |step| step.step)
    }

    pub(crate) fn stepped(&mut self, report: &StepReport) {
        self.last = Some(*report);
        self.last_step = Some(unix_seconds());
        self.losses.push(Point { step: report.step, loss: report.loss });
        self.tokens += report.tokens as u64;
        self.skipped += u64::from(report.skipped);
        self.model_flops += report.model_flops;
    }

    /// Notes what the routers of a step did.
    pub(crate) fn routed(&mut self, routers: &RouterReport) {
        self.dropped += routers.layers.iter().map(|(_, sums)| sums.dropped).sum::<u64>();
        self.routers = Some(routers.clone());
    }

    /// Replaces the values of a validation set.
    pub(crate) fn measured(&mut self, set: &str, values: &[(&'static str, f64)]) {
        self.measured.retain(|(of, ..)| of != set);
        let new = values.iter().map(|&(metric, value)| (set.to_string(), metric, value));
        self.measured.extend(new);
    }

    /// Notes the loss of a validation.
    pub(crate) fn validated(&mut self, point: Point) {
        self.validation_loss = Some(point.loss);
        self.validation.push(point);
    }

    pub(crate) fn bound(&mut self, step: u64, begin: Duration, end: Duration) {
        if self.bounds.len() == BOUNDS {
            self.bounds.pop_front();
        }
        self.bounds.push_back((step, begin, end));
    }

    /// Notes that the ring failed.
    pub(crate) fn failed(&mut self, problem: &Problem) {
        let is_not_finite = |error: &BoxedError| error.downcast_ref::<NotFinite>().is_some();
        let kind = match problem {
            Problem::Error(error) if is_not_finite(error) => 0,
            Problem::Panic(_) => 2,
            Problem::Hang(..) => 3,
            _ => 1,
        };
        self.faults[kind] += 1;
        if let Some(last) = self.last.as_mut().filter(|_| kind == 0) {
            last.loss = f64::NAN;
        }
        self.state = State::Failed;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_stays_small_and_even() {
        let mut curve = Curve::default();
        (1..=100_000).for_each(|step| curve.push(Point { step, loss: 1.0 / step as f64 }));
        let points = curve.points();
        assert!(points.len() <= POINTS && points.len() > POINTS / 4, "{}", points.len());
        let gaps: Vec<u64> = points.windows(2).map(|two| two[1].step - two[0].step).collect();
        assert!(gaps[1..].iter().all(|&gap| gap == gaps[1]), "{gaps:?}");
    }
}
