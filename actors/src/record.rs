//! One operation on the timeline, as any kind of lanes tells it.

use std::time::Duration;

use crate::cause::ActorName;
use crate::fence::Done;
use crate::ports::{Lane, Operation, Work};
use crate::schedule::{LayerId, Phase, Version};

/// One operation on the timeline.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// The operation's number.
    pub number: u64,
    /// Its lane.
    pub lane: Lane,
    /// Who queued it.
    pub actor: ActorName,
    /// Its step.
    pub step: Version,
    /// Its layer, if one.
    pub layer: Option<LayerId>,
    /// The phase of the visit it serves, if one.
    pub phase: Option<Phase>,
    /// What it did.
    pub work: Work,
    /// Bytes it moved between host and device.
    pub bytes: u64,
    /// When it was queued.
    pub queued: Duration,
    /// When it began.
    pub begin: Duration,
    /// When it ended.
    pub end: Duration,
    /// The operation whose end let it begin: of the one before it on its lane, those it waits on,
    /// and the last that had ended when it was queued, whichever was last.
    pub released_by: Option<u64>,
}

/// What runs on one lane, one after the other, made into records.
#[derive(Debug, Default)]
pub(crate) struct Scribe {
    last: Option<(Duration, u64)>,
}

impl Scribe {
    /// What a device told of the lane's next operation, not before what it came behind: a device's clock
    /// rounds.
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
        Record {
            number: operation.number(),
            lane: operation.work().lane(),
            actor: operation.actor(),
            step: operation.step().number,
            layer: operation.layer(),
            phase: operation.phase(),
            work: operation.work().clone(),
            bytes: operation.work().bytes(&operation.step().plan),
            queued,
            begin,
            end,
            released_by,
        }
    }
}
