//! Heads that are not the embedding, although `config.json` ties them: of files with two tables,
//! and of adapters that train one of them. `goldens/heads.py` makes what is compared with.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use l2l::config::{LoraConfig, TrainConfig};
use l2l::data::{Batches, Dataset};
use l2l::inference::{self, Evaluator};
use l2l::models::{Model, Shape};
use l2l::{Config, Trainer, hf, shape_of};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::pytorch;

const FAMILIES: [&str; 8] =
    ["tied", "qwen2", "qwen3", "gemma3_text", "opt", "bert", "roberta", "distilbert"];

/// The models whose adapters bring tables, and which tables those are. PEFT ties again only what is
/// called `embed_tokens`.
const ADAPTED: [(&str, &[&str]); 6] = [
    ("tied", &["embedding", "head", "both"]),
    ("qwen2", &["embedding", "head", "both", "tied"]),
    ("opt", &["embedding", "head", "both", "tied"]),
    ("bert", &["embedding", "head", "both"]),
    ("roberta", &["embedding", "head", "both"]),
    ("distilbert", &["embedding", "head", "both"]),
];

fn goldens(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(name)
}

fn golden() -> Value {
    json_of(&goldens("heads.json"))
}

fn json_of(path: &Path) -> Value {
    let text = fs::read_to_string(path).expect("it is there");
    serde_json::from_str(&text).expect("it is JSON")
}

/// A tensor of f32.
#[derive(Clone, Debug, PartialEq)]
struct Stored {
    shape: Vec<usize>,
    values: Vec<f32>,
}

type Tensors = BTreeMap<String, Stored>;

fn read(path: &Path) -> Tensors {
    let bytes = fs::read(path).expect("it is there");
    let all = SafeTensors::deserialize(&bytes).expect("it is whole").tensors();
    let one = |(name, view): (String, TensorView<'_>)| {
        assert_eq!(view.dtype(), Dtype::F32, "{name}");
        let values = view.data().as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes));
        (name, Stored { shape: view.shape().to_vec(), values: values.collect() })
    };
    all.into_iter().map(one).collect()
}

fn write(path: &Path, tensors: &Tensors) {
    let bytes = |one: &Stored| one.values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let all: Vec<(&String, &Stored, Vec<u8>)> =
        tensors.iter().map(|(name, one)| (name, one, bytes(one))).collect();
    let views = all.iter().map(|(name, one, bytes)| {
        (*name, TensorView::new(Dtype::F32, one.shape.clone(), bytes).expect("whole"))
    });
    safetensors::serialize_to_file(views, None, path).expect("a directory of ours");
}

/// The rows of a tensor, moved by one and halved.
fn moved(from: &Stored) -> Stored {
    let mut values: Vec<f32> = from.values.iter().map(|value| 0.5 * value).collect();
    let row = values.len() / from.shape[0];
    values.rotate_right(row);
    Stored { shape: from.shape.clone(), values }
}

/// Another embedding, another head with its bias, both, or one table for both.
fn tables(shape: &Shape, weights: &Tensors, which: &str) -> Tensors {
    let table = shape.names.embedding;
    let mut all = Tensors::new();
    if which != "head" {
        all.insert(table.into(), moved(&weights[table]));
    }
    if which == "tied" {
        all.insert(shape.names.head.into(), moved(&weights[table]));
    }
    if ["head", "both"].contains(&which) {
        all.insert(shape.names.head.into(), moved(&moved(&weights[table])));
        if shape.masked_head() {
            let own = Shape { tied: false, ..*shape }.head_bias();
            all.insert(own, moved(&weights[shape.names.head_bias]));
        }
    }
    all
}

/// A case's config, whose model is in a directory with the same `config.json` and these weights.
fn with_weights(name: &str, change: impl Fn(&Shape, Tensors) -> Tensors) -> (Config, TempDir) {
    let (mut config, _) = pytorch::case(name);
    let shape = shape_of(&config).expect("a case of ours");
    let folder = tempfile::tempdir().expect("a place for files");
    let from = goldens(name);
    fs::copy(from.join("config.json"), folder.path().join("config.json")).expect("committed");
    let weights = change(&shape, read(&from.join("model.safetensors")));
    write(&folder.path().join("model.safetensors"), &weights);
    config.model.path = Some(folder.path().into());
    config.optimizer.clip_norm = None;
    (config, folder)
}

