//! The failure of a ring: its first cause, and the switch that this cause trips.

use std::any::Any;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use tokio::sync::SetOnce;

use crate::names::ActorName;
use crate::report::{Snapshot, Suspect};
use crate::schedule::LayerId;

/// The error type of actors and of the code that does their work.
pub type BoxedError = Box<dyn std::error::Error + Send + Sync>;

/// Why something ended that should not have.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// It returned an error.
    #[error("{0}")]
    Error(#[from] BoxedError),
    /// It panicked.
    #[error("panicked: {0}")]
    Panic(String),
    /// Nothing moved for this long. The snapshot shows the ring at that time.
    #[error("nothing moved for {seconds} s\n{snapshot}", seconds = .0.as_secs_f64(), snapshot = .1)]
    Hang(Duration, Box<Snapshot>),
    /// The relay was dropped.
    #[error("the relay was dropped")]
    Dropped,
}

impl Problem {
    /// A caught panic, with its message.
    pub fn from_panic(payload: &(dyn Any + Send)) -> Problem {
        let text = payload.downcast_ref::<&str>().map(|text| (*text).to_string());
        let text = text.or_else(|| payload.downcast_ref::<String>().cloned());
        Problem::Panic(text.unwrap_or_else(|| "without a message".into()))
    }
}

/// The first failure: the actor, the layer, the operation and the problem.
#[derive(Debug, thiserror::Error)]
#[error("{actor}{}, {operation}: {problem}", at(.layer))]
pub struct Cause {
    /// The actor that failed, or whose operation did.
    pub actor: ActorName,
    /// The layer at which it failed, if it was at one.
    pub layer: Option<LayerId>,
    /// The operation, or the wait of the actor.
    pub operation: String,
    /// The error, panic or hang.
    #[source]
    pub problem: Problem,
}

impl Cause {
    /// A standstill, blamed on this suspect.
    pub(crate) fn hang(suspect: Suspect, problem: Problem) -> Cause {
        let Suspect { actor, layer, operation } = suspect;
        Cause { actor, layer, operation, problem }
    }
}

/// The layer, as a cause names it.
fn at(layer: &Option<LayerId>) -> String {
    layer.map(|layer| format!(" at {layer}")).unwrap_or_default()
}

/// The kill switch. It trips once, and the first cause stays.
#[derive(Debug, Default)]
pub(crate) struct Switch(SetOnce<Arc<Cause>>);

impl Switch {
    pub(crate) fn trip(&self, cause: Cause) {
        _ = self.0.set(Arc::new(cause)); // a later cause follows from the first
    }

    pub(crate) fn tripped(&self) -> bool {
        self.0.initialized()
    }

    pub(crate) fn cause(&self) -> Option<Arc<Cause>> {
        self.0.get().cloned()
    }

    /// Runs a future until it ends or the switch trips, which goes first.
    pub(crate) async fn until_tripped<F: Future>(&self, future: F) -> Option<F::Output> {
        until(&self.0, future).await
    }
}

/// Runs a future until it ends or something is set, which goes first.
pub(crate) async fn until<T, F: Future>(set: &SetOnce<T>, future: F) -> Option<F::Output> {
    let mut set = pin!(set.wait());
    let mut future = pin!(future);
    poll_fn(|cx| match set.as_mut().poll(cx) {
        Poll::Ready(_) => Poll::Ready(None),
        Poll::Pending => future.as_mut().poll(cx).map(Some),
    })
    .await
}
