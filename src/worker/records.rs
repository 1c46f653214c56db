//! What receives the records of a run.

use std::time::Duration;

use l2l_actors::RecordSink;

/// Receives the record of every operation from the lanes, and from here when steps begin and end.
pub(crate) trait Records: RecordSink {
    /// A step begins.
    fn begun(&self, now: Duration, step: u64, trains: bool);

    /// The last step's loss and norm are known.
    fn resolved(&self, now: Duration);
}
