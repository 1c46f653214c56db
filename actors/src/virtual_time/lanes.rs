//! Lanes that count time instead of spending it.
//!
//! Nothing is searched for at an event: a queue whose next operation waits stands behind the fence
//! that it waits for, and ends are in a heap. So an operation costs as much on a hundred devices as
//! on one. Where an operation that shares resources begins or ends, each class of these is
//! looked at.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::watch;

use super::joined::Member;
use super::memory::Memory;
use super::sharing::{Cost, Sharing};
use crate::fence::Done;
use crate::operation::{Operation, Step};
use crate::ports::{Lanes, Ports};
use crate::record::{Record, Scribe};
use crate::ring::Ring;
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
    /// When it ends; `None`: it shares resources, which say when; or it waits for other rings.
    end: Option<Duration>,
}

struct Inner {
    now: Duration,
    queues: BTreeMap<Queue, InOrder>,
    /// Queues whose next operation may begin.
    ready: BTreeSet<Queue>,
    /// By the number of an operation that is not done: the queues whose next operation waits for
    /// it. A queue waits for one at a time.
    waiting: HashMap<u64, Vec<Queue>>,
    sharing: Sharing,
    /// Ends of what runs; of operations with the same uses the first. Where a speed changed, the
    /// end before is still there, and is skipped.
    ends: BinaryHeap<Reverse<(Duration, Queue)>>,
    /// The ring that the operations belong to, until it was seen to end.
    ring: Option<Arc<Ring>>,
    /// `None`: nothing checks what memory holds.
    memory: Option<Memory>,
    records: Vec<Record>,
    costs: Box<dyn FnMut(&Operation) -> Cost + Send>,
    /// The other rings that this one exchanges data with, if they run, too.
    member: Option<Member>,
}

impl Inner {
    /// Lists the queue as ready, or behind the operation that its next one waits for.
    fn look_at(&mut self, queue: Queue) {
        let of = &self.queues[&queue];
        let Some(operation) = of.pending.front().filter(|_| of.running.is_none()) else { return };
        let missing = operation.waits().iter().find(|fence| fence.reached().is_none());
        match missing.filter(|_| !operation.is_cancelled()) {
            Some(fence) => self.waiting.entry(fence.operation()).or_default().push(queue),
            None => _ = self.ready.insert(queue),
        }
    }

    /// The time at which the queue's running operation ends.
    fn end_of(&self, queue: Queue) -> Option<Duration> {
        let running = self.queues[&queue].running.as_ref()?;
        running.end.or_else(|| self.sharing.end_of(queue))
    }

