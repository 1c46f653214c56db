//! The times of kernels, if a command asks for them: an event before and behind each launch.

use std::sync::{Arc, Mutex};

use l2l_actors::BoxedError;

use super::driver::{Driver, Event, Stream};
use crate::devices::KernelTime;

/// The times of a device's kernels.
#[derive(Default)]
pub(super) struct Times {
    /// `None`: times are not measured.
    launches: Mutex<Option<Vec<Launched>>>,
}

struct Launched {
    kernel: &'static str,
    begin: Arc<Event>,
    end: Arc<Event>,
}

impl Times {
    /// Times every launch from now on.
    pub(super) fn begin(&self) {
        self.launches.lock().expect("nothing panics inside").get_or_insert_default();
    }

    /// Launches on the compute stream, and records events around it if times are measured.
    pub(super) fn of(
        &self,
        driver: &Arc<dyn Driver>,
        kernel: &'static str,
        launch: impl FnOnce() -> Result<(), BoxedError>,
    ) -> Result<(), BoxedError> {
        let is_asked = self.launches.lock().expect("nothing panics inside").is_some();
        if !is_asked {
            return launch();
        }
        let begin = Event::record(driver, Stream::Compute)?;
        launch()?;
        let end = Event::record(driver, Stream::Compute)?;
        let launched = Launched { kernel, begin, end };
        let mut all = self.launches.lock().expect("nothing panics inside");
        all.get_or_insert_default().push(launched);
        Ok(())
    }

    /// The times of all launches since the last call, by kernel. Waits for them.
    pub(super) fn take(&self, driver: &dyn Driver) -> Result<Vec<KernelTime>, BoxedError> {
        let mut all = self.launches.lock().expect("nothing panics inside");
        let all = all.as_mut().map(std::mem::take).unwrap_or_default();
        let seconds = |Launched { kernel, begin, end }: Launched| {
            driver.synchronize(end.id)?;
            let seconds = driver.seconds(begin.id, end.id)?;
            Ok(KernelTime { kernel, launches: 1, seconds })
        };
        let times: Result<Vec<KernelTime>, BoxedError> = all.into_iter().map(seconds).collect();
        times.map(KernelTime::sums)
    }
}
