//! What `metrics.listen` and `metrics.file` ask for: a server for the run's metrics and live page,
//! and a file for its last metrics. What cannot be opened is refused before anything is trained.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::files::{may_write, replace};
use super::{Observe, Server, Watch};
use crate::config::MetricsConfig;
use crate::error::Error;

/// How long a run that ended waits for a last scrape.
const LAST_SCRAPE: Duration = Duration::from_secs(15);

/// See the [module](self).
pub(crate) struct Exporter {
    server: Option<Server>,
    file: Option<PathBuf>,
}

impl Exporter {
    /// Opens what a config asks for, for the run of this name.
    ///
    /// # Errors
    /// The address is none, may not be listened on, or is taken; the file cannot be written.
    pub(crate) fn open(config: &MetricsConfig, run: &str) -> Result<Exporter, Error> {
        let address = config.listen.as_deref().map(|listen| address(listen, config.public));
        let address = address.transpose()?;
        if let Some(file) = &config.file {
            may_write(file).map_err(|error| {
                Error::config("metrics.file", format_args!("{}: {error}", file.display()))
            })?;
        }
        let is_wanted = address.is_some() || config.file.is_some();
        let server = is_wanted.then(|| Server::start(address, &config.hosts, run)).transpose();
        let server = server.map_err(|error| {
            let listen = config.listen.as_deref().unwrap_or_default();
            let problem = format_args!("is {listen:?}: cannot listen there: {error}");
            Error::config("metrics.listen", problem)
        })?;
        Ok(Exporter { server, file: config.file.clone() })
    }

    /// Whether the config asks for anything.
    pub(crate) fn is_active(&self) -> bool {
        self.server.is_some()
    }

    /// The address that it listens on.
    pub(crate) fn address(&self) -> Option<SocketAddr> {
        self.server.as_ref()?.address()
    }

    /// The histograms, which need every operation.
    pub(crate) fn observer(&self) -> Option<Arc<dyn Observe>> {
        Some(self.server.as_ref()?.histograms())
    }

    /// Serves this run from now on.
    pub(crate) fn show(&self, watch: &Watch) {
        if let Some(server) = &self.server {
            server.show(watch.clone());
        }
    }

    /// Writes the last metrics to `metrics.file`. Returns what went wrong if that fails: the run is
    /// over.
    pub(crate) fn write_file(&self) -> Option<String> {
        let (path, server) = (self.file.as_ref()?, self.server.as_ref()?);
        let error = replace(path, &server.text()).err()?;
        Some(format!("metrics.file {}: {error}", path.display()))
    }

    /// What to tell whoever waits for the end of a run whose metrics were scraped, if they were.
    pub(crate) fn waits_for_last_scrape(&self) -> Option<String> {
        self.server.as_ref().filter(|server| server.was_scraped())?;
        let seconds = LAST_SCRAPE.as_secs();
        Some(format!("waits for a last scrape of the metrics, {seconds} s at most"))
    }

    /// Waits until the end of a run has been scraped, however it ended, if its metrics were scraped
    /// before: so that a run that ended is not taken for one that vanished. It blocks its thread
    /// for 15 seconds at most.
    pub(crate) fn wait_for_last_scrape(&self) {
        if let Some(server) = &self.server {
            server.linger(LAST_SCRAPE);
        }
    }
}

fn address(listen: &str, public: bool) -> Result<SocketAddr, Error> {
    let Ok(address) = listen.parse::<SocketAddr>() else {
        let problem = format_args!("is {listen:?}: write an address such as 127.0.0.1:9464");
        return Err(Error::config("metrics.listen", problem));
    };
    if !address.ip().is_loopback() && !public {
        let problem = format_args!(
            "is {listen:?}, which others can reach: listen on 127.0.0.1, or set metrics.public if \
             they may"
        );
        return Err(Error::config("metrics.listen", problem));
    }
    Ok(address)
}
