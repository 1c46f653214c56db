//! Runs that are killed: each resumes from the last step that was complete, ends with the weights
//! of a run that was not killed, and leaves nothing behind. `benches/kills.py` is the same by hand,
//! with as many kills as somebody has time for. (`tiers` kills runs on file, and compares every
//! loss.)

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::program::{events, good, l2l, of_kind};
use crate::pytorch::FAMILIES;
use serde_json::Value;

const STEPS: u64 = 12;

/// What a run resumes from.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Keeps {
    Checkpoints,
    File,
    Both,
}

/// A run to be killed.
struct Case {
    name: String,
    settings: Vec<String>,
    keeps: Keeps,
}

impl Case {
    fn of_golden(name: &str, keeps: Keeps, more: &[&str]) -> Case {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(name);
        let settings = [
            format!("model.path={}", golden.display()),
            format!("data.train={}", golden.join("data.jsonl").display()),
            "data.sequence_length=".into(),
            "step.batch=5".into(),
            "step.micro_batch=2".into(),
        ];
        let more = more.iter().map(|set| set.to_string());
        let settings = settings.into_iter().chain(more).collect();
        Case { name: format!("{name}, {keeps:?}"), settings, keeps }
    }

    /// All families in turn with each place for the state; packed data, LoRA and bf16.
    fn all() -> Vec<Case> {
        let places = [Keeps::Checkpoints, Keeps::File, Keeps::Both];
        let small = ["model.layers=2", "model.hidden=32", "model.heads=4", "model.positions=32"];
        let more = [
            "model.vocabulary=256",
            "data.packing=true",
            "data.sequence_length=32",
            "step.batch=4",
            "validation.batches=1",
        ];
        let packed = small.into_iter().chain(more).map(String::from).collect();
        let mut all = vec![
            Case { name: "packed".into(), settings: packed, keeps: Keeps::Both },
            Case::of_golden("llama", Keeps::Checkpoints, &["train.lora={ rank = 4 }"]),
            Case::of_golden("tied", Keeps::File, &["device.dtype=bf16"]),
            Case::of_golden("clipped", Keeps::Both, &["optimizer.clip_norm=0.5"]),
            Case::of_golden("llama", Keeps::Checkpoints, &["schedule.delay=1"]),
            Case::of_golden("clipped", Keeps::File, &["schedule.delay=1"]),
        ];
        let keeps = places.into_iter().cycle();
        all.extend(
            FAMILIES.iter().zip(keeps).map(|(name, keeps)| Case::of_golden(name, keeps, &[])),
        );
        all
    }

    fn train(&self, folder: &Path, is_kept: bool) -> Vec<String> {
        let config = folder.join("run.toml");
        fs::write(&config, "").expect("a directory of ours");
        let mut all: Vec<String> = ["train", "--format", "json"].map(String::from).into();
        all.insert(1, config.display().to_string());
        let at = |name: &str| folder.join(name).display().to_string();
        let checkpoints = [format!("checkpoint.directory={}", at("run"))];
        let file = ["eps.tier=file".to_string(), format!("eps.path={}", at("eps"))];
        let checkpoints = checkpoints.into_iter().chain(["checkpoint.every_steps=1".into()]);
        let mut settings = self.settings.clone();
        settings.push(format!("step.steps={STEPS}"));
        if is_kept && self.keeps != Keeps::File {
            settings.extend(checkpoints);
        }
        if is_kept && self.keeps != Keeps::Checkpoints {
            settings.extend(file);
        }
        all.extend(settings.into_iter().flat_map(|set| ["--set".into(), set]));
        all
    }
}

/// A generator of random moments.
struct Chance(u64);

impl Chance {
    fn below(&mut self, most: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % most
    }
}

/// What a run came to.
struct Ended {
    is_killed: bool,
    /// Its first step, and its last.
    steps: Option<(u64, u64)>,
    digest: Option<String>,
}

