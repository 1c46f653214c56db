//! The exporter without the feature `prometheus`: it refuses `metrics.listen` and `metrics.file`.

use std::net::SocketAddr;
use std::sync::Arc;

use super::{Observe, Watch};
use crate::config::MetricsConfig;
use crate::error::Error;

/// An exporter that exports nothing.
pub(crate) struct Exporter;

impl Exporter {
    pub(crate) fn open(config: &MetricsConfig, _run: &str) -> Result<Exporter, Error> {
        let keys =
            [("metrics.listen", config.listen.is_some()), ("metrics.file", config.file.is_some())];
        match keys.iter().find(|(_, is_set)| *is_set) {
            None => Ok(Exporter),
            Some((key, _)) => {
                let problem = "needs the feature prometheus, which this program was built without";
                Err(Error::config(key, problem))
            }
        }
    }

    pub(crate) fn is_active(&self) -> bool {
        false
    }

    pub(crate) fn address(&self) -> Option<SocketAddr> {
        None
    }

    pub(crate) fn observer(&self) -> Option<Arc<dyn Observe>> {
        None
    }

    pub(crate) fn show(&self, _watch: &Watch) {}

    pub(crate) fn write_file(&self) -> Option<String> {
        None
    }

    pub(crate) fn waits_for_last_scrape(&self) -> Option<String> {
        None
    }

    pub(crate) fn wait_for_last_scrape(&self) {}
}
