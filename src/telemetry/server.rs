//! A server in the process: metrics for Prometheus, the live page, and health checks.
//!
//! It runs on one thread of its own, which also keeps the recorder small. Training never waits for
//! it. A client that sends nothing, or never reads, holds one of a few connections for a while, and
//! loses it when others ask ([`door`]).

use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{
    ALLOW, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderName, HeaderValue,
    X_CONTENT_TYPE_OPTIONS,
};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusRecorder};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::task::AbortHandle;

use super::{Histograms, METRICS, MetricKind, State, Watch, describe, door, live, page, publish};
use crate::limits::no_thread;

/// The time that a client has to send its request.
const PATIENCE: Duration = Duration::from_secs(2);
/// The time that a connection has in all. It is for one answer.
const LIFETIME: Duration = Duration::from_secs(5);
/// The time between two clean-ups of the recorder.
const UPKEEP: Duration = Duration::from_secs(1);
/// The most steps that the live page shows, and the most slices of them.
const STEPS: u64 = 2;
const SLICES: usize = 4096;

/// Makes a recorder with the buckets of the list.
pub fn recorder() -> PrometheusRecorder {
    let mut builder = PrometheusBuilder::new();
    for metric in METRICS.iter().filter(|metric| metric.kind == MetricKind::Histogram) {
        let name = Matcher::Full(metric.name.into());
        builder = builder.set_buckets_for_metric(name, metric.buckets).expect("it has buckets");
    }
    let recorder = builder.build_recorder();
    describe(&recorder);
    recorder
}

/// Serves a run until it is dropped.
pub struct Server {
    shared: Arc<Shared>,
    histograms: Arc<Histograms>,
    address: Option<SocketAddr>,
    _stop: oneshot::Sender<()>,
}

struct Shared {
    /// Names that it answers to, besides its addresses and `localhost`.
    names: Vec<String>,
    recorder: PrometheusRecorder,
    watch: OnceLock<Watch>,
    scrapes: Mutex<Scrapes>,
    scraped: Condvar,
}

/// The answers with metrics that have been sent, to the last byte.
#[derive(Default)]
struct Scrapes {
    any: bool,
    /// True once the end of the run waits for one more.
    awaited: bool,
    /// True once one was made and sent after that.
    last: bool,
}

impl Server {
    /// Starts the server of the run `run`, which listens if there is an address. The run's view is
    /// given later ([`show`](Server::show)). Requests that name another host than an IP address,
    /// `localhost` or one of `hosts` are refused: a site whose name points here could read the run
    /// (DNS rebinding).
    ///
    /// # Errors
    /// It cannot listen at the address, or cannot start its thread.
    pub fn start(
        address: Option<SocketAddr>,
        hosts: &[String],
        run: &str,
    ) -> std::io::Result<Server> {
        let listener = address.map(TcpListener::bind).transpose()?;
        let address = listener.as_ref().map(TcpListener::local_addr).transpose()?;
        let shared = Arc::new(Shared {
            names: hosts.to_vec(),
            recorder: recorder(),
            watch: OnceLock::new(),
            scrapes: Mutex::default(),
            scraped: Condvar::new(),
        });
        let histograms = Histograms::new(run, &shared.recorder);
        let (stop, stopped) = oneshot::channel();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let served = shared.clone();
        let thread = std::thread::Builder::new().name("l2l-metrics".into());
        let started = thread.spawn(move || {
            runtime.block_on(async {
                if let Some(listener) = listener {
                    tokio::spawn(serve(listener, served.clone()));
                }
                tokio::select! {
                    _ = stopped => {}
                    () = served.keep_small() => {}
                }
            });
        });
        started.map_err(|error| std::io::Error::other(no_thread(error)))?;
        Ok(Server { shared, histograms, address, _stop: stop })
    }

    /// The address that it listens at.
    pub fn address(&self) -> Option<SocketAddr> {
        self.address
    }

    /// The histograms, an observer that has to hear of every operation.
    pub fn histograms(&self) -> Arc<Histograms> {
        self.histograms.clone()
    }

    /// Shows this run. A server shows one run, and ignores further ones.
    pub fn show(&self, watch: Watch) {
        _ = self.shared.watch.set(watch);
    }

    /// True once the metrics have been sent to a client.
    pub fn was_scraped(&self) -> bool {
        self.shared.scrapes().any
    }

    /// If the metrics have been sent before, waits until they are sent once more, for `most` at
    /// most. So Prometheus sees the end of a run.
    pub fn linger(&self, most: Duration) {
        let mut scrapes = self.shared.scrapes();
        if scrapes.any {
            scrapes.awaited = true;
            let none = |scrapes: &mut Scrapes| !scrapes.last;
            let waited = self.shared.scraped.wait_timeout_while(scrapes, most, none);
            drop(waited.expect("nothing panics inside"));
        }
    }

    /// All metrics as they are now, in Prometheus's text format.
    pub fn text(&self) -> String {
        self.shared.text()
    }
}

