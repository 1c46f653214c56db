//! Facts close the two loops of the ring. They are kept and awaited, never queued.
//!
//! A mailbox of facts would need room for all of them (with room for one per block it deadlocks); a
//! table needs none. Each fact is raised by the operation that makes it true, at the moment it
//! ends, so a fact cannot be lost with an actor.

use tokio::sync::watch;

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
pub(crate) struct Facts {
    stashed: watch::Sender<Stashed>,
    versions: watch::Sender<Vec<Version>>,
}

/// Boundary × micro-batch of one step.
#[derive(Debug, Default)]
struct Stashed {
    micro_batches: usize,
    landed: Vec<bool>,
}

impl Facts {
    pub(crate) fn new(blocks: usize, version: Version) -> Facts {
        Facts {
            stashed: watch::Sender::new(Stashed::default()),
            versions: watch::Sender::new(vec![version; blocks]),
        }
    }

    /// Begins a step: forgets the stash of the step before, which is resolved, so nothing reads it
    /// any more.
    pub(crate) fn begin(&self, plan: &StepPlan) {
        self.stashed.send_modify(|stashed| {
            stashed.micro_batches = plan.schedule.micro_batches.len();
            stashed.landed.clear();
            stashed.landed.resize(plan.schedule.boundaries.len() * stashed.micro_batches, false);
        });
    }

    pub(crate) fn raise(&self, fact: &Fact) {
        match *fact {
            Fact::Stashed(boundary, m) => self.stashed.send_modify(|stashed| {
                let cell = boundary.0 as usize * stashed.micro_batches + m as usize;
                stashed.landed[cell] = true;
            }),
            Fact::Updated(block, version) => {
                self.versions.send_modify(|versions| {
                    let held = &mut versions[block.0 as usize];
                    assert!(*held + 1 == version, "{block} went from v{held} to v{version}");
                    *held = version;
                });
            }
        }
    }

    /// Waits until all these boundaries of a micro-batch lie in the stash.
    pub(crate) async fn stashed(&self, boundaries: &[BoundaryId], m: MicroBatch) {
        let mut stashed = self.stashed.subscribe();
        let landed = |stashed: &Stashed| {
            let cell = |id: &BoundaryId| id.0 as usize * stashed.micro_batches + m as usize;
            boundaries.iter().all(|id| stashed.landed[cell(id)])
        };
        stashed.wait_for(landed).await.expect("the ring holds the sender").landed.len();
    }

    /// Waits until a block is published as of `version`.
    pub(crate) async fn updated(&self, block: BlockId, version: Version) {
        let mut versions = self.versions.subscribe();
        let reached = |versions: &Vec<Version>| versions[block.0 as usize] >= version;
        versions.wait_for(reached).await.expect("the ring holds the sender").len();
    }

    /// Waits until every block is published as of `version`.
    pub(crate) async fn settled(&self, version: Version) {
        let mut versions = self.versions.subscribe();
        let reached = |versions: &Vec<Version>| versions.iter().all(|&held| held >= version);
        versions.wait_for(reached).await.expect("the ring holds the sender").len();
    }

    pub(crate) fn versions(&self) -> Vec<Version> {
        self.versions.borrow().clone()
    }
}
