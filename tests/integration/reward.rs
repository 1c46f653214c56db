//! Reward models and rerankers: the numbers of TRL and sentence-transformers in f64
//! (`goldens/reward.py`), records, metrics, directories, and what is refused of them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use l2l::config::{EpsTier, Labels, LoraConfig, ObjectiveKind, ScheduleKind, Task};
use l2l::data::{Batch, Batches, Dataset, Sequence};
use l2l::inference::Evaluator;
use l2l::{Config, Trainer, hf};
use safetensors::tensor::{SafeTensors, TensorView};
use serde_json::{Value, json};

use crate::preference::{answers, check_steps, on_file};

fn goldens() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens")
}

fn read(path: &Path) -> Value {
    let text = fs::read_to_string(path).expect("it is committed");
    serde_json::from_str(&text).expect("it is JSON")
}

/// Writes the model of a directory with the first of its classes alone.
fn with_one_score(of: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a place for files");
    let mut config = read(&of.join("config.json"));
    config["id2label"] = json!({ "0": "LABEL_0" });
    config["label2id"] = json!({ "LABEL_0": 0 });
    fs::write(to.join("config.json"), config.to_string()).expect("a place for files");
    let bytes = fs::read(of.join("model.safetensors")).expect("it is committed");
    let all = SafeTensors::deserialize(&bytes).expect("good");
    let cut = |(name, view): (String, TensorView<'_>)| {
        let mut shape = view.shape().to_vec();
        let is_head = ["score.weight", "classifier.weight", "classifier.bias"];
        let mut data = view.data().to_vec();
        if is_head.contains(&name.as_str()) {
            data.truncate(data.len() / shape[0]);
            shape[0] = 1;
        }
        (name, (view.dtype(), shape, data))
    };
    let kept: BTreeMap<_, _> = all.tensors().into_iter().map(cut).collect();
    let views = kept.iter().map(|(name, (dtype, shape, data))| {
        (name, TensorView::new(*dtype, shape.clone(), data).expect("a tensor"))
    });
    let bytes = safetensors::serialize(views, None).expect("good tensors");
    fs::write(to.join("model.safetensors"), bytes).expect("a place for files");
}

/// The records of a golden, each with its margin or its label.
fn records(folder: &Path, settings: &Value) -> Vec<Sequence> {
    let text = fs::read_to_string(folder.join("data.jsonl")).expect("it is committed");
    let lines: Vec<Value> =
        text.lines().map(|line| serde_json::from_str(line).expect("it is JSON")).collect();
    let ids = |line: &Value, key: &str| -> Vec<u32> {
        let list = line[key].as_array().into_iter().flatten();
        list.map(|id| id.as_u64().expect("an id") as u32).collect()
    };
    let is_pair = settings["kind"] == "reward";
    let is_marked = !is_pair || settings["margins"] == true;
    let record = |(record, lines): (usize, &[Value])| {
        let all: Vec<Vec<u32>> = lines.iter().map(|line| ids(line, "input_ids")).collect();
        let kinds = lines.iter().flat_map(|line| ids(line, "token_type_ids"));
        Sequence {
            documents: all.iter().map(Vec::len).collect(),
            kinds: kinds.map(|kind| kind as u8).collect(),
            score: Some(if is_marked { ((7 * record) % 5) as f32 / 4.0 } else { 0.0 }),
            ..Sequence::plain(all.concat())
        }
    };
    lines.chunks_exact(if is_pair { 2 } else { 1 }).enumerate().map(record).collect()
}

async fn check(config: Config, records: &[Sequence], expected: &Value, name: &str) -> String {
    let batches = records.chunks_exact(config.step.batch).map(Batch::of_scored);
    check_steps(config, batches, expected, name).await
}

/// A config with an objective of the golden.
fn config_of(model: PathBuf, golden: &Value, settings: &Value) -> Config {
    let mut config = Config::default();
    config.model.path = Some(model);
    let kind = settings["kind"].as_str().expect("a name");
    config.objective.kind = serde_json::from_value(json!(kind)).expect("a kind");
    config.objective.centre = settings["centre"].as_f64();
    config.step.batch = golden["records"][kind].as_u64().expect("a number") as usize;
    config.step.micro_batch = 2;
    config.step.steps = Some(10);
    config.optimizer.learning_rate = 3e-3;
    config.optimizer.weight_decay = 0.1;
    config.optimizer.clip_norm = None;
    config
}

