//! Classifiers whose head comes from adapters, on models without one: of PEFT and of runs. Each use
//! of them has the same loss. `goldens/peft_heads.py` makes what is compared with.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use l2l::config::{Labels, LoraConfig, Task, TrainConfig};
use l2l::data::{Batches, Dataset};
use l2l::hf::ExportOptions;
use l2l::inference::{self, Evaluator};
use l2l::{Config, Trainer, hf, shape_of};
use safetensors::tensor::SafeTensors;
use serde_json::Value;

fn goldens() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens")
}

fn json(path: &Path) -> Value {
    let text = fs::read_to_string(path).expect("it is there");
    serde_json::from_str(&text).expect("it is JSON")
}

/// Each family's model without a head of classes, and each task that transformers has for it.
const CASES: [&str; 20] = [
    "tied-sequences",
    "tied-tokens",
    "gemma3_text-sequences",
    "llama-sequences",
    "llama-tokens",
    "mistral-sequences",
    "mistral-tokens",
    "opt-sequences",
    "phi3-sequences",
    "phi3-tokens",
    "qwen2-sequences",
    "qwen2-tokens",
    "qwen3-sequences",
    "qwen3-tokens",
    "bert-sequences",
    "bert-tokens",
    "roberta-sequences",
    "roberta-tokens",
    "distilbert-sequences",
    "distilbert-tokens",
];

/// The model and the data of a case.
fn config_of(case: &str) -> Config {
    let (base, task) = case.rsplit_once('-').expect("a model and a task");
    let mut config = Config::default();
    config.model.path = Some(goldens().join(base));
    let data = goldens().join("peft_heads").join(format!("{task}.jsonl")).display().to_string();
    config.data.train = data.clone().into();
    config.data.validation = Some(data.into());
    config.step.batch = 4;
    config.step.micro_batch = 2;
    config
}

async fn loss_of(config: &Config) -> f64 {
    let shape = shape_of(config).expect("a case of ours");
    let (data, _) = Dataset::open(config, &shape).expect("it is committed");
    let mut evaluator = Evaluator::start(config.clone()).await.expect("a case of ours");
    let loss = evaluator.evaluate(data.in_order(4, 1)).await.expect("nothing fails here").loss;
    evaluator.stop().await.expect("nothing fails here");
    loss
}

/// A config of the model in a directory, without adapters.
fn plain(config: &Config, path: PathBuf) -> Config {
    let mut plain = config.clone();
    plain.model.path = Some(path);
    (plain.model.task, plain.model.labels) = (None, None);
    plain.train = TrainConfig::default();
    plain
}

fn tensors(file: &Path) -> BTreeMap<String, Vec<usize>> {
    let bytes = fs::read(file).expect("it was written");
    let all = SafeTensors::deserialize(&bytes).expect("good").tensors();
    all.into_iter().map(|(name, view)| (name, view.shape().to_vec())).collect()
}

/// What an export of a classifier says of itself.
fn check_export(folder: &Path, case: &str, names: &[&str]) {
    let config = json(&folder.join("config.json"));
    let architecture = config["architectures"][0].as_str().expect("a name");
    let end =
        if case.ends_with("tokens") { "TokenClassification" } else { "SequenceClassification" };
    assert!(architecture.ends_with(&format!("For{end}")), "{case}: {architecture}");
    for (at, name) in names.iter().enumerate() {
        assert_eq!(config["id2label"][at.to_string()], *name, "{case}");
    }
    let has_lm_head =
        |name: &String| ["lm_head", "cls.", "vocab_"].iter().any(|h| name.starts_with(h));
    let stored = tensors(&folder.join("model.safetensors"));
    assert!(!stored.keys().any(has_lm_head), "{case}: {:?}", stored.keys());
}