/// Runs a command; with a number of lines, kills it when it has written so many and a part of the
/// next one. Steps, updates and checkpoints are on their way then.
fn run(arguments: &[String], lines: Option<u64>) -> Ended {
    let child = l2l(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = child.expect("the program runs");
    let mut out = BufReader::new(child.stdout.take().expect("it is piped"));
    let mut text = String::new();
    match lines {
        Some(lines) => {
            for _ in 0..lines {
                out.read_line(&mut text).expect("UTF-8");
            }
            child.kill().expect("it is ours");
        }
        None => _ = out.read_to_string(&mut text).expect("UTF-8"),
    }
    let mut says = String::new();
    child.stderr.take().expect("it is piped").read_to_string(&mut says).expect("UTF-8");
    let status = child.wait().expect("it is ours");
    let is_killed = status.signal().is_some();
    assert!(is_killed || status.success(), "{arguments:?}: {says}");
    let events = events(&text);
    let steps = of_kind(&events, "step");
    let number = |step: &&Value| step["step"].as_u64().expect("a number");
    let digest = of_kind(&events, "summary")
        .first()
        .map(|summary| summary["weights_digest"].as_str().expect("a digest").to_string());
    Ended { is_killed, steps: steps.first().map(number).zip(steps.last().map(number)), digest }
}

/// The newest step of which there is a whole checkpoint.
fn complete(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder.join("run")).into_iter().flatten().flatten();
    let whole = entries.filter(|entry| entry.path().join("l2l.json").is_file());
    let names = whole.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter_map(|name| name.strip_prefix("step-")?.parse().ok()).max().unwrap_or(0)
}

/// Kills a run so often and resumes it each time; how often it was killed.
fn kill_and_resume(case: &Case, most: u64, chance: &mut Chance) -> u64 {
    let name = &case.name;
    let folder = tempfile::tempdir().expect("a place for files");
    let folder = folder.path();
    let expected = run(&case.train(folder, false), None).digest.expect("it ended");
    let train = [case.train(folder, true), vec!["--resume".into()]].concat();
    let mut kills = 0;
    let mut reached = 0;
    let ended = loop {
        let lines = (kills < most).then(|| chance.below(5));
        let ended = run(&train, lines);
        if let Some((first, _)) = ended.steps {
            assert!(first > reached, "{name}: step {reached} was complete, and {first} came next");
        }
        if !ended.is_killed {
            break ended;
        }
        kills += 1;
        // The checkpoint of a step, or its updates on file, are complete when the second step after
        // it is announced: they are written while the first one runs.
        let announced = ended.steps.map_or(0, |(_, last)| last.saturating_sub(2));
        reached = reached.max(announced).max(complete(folder));
    };
    // A run that ended before the kill wrote more than was read.
    let ended = if ended.digest.is_none() { run(&train, None) } else { ended };
    assert_eq!(ended.digest, Some(expected), "{name}");
    let of = |folder: &Path| fs::read_dir(folder).into_iter().flatten().flatten();
    let left = of(folder).chain(of(&folder.join("run"))).map(|entry| entry.file_name());
    let left: Vec<_> = left.filter(|name| name.to_string_lossy().contains(".l2l-")).collect();
    assert!(left.iter().all(|name| name == ".l2l-lock"), "{name}: {left:?}");
    kills
}

#[test]
fn a_killed_run_loses_no_complete_step_and_ends_the_same() {
    let all = Case::all();
    let (cases, each) = if crate::whole() { (all.len(), 2) } else { (7, 1) };
    let mut chance = Chance(88_172_645_463_325_252);
    let kills: u64 = all[..cases].iter().map(|case| kill_and_resume(case, each, &mut chance)).sum();
    // A run may end before its kill.
    assert!(2 * kills > cases as u64 * each, "{kills} kills of {cases} runs");
}

