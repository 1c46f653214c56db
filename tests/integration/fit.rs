//! `Trainer::fit` from a program: it gets the files and events that `l2l train` gets.

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use async_trait::async_trait;
use l2l::inference::Evaluation;
use l2l::{Callbacks, Config, End, Error, Fitted, RunMessage, StepReport, StopRequest, Trainer};
use serde_json::Value;

use crate::program::{events, good};

/// A small run with everything that a config can ask for between steps.
fn config(folder: &Path, more: &str) -> PathBuf {
    let text = folder.join("some.txt");
    fs::write(&text, "to be or not to be, that is the question. ".repeat(20)).expect("ours");
    let at = folder.display();
    let path = folder.join("config.toml");
    let config = format!(
        "model = {{ layers = 2, hidden = 32, heads = 4 }}\n\
         data = {{ train = \"{at}/some.txt\", sequence_length = 16 }}\n\
         step = {{ batch = 4, micro_batch = 3, steps = 7 }}\n\
         validation = {{ every_steps = 2, batches = 2, patience = 2 }}\n\
         checkpoint = {{ directory = \"{at}/checkpoints\", every_steps = 3, keep = 1 }}\n\
         log = {{ file = \"{at}/deep/log.jsonl\", tensorboard = \"{at}/board\" }}\n\
         metrics = {{ run = \"fit\", file = \"{at}/last.prom\" }}\n{more}"
    );
    fs::write(&path, config).expect("ours");
    path
}

/// Everything that callbacks were called with.
#[derive(Default)]
struct Recorder {
    events: Vec<Value>,
    calls: Vec<String>,
    stop_after: Option<(u64, StopRequest)>,
}

#[async_trait]
impl Callbacks for Recorder {
    fn started(&mut self, trainer: &Trainer, steps: u64) {
        self.calls.push(format!("started at {} of {steps}", trainer.progress().step));
    }

    async fn step(
        &mut self,
        _: &mut Trainer,
        report: &StepReport,
    ) -> Result<ControlFlow<()>, Error> {
        self.calls.push(format!("step {}", report.step));
        if let Some((last, stop)) = &self.stop_after
            && *last == report.step
        {
            stop.stop();
        }
        Ok(ControlFlow::Continue(()))
    }

    fn validation(&mut self, step: u64, evaluation: &Evaluation) {
        assert!(evaluation.labelled > 0);
        self.calls.push(format!("validation {step}"));
    }

    fn checkpoint(&mut self, directory: &Path) {
        let name = directory.file_name().expect("it has one").display();
        self.calls.push(format!("checkpoint {name}"));
    }

    fn event(&mut self, event: &Value) {
        self.events.push(event.clone());
    }

    fn message(&mut self, message: &RunMessage) {
        self.calls.push(format!("{message:?}"));
    }

    fn ended(&mut self, outcome: Result<&Fitted, &Error>) {
        self.calls.push(format!("ended well: {}", outcome.is_ok()));
    }
}

async fn fit(path: &Path, resume: bool, recorder: &mut Recorder) -> Result<Fitted, Error> {
    let fit = Trainer::fit(Config::read(path)?).resume(resume);
    let stop = recorder.stop_after.as_ref().map(|(_, stop)| stop.clone());
    fit.stop(stop.unwrap_or_default()).run(recorder).await
}

/// Events but for what follows from the clock and the process.
fn timeless(events: &[Value]) -> Vec<Value> {
    let mut events = events.to_vec();
    for event in &mut events {
        for key in ["seconds", "exposed_wait_seconds", "host_rss_bytes", "device_peak_bytes"] {
            event.as_object_mut().expect("an object").remove(key);
        }
    }
    events
}

/// Files below a folder with their sizes; sizes are 0 where they depend on the clock.
fn files(folder: &Path) -> Vec<(String, u64)> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(at) = folders.pop() {
        for entry in fs::read_dir(&at).expect("it is there") {
            let path = entry.expect("ours").path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let name = path.strip_prefix(folder).expect("it is below").display().to_string();
            let name = name.split(".tfevents").next().expect("a first part").to_string();
            let has_times = ["log.jsonl", "last.prom", "config.toml", "l2l.json"];
            let is_timed = has_times.iter().any(|timed| name.ends_with(timed));
            let bytes = path.metadata().expect("it is there").len();
            found.push((name, if is_timed { 0 } else { bytes }));
        }
    }
    found.sort();
    found
}

