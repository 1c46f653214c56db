//! Who is told what the lanes did.

use std::time::Duration;

use l2l_actors::Record;
use l2l_actors::schedule::Plan;

/// Hears of every step and every operation, on the thread that did the work.
pub(crate) trait Records: Send + Sync + 'static {
    /// A step begins.
    fn begun(&self, now: Duration, step: u64, trains: bool);

    /// An operation of a step with this plan ended well.
    fn ended(&self, record: &Record, plan: &Plan);

    /// The last step's loss and norm are known.
    fn resolved(&self, now: Duration);
}
