//! Losses of a chosen and a rejected answer: the numbers of PyTorch in f64
//! (`goldens/preference.py`), records and what is refused of them.

use std::fs;
use std::path::Path;

use l2l::config::{BestMetric, EpsTier, ObjectiveKind, ScheduleKind, TooLong};
use l2l::data::{Batch, Batches, Dataset, Sequence};
use l2l::{Config, Error, Trainer};
use serde_json::{Value, json};

use crate::pytorch::case;

fn golden() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/preference.json");
    let text = fs::read_to_string(path).expect("it is committed");
    serde_json::from_str(&text).expect("it is JSON")
}

fn floats(list: &Value) -> Vec<f64> {
    let list = list.as_array().expect("a list");
    list.iter().map(|number| number.as_f64().expect("a number")).collect()
}

/// The records of a family's golden: two sequences each that have a label.
fn records(config: &Config, reference: &Value) -> Vec<Sequence> {
    let folder = config.model.path.as_ref().expect("a case has one");
    let text = fs::read_to_string(folder.join("data.jsonl")).expect("it is committed");
    let ids = |line: &Value, key: &str| -> Vec<i64> {
        line[key].as_array().expect("a list").iter().map(|id| id.as_i64().expect("an id")).collect()
    };
    let sequences: Vec<Sequence> = text
        .lines()
        .map(|line| {
            let line: Value = serde_json::from_str(line).expect("it is JSON");
            let tokens = ids(&line, "input_ids").into_iter().map(|id| id as u32).collect();
            let labels = ids(&line, "labels").into_iter().map(|id| id as i32).collect();
            Sequence { tokens, labels, ..Sequence::default() }
        })
        .filter(|one| one.labels[1..].iter().any(|label| *label >= 0))
        .collect();
    let pair = |(pair, reference): (&[Sequence], &Value)| Sequence {
        tokens: [&pair[0].tokens[..], &pair[1].tokens].concat(),
        labels: [&pair[0].labels[..], &pair[1].labels].concat(),
        documents: vec![pair[0].tokens.len(), pair[1].tokens.len()],
        reference: floats(reference),
        ..Sequence::default()
    };
    sequences.chunks_exact(2).zip(reference.as_array().expect("a list")).map(pair).collect()
}

async fn check(config: Config, records: &[Sequence], expected: &Value, name: &str) -> String {
    let batches = records.chunks_exact(config.step.batch).map(Batch::of_records);
    check_steps(config, batches, expected, name).await
}

/// Runs the steps of a golden, and returns the digest of the weights.
pub(crate) async fn check_steps(
    config: Config,
    batches: impl Iterator<Item = Batch>,
    expected: &Value,
    name: &str,
) -> String {
    let losses = floats(&expected["losses"]);
    let norms = floats(&expected["norms"]);
    assert_eq!(losses.len(), 10, "{name}");
    let mut trainer = Trainer::start(config).await.expect("a case of ours");
    for (step, batch) in batches.take(losses.len()).enumerate() {
        let report = trainer.step(batch).await.expect("nothing fails here");
        let loss = losses[step];
        assert!((report.loss - loss).abs() < 2e-5, "{name} {step}: {} {loss}", report.loss);
        let norm = norms[step];
        let error = (report.grad_norm - norm).abs();
        assert!(error <= 1e-4 * norm, "{name} {step}: norm {} {norm}", report.grad_norm);
    }
    trainer.digest().await.expect("nothing fails here")
}