/// A case's config, with another head in its model's file.
fn with_own_head(name: &str) -> (Config, TempDir) {
    with_weights(name, |shape, weights| {
        let tables = tables(shape, &weights, "head");
        weights.into_iter().chain(tables).collect()
    })
}

/// A case's config, with PEFT's adapters that bring these tables.
fn with_adapters(name: &str, which: &str) -> (Config, TempDir) {
    let (mut config, _) = pytorch::case(name);
    let shape = shape_of(&config).expect("a case of ours");
    let folder = tempfile::tempdir().expect("a place for files");
    let from = goldens("lora").join(name);
    let weights = read(&goldens(name).join("model.safetensors"));
    let tables = tables(&shape, &weights, which);
    let module = |name: &String| name.rsplit_once('.').expect("a weight").0.to_string();
    let mut modules: Vec<String> = tables.keys().map(module).collect();
    modules.dedup();
    modules.retain(|module| which != "tied" || module != "lm_head");
    let tables = tables.into_iter().map(|(name, one)| (format!("base_model.model.{name}"), one));
    let all = read(&from.join("adapter_model.safetensors")).into_iter().chain(tables).collect();
    write(&folder.path().join("adapter_model.safetensors"), &all);
    let mut described = json_of(&from.join("adapter_config.json"));
    described["modules_to_save"] = json!(modules);
    described["ensure_weight_tying"] = (which == "tied").into();
    fs::write(folder.path().join("adapter_config.json"), described.to_string()).expect("ours");
    let lora = LoraConfig { path: Some(folder.path().into()), ..LoraConfig::default() };
    config.train.lora = Some(lora);
    config.optimizer.clip_norm = None;
    (config, folder)
}

async fn digest_of(config: &Config) -> String {
    let mut trainer = Trainer::start(config.clone()).await.expect("a case of ours");
    let digest = trainer.digest().await.expect("nothing fails here");
    trainer.stop().await.expect("a clean end");
    digest
}

async fn loss_of(config: &Config) -> f64 {
    let shape = shape_of(config).expect("a case of ours");
    let (data, _) = Dataset::open(config, &shape).expect("it is committed");
    let mut evaluator = Evaluator::start(config.clone()).await.expect("a case of ours");
    let loss = evaluator.evaluate(data.in_order(4, 3)).await.expect("nothing fails here").loss;
    evaluator.stop().await.expect("a clean end");
    loss
}

fn ties(directory: &Path) -> Value {
    json_of(&directory.join("config.json"))["tie_word_embeddings"].clone()
}

#[tokio::test]
async fn a_head_that_differs_is_kept() {
    let golden = golden();
    for name in FAMILIES {
        let (config, _folder) = with_own_head(name);
        let digest = pytorch::check(config, &golden["own"][name]).await;
        assert!(!digest.is_empty(), "{name}");
    }
}

/// What is saved, resumed and exported has two tables, and says so.
#[tokio::test]
async fn a_head_of_its_own_survives_a_round_trip() {
    for name in FAMILIES {
        let (config, folder) = with_own_head(name);
        let loss = loss_of(&config).await;
        let place = folder.path().join("checkpoint");
        let mut trainer = Trainer::start(config.clone()).await.expect("a case of ours");
        let mut batches = Batches::open(&config).expect("it is committed");
        trainer.checkpoint(&place).await.expect("a directory of ours");
        trainer.step(batches.next().await.expect("good data")).await.expect("nothing fails here");
        let after = trainer.digest().await.expect("nothing fails here");
        trainer.stop().await.expect("a clean end");
        let mut resumed =
            Trainer::builder(config.clone()).resume(&place).start().await.expect("it is whole");
        let mut batches = Batches::open(&config).expect("it is committed");
        resumed.step(batches.next().await.expect("good data")).await.expect("nothing fails here");
        assert_eq!(resumed.digest().await.expect("nothing fails here"), after, "{name}");
        resumed.stop().await.expect("a clean end");
        let exported = folder.path().join("exported");
        let base = config.model.path.as_deref();
        hf::export(base.expect("a case has one"), None, &exported, Default::default())
            .expect("a model of ours");
        for place in [&place, &exported] {
            let mut again = config.clone();
            again.model.path = Some(place.clone());
            assert_eq!(ties(place), false, "{name}");
            assert_eq!(loss_of(&again).await, loss, "{name}");
            let written = read(&place.join("model.safetensors"));
            let shape = shape_of(&again).expect("a case of ours");
            assert!(written.contains_key(shape.names.head), "{name}");
            for bias in [&shape.head_bias()[..], shape.names.head_bias] {
                assert!(!shape.masked_head() || written.contains_key(bias), "{name}");
            }
        }
    }
}

