//! Prompts of sentence embeddings: the numbers of sentence-transformers in f64
//! (`goldens/prompts.py`), directories, and what is refused.

use std::fs;
use std::path::{Path, PathBuf};

use l2l::config::{self, LoraConfig, ObjectiveKind, PromptsConfig, TooLong};
use l2l::data::{Batch, Batches, Dataset, Sequence, sequences_of_texts};
use l2l::hf::{ExportOptions, export};
use l2l::inference::Evaluator;
use l2l::{Config, Trainer, shape_of};
use serde_json::{Value, json};

use crate::ranks::{Task, on_ranks};

const MODELS: [&str; 3] = ["wordpiece", "bpe", "llama"];
const SETTINGS: &str = "config_sentence_transformers.json";

fn json_of(path: &Path) -> Value {
    let text = fs::read_to_string(path).expect("it was written");
    serde_json::from_str(&text).expect("it is JSON")
}

fn golden() -> Value {
    json_of(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/prompts.json"))
}

fn model(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/text").join(name)
}

fn texts_of(list: &Value) -> Vec<String> {
    serde_json::from_value(list.clone()).expect("a list of texts")
}

/// A config that makes embeddings with a model and the golden's prompts.
fn embedder(name: &str, golden: &Value) -> Config {
    let mut config = Config::default();
    config.model.path = Some(model(name));
    config.model.task = Some(config::Task::SentenceEmbedding);
    config.model.normalise = Some(false);
    config.model.include_prompt = Some(false);
    config.model.prompts = serde_json::from_value(golden["prompts"].clone()).expect("texts");
    config.model.default_prompt = golden["default"].as_str().map(str::to_string);
    config
}

async fn embeddings_of(config: &Config, texts: &[String]) -> Vec<f32> {
    let shape = shape_of(config).expect("a model of ours");
    let sequences = sequences_of_texts(config, &shape, texts).expect("good texts");
    let mut evaluator = Evaluator::start(config.clone()).await.expect("it is a model");
    evaluator.embed(Batch::of_texts(&sequences)).await.expect("it embeds")
}

/// Tokens, what of them is the prompt's, and embeddings that count these or do not.
#[tokio::test]
async fn embeddings_behind_prompts_are_those_of_sentence_transformers() {
    let golden = golden();
    let texts = texts_of(&golden["texts"]);
    for name in MODELS {
        let mut config = embedder(name, &golden);
        let of_model = &golden[name];
        for prompt in golden["prompts"].as_object().expect("an object").keys() {
            config.model.default_prompt = Some(prompt.clone());
            let shape = shape_of(&config).expect("a model of ours");
            let sequences = sequences_of_texts(&config, &shape, &texts).expect("good texts");
            let tokens: Vec<&Vec<u32>> = sequences.iter().map(|one| &one.tokens).collect();
            assert_eq!(json!(tokens), of_model["tokens"][prompt], "{name} {prompt}");
            let skipped = sequences[0].skipped.first().copied().unwrap_or(0);
            assert_eq!(json!(skipped), of_model["prompt_lengths"][prompt], "{name} {prompt}");
        }
        config.model.default_prompt = golden["default"].as_str().map(str::to_string);
        for case in of_model["embeddings"].as_array().expect("a list") {
            let pooling = case["pooling"].as_str().expect("a name").replace("token", "");
            config.model.pooling = Some(serde_json::from_value(json!(pooling)).expect("a pooling"));
            config.model.include_prompt = case["include_prompt"].as_bool();
            let found = embeddings_of(&config, &texts).await;
            let expected = case["of_texts"].as_array().expect("a list").iter();
            let expected = expected.flat_map(|one| one.as_array().expect("a list"));
            let mut count = 0;
            for (found, expected) in found.iter().zip(expected) {
                let off = (f64::from(*found) - expected.as_f64().expect("a number")).abs();
                assert!(off < 1e-5, "{name} {pooling}: {off}");
                count += 1;
            }
            assert_eq!((count, found.len()), (64, 64));
        }
    }
}

/// The golden's training, with a prompt for each column.
fn training(folder: &Path, name: &str, golden: &Value) -> Config {
    let at = folder.join("records.jsonl");
    let lines = golden["records"].as_array().expect("a list").iter();
    fs::write(&at, lines.map(|line| format!("{line}\n")).collect::<String>()).expect("ours");
    let mut config = embedder(name, golden);
    let pooling = golden[name]["pooling"].as_str().expect("a name").replace("token", "");
    config.model.pooling = Some(serde_json::from_value(json!(pooling)).expect("a pooling"));
    config.model.dropout = Some(0.0);
    config.data.train = at.display().to_string().into();
    config.data.shuffle = false;
    config.data.prompts = serde_json::from_value(golden["columns"].clone()).expect("its keys");
    config.objective.kind = ObjectiveKind::Contrastive;
    config.objective.negatives = 1;
    config.objective.scale = golden["scale"].as_f64();
    config.step.batch = golden["batch"].as_u64().expect("a number") as usize;
    config.step.micro_batch = 5;
    config.optimizer.learning_rate = golden["learning_rate"].as_f64().expect("a number");
    config.optimizer.weight_decay = golden["weight_decay"].as_f64().expect("a number");
    config.optimizer.clip_norm = None;
    config
}

#[tokio::test]
async fn training_behind_prompts_is_that_of_sentence_transformers() {
    let folder = tempfile::tempdir().expect("a place for files");
    let golden = golden();
    for name in MODELS {
        let config = training(folder.path(), name, &golden);
        let mut batches = Batches::open(&config).expect("good records");
        let mut trainer = Trainer::start(config).await.expect("a config of ours");
        let expected = &golden[name];
        let losses = expected["losses"].as_array().expect("a list");
        for (step, loss) in losses.iter().enumerate() {
            let batch = batches.next().await.expect("good records");
            let report = trainer.step(batch).await.expect("a step");
            let off = (report.loss - loss.as_f64().expect("a number")).abs();
            assert!(off < 2e-5, "{name} {step}: {} {loss}", report.loss);
            let norm = expected["norms"][step].as_f64().expect("a number");
            let off = (report.grad_norm / norm - 1.0).abs();
            assert!(off < 1e-4, "{name} {step}: norm {} {norm}", report.grad_norm);
        }
    }
}

/// Validation reads the prompts of training; all micro-batches and devices pool the same tokens.
#[tokio::test]
async fn prompts_are_left_out_in_every_order() {
    let folder = tempfile::tempdir().expect("a place for files");
    let golden = golden();
    let mut config = training(folder.path(), "bpe", &golden);
    config.data.validation = Some(config.data.train.clone());
    let shape = shape_of(&config).expect("a model of ours");
    let (train, validation) = Dataset::open(&config, &shape).expect("good records");
    let record = train.sequence(3).expect("it is there");
    assert_eq!(validation[0].sequence(3).expect("it is there"), record);
    let all: Vec<Sequence> = (0..4).map(|at| train.sequence(at).expect("there")).collect();
    let mut found = Vec::new();
    for (micro_batch, devices) in [(1, 1), (5, 1), (12, 1), (2, 2)] {
        config.step.micro_batch = micro_batch;
        config.device.count = Some(devices);
        let mut trainer = Trainer::start(config.clone()).await.expect("a config of ours");
        let evaluation = trainer.evaluate([Ok(Batch::of_texts(&all))]).await.expect("good");
        found.push(evaluation.loss);
    }
    assert!(found.iter().all(|loss| *loss == found[0]), "{found:?}");
    let mut counted = config.clone();
    counted.model.include_prompt = Some(true);
    let shape = shape_of(&counted).expect("a model of ours");
    let (train, _) = Dataset::open(&counted, &shape).expect("good records");
    let whole = train.sequence(3).expect("it is there");
    assert!(whole.skipped.is_empty() && whole.tokens == record.tokens);
    assert_eq!(record.skipped.len(), 3);
}

/// A directory says its prompts and what of them counts, and a run writes them back.
#[tokio::test]
async fn directories_have_their_prompts() {
    let folder = tempfile::tempdir().expect("a place for files");
    let golden = golden();
    let texts = texts_of(&golden["texts"]);
    let source = folder.path().join("source");
    fs::create_dir(&source).expect("ours");
    for entry in fs::read_dir(model("wordpiece")).expect("it is committed") {
        let path = entry.expect("it is committed").path();
        fs::copy(&path, source.join(path.file_name().expect("a name"))).expect("ours");
    }
    let settings = json!({
        "similarity_fn_name": "cosine", "default_prompt_name": "query",
        "prompts": { "query": "the query: ", "document": null, "other": "of another" },
    });
    fs::write(source.join(SETTINGS), settings.to_string()).expect("ours");
    let mut config = training(folder.path(), "wordpiece", &golden);
    config.model.path = Some(source.clone());
    config.model.default_prompt = None;
    let own = [("document".to_string(), "a text of a document".to_string())];
    config.model.prompts = own.into();
    for lora in [None, Some(LoraConfig::default())] {
        let mut config = config.clone();
        config.train.lora = lora;
        let is_full = config.train.lora.is_none();
        let mut trainer = Trainer::start(config.clone()).await.expect("a config of ours");
        let at = folder.path().join(if is_full { "full" } else { "adapters" });
        trainer.checkpoint(&at).await.expect("a place for files");
        let merged = folder.path().join(if is_full { "exported" } else { "merged" });
        let base = Some(&*source).filter(|_| !is_full);
        export(&at, base, &merged, ExportOptions::default()).expect("it is a model");
        for written in [&at, &merged] {
            assert_eq!(json_of(&written.join("1_Pooling/config.json"))["include_prompt"], false);
            let prompts = json!({
                "similarity_fn_name": "cosine", "default_prompt_name": "query",
                "prompts": {
                    "query": "the query: ", "document": "a text of a document",
                    "other": "of another",
                },
            });
            assert_eq!(json_of(&written.join(SETTINGS)), prompts, "{}", written.display());
        }
        let shape = shape_of(&config).expect("a model of ours");
        let sequences = sequences_of_texts(&config, &shape, &texts).expect("good texts");
        let batch = Batch::of_texts(&sequences);
        let own = trainer.embed(batch).await.expect("it embeds");
        let mut again = Config::default();
        again.model.path = Some(merged);
        again.model.task = Some(config::Task::SentenceEmbedding);
        let found = embeddings_of(&again, &texts).await;
        let off = found.iter().zip(&own).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(off < 1e-6, "{off}");
        // No prompt, although the directory has a default.
        again.model.default_prompt = Some(String::new());
        let shape = shape_of(&again).expect("a model of ours");
        let plain = sequences_of_texts(&again, &shape, &texts).expect("good texts");
        assert!(plain[0].skipped.is_empty() && plain[0].tokens.len() < sequences[0].tokens.len());
    }
}

/// Each rank leaves out what one process does.
#[test]
fn prompts_are_left_out_on_ranks() {
    let folder = tempfile::tempdir().expect("a place for files");
    let mut config = training(folder.path(), "bpe", &golden());
    config.parallel.groups = 2;
    config.step.micro_batch = config.step.batch * 3 / 2;
    let alone = Task::new(config.clone(), 2).run(None).expect("a config of ours");
    for (seen, _) in on_ranks(2, |_| Task::new(config.clone(), 2)) {
        let (bits, summary) = seen.expect("a config of ours");
        assert_eq!(bits, alone.0);
        assert_eq!(summary.weights_digest, alone.1.weights_digest);
    }
}

/// A directory with a tokenizer and these settings, and a config that reads it.
fn with_settings(folder: &Path, settings: &Value) -> Config {
    let source = folder.join("source");
    fs::create_dir_all(source.join("1_Pooling")).expect("ours");
    for file in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        fs::copy(model("wordpiece").join(file), source.join(file)).expect("ours");
    }
    fs::write(source.join(SETTINGS), settings.to_string()).expect("ours");
    let mut config = training(folder, "wordpiece", &golden());
    config.model.path = Some(source);
    config
}

