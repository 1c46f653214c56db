//! The program from the command line: it prints its events, ends with the documented status, and
//! resumes where it was stopped.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::program::{events, good, l2l, of_kind, output};
use serde_json::Value;
use tempfile::TempDir;

fn folder() -> TempDir {
    tempfile::tempdir().expect("a place for files")
}

/// A small run on the built-in corpus, with checkpoints.
fn config(folder: &Path, more: &str) -> String {
    let path = folder.join("config.toml");
    let text = format!(
        "model = {{ layers = 2, hidden = 32, heads = 4 }}\n\
         data = {{ train = \"{}/README.md\", sequence_length = 32 }}\n\
         step = {{ batch = 4, micro_batch = 3, steps = 12 }}\n\
         optimizer = {{ clip_norm = 1.0, schedule = \"linear\" }}\n\
         validation = {{ every_steps = 4, batches = 2 }}\n\
         checkpoint = {{ directory = \"{}\", every_steps = 3 }}\n{more}",
        env!("CARGO_MANIFEST_DIR"),
        folder.join("checkpoints").display()
    );
    fs::write(&path, text).expect("a directory of ours");
    path.to_str().expect("UTF-8").into()
}

fn losses(events: &[Value]) -> Vec<(u64, String)> {
    let loss =
        |event: &&Value| (event["step"].as_u64().expect("a step"), event["loss"].to_string());
    of_kind(events, "step").iter().map(loss).collect()
}

fn digest(events: &[Value]) -> String {
    events.last().expect("a summary")["weights_digest"].as_str().expect("a digest").into()
}

/// Without a config: training on the built-in corpus, a validation, and a sample.
#[test]
fn the_main_job() {
    let small = ["model.layers=1", "model.hidden=32", "model.heads=4", "step.steps=3"];
    let mut arguments = vec!["train", "--format", "json", "--set", "validation.batches=2"];
    small.iter().for_each(|set| arguments.extend(["--set", set]));
    let events = events(&good(&arguments));
    assert_eq!(of_kind(&events, "step").len(), 3);
    assert_eq!(of_kind(&events, "validation").len(), 1);
    let baseline = of_kind(&events, "baseline")[0];
    let unigram = baseline["unigram"].as_f64();
    let bigram = baseline["bigram"].as_f64();
    assert!(bigram < unigram && bigram > Some(1.0), "{baseline}");
    let sample = of_kind(&events, "sample")[0];
    assert!(sample["text"].as_str().expect("text").len() > 100);
    let step = of_kind(&events, "step")[2];
    for key in ["step", "loss", "learning_rate", "grad_norm", "tokens", "seconds"] {
        assert!(step[key].is_number(), "{key}: {step}");
    }
    for key in ["exposed_wait_seconds", "device_peak_bytes", "host_rss_bytes"] {
        assert!(step[key].is_number(), "{key}: {step}");
    }
    assert_eq!(events.last().expect("a summary")["event"], "summary");
}

/// Sends a run a signal after its first step, and returns its output and status. The run's config
/// has a slow link, so that the signal comes before the end.
#[cfg(unix)]
fn signalled(mut run: Command, signal: &str) -> (String, Option<i32>) {
    let mut child =
        run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program runs");
    let mut text = String::new();
    let mut lines = BufReader::new(child.stdout.take().expect("it is piped"));
    lines.read_line(&mut text).expect("a first step");
    let sent = Command::new("kill").args([signal, &child.id().to_string()]).status();
    assert!(sent.expect("there is kill").success());
    std::io::Read::read_to_string(&mut lines, &mut text).expect("UTF-8");
    (text, child.wait().expect("it is ours").code())
}

/// True if hangups are ignored here, as under `nohup`. A run that is started from here then goes
/// on.
#[cfg(unix)]
fn ignores_hangups() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    ignored.is_some_and(|mask| u64::from_str_radix(mask.trim(), 16).is_ok_and(|mask| mask & 1 == 1))
}

