//! Lanes made of threads: one per lane, doing work that blocks.
//!
//! A device implements [`Hands`], one function that does what an operation says, and gets lanes
//! with order, fences, panics and cancellation seen to. A thread that waits for a fence of
//! another lane is parked, not spinning, and wakes for the kill switch too.
//!
//! A device with queues of its own takes the operations of its lanes as soon as those that they wait
//! on were taken, and a second thread a lane waits for what it took.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use tokio::sync::watch;

use crate::cause::Problem;
use crate::fence::Done;
use crate::ports::{Lane, Lanes, Operation, Ports, Step, Trouble};
use crate::record::{Record, Scribe};

/// Waits for work that a device took, and says how it went, in the lanes' time.
pub type Pending = Box<dyn FnOnce() -> Result<Done, Trouble> + Send>;

/// Operations that a lane's device has taken and not ended, beside the one that is waited for.
const TAKEN: usize = 2;

/// What does the work. Called by six threads at once, each with its lane's operations.
pub trait Hands: Send + Sync + 'static {
    /// See [`Ports::Batch`].
    type Batch: Send + 'static;

    /// See [`Ports::begin`]; it is `now` by the lanes' clock.
    fn begin(&self, step: &Arc<Step>, batch: Self::Batch, now: Duration);

    /// Does the work and returns its value. Long work looks at
    /// [`is_cancelled`](Operation::is_cancelled) now and then.
    ///
    /// # Errors
    /// Whatever went wrong; it ends the ring.
    fn perform(&self, operation: &Operation) -> Result<f64, Trouble>;

    /// Whether a lane's operations are taken by a device, which keeps their order: then they are
    /// [issued](Hands::issue), and not performed.
    fn issues(&self, lane: Lane) -> bool {
        _ = lane;
        false
    }

    /// Hands the work to the device, behind all that the operation waits on. It is `now`.
    ///
    /// # Errors
    /// Whatever went wrong; it ends the ring.
    fn issue(&self, operation: &Operation, now: Duration) -> Result<Pending, Trouble> {
        unreachable!("{} of {now:?} is performed", operation.work())
    }

    /// Hears of each operation that ended well, on its lane, before anyone who waits for it.
    fn done(&self, operation: &Operation, record: Record) {
        drop((operation, record));
    }
}

/// See the [module](self).
pub struct ThreadLanes<H> {
    hands: Arc<H>,
    origin: Instant,
    /// One queue a lane; bounded by the slots and credits that operations hold. None: closed.
    queues: Mutex<Option<Vec<flume::Sender<Operation>>>>,
    alive: watch::Sender<usize>,
}

impl<H: Hands> ThreadLanes<H> {
    /// Starts the threads.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn start(hands: H) -> std::io::Result<ThreadLanes<H>> {
        let (hands, origin) = (Arc::new(hands), Instant::now());
        let alive = watch::Sender::new(0);
        let mut queues = Vec::new();
        for lane in Lane::ALL {
            let (queue, operations) = flume::unbounded::<Operation>();
            let named = |what: &str| thread::Builder::new().name(format!("l2l-{what}"));
            let (worker, here) = (hands.clone(), Alive::new(&alive));
            if !hands.issues(lane) {
                named(lane.name()).spawn(move || {
                    let _here = here; // told last, when the hands are gone
                    let worker = worker;
                    let mut scribe = Scribe::default();
                    for operation in operations.iter() {
                        run(&*worker, operation, origin, &mut scribe);
                    }
                })?;
            } else {
                let (taken, waited) = flume::bounded(TAKEN);
                named(lane.name()).spawn(move || {
                    let _here = here; // told last, when the hands are gone
                    let worker = worker;
                    for operation in operations.iter() {
                        issue(&*worker, operation, origin, &taken);
                    }
                })?;
                let (worker, here) = (hands.clone(), Alive::new(&alive));
                named(&format!("{}-end", lane.name())).spawn(move || {
                    let _here = here; // told last, when the hands are gone
                    let worker = worker;
                    let mut scribe = Scribe::default();
                    for (operation, pending) in waited.iter() {
                        end(&*worker, operation, pending, &mut scribe);
                    }
                })?;
            }
            queues.push(queue);
        }
        Ok(ThreadLanes { hands, origin, queues: Mutex::new(Some(queues)), alive })
    }

    /// What does the work.
    pub fn hands(&self) -> &H {
        &self.hands
    }
}

/// Runs one operation, or drops it when the ring is ending.
fn run<H: Hands>(hands: &H, operation: Operation, origin: Instant, scribe: &mut Scribe) {
    if !block_on(operation.ready()) {
        return;
    }
    operation.begun();
    let begin = origin.elapsed();
    let performed = catch_unwind(AssertUnwindSafe(|| hands.perform(&operation)));
    let end = origin.elapsed();
    if let Ok(Ok(_)) = performed {
        hands.done(&operation, scribe.record(&operation, begin, end));
    }
    operation.finish(match performed {
        Ok(Ok(value)) => Ok(Done { begin, end, value }),
        Ok(Err(trouble)) => Err(Problem::Error(trouble)),
        Err(payload) => Err(Problem::of_panic(&*payload)),
    });
}

/// Hands one operation to the device, or drops it when the ring is ending.
fn issue<H: Hands>(
    hands: &H,
    operation: Operation,
    origin: Instant,
    taken: &flume::Sender<(Operation, Pending)>,
) {
    if !block_on(operation.issuable()) {
        return;
    }
    operation.begun();
    match catch_unwind(AssertUnwindSafe(|| hands.issue(&operation, origin.elapsed()))) {
        Ok(Ok(pending)) => {
            operation.issued();
            _ = taken.send((operation, pending)); // a thread that is gone drops it
        }
        Ok(Err(trouble)) => operation.finish(Err(Problem::Error(trouble))),
        Err(payload) => operation.finish(Err(Problem::of_panic(&*payload))),
    }
}

/// Waits for one operation that the device took.
fn end<H: Hands>(hands: &H, operation: Operation, pending: Pending, scribe: &mut Scribe) {
    let ended = catch_unwind(AssertUnwindSafe(pending));
    // What it waited on is done, too, and is told so before.
    if matches!(ended, Ok(Ok(_))) && !block_on(operation.ready()) {
        return;
    }
    let ended = ended.map(|ended| ended.map(|done| scribe.in_order(&operation, done)));
    if let Ok(Ok(Done { begin, end, .. })) = ended {
        hands.done(&operation, scribe.record(&operation, begin, end));
    }
    operation.finish(match ended {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(trouble)) => Err(Problem::Error(trouble)),
        Err(payload) => Err(Problem::of_panic(&*payload)),
    });
}

#[async_trait]
impl<H: Hands> Lanes for ThreadLanes<H> {
    fn queue(&self, operation: Operation) {
        let lane = operation.work().lane();
        let queues = self.queues.lock().expect("nothing panics inside");
        if let Some(queues) = &*queues {
            // A lane that is gone drops the operation, which fails the ring.
            _ = queues[lane as usize].send(operation);
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

impl<H: Hands> Ports for ThreadLanes<H> {
    type Batch = H::Batch;

    fn begin(&self, step: &Arc<Step>, batch: H::Batch) {
        self.hands.begin(step, batch, self.now());
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

/// Wakes a parked thread.
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
