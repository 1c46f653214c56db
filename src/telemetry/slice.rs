//! One piece of work on one track of the timeline.

use std::time::Duration;

use l2l_actors::Record;
use l2l_actors::ports::{Lane, Work};
use l2l_actors::schedule::{Phase, Plan};
use serde::{Serialize, Serializer};

/// One piece of work. Times are from an origin that all of a run share.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Slice {
    /// The operation's number in the ring; of a checkpoint, none.
    pub number: Option<u64>,
    /// Where it ran.
    #[serde(rename = "track", serialize_with = "name_of")]
    pub lane: Lane,
    /// What it was: `weights`, `input`, `forward`, `backward`, `output`, `gradient`, `gather`,
    /// `loss`, `reduce`, `scatter`, `update`, `carry`, `read`, `write`, `seal`, `checkpoint`.
    pub kind: &'static str,
    /// The ring's step.
    pub step: u64,
    /// Index of its layer.
    pub layer: Option<u32>,
    /// `forward` or `backward`: of the visit it served.
    pub phase: Option<&'static str>,
    /// Index of its micro-batch.
    pub micro_batch: Option<u32>,
    /// Index of its block.
    pub block: Option<u32>,
    /// The version of the block that it read.
    pub version: Option<u64>,
    /// Bytes it moved between host and device, or to the disk.
    pub bytes: u64,
    /// When it began.
    #[serde(serialize_with = "seconds")]
    pub begin: Duration,
    /// When it ended.
    #[serde(serialize_with = "seconds")]
    pub end: Duration,
    /// The operation whose end let it begin.
    pub released_by: Option<u64>,
}

fn name_of<S: Serializer>(lane: &Lane, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(lane.name())
}

fn seconds<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(time.as_secs_f64())
}

fn name(phase: Phase) -> &'static str {
    match phase {
        Phase::Forward => "forward",
        Phase::Backward => "backward",
    }
}

impl Slice {
    /// Of an operation of a step with this plan.
    pub fn of(record: &Record, plan: &Plan) -> Slice {
        let phase = record.phase.map(name);
        let visited = |device_visit: usize| plan.visit(device_visit).blocks().first().copied();
        let (kind, block, micro_batch) = match record.work {
            Work::ReadBlock { block, .. }
            | Work::ReadRegion { block, .. }
            | Work::ReadState { block, .. } => ("read", Some(block), None),
            Work::WriteRegion { block, .. } | Work::WriteState { block, .. } => {
                ("write", Some(block), None)
            }
            Work::Seal => ("seal", None, None),
            Work::GatherBlock { block, .. } => ("gather", Some(block), None),
            Work::Measure { block, .. } => ("reduce", Some(block), None),
            Work::UploadBlock { block, .. } => ("weights", Some(block), None),
            Work::UploadBoundary { micro_batch, .. } => ("input", None, Some(micro_batch)),
            Work::Compute { device_visit, micro_batch, .. } => {
                (phase.unwrap_or("forward"), visited(device_visit), Some(micro_batch))
            }
            Work::DownloadBoundary { micro_batch, .. } => ("output", None, Some(micro_batch)),
            Work::DownloadGradient { block, .. } => ("gradient", Some(block), None),
            Work::Gather { micro_batch, .. } => ("gather", None, Some(micro_batch)),
            Work::Loss { micro_batch, .. } => ("loss", None, Some(micro_batch)),
            Work::Reduce { block, .. } => ("reduce", Some(block), None),
            Work::Scatter { block, .. } => ("scatter", Some(block), None),
            Work::Update { block, .. } => ("update", Some(block), None),
            Work::Carry { .. } => ("carry", None, None),
        };
        Slice {
            number: Some(record.number),
            lane: record.lane,
            kind,
            step: record.step,
            layer: record.layer.map(|layer| layer.0),
            phase,
            micro_batch,
            block: block.map(|block| block.0),
            version: block.map(|_| record.step),
            bytes: record.bytes,
            begin: record.begin,
            end: record.end,
            released_by: record.released_by,
        }
    }

    /// How long it took.
    pub fn took(&self) -> Duration {
        self.end.saturating_sub(self.begin)
    }
}

/// Whoever hears of every slice, on the thread that did the work: be brief, and never wait.
pub trait Observe: Send + Sync + 'static {
    /// A slice ended.
    fn heard(&self, slice: &Slice);
}
