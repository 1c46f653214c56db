//! The crew: what all actors share, how each waits, and how all of them end.
//!
//! Three things wait: `recv`, `acquire`, and awaiting a fence or a fact. All go through
//! [`Desk::wait`], which times the wait and writes down what it is for; so the watchdog can say
//! who waits for what. The kill switch is raced against the whole actor, so every wait ends when
//! it trips and no wait needs to know about it.

use std::collections::BTreeMap;
use std::fmt;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::{SetOnce, watch};

use crate::cause::{ActorName, Cause, Problem, Switch};
use crate::facts::Facts;
use crate::fence::{Done, Fence};
use crate::mailbox::Inbox;
use crate::meter::{Meter, Spent, State};
use crate::pool::{Content, Gauge, Held, Pool};
use crate::ports::{Lane, Lanes, Operation, Order, Trouble};
use crate::report::{Doing, InFlight, Snapshot};
use crate::schedule::LayerId;

/// What an actor waits for. Written down unformatted, for waits are many and reports few.
#[derive(Clone, Copy, Debug)]
pub(crate) enum For {
    Start,
    Message(&'static str),
    Slots(u32, &'static str, Content),
    Fact(Content),
    Operation(Lane),
    Nothing,
}

impl fmt::Display for For {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            For::Start => write!(f, "start"),
            For::Message(mailbox) => write!(f, "receiving from {mailbox}"),
            For::Slots(count, pool, content) => write!(f, "{count} of {pool} for {content}"),
            For::Fact(content) => write!(f, "{content} to be there"),
            For::Operation(lane) => write!(f, "an operation on {}", lane.name()),
            For::Nothing => write!(f, "nothing: it has ended"),
        }
    }
}

/// What an actor is doing: [`Doing`], unformatted.
#[derive(Clone, Copy, Debug)]
struct Standing {
    state: State,
    what: For,
    layer: Option<LayerId>,
    since: Duration,
    waits: u64,
}

#[derive(Debug)]
struct Post {
    standing: Mutex<Standing>,
    meter: Meter,
}

impl Post {
    fn new(since: Duration) -> Post {
        let (state, what) = (State::Busy, For::Start);
        let standing = Mutex::new(Standing { state, what, layer: None, since, waits: 0 });
        Post { standing, meter: Meter::new(since) }
    }

    fn standing(&self) -> Standing {
        *self.standing.lock().expect("nothing panics inside")
    }

    fn enter(&self, standing: Standing) {
        self.meter.enter(standing.state, standing.since);
        *self.standing.lock().expect("nothing panics inside") = standing;
    }
}

/// What all actors and operations of one relay share.
#[derive(Debug)]
pub(crate) struct Ring {
    pub(crate) switch: Switch,
    pub(crate) facts: Facts,
    pub(crate) gauges: Vec<Gauge>,
    posts: [Post; 5],
    in_flight: Mutex<BTreeMap<u64, InFlight>>,
    enqueued: AtomicU64,
    /// One more than the number of the operation that ended last; 0: none has.
    last_finished: AtomicU64,
    progress: AtomicU64,
    alive: watch::Sender<usize>,
    /// Set by the watchdog when even the end does not come.
    pub(crate) given_up: SetOnce<()>,
    /// True while the relay waits for what the actors do: a step's result, or their end.
    pub(crate) awaited: AtomicBool,
    /// When the last result was known, in nanoseconds.
    resolved_at: AtomicU64,
}

impl Ring {
    pub(crate) fn new(blocks: usize, gauges: Vec<Gauge>, now: Duration) -> Ring {
        Ring {
            switch: Switch::default(),
            facts: Facts::new(blocks),
            gauges,
            posts: std::array::from_fn(|_| Post::new(now)),
            in_flight: Mutex::default(),
            enqueued: AtomicU64::new(0),
            last_finished: AtomicU64::new(0),
            progress: AtomicU64::new(0),
            alive: watch::Sender::new(0),
            given_up: SetOnce::new(),
            awaited: AtomicBool::new(false),
            resolved_at: AtomicU64::new(0),
        }
    }

    /// Grows whenever anything moves.
    pub(crate) fn progress(&self) -> u64 {
        self.progress.load(Ordering::Relaxed)
    }

    /// False when there is nothing to do: a standstill then is no hang.
    pub(crate) fn is_working(&self) -> bool {
        self.awaited.load(Ordering::Relaxed) || !self.operations().is_empty()
    }

    pub(crate) fn enqueued(&self, actor: ActorName, order: &Order) -> u64 {
        let number = self.enqueued.fetch_add(1, Ordering::Relaxed);
        let Order { layer, ref work, commits, .. } = *order;
        let (lane, operation, begun) = (work.lane(), work.to_string(), false);
        let entry = InFlight { actor, lane, layer, operation, begun, commits };
        self.operations().insert(number, entry);
        number
    }

