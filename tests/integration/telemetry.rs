//! Telemetry agrees with the run: times add up, bytes are those of the schedule, series are few,
//! and observers neither change nor delay training.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use l2l::config::{DeviceKind, StashPlace};
use l2l::data::Batches;
use l2l::models::Model;
use l2l::telemetry::{
    Forecast, LabelValues, Lane, METRICS, Observe, Rates, RunView, Server, Slice, SliceKind, Trace,
    Unit, WaitCause, WorkKind, describe, label_values, publish, samples,
};
use l2l::{Config, Plan, StepReport, Trainer, shape_of};
use serde_json::Value;

use crate::recorder::Kept;

fn config(layers: usize) -> Config {
    let mut config = Config::default();
    config.data.train = "random".into();
    config.model.layers = Some(layers);
    config.model.hidden = Some(48);
    config.model.heads = Some(4);
    config.model.vocabulary = Some(300);
    config.model.positions = Some(24);
    config.step.batch = 7;
    config.step.micro_batch = 2;
    config.metrics.run = Some("tested".into());
    config
}

#[derive(Default)]
struct Heard(Mutex<Vec<Slice>>);

impl Observe for Heard {
    fn heard(&self, slice: &Slice) {
        self.0.lock().expect("nothing panics inside").push(*slice);
    }
}

struct Ran {
    reports: Vec<StepReport>,
    slices: Vec<Slice>,
    /// After the last step, and after its last updates.
    views: [RunView; 2],
    tally: l2l::telemetry::Tally,
    digest: String,
    plan: Plan,
}

fn run(config: Config, steps: usize, observers: Vec<Arc<dyn Observe>>) -> Ran {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let heard = Arc::new(Heard::default());
        let mut batches = Batches::open(&config).expect("random data");
        let mut builder = Trainer::builder(config).observe(heard.clone());
        for observer in observers {
            builder = builder.observe(observer);
        }
        let mut trainer = builder.start().await.expect("a case of ours");
        let watch = trainer.watch();
        let plan = trainer.plan().clone();
        let mut reports = Vec::new();
        for _ in 0..steps {
            let batch = batches.next().await.expect("random data");
            reports.push(trainer.step(batch).await.expect("nothing fails here"));
        }
        let view = watch.view(u64::MAX);
        let tally = watch.tally();
        let digest = trainer.digest().await.expect("nothing fails here");
        let views = [view, watch.view(u64::MAX)];
        // A lane reports its last operation after the digest can be known.
        trainer.stop().await.expect("nothing fails here");
        let slices = std::mem::take(&mut *heard.0.lock().expect("nothing panics inside"));
        Ran { reports, slices, views, tally, digest, plan }
    })
}

#[track_caller]
fn close(what: &str, a: f64, b: f64, within: f64) {
    assert!((a - b).abs() <= within * a.abs().max(b.abs()), "{what}: {a} and {b}");
}

/// The sums agree within 2 % and 50 ms, which a busy machine may put between two clock readings.
#[track_caller]
fn adds_up(what: &str, sum: f64, seconds: f64) {
    assert!((sum - seconds).abs() <= 0.02 * seconds + 0.05, "{what}: {sum} of {seconds}");
}

