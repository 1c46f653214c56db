//! Gives a run's metrics to a recorder of the `metrics` crate: an application's own, or ours.

use std::sync::Arc;

use metrics::{Key, KeyName, Label, Level, Metadata, Recorder, SharedString};

use l2l_actors::work::Lane;

use super::{METRICS, Metric, MetricKind, Observe, RunView, Slice, Unit, samples};
use crate::engine::StepReport;

static METADATA: Metadata<'static> = Metadata::new("l2l", Level::INFO, Some("l2l"));

/// Gives a recorder the description of each metric. To be called once, before [`publish`].
pub fn describe(recorder: &dyn Recorder) {
    for metric in METRICS {
        let name = KeyName::from_const_str(metric.name);
        let help = SharedString::const_str(metric.help);
        let unit = match metric.unit {
            Unit::Count => Some(metrics::Unit::Count),
            Unit::Seconds => Some(metrics::Unit::Seconds),
            Unit::Bytes => Some(metrics::Unit::Bytes),
            Unit::Ratio | Unit::None => None,
        };
        match metric.kind {
            MetricKind::Counter if metric.counts_whole() => {
                recorder.describe_counter(name, unit, help)
            }
            MetricKind::Counter | MetricKind::Gauge => recorder.describe_gauge(name, unit, help),
            MetricKind::Histogram => recorder.describe_histogram(name, unit, help),
        }
    }
}

impl Metric {
    /// True for counters of whole numbers, which are counters of the `metrics` crate. A counter of
    /// seconds is a gauge there; our own listener calls it a counter when Prometheus asks.
    pub(super) fn counts_whole(&self) -> bool {
        self.unit != Unit::Seconds
    }

    fn key(&self, run: &str, values: &[&str]) -> Key {
        let labels = self.labels.iter().zip(values);
        let all = [(&"run", &run)].into_iter().chain(labels);
        let all = all.map(|(label, value)| Label::new(*label, (*value).to_owned()));
        Key::from_parts(self.name, all.collect::<Vec<_>>())
    }
}

/// Sets all metrics of a run but its histograms. To be called before the recorder is read.
pub fn publish(view: &RunView, recorder: &dyn Recorder) {
    samples(view, |metric, labels, value| {
        let key = metric.key(&view.run, labels);
        match metric.kind {
            MetricKind::Counter if metric.counts_whole() => {
                recorder.register_counter(&key, &METADATA).absolute(value as u64);
            }
            _ => recorder.register_gauge(&key, &METADATA).set(value),
        }
    });
}

/// Gives a recorder the time of each operation and of each step, as they end.
pub struct Histograms {
    lanes: [metrics::Histogram; Lane::ALL.len()],
    steps: metrics::Histogram,
}

impl Histograms {
    /// Makes the histograms of the run `run`.
    pub fn new(run: &str, recorder: &dyn Recorder) -> Arc<Histograms> {
        let operation = Metric::named("l2l_operation_seconds");
        let of_track = |track: Lane| {
            recorder.register_histogram(&operation.key(run, &[track.name()]), &METADATA)
        };
        let step = Metric::named("l2l_step_seconds").key(run, &[]);
        Arc::new(Histograms {
            lanes: Lane::ALL.map(of_track),
            steps: recorder.register_histogram(&step, &METADATA),
        })
    }
}

impl Observe for Histograms {
    fn heard(&self, slice: &Slice) {
        self.lanes[slice.lane as usize].record(slice.took().as_secs_f64());
    }

    fn stepped(&self, report: &StepReport) {
        self.steps.record(report.seconds);
    }
}
