//! A recorder of metrics that is not l2l's: it keeps what it is given.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};

/// A metric's unit and help.
pub(crate) type Description = (Option<Unit>, SharedString);

#[derive(Default)]
pub(crate) struct Kept {
    descriptions: Mutex<BTreeMap<String, Description>>,
    counters: Mutex<BTreeMap<Key, Arc<AtomicU64>>>,
    gauges: Mutex<BTreeMap<Key, Arc<AtomicU64>>>,
}

impl Kept {
    /// How a metric was described.
    pub(crate) fn description(&self, name: &str) -> Option<Description> {
        self.descriptions.lock().expect("nothing panics inside").get(name).cloned()
    }

    /// The keys of all counters.
    pub(crate) fn counters(&self) -> Vec<Key> {
        self.counters.lock().expect("nothing panics inside").keys().cloned().collect()
    }

    /// The values of all gauges.
    pub(crate) fn gauges(&self) -> Vec<(Key, f64)> {
        let gauges = self.gauges.lock().expect("nothing panics inside");
        let value = |bits: &AtomicU64| f64::from_bits(bits.load(Relaxed));
        gauges.iter().map(|(key, bits)| (key.clone(), value(bits))).collect()
    }

    fn describe(&self, key: KeyName, unit: Option<Unit>, help: SharedString) {
        let mut descriptions = self.descriptions.lock().expect("nothing panics inside");
        descriptions.insert(key.as_str().into(), (unit, help));
    }
}

impl Recorder for Kept {
    fn describe_counter(&self, key: KeyName, unit: Option<Unit>, help: SharedString) {
        self.describe(key, unit, help);
    }

    fn describe_gauge(&self, key: KeyName, unit: Option<Unit>, help: SharedString) {
        self.describe(key, unit, help);
    }

    fn describe_histogram(&self, key: KeyName, unit: Option<Unit>, help: SharedString) {
        self.describe(key, unit, help);
    }

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        let mut counters = self.counters.lock().expect("nothing panics inside");
        Counter::from_arc(counters.entry(key.clone()).or_default().clone())
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        let mut gauges = self.gauges.lock().expect("nothing panics inside");
        Gauge::from_arc(gauges.entry(key.clone()).or_default().clone())
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        unreachable!("a run's state has no histograms: {key}")
    }
}
