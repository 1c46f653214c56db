//! What all actors and operations of one relay share: facts, the kill switch, and the state that
//! reports are made from.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::{SetOnce, watch};

use crate::cause::{Cause, Problem, Switch};
use crate::config::RingConfig;
use crate::facts::Facts;
use crate::meter::{ActorState, Meter, Spent};
use crate::names::ActorName;
use crate::pool::{Content, Gauge};
use crate::report::{Doing, InFlight, Snapshot};
use crate::schedule::{LayerId, Pools};
use crate::work::{Lane, Queue, Row};

/// The reason of an actor's wait. It is not formatted, because waits are many and reports few.
#[derive(Clone, Copy, Debug)]
pub(crate) enum WaitsFor {
    Start,
    Message(&'static str),
    Slot(&'static str, Content),
    Fact(Content),
    Operation(Lane),
    Nothing,
}

impl fmt::Display for WaitsFor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WaitsFor::Start => write!(f, "start"),
            WaitsFor::Message(mailbox) => write!(f, "receiving from {mailbox}"),
            WaitsFor::Slot(pool, content) => write!(f, "a slot of {pool} for {content}"),
            WaitsFor::Fact(content) => write!(f, "{content} to be there"),
            WaitsFor::Operation(lane) => write!(f, "an operation on {}", lane.name()),
            WaitsFor::Nothing => write!(f, "nothing: it has ended"),
        }
    }
}

/// The state of an actor: [`Doing`], not formatted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Standing {
    pub(crate) state: ActorState,
    pub(crate) what: WaitsFor,
    pub(crate) layer: Option<LayerId>,
    pub(crate) since: Duration,
    pub(crate) waits: u64,
}

/// The note in which an actor keeps its present state.
#[derive(Debug)]
pub(crate) struct Post {
    standing: Mutex<Standing>,
    meter: Meter,
}

impl Post {
    fn new(since: Duration) -> Post {
        let state = ActorState::Busy;
        let what = WaitsFor::Start;
        let standing = Mutex::new(Standing { state, what, layer: None, since, waits: 0 });
        Post { standing, meter: Meter::new(since) }
    }

    pub(crate) fn standing(&self) -> Standing {
        *self.standing.lock().expect("nothing panics inside")
    }

    pub(crate) fn enter(&self, standing: Standing) {
        self.meter.enter(standing.state, standing.since);
        *self.standing.lock().expect("nothing panics inside") = standing;
    }

    fn doing(&self) -> (Doing, Spent) {
        let Standing { state, what, layer, since, waits } = self.standing();
        (Doing { state, what: what.to_string(), layer, since, waits }, self.meter.spent())
    }
}

/// An operation that is queued and not finished: [`InFlight`], unformatted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Queued {
    pub(crate) actor: ActorName,
    pub(crate) layer: Option<LayerId>,
    pub(crate) queue: Queue,
    pub(crate) row: Row,
    pub(crate) commits: bool,
    pub(crate) begun: bool,
}

impl Queued {
    /// True when the model is not to be trusted unless this ends well: an update that was begun,
    /// or that will be.
    fn may_tear(&self) -> bool {
        self.row.lane == Lane::Update && (self.begun || self.commits)
    }

    fn in_flight(&self, ring: &Ring) -> InFlight {
        let Queued { actor, layer, queue, row, commits, begun } = *self;
        InFlight { actor, queue, layer, operation: ring.named(actor, queue, row), begun, commits }
    }
}

/// The state that all actors and operations of one relay share.
#[derive(Debug)]
pub(crate) struct Ring {
    pub(crate) switch: Switch,
    pub(crate) facts: Facts,
    pub(crate) gauges: Vec<Gauge>,
    /// One for each actor.
    posts: Vec<Post>,
    pools: Pools,
    in_flight: Mutex<BTreeMap<u64, Queued>>,
    enqueued: AtomicU64,
    /// One more than the number of the operation that ended last; 0: none has ended.
    last_finished: AtomicU64,
    progress: AtomicU64,
    pub(crate) alive: watch::Sender<usize>,
    /// The watchdog sets it when the ring does not even end.
    pub(crate) given_up: SetOnce<()>,
    /// True while the relay waits for the actors: for a step's result, or for their end.
    pub(crate) awaited: AtomicBool,
    /// The time at which the last result was known, in nanoseconds.
    resolved_at: AtomicU64,
}

