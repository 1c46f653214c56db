//! The reference of a preference that a run computes before its first step: the same numbers as
//! columns with it, kept in checkpoints, and what is refused.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;

use async_trait::async_trait;
use l2l::config::{EpsTier, LoraConfig, ObjectiveKind, ReferenceKind};
use l2l::data::{Batch, Dataset};
use l2l::fabric::{self, Fabric};
use l2l::telemetry::{Observe, Slice, WorkKind};
use l2l::{Callbacks, Config, End, Error, Fitted, RunMessage, StopRequest, Trainer};
use serde_json::{Value, json};

use crate::preference::{answers, on_file};

/// A run on preferences of seven records.
fn config(folder: &Path) -> Config {
    let mut config = on_file(folder, &answers(7));
    config.objective.kind = ObjectiveKind::Dpo;
    config.optimizer.learning_rate = 1e-2;
    config.step.steps = Some(6);
    config
}

fn lora() -> Option<LoraConfig> {
    Some(LoraConfig { rank: Some(2), ..LoraConfig::default() })
}

/// The bits of all losses and norms of the steps that are left, and the digest of the weights.
async fn run(config: Config) -> (Vec<[u64; 2]>, String) {
    let (mut trainer, mut batches) = Trainer::open(config).await.expect("a config of ours");
    let mut bits = Vec::new();
    for _ in 0..6 {
        let batch = batches.next().await.expect("good records");
        let report = trainer.step(batch).await.expect("a step");
        bits.push([report.loss, report.grad_norm].map(f64::to_bits));
    }
    (bits, trainer.digest().await.expect("nothing fails here"))
}

/// The same records with the columns of a reference: the model as training begins.
async fn with_columns(config: &Config, folder: &Path) -> Config {
    let shape = l2l::shape_of(config).expect("a shape of ours");
    let (data, _) = Dataset::open(config, &shape).expect("good records");
    let mut trainer = Trainer::start(config.clone()).await.expect("a config of ours");
    let mut lines = answers(7);
    for (line, record) in lines.iter_mut().zip(0..) {
        let record = data.sequence(record).expect("it is there");
        assert!(record.reference.is_empty());
        // Another batch than the run's: on the CPU a row's bits do not depend on its neighbours.
        let batch = Batch::of_records(&[record]);
        let found = trainer.log_probabilities(batch).await.expect("it measures");
        line["ref_chosen_logps"] = json!(found[0]);
        line["ref_rejected_logps"] = json!(found[1]);
    }
    let other = folder.join("columns");
    fs::create_dir_all(&other).expect("a place for files");
    Config { data: on_file(&other, &lines).data, ..config.clone() }
}

#[tokio::test]
async fn the_first_loss_is_ln_2_and_columns_give_the_same_bits() {
    let folder = tempfile::tempdir().expect("a place for files");
    for lora in [None, lora()] {
        for kind in [ObjectiveKind::Dpo, ObjectiveKind::Ipo] {
            let mut config = config(folder.path());
            config.objective.kind = kind;
            config.train.lora = lora.clone();
            let measured = run(config.clone()).await;
            if kind == ObjectiveKind::Dpo {
                assert_eq!(f64::from_bits(measured.0[0][0]), std::f64::consts::LN_2);
                assert_ne!(measured.0[5][0], measured.0[0][0], "it learns");
            }
            let mut columns = with_columns(&config, folder.path()).await;
            assert_eq!(run(columns.clone()).await, measured);
            columns.objective.reference = Some(ReferenceKind::Columns);
            assert_eq!(run(columns.clone()).await, measured);
            // Then columns are not read.
            columns.objective.reference = Some(ReferenceKind::Before);
            assert_eq!(run(columns).await, measured);
        }
    }
}

/// Adapters that the run begins with are a part of the reference.
#[tokio::test]
async fn the_reference_has_the_adapters_that_the_run_begins_with() {
    let folder = tempfile::tempdir().expect("a place for files");
    let mut config = config(folder.path());
    config.train.lora = lora();
    let (mut trainer, mut batches) = Trainer::open(config.clone()).await.expect("one of ours");
    let mut losses = Vec::new();
    for _ in 0..3 {
        let batch = batches.next().await.expect("good records");
        losses.push(trainer.step(batch).await.expect("a step").loss);
    }
    assert_ne!(losses[2], losses[0]);
    let adapters = folder.path().join("adapters");
    trainer.checkpoint(&adapters).await.expect("a place for files");
    config.train.lora = Some(LoraConfig { path: Some(adapters), ..LoraConfig::default() });
    let (mut trainer, mut batches) = Trainer::open(config).await.expect("adapters of ours");
    let batch = batches.next().await.expect("good records");
    assert_eq!(trainer.step(batch).await.expect("a step").loss, std::f64::consts::LN_2);
}

