//! The time of an actor in each state: busy, starved, blocked.
//!
//! Each state is timed by its own begin and end, so none is computed as the rest of the others.

use std::sync::Mutex;
use std::time::Duration;

/// The state of an actor: it works, or it waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActorState {
    /// Running.
    Busy,
    /// Waiting for a message or a fact from the actors before it.
    Starved,
    /// Waiting for a slot or a lane, which the actors after it free.
    Blocked,
}

/// Time spent in each state so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spent {
    /// Running.
    pub busy: Duration,
    /// Waiting for the actors before it.
    pub starved: Duration,
    /// Waiting for the actors after it.
    pub blocked: Duration,
}

/// Times one actor.
#[derive(Debug)]
pub struct Meter {
    inner: Mutex<Inner>,
}

#[derive(Clone, Copy, Debug)]
struct Inner {
    state: ActorState,
    begin: Duration,
    /// Time in the states that ended.
    spent: Spent,
}

impl Inner {
    /// Time spent in each state if the current one ends now.
    fn spent_until(mut self, now: Duration) -> Spent {
        let seconds = match self.state {
            ActorState::Busy => &mut self.spent.busy,
            ActorState::Starved => &mut self.spent.starved,
            ActorState::Blocked => &mut self.spent.blocked,
        };
        *seconds += now.saturating_sub(self.begin);
        self.spent
    }
}

impl Meter {
    /// The meter of an actor that is busy from now on.
    pub fn new(now: Duration) -> Meter {
        let spent = Spent::default();
        Meter { inner: Mutex::new(Inner { state: ActorState::Busy, begin: now, spent }) }
    }

    /// Ends the current state and begins another.
    pub fn enter(&self, state: ActorState, now: Duration) {
        let mut inner = self.inner.lock().expect("nothing panics inside");
        *inner = Inner { state, begin: now, spent: inner.spent_until(now) };
    }

    /// Time spent in states that ended.
    pub fn spent(&self) -> Spent {
        self.inner.lock().expect("nothing panics inside").spent
    }

    /// Time spent until now, with the current state counted up to now.
    pub fn spent_until(&self, now: Duration) -> Spent {
        self.inner.lock().expect("nothing panics inside").spent_until(now)
    }
}
