//! The state of the ring at one moment: actors, slots and queued operations.
//!
//! The watchdog reads it to name the suspect of a standstill. Other code reads it through an
//! [`Observer`](crate::Observer).

use std::fmt;
use std::time::Duration;

use crate::meter::{ActorState, Spent};
use crate::names::ActorName;
use crate::pool::Occupancy;
use crate::schedule::{DeviceId, LayerId};
use crate::work::Queue;

/// The state of an actor in a report.
#[derive(Clone, Debug, PartialEq)]
pub struct Doing {
    /// Busy, starved or blocked.
    pub state: ActorState,
    /// The reason of its wait, or of its last wait if it is busy.
    pub what: String,
    /// Its layer, if it is at one.
    pub layer: Option<LayerId>,
    /// The begin of this state, by the lanes' clock.
    pub since: Duration,
    /// The number of its waits so far, which shows its progress.
    pub waits: u64,
}

/// An operation that is queued and not finished.
#[derive(Clone, Debug)]
pub struct InFlight {
    /// The actor that queued it.
    pub actor: ActorName,
    /// The queue it is in.
    pub queue: Queue,
    /// Its layer, if it serves one.
    pub layer: Option<LayerId>,
    /// The name of its work.
    pub operation: String,
    /// True once its lane has begun it.
    pub begun: bool,
    /// True when it runs even if the ring is ending.
    pub commits: bool,
}

/// The state of the ring at one moment: waiting actors, slots in use, queued operations.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Each actor with its state and the time that it spent in states that ended.
    pub actors: Vec<(ActorName, Doing, Spent)>,
    /// Each pool.
    pub pools: Vec<Occupancy>,
    /// Operations not finished, oldest first.
    pub operations: Vec<InFlight>,
    /// Each block's version.
    pub versions: Vec<u64>,
}

/// The actor to blame for a standstill, its layer, and its operation.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Suspect {
    pub(crate) actor: ActorName,
    pub(crate) layer: Option<LayerId>,
    pub(crate) operation: String,
}

impl Snapshot {
    /// The suspect of a standstill: an operation that has begun, else an actor that is not waiting,
    /// else the oldest queued operation, else the actor that waits longest.
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
