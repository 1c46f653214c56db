//! The queues of an emulated device, each a thread that does its tasks in order: streams; and the
//! engines that copy between the host and the device, one for each direction, as a GPU has them.

use std::cell::RefCell;
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use super::product;
use crate::devices::cuda::driver::{STREAMS, Stream};

pub(super) type Task = Box<dyn FnOnce() + Send>;

/// Longer than any copy of a test takes to come.
const HANGS: Duration = Duration::from_secs(120);

/// A new queue.
pub(super) fn start() -> mpsc::Sender<Task> {
    let (queue, tasks) = mpsc::channel::<Task>();
    thread::spawn(move || tasks.iter().for_each(|task| task()));
    queue
}

/// Reached at some time.
#[derive(Default)]
pub(super) struct Flag {
    at: Mutex<Option<Instant>>,
    reached: Condvar,
}

impl Flag {
    pub(super) fn reach(&self) {
        *self.at.lock().expect("nothing panics inside") = Some(product::now());
        self.reached.notify_all();
    }

    pub(super) fn wait(&self) -> Instant {
        let at = self.at.lock().expect("nothing panics inside");
        let at = self.reached.wait_while(at, |at| at.is_none()).expect("nothing panics inside");
        at.expect("it was reached")
    }
}

/// Where a copy goes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::devices::cuda) enum Direction {
    ToDevice,
    ToHost,
}

/// The copies that the engines were given, and those that they may do.
#[derive(Default)]
pub(in crate::devices::cuda) struct Copies {
    known: Mutex<Known>,
    changed: Condvar,
}

#[derive(Default)]
struct Known {
    /// Copies by stream and direction.
    counts: [[usize; 2]; STREAMS],
    /// The direction whose engine stands still.
    held: Option<Direction>,
}

impl Copies {
    fn add(&self, on: Stream, to: Direction) {
        self.known.lock().expect("nothing panics inside").counts[on as usize][to as usize] += 1;
        self.changed.notify_all();
    }

    pub(in crate::devices::cuda) fn count(&self, on: Stream, to: Direction) -> usize {
        self.known.lock().expect("nothing panics inside").counts[on as usize][to as usize]
    }

    /// Waits until there are that many copies; panics if they do not come.
    pub(in crate::devices::cuda) fn wait_for(&self, count: usize, on: Stream, to: Direction) {
        let known = self.known.lock().expect("nothing panics inside");
        let are_less = |known: &mut Known| known.counts[on as usize][to as usize] < count;
        let waited = self.changed.wait_timeout_while(known, HANGS, are_less);
        let (known, ended) = waited.expect("nothing panics inside");
        drop(known);
        assert!(!ended.timed_out(), "a copy never came to its engine");
    }

    /// Has the engine of a direction stand still; none: no longer.
    pub(in crate::devices::cuda) fn hold(&self, held: Option<Direction>) {
        self.known.lock().expect("nothing panics inside").held = held;
        self.changed.notify_all();
    }

    fn wait_until_released(&self, to: Direction) {
        let known = self.known.lock().expect("nothing panics inside");
        let is_held = |known: &mut Known| known.held == Some(to);
        drop(self.changed.wait_while(known, is_held).expect("nothing panics inside"));
    }
}

thread_local! {
    /// Of the drivers that a thread makes.
    static COPIES: RefCell<Arc<Copies>> = RefCell::default();
}

/// Counts copies of drivers that this thread makes from now on.
pub(in crate::devices::cuda) fn count_copies() -> Arc<Copies> {
    count_copies_to(Arc::default());
    copies()
}

/// Counts them together with those of another thread.
pub(super) fn count_copies_to(copies: Arc<Copies>) {
    COPIES.set(copies);
}

/// The counts of this thread's drivers.
pub(super) fn copies() -> Arc<Copies> {
    COPIES.with_borrow(Arc::clone)
}

/// The copy engines, one for each direction.
pub(super) struct Engines {
    queues: [mpsc::Sender<Task>; 2],
    copies: Arc<Copies>,
}

impl Engines {
    pub(super) fn new() -> Engines {
        Engines { queues: [start(), start()], copies: copies() }
    }

    /// Copies when the engine is done with all that it was handed before, whatever the stream. The
    /// thread of the stream waits.
    pub(super) fn copy(&self, on: Stream, to: Direction, copy: impl FnOnce() + Send + 'static) {
        let flag = Arc::new(Flag::default());
        let copies = self.copies.clone();
        let done = flag.clone();
        let task: Task = Box::new(move || {
            copies.wait_until_released(to);
            copy();
            done.reach();
        });
        self.queues[to as usize].send(task).expect("it runs as long as the device is there");
        // Behind it: what is queued once the count is seen comes later.
        self.copies.add(on, to);
        flag.wait();
    }
}