/// Checks a case in several orders of a step.
async fn check_in_orders(config: Config, records: &[Sequence], expected: &Value, name: &str) {
    let relay = check(config.clone(), records, expected, name).await;
    let mut others = config.clone();
    // A micro-batch of one sequence has no whole pair: the loss waits for the step.
    (others.step.micro_batch, others.parallel.groups) = (1, 2);
    others.eps.tier = EpsTier::Memory;
    check(others, records, expected, name).await;
    let mut resident = config;
    resident.schedule.kind = ScheduleKind::Resident;
    assert_eq!(check(resident, records, expected, name).await, relay, "{name}");
}

#[tokio::test]
async fn losses_of_scores_are_those_of_trl_and_sentence_transformers() {
    let golden = read(&goldens().join("reward/golden.json"));
    let folder = tempfile::tempdir().expect("a place for files");
    for (model, cases) in golden["full"].as_object().expect("models") {
        let at = folder.path().join(model);
        with_one_score(&goldens().join(model), &at);
        for (case, expected) in cases.as_object().expect("cases") {
            let settings = &golden["settings"][case];
            let config = config_of(at.clone(), &golden, settings);
            let records = records(&goldens().join(model), settings);
            check_in_orders(config, &records, expected, &format!("{model} {case}")).await;
        }
    }
}

/// Adapters that bring the head, on models without one.
#[tokio::test]
async fn losses_of_scores_of_adapters_are_those_of_peft() {
    let golden = read(&goldens().join("reward/golden.json"));
    for (model, cases) in golden["adapters"].as_object().expect("models") {
        for (case, expected) in cases.as_object().expect("cases") {
            let settings = &golden["settings"][case];
            let mut config = config_of(goldens().join(model), &golden, settings);
            let path = Some(goldens().join("reward").join(model));
            config.train.lora = Some(LoraConfig { path, ..LoraConfig::default() });
            let records = records(&goldens().join(model), settings);
            check_in_orders(config, &records, expected, &format!("{model} {case}")).await;
        }
    }
}

/// A run of records in a file.
fn scored(folder: &Path, kind: ObjectiveKind, lines: &[Value]) -> Config {
    let mut config = on_file(folder, lines);
    config.objective.kind = kind;
    config.optimizer.learning_rate = 1e-2;
    config
}

/// Answers of which those that end in a digit are better.
fn digits(count: usize) -> Vec<Value> {
    let line = |n: usize| {
        let word = ["river", "stone", "cloud"][n % 3];
        json!({ "chosen": format!("{word} {n}"), "rejected": format!("{n} {word}"), "margin": 0.5 })
    };
    (0..count).map(line).collect()
}

#[tokio::test]
async fn a_reward_model_learns_and_its_directory_has_its_scores() {
    let folder = tempfile::tempdir().expect("a place for files");
    let mut config = scored(folder.path(), ObjectiveKind::Reward, &digits(12));
    config.step.batch = 6;
    let (mut trainer, mut batches) = Trainer::open(config.clone()).await.expect("one of ours");
    let mut accuracy = None;
    for _ in 0..40 {
        let batch = batches.next().await.expect("good records");
        accuracy = trainer.step(batch).await.expect("a step").metrics.value("accuracy");
    }
    assert_eq!(accuracy, Some(1.0));
    let shape = l2l::shape_of(&config).expect("a shape of ours");
    let (data, _) = Dataset::open(&config, &shape).expect("good records");
    let all: Vec<Batch> = data.in_order(6, 2).collect::<Result<_, _>>().expect("good records");
    let found = trainer.evaluate(all.clone().into_iter().map(Ok)).await.expect("it evaluates");
    assert_eq!((found.records, found.metrics.value("accuracy")), (Some(12), Some(1.0)));
    let margin = found.metrics.value("margin").expect("a margin");
    let names: Vec<&str> = found.values().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["loss", "accuracy", "margin", "mean"], "no perplexity and no correlation");
    assert_eq!(found.event(3)["margin"], json!(margin));
    let saved = folder.path().join("saved");
    trainer.checkpoint(&saved).await.expect("a place for files");
    let written = read(&saved.join("config.json"));
    let architecture = written["architectures"][0].as_str().expect("a name");
    assert!(architecture.ends_with("ForSequenceClassification"), "{architecture}");
    // The directory says what it predicts, so its scores need no config of the run.
    let mut plain = config;
    plain.objective = Default::default();
    plain.model = Default::default();
    plain.model.path = Some(saved);
    (plain.step.batch, plain.step.micro_batch) = (12, 4);
    let mut evaluator = Evaluator::start(plain).await.expect("a directory of ours");
    let mut margins = Vec::new();
    for batch in all {
        let scores = evaluator.scores(batch).await.expect("it scores");
        margins.extend(scores.chunks_exact(2).map(|pair| f64::from(pair[0]) - f64::from(pair[1])));
    }
    let mean = margins.iter().sum::<f64>() / 12.0;
    assert!((mean - margin).abs() < 1e-12, "{mean} {margin}");
}