#[tokio::test]
async fn pefts_classifiers_have_pefts_losses() {
    let golden = json(&goldens().join("peft_heads/golden.json"));
    assert_eq!(golden["losses"].as_object().map(|losses| losses.len()), Some(CASES.len()));
    for case in CASES {
        let expected = golden["losses"][case].as_f64().expect("a loss");
        let mut config = config_of(case);
        let adapters = goldens().join("peft_heads").join(case);
        // The head follows from the adapters: the config names no task.
        config.train.lora = Some(LoraConfig { path: Some(adapters.clone()), ..Default::default() });
        let found = loss_of(&config).await;
        assert!((found - expected).abs() < 1e-5, "{case}: {found} {expected}");
        let folder = tempfile::tempdir().expect("a place for files");
        let merged = folder.path().join("merged");
        let names = ["a", "b", "c", "d"];
        let labels = names[..if case.ends_with("tokens") { 4 } else { 3 }].to_vec();
        let options = ExportOptions {
            labels: labels.iter().map(|name| name.to_string()).collect(),
            ..Default::default()
        };
        hf::export(&adapters, config.model.path.as_deref(), &merged, options).expect("ours");
        check_export(&merged, case, &labels);
        let found = loss_of(&plain(&config, merged)).await;
        assert!((found - expected).abs() < 1e-5, "{case}, merged: {found} {expected}");
    }
}

/// A run's own classifier: what it trained is what its checkpoint holds, however it is read.
#[tokio::test]
async fn a_run_of_adapters_on_a_model_without_a_head_can_be_used() {
    for case in CASES {
        let mut config = config_of(case);
        let is_tokens = case.ends_with("tokens");
        config.model.task =
            Some(if is_tokens { Task::TokenClassification } else { Task::SequenceClassification });
        let names = ["a", "b", "c", "d"];
        let names = &names[..if is_tokens { 4 } else { 3 }];
        let labels = names.iter().map(|name| name.to_string()).collect();
        config.model.labels = Some(Labels::Names(labels));
        config.step.steps = Some(4);
        config.optimizer.learning_rate = 1e-2;
        config.train.lora = Some(LoraConfig { rank: Some(2), ..LoraConfig::default() });
        let folder = tempfile::tempdir().expect("a place for files");
        let place = folder.path().join("checkpoint");
        let mut trainer = Trainer::start(config.clone()).await.expect("a case of ours");
        let mut batches = Batches::open(&config).expect("it is committed");
        for _ in 0..2 {
            let batch = batches.next().await.expect("good data");
            trainer.step(batch).await.expect("nothing fails here");
        }
        trainer.checkpoint(&place).await.expect("a directory of ours");
        let shape = shape_of(&config).expect("a case of ours");
        let (data, _) = Dataset::open(&config, &shape).expect("it is committed");
        let trained = trainer.evaluate(data.in_order(4, 1)).await.expect("it works").loss;
        let digest = trainer.digest().await.expect("nothing fails here");
        drop(trainer);
        let mut resumed =
            Trainer::builder(config.clone()).resume(&place).start().await.expect("ours");
        assert_eq!(resumed.digest().await.expect("nothing fails here"), digest, "{case}");
        drop(resumed);
        // The checkpoint describes its head, so that the config need not name the task.
        let mut read = config.clone();
        (read.model.task, read.model.labels) = (None, None);
        inference::load_from(&mut read, &place);
        assert_eq!(loss_of(&read).await, trained, "{case}");
        let merged = folder.path().join("merged");
        let base = config.model.path.as_deref();
        hf::export(&place, base, &merged, ExportOptions::default()).expect("ours");
        check_export(&merged, case, names);
        let found = loss_of(&plain(&config, merged)).await;
        assert!((found - trained).abs() < 1e-5, "{case}, merged: {found} {trained}");
        check_peft_config(&json(&place.join("adapter_config.json")), case);
    }
}

/// PEFT saves the modules `classifier` and `score` of classifiers by itself, and as a whole.
fn check_peft_config(config: &Value, case: &str) {
    let task = if case.ends_with("tokens") { "TOKEN_CLS" } else { "SEQ_CLS" };
    assert_eq!(config["task_type"], task, "{case}");
    let saved: Vec<&str> = match case {
        "bert-sequences" => vec!["bert.pooler.dense", "classifier"],
        "distilbert-sequences" => vec!["pre_classifier", "classifier"],
        "tied-tokens" => vec!["classifier"],
        _ if case.contains("bert") => vec!["classifier"],
        _ => vec!["score"],
    };
    assert_eq!(config["modules_to_save"], Value::from(saved), "{case}");
}

