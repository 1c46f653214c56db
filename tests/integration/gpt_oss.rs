//! gpt-oss: its files, in floats and in MXFP4, are read and written as transformers has them, and
//! what is not built is refused by name.

use std::fs;
use std::path::{Path, PathBuf};

use l2l::config::{LoraConfig, OptimizerKind};
use l2l::data::{Batch, Batches, Predicts, Sequence};
use l2l::models::Base;
use l2l::{Config, Trainer, hf};
use safetensors::tensor::Dtype;
use serde_json::Value;

use crate::expert_files::{Stored, Tensors, digest, directory, golden, on, read};
use crate::pytorch::{case, check};

const UP: &str = "model.layers.1.mlp.experts.gate_up_proj";

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(name)
}

/// A run on random tokens with the model in MXFP4.
fn in_mxfp4() -> Config {
    let mut config = Config::default();
    config.model.path = Some(folder("mxfp4"));
    config.data.train = "random".into();
    config.data.sequence_length = Some(9);
    config.step.batch = 2;
    config.optimizer.learning_rate = 0.01;
    config
}

#[tokio::test]
async fn shards_and_names_without_a_prefix_are_read() {
    let whole = golden("gpt_oss");
    let bare = |(name, tensor): (&String, &Stored)| {
        (name.strip_prefix("model.").unwrap_or(name).to_string(), tensor.clone())
    };
    let bare: Tensors = whole.iter().map(bare).collect();
    let expected = digest(case("gpt_oss").0).await;
    for (tensors, files) in [(&whole, 3), (&bare, 1)] {
        let folder = directory("gpt_oss", tensors, files);
        assert_eq!(digest(on("gpt_oss", folder.path())).await, expected, "{files}");
    }
}

/// What l2l writes has the names, the sizes and the bits of the files that it read. Optimizer
/// states and a resumed run are whole, too.
#[tokio::test]
async fn files_are_written_as_they_were_read() {
    let folder = tempfile::tempdir().expect("a place for files");
    let [start, half, export] = ["start", "half", "export"].map(|name| folder.path().join(name));
    for kind in [OptimizerKind::Adamw, OptimizerKind::Adafactor, OptimizerKind::Muon] {
        let (mut config, _) = case("gpt_oss");
        config.optimizer.kind = kind;
        config.optimizer.learning_rate = 1e-3;
        let mut trainer = Trainer::start(config.clone()).await.expect("a case of ours");
        trainer.checkpoint(&start).await.expect("a directory of ours");
        assert_eq!(read(&start), golden("gpt_oss"), "{kind:?}");
        let mut batches = Batches::open(&config).expect("it is committed");
        trainer.step(batches.next().await.expect("good data")).await.expect("it fits");
        trainer.checkpoint(&half).await.expect("a directory of ours");
        let next = batches.next().await.expect("good data");
        trainer.step(next.clone()).await.expect("it fits");
        let expected = trainer.digest().await.expect("nothing fails here");
        trainer.stop().await.expect("nothing fails here");
        let mut resumed =
            Trainer::builder(config).resume(&half).start().await.expect("a checkpoint of ours");
        resumed.step(next).await.expect("it fits");
        assert_eq!(resumed.digest().await.expect("nothing fails here"), expected, "{kind:?}");
        resumed.stop().await.expect("nothing fails here");
        hf::export(&half, None, &export, Default::default()).expect("a checkpoint of ours");
        assert_eq!(read(&export), read(&half), "{kind:?}");
        assert_ne!(read(&half)[UP], golden("gpt_oss")[UP], "{kind:?}");
        for made in [&start, &half, &export] {
            fs::remove_dir_all(made).expect("it was made");
        }
    }
}

/// Experts that are visited by parts are PyTorch's as well.
#[tokio::test]
async fn experts_apart_are_pytorchs() {
    let (mut config, golden) = case("gpt_oss");
    let together = check(config.clone(), &golden).await;
    config.schedule.bundles = Some(1);
    assert_eq!(check(config, &golden).await, together);
}

/// The logits are those of the model that transformers dequantises.
#[tokio::test]
async fn mxfp4_is_read() {
    let text = fs::read_to_string(folder("mxfp4").join("golden.json")).expect("it is committed");
    let golden: Value = serde_json::from_str(&text).expect("it is JSON");
    let tokens = golden["tokens"].as_array().expect("a list").iter();
    let tokens: Vec<u32> = tokens.map(|id| id.as_u64().expect("a token") as u32).collect();
    let logits = golden["logits"].as_array().expect("a list").iter();
    let logits: Vec<f64> = logits.map(|one| one.as_f64().expect("a number")).collect();
    let mut config = in_mxfp4();
    config.step.batch = 1;
    let shape = l2l::shape_of(&config).expect("a model of ours");
    let mut trainer = Trainer::start(config).await.expect("a model of ours");
    let batch = Batch::of(&[Sequence::plain(tokens)], Predicts::Own);
    let hidden = trainer.encode(batch).await.expect("nothing fails here");
    let (_, table) = trainer.weights(shape.names.head).await.expect("it has one");
    trainer.stop().await.expect("nothing fails here");
    let product =
        |h: &[f32], w: &[f32]| h.iter().zip(w).map(|(h, w)| f64::from(h * w)).sum::<f64>();
    let rows = hidden.chunks(shape.hidden);
    let found = rows.flat_map(|h| table.chunks(shape.hidden).map(move |w| product(h, w)));
    let found: Vec<f64> = found.collect();
    assert_eq!(found.len(), logits.len());
    let off = found.iter().zip(&logits).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(off < 1e-4, "{off}");
}

