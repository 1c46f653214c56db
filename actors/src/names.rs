//! The names of the five actors.

use std::fmt;

/// The five actors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ActorName {
    /// Uploads.
    Prefetcher,
    /// Computes.
    Executor,
    /// Downloads boundaries.
    Stasher,
    /// Downloads and joins gradients.
    Reducer,
    /// Updates.
    Optimizer,
}

impl ActorName {
    /// All actors, in flow order.
    pub const ALL: [ActorName; 5] = [
        ActorName::Prefetcher,
        ActorName::Executor,
        ActorName::Stasher,
        ActorName::Reducer,
        ActorName::Optimizer,
    ];
}

impl fmt::Display for ActorName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ActorName::Prefetcher => "prefetcher",
            ActorName::Executor => "executor",
            ActorName::Stasher => "stasher",
            ActorName::Reducer => "reducer",
            ActorName::Optimizer => "optimizer",
        })
    }
}