#[tokio::test]
async fn losses_of_preferences_are_pytorchs() {
    let golden = golden();
    for family in ["llama", "qwen3", "mistral", "tied"] {
        let (mut config, _) = case(family);
        let records = records(&config, &golden[family]["reference"]);
        config.step.batch = golden["records"].as_u64().expect("a number") as usize;
        config.optimizer.clip_norm = None;
        for (name, settings) in golden["settings"].as_object().expect("an object") {
            config.objective = serde_json::from_value(settings.clone()).expect("a config's keys");
            let expected = &golden[family][name];
            let name = format!("{family} {name}");
            let relay = check(config.clone(), &records, expected, &name).await;
            // A micro-batch of one sequence has no whole record: the loss waits for the step.
            let mut others = config.clone();
            others.step.micro_batch = 1;
            others.parallel.groups = 2;
            others.eps.tier = EpsTier::Memory;
            check(others, &records, expected, &name).await;
            let mut resident = config.clone();
            resident.schedule.kind = ScheduleKind::Resident;
            assert_eq!(check(resident, &records, expected, &name).await, relay, "{name}");
        }
    }
}

/// The model as training begins, compared with itself: ln 2 to the bit.
#[tokio::test]
async fn the_first_loss_of_dpo_is_ln_2() {
    let golden = golden();
    let (mut config, _) = case("llama");
    config.objective.kind = ObjectiveKind::Dpo;
    config.step.batch = 4;
    let all = records(&config, &golden["llama"]["reference"]);
    let batch = Batch::of_records(&all[..4]);
    for micro_batch in [1, 2, 8] {
        config.step.micro_batch = micro_batch;
        let mut trainer = Trainer::start(config.clone()).await.expect("a case of ours");
        let own = trainer.log_probabilities(batch.clone()).await.expect("it measures");
        let known = batch.clone().with_reference(own);
        let report = trainer.step(known.clone()).await.expect("a step");
        assert_eq!(report.loss, std::f64::consts::LN_2);
        let later = trainer.evaluate([Ok(known)]).await.expect("it evaluates");
        assert_eq!(later.records, Some(4));
        assert!(later.loss < report.loss, "it learns: {}", later.loss);
    }
}

/// The metrics are those of the policy before the step, against the reference.
#[tokio::test]
async fn rewards_are_told_of_steps_and_validations() {
    let golden = golden();
    let (mut config, _) = case("llama");
    config.step.batch = 4;
    let all = records(&config, &golden["llama"]["reference"]);
    let batch = Batch::of_records(&all[..4]);
    for kind in ["dpo", "ipo", "hinge", "simpo", "cpo", "orpo"] {
        config.objective = serde_json::from_value(json!({ "kind": kind })).expect("a kind");
        let mut trainer = Trainer::start(config.clone()).await.expect("a case of ours");
        let own = trainer.log_probabilities(batch.clone()).await.expect("it measures");
        let beta = if kind == "simpo" { 2.0 } else { 0.1 };
        let reward = |answer: usize| {
            let record = &all[answer / 2];
            let from = if answer.is_multiple_of(2) { 0 } else { record.documents[0] };
            let labels = &record.labels[from..from + record.documents[answer % 2]];
            let tokens = labels[1..].iter().filter(|label| **label >= 0).count() as f64;
            match kind {
                "dpo" | "ipo" | "hinge" => beta * (own[answer] - record.reference[answer % 2]),
                "cpo" => beta * own[answer],
                _ => beta * own[answer] / tokens,
            }
        };
        let margins: Vec<f64> = (0..4).map(|at| reward(2 * at) - reward(2 * at + 1)).collect();
        let right = margins.iter().filter(|margin| **margin > 0.0).count() as f64 / 4.0;
        let margin = margins.iter().sum::<f64>() / 4.0;
        let chosen = (0..4).map(|at| reward(2 * at)).sum::<f64>() / 4.0;
        let evaluation = trainer.evaluate([Ok(batch.clone())]).await.expect("it evaluates");
        let report = trainer.step(batch.clone()).await.expect("a step");
        let close = |a: f64, b: f64| (a - b).abs() < 1e-9;
        for metrics in [evaluation.metrics, report.metrics] {
            let value = |name| metrics.value(name).expect("a metric");
            assert_eq!(value("reward_accuracy"), right, "{kind}");
            assert!(close(value("reward_margin"), margin), "{kind} {metrics:?} {margin}");
            assert!(close(value("reward_chosen"), chosen), "{kind} {metrics:?} {chosen}");
            let rejected = value("reward_chosen") - value("reward_margin");
            assert!(close(value("reward_rejected"), rejected), "{kind} {metrics:?}");
        }
        assert_eq!(report.event()["reward_accuracy"], json!(right));
        assert_eq!(evaluation.event(1)["reward_accuracy"], json!(right));
        assert_eq!(evaluation.value(BestMetric::RewardAccuracy), Some(right));
    }
}