/// An export is the dequantised model in bf16, with adapters or without; both train as it does.
#[tokio::test]
async fn an_export_of_mxfp4_is_in_floats() {
    let to = tempfile::tempdir().expect("a place for files");
    let [plain, adapters, merged] = ["plain", "run", "merged"].map(|name| to.path().join(name));
    hf::export(&folder("mxfp4"), None, &plain, Default::default()).expect("a model of ours");
    let text = fs::read_to_string(plain.join("config.json")).expect("it was written");
    let config: Value = serde_json::from_str(&text).expect("it is JSON");
    assert_eq!(
        (&config["quantization_config"], &config["dtype"]),
        (&Value::Null, &"bfloat16".into())
    );
    let tensors = read(&plain);
    assert!(tensors.values().all(|tensor| tensor.dtype == Dtype::BF16));
    assert_eq!(tensors[UP].shape, [3, 32, 128]);
    let expected = digest(in_mxfp4()).await;
    let mut on_plain = in_mxfp4();
    on_plain.model.path = Some(plain);
    assert_eq!(digest(on_plain).await, expected);
    let mut config = in_mxfp4();
    config.train.lora = Some(LoraConfig { rank: Some(2), ..LoraConfig::default() });
    config.train.base = Base::Nf4;
    let mut batches = Batches::open(&config).expect("random data");
    let mut trainer = Trainer::start(config).await.expect("a model of ours");
    for _ in 0..2 {
        trainer.step(batches.next().await.expect("random data")).await.expect("it fits");
    }
    trainer.checkpoint(&adapters).await.expect("a directory of ours");
    trainer.stop().await.expect("nothing fails here");
    hf::export(&adapters, Some(&folder("mxfp4")), &merged, Default::default()).expect("ours");
    let merged = read(&merged);
    assert_eq!(merged.keys().collect::<Vec<_>>(), tensors.keys().collect::<Vec<_>>());
    assert_eq!(merged[UP], tensors[UP]);
    let query = "model.layers.0.self_attn.q_proj.weight";
    assert_ne!(merged[query], tensors[query]);
}

/// Starts a run with these tensors, and expects an error that says all of this.
async fn refused(name: &str, tensors: &Tensors, says: &[&str]) {
    let made = directory(name, tensors, 1);
    let mut config = on("gpt_oss", made.path());
    config.data.train = "random".into();
    let error = Trainer::start(config).await.map(drop).expect_err("damaged").to_string();
    let to = made.path().join("export");
    let exported = hf::export(made.path(), None, &to, Default::default());
    for text in says.iter().chain(&["model.safetensors"]) {
        assert!(error.contains(text), "{text:?} expected in: {error}");
    }
    if name == "mxfp4" {
        let error = exported.expect_err("damaged").to_string();
        assert!(error.contains(says[0]), "{error}");
    }
}

#[tokio::test]
async fn damaged_tensors_are_refused() {
    let whole = golden("gpt_oss");
    let mut turned = whole.clone();
    turned.get_mut(UP).expect("it is there").shape = vec![5, 28, 30];
    refused("gpt_oss", &turned, &[UP, "[5, 30, 28] expected, [5, 28, 30] found"]).await;
    let mut lacks = whole.clone();
    lacks.remove("model.layers.0.self_attn.sinks");
    refused("gpt_oss", &lacks, &["model.layers.0.self_attn.sinks is missing"]).await;
    let mut apart = whole.clone();
    let one = "model.layers.0.mlp.experts.0.gate_proj.weight";
    apart.insert(one.into(), whole["model.layers.0.mlp.router.weight"].clone());
    refused("gpt_oss", &apart, &[one, "in the file and not in the model"]).await;
    let packed = golden("mxfp4");
    let [blocks, scales] = ["blocks", "scales"].map(|part| format!("{UP}_{part}"));
    let mut lacks = packed.clone();
    lacks.remove(&scales);
    refused("mxfp4", &lacks, &[&scales, "is missing, beside", &blocks]).await;
    let mut twice = packed.clone();
    twice.insert(UP.into(), packed["lm_head.weight"].clone());
    refused("mxfp4", &twice, &[UP, "must be there once"]).await;
    let mut turned = packed.clone();
    turned.get_mut(&blocks).expect("it is there").shape = vec![3, 1, 128, 16];
    refused("mxfp4", &turned, &[&blocks, "and their scales of"]).await;
    let mut lost = packed.clone();
    lost.get_mut(&scales).expect("it is there").bytes[5] = u8::MAX;
    refused("mxfp4", &lost, &[UP, "NaN"]).await;
}

/// PEFT adapts linear layers by their names, and all experts of a block are one parameter.
#[tokio::test]
async fn adapters_of_experts_are_refused() {
    for (target, says) in [
        ("gate_up_proj", "experts have no adapters"),
        ("mlp.router", "no adapters here, only q_proj, k_proj, v_proj, o_proj"),
    ] {
        let (mut config, _) = case("gpt_oss");
        let targets = Some(vec![target.into()]);
        config.train.lora = Some(LoraConfig { targets, ..LoraConfig::default() });
        let error = Trainer::start(config).await.map(drop).expect_err(target).to_string();
        assert!(error.contains(says), "{says:?} expected in: {error}");
    }
}
