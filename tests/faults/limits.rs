//! Limits of the process: threads that the system does not start, files that it may not write or
//! open. Each is one sentence with the limit's name.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use crate::BOTH;
use crate::scenario::{Bench, safe_step};

/// More threads than the run starts.
const MOST: u64 = 200;

/// From each thread on that a run starts, the system starts none any more. Some of these panicked,
/// and others were waited for without end.
#[test]
fn a_thread_that_does_not_start_is_an_error() {
    let Some(bench) = Bench::new(false) else { return };
    let mut has_resumed = false;
    for started in 0..MOST {
        let place = bench.place(&format!("threads-{started}"));
        let most = started.to_string();
        let ended = bench.train(&BOTH, &place, false, &[("FAULTS_THREADS", &most)]);
        let said = &ended.said;
        if ended.status == Some(0) {
            bench.check_digest(&ended).expect("all threads started");
            assert!(started > 10 && has_resumed, "only {started} threads");
            return;
        }
        assert_eq!(ended.status, Some(1), "{started}: {said}");
        assert!(!said.contains("panicked"), "{started}: {said}");
        let says = "the system starts no further thread for this process (Resource temporarily";
        assert!(said.contains(says), "{started}: {said}");
        let safe = safe_step(&BOTH, &ended.out);
        if safe > 0 {
            has_resumed = true;
            bench.resume(&BOTH, &place, safe).unwrap_or_else(|what| panic!("{started}: {what}"));
        }
    }
    panic!("a small run needs {MOST} threads");
}

/// A small model on random data.
const CONFIG: &str = "model = { layers = 2, hidden = 32, heads = 2, vocabulary = 300 }
data = { train = \"random\", sequence_length = 16 }
step = { batch = 2, micro_batch = 2, steps = 30 }";

/// The program in a folder with this config, under a limit of the shell.
fn limited(folder: &Path, limit: &str, arguments: &[&str]) -> Output {
    let config = folder.join("run.toml");
    fs::write(&config, CONFIG).expect("a folder of ours");
    let [command, rest @ ..] = arguments else { panic!("a command") };
    let shell = format!("ulimit {limit}; exec \"$@\"");
    let mut program = Command::new("sh");
    program.args(["-c", &shell, "sh", env!("CARGO_BIN_EXE_l2l"), command]).arg(config).args(rest);
    program.current_dir(folder).env("TMPDIR", folder).output().expect("there is a shell")
}

/// A signal ended the program before (SIGXFSZ), without a word.
#[test]
fn a_file_that_is_too_large_is_an_error() {
    let folder = tempfile::tempdir().expect("a place for files");
    let at = folder.path();
    fs::write(at.join("data.txt"), "some words\n".repeat(2000)).expect("a folder of ours");
    let run = |status: i32, says: &str, settings: &[&str]| {
        let flags = settings.iter().flat_map(|setting| ["--set", *setting]);
        let arguments: Vec<&str> = ["train"].into_iter().chain(flags).collect();
        let Output { status: ended, stdout, stderr } = limited(at, "-f 4", &arguments);
        let said = String::from_utf8_lossy(&stderr).into_owned();
        assert_eq!(ended.code(), Some(status), "{settings:?}: {said}");
        assert!(said.contains(says) && said.contains("(`ulimit -f`)"), "{settings:?}: {said}");
        String::from_utf8_lossy(&stdout).contains("\nweights ")
    };
    // What is lost is the log. Training goes on.
    assert!(run(1, "log.file: File too large (os error 27): ", &["log.file=log.jsonl"]));
    let tensorboard = ["log.tensorboard=board", "step.steps=200"];
    assert!(run(1, "log.tensorboard: File too large (os error 27): ", &tensorboard));
    // What is known before the run is refused before it.
    assert!(!run(2, "checkpoint.directory ck: a file of ", &["checkpoint.directory=ck"]));
    assert!(!run(2, "eps.path e: a file of ", &["eps.tier=file", "eps.path=e"]));
    let place = format!("TMPDIR {} (tokenized data waits there; ", at.display());
    assert!(!run(1, &place, &["data.train=data.txt"]));
}

/// Whatever cannot be opened, the limit of open files is named.
#[test]
fn a_file_that_cannot_be_opened_names_the_limit() {
    let folder = tempfile::tempdir().expect("a place for files");
    let at = folder.path();
    fs::create_dir(at.join("data")).expect("a folder of ours");
    for nth in 0..20 {
        let file = at.join(format!("data/{nth}.txt"));
        fs::write(file, "some words\n".repeat(20)).expect("a folder of ours");
    }
    let commands: [&[&str]; 3] = [
        &["train", "--set", "data.train=data", "--set", "checkpoint.directory=ck"],
        &["train", "--set", "log.tensorboard=board"],
        &["data", "--set", "data.train=data"],
    ];
    for arguments in commands {
        for most in [4, 6, 8, 10, 12, 14, 20, 40, 200] {
            let Output { status, stderr, .. } = limited(at, &format!("-n {most}"), arguments);
            let said = String::from_utf8_lossy(&stderr);
            let what = format!("{arguments:?}, {most} files, {status}: {said}");
            assert!(status.success() || said.contains("`ulimit -n"), "{what}");
            assert!(status.success() || status.code().is_some_and(|code| code <= 2), "{what}");
            assert!(status.success() || most < 200, "{what}");
        }
    }
}