/// A chosen answer has the prompt before it, and a margin where the record has one.
#[tokio::test]
async fn records_of_answers_are_read() {
    let folder = tempfile::tempdir().expect("a place for files");
    let mut lines = answers(3);
    lines[1]["margin"] = json!(1.5);
    lines[2].as_object_mut().expect("an object").remove("prompt");
    let config = scored(folder.path(), ObjectiveKind::Reward, &lines);
    let shape = l2l::shape_of(&config).expect("a shape of ours");
    assert_eq!(shape.head.labels(), Some(1));
    let (data, _) = Dataset::open(&config, &shape).expect("good records");
    let read = |index| data.sequence(index).expect("it is there");
    assert_eq!((read(0).documents, read(0).score), (vec![8, 11], Some(0.0)));
    assert_eq!((read(1).documents, read(1).score), (vec![8, 11], Some(1.5)));
    assert_eq!(read(2).documents, [1, 4], "without a prompt");
    assert_eq!(data.unused_columns(), ["extra"]);
    // The answer is behind the prompt.
    let text: Vec<u8> = read(0).tokens[8..].iter().map(|&token| token as u8).collect();
    assert_eq!(text, b"say 0: none");
}

fn texts(count: usize) -> Vec<Value> {
    let line = |n: usize| {
        let label = f64::from(u8::from(n.is_multiple_of(2)));
        let answer = if n.is_multiple_of(2) { "and goes again" } else { "one" };
        json!({ "query": format!("is it {n}"), "passage": answer, "label": label })
    };
    (0..count).map(line).collect()
}

#[cfg(feature = "tokenizers")]
#[tokio::test]
async fn a_reranker_learns_pairs_of_texts() {
    let folder = tempfile::tempdir().expect("a place for files");
    let mut config = scored(folder.path(), ObjectiveKind::Binary, &texts(8));
    config.model = Default::default();
    config.model.path = Some(goldens().join("text/wordpiece"));
    config.data.too_long = l2l::config::TooLong::Cut;
    config.data.sequence_length = Some(24);
    config.model.dropout = Some(0.0);
    config.optimizer.learning_rate = 2e-3;
    (config.step.batch, config.step.micro_batch) = (8, 3);
    let mut batches = Batches::open(&config).expect("good records");
    let shape = l2l::shape_of(&config).expect("a shape of ours");
    let (data, _) = Dataset::open(&config, &shape).expect("good records");
    let first = data.sequence(0).expect("it is there");
    assert_eq!(first.score, Some(1.0));
    assert!(first.kinds.contains(&1), "the document is of the second type: {:?}", first.kinds);
    let mut trainer = Trainer::start(config).await.expect("a config of ours");
    let mut last = None;
    for _ in 0..60 {
        let batch = batches.next().await.expect("good records");
        last = Some(trainer.step(batch).await.expect("a step"));
    }
    let last = last.expect("steps");
    assert_eq!(last.metrics.value("accuracy"), Some(1.0));
    assert!(last.loss < 0.3 && last.event()["accuracy"] == json!(1.0), "{}", last.loss);
}