/// An interrupt, a termination and a hangup of the terminal end the run after its step, with a
/// checkpoint and a summary. The status is 128 plus the signal's number.
#[cfg(unix)]
#[test]
fn interrupted_and_resumed() {
    let whole = folder();
    let expected = events(&good(&["train", &config(whole.path(), ""), "--format", "json"]));
    for (signal, status) in [("-INT", 130), ("-TERM", 143), ("-HUP", 129)] {
        if signal == "-HUP" && ignores_hangups() {
            continue;
        }
        let stopped = folder();
        let config = config(stopped.path(), "device = { link = \"6MB/s\" }\n");
        let run = l2l(&["train", &config, "--format", "json"]);
        let (text, code) = signalled(run, signal);
        assert_eq!(code, Some(status), "{signal}");
        let first = events(&text);
        let summary = first.last().expect("a summary");
        let steps = summary["steps"].as_u64().expect("a number");
        assert!(summary["event"] == "summary" && (1..12).contains(&steps), "{summary}");
        // The slow link was there for the signal.
        let resume = ["train", &config, "--resume", "--format", "json"];
        let rest = events(&good(&[&resume[..], &["--set", "device.link=1GB/s"]].concat()));
        let mut both = losses(&first);
        both.extend(losses(&rest));
        assert_eq!((both, digest(&rest)), (losses(&expected), digest(&expected)));
    }
}

/// A run that `nohup` started outlives its terminal.
#[cfg(target_os = "linux")]
#[test]
fn a_hangup_that_was_ignored_stays_ignored() {
    let folder = folder();
    let config = config(folder.path(), "device = { link = \"10MB/s\" }\n");
    let mut run = Command::new("sh");
    run.args(["-c", "trap '' HUP; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_l2l")]);
    run.args(["train", &config, "--format", "json", "--set", "step.steps=4"]);
    let (text, code) = signalled(run, "-HUP");
    assert_eq!(code, Some(0));
    assert_eq!(losses(&events(&text)).len(), 4);
}

#[test]
fn nothing_better_stops_early_and_the_best_is_kept() {
    let folder = folder();
    let config = config(folder.path(), "");
    let sets = ["--set", "validation.every_steps=1", "--set", "validation.patience=2"];
    let rate = ["--set", "optimizer.learning_rate=0", "--format", "json"];
    let text = good(&[&["train", &*config], &sets[..], &rate[..]].concat());
    let events = events(&text);
    // The model learns nothing, so the first validation is the best, and patience allows two more.
    assert_eq!(of_kind(&events, "step").len(), 3);
    let kept: Vec<_> = fs::read_dir(folder.path().join("checkpoints"))
        .expect("it was made")
        .map(|entry| entry.expect("ours").file_name().into_string().expect("UTF-8"))
        .filter(|name| !name.starts_with('.'))
        .collect();
    assert!(kept.contains(&"best-00000001".into()) && kept.contains(&"step-00000003".into()));
    assert_eq!(kept.len(), 2, "{kept:?}");
}

#[test]
fn a_checkpoint_of_another_config_is_refused_and_stays() {
    let folder = folder();
    let config = config(folder.path(), "");
    good(&["train", &config, "--set", "step.steps=3"]);
    let longer = output(&["train", &config, "--resume"]);
    let error = String::from_utf8_lossy(&longer.stderr);
    assert!(error.contains("step.steps was 3, is 12, and the learning rate follows"), "{error}");
    let again = output(&["train", &config]);
    let error = String::from_utf8_lossy(&again.stderr);
    assert_eq!(again.status.code(), Some(2));
    assert!(error.contains("continue with --resume") && error.contains("-00000003"), "{error}");
    let refused = output(&["train", &config, "--resume", "--set", "optimizer.learning_rate=0.5"]);
    let error = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2));
    assert!(error.contains("optimizer.learning_rate was 0.0003, is 0.5"), "{error}");
    assert!(folder.path().join("checkpoints/step-00000003/l2l.json").exists());
    // Keys that do not change results may change.
    let sets = ["stash.place=device", "schedule.kind=resident", "device.threads=1", "step.steps=3"];
    let mut arguments = vec!["train", &*config, "--resume"];
    sets.iter().for_each(|set| arguments.extend(["--set", set]));
    good(&arguments);
}