/// As in sentence-transformers 6.
#[test]
fn a_default_without_a_text_is_no_prompt() {
    let folder = tempfile::tempdir().expect("a place for files");
    for name in ["query", "document"] {
        let settings = json!({ "default_prompt_name": name });
        let mut config = with_settings(folder.path(), &settings);
        config.model.default_prompt = None;
        config.model.prompts.clear();
        let shape = shape_of(&config).expect("a model of ours");
        let texts = ["what is a layer?".to_string()];
        let found = sequences_of_texts(&config, &shape, &texts).expect("good texts");
        config.model.default_prompt = Some(String::new());
        let plain = sequences_of_texts(&config, &shape, &texts).expect("good texts");
        assert_eq!(found, plain);
    }
}

/// Why a config that reads a directory with these settings is refused.
fn refused(settings: &Value, change: &dyn Fn(&mut Config), says: &str) {
    let folder = tempfile::tempdir().expect("a place for files");
    let mut config = with_settings(folder.path(), settings);
    change(&mut config);
    let opened = config.check().and_then(|()| shape_of(&config));
    let opened = opened.and_then(|shape| Dataset::open(&config, &shape).map(drop));
    let error = opened.expect_err(says).to_string();
    assert!(error.contains(says), "{says:?} expected in: {error}");
}

