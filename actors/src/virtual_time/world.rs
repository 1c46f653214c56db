//! An executor that makes one move at a time, so that a test can choose the next.

use std::collections::BTreeSet;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Wake, Waker};
use std::time::Duration;

use super::lanes::VirtualLanes;
use crate::work::Queue;

/// An event that can happen next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Move {
    /// This task runs to its next wait.
    Poll(usize),
    /// This queue's next operation begins.
    Begin(Queue),
    /// This queue's operation ends.
    End(Queue),
}

struct ActorTask {
    name: String,
    future: Option<Pin<Box<dyn Future<Output = ()>>>>,
    waker: Waker,
}

/// The tasks that are awake.
#[derive(Default)]
struct Awake(Mutex<BTreeSet<usize>>);

impl Awake {
    fn lock(&self) -> MutexGuard<'_, BTreeSet<usize>> {
        self.0.lock().expect("nothing panics inside")
    }

    /// The first of them from `index` on; behind the last task the first one comes again.
    fn next(&self, index: usize) -> Option<usize> {
        let all = self.lock();
        all.range(index..).next().or_else(|| all.first()).copied()
    }
}

/// Puts its task on the list of those that are awake.
struct Woken {
    index: usize,
    awake: Arc<Awake>,
}

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.awake.lock().insert(self.index);
    }
}

/// Tasks and lanes, all on the calling thread.
pub struct World {
    lanes: Arc<VirtualLanes>,
    tasks: Vec<ActorTask>,
    awake: Arc<Awake>,
}

impl World {
    /// A world with these lanes and no task yet.
    pub fn new(lanes: Arc<VirtualLanes>) -> World {
        World { lanes, tasks: Vec::new(), awake: Arc::default() }
    }

    /// Adds a task.
    pub fn spawn(&mut self, name: String, future: impl Future<Output = ()> + 'static) {
        // tokio's fairness budget would make its primitives pend for no reason of ours.
        let future = tokio::task::unconstrained(future);
        let woken = Arc::new(Woken { index: self.tasks.len(), awake: self.awake.clone() });
        woken.wake_by_ref();
        let waker = Waker::from(woken);
        self.tasks.push(ActorTask { name, future: Some(Box::pin(future)), waker });
    }

    /// Drops a task, as cancelling it does.
    pub fn cancel(&mut self, index: usize) {
        self.awake.lock().remove(&index);
        self.tasks[index].future = None;
    }

    /// All events that can happen next.
    pub fn moves(&self) -> Vec<Move> {
        let awake = self.awake.lock().clone().into_iter();
        let polls = awake.filter(|&index| self.tasks[index].future.is_some()).map(Move::Poll);
        let queues = self.lanes.queues();
        let begins = queues.iter().copied().filter(|&queue| self.lanes.can_begin(queue));
        let ends = queues.iter().copied().filter(|&queue| self.lanes.end_of(queue).is_some());
        polls.chain(begins.map(Move::Begin)).chain(ends.map(Move::End)).collect()
    }

    /// Makes one of [`moves`](World::moves).
    pub fn make(&mut self, chosen: Move) {
        match chosen {
            Move::Begin(queue) => self.lanes.begin(queue),
            Move::End(queue) => self.lanes.finish(queue),
            Move::Poll(index) => {
                self.awake.lock().remove(&index);
                let ActorTask { future, waker, .. } = &mut self.tasks[index];
                // A task that has ended may be woken all the same.
                let Some(running) = future else { return };
                if running.as_mut().poll(&mut Context::from_waker(waker)).is_ready() {
                    *future = None;
                }
            }
        }
    }

    /// The names of the tasks that have not ended.
    pub fn unfinished(&self) -> Vec<String> {
        let left = self.tasks.iter().filter(|task| task.future.is_some());
        left.map(|task| task.name.clone()).collect()
    }

    /// Runs in time: tasks take none, then lanes begin what they can, then the clock moves to the
    /// next end of an operation.
    ///
    /// # Errors
    /// Nothing can move. The error names the tasks that have not ended.
    pub fn run(&mut self) -> Result<(), Vec<String>> {
        loop {
            self.settle();
            match self.next_end() {
                Some((_, queue)) => self.end(queue),
                None if self.unfinished().is_empty() => return Ok(()),
                None => return Err(self.unfinished()),
            }
        }
    }

    /// Runs tasks and begins operations, until the clock must move.
    pub(super) fn settle(&mut self) {
        loop {
            let mut next = 0;
            while let Some(index) = self.awake.next(next) {
                self.make(Move::Poll(index));
                next = index + 1;
            }
            let ready = self.lanes.ready();
            if ready.is_empty() {
                return;
            }
            ready.into_iter().for_each(|queue| self.make(Move::Begin(queue)));
        }
    }

    /// The next end of an operation, and its queue.
    pub(super) fn next_end(&self) -> Option<(Duration, Queue)> {
        self.lanes.first_end()
    }

    /// Ends the operation that runs in this queue.
    pub(super) fn end(&mut self, queue: Queue) {
        self.make(Move::End(queue));
    }
}
