//! An executor that makes one move at a time, so that a test can choose the next.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Wake, Waker};

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
    woken: Arc<Woken>,
}

struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Tasks and lanes, all on the calling thread.
pub struct World {
    lanes: Arc<VirtualLanes>,
    tasks: Vec<ActorTask>,
}

impl World {
    /// A world with these lanes and no task yet.
    pub fn new(lanes: Arc<VirtualLanes>) -> World {
        World { lanes, tasks: Vec::new() }
    }

    /// Adds a task.
    pub fn spawn(&mut self, name: String, future: impl Future<Output = ()> + 'static) {
        // tokio's fairness budget would make its primitives pend for no reason of ours.
        let future = tokio::task::unconstrained(future);
        let woken = Arc::new(Woken(AtomicBool::new(true)));
        self.tasks.push(ActorTask { name, future: Some(Box::pin(future)), woken });
    }

    /// Drops a task, as cancelling it does.
    pub fn cancel(&mut self, index: usize) {
        self.tasks[index].future = None;
    }

    /// All events that can happen next.
    pub fn moves(&self) -> Vec<Move> {
        let awake =
            |task: &&ActorTask| task.future.is_some() && task.woken.0.load(Ordering::Relaxed);
        let tasks = self.tasks.iter().enumerate().filter(|(_, task)| awake(task));
        let queues = self.lanes.queues();
        let begins = queues.iter().copied().filter(|&queue| self.lanes.can_begin(queue));
        let ends = queues.iter().copied().filter(|&queue| self.lanes.end_of(queue).is_some());
        let polls = tasks.map(|(index, _)| Move::Poll(index));
        polls.chain(begins.map(Move::Begin)).chain(ends.map(Move::End)).collect()
    }

    /// Makes one of [`moves`](World::moves).
    pub fn make(&mut self, chosen: Move) {
        match chosen {
            Move::Begin(queue) => self.lanes.begin(queue),
            Move::End(queue) => self.lanes.finish(queue),
            Move::Poll(index) => {
                let task = &mut self.tasks[index];
                task.woken.0.store(false, Ordering::Relaxed);
                let waker = Waker::from(task.woken.clone());
                let future = task.future.as_mut().expect("a move of moves()");
                if future.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
                    task.future = None;
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
            let mut moved = false;
            for index in 0..self.tasks.len() {
                let task = &self.tasks[index];
                if task.future.is_some() && task.woken.0.load(Ordering::Relaxed) {
                    self.make(Move::Poll(index));
                    moved = true;
                }
            }
            if moved {
                continue;
            }
            let queues = self.lanes.queues();
            for &queue in &queues {
                if self.lanes.can_begin(queue) {
                    self.make(Move::Begin(queue));
                    moved = true;
                }
            }
            if moved {
                continue;
            }
            let ends = queues.into_iter().filter_map(|q| self.lanes.end_of(q).map(|end| (end, q)));
            match ends.min() {
                Some((_, queue)) => self.make(Move::End(queue)),
                None if self.unfinished().is_empty() => return Ok(()),
                None => return Err(self.unfinished()),
            }
        }
    }
}
