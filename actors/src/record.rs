//! One operation on the timeline, as every kind of lanes reports it.
//!
//! All reports about a run (times, waits and their causes, forecasts) are made from records alone,
//! so the code that does the work contains no telemetry.

use std::time::Duration;

use crate::fence::Done;
use crate::names::ActorName;
use crate::operation::Operation;
use crate::schedule::{BlockId, DeviceId, LayerId, MicroBatch, Phase, Version};
use crate::work::{Lane, Work, WorkKind};

/// One operation on the timeline.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// The operation's number.
    pub number: u64,
    /// The lane that it ran on.
    pub lane: Lane,
    /// The device whose lane it is; `None`: the host's.
    pub device: Option<DeviceId>,
    /// The kind of its work.
    pub kind: WorkKind,
    /// The actor that queued it.
    pub actor: ActorName,
    /// The step that it belongs to.
    pub step: Version,
    /// The layer that it served, if it served one.
    pub layer: Option<LayerId>,
    /// The phase of the visit it serves, if one.
    pub phase: Option<Phase>,
    /// The block it concerns, if one. Of a compute operation, the first of its visit.
    pub block: Option<BlockId>,
    /// The micro-batch it concerns, if one.
    pub micro_batch: Option<MicroBatch>,
    /// The work that it did.
    pub work: Work,
    /// Bytes it moved between host and device, or between host and file.
    pub bytes: u64,
    /// The time at which it was queued.
    pub queued: Duration,
    /// The time at which it began.
    pub begin: Duration,
    /// The time at which it ended.
    pub end: Duration,
    /// The operation whose end let it begin: of the one before it on its lane, those it waits on,
    /// and the last that had ended when it was queued, whichever was last.
    pub released_by: Option<u64>,
}

/// Receives the record of each operation that ended well.
pub trait RecordSink: Send + Sync + 'static {
    /// Takes one record. The lane's own thread calls it, before any actor that waits for the
    /// operation goes on. An implementation must be brief, and must never wait.
    fn record(&self, record: &Record);
}

/// Makes records of what runs on one lane, one operation after the other.
#[derive(Debug, Default)]
pub(crate) struct Scribe {
    last: Option<(Duration, u64)>,
}

impl Scribe {
    /// The times of the lane's next operation as a device reports them, corrected so that it does
    /// not begin before the operations it waited for have ended: a device's clock rounds.
    pub(crate) fn in_order(&self, operation: &Operation, done: Done) -> Done {
        let waits = operation.waits().iter().filter_map(|fence| fence.reached());
        let ends = waits.map(|done| done.end).chain(self.last.map(|(end, _)| end));
        let begin = ends.fold(done.begin, Duration::max);
        Done { begin, end: done.end.max(begin), ..done }
    }

    /// The record of the lane's next operation.
    pub(crate) fn record(
        &mut self,
        operation: &Operation,
        begin: Duration,
        end: Duration,
    ) -> Record {
        let (queued, after) = operation.queued();
        let ends = operation.waits().iter().filter_map(|f| Some((f.reached()?.end, f.operation())));
        let asked = after.map(|number| (queued, number));
        let released_by = ends.chain(asked).chain(self.last).max().map(|(_, number)| number);
        self.last = Some((end, operation.number()));
        let row = operation.work().row();
        Record {
            number: operation.number(),
            lane: row.lane,
            device: operation.queue().device,
            kind: row.kind,
            actor: operation.actor(),
            step: operation.step().number,
            layer: operation.layer(),
            phase: operation.phase(),
            block: row.block(),
            micro_batch: row.micro_batch(),
            work: operation.work().clone(),
            bytes: row.bytes(&operation.step().plan.schedule),
            queued,
            begin,
            end,
            released_by,
        }
    }
}