#[test]
fn prompts_of_directories_that_cannot_be_are_refused_by_name() {
    let none = |_: &mut Config| {};
    let own = |config: &mut Config| {
        config.model.default_prompt = None;
        config.model.prompts.clear();
    };
    let says = "prompts is \"query\": it must be texts by name";
    refused(&json!({ "prompts": "query" }), &none, says);
    refused(&json!({ "prompts": { "query": 1 } }), &none, "prompts: query is 1, and no text");
    refused(&json!({ "default_prompt_name": 1 }), &none, "default_prompt_name is 1, and no name");
    let unknown = json!({ "default_prompt_name": "passage", "prompts": { "query": "q: " } });
    let says = "default_prompt_name is \"passage\", and the model has no prompt of that name: it \
                has query";
    refused(&unknown, &own, says);
    let says = "no prompt of that name: it has none (model.prompts adds some). For no prompt, set \
                model.default_prompt = \"\"";
    refused(&json!({ "default_prompt_name": "passage" }), &own, says);
    let pooling = |config: &mut Config| {
        let source = config.model.path.clone().expect("it is set");
        let of_pooling = json!({ "pooling_mode_mean_tokens": true, "include_prompt": 1 });
        fs::write(source.join("1_Pooling/config.json"), of_pooling.to_string()).expect("ours");
        let modules = json!([{ "path": "", "type": "Transformer" },
            { "path": "1_Pooling", "type": "Pooling" }]);
        fs::write(source.join("modules.json"), modules.to_string()).expect("ours");
    };
    refused(&json!({}), &pooling, "include_prompt is 1: it must be true or false");
}

