//! The exporter opens the server of `metrics.listen` (metrics and the live page) and the file of
//! `metrics.file` (the last metrics). If one cannot be opened, the run is refused before it trains.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::files::{may_write, replace};
use super::{Observe, Server, Watch};
use crate::config::MetricsConfig;
use crate::error::Error;
use crate::limits::named;

/// The time that a run that ended waits for a last scrape.
const LAST_SCRAPE: Duration = Duration::from_secs(15);

/// The server and the file that a config asks for, both optional.
pub(crate) struct Exporter {
    server: Option<Server>,
    file: Option<PathBuf>,
}

impl Exporter {
    /// Opens the server and the file that a config asks for. `run` names the run.
    ///
    /// # Errors
    /// `metrics.listen` is not an address, is public without `metrics.public`, or is taken; or the
    /// file cannot be written.
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

    /// True if the config asks for the server or the file.
    pub(crate) fn is_active(&self) -> bool {
        self.server.is_some()
    }

    /// The address that it listens on.
    pub(crate) fn address(&self) -> Option<SocketAddr> {
        self.server.as_ref()?.address()
    }

    /// The histograms, which have to hear of every operation.
    pub(crate) fn observer(&self) -> Option<Arc<dyn Observe>> {
        Some(self.server.as_ref()?.histograms())
    }

    /// Serves this run from now on.
    pub(crate) fn show(&self, watch: &Watch) {
        if let Some(server) = &self.server {
            server.show(watch.clone());
        }
    }

    /// Writes the last metrics to `metrics.file`. Returns a message if that fails: the run is over,
    /// so it cannot fail any more.
    pub(crate) fn write_file(&self) -> Option<String> {
        let path = self.file.as_ref()?;
        let error = replace(path, &self.server.as_ref()?.text()).err()?;
        Some(format!("metrics.file {}: {}", path.display(), named(error)))
    }

    /// The message that the run will wait for a last scrape, if its metrics were scraped.
    pub(crate) fn waits_for_last_scrape(&self) -> Option<String> {
        self.server.as_ref().filter(|server| server.was_scraped())?;
        let seconds = LAST_SCRAPE.as_secs();
        Some(format!("waits for a last scrape of the metrics, {seconds} s at most"))
    }

    /// Waits for one more scrape if the run's metrics were scraped before, however the run ended.
    /// So a run that ended is not taken for one that vanished. Blocks the thread for 15 seconds at
    /// most.
    pub(crate) fn wait_for_last_scrape(&self) {
        if let Some(server) = &self.server {
            server.linger(LAST_SCRAPE);
        }
    }
}

/// The address in `metrics.listen`. The host `localhost` is the loopback address. Without a host,
/// as in `:9464`, it is the loopback address, too, or all addresses of a public listener.
fn address(listen: &str, public: bool) -> Result<SocketAddr, Error> {
    let host_and_port = match listen.rsplit_once(':') {
        Some(("", port)) if public => format!("0.0.0.0:{port}"),
        Some(("" | "localhost", port)) => format!("127.0.0.1:{port}"),
        _ => listen.to_string(),
    };
    let Ok(address) = host_and_port.parse::<SocketAddr>() else {
        let problem = format_args!(
            "is {listen:?}: write an address and a port, such as 127.0.0.1:9464, or :9464"
        );
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_may_leave_the_host_out() {
        let of = |listen, public| address(listen, public).ok().map(|address| address.to_string());
        let loopback = Some("127.0.0.1:9464".to_string());
        assert_eq!(of("localhost:9464", false), loopback);
        assert_eq!(of(":9464", false), loopback);
        assert_eq!(of(":9464", true), Some("0.0.0.0:9464".into()));
        assert_eq!(of("[::1]:9464", false), Some("[::1]:9464".into()));
        for refused in ["9464", ":", "host:9464", "0.0.0.0:9464"] {
            assert_eq!(of(refused, false), None, "{refused}");
        }
    }
}