/// The compute lane's busy time, its waits by cause and the time outside steps add up to the time
/// that passed. So do the three states of each actor. The layers add up to the run.
#[test]
fn times_add_up() {
    for (link, deferred, place) in [
        (None, false, StashPlace::Host),
        (Some("30MB/s"), true, StashPlace::Host),
        (Some("30MB/s"), false, StashPlace::Device),
    ] {
        let mut config = config(5);
        config.device.link = link.map(String::from);
        config.optimizer.clip_norm = deferred.then_some(1.0);
        config.stash.place = place;
        let Ran { reports, views: [view, _], tally, slices, .. } = run(config, 6, Vec::new());
        let compute = tally.lanes[1].busy;
        let parts = compute + tally.exposed() + tally.outside;
        adds_up("the compute lane", parts.as_secs_f64(), view.seconds);
        let told: f64 = reports.iter().map(|report| report.exposed_wait_seconds).sum();
        close("reports", told, tally.exposed().as_secs_f64(), 0.001);
        for cause in WaitCause::ALL {
            let of_layers: Duration =
                tally.layers.iter().map(|layer| layer.waited[cause as usize]).sum();
            assert_eq!(of_layers, tally.waited[cause as usize], "{}", cause.name());
        }
        for actor in &view.actors {
            let states = actor.busy + actor.starved + actor.blocked;
            adds_up(&actor.name, states, view.seconds);
            assert!(actor.busy > 0.0, "{}: actors run for a moment at least", actor.name);
        }
        // A lane does one operation at a time, and the ledger's sums are those of the records.
        for track in Lane::ALL {
            let mut of_track: Vec<&Slice> =
                slices.iter().filter(|slice| slice.lane == track).collect();
            of_track.sort_by_key(|slice| slice.begin);
            assert!(of_track.windows(2).all(|two| two[0].end <= two[1].begin), "{}", track.name());
        }
        let of_lane = |name: &str| view.lanes.iter().find(|lane| lane.name == name).expect("it is");
        if link.is_some() {
            assert!(view.waited.iter().map(|(_, s)| s).sum::<f64>() > 0.0);
            let weights = slices.iter().filter(|slice| slice.kind == WorkKind::Weights);
            let least = weights.map(|slice| slice.bytes).sum::<u64>() as f64 / 30e6;
            assert!(of_lane("upload").busy >= 0.99 * least, "{:?} {least}", of_lane("upload"));
        }
    }
}

/// A validation between training steps is not counted as training, and a watch holds nothing of a
/// run that has ended.
#[test]
fn validation_is_not_counted_as_training() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let config = config(3);
        let mut batches = Batches::open(&config).expect("random data");
        let mut trainer = Trainer::start(config).await.expect("a case of ours");
        let watch = trainer.watch();
        let mut told = 0.0;
        for _ in 0..3 {
            let batch = batches.next().await.expect("random data");
            let report = trainer.step(batch).await.expect("nothing fails here");
            told += report.exposed_wait_seconds;
            let operations = watch.tally().lanes[1].operations;
            let held = batches.next().await.expect("random data");
            trainer.evaluate([Ok(held)]).await.expect("nothing fails here");
            assert_eq!(watch.tally().lanes[1].operations, operations);
        }
        let tally = watch.tally();
        close("exposed wait", told, tally.exposed().as_secs_f64(), 0.001);
        let view = watch.view(u64::MAX);
        assert!(view.slices.iter().all(|slice| slice.step % 2 == 1), "looks are every second step");
        assert_eq!(view.validations.len(), 3);
        let parts = tally.lanes[1].busy + tally.exposed() + tally.outside;
        adds_up("with looks", parts.as_secs_f64(), view.seconds);
        trainer.stop().await.expect("nothing fails here");
        let [a, b] = [watch.view(0), watch.view(0)];
        assert_eq!(a.seconds, b.seconds, "the lanes are gone, and their clock with them");
        assert_eq!(a.actors[0].starved, b.actors[0].starved);
    });
}

/// The bytes counted inside the copies, those of the records and those of the schedule are equal.
#[test]
fn bytes_are_the_schedules() {
    let Ran { slices, views: [_, view], plan, .. } = run(config(3), 4, Vec::new());
    let moved = |kinds: [WorkKind; 2]| {
        let of = slices.iter().filter(|slice| kinds.iter().any(|&kind| slice.kind == kind));
        of.map(|slice| slice.bytes).sum::<u64>()
    };
    assert_eq!(moved([WorkKind::Weights, WorkKind::Input]), view.bytes_uploaded);
    assert_eq!(moved([WorkKind::Output, WorkKind::Gradient]), view.bytes_downloaded);
    assert_eq!(view.bytes_uploaded, 4 * plan.traffic.upload_bytes);
    assert_eq!(view.bytes_downloaded, 4 * plan.traffic.download_bytes);
}

