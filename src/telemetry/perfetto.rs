//! Slices as events of the Trace Event Format, which Perfetto and Chrome read: a process for each
//! rank, with a row for each lane.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use l2l_actors::work::{Lane, WorkKind};
use serde_json::{Value, json};

use super::{Slice, SliceKind};
use crate::fabric::{ClockOffset, Rank};

/// The rank that a timeline belongs to, and the offset of its clock from the first rank's.
pub(super) type Place = (Rank, ClockOffset);

/// A step as a timeline's file: what a run writes as its operations end. `name` stands above it.
pub fn timeline(name: &str, slices: &[Slice]) -> String {
    let mut events = Events::new(None);
    let mut all = events.head(name);
    all.extend(slices.iter().flat_map(|slice| events.of(slice)));
    let all: Vec<String> = all.iter().map(Value::to_string).collect();
    format!("[\n{}\n]\n", all.join(",\n"))
}

/// Each rank numbers its threads and arrows from a multiple of these.
const THREADS: u64 = 1 << 12;
const ARROWS: u64 = 1 << 32;

/// Makes the events of a rank. Times are those of the first rank's clock.
pub(super) struct Events {
    rank: u64,
    clock: ClockOffset,
    /// Rows that have a name, besides those of lanes that every run has.
    named: BTreeSet<(Lane, Option<u8>)>,
    /// Arrows that have begun, by block: from its upload to its first use, and from its gradient
    /// to its update.
    uploads: HashMap<u32, u64>,
    gradients: HashMap<u32, u64>,
    next_arrow: u64,
}

impl Events {
    /// Begins the events of a rank; without a place, of the only process.
    pub(super) fn new(place: Option<Place>) -> Events {
        let (rank, clock) = place.unwrap_or_default();
        let rank = u64::from(rank);
        Events {
            rank,
            clock,
            named: BTreeSet::new(),
            uploads: HashMap::new(),
            gradients: HashMap::new(),
            next_arrow: rank * ARROWS,
        }
    }

    fn process(&self) -> u64 {
        1 + self.rank
    }

    /// The number of a row's thread. It differs from the process's number, which viewers take for
    /// the main thread. The lanes of the host and of the first device come first, then those of
    /// each other device.
    fn thread(&self, lane: Lane, device: Option<u8>) -> u64 {
        let row = lane as usize + Lane::ALL.len() * usize::from(device.unwrap_or_default());
        self.rank * THREADS + 2 + row as u64
    }

    /// The events that name the process and the rows that every run has.
    pub(super) fn head(&self, name: &str) -> Vec<Value> {
        let mut events = vec![self.about("process_name", json!({ "name": name }))];
        if self.rank > 0 {
            events.push(self.about("process_sort_index", json!({ "sort_index": self.rank })));
            let micros = self.clock.within_nanos as f64 / 1e3;
            events.push(self.label(&format!("clock within {micros:.1} µs of rank 0's")));
        }
        let lanes = Lane::ALL.into_iter().filter(|lane| lane.is_always_there());
        events.extend(lanes.flat_map(|lane| self.row_names(lane, None)));
        events
    }

    /// The event that shows a text beside the process.
    pub(super) fn label(&self, text: &str) -> Value {
        self.about("process_labels", json!({ "labels": text }))
    }

    /// An event about the process.
    fn about(&self, what: &str, args: Value) -> Value {
        json!({ "ph": "M", "pid": self.process(), "name": what, "args": args })
    }

    /// The events that name a row.
    fn row_names(&self, lane: Lane, device: Option<u8>) -> [Value; 2] {
        let tid = self.thread(lane, device);
        let name = match device.filter(|&device| device > 0) {
            Some(device) => format!("{} of device {device}", lane.name()),
            None => lane.name().to_string(),
        };
        let names = [
            ("thread_name", json!({ "name": name })),
            ("thread_sort_index", json!({ "sort_index": tid })),
        ];
        names.map(|(what, args)| {
            let mut event = self.about(what, args);
            event["tid"] = json!(tid);
            event
        })
    }

    /// Microseconds by the first rank's clock.
    fn micros(&self, time: Duration) -> f64 {
        (time.as_nanos() as i64 + self.clock.nanos) as f64 / 1e3
    }

    /// The events of a slice: the slice itself, and the arrow that begins or ends there. The first
    /// slice of a row without a name is preceded by the name.
    pub(super) fn of(&mut self, slice: &Slice) -> Vec<Value> {
        let mut events = Vec::new();
        let other = slice.device.filter(|&device| device > 0);
        let is_named = other.is_none() && slice.lane.is_always_there();
        if !is_named && self.named.insert((slice.lane, other)) {
            events.extend(self.row_names(slice.lane, other));
        }
        let pid = self.process();
        let tid = self.thread(slice.lane, slice.device);
        let name = match (slice.layer, slice.micro_batch) {
            (Some(layer), Some(m)) => format!("{} {layer}.{m}", slice.kind.name()),
            (Some(layer), None) => format!("{} {layer}", slice.kind.name()),
            _ => slice.kind.name().to_string(),
        };
        let mut args = json!({ "step": slice.step, "bytes": slice.bytes });
        let mut add = |key: &str, value: Option<Value>| {
            value.into_iter().for_each(|value| args[key] = value);
        };
        add("layer", slice.layer.map(Value::from));
        add("phase", slice.phase.map(Value::from));
        add("micro_batch", slice.micro_batch.map(Value::from));
        add("block", slice.block.map(Value::from));
        add("version", slice.version.map(Value::from));
        let begin = self.micros(slice.begin);
        events.push(json!({
            "ph": "X", "pid": pid, "tid": tid, "name": name, "cat": slice.kind.name(),
            "ts": begin, "dur": slice.took().as_nanos() as f64 / 1e3, "args": args,
        }));
        if let Some((ph, id, kind)) = self.arrow(slice) {
            let mut event = json!({ "ph": ph, "pid": pid, "tid": tid, "id": id, "name": kind,
                                    "cat": kind, "ts": begin });
            if ph == "f" {
                event["bp"] = json!("e"); // to the slice around it
            }
            events.push(event);
        }
        events
    }

    /// The arrow that begins or ends at a slice: `s` or `f`, its number and its name.
    fn arrow(&mut self, slice: &Slice) -> Option<(&'static str, u64, &'static str)> {
        const UPLOAD: &str = "upload to first use";
        const GRADIENT: &str = "gradient to update";
        let (block, SliceKind::Work(kind)) = (slice.block?, slice.kind) else { return None };
        match kind {
            WorkKind::Weights => {
                self.next_arrow += 1;
                self.uploads.insert(block, self.next_arrow);
                Some(("s", self.next_arrow, UPLOAD))
            }
            WorkKind::Forward | WorkKind::Keys | WorkKind::Backward => {
                Some(("f", self.uploads.remove(&block)?, UPLOAD))
            }
            WorkKind::Gradient | WorkKind::Scatter => {
                self.next_arrow += 1;
                self.gradients.insert(block, self.next_arrow);
                Some(("s", self.next_arrow, GRADIENT))
            }
            WorkKind::Update => Some(("f", self.gradients.remove(&block)?, GRADIENT)),
            _ => None,
        }
    }
}