/// A kill of a command that reads a run's checkpoint changes nothing of the run, and the command
/// does its work when it is called again.
#[test]
fn a_killed_export_or_evaluation_leaves_the_run_as_it_was() {
    let folder = tempfile::tempdir().expect("a place for files");
    let folder = folder.path();
    let case = Case::of_golden("llama", Keeps::Checkpoints, &[]);
    let train = case.train(folder, true);
    let digest = run(&train, None).digest.expect("it ended");
    let to = folder.join("made");
    let sets = &train[4..];
    let export = |name: &str| {
        let to = folder.join(name).display().to_string();
        [&["export".to_string(), "--to".into(), to][..], sets].concat()
    };
    let data = sets.iter().find_map(|set| set.strip_prefix("data.train=")).expect("it is set");
    let validation = ["--set".to_string(), format!("data.validation={data}")];
    let eval = [&["eval".to_string()][..], &train[1..], &validation].concat();
    let tuned = ["--steps", "1", "--rounds", "1", "--to"].map(String::from);
    let tuned = [&tuned[..], &[folder.join("tuned").display().to_string()]].concat();
    let tune = [&["tune".to_string()][..], &train[1..], &tuned].concat();
    let kills = if crate::whole() { 6 } else { 1 };
    for nth in 0..kills {
        for command in [&export(&format!("killed-{nth}")), &eval, &tune] {
            let child = l2l(command).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
            let mut child = child.expect("the program runs");
            // It is on its way: it has the checkpoint's files open, or has not yet.
            std::thread::sleep(std::time::Duration::from_millis(nth * 7));
            child.kill().expect("it is ours");
            child.wait().expect("it is ours");
        }
        let whole = folder.join(format!("killed-{nth}"));
        assert!(!whole.exists() || whole.join("config.json").is_file());
    }
    good(&export("made"));
    assert!(to.join("config.json").is_file() && to.join("model.safetensors").is_file());
    assert_eq!(of_kind(&events(&good(&eval)), "evaluation").len(), 1);
    let resumed = run(&[train, vec!["--resume".into()]].concat(), None);
    assert_eq!(resumed.digest, Some(digest));
}

/// The first process of a container has no signals by default. Every command of it ends at a
/// termination all the same. Without user namespaces, nothing is tested.
#[cfg(target_os = "linux")]
#[test]
fn the_first_process_of_a_container_ends_at_a_signal() {
    let first_process = ["--map-root-user", "--pid", "--fork", "--kill-child"];
    let unshare = || {
        let mut unshare = Command::new("unshare");
        unshare.args(first_process).stdin(Stdio::null());
        unshare.stdout(Stdio::null()).stderr(Stdio::null());
        unshare
    };
    if !unshare().arg("true").status().is_ok_and(|status| status.success()) {
        return;
    }
    let folder = tempfile::tempdir().expect("a place for files");
    let config = folder.path().join("run.toml");
    let text = "model = { layers = 2, hidden = 32, heads = 2 }\ndata = { train = \"random\", \
                sequence_length = 16 }\nstep = { batch = 4, steps = 1000000 }\n";
    fs::write(&config, text).expect("a place for files");
    let tuned = folder.path().join("tuned.toml").display().to_string();
    for (command, more) in [
        ("train", &[][..]),
        ("bench", &[]),
        ("tune", &["--to", &tuned, "--rounds", "1000", "--steps", "1000"]),
    ] {
        let mut arguments = vec![command.to_string(), config.display().to_string()];
        arguments.extend(more.iter().map(|more| more.to_string()));
        let program = l2l(&arguments);
        let mut inside = unshare();
        inside.arg(program.get_program()).args(program.get_args());
        let mut outside = inside.spawn().expect("it ran before");
        let children = format!("/proc/{0}/task/{0}/children", outside.id());
        // A signal before the program listens is lost.
        let status = loop {
            let first = fs::read_to_string(&children).unwrap_or_default();
            if let Ok(first) = first.trim().parse::<i32>() {
                let first = rustix::process::Pid::from_raw(first).expect("a process");
                _ = rustix::process::kill_process(first, rustix::process::Signal::TERM);
            }
            if let Some(status) = outside.try_wait().expect("a child of ours") {
                break status;
            }
            std::thread::yield_now();
        };
        assert_eq!(status.code(), Some(128 + 15), "{command}");
    }
}
