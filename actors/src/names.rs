//! The names of the actors.

use std::fmt;

/// The six actors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ActorName {
    /// Reads what is on file, and gathers.
    Fetcher,
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
    pub const ALL: [ActorName; 6] = [
        ActorName::Fetcher,
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
            ActorName::Fetcher => "fetcher",
            ActorName::Prefetcher => "prefetcher",
            ActorName::Executor => "executor",
            ActorName::Stasher => "stasher",
            ActorName::Reducer => "reducer",
            ActorName::Optimizer => "optimizer",
        })
    }
}