/// Answers that are texts and begin alike have a prompt.
#[test]
fn the_prompt_of_answers_that_begin_alike_is_found() {
    let folder = tempfile::tempdir().expect("a place for files");
    let lines = [
        json!({ "chosen": "say 1: é one", "rejected": "say 1: è none" }),
        json!({ "chosen": "say 2: 2", "rejected": "say 2: nothing" }),
    ];
    let config = on_file(folder.path(), &lines);
    let shape = l2l::shape_of(&config).expect("a shape of ours");
    let (data, _) = Dataset::open(&config, &shape).expect("good records");
    let learnt = |index| {
        let one = data.sequence(index).expect("it is there");
        let (chosen, rejected) = one.labels.split_at(one.documents[0]);
        [chosen, rejected].map(|labels| labels.iter().filter(|label| **label >= 0).count())
    };
    // The space belongs to the answers, as in TRL.
    assert_eq!(learnt(0), [" é one".len(), " è none".len()]);
    assert_eq!(learnt(1), [" 2".len(), " nothing".len()]);
}

/// A run of records in a file.
pub(crate) fn on_file(folder: &Path, lines: &[Value]) -> Config {
    let at = folder.join("pairs.jsonl");
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    fs::write(&at, text).expect("a place for files");
    let mut config = Config::default();
    (config.model.layers, config.model.hidden, config.model.heads) = (Some(2), Some(32), Some(2));
    config.data.train = at.display().to_string().into();
    config.data.sequence_length = Some(64);
    config.step.batch = 2;
    config.step.micro_batch = 2;
    config.objective.kind = ObjectiveKind::Simpo;
    config
}

pub(crate) fn answers(count: usize) -> Vec<Value> {
    let line = |n: usize| {
        let prompt = format!("say {n}: ");
        json!({ "prompt": prompt, "chosen": "1", "rejected": "none", "extra": n })
    };
    (0..count).map(line).collect()
}

#[tokio::test]
async fn records_of_texts_are_learnt() {
    let folder = tempfile::tempdir().expect("a place for files");
    let mut config = on_file(folder.path(), &answers(6));
    config.optimizer.learning_rate = 1e-2;
    let shape = l2l::shape_of(&config).expect("a shape of ours");
    let (data, _) = Dataset::open(&config, &shape).expect("good records");
    assert_eq!((data.len(), data.unused_columns()), (Some(6), &["extra".to_string()][..]));
    let first = data.sequence(0).expect("it is there");
    assert_eq!(first.documents, [8, 11], "the prompt and each answer");
    let learnt = first.labels.iter().filter(|label| **label >= 0).count();
    assert_eq!(learnt, 1 + 4, "the answers alone");
    let mut batches = Batches::open(&config).expect("good records");
    let mut trainer = Trainer::start(config).await.expect("a config of ours");
    let mut losses = Vec::new();
    for _ in 0..12 {
        let batch = batches.next().await.expect("good records");
        losses.push(trainer.step(batch).await.expect("a step").loss);
    }
    assert!(losses[11] < 0.2 * losses[0], "{losses:?}");
}

