//! The ring at one moment, for the watchdog and for whoever looks from outside.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::cause::{ActorName, Cause, Problem};
use crate::crew::Ring;
use crate::meter::{Spent, State};
use crate::pool::{Gauge, Occupancy};
use crate::ports::{Lane, Lanes};
use crate::schedule::LayerId;

/// What an actor is doing, for the watchdog.
#[derive(Clone, Debug, PartialEq)]
pub struct Doing {
    /// Busy, starved or blocked.
    pub state: State,
    /// What it waits for; what it did last, while busy.
    pub what: String,
    /// The layer, if one.
    pub layer: Option<LayerId>,
    /// Since when, by the lanes' clock.
    pub since: Duration,
    /// Waits it has had: how far it has come.
    pub waits: u64,
}

/// An operation that is queued and not finished.
#[derive(Clone, Debug)]
pub struct InFlight {
    /// Who queued it.
    pub actor: ActorName,
    /// Its lane.
    pub lane: Lane,
    /// Its layer, if one.
    pub layer: Option<LayerId>,
    /// What it does.
    pub operation: String,
    /// True once its lane has begun it.
    pub begun: bool,
    /// True when it runs even if the ring is ending.
    pub commits: bool,
}

impl InFlight {
    /// True when the model is not to be trusted unless this ends well: an update that was begun,
    /// or that will be.
    pub(crate) fn may_tear(&self) -> bool {
        self.lane == Lane::Update && (self.begun || self.commits)
    }
}

/// The ring at one moment: who waits for what, who holds which slot, what is queued.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Each actor, what it is doing, and its closed times.
    pub actors: [(ActorName, Doing, Spent); 5],
    /// Each pool.
    pub pools: Vec<Occupancy>,
    /// Operations not finished, oldest first.
    pub operations: Vec<InFlight>,
    /// Each block's version.
    pub versions: Vec<u64>,
}

impl Snapshot {
    /// Whom a standstill is to be blamed on: a begun operation, else an actor that is not waiting,
    /// else the oldest queued operation, else the actor that waits longest.
    pub(crate) fn suspect(&self, problem: Problem) -> Cause {
        let begun = self.operations.iter().find(|operation| operation.begun);
        let busy = || self.actors.iter().find(|(_, doing, _)| doing.state == State::Busy);
        let longest = || self.actors.iter().min_by_key(|(_, doing, _)| doing.since);
        let of_actor = |(actor, doing, _): &(ActorName, Doing, Spent)| {
            (*actor, doing.layer, format!("{:?}: {}", doing.state, doing.what))
        };
        let of_operation = |o: &InFlight| (o.actor, o.layer, o.operation.clone());
        let (actor, layer, operation) = None
            .or_else(|| begun.map(of_operation))
            .or_else(|| busy().map(of_actor))
            .or_else(|| self.operations.first().map(of_operation))
            .or_else(|| longest().map(of_actor))
            .expect("there are five actors");
        Cause { actor, layer, operation, problem }
    }
}

impl fmt::Display for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, doing, _) in &self.actors {
            let layer = doing.layer.map(|layer| format!(" at {layer}")).unwrap_or_default();
            writeln!(f, "{name}{layer}: {:?}, {}", doing.state, doing.what)?;
        }
        for pool in &self.pools {
            let held: Vec<String> =
                pool.holders.iter().flatten().map(|content| content.to_string()).collect();
            writeln!(
                f,
                "pool {}: {} of {} [{}]",
                pool.name,
                held.len(),
                pool.holders.len(),
                held.join(", ")
            )?;
        }
        for operation in &self.operations {
            let state = if operation.begun { "runs" } else { "queued" };
            writeln!(
                f,
                "lane {}: {} ({state}, by {})",
                operation.lane.name(),
                operation.operation,
                operation.actor
            )?;
        }
        Ok(())
    }
}

/// Looks at a ring from outside, also when another task drives it or it has ended.
#[derive(Clone)]
pub struct Observer {
    pub(crate) ring: Arc<Ring>,
    /// Not held: what they work on is not the observer's to keep.
    pub(crate) lanes: Weak<dyn Lanes>,
}

impl Observer {
    /// The ring now.
    pub fn snapshot(&self) -> Snapshot {
        self.ring.snapshot()
    }

    /// What each actor has spent until now. Its states sum to the time since it began.
    pub fn spent(&self) -> [(ActorName, Spent); 5] {
        self.ring.spent(self.now())
    }

    /// Each pool now.
    pub fn pools(&self) -> Vec<Occupancy> {
        self.ring.gauges.iter().map(Gauge::read).collect()
    }

    /// The lanes' clock; it stands still once they are gone.
    pub fn now(&self) -> Duration {
        match self.lanes.upgrade() {
            Some(lanes) => lanes.now(),
            None => self.ring.last_entered(),
        }
    }
}
