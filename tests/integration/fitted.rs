//! `l2l bench --rates` and `l2l plan --rates`: rates fitted to short runs foretell others.

use std::fs;

use l2l::telemetry::{FittedRates, Forecast, Machine, RateRuns, Rates};
use l2l::{Config, Plan, largest_shape_of, model_of};

use crate::program::{events, good, output};

/// A machine whose operations take what rates and shapes of another kind say: kernels move memory
/// beside their products and have a start, and lanes share the host's memory.
const TRUTH: &str = r#"
    name = "the truth"
    [host]
    memory = "500GB"
    stream = "200GB/s"
    [device]
    count = 2
    memory = "22GB"
    stream = "1TB/s"
    products = { bf16 = "150TFLOP/s" }
    link = "25GB/s"
    launch_seconds = 8e-6
"#;

/// The config that rates are fitted to, on one device.
fn small() -> Config {
    let mut config = Config::default();
    let model = &mut config.model;
    model.preset = Some("llama-1b".into());
    model.layers = Some(4);
    (model.dropout, model.vocabulary) = (Some(0.0), Some(8192));
    config.data.train = "random".into();
    config.data.sequence_length = Some(1024);
    (config.step.batch, config.step.micro_batch) = (8, 4);
    config.schedule.recompute = l2l::config::Recompute::Layer(true);
    config.device.dtype = l2l::config::Dtype::Bf16;
    let machine = Machine::parse(TRUTH).expect("a machine of ours");
    let mut config = machine.config(&config);
    config.device.ordinals = Some(vec![0]);
    config
}

/// A step of a config as virtual time has it, with rates that are derived of model and plan.
fn forecast(config: &Config, rates: impl FnOnce(&l2l::models::Model, &Plan) -> Rates) -> Forecast {
    let shape = largest_shape_of(config).expect("a shape of ours");
    let model = model_of(config, shape).expect("a model of ours");
    let plan = Plan::new(config, &model, &config.update_rule()).expect("a plan of ours");
    let rates = rates(&model, &plan);
    Forecast::of_plan(config, &model, &plan, &rates).expect("a schedule of ours")
}

/// No rate is of the run that is foretold: deeper channels, more micro-batches, more layers,
/// another device, saved activations, a norm to wait for.
#[test]
fn rates_of_a_small_run_foretell_others() {
    let machine = Machine::parse(TRUTH).expect("a machine of ours");
    let truth = |config: &Config| {
        forecast(config, |model, _| machine.rates_of(config, model).expect("it has bf16"))
    };
    let small = small();
    let mut runs = RateRuns::default();
    let mut plans = Vec::new();
    for run in RateRuns::configs(&small).expect("a relay") {
        let shape = largest_shape_of(&run).expect("a shape of ours");
        let model = model_of(&run, shape).expect("a model of ours");
        let plan = Plan::new(&run, &model, &run.update_rule()).expect("a plan of ours");
        RateRuns::check(&run, &model, &plan).expect("whole sequences of one length");
        runs.add(&truth(&run).slices, &model, &plan);
        plans.push(plan);
    }
    let fit = runs.fit(&small, &plans[0]);
    let fit = FittedRates::parse(&fit.text()).expect("it reads what it wrote");
    assert!(fit.compute["stack forward"].fixed > 5e-5, "{fit:?}");
    let changed = |change: fn(&mut Config)| {
        let mut config = small.clone();
        change(&mut config);
        config
    };
    for (what, config) in [
        ("the same", small.clone()),
        ("channels", changed(|config| config.channels.weights *= 2)),
        ("micro-batches", changed(|config| config.step.batch *= 4)),
        ("layers", changed(|config| config.model.layers = Some(16))),
        ("devices", changed(|config| config.device.ordinals = Some(vec![0, 1]))),
        (
            "recompute",
            changed(|config| {
                config.schedule.recompute = l2l::config::Recompute::Layer(false);
            }),
        ),
        ("norm", changed(|config| config.optimizer.clip_norm = Some(1.0))),
    ] {
        let foretold = forecast(&config, |model, plan| {
            Rates::fitted(&fit, &config, model, plan).expect("all lines are there")
        });
        let ratio = foretold.seconds / truth(&config).seconds;
        println!("{what}: {:.4} s, {ratio:.4} of the truth", foretold.seconds);
        assert!((ratio - 1.0).abs() < 0.02, "{what}: {ratio}");
    }
}

