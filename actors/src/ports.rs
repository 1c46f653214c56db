//! The interface of the ring to the outside: lanes that take work.
//!
//! The actors decide, the lanes do. An actor describes work as plain data
//! ([`Work`](crate::work::Work)), with the fences that it waits on and the slots that it holds, and
//! gets a fence back. Everything with tensors (copies, kernels, the EPS) is behind [`Lanes`], and
//! each step's batch goes past the actors through [`Ports`].
//! [`ThreadLanes`](crate::threads::ThreadLanes) makes lanes from threads and one function;
//! [`virtual_time`](crate::virtual_time) makes them from nothing.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::operation::{Operation, Step};

/// The lanes that actors queue work on.
#[async_trait]
pub trait Lanes: Send + Sync + 'static {
    /// Queues an operation on the lane its work belongs on. Does not wait.
    fn queue(&self, operation: Operation);

    /// Time since an origin of its own.
    fn now(&self) -> Duration;

    /// No more operations will be queued: lanes end when they have run or dropped the operations
    /// they have.
    fn close(&self);

    /// Waits until every lane has ended.
    async fn closed(&self);
}

/// Lanes, and the data of each step.
pub trait Ports: Lanes {
    /// The data of a step. The actors never look at it.
    type Batch: Send + 'static;

    /// Takes the data of a step before any of its operations is queued.
    fn begin(&self, step: &Arc<Step>, batch: Self::Batch);
}
