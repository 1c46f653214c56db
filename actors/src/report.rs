//! The ring at one moment: what each actor does, who holds which slot, what is queued.
//!
//! The watchdog reads it to say who is to blame for a standstill; anybody else reads it through an
//! [`Observer`](crate::Observer).

use std::fmt;
use std::time::Duration;

use crate::meter::{ActorState, Spent};
use crate::names::ActorName;
use crate::pool::Occupancy;
use crate::schedule::{DeviceId, LayerId};
use crate::work::Queue;

/// What an actor is doing.
#[derive(Clone, Debug, PartialEq)]
pub struct Doing {
    /// Busy, starved or blocked.
    pub state: ActorState,
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
    /// The queue it is in.
    pub queue: Queue,
    /// Its layer, if one.
    pub layer: Option<LayerId>,
    /// What it does.
    pub operation: String,
    /// True once its lane has begun it.
    pub begun: bool,
    /// True when it runs even if the ring is ending.
    pub commits: bool,
}

/// The ring at one moment: who waits for what, who holds which slot, what is queued.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Each actor, what it is doing, and the time it has spent in states that ended.
    pub actors: Vec<(ActorName, Doing, Spent)>,
    /// Each pool.
    pub pools: Vec<Occupancy>,
    /// Operations not finished, oldest first.
    pub operations: Vec<InFlight>,
    /// Each block's version.
    pub versions: Vec<u64>,
}

/// Who is to blame, where, and doing what.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Suspect {
    pub(crate) actor: ActorName,
    pub(crate) layer: Option<LayerId>,
    pub(crate) operation: String,
}

impl Snapshot {
    /// Whom to blame for a standstill: a begun operation, else an actor that is not waiting, else
    /// the oldest queued operation, else the actor that waits longest.
    pub(crate) fn suspect(&self) -> Suspect {
        let begun = self.operations.iter().find(|operation| operation.begun);
        let busy = || self.actors.iter().find(|(_, doing, _)| doing.state == ActorState::Busy);
        let longest = || self.actors.iter().min_by_key(|(_, doing, _)| doing.since);
        let the_actor = |(actor, doing, _): &(ActorName, Doing, Spent)| Suspect {
            actor: *actor,
            layer: doing.layer,
            operation: format!("{:?}: {}", doing.state, doing.what),
        };
        let the_operation = |o: &InFlight| Suspect {
            actor: o.actor,
            layer: o.layer,
            operation: o.operation.clone(),
        };
        None.or_else(|| begun.map(the_operation))
            .or_else(|| busy().map(the_actor))
            .or_else(|| self.operations.first().map(the_operation))
            .or_else(|| longest().map(the_actor))
            .expect("there are at least six actors")
    }
}

/// A device in a report, which does not name the first one: most rings have no other.
fn of_device(device: Option<DeviceId>) -> String {
    let named = device.filter(|&device| device > 0);
    named.map(|device| format!(" of device {device}")).unwrap_or_default()
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
            let name = pool.name;
            let all = pool.holders.len();
            let device = of_device(pool.device);
            writeln!(f, "pool {name}{device}: {} of {all} [{}]", held.len(), held.join(", "))?;
        }
        for InFlight { actor, queue, operation, begun, .. } in &self.operations {
            let state = if *begun { "runs" } else { "queued" };
            let lane = queue.lane.name();
            let device = of_device(queue.device);
            writeln!(f, "lane {lane}{device}: {operation} ({state}, by {actor})")?;
        }
        Ok(())
    }
}