impl Ring {
    pub(crate) fn new(config: &RingConfig, gauges: Vec<Gauge>, now: Duration) -> Ring {
        let &RingConfig { blocks, pools, trained, .. } = config;
        Ring {
            switch: Switch::default(),
            facts: Facts::new(blocks as usize, trained),
            gauges,
            posts: ActorName::all(&pools).iter().map(|_| Post::new(now)).collect(),
            pools,
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

    /// An operation's name in reports. Where the ring has several devices, the name says which one,
    /// unless the actor's name does. (Names of the first device's actors have no number.)
    pub(crate) fn named(&self, actor: ActorName, queue: Queue, row: Row) -> String {
        let is_said = actor.device().is_some_and(|device| device > 0);
        match queue.device.filter(|_| self.pools.devices > 1 && !is_said) {
            Some(device) => format!("{row} on device {device}"),
            None => row.to_string(),
        }
    }

    pub(crate) fn post(&self, actor: ActorName) -> &Post {
        &self.posts[actor.index(self.pools.devices as usize)]
    }

    /// A number that grows whenever anything moves.
    pub(crate) fn progress(&self) -> u64 {
        self.progress.load(Relaxed)
    }

    /// Tells the watchdog that something moved, or still runs.
    pub(crate) fn moves(&self) {
        self.progress.fetch_add(1, Relaxed);
    }

    /// False when there is nothing to do: a standstill then is no hang.
    pub(crate) fn is_working(&self) -> bool {
        self.awaited.load(Relaxed) || !self.operations().is_empty()
    }

    /// True while an operation of the file lane runs.
    pub(crate) fn is_at_storage(&self) -> bool {
        self.operations().values().any(|queued| queued.begun && queued.row.lane == Lane::File)
    }

    pub(crate) fn enqueued(&self, operation: Queued) -> u64 {
        let number = self.enqueued.fetch_add(1, Relaxed);
        self.operations().insert(number, operation);
        number
    }

    pub(crate) fn begun(&self, number: u64) {
        self.moves();
        if let Some(operation) = self.operations().get_mut(&number) {
            operation.begun = true;
        }
    }

    pub(crate) fn last_finished(&self) -> Option<u64> {
        self.last_finished.load(Relaxed).checked_sub(1)
    }

    pub(crate) fn finished(&self, number: u64) {
        self.last_finished.store(number + 1, Relaxed);
        self.moves();
        self.operations().remove(&number);
    }

    /// Notes that an operation failed. An update that had begun may have left anything behind, so
    /// it stays on the list of unfinished operations.
    pub(crate) fn failed(&self, number: u64) {
        self.moves();
        let mut operations = self.operations();
        if operations.get(&number).is_some_and(|operation| !operation.may_tear()) {
            operations.remove(&number);
        }
    }

    /// True if some update has begun, or will run, and is not done.
    pub(crate) fn is_torn_inside(&self) -> bool {
        self.operations().values().any(Queued::may_tear)
    }

    fn operations(&self) -> MutexGuard<'_, BTreeMap<u64, Queued>> {
        self.in_flight.lock().expect("nothing panics inside")
    }

    /// Notes that an actor failed, with its present state.
    pub(crate) fn trip(&self, actor: ActorName, problem: Problem) {
        let Standing { what, layer, .. } = self.post(actor).standing();
        self.switch.trip(Cause { actor, layer, operation: what.to_string(), problem });
    }

    /// Waits until every actor has ended.
    pub(crate) async fn ended(&self) {
        let mut alive = self.alive.subscribe();
        _ = *alive.wait_for(|&alive| alive == 0).await.expect("the ring holds the sender");
    }

    /// Notes that a step's result is known. The ring may be idle now, even if nothing waits for the
    /// result.
    pub(crate) fn resolves(&self, now: Duration) {
        self.resolved_at.store(now.as_nanos() as u64, Relaxed);
        self.awaited.store(false, Relaxed);
    }

    pub(crate) fn resolved_at(&self) -> Duration {
        Duration::from_nanos(self.resolved_at.load(Relaxed))
    }

    /// The time at which an actor last began something.
    pub(crate) fn last_entered(&self) -> Duration {
        let entered = self.posts.iter().map(|post| post.standing().since);
        entered.max().unwrap_or_default()
    }

    /// The time that each actor has spent until now, with the state it is in.
    pub(crate) fn spent(&self, now: Duration) -> Vec<(ActorName, Spent)> {
        let names = ActorName::all(&self.pools).into_iter();
        names.map(|name| (name, self.post(name).meter.spent_until(now))).collect()
    }

    pub(crate) fn snapshot(&self) -> Snapshot {
        let actors = ActorName::all(&self.pools).into_iter().map(|name| {
            let (doing, spent) = self.post(name).doing();
            (name, doing, spent)
        });
        Snapshot {
            actors: actors.collect(),
            pools: self.gauges.iter().map(Gauge::read).collect(),
            operations: self.operations().values().map(|queued| queued.in_flight(self)).collect(),
            versions: self.facts.versions(),
        }
    }
}
