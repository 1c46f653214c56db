//! The run's figures, served to Prometheus from the process itself.

use std::net::SocketAddr;
use std::time::{SystemTime, UNIX_EPOCH};

use l2l::config::MetricsConfig;
use l2l::{Error, StepReport};
use metrics::{counter, gauge, histogram};

/// Metrics of one run. Without an address to listen on, nothing is kept.
pub(super) struct Metrics {
    run: String,
    upkeep: Option<Upkeep>,
}

/// What an exporter wants called now and then, lest it grow.
type Upkeep = Box<dyn Fn()>;

/// Serves what is recorded in this process.
#[cfg(feature = "prometheus")]
fn serve(address: SocketAddr) -> Result<Upkeep, String> {
    use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};
    /// Seconds a step may take.
    const STEP: [f64; 12] = [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1e3, 3e3];
    let builder = PrometheusBuilder::new().with_http_listener(address);
    let (recorder, server) = builder
        .set_buckets_for_metric(Matcher::Full("l2l_step_seconds".into()), &STEP)
        .and_then(PrometheusBuilder::build)
        .map_err(|error| format!("cannot listen there: {error}"))?;
    let handle = recorder.handle();
    metrics::set_global_recorder(recorder).map_err(|error| error.to_string())?;
    tokio::spawn(server);
    Ok(Box::new(move || handle.run_upkeep()))
}

#[cfg(not(feature = "prometheus"))]
fn serve(_: SocketAddr) -> Result<Upkeep, String> {
    Err("this program was built without the feature prometheus".into())
}

impl Metrics {
    /// Listens where the config says: found out before anything else starts.
    ///
    /// # Errors
    /// The address is none, is not this machine's alone, or is in use.
    ///
    /// # Panics
    /// There is no tokio runtime.
    pub(super) fn start(config: &MetricsConfig) -> Result<Metrics, Error> {
        let run = config.run.clone().unwrap_or_else(made_up);
        let Some(listen) = &config.listen else { return Ok(Metrics { run, upkeep: None }) };
        let bad = |problem: String| Error::Config { key: "metrics.listen".into(), problem };
        let address: SocketAddr = listen
            .parse()
            .map_err(|_| bad(format!("is {listen:?}: write an address such as 127.0.0.1:9090")))?;
        if !address.ip().is_loopback() {
            return Err(bad(format!(
                "is {listen:?}, which others can reach: listen on 127.0.0.1 and let a proxy of \
                 yours do the rest"
            )));
        }
        let upkeep = serve(address).map_err(|why| bad(format!("is {listen:?}: {why}")))?;
        Ok(Metrics { run, upkeep: Some(upkeep) })
    }

    pub(super) fn begin(&self, steps: u64) {
        gauge!("l2l_steps_target", "run" => self.run.clone()).set(steps as f64);
    }

    pub(super) fn step(&self, report: &StepReport) {
        let Some(upkeep) = &self.upkeep else { return };
        let run = || self.run.clone();
        gauge!("l2l_step", "run" => run()).set(report.step as f64);
        gauge!("l2l_loss", "run" => run()).set(report.loss);
        gauge!("l2l_grad_norm", "run" => run()).set(report.grad_norm);
        gauge!("l2l_learning_rate", "run" => run()).set(report.learning_rate);
        counter!("l2l_tokens_total", "run" => run()).increment(report.tokens as u64);
        counter!("l2l_model_flops_total", "run" => run()).increment(report.model_flops as u64);
        histogram!("l2l_step_seconds", "run" => run()).record(report.seconds);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        gauge!("l2l_last_step_timestamp_seconds", "run" => run()).set(now.as_secs_f64());
        upkeep();
    }

    pub(super) fn validation(&self, loss: f64) {
        gauge!("l2l_validation_loss", "run" => self.run.clone()).set(loss);
    }
}

/// A name that no other run has, most likely.
fn made_up() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{:x}-{:x}", now.as_millis(), std::process::id())
}