/// A run has at most ten series a layer, and 5,000 in all with 384 layers. Every metric of the list
/// has a series.
#[test]
fn series_are_few() {
    let mut deep = config(384);
    (deep.model.hidden, deep.model.heads) = (Some(8), Some(1));
    (deep.step.batch, deep.data.sequence_length) = (2, Some(4));
    deep.optimizer.clip_norm = Some(1.0);
    let Ran { views: [_, view], .. } = run(deep, 1, Vec::new());
    let mut layers = vec![0; view.layers.len()];
    let mut all = 0;
    samples(&view, |metric, labels, _| {
        all += 1;
        if metric.labels.first() == Some(&"layer") {
            layers[labels[0].parse::<usize>().expect("a number")] += 1;
        }
    });
    assert!(layers.iter().all(|&series| series <= 10), "{layers:?}");
    let histograms = 7 * (12 + 3);
    assert!(all + histograms <= 5000, "{all}");
    let sorted: Vec<&String> = view.layers.iter().map(|layer| &layer.layer).collect();
    assert!(sorted.is_sorted(), "names of layers sort");
}

/// Labels have values that the table of metrics lists.
#[test]
fn labels_have_the_values_that_are_listed() {
    let mut config = config(3);
    config.optimizer.clip_norm = Some(1.0);
    config.device.count = Some(2);
    let Ran { views: [_, view], .. } = run(config, 2, Vec::new());
    let mut devices = Vec::new();
    samples(&view, |metric, values, _| {
        assert_eq!(metric.labels.len(), values.len());
        for (label, value) in metric.labels.iter().zip(values) {
            if let LabelValues::Listed(listed) = label_values(metric.name, label) {
                assert!(listed.contains(value), "{}, {label}: {value}", metric.name);
            }
            if *label == "device" {
                devices.push(value.to_string());
            }
        }
    });
    devices.sort();
    devices.dedup();
    assert_eq!(devices, ["cpu0", "cpu1"]);
    let mut gpus = Config::default();
    gpus.device.kind = DeviceKind::Cuda;
    gpus.device.ordinals = Some(vec![1, 3]);
    assert_eq!(gpus.device_names(), ["cuda1", "cuda3"]);
}

/// An application's own recorder gets every metric, without a listener of l2l's.
#[test]
fn an_applications_own_recorder_gets_everything() {
    let recorder = Kept::default();
    describe(&recorder);
    let Ran { views: [_, view], reports, .. } = run(config(2), 2, Vec::new());
    publish(&view, &recorder);
    let gauges = recorder.gauges();
    let keys = gauges.iter().map(|(key, _)| key.clone()).chain(recorder.counters());
    let mut met = 0;
    for key in keys {
        let metric = METRICS.iter().find(|metric| metric.name == key.name()).expect("listed");
        let (unit, help) = recorder.description(key.name()).expect("it was described");
        assert_eq!(help.as_ref(), metric.help);
        assert_eq!(unit.is_some(), !matches!(metric.unit, Unit::Ratio | Unit::None));
        assert!(key.labels().any(|label| (label.key(), label.value()) == ("run", "tested")));
        met += 1;
    }
    let (_, loss) = gauges.iter().find(|(key, _)| key.name() == "l2l_loss").expect("a gauge");
    assert_eq!(*loss, reports[1].loss);
    assert!(met > 50, "{met}");
}

/// Histograms keep only their buckets: memory does not grow with observations. It is measured in a
/// process of its own, where no other test takes memory.
#[test]
fn memory_is_flat_over_a_million_observations() {
    if std::env::var_os("L2L_TEST_ALONE").is_none() {
        let test = "telemetry::memory_is_flat_over_a_million_observations";
        let out = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test])
            .env("L2L_TEST_ALONE", "1")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&out.stdout);
        assert!(out.status.success() && text.contains("1 passed"), "{text}");
        return;
    }
    let server = Server::start(None, &[], "tested").expect("a thread");
    let histograms = server.histograms();
    let resident = || l2l::machine::resident_memory().unwrap_or(0);
    let slice = |nanos: u64| Slice {
        number: None,
        lane: Lane::File,
        device: None,
        kind: SliceKind::Checkpoint,
        step: 0,
        layer: None,
        phase: None,
        micro_batch: None,
        block: None,
        version: None,
        bytes: 0,
        begin: Duration::ZERO,
        end: Duration::from_nanos(nanos),
        released_by: None,
    };
    let mut after_warm_up = 0;
    for round in 0..21 {
        (0..50_000).for_each(|nth| histograms.heard(&slice(nth)));
        let text = server.text(); // empties the buffers, as upkeep does every second
        let count = format!(
            "l2l_operation_seconds_count{{run=\"tested\",lane=\"file\"}} {}\n",
            50_000 * (round + 1)
        );
        assert!(text.contains(&count), "{count}");
        if round == 0 {
            after_warm_up = resident();
        }
    }
    let grown = resident().saturating_sub(after_warm_up);
    assert!(grown < 8 << 20, "{grown} bytes more after a million");
}