#[test]
fn records_that_are_no_preferences_are_refused_by_name() {
    let refused = |change: &dyn Fn(&mut Value, &mut Config), says: &str| {
        let folder = tempfile::tempdir().expect("a place for files");
        let mut lines = answers(2);
        let mut config = on_file(folder.path(), &lines);
        change(&mut lines[1], &mut config);
        let kind = config.objective.kind;
        let config = Config { data: config.data, ..on_file(folder.path(), &lines) };
        let config = Config {
            objective: l2l::config::ObjectiveConfig { kind, ..config.objective.clone() },
            ..config
        };
        let shape = l2l::shape_of(&config).expect("a shape of ours");
        let error: Error = Dataset::open(&config, &shape).map(drop).expect_err("it is refused");
        assert!(error.to_string().contains(says), "{error}");
    };
    let without = |name: &'static str| {
        move |line: &mut Value, _: &mut Config| {
            line.as_object_mut().expect("an object").remove(name);
        }
    };
    refused(&without("rejected"), "rejected is missing: objective.kind is a preference");
    refused(&without("prompt"), "prompt is missing, which answers that are texts need");
    refused(&|line, _| line["chosen"] = json!(""), "chosen: completion is empty");
    refused(&|line, _| line["rejected"] = json!("x".repeat(99)), "rejected: it has");
    refused(
        &|line, _| line["chosen"] = json!([{"role": "user", "content": "x"}]),
        "all must be texts, or all messages",
    );
    refused(&|line, _| line["ref_chosen_logps"] = json!(1.5), "ref_chosen_logps is 1.5");
    refused(
        &|_, config| config.data.train = "built-in".into(),
        "needs records with the columns chosen and rejected",
    );
}

/// A record of which one answer is too long is left out, and a bad one is refused all the same.
#[test]
fn records_that_are_too_long_are_dropped() {
    let folder = tempfile::tempdir().expect("a place for files");
    let mut lines = answers(4);
    lines[1]["rejected"] = json!("x".repeat(99));
    let mut config = on_file(folder.path(), &lines);
    config.data.too_long = TooLong::Drop;
    let open = |config: &Config| {
        let shape = l2l::shape_of(config).expect("a shape of ours");
        Dataset::open(config, &shape).map(|(data, _)| data)
    };
    let data = open(&config).expect("good records");
    assert_eq!((data.len(), data.skipped_records()), (Some(3), 1));
    let notes = data.notes().join("\n");
    let says = "data.sequence_length allows 64: data.too_long = \"drop\" leaves it out";
    assert!(notes.contains("line 2: rejected: it has") && notes.contains(says), "{notes}");
    lines[2]["chosen"] = json!("");
    config.data.train = on_file(folder.path(), &lines).data.train;
    let refused = open(&config).err().expect("it is refused").to_string();
    assert!(refused.contains("line 3: chosen: completion is empty"), "{refused}");
}

/// A record of which nothing is learnt, because its answers are the same, is counted and named.
#[test]
fn answers_that_are_the_same_are_told() {
    let folder = tempfile::tempdir().expect("a place for files");
    let mut lines = answers(4);
    lines[2]["rejected"] = json!("1");
    for kind in [ObjectiveKind::Simpo, ObjectiveKind::Reward] {
        let mut config = on_file(folder.path(), &lines);
        config.objective.kind = kind;
        let shape = l2l::shape_of(&config).expect("a shape of ours");
        let (data, _) = Dataset::open(&config, &shape).expect("good records");
        let notes = data.notes().join("\n");
        let says = "records that prefer neither answer: 1: data ";
        assert_eq!(data.len(), Some(4));
        assert!(notes.contains(says), "{notes}");
        assert!(notes.contains("line 3: both answers are the same"), "{notes}");
    }
}

/// Data that does not say that it is a preference.
#[test]
fn columns_of_a_preference_need_an_objective() {
    let folder = tempfile::tempdir().expect("a place for files");
    let mut config = on_file(folder.path(), &answers(2));
    config.objective.kind = ObjectiveKind::CrossEntropy;
    let shape = l2l::shape_of(&config).expect("a shape of ours");
    let error = Dataset::open(&config, &shape).map(drop).expect_err("it is refused");
    assert!(error.to_string().contains("to train on preferences set objective.kind"), "{error}");
}