    /// Lets the queue's running operation take its time from now on.
    fn run(&mut self, queue: Queue, now: Duration, cost: Cost) {
        if !cost.uses.is_empty() {
            self.sharing.begin(now, queue, cost);
            return self.ends.extend(self.sharing.first_ends().map(Reverse));
        }
        let end = now + cost.alone;
        self.ends.push(Reverse((end, queue)));
        let of = self.queues.get_mut(&queue).expect("it was asked");
        if let Some(running) = &mut of.running {
            running.end = Some(end);
        }
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
    /// Lanes on which each operation costs what `costs` says: a time, or a [`Cost`]. They check
    /// that each operation finds in memory what it asks for ([`Memory`]).
    pub fn new<C: Into<Cost>>(costs: impl FnMut(&Operation) -> C + Send + 'static) -> VirtualLanes {
        VirtualLanes::with(Some(Memory::default()), costs)
    }

    /// The same without that check, which takes most of the time: for schedules that are known to
    /// be sound.
    pub fn unchecked<C: Into<Cost>>(
        costs: impl FnMut(&Operation) -> C + Send + 'static,
    ) -> VirtualLanes {
        VirtualLanes::with(None, costs)
    }

    fn with<C: Into<Cost>>(
        memory: Option<Memory>,
        mut costs: impl FnMut(&Operation) -> C + Send + 'static,
    ) -> VirtualLanes {
        let inner = Inner {
            now: Duration::ZERO,
            queues: BTreeMap::new(),
            ready: BTreeSet::new(),
            waiting: HashMap::new(),
            sharing: Sharing::default(),
            ends: BinaryHeap::new(),
            ring: None,
            memory,
            records: Vec::new(),
            costs: Box::new(move |operation| costs(operation).into()),
            member: None,
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

    /// All queues whose next operation may begin, in order. Where the ring ends, none need wait.
    pub(super) fn ready(&self) -> Vec<Queue> {
        let mut inner = self.lock();
        if inner.ring.as_ref().is_some_and(|ring| ring.switch.tripped()) {
            inner.ring = None;
            let all: Vec<Queue> = inner.queues.keys().copied().collect();
            all.into_iter().for_each(|queue| inner.look_at(queue));
        }
        inner.ready.iter().copied().collect()
    }

    /// Begins the queue's next operation, or drops it if it is cancelled.
    pub(super) fn begin(&self, queue: Queue) {
        let mut guard = self.lock();
        let inner = &mut *guard;
        inner.ready.remove(&queue);
        let of = inner.queues.get_mut(&queue).expect("can_begin was asked");
        let operation = of.pending.pop_front().expect("can_begin was asked");
        if operation.is_cancelled() {
            inner.look_at(queue);
            drop(guard);
            drop(operation);
            return self.leaves();
        }
        if let Some(memory) = &mut inner.memory {
            memory.begin(&operation);
        }
        operation.begun();
        let begin = inner.now;
        let mut cost = Some((inner.costs)(&operation));
        if let Some(member) = &mut inner.member {
            cost = cost.and_then(|cost| member.begin(&operation, begin, cost));
        }
        of.running = Some(Running { operation, begin, end: None });
        if let Some(cost) = cost {
            inner.run(queue, begin, cost);
        }
    }

    /// An operation has finished or was dropped. Those who wait for the last are told of it alone.
    fn leaves(&self) {
        self.left.send_if_modified(|left| {
            *left -= 1;
            *left == 0
        });
    }

    /// Lets operations on lanes of exchanges wait for those of other rings.
    pub(super) fn join(&self, member: Member) {
        self.lock().member = Some(member);
    }

    /// All rings have begun the queue's running operation: it costs this from now on.
    pub(super) fn meet(&self, queue: Queue, now: Duration, cost: Cost) {
        let mut inner = self.lock();
        inner.now = now;
        inner.run(queue, now, cost);
    }

    /// The time at which the queue's running operation ends.
    pub(super) fn end_of(&self, queue: Queue) -> Option<Duration> {
        self.lock().end_of(queue)
    }

    /// The first end of a running operation, and its queue.
    pub(super) fn first_end(&self) -> Option<(Duration, Queue)> {
        let mut inner = self.lock();
        while let Some(&Reverse((end, queue))) = inner.ends.peek() {
            if inner.end_of(queue) == Some(end) {
                return Some((end, queue));
            }
            inner.ends.pop();
        }
        None
    }

    /// Ends the queue's running operation. The clock goes to its end, if it is not there yet.
    pub(super) fn finish(&self, queue: Queue) {
        let mut guard = self.lock();
        let inner = &mut *guard;
        let end = inner.end_of(queue).expect("end_of was asked");
        let of = inner.queues.get_mut(&queue).expect("end_of was asked");
        let Running { operation, begin, .. } = of.running.take().expect("end_of was asked");
        inner.now = inner.now.max(end);
        if let Some(memory) = &mut inner.memory {
            memory.end(&operation);
        }
        inner.records.push(of.scribe.record(&operation, begin, end));
        if inner.sharing.end(inner.now, queue) {
            inner.ends.extend(inner.sharing.first_ends().map(Reverse));
        }
        drop(guard); // finishing wakes tasks and frees slots
        let number = operation.number();
        let value = if operation.work().has_value() { 1.0 } else { 0.0 };
        operation.finish(Ok(Done { begin, end, value }));
        self.leaves();
        let mut inner = self.lock();
        inner.look_at(queue);
        let waiting = inner.waiting.remove(&number).unwrap_or_default();
        waiting.into_iter().for_each(|queue| inner.look_at(queue));
    }
}

#[async_trait]
impl Lanes for VirtualLanes {
    fn queue(&self, operation: Operation) {
        self.left.send_if_modified(|left| {
            *left += 1;
            false
        });
        let queue = operation.queue();
        let mut inner = self.lock();
        if inner.queues.is_empty() {
            inner.ring = Some(operation.ring().clone());
        }
        let pending = &mut inner.queues.entry(queue).or_default().pending;
        pending.push_back(operation);
        if pending.len() == 1 {
            inner.look_at(queue);
        }
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