/// Exports a trained model and a loaded one: complete, with the tokenizer's files.
#[test]
fn exports() {
    let folder = folder();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let config = config(folder.path(), "");
    let nothing = output(&["export", &config, "--to", &at("out")]);
    assert_eq!(nothing.status.code(), Some(2));
    good(&["train", &config]);
    let beside = folder.path().join("out.partial");
    fs::create_dir(&beside).expect("a directory of ours");
    good(&["export", &config, "--to", &(at("out") + "/")]);
    assert!(beside.exists(), "a folder that the export did not make stays");
    good(&["export", &config, "--best", "--to", &at("best")]);
    for file in ["config.json", "model.safetensors"] {
        assert!(folder.path().join("out").join(file).is_file(), "{file}");
        assert!(folder.path().join("best").join(file).is_file(), "{file}");
    }
    assert!(!folder.path().join("out/optimizer.safetensors").exists());
    let again = output(&["export", &config, "--to", &at("out")]);
    let error = String::from_utf8_lossy(&again.stderr);
    assert!(again.status.code() == Some(2) && error.contains("give a new directory"), "{error}");
    // The exported model is trained again, and its other files and unknown keys are kept.
    let model = folder.path().join("best");
    fs::write(model.join("merges.txt"), "a b").expect("a directory of ours");
    let path = model.join("config.json");
    let text = fs::read_to_string(&path).expect("it was written");
    let mut value: Value = serde_json::from_str(&text).expect("JSON");
    value["of_another_tool"] = "kept".into();
    fs::write(&path, value.to_string()).expect("a directory of ours");
    let path = format!("model.path={}", at("best"));
    let directory = format!("checkpoint.directory={}", at("next"));
    let sets = [&path, &directory, "step.steps=1", "data.sequence_length=8"];
    let mut arguments = vec!["train"];
    sets.iter().for_each(|set| arguments.extend(["--set", set]));
    good(&arguments);
    let arguments: Vec<&str> = arguments[1..].to_vec();
    good(&[&["export", "--to", &at("last")], &arguments[..]].concat());
    let last = folder.path().join("last");
    assert_eq!(fs::read_to_string(last.join("merges.txt")).expect("carried"), "a b");
    let text = fs::read_to_string(last.join("config.json")).expect("it was written");
    assert!(text.contains("of_another_tool"));
}

#[test]
fn texts_and_epochs() {
    let folder = folder();
    let text = folder.path().join("some.txt");
    fs::write(&text, "to be or not to be, that is the question. ".repeat(20)).expect("ours");
    let train = format!("data.train={}", text.display());
    let sets = [&train, "data.sequence_length=16", "step.epochs=2", "step.batch=5"];
    let mut arguments = vec!["train", "--format", "json", "--set", "model.layers=1"];
    // An empty config takes the place of the built-in one, which sets a number of steps.
    let empty = folder.path().join("empty.toml");
    fs::write(&empty, "").expect("a directory of ours");
    arguments.insert(1, empty.to_str().expect("UTF-8"));
    sets.iter().for_each(|set| arguments.extend(["--set", set]));
    let events = events(&good(&arguments));
    // 53 sequences of 16 bytes, the last half as long: 5 for validation, 48 twice in batches of 5.
    assert_eq!(of_kind(&events, "step").len(), 20);
    assert_eq!(of_kind(&events, "validation").len(), 1);
}