#[tokio::test]
async fn a_program_gets_what_the_command_gets() {
    let [by_command, by_program] = [(); 2].map(|()| tempfile::tempdir().expect("a folder"));
    let path = config(by_command.path(), "");
    let shown = events(&good(&["train", path.to_str().expect("UTF-8"), "--format", "json"]));
    let path = config(by_program.path(), "");
    let mut recorder = Recorder::default();
    let fitted = fit(&path, false, &mut recorder).await.expect("a case of ours");
    assert_eq!(fitted.end, End::Complete);
    assert_eq!(timeless(&recorder.events), timeless(&shown));
    assert_eq!(shown.last().expect("a summary")["weights_digest"], fitted.weights_digest);
    let log = fs::read_to_string(by_program.path().join("deep/log.jsonl")).expect("it is there");
    assert_eq!(events(&log), recorder.events);
    assert_eq!(files(by_program.path()), files(by_command.path()));
    let calls = [
        "started at 0 of 7",
        "Info(\"48 sequences to train on, 5 held out; 7 steps, 0.6 epochs; 41856 of 41856 \
         parameters are trained\")",
        "step 1",
        "step 2",
        "validation 2",
        "step 3",
    ];
    // Checkpoints are written while training goes on: each is told of after its step, in order.
    let is_checkpoint = |call: &&String| call.starts_with("checkpoint ");
    let (checkpoints, others): (Vec<&String>, Vec<&String>) =
        recorder.calls.iter().partition(is_checkpoint);
    assert_eq!(others[..calls.len()], calls);
    assert_eq!(checkpoints[..2], ["checkpoint best-00000002", "checkpoint step-00000003"]);
    let at = |call: &str| recorder.calls.iter().position(|one| one == call);
    assert!(at("checkpoint best-00000002") > at("validation 2"));
    assert!(at("checkpoint step-00000003") > at("step 3"));
    assert_eq!(recorder.calls.last().expect("an end"), "ended well: true");
}

#[tokio::test]
async fn patience_ends_a_run_early() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = config(folder.path(), "optimizer = { learning_rate = 0 }\n");
    let mut recorder = Recorder::default();
    let fitted = fit(&path, false, &mut recorder).await.expect("a case of ours");
    assert_eq!((fitted.end, fitted.summary.steps), (End::Early, 6));
    let early = "Info(\"stops early at step 6: no validation was better\")".to_string();
    assert!(recorder.calls.contains(&early), "{:?}", recorder.calls);
}

/// A run that was stopped has a checkpoint, is not begun again by mistake, and resumes to the same
/// end as one that was not stopped.
#[tokio::test]
async fn a_stopped_run_resumes() {
    let [whole, stopped] = [(); 2].map(|()| tempfile::tempdir().expect("a folder"));
    let path = config(whole.path(), "");
    let expected = fit(&path, false, &mut Recorder::default()).await.expect("a case of ours");
    let path = config(stopped.path(), "");
    let stop_after = Some((4, StopRequest::new()));
    let mut recorder = Recorder { stop_after, ..Recorder::default() };
    let fitted = fit(&path, true, &mut recorder).await.expect("a case of ours");
    assert_eq!((fitted.end, fitted.summary.steps), (End::Stopped, 4));
    assert!(stopped.path().join("checkpoints/step-00000004/l2l.json").exists());
    let again = fit(&path, false, &mut Recorder::default()).await.expect_err("it would be lost");
    assert!(again.to_string().contains("step-00000004"), "{again}");
    let mut recorder = Recorder::default();
    let fitted = fit(&path, true, &mut recorder).await.expect("a case of ours");
    assert_eq!(fitted.weights_digest, expected.weights_digest);
    // The validation that the stop cut off comes first.
    assert_eq!(recorder.calls[3], "validation 4", "{:?}", recorder.calls);
    assert_eq!(fitted.end, End::Complete);
}

/// A run may be handed to another thread.
#[test]
fn a_run_can_be_spawned() {
    fn is_send<T: Send>(_: &T) {}
    let run = async { Trainer::fit(Config::default()).run(&mut ()).await };
    is_send(&run);
}