    pub(crate) fn begun(&self, number: u64) {
        self.progress.fetch_add(1, Ordering::Relaxed);
        if let Some(operation) = self.operations().get_mut(&number) {
            operation.begun = true;
        }
    }

    /// An operation is on its way still.
    pub(crate) fn still_runs(&self) {
        self.progress.fetch_add(1, Ordering::Relaxed);
    }

    /// The operation that ended last.
    pub(crate) fn last_finished(&self) -> Option<u64> {
        self.last_finished.load(Ordering::Relaxed).checked_sub(1)
    }

    pub(crate) fn finished(&self, number: u64) {
        self.last_finished.store(number + 1, Ordering::Relaxed);
        self.progress.fetch_add(1, Ordering::Relaxed);
        self.operations().remove(&number);
    }

    /// An operation failed. An update that was begun may have left anything behind, so it stays
    /// on the list of what is not done.
    pub(crate) fn failed(&self, number: u64) {
        self.progress.fetch_add(1, Ordering::Relaxed);
        let mut operations = self.operations();
        if operations.get(&number).is_some_and(|operation| !operation.may_tear()) {
            operations.remove(&number);
        }
    }

    /// Whether some update was begun, or will be, and is not done.
    pub(crate) fn is_torn_inside(&self) -> bool {
        self.operations().values().any(InFlight::may_tear)
    }

    fn operations(&self) -> std::sync::MutexGuard<'_, BTreeMap<u64, InFlight>> {
        self.in_flight.lock().expect("nothing panics inside")
    }

    /// An actor failed, where it stands.
    fn trip(&self, actor: ActorName, problem: Problem) {
        let Standing { what, layer, .. } = self.posts[actor as usize].standing();
        self.switch.trip(Cause { actor, layer, operation: what.to_string(), problem });
    }

    /// Waits until every actor has ended.
    pub(crate) async fn ended(&self) {
        let mut alive = self.alive.subscribe();
        _ = *alive.wait_for(|&alive| alive == 0).await.expect("the ring holds the sender");
    }

    /// When the last result was known.
    pub(crate) fn resolved_at(&self) -> Duration {
        Duration::from_nanos(self.resolved_at.load(Ordering::Relaxed))
    }

    /// When an actor began what it is at, last of all.
    pub(crate) fn last_entered(&self) -> Duration {
        let entered = self.posts.iter().map(|post| post.standing().since);
        entered.max().unwrap_or_default()
    }

    /// What each actor has spent until now, with what it is at.
    pub(crate) fn spent(&self, now: Duration) -> [(ActorName, Spent); 5] {
        ActorName::ALL.map(|name| (name, self.posts[name as usize].meter.spent_until(now)))
    }

    pub(crate) fn snapshot(&self) -> Snapshot {
        let actors = ActorName::ALL.map(|name| {
            let post = &self.posts[name as usize];
            let Standing { state, what, layer, since, waits } = post.standing();
            (name, Doing { state, what: what.to_string(), layer, since, waits }, post.meter.spent())
        });
        Snapshot {
            actors,
            pools: self.gauges.iter().map(Gauge::read).collect(),
            operations: self.operations().values().cloned().collect(),
            versions: self.facts.versions(),
        }
    }
}

/// A failure to rehearse: what an actor does instead of its `wait`-th wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drill {
    /// Who.
    pub actor: ActorName,
    /// Which of its waits, from 0.
    pub wait: u64,
    /// What happens.
    pub fault: Fault,
}

/// A rehearsed failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Returns an error.
    Error,
    /// Panics.
    Panic,
    /// Never goes on.
    Hang,
}

/// One actor's place in the ring: how it waits and how it orders work.
pub(crate) struct Desk {
    name: ActorName,
    pub(crate) ring: Arc<Ring>,
    lanes: Arc<dyn Lanes>,
    drill: Option<Drill>,
    waits: u64,
}

impl Desk {
    pub(crate) fn new(
        name: ActorName,
        ring: &Arc<Ring>,
        lanes: &Arc<dyn Lanes>,
        drill: Option<Drill>,
    ) -> Desk {
        let drill = drill.filter(|drill| drill.actor == name);
        Desk { name, ring: ring.clone(), lanes: lanes.clone(), drill, waits: 0 }
    }

    /// The one waiting rule.
    async fn wait<F: Future>(
        &mut self,
        state: State,
        what: For,
        layer: Option<LayerId>,
        future: F,
    ) -> Result<F::Output, Trouble> {
        if self.drill.is_some_and(|drill| drill.wait == self.waits) {
            self.fail_on_purpose(what, layer).await?;
        }
        self.waits += 1;
        self.enter(state, what, layer);
        let output = future.await;
        self.enter(State::Busy, what, layer);
        self.ring.progress.fetch_add(1, Ordering::Relaxed);
        Ok(output)
    }

