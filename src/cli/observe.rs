//! Whoever looks at a run: metrics and the live page, a timeline, a report. What cannot be written or
//! listened to is found before anything else starts.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use l2l::telemetry::{Trace, Watch, report};
use l2l::{Builder, Config, Error, StepReport, devices, machine};
use serde_json::{Value, json};

use super::{ObserveArguments, say};

/// Everybody who looks at one run.
pub(super) struct Observers {
    served: Served,
    trace: Option<(Arc<Trace>, PathBuf)>,
    report: Option<PathBuf>,
    watch: Option<Watch>,
    /// FLOP/s of a product here, if somebody wants to know.
    light: Option<f64>,
}

impl Observers {
    /// Opens what the config and the arguments name.
    ///
    /// # Errors
    /// Which of them cannot be.
    pub(super) fn open(config: &mut Config, arguments: &ObserveArguments) -> Result<Self, Error> {
        let run = config.metrics.run.get_or_insert_with(l2l::telemetry::made_up_name).clone();
        let ObserveArguments { trace, report, .. } = arguments;
        if let Some(folder) = report {
            let refused = |error| Error::Refused(format!("--report {}: {error}", folder.display()));
            fs::create_dir_all(folder).map_err(refused)?;
            may_write(&folder.join(PAGE)).map_err(refused)?;
        }
        let served = Served::open(config, &run)?;
        let trace = match trace {
            Some(path) => Some((Trace::create(path, &run)?, path.clone())),
            None => None,
        };
        if let Some((_, path)) = &trace {
            let same = |other: &PathBuf| path.canonicalize().ok() == other.canonicalize().ok();
            for (key, file) in
                [("metrics.file", &config.metrics.file), ("log.file", &config.log.file)]
            {
                if file.as_ref().is_some_and(same) {
                    let what = format!("--trace {}: {key} is the same file", path.display());
                    return Err(Error::Refused(what));
                }
            }
        }
        let wanted = served.is_there() || report.is_some();
        let light = wanted.then(|| devices::device_flops_per_second(config)).transpose()?;
        Ok(Observers { served, trace, report: report.clone(), watch: None, light })
    }

    /// Lets a trainer tell them.
    pub(super) fn attach(&self, builder: Builder) -> Builder {
        let builder = self.served.attach(builder);
        match &self.trace {
            Some((trace, _)) => builder.observe(trace.clone()),
            None => builder,
        }
    }

    /// From now on there is something to see.
    pub(super) fn show(&mut self, watch: Watch) {
        self.light.into_iter().for_each(|light| watch.light(light));
        self.served.show(&watch);
        self.watch = Some(watch);
    }

    pub(super) fn step(&self, report: &StepReport) {
        self.served.step(report);
    }

    /// The run is over: the last metrics, the end of the timeline, the report. What cannot be written
    /// now does not undo a run that ended well: it is said.
    pub(super) fn close(&self, config: &Config, ended_well: bool) {
        if let Some(watch) = &self.watch {
            if ended_well {
                watch.ended();
            } else {
                watch.failed();
            }
            if let Some(folder) = &self.report
                && let Err(error) = write_report(&folder.join(PAGE), watch, config)
            {
                say(format_args!("--report {}: {error}", folder.display()));
            }
        }
        if let Some(path) = &config.metrics.file
            && let Err(error) = replace(path, &self.served.text())
        {
            say(format_args!("metrics.file {}: {error}", path.display()));
        }
        if let Some((trace, path)) = &self.trace {
            match trace.finish() {
                Ok(0) => {}
                Ok(left_out) => say(format_args!(
                    "--trace {}: {left_out} operations are not in it: they came faster than it \
                     could be written",
                    path.display()
                )),
                Err(error) => say(format_args!("--trace {}: {error}", path.display())),
            }
        }
        if !ended_well {
            self.served.linger();
        }
    }
}

/// Whether a file can be written, which is left as it is.
fn may_write(path: &Path) -> std::io::Result<()> {
    fs::OpenOptions::new().append(true).create(true).open(path).map(drop)
}

const PAGE: &str = "report.html";

/// A file that is there whole or as it was, wherever a link leads; what is no file is written to.
fn replace(path: &Path, text: &str) -> std::io::Result<()> {
    let path = &path.canonicalize()?;
    if !path.is_file() {
        return fs::write(path, text);
    }
    let mut beside = path.as_os_str().to_owned();
    beside.push(".partial");
    fs::write(&beside, text)?;
    fs::rename(&beside, path)
}

