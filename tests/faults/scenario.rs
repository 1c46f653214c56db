//! Small runs of the program, on storage that fails.

use std::collections::BTreeSet;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;
use std::{env, fs};

use tempfile::TempDir;

use crate::disk::is_checkpoint;
use crate::journal::{self, Record};

/// Three steps, with validations and checkpoints after each. All data is the same, so each
/// validation is better than the one before.
const CONFIG: &str = r#"
[data]
validation_split = 0.1
sequence_length = 4
[model]
random_weights = true
[step]
batch = 2
micro_batch = 2
steps = 3
[optimizer]
learning_rate = 3e-3
[device]
threads = 1
[validation]
every_steps = 1
batches = 1"#;

const SHAPE: &str = r#"{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 1,
    "n_embd": 8, "n_head": 2, "n_positions": 4, "vocab_size": 20}"#;

/// Where the files of a run are, and which calls earlier processes of it were killed at.
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    pub(crate) checkpoints: bool,
    pub(crate) on_file: bool,
    pub(crate) is_delayed: bool,
    /// As `FAULTS_ON` in the shim: each process is killed at one, and the next resumes.
    pub(crate) kills: &'static [&'static str],
    /// A checkpoint that they leave under the name that it has while it is replaced: as a kill
    /// between the two renames does.
    pub(crate) replaced: Option<&'static str>,
}

/// What is the same for all runs of a test.
pub(crate) struct Bench {
    folder: TempDir,
    shim: PathBuf,
    /// The digest of the weights of a run that nothing happens to.
    digest: String,
}

/// How a process ended.
pub(crate) struct Ended {
    /// `None`: by a signal.
    pub(crate) status: Option<i32>,
    pub(crate) out: String,
    pub(crate) said: String,
}

/// A folder for one run: its storage below `disk`, and the journal beside it.
pub(crate) struct Place {
    folder: PathBuf,
}

impl Place {
    pub(crate) fn disk(&self) -> PathBuf {
        self.folder.join("disk")
    }

    fn journal(&self) -> PathBuf {
        self.folder.join("journal")
    }