    fn enter(&self, state: State, what: For, layer: Option<LayerId>) {
        let (since, waits) = (self.lanes.now(), self.waits);
        let post = &self.ring.posts[self.name as usize];
        post.enter(Standing { state, what, layer, since, waits });
    }

    async fn fail_on_purpose(&self, what: For, layer: Option<LayerId>) -> Result<(), Trouble> {
        self.enter(State::Busy, what, layer);
        match self.drill.map(|drill| drill.fault) {
            Some(Fault::Error) => Err("a rehearsed error".into()),
            Some(Fault::Panic) => panic!("a rehearsed panic"),
            Some(Fault::Hang) => std::future::pending().await,
            None => Ok(()),
        }
    }

    pub(crate) async fn recv<T>(
        &mut self,
        inbox: &mut Inbox<T>,
        layer: Option<LayerId>,
    ) -> Result<T, Trouble> {
        self.wait(State::Starved, For::Message(inbox.name()), layer, inbox.recv()).await
    }

    pub(crate) async fn acquire(
        &mut self,
        pool: &mut Pool,
        count: u32,
        content: Content,
        layer: Option<LayerId>,
    ) -> Result<Vec<Held>, Trouble> {
        let what = For::Slots(count, pool.name(), content);
        self.wait(State::Blocked, what, layer, pool.acquire(count, content)).await
    }

    pub(crate) async fn acquire_slot(
        &mut self,
        pool: &mut Pool,
        slot: u32,
        content: Content,
        layer: Option<LayerId>,
    ) -> Result<Held, Trouble> {
        let what = For::Slots(1, pool.name(), content);
        self.wait(State::Blocked, what, layer, pool.acquire_slot(slot, content)).await
    }

    pub(crate) async fn fence(
        &mut self,
        lane: Lane,
        fence: &Fence,
        layer: Option<LayerId>,
    ) -> Result<Done, Trouble> {
        self.wait(State::Blocked, For::Operation(lane), layer, fence.wait()).await
    }

    /// Waits for a fact; `content` says which, for reports.
    pub(crate) async fn fact(
        &mut self,
        content: Content,
        layer: Option<LayerId>,
        fact: impl AsyncFnOnce(&Facts),
    ) -> Result<(), Trouble> {
        let ring = self.ring.clone();
        self.wait(State::Starved, For::Fact(content), layer, fact(&ring.facts)).await
    }

    /// A step's result is known, whenever its caller looks.
    pub(crate) fn resolves(&self) {
        let now = self.lanes.now().as_nanos() as u64;
        self.ring.resolved_at.store(now, Ordering::Relaxed);
        self.ring.awaited.store(false, Ordering::Relaxed); // also when nobody waits any more
    }

    /// Queues an order on its lane.
    pub(crate) fn queue(&self, order: Order) -> Fence {
        let (operation, fence) =
            Operation::new(self.name, order, self.ring.clone(), self.lanes.now());
        self.lanes.queue(operation);
        fence
    }
}

/// One of the five.
#[async_trait]
pub(crate) trait Actor: Send {
    /// Works until the stop message has passed through.
    async fn run(&mut self) -> Result<(), Trouble>;
}

/// An actor as a future that ends by itself and says why.
pub struct Task {
    /// Whose.
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

/// Makes a task of an actor: raced against the kill switch, its failure made the first cause.
pub(crate) fn task(
    name: ActorName,
    ring: &Arc<Ring>,
    lanes: &Arc<dyn Lanes>,
    actor: impl Actor + 'static,
) -> Task {
    let mut membership = Membership::new(name, ring, lanes);
    let (ring, lanes) = (ring.clone(), lanes.clone());
    let future = Box::pin(async move {
        let membership = &mut membership; // declared first, let go of last: after all it holds
        let mut actor = actor;
        let mut run = actor.run();
        let caught = poll_fn(|cx| {
            let polled = catch_unwind(AssertUnwindSafe(|| run.as_mut().poll(cx)));
            match polled {
                Ok(Poll::Pending) => Poll::Pending,
                Ok(Poll::Ready(result)) => Poll::Ready(result.map_err(Problem::Error)),
                Err(payload) => Poll::Ready(Err(Problem::of_panic(&*payload))),
            }
        });
        if let Some(Err(problem)) = ring.switch.until_tripped(caught).await {
            ring.trip(name, problem);
        }
        let post = &ring.posts[name as usize];
        let (what, since) = (For::Nothing, lanes.now());
        post.enter(Standing { state: State::Starved, what, layer: None, since, ..post.standing() });
        membership.ended = true;
    });
    Task { name, future }
}