impl Shared {
    fn scrapes(&self) -> MutexGuard<'_, Scrapes> {
        self.scrapes.lock().expect("nothing panics inside")
    }

    /// Notes that metrics have been sent. `awaited` tells whether the end of the run already waited
    /// when they were made.
    fn sent(&self, awaited: bool) {
        let mut scrapes = self.scrapes();
        scrapes.any = true;
        scrapes.last |= awaited;
        self.scraped.notify_all();
    }

    fn text(&self) -> String {
        if let Some(watch) = self.watch.get() {
            publish(&watch.view(0), &self.recorder);
        }
        let mut text = self.recorder.handle().render();
        for metric in METRICS {
            if metric.kind == MetricKind::Counter && !metric.counts_whole() {
                let kind = |kind: &str| format!("# TYPE {} {kind}\n", metric.name);
                text = text.replacen(&kind("gauge"), &kind("counter"), 1);
            }
        }
        text
    }

    /// The page's policy, which also forbids other pages to frame it.
    fn policy(&self) -> HeaderValue {
        let policy = format!("{}; frame-ancestors 'none'", page::policy());
        HeaderValue::from_str(&policy).expect("ASCII")
    }

    /// Reads one request and sends its answer.
    async fn answer_one(self: Arc<Self>, stream: TcpStream) {
        let awaited = OnceLock::new();
        let answer = service_fn(|request: Request<Incoming>| {
            let response = self.answer(&request, &awaited);
            async move { Ok::<_, Infallible>(response) }
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(PATIENCE)
            .keep_alive(false)
            .half_close(true) // a probe may end its side before it reads
            .max_headers(door::HEADERS)
            .max_buf_size(door::HEAD_BYTES)
            .serve_connection(TokioIo::new(stream), answer);
        let sent = matches!(tokio::time::timeout(LIFETIME, connection).await, Ok(Ok(())));
        if let Some(awaited) = awaited.get().filter(|_| sent) {
            self.sent(*awaited);
        }
    }

    async fn keep_small(&self) {
        let handle = self.recorder.handle();
        loop {
            tokio::time::sleep(UPKEEP).await;
            handle.run_upkeep();
        }
    }

    /// The answer to a request. If it has metrics, `awaited` is set: to whether the end of the run
    /// waits for them.
    fn answer(
        &self,
        request: &Request<Incoming>,
        awaited: &OnceLock<bool>,
    ) -> Response<Full<Bytes>> {
        let state = self.watch.get().map(|watch| watch.status().state);
        let plain = "text/plain; charset=utf-8";
        let said = |ok: bool, yes: &str, no: &str| {
            let (status, text) = match ok {
                true => (StatusCode::OK, yes),
                false => (StatusCode::SERVICE_UNAVAILABLE, no),
            };
            response(status, plain, format!("{text}\n"))
        };
        if let Err((status, text)) = door::admit(request, &self.names) {
            let mut refused = response(status, plain, format!("{text}\n"));
            if status == StatusCode::METHOD_NOT_ALLOWED {
                refused.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
            }
            return refused;
        }
        match request.uri().path() {
            "/" => {
                let kind = "text/html; charset=utf-8";
                let mut page = response(StatusCode::OK, kind, live().to_string());
                page.headers_mut().insert(CONTENT_SECURITY_POLICY, self.policy());
                page
            }
            "/metrics" => {
                _ = awaited.set(self.scrapes().awaited); // a connection is for one answer
                let text = self.text();
                response(StatusCode::OK, "text/plain; version=0.0.4; charset=utf-8", text)
            }
            "/live.json" => match self.watch.get() {
                Some(watch) => {
                    let mut view = watch.view(STEPS);
                    let excess = view.slices.len().saturating_sub(SLICES);
                    view.slices.drain(..excess); // the newest
                    let view = serde_json::to_string(&view).expect("plain data");
                    response(StatusCode::OK, "application/json", view)
                }
                None => said(false, "", "the run is being made"),
            },
            "/healthz" => said(state != Some(State::Failed), "ok", "the run failed"),
            "/readyz" => {
                let steps = [State::Training, State::Validating, State::Checkpointing];
                said(state.is_some_and(|state| steps.contains(&state)), "ready", "not in its steps")
            }
            _ => {
                let here = "here are /, /metrics, /live.json, /healthz and /readyz\n".to_string();
                response(StatusCode::NOT_FOUND, plain, here)
            }
        }
    }
}

fn response(status: StatusCode, kind: &'static str, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    // Other sites can neither embed an answer nor, without CORS, read one.
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    let resource_policy = HeaderName::from_static("cross-origin-resource-policy");
    headers.insert(resource_policy, HeaderValue::from_static("same-origin"));
    response
}

async fn serve(listener: TcpListener, shared: Arc<Shared>) {
    let listener =
        listener.set_nonblocking(true).and_then(|()| tokio::net::TcpListener::from_std(listener));
    let Ok(listener) = listener else { return };
    // Open connections, the oldest first.
    let mut open: Vec<(IpAddr, AbortHandle)> = Vec::new();
    loop {
        let Ok((stream, from)) = listener.accept().await else {
            // The process may have too many open files, which can pass.
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let client = door::client(from.ip());
        open.retain(|(_, connection)| !connection.is_finished());
        let clients: Vec<IpAddr> = open.iter().map(|(client, _)| *client).collect();
        if let Some(nth) = door::to_close(&clients, client) {
            open.remove(nth).1.abort();
        }
        let connection = tokio::spawn(shared.clone().answer_one(stream));
        open.push((client, connection.abort_handle()));
        // If connections were accepted faster than they are read, new ones would close others
        // before their requests are seen.
        tokio::task::yield_now().await;
    }
}
