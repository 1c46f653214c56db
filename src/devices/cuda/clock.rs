//! The times of a device's events on the host's clock.

use std::sync::Arc;
use std::time::{Duration, Instant};

use l2l_actors::BoxedError;

use super::driver::{Driver, Event};

/// The most that the clocks of host and device drift apart, as a share of the time that passed.
const DRIFT: f64 = 2e-4;

/// An event, and the host's time when it was reached.
pub(super) struct Clock {
    pub(super) event: Arc<Event>,
    pub(super) at: Instant,
}

impl Clock {
    /// The time of an event that was reached. It is less exact the longer ago the known event was,
    /// as the driver counts milliseconds in a float.
    pub(super) fn time(
        &mut self,
        driver: &dyn Driver,
        event: &Arc<Event>,
    ) -> Result<Instant, BoxedError> {
        let seconds = driver.seconds(self.event.id, event.id)?;
        let by = Duration::from_secs_f64(seconds.abs());
        let at = if seconds < 0.0 { self.at.checked_sub(by) } else { self.at.checked_add(by) };
        let at = at.unwrap_or(self.at);
        Ok(at)
    }

    /// The time of an event that was waited for until now; it becomes the known event. The device's
    /// clock drifts from the host's: the result follows the host's slowly, and is never ahead.
    pub(super) fn reached(
        &mut self,
        driver: &dyn Driver,
        event: &Arc<Event>,
    ) -> Result<Instant, BoxedError> {
        let now = Instant::now();
        let by_device = self.time(driver, event)?;
        let passed = by_device.saturating_duration_since(self.at);
        if passed < Duration::from_secs(1) {
            return Ok(by_device.min(now));
        }
        let lag = now.saturating_duration_since(by_device);
        let at = (by_device + lag.min(passed.mul_f64(DRIFT))).min(now);
        *self = Clock { event: event.clone(), at };
        Ok(at)
    }
}
