//! Damaged checkpoints: a run passes them over or refuses them, and no command takes a model from
//! one without a word.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use tempfile::NamedTempFile;

use crate::program::{events, good, of_kind, output};

const SETTINGS: [&str; 13] = [
    "data.train=random",
    "data.sequence_length=8",
    "model.layers=2",
    "model.hidden=16",
    "model.heads=2",
    "model.vocabulary=256",
    "model.positions=8",
    "step.batch=4",
    "step.micro_batch=2",
    "step.steps=6",
    "checkpoint.every_steps=2",
    "checkpoint.keep=3",
    "device.threads=1",
];

/// A command about a run whose checkpoints lie in a folder.
fn arguments(command: &str, folder: &Path, more: &[&str]) -> Vec<String> {
    // A config of defaults, in place of the built-in one.
    static EMPTY: LazyLock<NamedTempFile> =
        LazyLock::new(|| NamedTempFile::with_suffix(".toml").expect("a place for files"));
    let mut all = vec![command.to_string(), EMPTY.path().display().to_string()];
    let directory = format!("checkpoint.directory={}", folder.display());
    for set in SETTINGS.into_iter().chain([&directory[..]]) {
        all.extend(["--set".to_string(), set.to_string()]);
    }
    all.extend(more.iter().map(ToString::to_string));
    all
}

/// The folder of a run that has ended, with checkpoints of steps 2, 4 and 6, and its digest.
fn trained() -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().expect("a place for files");
    let text = good(&arguments("train", folder.path(), &["--format", "json"]));
    (folder, digest(&text))
}

fn digest(text: &str) -> String {
    let events = events(text);
    of_kind(&events, "summary")[0]["weights_digest"].as_str().expect("a digest").to_string()
}

fn checkpoint(folder: &Path, step: u64) -> PathBuf {
    folder.join(format!("step-{step:08}"))
}

/// Changes one bit in the middle of a file's numbers.
fn flip(path: &Path) {
    let mut bytes = fs::read(path).expect("it was written");
    let at = bytes.len() - bytes.len() / 8;
    bytes[at] ^= 0x40;
    fs::write(path, bytes).expect("a directory of ours");
}

/// The error of a command that is refused.
#[track_caller]
fn refused(arguments: &[String]) -> String {
    let output = output(arguments);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{error}");
    error
}

#[test]
fn a_damaged_checkpoint_is_passed_over_unless_the_run_is_strict() {
    let (folder, expected) = trained();
    let at = folder.path();
    flip(&checkpoint(at, 6).join("optimizer.safetensors"));
    let error = refused(&arguments("train", at, &["--resume", "--strict"]));
    for says in ["step-00000006", "optimizer.safetensors is not what was written"] {
        assert!(error.contains(says), "{error}");
    }
    fs::remove_file(checkpoint(at, 4).join("config.json")).expect("it was written");
    let resumed = output(&arguments("train", at, &["--resume", "--format", "json"]));
    let error = String::from_utf8_lossy(&resumed.stderr);
    assert_eq!(resumed.status.code(), Some(0), "{error}");
    for says in ["step-00000006", "config.json", "resumes from step 2, the newest that is not"] {
        assert!(error.contains(says), "{error}");
    }
    assert_eq!(digest(&String::from_utf8_lossy(&resumed.stdout)), expected);
    // The run has written its last checkpoint anew.
    let again = good(&arguments("train", at, &["--resume", "--strict", "--format", "json"]));
    assert_eq!(digest(&again), expected);
    for step in [2, 4, 6] {
        let path = checkpoint(at, step).join("l2l.json");
        let text = fs::read_to_string(&path).expect("a checkpoint");
        fs::write(&path, text.replacen("\"steps\": 6", "\"steps\": 7", 1)).expect("ours");
    }
    let error = refused(&arguments("train", at, &["--resume"]));
    assert!(error.contains("l2l.json is not what was written"), "{error}");
}

#[test]
fn no_command_takes_a_model_from_a_damaged_checkpoint_unasked() {
    let (folder, _) = trained();
    let at = folder.path();
    let place = checkpoint(at, 6);
    let text = place.display().to_string();
    let exported = at.join("exported").display().to_string();
    let commands = |unsealed: &[&str]| {
        let data = ["--set", "data.validation=random", "--set", "validation.batches=1"];
        let model = ["--model", &text];
        let with = |command: &str, more: &[&str]| {
            arguments(command, at, &[&model[..], unsealed, more].concat())
        };
        let tokens = ["--prompt", "ab", "--tokens", "2"];
        [with("eval", &data), with("generate", &tokens), with("export", &["--to", &exported])]
    };
    flip(&place.join("optimizer.safetensors"));
    for command in commands(&[]) {
        good(&command); // the model is as it was
    }
    fs::remove_dir_all(&exported).expect("it was written");
    flip(&place.join("model.safetensors"));
    for command in commands(&[]) {
        let error = refused(&command);
        for says in ["step-00000006", "model.safetensors is not what was written", "--unsealed"] {
            assert!(error.contains(says), "{error}");
        }
    }
    for command in commands(&["--unsealed"]) {
        good(&command);
    }
}

#[test]
fn weights_that_are_no_numbers_are_named() {
    let (folder, _) = trained();
    let at = folder.path();
    let exported = at.join("exported");
    let to = exported.display().to_string();
    good(&arguments("export", at, &["--to", &to]));
    let path = exported.join("model.safetensors");
    let mut bytes = fs::read(&path).expect("it was written");
    let last = bytes.len() - 4;
    bytes[last..].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&path, bytes).expect("a directory of ours");
    let again = at.join("again").display().to_string();
    let model = ["--model", &to];
    let data = ["--set", "data.validation=random", "--set", "validation.batches=1"];
    let path_of_model = format!("model.path={to}");
    let commands = [
        arguments("eval", at, &[&model[..], &data].concat()),
        arguments("export", at, &[&model[..], &["--to", &again]].concat()),
        arguments("train", &at.join("new"), &["--set", "model=", "--set", &path_of_model]),
    ];
    for command in commands {
        let error = refused(&command);
        for says in ["model.safetensors", "of tensor ", " is NaN"] {
            assert!(error.contains(says), "{error}");
        }
    }
}