fn ask(address: SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("it listens");
    stream.set_read_timeout(Some(Duration::from_secs(30))).expect("a time");
    _ = stream.write_all(request.as_bytes());
    let mut answer = String::new();
    _ = stream.read_to_string(&mut answer);
    answer
}

fn get(address: SocketAddr, path: &str) -> String {
    ask(address, &format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"))
}

/// Clients that ask again and again, until `stop`. Each returns the number of its answers.
fn clients(address: SocketAddr, stop: &Arc<AtomicBool>) -> Vec<JoinHandle<usize>> {
    let client = |path: &'static str| {
        let stop = stop.clone();
        std::thread::spawn(move || {
            let mut answers = 0;
            while !stop.load(Relaxed) {
                answers += usize::from(get(address, path).starts_with("HTTP/1.1"));
            }
            answers
        })
    };
    ["/metrics", "/live.json", "/", "/nowhere"].map(client).into()
}

/// Clients that are silent, slow or many, or send nonsense, do not change a run, before, during and
/// after it.
#[test]
fn clients_may_do_what_they_like() {
    let quiet = run(config(3), 8, Vec::new());
    let nowhere = "127.0.0.1:0".parse().expect("an address");
    let server = Server::start(Some(nowhere), &[], "tested").expect("a free port");
    let address = server.address().expect("it listens");
    assert!(get(address, "/readyz").starts_with("HTTP/1.1 503"), "there is no run yet");
    assert!(get(address, "/healthz").starts_with("HTTP/1.1 200"));
    assert!(get(address, "/live.json").starts_with("HTTP/1.1 503"));
    assert!(get(address, "/metrics").contains("200 OK"));
    // Open connections that send nothing, half a request, or nonsense.
    let mut held: Vec<TcpStream> =
        (0..20).map(|_| TcpStream::connect(address).expect("it listens")).collect();
    for (index, stream) in held.iter_mut().enumerate() {
        let said = [&b""[..], b"GET /metr", b"\x00\xff\x13garbage\r\n\r\n", b"POST / HTTP/1.1\r\n"];
        _ = stream.write_all(said[index % said.len()]);
    }
    let stop = Arc::new(AtomicBool::new(false));
    let clients = clients(address, &stop);
    let observed = {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(async {
            let config = config(3);
            let mut batches = Batches::open(&config).expect("random data");
            let builder = Trainer::builder(config).observe(server.histograms());
            let mut trainer = builder.start().await.expect("a case of ours");
            server.show(trainer.watch());
            for _ in 0..8 {
                let batch = batches.next().await.expect("random data");
                trainer.step(batch).await.expect("nothing fails here");
            }
            assert!(get(address, "/readyz").starts_with("HTTP/1.1 200"));
            crate::stop(trainer).await.expect("nothing fails here").weights_digest
        })
    };
    stop.store(true, Relaxed);
    for client in clients {
        assert!(client.join().expect("it ends") > 0);
    }
    assert_eq!(observed, quiet.digest);
    assert!(get(address, "/readyz").starts_with("HTTP/1.1 503"), "it has ended");
    let text = get(address, "/metrics");
    assert!(text.contains("# TYPE l2l_exposed_wait_seconds_total counter"), "{text}");
    assert!(text.contains("l2l_state{run=\"tested\",state=\"ended\"} 1"));
    // The run had one process, no experts, no validation, no loss scale and no checkpoint, and
    // nothing measured the machine's speed limit.
    let untold = [
        "l2l_checkpoint_bytes",
        "l2l_checkpoint_disk_free_bytes",
        "l2l_validation_loss",
        "l2l_validation_metric",
        "l2l_speed_of_light_ratio",
        "l2l_loss_scale",
        "l2l_balance_loss",
        "l2l_z_loss",
        "l2l_expert_load_max_ratio",
        "l2l_expert_token_share",
        "l2l_idle_experts",
        "l2l_router_entropy",
        "l2l_dropped_assignments_total",
    ];
    for metric in METRICS {
        let told = text.contains(&format!("# TYPE {} {}\n", metric.name, metric.kind.name()));
        let of_ranks = metric.labels.first() == Some(&"rank");
        let is_expected = !of_ranks && !untold.contains(&metric.name);
        assert_eq!(told, is_expected, "{}: {text}", metric.name);
    }
    drop(held);
}