/// A run that takes a moment: only what is written counts here.
const TINY: [&str; 8] = [
    "data.train=random",
    "data.sequence_length=16",
    "model.layers=2",
    "model.hidden=64",
    "model.heads=2",
    "model.vocabulary=256",
    "device.threads=1",
    "stash.place=host",
];

/// The arguments of a command with the tiny run and other keys.
fn arguments<'a>(command: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let mut arguments = vec![command, "/dev/null", "--format", "json"];
    arguments.extend(TINY.iter().chain(more).flat_map(|&set| ["--set", set]));
    arguments
}

/// Fits rates to the tiny run with other keys, and forecasts it with them. Returns the names of the
/// lines, and the text of the file.
fn fit_and_read(more: &[&str]) -> (Vec<String>, String) {
    let folder = tempfile::tempdir().expect("a place for files");
    let file = folder.path().join("rates.toml");
    let path = file.to_str().expect("UTF-8");
    let eps = format!("eps.path={}", folder.path().join("eps").display());
    let more = [more, &[&eps]].concat();
    let lines = events(&good(&[&arguments("bench", &more)[..], &["--rates", path]].concat()));
    let names = lines.iter().filter_map(|line| Some(line["of"].as_str()?.to_owned())).collect();
    let plan = events(&good(&[&arguments("plan", &more)[..], &["--rates", path]].concat()));
    assert!(plan[0]["step_seconds"].as_f64().is_some_and(|seconds| seconds > 0.0), "{plan:?}");
    (names, fs::read_to_string(&file).expect("written"))
}

#[test]
fn rates_are_written_and_read() {
    let (names, text) = fit_and_read(&[]);
    for name in [
        "stack backward",
        "stack forward, kept",
        "head backward",
        "weights",
        "gradient",
        "update",
        "reduce",
    ] {
        assert!(names.iter().any(|one| one == name), "{name} of {names:?}");
    }
    assert!(text.contains("version = 3\ndate = \"2") && text.contains("dtype = \"f32\""), "{text}");
}

/// The runs have batches of their own, which the config's groups divide, and steps of their own.
#[test]
fn rates_of_a_run_in_groups_for_epochs_are_written_and_read() {
    let sets = ["parallel.groups=4", "step.batch=16", "step.micro_batch=4", "step.epochs=1"];
    let (_, text) = fit_and_read(&sets);
    let folder = tempfile::tempdir().expect("a place for files");
    let file = folder.path().join("rates.toml");
    fs::write(&file, text).expect("written");
    let file = file.to_str().expect("UTF-8");
    // Of two processes, over a fabric that hides and one that decides.
    let seconds = ["1", "1e-6"].map(|rate| {
        let more = ["--rates", file, "--ranks", "2", "--fabric-gbps", rate];
        let plan = events(&good(&[&arguments("plan", &sets)[..], &more].concat()));
        plan[0]["step_seconds"].as_f64().expect("a forecast")
    });
    assert!(seconds[0] > 0.0 && seconds[1] > 10.0 * seconds[0], "{seconds:?}");
}

/// What is staged in slots of the host is gathered block by block.
#[test]
fn rates_of_a_run_on_disk_are_written_and_read() {
    let (names, _) = fit_and_read(&["eps.tier=file"]);
    for name in ["gather", "read", "write"] {
        assert!(names.iter().any(|one| one == name), "{name} of {names:?}");
    }
}

/// Rates that a test can change: what the tiny run needs.
fn plain() -> String {
    let line = "fixed = 0.0\nunits_per_second = 1e9\nresidual = 0.0\noperations = 3\n";
    let mut text = "version = 3\ndate = \"2026-11-28\"\nmachine = \"one\"\ndevice = \"cpu\"\n\
                    threads = 1\ndtype = \"f32\"\noptimizer = \"adamw\"\n\
                    stash_on_device = false\n"
        .to_owned();
    for of in ["stack", "head", "edge"] {
        text += &format!("[compute.\"{of} forward\"]\n{line}[compute.\"{of} backward\"]\n{line}");
    }
    for of in ["weights", "gradient", "input", "output", "update", "reduce", "gather"] {
        text += &format!("[work.\"{of}\"]\n{line}");
    }
    text
}