#[test]
fn prompts_of_configs_that_cannot_be_are_refused_by_name() {
    let refused = |change: &dyn Fn(&mut Config), says: &str| refused(&json!({}), change, says);
    let other = |config: &mut Config| config.model.default_prompt = Some("passage".into());
    let says = "model.default_prompt is \"passage\", and the model has no prompt of that name: it \
                has document, none, query";
    refused(&other, says);
    let masked = |config: &mut Config| {
        config.objective = Default::default();
        config.model.task = Some(config::Task::MaskedLm);
    };
    refused(&masked, "data.prompts.anchor is for a loss of sentence embeddings");
    for (key, change) in [
        ("model.include_prompt", (|_| {}) as fn(&mut Config)),
        ("model.default_prompt", |config| config.model.include_prompt = None),
        ("model.prompts", |config| {
            config.model.include_prompt = None;
            config.model.default_prompt = None;
        }),
    ] {
        let change = |config: &mut Config| {
            masked(config);
            config.data.prompts = PromptsConfig::default();
            (config.model.pooling, config.model.normalise) = (None, None);
            change(config);
        };
        refused(&change, &format!("{key} is for sentence-embedding"));
    }
    let no_negatives = |config: &mut Config| config.objective.negatives = 0;
    let says = "data.prompts.negative is for records with hard negatives: set objective.negatives";
    refused(&no_negatives, says);
    let short = |config: &mut Config| {
        config.data.sequence_length = Some(4);
        config.data.too_long = TooLong::Cut;
    };
    refused(&short, "tokens the embedding leaves out");
}

/// A batch of a program's own whose embedding would be of nothing.
#[tokio::test]
async fn an_embedding_of_no_token_is_refused() {
    let golden = golden();
    let mut evaluator = Evaluator::start(embedder("bpe", &golden)).await.expect("it is a model");
    let one = Sequence { skipped: vec![3], ..Sequence::plain(vec![5, 6, 7]) };
    let error = evaluator.embed(Batch::of_texts(&[one])).await.expect_err("no token is left");
    let says = "the embedding of a sequence of 3 tokens leaves all of them out";
    assert!(error.to_string().contains(says), "{error}");
}
