//! Runs of `l2l train` that are disturbed on their way: when, what their ranks said, what they
//! left.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};
use std::{env, fmt, thread};

use serde_json::Value;

pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_l2l");

/// The steps of a small run.
pub(crate) const STEPS: u64 = 24;

/// Its other settings.
const SETTINGS: [&str; 12] = [
    "model.layers=2",
    "model.hidden=32",
    "model.heads=2",
    concat!("data.train=", env!("CARGO_MANIFEST_DIR"), "/README.md"),
    "data.sequence_length=32",
    "step.batch=8",
    "step.micro_batch=1",
    "parallel.groups=4",
    "optimizer.clip_norm=1",
    "validation.batches=1",
    "checkpoint.every_steps=4",
    "log.format=json",
];

/// All ranks of a disturbed run end within this time, on a machine that has other work, too.
pub(crate) const BOUND: Duration = Duration::from_secs(180);

/// How long a launcher may stay when its ranks have ended.
const LAUNCHER: Duration = Duration::from_secs(60);

/// How often a run is looked at.
pub(crate) const LOOK: Duration = Duration::from_millis(2);

/// `mpirun` with a number of ranks on this machine.
pub(crate) fn mpirun(ranks: u32) -> Command {
    let mut command = Command::new("mpirun");
    command.args(["--allow-run-as-root", "--oversubscribe", "-n", &ranks.to_string()]);
    command.stdin(Stdio::null());
    command
}

/// The arguments of `l2l train` with this checkpoint directory.
pub(crate) fn settings(directory: &Path, more: &[&str]) -> Vec<String> {
    let directory = format!("checkpoint.directory={}", directory.display());
    let steps = format!("step.steps={STEPS}");
    let all = SETTINGS.into_iter().chain([&*directory, &*steps]).chain(more.iter().copied());
    let set = all.flat_map(|setting| ["--set".into(), setting.into()]);
    ["train".into()].into_iter().chain(set).collect()
}

/// `l2l train` with this checkpoint directory, on a number of ranks; on none without `mpirun`.
pub(crate) fn train(ranks: u32, directory: &Path, more: &[&str]) -> Command {
    let mut command = match ranks {
        0 => Command::new(PROGRAM),
        _ => {
            let mut command = mpirun(ranks);
            command.arg(PROGRAM);
            command
        }
    };
    command.args(settings(directory, more)).stdin(Stdio::null());
    command
}

/// The digest of the weights that a run ended with; and how many summaries there were.
pub(crate) fn digest(output: &Output) -> (String, usize) {
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let (_, from) = text.split_once("\"weights_digest\":\"").expect("a run ends with its digest");
    (from[..64].into(), text.matches("weights_digest").count())
}

/// The steps of the complete checkpoints, in order.
pub(crate) fn checkpoints(directory: &Path) -> Vec<u64> {
    let of = |name: String| {
        let (kind, step) = name.split_once('-')?;
        let is_there = directory.join(&name).join("l2l.json").is_file();
        step.parse().ok().filter(|_| is_there && ["step", "best"].contains(&kind))
    };
    let mut all: Vec<u64> = names(directory).into_iter().filter_map(of).collect();
    all.sort_unstable();
    all
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// A checkpoint is being written, or was when the run ended.
fn has_partial(directory: &Path) -> bool {
    names(directory).iter().any(|name| name.ends_with(".l2l-partial"))
}

/// Resumes a run on a number of ranks: it begins behind the newest complete checkpoint, takes
/// nothing of one that is not complete, and ends as the unbroken run did.
pub(crate) fn resumes(ranks: u32, directory: &Path, expected: &str) {
    let newest = checkpoints(directory).last().copied().unwrap_or(0);
    let resumed = train(ranks, directory, &[]).arg("--resume").output().expect("it starts");
    assert_eq!(digest(&resumed).0, expected, "resumed at step {newest}");
    let text = String::from_utf8_lossy(&resumed.stdout);
    let events = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let first = events.filter(|event| event["event"] == "step").find_map(|e| e["step"].as_u64());
    assert_eq!(first, (newest < STEPS).then_some(newest + 1), "the first step after {newest}");
    assert!(!has_partial(directory), "what was half written is removed");
}

/// Pseudo-random numbers.
pub(crate) struct Chance(pub(crate) u64);

impl Chance {
    /// A number from 0 to below `end`.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }

    fn milliseconds(&mut self, end: u64) -> Duration {
        Duration::from_millis(self.below(end))
    }
}

/// When a run is disturbed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Moment {
    AtOnce,
    Any,
    InCheckpoint,
}

impl Moment {
    /// Each kind comes among any five cases.
    pub(crate) fn of(case: u32) -> Moment {
        match case % 5 {
            0 | 3 => Moment::InCheckpoint,
            4 => Moment::AtOnce,
            _ => Moment::Any,
        }
    }
}

/// What a run did when it was disturbed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// No step was done.
    Starting,
    Training,
    Checkpointing,
    /// The run had ended.
    Ended,
}

impl Phase {
    const ALL: [Phase; 4] = [Phase::Starting, Phase::Training, Phase::Checkpointing, Phase::Ended];
}

/// A run that is to be disturbed. If the test fails, its processes are killed.
pub(crate) struct Run {
    launcher: Child,
    directory: PathBuf,
    /// What the launcher wrote.
    out: PathBuf,
    err: PathBuf,
    ranks: u32,
}

impl Run {
    /// Starts the command. Its ranks have this checkpoint directory.
    pub(crate) fn start(mut command: Command, ranks: u32, directory: &Path) -> Run {
        let out = directory.with_extension("out");
        let err = directory.with_extension("err");
        let file = |path: &Path| File::create(path).expect("room on a disk");
        command.stdin(Stdio::null()).stdout(file(&out)).stderr(file(&err));
        let launcher = command.spawn().expect("it starts");
        Run { launcher, directory: directory.to_path_buf(), out, err, ranks }
    }

