//! Where an actor's time goes: busy, starved, blocked.
//!
//! Each state is timed by its own begin and end; none is what is left over of the others.

use std::sync::Mutex;
use std::time::Duration;

/// What an actor is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActorState {
    /// Running.
    Busy,
    /// Waiting for a message or a fact: for whoever is before it.
    Starved,
    /// Waiting for a slot or for its lane: for whoever is after it.
    Blocked,
}

/// Time spent in each state so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spent {
    /// See [`ActorState::Busy`].
    pub busy: Duration,
    /// See [`ActorState::Starved`].
    pub starved: Duration,
    /// See [`ActorState::Blocked`].
    pub blocked: Duration,
}

/// Times one actor.
#[derive(Debug)]
pub struct Meter {
    inner: Mutex<(ActorState, Duration, Spent)>, // state, its begin, closed states
}

impl Meter {
    /// Busy from now.
    pub fn new(now: Duration) -> Meter {
        Meter { inner: Mutex::new((ActorState::Busy, now, Spent::default())) }
    }

    /// Ends the current state and begins another.
    pub fn enter(&self, state: ActorState, now: Duration) {
        let mut inner = self.inner.lock().expect("nothing panics inside");
        *inner = (state, now, closed(&inner, now));
    }

    /// What was spent in states that ended.
    pub fn spent(&self) -> Spent {
        self.inner.lock().expect("nothing panics inside").2
    }

    /// The same, and what was spent until now in the state that has not.
    pub fn spent_until(&self, now: Duration) -> Spent {
        closed(&self.inner.lock().expect("nothing panics inside"), now)
    }
}

/// What is spent when the current state ends now.
fn closed(&(state, begin, mut spent): &(ActorState, Duration, Spent), now: Duration) -> Spent {
    let seconds = match state {
        ActorState::Busy => &mut spent.busy,
        ActorState::Starved => &mut spent.starved,
        ActorState::Blocked => &mut spent.blocked,
    };
    *seconds += now.saturating_sub(begin);
    spent
}
