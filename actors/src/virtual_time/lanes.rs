//! Lanes that count time instead of spending it.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::watch;

use super::memory::Memory;
use super::sharing::{Cost, Progress, share};
use crate::fence::Done;
use crate::operation::{Operation, Step};
use crate::ports::{Lanes, Ports};
use crate::record::{Record, Scribe};
use crate::work::Queue;

#[derive(Default)]
struct InOrder {
    pending: VecDeque<Operation>,
    running: Option<Running>,
    scribe: Scribe,
}

struct Running {
    operation: Operation,
    begin: Duration,
    progress: Progress,
}

struct Inner {
    now: Duration,
    queues: BTreeMap<Queue, InOrder>,
    memory: Memory,
    records: Vec<Record>,
    costs: Box<dyn FnMut(&Operation) -> Cost + Send>,
}

impl Inner {
    /// Sets the speeds of operations that share resources, after one began or ended.
    fn share(&mut self) {
        let running = self.queues.values_mut().filter_map(|queue| queue.running.as_mut());
        share(self.now, running.map(|running| &mut running.progress));
    }
}

/// Lanes that only count: each operation takes the time it is given, and longer where it shares a
/// resource that is full.
pub struct VirtualLanes {
    inner: Mutex<Inner>,
    /// Operations queued and neither finished nor dropped.
    left: watch::Sender<usize>,
}

impl VirtualLanes {
    /// Lanes on which each operation costs what `costs` says: a time, or a [`Cost`].
    pub fn new<C: Into<Cost>>(
        mut costs: impl FnMut(&Operation) -> C + Send + 'static,
    ) -> VirtualLanes {
        let inner = Inner {
            now: Duration::ZERO,
            queues: BTreeMap::new(),
            memory: Memory::default(),
            records: Vec::new(),
            costs: Box::new(move |operation| costs(operation).into()),
        };
        VirtualLanes { inner: Mutex::new(inner), left: watch::Sender::new(0) }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("a misuse of memory panicked before")
    }

    /// The timeline so far, in order of ends. The next one begins empty.
    pub fn take_records(&self) -> Vec<Record> {
        std::mem::take(&mut self.lock().records)
    }

    /// Queues that have had an operation.
    pub(super) fn queues(&self) -> Vec<Queue> {
        self.lock().queues.keys().copied().collect()
    }

    /// True when the queue's next operation may begin.
    pub(super) fn can_begin(&self, queue: Queue) -> bool {
        let inner = self.lock();
        let queue = &inner.queues[&queue];
        let ready = |operation: &Operation| {
            operation.is_cancelled()
                || operation.waits().iter().all(|fence| fence.reached().is_some())
        };
        queue.running.is_none() && queue.pending.front().is_some_and(ready)
    }

    /// Begins the queue's next operation, or drops it if it is cancelled.
    pub(super) fn begin(&self, queue: Queue) {
        let mut guard = self.lock();
        let inner = &mut *guard;
        let queue = inner.queues.get_mut(&queue).expect("can_begin was asked");
        let operation = queue.pending.pop_front().expect("can_begin was asked");
        if operation.is_cancelled() {
            drop(guard);
            drop(operation);
            self.left.send_modify(|left| *left -= 1);
            return;
        }
        inner.memory.begin(&operation);
        operation.begun();
        let begin = inner.now;
        let progress = Progress::new((inner.costs)(&operation), begin);
        let shares = progress.shares();
        queue.running = Some(Running { operation, begin, progress });
        if shares {
            inner.share();
        }
    }

    /// The time at which the queue's running operation ends.
    pub(super) fn end_of(&self, queue: Queue) -> Option<Duration> {
        self.lock().queues[&queue].running.as_ref().map(|running| running.progress.end())
    }

    /// Ends the queue's running operation. The clock goes to its end, if it is not there yet.
    pub(super) fn finish(&self, queue: Queue) {
        let mut guard = self.lock();
        let inner = &mut *guard;
        let queue = inner.queues.get_mut(&queue).expect("end_of was asked");
        let Running { operation, begin, progress } =
            queue.running.take().expect("end_of was asked");
        let end = progress.end();
        inner.now = inner.now.max(end);
        inner.memory.end(&operation);
        inner.records.push(queue.scribe.record(&operation, begin, end));
        if progress.shares() {
            inner.share();
        }
        drop(guard); // finishing wakes tasks and frees slots
        let value = if operation.work().has_value() { 1.0 } else { 0.0 };
        operation.finish(Ok(Done { begin, end, value }));
        self.left.send_modify(|left| *left -= 1);
    }
}

#[async_trait]
impl Lanes for VirtualLanes {
    fn queue(&self, operation: Operation) {
        self.left.send_modify(|left| *left += 1);
        let queue = operation.queue();
        self.lock().queues.entry(queue).or_default().pending.push_back(operation);
    }

    fn now(&self) -> Duration {
        self.lock().now
    }

    fn close(&self) {}

    async fn closed(&self) {
        let mut left = self.left.subscribe();
        _ = left.wait_for(|&left| left == 0).await.map(|left| *left);
    }
}

impl Ports for VirtualLanes {
    type Batch = ();

    fn begin(&self, _step: &Arc<Step>, _batch: ()) {}
}
