//! "This operation is done": awaited by actors, waited on by lanes.
//!
//! A fence comes only from queueing its operation, so whoever holds one knows that the operation
//! is queued; an operation can therefore wait only on earlier ones, and no set of waits is
//! circular. A fence is reached once. One whose operation fails is never reached: the failure
//! trips the kill switch, which ends every wait.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::SetOnce;

/// What a finished operation reports. Times are the lanes' own, from an origin of theirs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Done {
    /// When it began.
    pub begin: Duration,
    /// When it ended.
    pub end: Duration,
    /// A loss or a sum of squares, where [`Work`](crate::ports::Work) promises one; else 0.
    pub value: f64,
}

/// See the [module](self).
#[derive(Clone, Debug)]
pub struct Fence {
    operation: u64,
    done: Arc<SetOnce<Done>>,
}

impl Fence {
    pub(crate) fn new(operation: u64) -> Fence {
        Fence { operation, done: Arc::new(SetOnce::new()) }
    }

    /// The number of its operation, unique in its relay.
    pub fn operation(&self) -> u64 {
        self.operation
    }

    pub(crate) fn reach(&self, done: Done) {
        self.done.set(done).expect("a fence is reached once");
    }

    /// What the operation reported, if it is done.
    pub fn reached(&self) -> Option<Done> {
        self.done.get().copied()
    }

    /// Waits for the operation; for ever, if it failed.
    pub async fn wait(&self) -> Done {
        *self.done.wait().await
    }
}