/// Windows of two kinds.
const PIPEDREAM: [&str; 5] = [
    "schedule.kind=pipedream",
    "schedule.stages=2",
    "schedule.window=2",
    "step.batch=4",
    "step.micro_batch=4",
];

const DOUBLE_BUFFERED: [&str; 6] = [
    "schedule.kind=2bw",
    "schedule.delay=1",
    "schedule.stages=2",
    "schedule.window=2",
    "step.batch=4",
    "step.micro_batch=2",
];

#[test]
fn bad_rates_are_refused_by_name() {
    let folder = tempfile::tempdir().expect("a place for files");
    let file = folder.path().join("rates.toml");
    let path = file.to_str().expect("UTF-8");
    let plain = plain();
    fs::write(&file, &plain).expect("written");
    good(&[&arguments("plan", &[])[..], &["--rates", path]].concat());
    let weights = |from: &str, to: &str| {
        let (before, after) = plain.split_once("[work.\"weights\"]\n").expect("a line");
        format!("{before}[work.\"weights\"]\n{}", after.replacen(from, to, 1))
    };
    for (text, sets, says) in [
        (
            plain.replace("version = 3", "version = 1").replace("threads = 1\n", ""),
            &[][..],
            "it is of version 1",
        ),
        (plain.replace("date = ", "day = "), &[], "unknown field `day`"),
        (weights("1e9", "nan"), &[], "weights has a number that is not finite"),
        (weights("1e9", "-3.0"), &[], "weights has a rate that is not above 0"),
        (weights("1e9", "0.0"), &[], "weights has a rate that is not above 0"),
        (weights("fixed = 0.0", "fixed = -1.0"), &[], "weights has a negative number"),
        (weights("units_per_second = 1e9\n", ""), &[], "missing field `units_per_second`"),
        (plain.replace("\"weights\"", "\"heights\""), &[], "they have no line `weights`"),
        (plain.replace("stack forward", "stick forward"), &[], "they have no line `stack forward`"),
        (plain.clone(), &["device.dtype=bf16"], "device.dtype is bf16, and the rates are of f32"),
        (plain.clone(), &["device.threads=3"], "device.threads of each device is 3, and the"),
        (plain.clone(), &["schedule.recompute=false"], "no line `stack forward, kept`"),
        (plain.clone(), &["optimizer.kind=sgd"], "optimizer.kind is sgd, and the rates are of"),
        (plain.clone(), &["stash.place=device"], "the stash's place is device"),
        (
            plain.clone(),
            &["data.sequence_length=256", "model.positions=256", "step.chunk_positions=128"],
            "step.chunk_positions cuts sequences, and the rates are of whole ones",
        ),
    ] {
        fs::write(&file, &text).expect("written");
        let output = output(&[&arguments("plan", sets)[..], &["--rates", path]].concat());
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && error.contains(says), "{says}: {error}\n{text}");
    }
    let long = ["data.sequence_length=256", "model.positions=256", "step.chunk_positions=128"];
    for (command, sets, more, says) in [
        ("bench", &long[..], &[][..], "needs whole ones"),
        ("bench", &PIPEDREAM, &[], "schedule.kind is \"pipedream\", and"),
        ("bench", &DOUBLE_BUFFERED, &[], "schedule.kind is \"2bw\", and"),
        (
            "bench",
            &["schedule.kind=file", "schedule.path=a.csv"],
            &[],
            "schedule.kind is \"file\", and",
        ),
        ("bench", &["data.train=bytes.txt"], &[], "all of one length"),
        ("bench", &[], &["--digest"], "cannot be used with"),
        ("plan", &[], &["--machine", "h100"], "cannot be used with"),
        ("plan", &[], &["--tflops", "1"], "cannot be used with"),
    ] {
        let given = [&arguments(command, sets)[..], &["--rates", path], more].concat();
        let output = output(&given);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && error.contains(says), "{says}: {error}");
    }
}
