//! The EPS on file: a kill at any moment leaves a complete state, and data that the disk changed is
//! reported and not trained on. (`exact` compares its bits with those of memory.)

use std::fs::{self, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Stdio;
use std::sync::LazyLock;

use crate::program::{events, good, l2l, of_kind, output};
use serde_json::Value;

/// A small run with a tied vocabulary of several tiles.
const CONFIG: &str = r#"
[data]
train = "random"
sequence_length = 8
[model]
layers = 3
hidden = 32
heads = 2
vocabulary = 40000
positions = 8
[step]
batch = 5
micro_batch = 2
[device]
threads = 1
"#;

/// The arguments of a command that runs it.
fn arguments(command: &str, settings: &[&str]) -> Vec<String> {
    static FILE: LazyLock<tempfile::NamedTempFile> = LazyLock::new(|| {
        let mut file = tempfile::NamedTempFile::new().expect("a place for files");
        file.write_all(CONFIG.as_bytes()).expect("room");
        file
    });
    let config = FILE.path().display().to_string();
    let mut all = vec![command.to_string(), config, "--format".into(), "json".into()];
    for set in settings {
        all.extend(["--set".to_string(), set.to_string()]);
    }
    all
}

fn on_file(folder: &Path) -> String {
    format!("eps.path={}", folder.display())
}

/// The losses of the steps in a run's output, and the weights' digest if the run ended.
fn results(text: &str) -> (Vec<(u64, f64)>, Option<String>) {
    let events = events(text);
    let step = |event: &&Value| {
        (event["step"].as_u64().expect("a number"), event["loss"].as_f64().expect("a number"))
    };
    let digest = of_kind(&events, "summary")
        .first()
        .map(|summary| summary["weights_digest"].as_str().expect("a digest").to_string());
    (of_kind(&events, "step").iter().map(step).collect(), digest)
}

/// Kills a run 50 times (10 for a quick answer) at random moments, and resumes it each time. Each
/// kill leaves a complete state, and the run ends with the losses and weights of one that was not
/// killed. The steps are enough for all kills, because each kill comes a few steps after the last.
#[test]
fn a_kill_costs_the_running_step_and_nothing_else() {
    let most = if crate::whole() { 25 } else { 5 };
    let all_steps: u64 = if crate::whole() { 120 } else { 40 };
    let steps = format!("step.steps={all_steps}");
    let steps = steps.as_str();
    let folder = tempfile::tempdir().expect("a place for files");
    let place = on_file(&folder.path().join("eps"));
    for clip in ["optimizer.epsilon=1e-8", "optimizer.clip_norm=0.5"] {
        let (expected, digest) = results(&good(&arguments("train", &[steps, clip])));
        let digest = digest.expect("it ended");
        let mut seed = 88172645463325252_u64;
        let mut reached = 0;
        let mut kills = 0;
        let mut ended = None;
        while ended.is_none() {
            let settings = [steps, clip, "eps.tier=file", &place];
            let mut arguments = arguments("train", &settings);
            if reached > 0 || kills > 0 {
                arguments.push("--resume".into());
            }
            let mut child = l2l(&arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
            let child = child.as_mut().expect("the program runs");
            let mut text = String::new();
            if kills < most {
                // The run is killed when it has written this many bytes: a random moment.
                seed ^= seed << 13;
                seed ^= seed >> 7;
                seed ^= seed << 17;
                let bytes = (seed % 1000) as usize;
                let mut some = vec![0; bytes];
                let out = child.stdout.as_mut().expect("a pipe");
                let mut read = 0;
                while read < bytes {
                    match out.read(&mut some[read..]).expect("a pipe") {
                        0 => break,
                        count => read += count,
                    }
                }
                child.kill().expect("a child of ours");
                kills += 1;
            } else {
                child.stdout.as_mut().expect("a pipe").read_to_string(&mut text).expect("a pipe");
            }
            let status = child.wait().expect("a child of ours");
            if status.signal().is_none() {
                let mut said = String::new();
                child.stderr.as_mut().expect("a pipe").read_to_string(&mut said).expect("text");
                assert!(status.success(), "{said}");
                if kills == most {
                    let (losses, digest) = results(&text);
                    let first = losses[0].0 as usize;
                    let last = losses.last().expect("some").0;
                    assert_eq!(losses, expected[first - 1..], "from step {first}");
                    assert_eq!(last, all_steps);
                    ended = digest;
                } else {
                    break; // it was faster than the kill
                }
            }
            reached += 1;
        }
        if let Some(ended) = ended {
            assert_eq!(ended, digest);
        }
        assert!(kills == most, "{kills} kills");
        fs::remove_dir_all(folder.path().join("eps")).expect("it is ours");
    }
}

#[test]
fn data_that_changed_on_the_disk_is_reported() {
    let folder = tempfile::tempdir().expect("a place for files");
    let eps = folder.path().join("eps");
    let place = on_file(&eps);
    let settings = |steps: &'static str| arguments("train", &[steps, "eps.tier=file", &place]);
    good(&settings("step.steps=2"));
    // A second run is refused, because it would replace the first one's state.
    let refused = output(&settings("step.steps=3"));
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{said}");
    assert!(said.contains("eps.path") && said.contains("--resume"), "{said}");
    let again = [settings("step.steps=3"), vec!["--resume".into()]].concat();
    let other = [again.clone(), vec!["--set".into(), "step.seed=1".into()]].concat();
    let said = String::from_utf8(output(&other).stderr).expect("text");
    assert!(said.contains("step.seed was 0, is 1"), "{said}");
    let shape = [again.clone(), vec!["--set".into(), "model.layers=2".into()]].concat();
    assert_eq!(output(&shape).status.code(), Some(2));

    // One bit of every 4 KiB is flipped, so that every part of every block is wrong.
    let blocks = eps.join("blocks");
    let mut file = OpenOptions::new().read(true).write(true).open(&blocks).expect("it is ours");
    let len = file.metadata().expect("it is there").len();
    for at in (5000..len).step_by(1 << 12) {
        let mut byte = [0];
        file.seek(SeekFrom::Start(at)).expect("inside");
        file.read_exact(&mut byte).expect("inside");
        file.seek(SeekFrom::Start(at)).expect("inside");
        file.write_all(&[byte[0] ^ 1]).expect("room");
    }
    let failed = output(&again);
    let said = String::from_utf8_lossy(&failed.stderr);
    assert_eq!(failed.status.code(), Some(1), "{said}");
    assert!(said.contains("is not what was written") && said.contains("block"), "{said}");
    assert!(!said.contains("is whole") && !said.contains("continue with --resume"), "{said}");

    // A file that was cut short gets its length back, but not its content.
    file.set_len(len / 2).expect("it is ours");
    assert_eq!(output(&again).status.code(), Some(1));

    // Both indexes are torn.
    for name in ["index.0", "index.1"] {
        fs::write(eps.join(name), "torn").expect("it is ours");
    }
    let refused = output(&again);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{said}");
    assert!(said.contains("index."), "{said}");
}

#[test]
fn a_disk_that_is_too_small_is_refused_before_anything() {
    let folder = tempfile::tempdir().expect("a place for files");
    let eps = folder.path().join("eps");
    let place = on_file(&eps);
    let settings =
        ["eps.tier=file", &place, "model.layers=20000", "model.hidden=1024", "model.heads=8"];
    let refused = output(&arguments("train", &settings));
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{said}");
    assert!(said.contains("eps.path") && said.contains("free"), "{said}");
    assert!(!eps.exists(), "nothing was made");
}

/// Two training runs cannot share a folder. Evaluation and generation use a file of their own.
#[test]
fn a_folder_belongs_to_one_run() {
    let folder = tempfile::tempdir().expect("a place for files");
    let eps = folder.path().join("eps");
    fs::create_dir_all(&eps).expect("it is ours");
    let lock = fs::File::create(eps.join("lock")).expect("it is ours");
    lock.lock().expect("nobody has it");
    let place = on_file(&eps);
    let refused = output(&arguments("train", &["step.steps=1", "eps.tier=file", &place]));
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{said}");
    assert!(said.contains("another run has it"), "{said}");
    drop(lock);

    let checkpoints = folder.path().join("checkpoints");
    let kept = format!("checkpoint.directory={}", checkpoints.display());
    good(&arguments("train", &["step.steps=2", "eps.tier=file", &place, &kept]));
    let evaluated = |more: &[&str]| {
        good(&arguments("eval", &[&[kept.as_str(), "data.validation=random"], more].concat()))
    };
    assert_eq!(evaluated(&["eps.tier=file", &place]), evaluated(&[]));
}

/// A refused run does not change the state on file. A new run's state replaces it only when the new
/// one is complete.
#[test]
fn a_state_stays_until_another_is_complete() {
    let folder = tempfile::tempdir().expect("a place for files");
    let eps = folder.path().join("eps");
    let place = on_file(&eps);
    let checkpoints = folder.path().join("checkpoints");
    let kept = format!("checkpoint.directory={}", checkpoints.display());
    let run = |more: &[&str], resume: bool| {
        let mut all = arguments("train", &[&["eps.tier=file", place.as_str()], more].concat());
        all.extend(resume.then(|| "--resume".to_string()));
        output(&all)
    };
    let steps_of = |output: &std::process::Output| {
        results(&String::from_utf8_lossy(&output.stdout)).0.iter().map(|(step, _)| *step).collect()
    };
    assert!(run(&["step.steps=2"], false).status.success());
    // A checkpoint of another run, further on.
    let other = ["step.steps=4", "optimizer.learning_rate=1e-3", &kept];
    good(&arguments("train", &other));
    assert_eq!(run(&["step.steps=5", &kept], true).status.code(), Some(2));
    let went_on: Vec<u64> = steps_of(&run(&["step.steps=3"], true));
    assert_eq!(went_on, [3], "the state is there still");
    // A checkpoint of this one, further on than the state: it takes its place.
    std::fs::remove_dir_all(&checkpoints).expect("it is ours");
    good(&arguments("train", &["step.steps=5", &kept]));
    let went_on: Vec<u64> = steps_of(&run(&["step.steps=6", &kept], true));
    assert_eq!(went_on, [6]);
    let whole = results(&good(&arguments("train", &["step.steps=7"]))).1;
    let resumed = run(&["step.steps=7", &kept], true);
    assert_eq!(results(&String::from_utf8_lossy(&resumed.stdout)).1, whole);
    // Both indexes gone, and a checkpoint there: it is gone on from.
    for name in ["index.0", "index.1"] {
        fs::write(eps.join(name), "torn").expect("it is ours");
    }
    let went_on: Vec<u64> = steps_of(&run(&["step.steps=8", &kept], true));
    assert_eq!(went_on, [8]);
    // Trials leave what is there.
    let before = fs::read(eps.join("index.0")).expect("it is ours");
    for _ in 0..2 {
        good(&arguments("bench", &["eps.tier=file", &place, "step.steps=2"]));
    }
    assert_eq!(fs::read(eps.join("index.0")).expect("it is ours"), before);
}

/// A run whose state cannot be sealed fails before its first step.
#[test]
fn a_state_that_cannot_be_sealed_is_reported() {
    let folder = tempfile::tempdir().expect("a place for files");
    let eps = folder.path().join("eps");
    let place = on_file(&eps);
    good(&arguments("train", &["step.steps=2", "eps.tier=file", &place]));
    let mut again = arguments("train", &["step.steps=3", "eps.tier=file", &place]);
    again.push("--resume".into());
    // The index of the state found is read, the other one's place is taken by a folder.
    let newest = ["index.0", "index.1"].into_iter().max_by_key(|name| sequence(&eps.join(name)));
    let newest = newest.expect("there are two");
    let older = if newest == "index.0" { "index.1" } else { "index.0" };
    fs::remove_file(eps.join(older)).expect("it is ours");
    fs::create_dir(eps.join(older)).expect("it is ours");
    let failed = output(&again);
    assert_ne!(failed.status.code(), Some(0), "{}", String::from_utf8_lossy(&failed.stderr));
}

fn sequence(index: &Path) -> u64 {
    let text = fs::read_to_string(index).expect("it is ours");
    let json = text.split_once('\n').expect("a digest, then the index").1;
    let index: Value = serde_json::from_str(json).expect("an index");
    index["sequence"].as_u64().expect("a number")
}