/// Each record of a batch has its own reference: with several files, weights and a part held out,
/// in each epoch.
#[tokio::test]
async fn each_record_has_its_reference() {
    let folder = tempfile::tempdir().expect("a place for files");
    let mut config = config(folder.path());
    let more = folder.path().join("more.jsonl");
    let lines = answers(19)[7..].iter().map(|line| format!("{line}\n")).collect::<String>();
    fs::write(&more, lines).expect("a place for files");
    let first = json!({ "path": folder.path().join("pairs.jsonl"), "weight": 2.0 });
    let files = json!([first, { "path": more, "weight": 0.5 }]);
    config.data.train = serde_json::from_value(files).expect("files with weights");
    config.data.validation_split = Some(0.3);
    let (mut trainer, mut batches) = Trainer::open(config).await.expect("a config of ours");
    for _ in 0..20 {
        let batch = batches.next().await.expect("good records");
        let own = trainer.log_probabilities(batch.clone()).await.expect("it measures");
        assert_eq!(batch.clone().with_reference(own), batch);
    }
}

/// Each rank computes the whole reference. With micro-batches of one answer, records lie on both
/// ranks, which share what they measure.
#[test]
fn ranks_have_the_reference_of_one_process() {
    let folder = tempfile::tempdir().expect("a place for files");
    for micro_batch in [2, 1] {
        let mut config = config(folder.path());
        (config.parallel.groups, config.step.micro_batch) = (2, micro_batch);
        runs_are_the_same_on_ranks(&config);
    }
}

fn runs_are_the_same_on_ranks(config: &Config) {
    let runtime = || tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let on = |fabric: Option<fabric::ThreadFabric>| {
        let mut builder = Trainer::builder(config.clone());
        if let Some(fabric) = fabric {
            builder = builder.fabric(Arc::new(fabric) as Arc<dyn Fabric>);
        }
        runtime().block_on(async {
            let (mut trainer, mut batches) = builder.open().await.expect("a config of ours");
            let mut losses = Vec::new();
            for _ in 0..3 {
                let batch = batches.next().await.expect("good records");
                losses.push(trainer.step(batch).await.expect("a step").loss);
            }
            let digest = trainer.digest().await.expect("nothing fails here");
            trainer.stop().await.expect("nothing fails here");
            (losses, digest)
        })
    };
    let alone = on(None);
    assert_eq!(alone.0[0], std::f64::consts::LN_2);
    let on = &on;
    let all: Vec<_> = thread::scope(|scope| {
        let ranks = fabric::threads(2).into_iter();
        let ranks: Vec<_> = ranks.map(|fabric| scope.spawn(move || on(Some(fabric)))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).collect()
    });
    assert_eq!(all, [alone.clone(), alone]);
}

/// The events and messages of a run, which stops after a step.
#[derive(Default)]
pub(crate) struct Recorder {
    pub(crate) events: Vec<Value>,
    messages: Vec<String>,
    stop_after: Option<u64>,
    /// It stops before the first batch of the reference.
    stops_at_once: bool,
    stop: StopRequest,
}

#[async_trait]
impl Callbacks for Recorder {
    fn event(&mut self, event: &Value) {
        if event["step"].as_u64().is_some_and(|step| Some(step) == self.stop_after) {
            self.stop.stop();
        }
        self.events.push(event.clone());
    }

    fn message(&mut self, message: &RunMessage) {
        if self.stops_at_once && format!("{message:?}").contains("reference: 0 of") {
            self.stop.stop();
        }
        self.messages.push(format!("{message:?}"));
    }
}

impl Recorder {
    /// The losses of one kind of event.
    pub(crate) fn losses(&self, kind: &str) -> Vec<f64> {
        let of_kind = self.events.iter().filter(|event| event["event"] == kind);
        of_kind.map(|event| event["loss"].as_f64().expect("a loss")).collect()
    }
}

pub(crate) async fn fit(
    config: &Config,
    stop_after: Option<u64>,
) -> (Result<Fitted, Error>, Recorder) {
    let stops_at_once = stop_after == Some(0);
    let mut recorder = Recorder { stop_after, stops_at_once, ..Recorder::default() };
    let fit = Trainer::fit(config.clone()).resume(true).stop(recorder.stop.clone());
    (fit.run(&mut recorder).await, recorder)
}

/// A run with validation and checkpoints below a folder.
pub(crate) fn whole(folder: &Path) -> Config {
    let mut config = config(folder);
    let held = folder.join("held.jsonl");
    let lines = answers(10)[7..].iter().map(|line| format!("{line}\n")).collect::<String>();
    fs::write(&held, lines).expect("a place for files");
    config.data.validation = Some(held.display().to_string().into());
    config.validation.every_steps = Some(2);
    config.checkpoint.directory = Some(folder.join("checkpoints"));
    config
}

