//! "This operation is done": awaited by actors, waited on by lanes.
//!
//! Only queueing an operation makes its fence. So an operation can wait only on earlier ones, and
//! no set of waits is circular. A fence is reached once. The fence of an operation that fails is
//! never reached: the failure trips the kill switch, which ends every wait.
//!
//! A device with queues of its own keeps the order of its operations itself. So an operation may be
//! handed to it before those that it waits on are done, if they were handed over too: it is
//! *issued* then.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::SetOnce;

/// The report of a finished operation. Its times count from an origin of the lanes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Done {
    /// The time at which it began.
    pub begin: Duration,
    /// The time at which it ended.
    pub end: Duration,
    /// A loss or a sum of squares, where [`Work`](crate::work::Work) promises one; else 0.
    pub value: f64,
}

/// The end of an operation. Actors and lanes wait for it.
#[derive(Clone, Debug)]
pub struct Fence {
    operation: u64,
    state: Arc<ActorState>,
}

#[derive(Debug, Default)]
struct ActorState {
    issued: SetOnce<()>,
    done: SetOnce<Done>,
}

impl Fence {
    pub(crate) fn new(operation: u64) -> Fence {
        Fence { operation, state: Arc::default() }
    }

    /// The number of its operation, unique in its relay.
    pub fn operation(&self) -> u64 {
        self.operation
    }

    pub(crate) fn reach(&self, done: Done) {
        self.issue();
        self.state.done.set(done).expect("a fence is reached once");
    }

    pub(crate) fn issue(&self) {
        _ = self.state.issued.set(()); // or it was before it was done
    }

    /// Waits until the operation is in a device's hands, or done.
    pub(crate) async fn issued(&self) {
        self.state.issued.wait().await;
    }

    /// The operation's report, if it is done.
    pub fn reached(&self) -> Option<Done> {
        self.state.done.get().copied()
    }

    /// Waits for the operation. The wait never ends if the operation failed.
    pub async fn wait(&self) -> Done {
        *self.state.done.wait().await
    }
}
