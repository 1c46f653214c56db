//! The port for the records of a run.

use std::time::Duration;

use l2l_actors::RecordSink;

/// Receives the record of every operation from the lanes, and from the worker when a step begins
/// and ends.
pub(crate) trait Records: RecordSink {
    /// A step begins.
    fn begun(&self, now: Duration, step: u64, trains: bool);

    /// The last step's loss and norm are known.
    fn resolved(&self, now: Duration);
}
