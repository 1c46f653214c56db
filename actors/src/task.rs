//! An actor as a task: raced against the kill switch, its failure made the first cause, and the
//! last of them to end closes the lanes.

use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;

use async_trait::async_trait;

use crate::cause::{BoxedError, Problem};
use crate::meter::ActorState;
use crate::names::ActorName;
use crate::ports::Lanes;
use crate::ring::{Ring, Standing, WaitsFor};

#[async_trait]
pub(crate) trait Actor: Send {
    /// Works until the stop message has passed through.
    async fn run(&mut self) -> Result<(), BoxedError>;
}

/// An actor as a future that ends by itself and reports the reason.
pub struct ActorTask {
    /// The actor's name.
    pub name: ActorName,
    /// Runs the actor; spawn it on any executor.
    pub future: Pin<Box<dyn Future<Output = ()> + Send>>,
}

/// Counts an actor in, and out when its future ends or is dropped; the last one closes the lanes.
struct Membership {
    name: ActorName,
    ring: Arc<Ring>,
    lanes: Arc<dyn Lanes>,
    ended: bool,
}

impl Membership {
    fn new(name: ActorName, ring: &Arc<Ring>, lanes: &Arc<dyn Lanes>) -> Membership {
        ring.alive.send_modify(|alive| *alive += 1);
        Membership { name, ring: ring.clone(), lanes: lanes.clone(), ended: false }
    }

    /// The actor has ended by itself.
    fn ends(&mut self) {
        let post = self.ring.post(self.name);
        let state = ActorState::Starved;
        let what = WaitsFor::Nothing;
        let since = self.lanes.now();
        post.enter(Standing { state, what, layer: None, since, ..post.standing() });
        self.ended = true;
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        if !self.ended {
            let problem =
                Problem::Error("its task was dropped: does its runtime still run?".into());
            self.ring.trip(self.name, problem);
        }
        let mut last = false;
        self.ring.alive.send_modify(|alive| {
            *alive -= 1;
            last = *alive == 0;
        });
        if last {
            self.lanes.close();
        }
    }
}

pub(crate) fn task(
    name: ActorName,
    ring: &Arc<Ring>,
    lanes: &Arc<dyn Lanes>,
    actor: impl Actor + 'static,
) -> ActorTask {
    let mut membership = Membership::new(name, ring, lanes);
    let ring = ring.clone();
    let future = Box::pin(async move {
        let membership = &mut membership; // declared first, dropped last: after all the actor holds
        let mut actor = actor;
        let mut run = actor.run();
        let caught = poll_fn(|cx| {
            let polled = catch_unwind(AssertUnwindSafe(|| run.as_mut().poll(cx)));
            match polled {
                Ok(Poll::Pending) => Poll::Pending,
                Ok(Poll::Ready(result)) => Poll::Ready(result.map_err(Problem::Error)),
                Err(payload) => Poll::Ready(Err(Problem::from_panic(&*payload))),
            }
        });
        if let Some(Err(problem)) = ring.switch.until_tripped(caught).await {
            ring.trip(name, problem);
        }
        membership.ends();
    });
    ActorTask { name, future }
}