    pub(crate) fn records(&self) -> Vec<Record> {
        let bytes = fs::read(self.journal()).expect("the shim wrote it");
        journal::read(&bytes, &self.disk().display().to_string())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

impl Bench {
    /// `None` where there is no compiler.
    pub(crate) fn new(is_delayed: bool) -> Option<Bench> {
        let shim = SHIM.clone()?;
        let folder = tempfile::tempdir().expect("a place for files");
        let model = folder.path().join("model");
        fs::create_dir_all(model.join("1_Pooling")).expect("a folder of ours");
        fs::write(folder.path().join("config.toml"), CONFIG).expect("room on a disk");
        let data = "{\"input_ids\": [1, 2, 3, 4]}\n".repeat(20);
        fs::write(folder.path().join("data.jsonl"), data).expect("room on a disk");
        // Files that each checkpoint has copies of.
        let modules = r#"[{"path": "1_Pooling"}]"#;
        let files = [
            ("config.json", SHAPE),
            ("generation_config.json", "{}"),
            ("modules.json", modules),
            ("1_Pooling/config.json", r#"{"pooling_mode_mean_tokens": true}"#),
        ];
        for (name, text) in files {
            fs::write(model.join(name), text).expect("room on a disk");
        }
        let mut bench = Bench { folder, shim, digest: String::new() };
        let scenario = Scenario {
            name: "unbroken",
            checkpoints: true,
            on_file: false,
            is_delayed,
            kills: &[],
            replaced: None,
        };
        let place = bench.place("unbroken");
        let ended = bench.train(&scenario, &place, false, &[]);
        bench.digest = ended.digest().unwrap_or_else(|| panic!("{}", ended.said)).to_string();
        check_names(&scenario, &place.disk()).expect("what a run leaves");
        Some(bench)
    }

    pub(crate) fn place(&self, name: &str) -> Place {
        let folder = self.folder.path().join(name);
        fs::create_dir_all(folder.join("disk")).expect("a folder of ours");
        Place { folder }
    }

    /// Trains to the end of the run, or to a fault.
    pub(crate) fn train(
        &self,
        scenario: &Scenario,
        place: &Place,
        resume: bool,
        faults: &[(&str, &str)],
    ) -> Ended {
        let mut command = Command::new(env!("CARGO_BIN_EXE_l2l"));
        command.arg("train").arg(self.folder.path().join("config.toml"));
        let disk = place.disk();
        let mut set = |key: &str, value: &Path| {
            command.arg("--set").arg(format!("{key}={}", value.display()));
        };
        set("model.path", &self.folder.path().join("model"));
        set("data.train", &self.folder.path().join("data.jsonl"));
        if scenario.checkpoints {
            set("checkpoint.directory", &disk.join("checkpoints"));
            set("checkpoint.every_steps", Path::new("1"));
        }
        if scenario.on_file {
            set("eps.tier", Path::new("file"));
            set("eps.path", &disk.join("eps"));
        }
        if scenario.is_delayed {
            set("schedule.delay", Path::new("1"));
        }
        if resume {
            command.arg("--resume");
        }
        self.preloaded(&mut command, place);
        command.envs(faults.iter().copied()).stdin(Stdio::null());
        let output = command.output().expect("the program runs");
        Ended {
            status: output.status.code(),
            out: String::from_utf8_lossy(&output.stdout).into(),
            said: String::from_utf8_lossy(&output.stderr).into(),
        }
    }

    /// Lets the processes that are killed run. Returns the step that is safe then.
    pub(crate) fn begin(&self, scenario: &Scenario, place: &Place) -> u64 {
        let mut safe = 0;
        for (nth, kill) in scenario.kills.iter().enumerate() {
            let faults = [("FAULTS_KIND", "exit"), ("FAULTS_ON", *kill)];
            let ended = self.train(scenario, place, nth > 0, &faults);
            assert_eq!(ended.status, Some(137), "{}: {kill}: {}", scenario.name, ended.said);
            safe = safe.max(safe_step(scenario, &ended.out));
        }
        if let Some(name) = scenario.replaced {
            let at = place.disk().join("checkpoints").join(name);
            let mut rename = Command::new("mv");
            rename.arg(&at).arg(at.with_extension("l2l-old"));
            assert!(self.preloaded(&mut rename, place).status().expect("there is mv").success());
            safe = safe.max(2);
        }
        safe
    }

    /// A command whose calls on the storage are in the journal.
    fn preloaded<'c>(&self, command: &'c mut Command, place: &Place) -> &'c mut Command {
        command.env("LD_PRELOAD", &self.shim).env("FAULTS_BELOW", place.disk());
        command.env("FAULTS_JOURNAL", place.journal())
    }

    /// Resumes, without faults, and checks that the run ends as if nothing had happened.
    ///
    /// # Errors
    /// What is not so.
    pub(crate) fn resume(
        &self,
        scenario: &Scenario,
        place: &Place,
        safe: u64,
    ) -> Result<(), String> {
        let ended = self.train(scenario, place, true, &[]);
        let Ended { status, said, .. } = &ended;
        if *status != Some(0) {
            return Err(format!("resumed: status {status:?}: {said}"));
        }
        self.check_digest(&ended).map_err(|what| format!("resumed: {what}"))?;
        ended.check_begin(safe)?;
        check_names(scenario, &place.disk()).map_err(|what| format!("resumed: {what}"))
    }

    /// # Errors
    /// It has other weights.
    pub(crate) fn check_digest(&self, ended: &Ended) -> Result<(), String> {
        match ended.digest() {
            Some(digest) if digest == self.digest => Ok(()),
            other => Err(format!("weights {other:?}, and not {}", self.digest)),
        }
    }
}

impl Ended {
    /// Whether it trained.
    pub(crate) fn has_begun(&self) -> bool {
        self.out.lines().any(|line| line.starts_with("step "))
    }

