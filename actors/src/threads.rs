//! Lanes made of threads: one per lane, doing work that blocks.
//!
//! A device implements [`LaneWork`], one function that does the work of an operation. It gets lanes
//! with order, fences, panics and cancellation. A thread that waits for a fence of another lane is
//! parked, not spinning, and wakes for the kill switch too.
//!
//! A device with queues of its own gets an operation as soon as all operations that it waits on
//! were issued, and a second thread a lane waits for their ends.

use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use tokio::sync::watch;

use crate::cause::{BoxedError, Problem};
use crate::fence::Done;
use crate::operation::{Operation, Step};
use crate::ports::{Lanes, Ports};
use crate::record::{RecordSink, Scribe};
use crate::schedule::Pools;
use crate::work::Queue;

/// Waits for work that was issued to a device, and says how it ended, in the lanes' time.
pub type Pending = Box<dyn FnOnce() -> Result<Done, BoxedError> + Send>;

/// Operations of a lane that its device has and has not ended, beside the one that is waited for.
const ISSUED: usize = 2;

/// The code that does the work of lanes. A thread of each queue calls it, all at once.
pub trait LaneWork: Send + Sync + 'static {
    /// The data of a step: see [`Ports::Batch`].
    type Batch: Send + 'static;

    /// Begins a step, as [`Ports::begin`] does, at time `now` of the lanes' clock.
    fn begin(&self, step: &Arc<Step>, batch: Self::Batch, now: Duration);

    /// Does the work and returns its value. Long work looks at
    /// [`is_cancelled`](Operation::is_cancelled) now and then.
    ///
    /// # Errors
    /// The work failed. The error ends the ring.
    fn perform(&self, operation: &Operation) -> Result<f64, BoxedError>;

    /// True if a device takes this queue's operations and keeps their order. Then they are
    /// [issued](LaneWork::issue), and not performed.
    fn issues(&self, queue: Queue) -> bool {
        _ = queue;
        false
    }

    /// Hands the work to the device at time `now`, behind all that the operation waits on.
    ///
    /// # Errors
    /// The device failed. The error ends the ring.
    fn issue(&self, operation: &Operation, now: Duration) -> Result<Pending, BoxedError> {
        unreachable!("{} of {now:?} is performed", operation.work())
    }
}

/// Lanes made of threads, one for each queue.
pub struct ThreadLanes<W> {
    work: Arc<W>,
    origin: Instant,
    /// Bounded by the slots and credits that operations hold. `None`: closed.
    queues: Mutex<Option<HashMap<Queue, flume::Sender<Operation>>>>,
    alive: watch::Sender<usize>,
}

impl<W: LaneWork> ThreadLanes<W> {
    /// Starts the threads, for a ring with these pools. `records` receives the record of each
    /// operation that ended well.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn start(
        work: W,
        pools: &Pools,
        records: Option<Arc<dyn RecordSink>>,
    ) -> io::Result<ThreadLanes<W>> {
        let work = Arc::new(work);
        let origin = Instant::now();
        let alive = watch::Sender::new(0);
        let mut queues = HashMap::new();
        for queue in Queue::all(pools) {
            let name = name_of(queue);
            let (sender, operations) = flume::unbounded::<Operation>();
            let runner = || Runner {
                work: work.clone(),
                origin,
                records: records.clone(),
                scribe: Scribe::default(),
            };
            if work.issues(queue) {
                let (issued, waited) = flume::bounded(ISSUED);
                let issuer = runner();
                let mut ender = runner();
                spawn(&name, &alive, move || {
                    operations.iter().for_each(|operation| issuer.issue(operation, &issued));
                })?;
                spawn(&format!("{name}-end"), &alive, move || {
                    waited.iter().for_each(|(operation, pending)| ender.end(operation, pending));
                })?;
            } else {
                let mut runner = runner();
                spawn(&name, &alive, move || {
                    operations.iter().for_each(|operation| runner.run(operation));
                })?;
            }
            queues.insert(queue, sender);
        }
        Ok(ThreadLanes { work, origin, queues: Mutex::new(Some(queues)), alive })
    }

    /// The code that does the work.
    pub fn work(&self) -> &W {
        &self.work
    }
}

/// The name of the queue's thread.
fn name_of(Queue { lane, device }: Queue) -> String {
    match device.filter(|&device| device > 0) {
        Some(device) => format!("{}-{device}", lane.name()),
        None => lane.name().into(),
    }
}

