//! One piece of work on one track of the timeline.

use std::time::Duration;

use l2l_actors::Record;
use l2l_actors::schedule::Phase;
use l2l_actors::work::{Lane, WorkKind};
use serde::{Serialize, Serializer};

use crate::engine::StepReport;

/// The kind of a piece of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SliceKind {
    /// An operation of the ring.
    Work(WorkKind),
    /// A checkpoint, written beside steps.
    Checkpoint,
}

impl SliceKind {
    /// The name of the kind in timelines and JSON: the name of the work, or `checkpoint`.
    pub fn name(self) -> &'static str {
        match self {
            SliceKind::Work(kind) => kind.name(),
            SliceKind::Checkpoint => "checkpoint",
        }
    }
}

impl PartialEq<WorkKind> for SliceKind {
    fn eq(&self, kind: &WorkKind) -> bool {
        *self == SliceKind::Work(*kind)
    }
}

/// One piece of work on one lane. All slices of a run count time from the same origin.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Slice {
    /// The operation's number in the ring; `None` for a checkpoint.
    pub number: Option<u64>,
    /// The lane that it ran on.
    #[serde(rename = "track", serialize_with = "name_of")]
    pub lane: Lane,
    /// The device of that lane; `None` for lanes of the host.
    pub device: Option<u8>,
    /// The kind of work.
    #[serde(serialize_with = "kind_name")]
    pub kind: SliceKind,
    /// The step of the ring, from 1, whether it trains or not.
    pub step: u64,
    /// The index of its layer.
    pub layer: Option<u32>,
    /// The phase of its visit: `forward` or `backward`.
    pub phase: Option<&'static str>,
    /// The index of its micro-batch.
    pub micro_batch: Option<u32>,
    /// The index of its block.
    pub block: Option<u32>,
    /// The version of the block that it read.
    pub version: Option<u64>,
    /// Bytes it moved between host and device, or to the disk.
    pub bytes: u64,
    /// The time at which it began.
    #[serde(serialize_with = "seconds")]
    pub begin: Duration,
    /// The time at which it ended.
    #[serde(serialize_with = "seconds")]
    pub end: Duration,
    /// The operation whose end let it begin.
    pub released_by: Option<u64>,
}

fn name_of<S: Serializer>(lane: &Lane, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(lane.name())
}

fn kind_name<S: Serializer>(kind: &SliceKind, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(kind.name())
}

fn seconds<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(time.as_secs_f64())
}

fn name(phase: Phase) -> &'static str {
    if phase.is_backward() { "backward" } else { "forward" }
}

impl Slice {
    /// Makes the slice of an operation's record.
    pub fn of(record: &Record) -> Slice {
        Slice {
            number: Some(record.number),
            lane: record.lane,
            device: record.device,
            kind: SliceKind::Work(record.kind),
            step: record.step + 1,
            layer: record.layer.map(|layer| layer.0),
            phase: record.phase.map(name),
            micro_batch: record.micro_batch,
            block: record.block.map(|block| block.0),
            version: record.block.map(|_| record.step),
            bytes: record.bytes,
            begin: record.begin,
            end: record.end,
            released_by: record.released_by,
        }
    }

    /// The time from its begin to its end.
    pub fn took(&self) -> Duration {
        self.end.saturating_sub(self.begin)
    }
}

/// Hears of every slice, on the thread that did the work. Lanes are delayed by an implementation
/// that is slow or waits.
pub trait Observe: Send + Sync + 'static {
    /// A slice ended.
    fn heard(&self, slice: &Slice);

    /// A training step ended.
    fn stepped(&self, report: &StepReport) {
        _ = report;
    }
}
