//! A command whose output cannot be written reports which output is lost, and ends with status 1. A
//! reader that goes away ends a command quietly.

use std::fs;
use std::fs::File;
use std::io::pipe;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::program::{events, good, l2l, of_kind};

/// A small run, which writes a checkpoint at every step.
fn config(folder: &Path) -> String {
    let path = folder.join("config.toml");
    let text = format!(
        "model = {{ layers = 2, hidden = 32, heads = 4, vocabulary = 50, positions = 8 }}\n\
         data = {{ train = \"random\" }}\n\
         step = {{ batch = 4, micro_batch = 2, steps = 5 }}\n\
         checkpoint = {{ directory = \"{}\", every_steps = 1 }}\n",
        folder.join("checkpoints").display()
    );
    fs::write(&path, text).expect("a directory of ours");
    path.to_str().expect("UTF-8").into()
}

fn says(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A device that is always full.
fn full() -> Stdio {
    File::options().write(true).open("/dev/full").expect("Linux has it").into()
}

/// A pipe that nobody reads.
fn unread() -> Stdio {
    pipe().expect("a pipe").1.into()
}

/// Commands that print, to be run one after another.
fn printing(config: &str) -> Vec<Vec<&str>> {
    [
        "--help",
        "--version",
        "config reference",
        "config schema",
        "config show CONFIG",
        "completions bash",
        "data CONFIG --rows 3",
        "plan CONFIG",
        "plan CONFIG --format json",
        "train CONFIG --format json",
        "train CONFIG --resume",
        "eval CONFIG --set data.validation=random --set validation.batches=1",
        "bench CONFIG --set step.steps=2",
        "tune CONFIG --steps 1 --rounds 1 --format json",
    ]
    .iter()
    .map(|line| line.split(' ').map(|word| if word == "CONFIG" { config } else { word }).collect())
    .collect()
}

#[test]
fn a_full_disk_behind_standard_output_is_no_success() {
    let folder = tempfile::tempdir().expect("a place for files");
    for arguments in printing(&config(folder.path())) {
        let output = l2l(&arguments).stdout(full()).output().expect("the program runs");
        let says = says(&output);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {says}");
        assert_eq!(says.matches("error: ").count(), 1, "{arguments:?}: {says}");
        assert!(says.contains("error: standard output: No space left"), "{arguments:?}: {says}");
    }
    // Training did not stop early.
    assert!(folder.path().join("checkpoints/step-00000005").is_dir());
}

#[test]
fn a_reader_that_goes_away_ends_a_command_quietly() {
    let folder = tempfile::tempdir().expect("a place for files");
    for arguments in printing(&config(folder.path())) {
        let output = l2l(&arguments).stdout(unread()).output().expect("the program runs");
        let says = says(&output);
        assert_eq!(output.status.code(), Some(141), "{arguments:?}: {says}");
        assert!(!says.contains("error") && !says.contains("panic"), "{arguments:?}: {says}");
    }
}

/// A run whose reader went away ends after its step, with a checkpoint, as after a signal.
#[test]
fn a_run_without_a_reader_stops_with_a_checkpoint() {
    let folder = tempfile::tempdir().expect("a place for files");
    let config = config(folder.path());
    let whole = events(&good(&["train", &config, "--format", "json"]));
    let places = folder.path().join("checkpoints");
    fs::remove_dir_all(&places).expect("it was made");
    let every = ["--set", "checkpoint.every_steps=4"];
    let train = [&["train", &*config, "--format", "json"], &every[..]].concat();
    let output = l2l(&train).stdout(unread()).output().expect("the program runs");
    let says = says(&output);
    assert_eq!(output.status.code(), Some(141), "{says}");
    assert!(says.contains("nobody reads") && says.contains("after step 1; "), "{says}");
    assert!(places.join("step-00000001/l2l.json").is_file());
    let rest = events(&good(&[&train[..], &["--resume"]].concat()));
    assert_eq!(of_kind(&rest, "step").len(), 4);
    let digest =
        |events: &[serde_json::Value]| of_kind(events, "summary")[0]["weights_digest"].clone();
    assert_eq!(digest(&rest), digest(&whole));
}

/// Runs the program as on a full disk: it can open files, and cannot write to them.
fn without_room(arguments: &[&str]) -> Output {
    Command::new("sh")
        .args(["-c", "trap '' XFSZ; ulimit -f 0; exec \"$@\"", "sh"])
        .arg(env!("CARGO_BIN_EXE_l2l"))
        .args(arguments)
        .output()
        .expect("there is a shell")
}

/// A run that cannot write a file goes on to its end, reports the file, and ends with status 1.
#[test]
fn files_of_a_run_that_cannot_be_written_are_no_success() {
    let folder = tempfile::tempdir().expect("a place for files");
    let config = config(folder.path());
    let at = |name: &str| folder.path().join(name).display().to_string();
    let log = format!("log.file={}", at("log"));
    for (more, lost) in
        [(&["--trace", &*at("trace")][..], "--trace"), (&["--set", &log], "log.file")]
    {
        let arguments = [&["train", &*config, "--set", "checkpoint="], more].concat();
        let output = without_room(&arguments);
        let says = says(&output);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(output.status.code(), Some(1), "{lost}: {says}");
        assert!(says.contains(&format!("error: {lost}")), "{lost}: {says}");
        assert!(text.contains("\nweights "), "{lost}: it went on to its end: {text}");
    }
}

/// A file that cannot be written is refused before the run, if that can be found out.
#[test]
fn files_are_checked_before_the_run() {
    let folder = tempfile::tempdir().expect("a place for files");
    let config = config(folder.path());
    let at = |name: &str| folder.path().join(name).display().to_string();
    fs::write(at("file"), "").expect("a directory of ours");
    let below = at("file") + "/below";
    let folder_itself = at("");
    for (arguments, lost, status) in [
        (["train", &config, "--trace", "/dev/full"], "--trace /dev/full", 1),
        (["train", &config, "--trace", &below], "--trace", 2),
        (["train", &config, "--report", &below], "--report", 2),
        (["tune", &config, "--to", "/dev/full"], "--to /dev/full", 1),
        (["tune", &config, "--to", &below], "--to", 2),
        (["tune", &config, "--to", &folder_itself], "--to", 2),
        (["dashboards", "--runbooks", "http://a", "--to=/dev/full"], "--to /dev/full", 2),
    ] {
        let output = l2l(&arguments).output().expect("the program runs");
        let says = says(&output);
        assert_eq!(output.status.code(), Some(status), "{arguments:?}: {says}");
        assert!(says.contains(&format!("error: {lost}")), "{arguments:?}: {says}");
        assert!(output.stdout.is_empty() && !says.contains("round 0"), "{arguments:?}: {says}");
    }
    let report = ["train", &config, "--report", &at("report")];
    let output = without_room(&report);
    assert_eq!(output.status.code(), Some(1), "{}", says(&output));
    assert!(says(&output).contains("error: --report") && output.stdout.is_empty());
    let tuned = at("tuned.toml");
    fs::write(&tuned, "old content").expect("a directory of ours");
    let output = without_room(&["tune", &config, "--to", &tuned]);
    assert_eq!(output.status.code(), Some(1), "{}", says(&output));
    assert!(says(&output).contains("error: --to") && !says(&output).contains("round 0"));
    assert_eq!(fs::read_to_string(&tuned).expect("it is there"), "old content");
    assert!(!Path::new(&(tuned + ".partial")).exists());
    assert!(!folder.path().join("checkpoints").join("step-00000001").exists());
}

/// A command that cannot write the file of its result ends with status 1, and leaves no half of it.
#[test]
fn files_that_are_cut_short_are_no_success() {
    let folder = tempfile::tempdir().expect("a place for files");
    let config = config(folder.path());
    let at = |name: &str| folder.path().join(name).display().to_string();
    good(&["train", &config]);
    for arguments in [
        &["dashboards", "--to", &*at("dashboards")][..],
        &["man", "--to", &at("man1")],
        &["plan", &config, "--csv", &at("order")],
        &["plan", &config, "--draw", &at("picture")],
        &["export", &config, "--to", &at("model")],
    ] {
        let output = without_room(arguments);
        let says = says(&output);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {says}");
        let named = arguments.last().expect("a path");
        assert!(says.contains("error: ") && says.contains(named), "{arguments:?}: {says}");
    }
    let left: Vec<_> = fs::read_dir(folder.path()).expect("ours").flatten().collect();
    let left: Vec<_> = left.iter().map(|entry| entry.file_name()).collect();
    assert!(!left.iter().any(|name| name == "model" || name == "picture"), "{left:?}");
}