/// Starts a thread that is counted as long as it runs.
fn spawn(
    name: &str,
    alive: &watch::Sender<usize>,
    run: impl FnOnce() + Send + 'static,
) -> io::Result<()> {
    let here = Alive::new(alive);
    let thread = thread::Builder::new().name(format!("l2l-{name}"));
    thread.spawn(move || {
        let _here = here; // dropped last, when all that `run` owns is gone
        run();
    })?;
    Ok(())
}

/// The state of one thread of a lane.
struct Runner<W> {
    work: Arc<W>,
    origin: Instant,
    records: Option<Arc<dyn RecordSink>>,
    scribe: Scribe,
}

/// The result of work: a value or times, an error, or a caught panic.
type Caught<T> = thread::Result<Result<T, BoxedError>>;

impl<W: LaneWork> Runner<W> {
    /// Runs one operation, or drops it when the ring is ending.
    fn run(&mut self, operation: Operation) {
        if !block_on(operation.ready()) {
            return;
        }
        operation.begun();
        let begin = self.origin.elapsed();
        let performed = catch_unwind(AssertUnwindSafe(|| self.work.perform(&operation)));
        let end = self.origin.elapsed();
        let done = |value| Done { begin, end, value };
        self.finish(operation, performed.map(|performed| performed.map(done)));
    }

    /// Hands one operation to the device, or drops it when the ring is ending.
    fn issue(&self, operation: Operation, issued: &flume::Sender<(Operation, Pending)>) {
        if !block_on(operation.issuable()) {
            return;
        }
        operation.begun();
        let now = self.origin.elapsed();
        match catch_unwind(AssertUnwindSafe(|| self.work.issue(&operation, now))) {
            Ok(Ok(pending)) => {
                operation.issued();
                _ = issued.send((operation, pending)); // a thread that is gone drops it
            }
            Ok(Err(error)) => operation.finish(Err(Problem::Error(error))),
            Err(payload) => operation.finish(Err(Problem::from_panic(&*payload))),
        }
    }

    /// Waits for one operation that the device has.
    fn end(&mut self, operation: Operation, pending: Pending) {
        let ended = catch_unwind(AssertUnwindSafe(pending));
        // The operations it waited on have ended on the device, too; their threads report first.
        if matches!(ended, Ok(Ok(_))) && !block_on(operation.ready()) {
            return;
        }
        let in_order = |done| self.scribe.in_order(&operation, done);
        let ended = ended.map(|ended| ended.map(in_order));
        self.finish(operation, ended);
    }

    /// Hands on the record of an operation that ended well, and ends the operation.
    fn finish(&mut self, operation: Operation, ended: Caught<Done>) {
        let result = match ended {
            Ok(Ok(done)) => {
                let record = self.scribe.record(&operation, done.begin, done.end);
                self.records.iter().for_each(|records| records.record(&record));
                Ok(done)
            }
            Ok(Err(error)) => Err(Problem::Error(error)),
            Err(payload) => Err(Problem::from_panic(&*payload)),
        };
        operation.finish(result);
    }
}

#[async_trait]
impl<W: LaneWork> Lanes for ThreadLanes<W> {
    fn queue(&self, operation: Operation) {
        let queues = self.queues.lock().expect("nothing panics inside");
        if let Some(queues) = &*queues {
            // A lane that is gone drops the operation, which fails the ring.
            _ = queues[&operation.queue()].send(operation);
        }
    }

    fn now(&self) -> Duration {
        self.origin.elapsed()
    }

    fn close(&self) {
        self.queues.lock().expect("nothing panics inside").take();
    }

    async fn closed(&self) {
        let mut alive = self.alive.subscribe();
        _ = alive.wait_for(|&alive| alive == 0).await.map(|alive| *alive);
    }
}

impl<W: LaneWork> Ports for ThreadLanes<W> {
    type Batch = W::Batch;

    fn begin(&self, step: &Arc<Step>, batch: W::Batch) {
        self.work.begin(step, batch, self.now());
    }
}

/// Counts a thread in and out.
struct Alive(watch::Sender<usize>);

impl Alive {
    fn new(alive: &watch::Sender<usize>) -> Alive {
        alive.send_modify(|alive| *alive += 1);
        Alive(alive.clone())
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.send_modify(|alive| *alive -= 1);
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Parks this thread until the future ends.
fn block_on<F: Future>(future: F) -> F::Output {
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return output;
        }
        thread::park();
    }
}