/// A head that nobody has is missed by its name; one that would stay random is refused.
#[tokio::test]
async fn a_head_that_no_file_has_is_refused() {
    let mut config = config_of("llama-sequences");
    config.model.task = Some(Task::SequenceClassification);
    let without_head = goldens().join("lora/llama");
    config.train.lora = Some(LoraConfig { path: Some(without_head), ..LoraConfig::default() });
    let error = Evaluator::start(config.clone()).await.err().expect("there is no head");
    assert!(error.to_string().contains("score.weight is missing"), "{error}");
    config.train.lora = Some(LoraConfig::default());
    config.train.only = vec!["norm".into()];
    config.step.steps = Some(1);
    let error = Trainer::start(config.clone()).await.err().expect("the head is random");
    let text = error.to_string();
    assert!(text.contains("it lacks score.weight") && text.contains("train.only"), "{text}");
    config.train.only.push("score".into());
    drop(Trainer::start(config).await.expect("the head is trained"));
}

/// Adapters of a causal model, under a new head: they begin a classifier, which trains its head.
#[tokio::test]
async fn adapters_without_a_head_begin_a_classifier() {
    let mut config = config_of("llama-sequences");
    config.model.task = Some(Task::SequenceClassification);
    config.model.labels = Some(Labels::Count(3));
    config.step.steps = Some(1);
    let path = Some(goldens().join("lora/llama"));
    config.train.lora = Some(LoraConfig { path, ..LoraConfig::default() });
    let trainer = Trainer::start(config).await.expect("a case of ours");
    assert_eq!(trainer.new_tensors(), ["score.weight"]);
    let trained: Vec<&str> =
        trainer.model().blocks.iter().flat_map(|b| b.trained()).map(|t| &t.name[..]).collect();
    assert!(trained.contains(&"score.weight"));
}

/// A table that was trained beside adapters: the model's files need not have it.
#[tokio::test]
async fn a_table_that_adapters_bring_is_not_missed() {
    let mut config = config_of("llama-sequences");
    config.step.steps = Some(1);
    config.train.lora = Some(LoraConfig { rank: Some(2), ..LoraConfig::default() });
    config.train.only = vec!["lm_head".into()];
    let data = goldens().join("llama/data.jsonl").display().to_string();
    config.data.train = data.into();
    let folder = tempfile::tempdir().expect("a place for files");
    let place = folder.path().join("checkpoint");
    let mut trainer = Trainer::start(config.clone()).await.expect("a case of ours");
    let mut batches = Batches::open(&config).expect("it is committed");
    trainer.step(batches.next().await.expect("good data")).await.expect("nothing fails here");
    trainer.checkpoint(&place).await.expect("a directory of ours");
    drop(trainer);
    inference::load_from(&mut config, &place);
    let expected = loss_of(&config).await;
    let base = folder.path().join("base");
    fs::create_dir(&base).expect("a place for files");
    let whole = goldens().join("llama");
    fs::copy(whole.join("config.json"), base.join("config.json")).expect("it is committed");
    let bytes = fs::read(whole.join("model.safetensors")).expect("it is committed");
    let tensors = SafeTensors::deserialize(&bytes).expect("good").tensors();
    let kept = tensors.into_iter().filter(|(name, _)| name != "lm_head.weight");
    let kept = safetensors::serialize(kept, None).expect("plain tensors");
    fs::write(base.join("model.safetensors"), kept).expect("a place for files");
    config.model.path = Some(base.clone());
    assert_eq!(loss_of(&config).await, expected);
    let merged = folder.path().join("merged");
    hf::export(&place, Some(&base), &merged, ExportOptions::default()).expect("ours");
    let found = loss_of(&plain(&config, merged)).await;
    assert!((found - expected).abs() < 1e-5, "{found} {expected}");
}