#[tokio::test]
async fn a_resumed_run_has_the_same_reference() {
    for tier in [EpsTier::Memory, EpsTier::File] {
        let folders = [(); 2].map(|()| tempfile::tempdir().expect("a place for files"));
        let [unbroken, broken] = folders.each_ref().map(|folder| {
            let mut config = whole(folder.path());
            config.eps.tier = tier;
            config.eps.path = (tier == EpsTier::File).then(|| folder.path().join("eps"));
            config
        });
        let (expected, all) = fit(&unbroken, None).await;
        let expected = expected.expect("a run of ours");
        let of_reference = |event: &&Value| event["event"] == "reference";
        let event = all.events.iter().find(of_reference).expect("an event");
        assert_eq!(event["sequences"], 2 * (7 + 3));
        assert!(event["seconds"].as_f64().is_some_and(|seconds| seconds > 0.0));
        assert!(all.messages.contains(&"Info(\"reference: 0 of 4 batches\")".to_string()));
        assert_eq!(all.losses("step")[0], std::f64::consts::LN_2);

        let (_, first) = fit(&broken, Some(3)).await;
        let (rest, second) = fit(&broken, None).await;
        let rest = rest.expect("it resumes");
        assert_eq!(second.events.iter().filter(of_reference).count(), 0);
        assert_eq!(rest.weights_digest, expected.weights_digest);
        for kind in ["step", "validation"] {
            let both = [first.losses(kind), second.losses(kind)].concat();
            assert_eq!(both, all.losses(kind), "{kind}");
        }
        assert_eq!(all.losses("step").len(), 6);
    }
}

/// A run that is stopped before its reference is complete keeps none of it, and begins anew.
#[tokio::test]
async fn a_reference_that_is_cut_off_is_computed_anew() {
    let folder = tempfile::tempdir().expect("a place for files");
    let mut config = whole(folder.path());
    config.eps.tier = EpsTier::File;
    config.eps.path = Some(folder.path().join("eps"));
    let (stopped, first) = fit(&config, Some(0)).await;
    assert_eq!(stopped.expect("it stops well").end, End::Stopped);
    let is_of_reference = |event: &Value| event["event"] == "reference";
    assert!(first.losses("step").is_empty());
    assert!(!first.events.iter().any(is_of_reference));
    let (_, second) = fit(&config, None).await;
    assert!(second.events.iter().any(is_of_reference));
    assert_eq!(second.losses("step")[0], std::f64::consts::LN_2);
}

#[tokio::test]
async fn a_state_without_the_reference_of_its_data_is_refused() {
    let folder = tempfile::tempdir().expect("a place for files");
    let config = config(folder.path());
    let place = folder.path().join("without");
    let columns = with_columns(&config, folder.path()).await;
    let (mut trainer, mut batches) = Trainer::open(columns).await.expect("a config of ours");
    trainer.step(batches.next().await.expect("good records")).await.expect("a step");
    trainer.checkpoint(&place).await.expect("a place for files");
    let resume = |config: Config, from: &Path| {
        let from = from.to_path_buf();
        async move {
            let opened = Trainer::builder(config).resume(from).with_changes().open().await;
            opened.map(drop).expect_err("it is refused").to_string()
        }
    };
    let refused = resume(config.clone(), &place).await;
    let says = "reference.safetensors: is missing in the state that the run resumes from";
    assert!(refused.contains(says), "{refused}");
    assert!(refused.contains("set model.path to the checkpoint to begin a new run"), "{refused}");

    let place = folder.path().join("with");
    let (mut trainer, mut batches) = Trainer::open(config.clone()).await.expect("one of ours");
    trainer.step(batches.next().await.expect("good records")).await.expect("a step");
    trainer.checkpoint(&place).await.expect("a place for files");
    let other = folder.path().join("other");
    fs::create_dir_all(&other).expect("a place for files");
    let other = Config { data: on_file(&other, &answers(6)).data, ..config.clone() };
    let refused = resume(other, &place).await;
    assert!(refused.contains("is of other data, and data"), "{refused}");
    let (trainer, _) = Trainer::builder(config).resume(&place).open().await.expect("it resumes");
    assert_eq!(trainer.progress().step, 1);

    fs::write(place.join("reference.safetensors"), "not one").expect("a file of ours");
    let shape = l2l::shape_of(trainer.config()).expect("a shape of ours");
    let (mut data, _) = Dataset::open(trainer.config(), &shape).expect("good records");
    let error = data.refer_to(&place).expect_err("it is no file of tables");
    assert!(error.to_string().contains("reference.safetensors"), "{error}");
}