/// The timeline has every record, and each arrow has a begin and an end.
#[test]
fn the_timeline_is_complete() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("trace.json");
    let trace = Trace::create(&path, "tested").expect("a folder of ours");
    let Ran { slices, .. } = run(config(4), 3, vec![trace.clone()]);
    assert_eq!(trace.finish().expect("it was written"), 0);
    let text = std::fs::read_to_string(&path).expect("it is there");
    let events: Vec<Value> = serde_json::from_str(&text).expect("an array of objects");
    let of = |ph: &str| events.iter().filter(|event| event["ph"] == ph).collect::<Vec<_>>();
    assert_eq!(of("X").len(), slices.len());
    let bytes: u64 =
        of("X").iter().map(|event| event["args"]["bytes"].as_u64().expect("some")).sum();
    assert_eq!(bytes, slices.iter().map(|slice| slice.bytes).sum::<u64>());
    let starts = of("s");
    let ends = of("f");
    let uploads = slices.iter().filter(|slice| slice.kind == WorkKind::Weights).count();
    let updates = slices.iter().filter(|slice| slice.kind == WorkKind::Update).count();
    assert_eq!(ends.len(), uploads + updates, "an arrow to each first use and to each update");
    for end in ends {
        let start = starts.iter().find(|start| start["id"] == end["id"]).expect("it begins");
        assert!(start["ts"].as_f64() <= end["ts"].as_f64(), "{start} {end}");
        assert_eq!(start["name"], end["name"]);
        // An arrow's end is inside the slice it points to.
        let inside = |slice: &&&Value| {
            let from = slice["ts"].as_f64().expect("a time");
            let to = from + slice["dur"].as_f64().expect("a time");
            let at = end["ts"].as_f64().expect("a time");
            slice["tid"] == end["tid"] && from <= at && at <= to
        };
        assert!(of("X").iter().find(inside).is_some(), "{end}");
    }
    let tracks = of("M").iter().filter(|event| event["name"] == "thread_name").count();
    let always = Lane::ALL.into_iter().filter(|lane| lane.is_always_there()).count();
    assert_eq!(tracks, always, "one process with one device exchanges nothing");
    // A folder that is missing stands for every place that cannot be written.
    assert!(Trace::create(&folder.path().join("no/where"), "tested").is_err());
}

/// With one weight slot the overlap falls as much as virtual time predicts.
#[test]
fn virtual_time_knows_what_depth_is_worth() {
    let mut overlaps = Vec::new();
    for weights in [1, 2] {
        let mut config = config(6);
        config.model.hidden = Some(128);
        config.step.batch = 24;
        config.step.micro_batch = 8;
        config.stash.place = StashPlace::Device;
        config.device.link = Some("60MB/s".into());
        config.channels.weights = weights;
        config.channels.stash = 16;
        let Ran { views: [view, _], tally, slices, .. } = run(config.clone(), 5, Vec::new());
        let overlap = |tally: &l2l::telemetry::Tally| {
            let transfer: Duration = tally.layers.iter().map(|layer| layer.transfer()).sum();
            let waited: Duration = tally.layers.iter().map(|layer| layer.waited(true)).sum();
            1.0 - waited.as_secs_f64() / transfer.as_secs_f64()
        };
        let model = Model::new(shape_of(&config).expect("a shape of ours"));
        let otherwise = Rates::of(&config, &model, 1e10, 6e7, 1e10);
        let plan = Plan::new(&config, &model, &config.update_rule()).expect("a plan of ours");
        let rates = Rates::measured(&slices, &config, &model, &plan, otherwise);
        let forecast = Forecast::of(&config, &model, &rates).expect("a schedule of ours");
        let real = overlap(&tally);
        let predicted = overlap(&forecast.tally);
        assert!((real - predicted).abs() < 0.15, "weights {weights}: {real}, {predicted} foretold");
        assert!(view.layers.iter().any(|layer| layer.overlap.is_some()));
        overlaps.push(real);
    }
    assert!(overlaps[0] + 0.1 < overlaps[1], "{overlaps:?}");
}