    /// Checks that it began at this step or later, if it began.
    ///
    /// # Errors
    /// It began earlier.
    pub(crate) fn check_begin(&self, safe: u64) -> Result<(), String> {
        let from = number_behind(&self.out, "resumes from step ").unwrap_or(0);
        match self.has_begun() && from < safe {
            true => Err(format!("resumes from step {from}, and step {safe} was safe")),
            false => Ok(()),
        }
    }

    fn digest(&self) -> Option<&str> {
        self.out.lines().find_map(|line| line.strip_prefix("weights "))
    }
}

/// The step from which a run must be able to resume, after this output: that of the last checkpoint
/// that it reported; on file, also the step before the last one that was done.
pub(crate) fn safe_step(scenario: &Scenario, out: &str) -> u64 {
    let of_line = |line: &str| {
        if let Some(path) = line.strip_prefix("checkpoint ") {
            return path.rsplit('-').next()?.parse().ok();
        }
        let step: u64 = line.strip_prefix("step ")?.split_once('/')?.0.parse().ok()?;
        scenario.on_file.then(|| step - 1)
    };
    out.lines().filter_map(of_line).max().unwrap_or(0)
}

fn number_behind(text: &str, what: &str) -> Option<u64> {
    let (_, rest) = text.split_once(what)?;
    rest.split(|end: char| !end.is_ascii_digit()).next()?.parse().ok()
}

/// Checks that a run which ended left whole checkpoints, one of the last step, and nothing else.
///
/// # Errors
/// What else there is, or what is not there.
fn check_names(scenario: &Scenario, disk: &Path) -> Result<(), String> {
    const FILES: [&str; 8] = [
        "1_Pooling",
        "1_Pooling/config.json",
        "config.json",
        "generation_config.json",
        "l2l.json",
        "model.safetensors",
        "modules.json",
        "optimizer.safetensors",
    ];
    let names: BTreeSet<String> = crate::disk::read(disk).into_keys().collect();
    let mut whole = BTreeSet::new();
    if scenario.checkpoints {
        whole.extend(["checkpoints", "checkpoints/.l2l-lock"].map(String::from));
        let last = |name: &str| name.ends_with("-00000003");
        if !names.iter().any(|name| last(name)) {
            return Err(format!("no checkpoint of the last step in {names:?}"));
        }
        for checkpoint in names.iter().filter(|name| is_checkpoint(name)) {
            whole.insert(checkpoint.clone());
            let older = scenario.is_delayed.then_some("older.safetensors");
            let files = FILES.into_iter().chain(older);
            whole.extend(files.map(|file| format!("{checkpoint}/{file}")));
        }
    }
    if scenario.on_file {
        let names = ["eps", "eps/blocks", "eps/index.0", "eps/index.1", "eps/lock"];
        whole.extend(names.map(String::from));
    }
    let left: Vec<_> = names.difference(&whole).collect();
    let lacks: Vec<_> = whole.difference(&names).collect();
    match left.is_empty() && lacks.is_empty() {
        true => Ok(()),
        false => Err(format!("there is also {left:?}, and there is no {lacks:?}")),
    }
}

/// The shim, compiled; `None` where there is no compiler.
static SHIM: LazyLock<Option<PathBuf>> = LazyLock::new(|| {
    if Command::new("c++").arg("--version").output().is_err() {
        eprintln!("without c++ storage does not fail");
        return None;
    }
    let text = include_str!("shim.cpp");
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    let here = env::current_exe().expect("a test runs from a file");
    let folder = here.parent().expect("in a folder");
    let path = folder.join(format!("faults-{:016x}.so", hasher.finish()));
    if !path.exists() {
        let made = folder.join(format!("faults-{}.so", std::process::id()));
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/faults/shim.cpp");
        let mut compiler = Command::new("c++");
        compiler.args(["-std=c++20", "-O1", "-shared", "-fPIC", "-o"]).args([&made, &source]);
        let output = compiler.output().expect("a compiler");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        fs::rename(&made, &path).expect("a folder of ours");
    }
    Some(path)
});