#[tokio::test]
async fn columns_of_some_records_are_refused() {
    let refused = |reference: Option<ReferenceKind>, change: &dyn Fn(&mut Vec<Value>)| {
        let folder = tempfile::tempdir().expect("a place for files");
        let mut lines = answers(3);
        change(&mut lines);
        let mut config = on_file(folder.path(), &lines);
        config.objective.kind = ObjectiveKind::Hinge;
        config.objective.reference = reference;
        let shape = l2l::shape_of(&config).expect("a shape of ours");
        Dataset::open(&config, &shape).map(drop).expect_err("it is refused").to_string()
    };
    let both = |line: &mut Value| {
        line["ref_chosen_logps"] = json!(-1.0);
        line["ref_rejected_logps"] = json!(-2.5);
    };
    let found = refused(None, &|lines| both(&mut lines[2]));
    assert!(found.contains("are in some records and not in others"), "{found}");
    assert!(found.contains("line 3"), "{found}");
    let found = refused(None, &|lines| lines[1]["ref_chosen_logps"] = json!(-1.0));
    assert!(found.contains("the record has one of them alone"), "{found}");
    let found = refused(Some(ReferenceKind::Columns), &|_| {});
    assert!(found.contains("objective.reference = \"columns\" needs both"), "{found}");
}

/// The bytes of weights that were uploaded.
#[derive(Default)]
pub(crate) struct Weights(pub(crate) AtomicU64);

impl Observe for Weights {
    fn heard(&self, slice: &Slice) {
        if slice.kind == WorkKind::Weights {
            self.0.fetch_add(slice.bytes, Relaxed);
        }
    }
}

/// A step of a preference uploads the weights that a step of fine-tuning on its answers uploads.
/// Beside them it uploads the head's input and its statistics once more, for the backward pass.
#[tokio::test]
async fn a_step_uploads_what_fine_tuning_does() {
    let folder = tempfile::tempdir().expect("a place for files");
    let config = config(folder.path());
    let shape = l2l::shape_of(&config).expect("a shape of ours");
    let (data, _) = Dataset::open(&config, &shape).expect("good records");
    let records = [0, 1].map(|record| data.sequence(record).expect("it is there"));
    let batch = Batch::of_records(&records);
    let mut plain = config.clone();
    plain.objective = Default::default();
    plain.step.batch = 4;
    (plain.model.dropout, plain.data.train) = (Some(0.0), "random".into());
    let rows = records.iter().map(|record| record.tokens.len() as u64).sum::<u64>();
    let mut moved = Vec::new();
    for (config, batch) in [(config, batch.clone().with_reference(vec![-1.0; 4])), (plain, batch)] {
        let weights = Arc::new(Weights::default());
        let builder = Trainer::builder(config).observe(weights.clone());
        let mut trainer = builder.start().await.expect("a config of ours");
        for _ in 0..3 {
            trainer.step(batch.clone()).await.expect("a step");
        }
        let all = trainer.stop().await.expect("nothing fails here").bytes_uploaded;
        moved.push((weights.0.load(Relaxed), all));
    }
    assert!(moved[0].0 > 0);
    assert_eq!(moved[0].0, moved[1].0, "weights");
    assert_eq!(moved[0].1, moved[1].1 + 3 * rows * 4 * (32 + 4));
}

/// `l2l eval` reads the reference of a checkpoint.
#[cfg(feature = "cli")]
#[tokio::test]
async fn eval_takes_the_reference_of_the_checkpoint() {
    use crate::program::{good, output};
    let folder = tempfile::tempdir().expect("a place for files");
    let config = whole(folder.path());
    let (fitted, recorder) = fit(&config, None).await;
    fitted.expect("a run of ours");
    let file = folder.path().join("config.toml");
    let text =
        |path: &Option<std::path::PathBuf>| path.as_ref().expect("set").display().to_string();
    let held = folder.path().join("held.jsonl").display().to_string();
    let train = folder.path().join("pairs.jsonl").display().to_string();
    let directory = text(&config.checkpoint.directory);
    let toml = format!(
        "model = {{ layers = 2, hidden = 32, heads = 2 }}\n\
         data = {{ train = \"{train}\", validation = \"{held}\", sequence_length = 64 }}\n\
         step = {{ batch = 2, micro_batch = 2 }}\n\
         objective.kind = \"dpo\"\n\
         checkpoint.directory = \"{directory}\"\n"
    );
    fs::write(&file, toml).expect("a file of ours");
    let at = file.display().to_string();
    let found: Value =
        serde_json::from_str(&good(&["eval", &at, "--format", "json"])).expect("an object");
    assert_eq!(found["loss"].as_f64(), recorder.losses("validation").last().copied());
    let other = folder.path().join("other.jsonl");
    fs::write(&other, format!("{}\n", answers(20)[19])).expect("a file of ours");
    let set = format!("data.validation={}", other.display());
    let refused = output(&["eval", &at, "--set", &set]);
    assert!(!refused.status.success());
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(said.contains("reference.safetensors has none of these records"), "{said}");
}