/// Files that store a tied table twice, or by the head's name alone, are what they were.
#[tokio::test]
async fn a_table_that_is_stored_twice_or_as_the_head_is_tied() {
    for name in FAMILIES {
        let (plain, _) = pytorch::case(name);
        let shape = shape_of(&plain).expect("a case of ours");
        assert!(shape.tied, "{name}");
        let plain = Config { optimizer: with_own_head(name).0.optimizer, ..plain };
        let digest = digest_of(&plain).await;
        let (twice, _folder) = with_weights(name, |shape, mut weights| {
            weights.insert(shape.names.head.into(), weights[shape.names.embedding].clone());
            weights
        });
        let (alone, folder) = with_weights(name, |shape, mut weights| {
            let table = weights.remove(shape.names.embedding).expect("it has one");
            weights.insert(shape.names.head.into(), table);
            weights
        });
        for config in [&twice, &alone] {
            assert!(shape_of(config).expect("a case of ours").tied, "{name}");
            assert_eq!(digest_of(config).await, digest, "{name}");
        }
        let exported = folder.path().join("exported");
        hf::export(folder.path(), None, &exported, Default::default()).expect("a model of ours");
        assert_eq!(
            read(&exported.join("model.safetensors")),
            read(&goldens(name).join("model.safetensors")),
            "{name}"
        );
    }
}

/// The bias of a masked head is the one that transformers adds, where files have two.
#[tokio::test]
async fn the_bias_of_the_heads_layer_prevails() {
    for name in ["bert", "roberta"] {
        let own = |shape: &Shape| Shape { tied: false, ..*shape }.head_bias();
        let (both, _one) = with_weights(name, |shape, mut weights| {
            weights.insert(own(shape), moved(&weights[shape.names.head_bias]));
            weights
        });
        let (alone, _two) = with_weights(name, |shape, mut weights| {
            let bias = weights.remove(shape.names.head_bias).expect("it has one");
            weights.insert(own(shape), moved(&bias));
            weights
        });
        let (plain, _) = pytorch::case(name);
        assert!(shape_of(&both).expect("a case of ours").tied, "{name}");
        let loss = loss_of(&both).await;
        assert_eq!(loss, loss_of(&alone).await, "{name}");
        assert!((loss - loss_of(&plain).await).abs() > 1e-3, "{name}");
    }
}

#[tokio::test]
async fn a_head_that_is_missing_is_refused() {
    for name in FAMILIES {
        let (config, folder) = with_weights(name, |_, weights| weights);
        let mut described = json_of(&folder.path().join("config.json"));
        described["tie_word_embeddings"] = false.into();
        fs::write(folder.path().join("config.json"), described.to_string()).expect("ours");
        let head = shape_of(&config).expect("a case of ours").names.head;
        let error = Trainer::start(config).await.err().expect("it has no head").to_string();
        assert!(error.contains(&format!("{head} is missing")), "{name}: {error}");
    }
}

#[tokio::test]
async fn a_head_of_another_shape_is_refused() {
    let (config, _folder) = with_weights("tied", |shape, mut weights| {
        let mut head = weights[shape.names.embedding].clone();
        head.shape = head.shape.into_iter().rev().collect();
        weights.insert(shape.names.head.into(), head);
        weights
    });
    let error = Trainer::start(config).await.err().expect("a head of another model").to_string();
    assert!(error.contains("lm_head.weight: [37, 20] expected, [20, 37] found"), "{error}");
}

/// Ten steps of PEFT's training, whose copies of tables do not move the other table.
#[tokio::test]
async fn tables_beside_adapters_are_pefts() {
    let golden = golden();
    for (name, all) in ADAPTED {
        for which in all {
            let (config, _folder) = with_adapters(name, which);
            pytorch::check(config, &golden["adapters"][name][which]).await;
        }
    }
}

