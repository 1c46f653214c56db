//! Facts close the two loops of the ring. They are kept and awaited, never queued.
//!
//! A mailbox of facts would need room for all of them (with room for one per block it deadlocks); a
//! table needs none. Each fact is raised by the operation that makes it true, at the moment it
//! ends, so a fact cannot be lost with an actor. It wakes those that wait for it, and no others.

use std::collections::HashMap;
use std::future::poll_fn;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use crate::schedule::{BlockId, BoundaryId, MicroBatch, StepPlan, Version};

/// One thing that became true.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fact {
    /// A boundary of a micro-batch of the running step lies in the stash. Raised by a gather
    /// (queued by the Fetcher), a download (by the Stasher) or an answer (by the Reducer); awaited
    /// by the Prefetcher and, for what host visits read, by the Reducer.
    Stashed(BoundaryId, MicroBatch),
    /// A block is published as of this version. Raised by an update (queued by the Optimizer);
    /// awaited by the Fetcher, the Prefetcher, the Reducer and `settle`.
    Updated(BlockId, Version),
}

/// The two tables.
#[derive(Debug)]
pub(crate) struct Facts(Mutex<Tables>);

/// A place of the tables, which a fact fills.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Place {
    Stashed(usize),
    Version(usize),
}

#[derive(Debug)]
struct Tables {
    /// Boundary × micro-batch of one step.
    stashed: Vec<bool>,
    micro_batches: usize,
    /// By block.
    versions: Vec<Version>,
    /// Whom the next fact of a place wakes.
    waiting: HashMap<Place, Vec<Waker>>,
}

impl Tables {
    fn stashed(&self, boundary: BoundaryId, m: MicroBatch) -> usize {
        boundary.0 as usize * self.micro_batches + m as usize
    }
}

impl Facts {
    pub(crate) fn new(blocks: usize, version: Version) -> Facts {
        Facts(Mutex::new(Tables {
            stashed: Vec::new(),
            micro_batches: 0,
            versions: vec![version; blocks],
            waiting: HashMap::new(),
        }))
    }

    fn lock(&self) -> MutexGuard<'_, Tables> {
        // A version that is wrong panics inside; others still read the tables, to report it.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a step: forgets the stash of the step before, which is resolved, so nothing reads it
    /// any more.
    pub(crate) fn begin(&self, plan: &StepPlan) {
        let mut tables = self.lock();
        tables.micro_batches = plan.schedule.micro_batches.len();
        let places = plan.schedule.boundaries.len() * tables.micro_batches;
        tables.stashed.clear();
        tables.stashed.resize(places, false);
    }

    pub(crate) fn raise(&self, fact: &Fact) {
        let mut tables = self.lock();
        let place = match *fact {
            Fact::Stashed(boundary, m) => {
                let at = tables.stashed(boundary, m);
                tables.stashed[at] = true;
                Place::Stashed(at)
            }
            Fact::Updated(block, version) => {
                let at = block.0 as usize;
                let held = &mut tables.versions[at];
                assert!(*held + 1 == version, "{block} went from v{held} to v{version}");
                *held = version;
                Place::Version(at)
            }
        };
        let waiting = tables.waiting.remove(&place);
        drop(tables); // a woken task may look at once
        waiting.into_iter().flatten().for_each(Waker::wake);
    }

    /// Waits until nothing is missing. `missing` finds the first place that is.
    async fn until(&self, missing: impl Fn(&Tables) -> Option<Place>) {
        let look = |context: &mut Context<'_>| {
            let mut tables = self.lock();
            let Some(place) = missing(&tables) else { return Poll::Ready(()) };
            let waiting = tables.waiting.entry(place).or_default();
            if !waiting.iter().any(|waker| waker.will_wake(context.waker())) {
                waiting.push(context.waker().clone());
            }
            Poll::Pending
        };
        poll_fn(look).await;
    }

    /// Waits until all these boundaries of a micro-batch lie in the stash.
    pub(crate) async fn stashed(&self, boundaries: &[BoundaryId], m: MicroBatch) {
        self.until(|tables| {
            let mut places = boundaries.iter().map(|&id| tables.stashed(id, m));
            places.find(|&at| !tables.stashed[at]).map(Place::Stashed)
        })
        .await;
    }

    /// Waits until a block is published as of `version`.
    pub(crate) async fn updated(&self, block: BlockId, version: Version) {
        let at = block.0 as usize;
        let is_missing = |tables: &Tables| tables.versions[at] < version;
        self.until(|tables| is_missing(tables).then_some(Place::Version(at))).await;
    }

    /// Waits until every block is published as of `version`.
    pub(crate) async fn settled(&self, version: Version) {
        let is_missing = |&held: &Version| held < version;
        self.until(|tables| tables.versions.iter().position(is_missing).map(Place::Version)).await;
    }

    pub(crate) fn versions(&self) -> Vec<Version> {
        self.lock().versions.clone()
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    use super::*;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Whoever waits for another fact sleeps on, and one that looks twice is woken once.
    #[test]
    fn a_fact_wakes_those_that_wait_for_it() {
        let facts = Facts::new(2, 0);
        let mut waits = [0, 1].map(|block| Box::pin(facts.updated(BlockId(block), 1)));
        let mut settles = pin!(facts.settled(1));
        let counts = [(); 3].map(|()| Arc::new(Count::default()));
        let woken = || counts.each_ref().map(|count| count.0.load(Ordering::Relaxed));
        let wakers = counts.each_ref().map(|count| Waker::from(count.clone()));
        let mut contexts = wakers.each_ref().map(Context::from_waker);
        for _ in 0..2 {
            for (wait, context) in waits.iter_mut().zip(&mut contexts) {
                assert!(wait.as_mut().poll(context).is_pending());
            }
            assert!(settles.as_mut().poll(&mut contexts[2]).is_pending());
        }
        facts.raise(&Fact::Updated(BlockId(0), 1));
        assert_eq!(woken(), [1, 0, 1]);
        assert!(waits[0].as_mut().poll(&mut contexts[0]).is_ready());
        assert!(settles.as_mut().poll(&mut contexts[2]).is_pending(), "the other block is missing");
        facts.raise(&Fact::Updated(BlockId(1), 1));
        assert_eq!(woken(), [1, 1, 2]);
        assert!(settles.as_mut().poll(&mut contexts[2]).is_ready());
    }
}