#[test]
fn plan_bench_doctor_and_the_rest() {
    let folder = folder();
    let config = config(folder.path(), "");
    assert!(good(&["plan", &config]).contains("fits"));
    let on_gpu = ["plan", &config, "--set", "device.kind=cuda", "--set", "step.micro_batch=1"];
    assert!(!good(&on_gpu).contains("one micro-batch"));
    let at_once = ["plan", &config, "--set", "device.kind=cuda", "--set", "step.micro_batch=4"];
    assert!(!good(&at_once).contains("one micro-batch"), "it stays on the device");
    let on_host = [&at_once[..], &["--set", "stash.place=host"]].concat();
    assert!(good(&on_host).contains("a layer computes one micro-batch"));
    let log = folder.path().join("log");
    let log_file = format!("log.file={}", log.display());
    let bench = ["bench", &config, "--set", "step.steps=2", "--format", "json", "--set", &log_file];
    let bench = events(&good(&bench));
    let summary = bench.last().expect("a summary");
    for key in ["tokens_per_second", "model_flops_per_second", "matmul_flops_per_second"] {
        assert!(summary[key].as_f64() > Some(0.0), "{key}: {summary}");
    }
    assert!(summary["exposed_wait_fraction"].as_f64().is_some_and(|share| share < 1.0));
    assert!(!folder.path().join("checkpoints").exists(), "a bench leaves nothing");
    assert!(!log.exists(), "the log is a run's");
    // All weights are digested on request alone: that takes a pass over the model.
    assert!(summary.get("weights_digest").is_none(), "{summary}");
    let two_steps = [&*config, "--set", "step.steps=2", "--format", "json"];
    let digested = events(&good(&[&["bench", "--digest"], &two_steps[..]].concat()));
    let trained = events(&good(&[&["train"], &two_steps[..]].concat()));
    assert_eq!(digest(&digested), digest(&trained));
    fs::remove_dir_all(folder.path().join("checkpoints")).expect("the training's");
    let refused = output(&["bench", &config, "--products"]);
    assert_eq!(refused.status.code(), Some(2));
    let refused = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.contains("device.kind") && refused.contains("--products"), "{refused}");
    // Labels are copied without rounding: rounded bits would be other classes.
    for model in ["tied", "bert-classes"] {
        let path = format!("model.path=tests/goldens/{model}");
        let data = format!("data.train=tests/goldens/{model}/data.jsonl");
        let sets =
            ["--set", &path, "--set", &data, "--set", "step.steps=5", "--set", "step.batch=5"];
        good(
            &[
                &["bench", "--without-copies", "--set", "data.sequence_length="][..],
                &sets,
                &["--set", "step.micro_batch=2"],
            ]
            .concat(),
        );
    }
    assert!(good(&["doctor"]).contains("libcuda.so"));
    let doctor = events(&good(&["doctor", "--format", "json"]));
    for rate in ["matmul_flops_per_second", "adamw_bytes_per_second", "adamw_bf16_bytes_per_second"]
    {
        assert!(doctor[0][rate].as_f64() > Some(0.0), "{rate}");
    }
    assert!(good(&["completions", "bash"]).contains("l2l"));
    let shown: Value = serde_json::from_str(&good(&["config", "show", &config])).expect("JSON");
    assert_eq!((&shown["step"]["batch"], &shown["step"]["seed"]), (&4.into(), &0.into()));
    let schema: Value = serde_json::from_str(&good(&["config", "schema"])).expect("JSON");
    assert!(schema["properties"]["channels"].is_object());
}

/// `man` finds a page for each command that `--help` lists, and for those below it.
#[test]
fn every_command_has_a_manual_page() {
    let folder = folder();
    let to = folder.path().join("man1");
    good(&["man", "--to", to.to_str().expect("UTF-8")]);
    let page = |name: &str| fs::read_to_string(to.join(name)).expect(name);
    let help = good(&["--help"]);
    let listed = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let names = listed.take_while(|line| !line.is_empty()).filter_map(|line| {
        line.strip_prefix("  ").filter(|line| !line.starts_with(' '))?.split(' ').next()
    });
    let names: Vec<&str> = names.filter(|name| *name != "help").collect();
    assert!(names.contains(&"train") && names.contains(&"man"), "{help}");
    for name in names {
        let page = page(&format!("l2l-{name}.1"));
        assert!(page.contains(".SH NAME") && page.contains(".SH SYNOPSIS"), "{name}: {page}");
    }
    assert!(page("l2l.1").contains("l2l\\-train(1)"), "{}", page("l2l.1"));
    assert!(page("l2l-train.1").contains("\\-\\-resume\\-with\\-changes"));
    assert!(page("l2l-config-reference.1").contains("CONFIG.md"));
}