/// A run of adapters ends in a directory for PEFT, with the head beside them.
#[tokio::test]
async fn adapters_of_a_reward_model_bring_its_head() {
    let folder = tempfile::tempdir().expect("a place for files");
    let mut config = scored(folder.path(), ObjectiveKind::Reward, &digits(4));
    config.model = Default::default();
    config.model.path = Some(goldens().join("llama"));
    config.data.sequence_length = None;
    config.train.lora = Some(LoraConfig { rank: Some(2), ..LoraConfig::default() });
    config.step.batch = 2;
    let tokens = |first: u32| (first..first + 6).collect::<Vec<u32>>();
    let record = |first: u32| Sequence {
        documents: vec![6, 6],
        ..Sequence::plain([tokens(first), tokens(first + 20)].concat())
    };
    let batch = Batch::of_scored(&[record(3), record(9)]);
    let mut trainer = Trainer::start(config.clone()).await.expect("a config of ours");
    for _ in 0..3 {
        trainer.step(batch.clone()).await.expect("a step");
    }
    let found = trainer.evaluate([Ok(batch.clone())]).await.expect("it evaluates");
    let saved = folder.path().join("saved");
    trainer.checkpoint(&saved).await.expect("a place for files");
    let written = read(&saved.join("adapter_config.json"));
    assert_eq!(written["task_type"], "SEQ_CLS");
    let merged = folder.path().join("merged");
    let base = config.model.path.as_deref();
    hf::export(&saved, base, &merged, Default::default()).expect("adapters of ours");
    let mut plain = config;
    plain.train = Default::default();
    plain.model.path = Some(merged);
    let mut evaluator = Evaluator::start(plain).await.expect("a directory of ours");
    let again = evaluator.evaluate([Ok(batch)]).await.expect("it evaluates");
    assert!((again.loss - found.loss).abs() < 1e-6, "{} {}", again.loss, found.loss);
}

#[test]
fn what_a_loss_of_scores_cannot_have_is_refused_by_name() {
    let folder = tempfile::tempdir().expect("a place for files");
    let refused = |kind, lines: &[Value], change: &dyn Fn(&mut Config), says: &str| {
        let mut config = scored(folder.path(), kind, lines);
        change(&mut config);
        let opened = config.check().and_then(|()| {
            let shape = l2l::shape_of(&config)?;
            Dataset::open(&config, &shape).map(drop)
        });
        let error = opened.expect_err("it is refused").to_string();
        assert!(error.contains(says), "{error}");
    };
    let reward = ObjectiveKind::Reward;
    let binary = ObjectiveKind::Binary;
    let good = |_: &mut Config| ();
    let mut lines = digits(2);
    lines[1]["margin"] = json!("wide");
    refused(reward, &lines, &good, "margin is \"wide\": it must be a finite number");
    lines[1] = json!({ "chosen": "x" });
    refused(reward, &lines, &good, "rejected is missing: objective.kind is a preference");
    let lines = digits(2);
    refused(reward, &lines, &|c| c.objective.centre = Some(-1.0), "objective.centre");
    refused(binary, &lines, &|c| c.objective.centre = Some(1.0), "is for kind = \"reward\"");
    refused(reward, &lines, &|c| c.model.task = Some(Task::CausalLm), "is a loss of scores");
    refused(reward, &lines, &|c| c.model.labels = Some(Labels::Count(3)), "of one score of each");
    refused(reward, &lines, &|c| c.data.packing = true, "has a score of its own");
    refused(reward, &lines, &|c| c.data.train = "random".into(), "with chosen and rejected");
    refused(binary, &lines, &|c| c.data.train = "built-in".into(), "query, document and label");
    let split = |c: &mut Config| c.data.too_long = l2l::config::TooLong::Split;
    refused(reward, &lines, &split, "a text has one score");
    refused(reward, &lines, &|c| c.train.label_smoothing = 0.1, "is a loss of one score");
    let mut lines = texts(2);
    lines[0]["label"] = json!(2);
    refused(binary, &lines, &good, "label is 2: it must be a number from 0 to 1");
    lines[0] = json!({ "query": "x", "label": 1 });
    refused(binary, &lines, &good, "document (or passage, answer");
    lines[0] = json!({ "query": "x", "answer": "y" });
    refused(binary, &lines, &good, "label (or score) is missing");
}

/// The records and scores that `l2l score` writes.
#[cfg(feature = "cli")]
fn written(sets: &[String], more: &[&str], records: &Path) -> Vec<(Value, f32)> {
    let sets = sets.iter().flat_map(|set| ["--set", set]);
    let records = records.display().to_string();
    let words = ["score", "/dev/null"].into_iter().chain(sets).chain(more.iter().copied());
    let all: Vec<&str> = words.chain(["--records", &records]).collect();
    let read = |line: &str| {
        let mut line: Value = serde_json::from_str(line).expect("an object");
        let score = line["score"].as_f64().expect("a number") as f32;
        (line["record"].take(), score)
    };
    crate::program::good(&all).lines().map(read).collect()
}