    /// Its l2l processes, by rank.
    pub(crate) fn processes(&self) -> Vec<(u32, u32)> {
        let directory = self.directory.display().to_string();
        let words = |process: u32, file: &str| {
            let text = fs::read(format!("/proc/{process}/{file}")).unwrap_or_default();
            String::from_utf8_lossy(&text).into_owned()
        };
        let of = |process: u32| {
            let program = fs::read_link(format!("/proc/{process}/exe")).ok()?;
            if program != Path::new(PROGRAM) || !words(process, "cmdline").contains(&directory) {
                return None;
            }
            let environment = words(process, "environ");
            let name = "OMPI_COMM_WORLD_RANK=";
            let rank = environment.split('\0').find_map(|word| word.strip_prefix(name))?;
            Some((rank.parse().ok()?, process))
        };
        let all = fs::read_dir("/proc").expect("Linux").flatten();
        all.filter_map(|entry| of(entry.file_name().to_str()?.parse().ok()?)).collect()
    }

    /// What its launcher wrote to its stderr.
    pub(crate) fn error(&self) -> String {
        fs::read_to_string(&self.err).unwrap_or_default()
    }

    fn phase(&self) -> Phase {
        let text = fs::read(&self.out).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        match text.contains("\"event\":\"step\"") {
            _ if text.contains("weights_digest") => Phase::Ended,
            _ if has_partial(&self.directory) => Phase::Checkpointing,
            true => Phase::Training,
            false => Phase::Starting,
        }
    }

    /// Waits until `is_so`, or until the run has ended.
    fn wait_until(&mut self, is_so: impl Fn(&Run) -> bool) {
        let begin = Instant::now();
        while !is_so(self) && !self.has_launcher_ended() {
            assert!(begin.elapsed() < BOUND, "the run does not get there: {}", self.error());
            thread::sleep(LOOK);
        }
    }

    /// Waits for a random moment after the start of its processes.
    pub(crate) fn wait_for(&mut self, moment: Moment, chance: &mut Chance) {
        self.wait_until(|run| run.processes().len() == run.ranks as usize);
        match moment {
            Moment::AtOnce => thread::sleep(chance.milliseconds(500)),
            Moment::Any => thread::sleep(chance.milliseconds(7000)),
            Moment::InCheckpoint => {
                self.wait_until(|run| run.phase() != Phase::Starting);
                thread::sleep(chance.milliseconds(3000));
                self.wait_until(|run| has_partial(&run.directory));
                thread::sleep(Duration::from_micros(chance.below(6000)));
            }
        }
    }

    /// Does something to the run. Returns what the run did at that time.
    pub(crate) fn disturb(&self, what: impl FnOnce()) -> Phase {
        let before = self.phase();
        what();
        if before == Phase::Checkpointing { before } else { self.phase() }
    }

    /// Waits until none of its l2l processes is left. Returns how long it took.
    pub(crate) fn wait_for_ranks(&self) -> Duration {
        let begin = Instant::now();
        while let left = self.processes()
            && !left.is_empty()
        {
            assert!(begin.elapsed() < BOUND, "{left:?} do not end: {}", self.error());
            thread::sleep(LOOK);
        }
        begin.elapsed()
    }

    /// Waits until its launcher has ended. Returns whether it succeeded; `None` if it stays. (That
    /// of Open MPI 4.1 may hang when all its processes have ended, in `PMIx_server_finalize`.)
    pub(crate) fn wait_for_launcher(&mut self) -> Option<bool> {
        let begin = Instant::now();
        while !self.has_launcher_ended() {
            if begin.elapsed() > LAUNCHER {
                return None;
            }
            thread::sleep(LOOK);
        }
        Some(self.launcher.wait().expect("it is ours").success())
    }

    pub(crate) fn has_launcher_ended(&mut self) -> bool {
        self.launcher.try_wait().expect("it is ours").is_some()
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        _ = self.launcher.kill();
        _ = self.launcher.wait();
        for (_, process) in self.processes() {
            _ = Command::new("kill").args(["-KILL", &process.to_string()]).status();
        }
    }
}

/// How many runs are to be disturbed in each way, by `L2L_FAILURES=<kills>,<stops>,<cuts>`.
pub(crate) fn counts() -> [u32; 3] {
    let whole = env::var("L2L_TESTS").is_ok_and(|mode| mode == "whole");
    match env::var("L2L_FAILURES") {
        Ok(counts) => {
            let counts = counts.split(',').map(|count| count.parse().expect("a number"));
            counts.collect::<Vec<_>>().try_into().expect("three numbers, with commas")
        }
        Err(_) if whole => [6, 3, 3],
        Err(_) => [2, 1, 1],
    }
}

/// When runs were disturbed, and how long their ranks took to end.
#[derive(Default)]
pub(crate) struct Tally(pub(crate) Vec<(Phase, Duration)>);

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut times: Vec<f64> = self.0.iter().map(|(_, took)| took.as_secs_f64()).collect();
        times.sort_by(f64::total_cmp);
        let Some(max) = times.last() else { return write!(f, "none") };
        let median = times[times.len() / 2];
        write!(f, "{}, ended in {median:.1} s (median), {max:.1} s (max)", times.len())?;
        for phase in Phase::ALL {
            let count = self.0.iter().filter(|(of, _)| *of == phase).count();
            write!(f, ", {phase:?} {count}")?;
        }
        Ok(())
    }
}