/// Without a config file, every command about a run resolves the config that `train` resolves.
#[test]
fn one_config_without_a_file() {
    let small = ["model.layers=1", "model.hidden=32", "model.heads=4", "step.batch=4"];
    let of = |command: &[&str], more: &[&str]| {
        let mut arguments = command.to_vec();
        small.iter().chain(more).for_each(|set| arguments.extend(["--set", set]));
        good(&arguments)
    };
    let file = "examples/built_in.toml";
    for command in [&["plan"][..], &["data"], &["config", "show"], &["plan", "--format", "json"]] {
        let named: Vec<&str> = command.iter().copied().chain([file]).collect();
        // The built-in micro-batch was not chosen by the user, so it shrinks to a smaller batch.
        let micro_batch = ["step.micro_batch=4"];
        assert_eq!(of(command, &micro_batch), of(&named, &micro_batch), "{command:?}");
        of(command, &[]);
    }
    let folder = folder();
    let directory = format!("checkpoint.directory={}", folder.path().join("run").display());
    let json = ["--format", "json"];
    let trained = events(&of(
        &[&["train"], &json[..]].concat(),
        &["step.steps=2", "validation.batches=2", &directory],
    ));
    let of_file = events(&of(
        &[&["train", file], &json[..]].concat(),
        &["step.steps=2", "validation.batches=2", "step.micro_batch=4"],
    ));
    assert_eq!(digest(&trained), digest(&of_file));
    let measured = events(&of(&[&["eval", "--batches", "2"], &json[..]].concat(), &[&directory]));
    assert_eq!(measured[0]["loss"], of_kind(&trained, "validation")[0]["loss"]);
    // The built-in config's number of steps is for training; a bench has its own.
    let benched = events(&of(&[&["bench"], &json[..]].concat(), &[]));
    assert_eq!(of_kind(&benched, "step").len(), 6);
}

/// A plan that does not fit is reported with status 0, and with `--check` with status 2.
#[test]
fn a_plan_is_checked() {
    let folder = folder();
    let config = config(folder.path(), "");
    let small = ["--set", "device.memory=1KiB"];
    for (more, status, says) in [
        (&[][..], 0, "fits"),
        (&["--check"], 0, "fits"),
        (&small, 0, "does not fit"),
        (&["--check", small[0], small[1]], 2, "does not fit"),
    ] {
        let output = output(&[&["plan", &*config], more].concat());
        assert_eq!(output.status.code(), Some(status), "{more:?}");
        assert!(String::from_utf8_lossy(&output.stdout).contains(says), "{more:?}");
    }
}

/// The page in the repository is the program's output. Write it with `l2l config reference >
/// CONFIG.md`.
#[test]
fn the_reference_is_up_to_date() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("CONFIG.md");
    let page = fs::read_to_string(page).expect("it is committed");
    let is_same = page.replace("\r\n", "\n") == good(&["config", "reference"]);
    assert!(is_same, "l2l config reference > CONFIG.md");
}

/// Several processes that cannot share the work would all do the same, so they are refused. The
/// first reports it at once, and each other a second later if its launcher has not ended it by
/// then.
#[test]
fn ranks_of_a_launcher_are_refused() {
    let folder = folder();
    let config = config(folder.path(), "");
    let needs_mpi = "a launcher started 4 processes, which need MPI to share the work: this \
                     program was built without MPI";
    let forbidden = "a launcher started 4 processes, and parallel.fabric is \"none\"";
    let cases = [
        ("0", "auto", format!("error: {needs_mpi}")),
        ("1", "auto", format!("error: rank 1: {needs_mpi}")),
        ("0", "none", format!("error: {forbidden}")),
        ("3", "none", format!("error: rank 3: {forbidden}")),
    ];
    for (rank, fabric, says) in cases {
        let set = format!("parallel.fabric={fabric}");
        let output = l2l(&["train", &config, "--set", &set])
            .env("OMPI_COMM_WORLD_RANK", rank)
            .env("OMPI_COMM_WORLD_SIZE", "4")
            .output()
            .expect("it starts");
        assert_eq!(output.status.code(), Some(2));
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(error.contains(&says), "{error}");
        assert!(!folder.path().join("checkpoints").exists());
    }
}