/// `l2l score` gives an answer the score that it has in a record of two.
#[cfg(feature = "cli")]
#[tokio::test]
async fn the_program_writes_scores_of_answers() {
    let folder = tempfile::tempdir().expect("a place for files");
    let pairs = [digits(3), answers(2)].concat();
    let mut config = scored(folder.path(), ObjectiveKind::Reward, &pairs);
    config.step.batch = 5;
    let saved = folder.path().join("saved");
    let (mut trainer, mut batches) = Trainer::open(config.clone()).await.expect("one of ours");
    trainer.step(batches.next().await.expect("good records")).await.expect("a step");
    trainer.checkpoint(&saved).await.expect("a place for files");
    let shape = l2l::shape_of(&config).expect("a shape of ours");
    let (data, _) = Dataset::open(&config, &shape).expect("good records");
    let batch = data.batch(0..5).expect("good records");
    config.model = Default::default();
    config.model.path = Some(saved.clone());
    let mut evaluator = Evaluator::start(config).await.expect("a directory of ours");
    let expected = evaluator.scores(batch).await.expect("it scores");
    let answer = |pair: &Value, name: &str| match &pair["prompt"] {
        Value::Null => json!({ "text": pair[name] }),
        prompt => json!({ "prompt": prompt, "completion": pair[name] }),
    };
    let records: Vec<Value> = pairs
        .iter()
        .flat_map(|pair| ["chosen", "rejected"].map(|name| answer(pair, name)))
        .collect();
    let file = folder.path().join("records.jsonl");
    let lines: String = records.iter().map(|record| format!("{record}\n")).collect();
    fs::write(&file, lines).expect("a place for files");
    let sets = ["objective.kind=reward", "data.sequence_length=64", "step.batch=4"];
    let sets = sets.map(str::to_string);
    let at = saved.display().to_string();
    let found = written(&sets, &["--model", &at], &file);
    assert_eq!(found, records.into_iter().zip(expected).collect::<Vec<_>>());
    let refused = |sets: &[&str], line: &str, says: &str| {
        fs::write(&file, line).expect("a place for files");
        let records = file.display().to_string();
        let sets = sets.iter().flat_map(|set| ["--set", set]);
        let words = ["score", "/dev/null", "--model", &at, "--records", &records].into_iter();
        let all: Vec<&str> = words.chain(sets).collect();
        let output = crate::program::output(&all);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && error.contains(says), "{says:?} expected in: {error}");
    };
    let reward = ["objective.kind=reward", "data.sequence_length=64"];
    refused(&reward, "", "there is no record");
    refused(&reward, "text\n", "record 1: it is not a JSON object");
    refused(&reward, "{\"text\": \"\"}", "record 1: completion is empty");
    refused(&reward, "{\"input_ids\": [1]}", "input_ids: an answer is a text, prompt with");
    refused(&["data.sequence_length=64"], "{\"text\": \"a\"}", "set objective.kind to that of");
}

/// A query with a document needs no label there.
#[cfg(all(feature = "cli", feature = "tokenizers"))]
#[tokio::test]
async fn the_program_writes_scores_of_documents() {
    let folder = tempfile::tempdir().expect("a place for files");
    let mut config = scored(folder.path(), ObjectiveKind::Binary, &texts(5));
    config.model = Default::default();
    config.model.path = Some(goldens().join("text/wordpiece"));
    config.data.sequence_length = Some(24);
    config.data.too_long = l2l::config::TooLong::Cut;
    config.step.batch = 5;
    let shape = l2l::shape_of(&config).expect("a shape of ours");
    let (data, _) = Dataset::open(&config, &shape).expect("good records");
    let batch = data.batch(0..5).expect("good records");
    let saved = folder.path().join("saved");
    let mut trainer = Trainer::start(config.clone()).await.expect("a config of ours");
    trainer.checkpoint(&saved).await.expect("a place for files");
    let path = saved.display().to_string();
    config.model.path = Some(saved);
    let mut evaluator = Evaluator::start(config).await.expect("a directory of ours");
    let expected = evaluator.scores(batch).await.expect("it scores");
    let unlabelled = |mut record: Value| {
        record.as_object_mut().expect("an object").remove("label");
        record
    };
    let records: Vec<Value> = texts(5).into_iter().map(unlabelled).collect();
    let file = folder.path().join("records.jsonl");
    let lines: String = records.iter().map(|record| format!("{record}\n")).collect();
    fs::write(&file, lines).expect("a place for files");
    let sets =
        ["objective.kind=binary", "data.sequence_length=24", "data.too_long=cut", "step.batch=2"];
    let found = written(&sets.map(str::to_string), &["--model", &path], &file);
    assert_eq!(found, records.into_iter().zip(expected).collect::<Vec<_>>());
}