/// Adapters with tables are written as they were read, and merged into weights with two tables.
#[tokio::test]
async fn tables_beside_adapters_survive_a_round_trip() {
    for (name, all) in ADAPTED {
        for which in all {
            let is_tied = *which == "tied";
            let (config, folder) = with_adapters(name, which);
            let loss = loss_of(&config).await;
            let place = folder.path().join("checkpoint");
            let mut trainer = Trainer::start(config.clone()).await.expect("a case of ours");
            trainer.checkpoint(&place).await.expect("a directory of ours");
            trainer.stop().await.expect("a clean end");
            let file = "adapter_model.safetensors";
            assert_eq!(read(&place.join(file)), read(&folder.path().join(file)), "{name} {which}");
            let written = json_of(&place.join("adapter_config.json"));
            assert_eq!(written["ensure_weight_tying"], is_tied, "{name} {which}");
            let mut again = config.clone();
            inference::load_from(&mut again, &place);
            assert_eq!(loss_of(&again).await, loss, "{name} {which}");
            for (number, from) in [folder.path(), &place].into_iter().enumerate() {
                let merged = folder.path().join(format!("merged{number}"));
                hf::export(from, Some(&goldens(name)), &merged, Default::default())
                    .expect("a case of ours");
                assert_eq!(ties(&merged), is_tied, "{name} {which}");
                let mut plain = config.clone();
                plain.model.path = Some(merged);
                plain.train = TrainConfig::default();
                assert_eq!(shape_of(&plain).expect("a model of ours").tied, is_tied);
                let off = (loss_of(&plain).await - loss).abs();
                assert!(off < 1e-5, "{name} {which}: {off}");
            }
        }
    }
}

/// A run resumes with the tables that its adapters have.
#[tokio::test]
async fn a_run_with_tables_beside_adapters_resumes() {
    let (mut config, folder) = with_adapters("bert", "embedding");
    config.train.lora.as_mut().expect("it has adapters").dropout = 0.1;
    let place = folder.path().join("checkpoint");
    let mut batches = Batches::open(&config).expect("it is committed");
    let mut trainer = Trainer::start(config.clone()).await.expect("a case of ours");
    trainer.step(batches.next().await.expect("good data")).await.expect("nothing fails here");
    trainer.checkpoint(&place).await.expect("a directory of ours");
    trainer.step(batches.next().await.expect("good data")).await.expect("nothing fails here");
    let whole = trainer.digest().await.expect("nothing fails here");
    trainer.stop().await.expect("a clean end");
    let mut batches = Batches::open(&config).expect("it is committed");
    batches.next().await.expect("good data");
    let mut resumed = Trainer::builder(config).resume(&place).start().await.expect("it is whole");
    resumed.step(batches.next().await.expect("good data")).await.expect("nothing fails here");
    assert_eq!(resumed.digest().await.expect("nothing fails here"), whole);
    resumed.stop().await.expect("a clean end");
}

/// Tables that PEFT stores beside adapters without training them (`save_embedding_layers`) are the
/// model's own: both are one.
#[tokio::test]
async fn tables_that_are_only_stored_stay_tied() {
    for name in ["qwen2", "bert"] {
        let (config, folder) = with_adapters(name, "tied");
        let described = folder.path().join("adapter_config.json");
        let mut changed = json_of(&described);
        changed["modules_to_save"] = Value::Null;
        changed["ensure_weight_tying"] = false.into();
        fs::write(&described, changed.to_string()).expect("ours");
        let loss = loss_of(&config).await;
        let merged = folder.path().join("merged");
        hf::export(folder.path(), Some(&goldens(name)), &merged, Default::default())
            .expect("a case of ours");
        assert_eq!(ties(&merged), true, "{name}");
        let mut plain = config.clone();
        plain.model.path = Some(merged);
        plain.train = TrainConfig::default();
        assert!((loss_of(&plain).await - loss).abs() < 1e-5, "{name}");
    }
}

/// A program's own model may tie what the files do not.
#[tokio::test]
async fn two_tables_are_not_read_as_one() {
    let (config, _folder) = with_own_head("qwen2");
    let tied = Shape { tied: true, ..shape_of(&config).expect("a case of ours") };
    let started = Trainer::builder(config).model(Model::new(tied)).start().await;
    let error = started.err().expect("there are two tables").to_string();
    assert!(error.contains("lm_head.weight is not model.embed_tokens.weight"), "{error}");
}