fn write_report(path: &Path, watch: &Watch, config: &Config) -> std::io::Result<()> {
    let view = watch.view(u64::MAX).typical();
    let versions = json!({
        "l2l": env!("CARGO_PKG_VERSION"),
        "system": std::env::consts::OS,
        "architecture": std::env::consts::ARCH,
        "vector instructions": machine::vector_instructions(),
        "cores": machine::cores(),
    });
    let host = view.host_memory.iter().map(|of| (of.kind.to_string(), json!(of.planned)));
    let more = [
        ("Host memory by the plan, in bytes", Value::Object(host.collect())),
        ("Configuration", serde_json::to_value(config).expect("a config is plain data")),
        ("Versions", versions),
    ];
    replace(path, &report(&view, &more))
}

#[cfg(feature = "prometheus")]
mod served {
    use std::net::SocketAddr;
    use std::time::Duration;

    use l2l::telemetry::{Server, Watch};
    use l2l::{Builder, Config, Error, StepReport};

    /// What is served, if anything is.
    pub(in crate::cli) struct Served(Option<Server>);

    impl Served {
        pub(super) fn open(config: &Config, run: &str) -> Result<Served, Error> {
            let metrics = &config.metrics;
            let address = metrics.listen.as_deref().map(|listen| address(listen, metrics.public));
            let address = address.transpose()?;
            if let Some(file) = &metrics.file {
                super::may_write(file).map_err(|error| Error::Config {
                    key: "metrics.file".into(),
                    problem: format!("{}: {error}", file.display()),
                })?;
            }
            if address.is_none() && metrics.file.is_none() {
                return Ok(Served(None));
            }
            let server = Server::start(address, run).map_err(|error| Error::Config {
                key: "metrics.listen".into(),
                problem: format!(
                    "is {:?}: cannot listen there: {error}",
                    metrics.listen.as_deref().unwrap_or_default()
                ),
            })?;
            if let Some(address) = server.address() {
                crate::cli::say(format_args!("live at http://{address}/"));
            }
            Ok(Served(Some(server)))
        }

        pub(super) fn is_there(&self) -> bool {
            self.0.is_some()
        }

        pub(super) fn attach(&self, builder: Builder) -> Builder {
            match &self.0 {
                Some(server) => builder.observe(server.histograms()),
                None => builder,
            }
        }

        pub(super) fn show(&self, watch: &Watch) {
            if let Some(server) = &self.0 {
                server.show(watch.clone());
            }
        }

        pub(super) fn step(&self, report: &StepReport) {
            if let Some(server) = &self.0 {
                server.histograms().step(report.seconds);
            }
        }

        pub(super) fn text(&self) -> String {
            self.0.as_ref().map(Server::text).unwrap_or_default()
        }

        /// A run that failed says so to whoever scrapes it; nobody else is waited for.
        pub(super) fn linger(&self) {
            const MOST: Duration = Duration::from_secs(15);
            self.0.iter().for_each(|server| server.linger(MOST));
        }
    }

    fn address(listen: &str, public: bool) -> Result<SocketAddr, Error> {
        let bad = |problem: String| Error::Config { key: "metrics.listen".into(), problem };
        let address: SocketAddr = listen
            .parse()
            .map_err(|_| bad(format!("is {listen:?}: write an address such as 127.0.0.1:9464")))?;
        if !address.ip().is_loopback() && !public {
            return Err(bad(format!(
                "is {listen:?}, which others can reach: listen on 127.0.0.1, or set metrics.public \
                 if they may"
            )));
        }
        Ok(address)
    }
}

#[cfg(not(feature = "prometheus"))]
mod served {
    use l2l::telemetry::Watch;
    use l2l::{Builder, Config, Error, StepReport};

    /// Nothing is.
    pub(in crate::cli) struct Served;

    impl Served {
        pub(super) fn open(config: &Config, _run: &str) -> Result<Served, Error> {
            for (key, is_set) in [
                ("metrics.listen", config.metrics.listen.is_some()),
                ("metrics.file", config.metrics.file.is_some()),
            ] {
                if is_set {
                    let problem =
                        "needs the feature prometheus, which this program was built without";
                    return Err(Error::Config { key: key.into(), problem: problem.into() });
                }
            }
            Ok(Served)
        }

        pub(super) fn is_there(&self) -> bool {
            false
        }

        pub(super) fn attach(&self, builder: Builder) -> Builder {
            builder
        }

        pub(super) fn show(&self, _watch: &Watch) {}

        pub(super) fn step(&self, _report: &StepReport) {}

        pub(super) fn text(&self) -> String {
            String::new()
        }

        pub(super) fn linger(&self) {}
    }
}

use served::Served;
