//! A look at a ring from outside, also while another task drives it or after it has ended.

use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::meter::Spent;
use crate::names::ActorName;
use crate::pool::{Gauge, Occupancy};
use crate::ports::Lanes;
use crate::report::Snapshot;
use crate::ring::Ring;

/// A view of a ring from outside. It also works while another task drives the relay, and after the
/// ring has ended.
#[derive(Clone)]
pub struct Observer {
    ring: Arc<Ring>,
    /// Weak, so that an observer does not keep the lanes' memory alive.
    lanes: Weak<dyn Lanes>,
}

impl Observer {
    pub(crate) fn new(ring: &Arc<Ring>, lanes: &Arc<dyn Lanes>) -> Observer {
        Observer { ring: ring.clone(), lanes: Arc::downgrade(lanes) }
    }

    /// The state of the ring now.
    pub fn snapshot(&self) -> Snapshot {
        self.ring.snapshot()
    }

    /// The time that each actor has spent in each state until now. Its states sum to the time since
    /// it began.
    pub fn spent(&self) -> Vec<(ActorName, Spent)> {
        self.ring.spent(self.now())
    }

    /// The state of each pool now.
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
