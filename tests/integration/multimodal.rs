//! Text models of directories whose models also read images. `goldens/multimodal.py` makes what is
//! compared with.

use std::fs;
use std::path::{Path, PathBuf};

use l2l::config::{LoraConfig, ObjectiveKind, ScheduleKind, StashPlace, Task, TrainConfig};
use l2l::hf::{self, ExportOptions};
use l2l::inference::Evaluator;
use l2l::{Config, Trainer};
use safetensors::SafeTensors;
use serde_json::{Value, json};

use crate::expert_files::{self, Tensors};
use crate::pytorch::{case, check};

const PART: &str = "language_model.";

fn config_of(directory: &Path) -> Value {
    let text = fs::read_to_string(directory.join("config.json")).expect("a directory has one");
    serde_json::from_str(&text).expect("it is JSON")
}

fn weights(directory: &Path) -> Vec<u8> {
    fs::read(directory.join("model.safetensors")).expect("a directory has them")
}

fn read(bytes: &[u8]) -> SafeTensors<'_> {
    SafeTensors::deserialize(bytes).expect("it is whole")
}

#[tokio::test]
async fn the_text_model_is_pytorchs() {
    let (config, golden) = case("gemma3");
    let relay = check(config.clone(), &golden).await;
    let mut resident = config;
    resident.schedule.kind = ScheduleKind::Resident;
    resident.schedule.recompute = false.into();
    resident.stash.place = StashPlace::Device;
    assert_eq!(check(resident, &golden).await, relay);
}

#[tokio::test]
async fn a_text_model_is_written_alone() {
    let (config, _) = case("gemma3");
    let from = config.model.path.clone().expect("a case has one");
    let folder = tempfile::tempdir().expect("a place for files");
    let mut trainer = Trainer::start(config).await.expect("a case of ours");
    trainer.save(folder.path()).await.expect("a directory of ours");
    trainer.stop().await.expect("nothing fails here");
    let [from_bytes, to_bytes] = [&from, folder.path()].map(weights);
    let [from, to] = [&from_bytes, &to_bytes].map(|bytes| read(bytes));
    let text = from.tensors().into_iter().filter_map(|(name, tensor)| {
        name.strip_prefix(PART).map(|own| (own.to_string(), tensor.data().to_vec()))
    });
    let text: Vec<(String, Vec<u8>)> = text.collect();
    assert_eq!(to.len(), text.len());
    for (name, data) in &text {
        assert_eq!(to.tensor(name).expect("it is written").data(), data, "{name}");
    }
}

/// Trains adapters for two steps; returns the config and the place of the checkpoint.
async fn adapted(mut config: Config, folder: &Path, task: Option<Task>) -> (Config, PathBuf) {
    config.train.lora = Some(LoraConfig { rank: Some(2), ..LoraConfig::default() });
    config.optimizer.learning_rate = 0.05;
    if task.is_some() {
        config.model.task = task;
        let classes = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/roberta-classes");
        config.data.train = classes.join("data.jsonl").display().to_string().into();
        config.model.labels = Some(l2l::config::Labels::Count(3));
    }
    let mut batches = l2l::data::Batches::open(&config).expect("it is committed");
    let mut trainer = Trainer::start(config.clone()).await.expect("a case of ours");
    for _ in 0..2 {
        trainer.step(batches.next().await.expect("good data")).await.expect("nothing fails here");
    }
    let place = folder.join("checkpoint");
    trainer.checkpoint(&place).await.expect("a directory of ours");
    trainer.stop().await.expect("nothing fails here");
    (config, place)
}

async fn loss_of(config: &Config) -> f64 {
    let shape = l2l::shape_of(config).expect("a case of ours");
    let (data, _) = l2l::data::Dataset::open(config, &shape).expect("it is committed");
    let mut evaluator = Evaluator::start(config.clone()).await.expect("a case of ours");
    let loss = evaluator.evaluate(data.in_order(4, 3)).await.expect("nothing fails here").loss;
    evaluator.stop().await.expect("nothing fails here");
    loss
}

#[tokio::test]
async fn merged_adapters_give_the_whole_model() {
    let folder = tempfile::tempdir().expect("a place for files");
    let (config, place) = adapted(case("gemma3").0, folder.path(), None).await;
    let base = config.model.path.clone().expect("a case has one");
    let of_text = config_of(&place);
    assert_eq!(of_text["model_type"], "gemma3_text");
    assert!(of_text.get("vision_config").is_none() && of_text.get("text_config").is_none());
    let merged = folder.path().join("merged");
    hf::export(&place, Some(&base), &merged, ExportOptions::default()).expect("ours");
    let [mut described, mut of_base] = [config_of(&merged), config_of(&base)];
    for config in [&mut described, &mut of_base] {
        config.as_object_mut().expect("it is one").remove("dtype");
    }
    assert_eq!(described, of_base);
    let [from_bytes, to_bytes] = [&base, &merged].map(|place| weights(place));
    let [from, to] = [&from_bytes, &to_bytes].map(|bytes| read(bytes));
    assert_eq!(from.len(), to.len());
    let mut changed = 0;
    for (name, tensor) in from.tensors() {
        let is_same = to.tensor(&name).expect("it is written").data() == tensor.data();
        let is_adapted = name.starts_with(PART) && name.ends_with("_proj.weight");
        assert_eq!(is_same, !is_adapted, "{name}");
        changed += usize::from(is_adapted);
    }
    assert_eq!(changed, 2 * 7);
    let mut trained = config.clone();
    trained.train.lora = Some(LoraConfig { path: Some(place), ..LoraConfig::default() });
    let mut plain = config;
    plain.model.path = Some(merged);
    plain.train = TrainConfig::default();
    let [with, without] = [loss_of(&trained).await, loss_of(&plain).await];
    assert!((with - without).abs() < 1e-5, "{with} {without}");
}

#[tokio::test]
async fn a_head_of_classes_is_not_merged_into_the_whole_model() {
    let folder = tempfile::tempdir().expect("a place for files");
    let (config, place) =
        adapted(case("gemma3").0, folder.path(), Some(Task::SequenceClassification)).await;
    let merged = folder.path().join("merged");
    let base = config.model.path.as_deref();
    let refused = hf::export(&place, base, &merged, ExportOptions::default());
    let refused = refused.expect_err("it reads images").to_string();
    assert!(refused.contains("it also reads images"), "{refused}");
    assert!(!merged.exists());
}

/// The name that a model of Qwen3.5 or Gemma 4 which also reads images has for a tensor.
fn in_whole(name: &str) -> String {
    name.replacen("model.", "model.language_model.", 1)
}

/// What reads images or sounds, and what guesses further tokens, are left out.
#[tokio::test]
async fn the_text_model_of_a_whole_model_is_read() {
    let qwen3_5 = ["model.visual.blocks.0.norm1.weight", "mtp.layers.0.mlp.up_proj.weight"];
    let gemma4 = ["model.vision_tower.encoder.layers.0.layer_scalar", "model.embed_audio.weight"];
    // Some checkpoints have what blocks that read the keys and values of others do not need.
    let unread =
        ["model.layers.4.self_attn.k_proj.weight", "model.layers.6.self_attn.k_norm.weight"];
    let unread = unread.map(in_whole);
    let cases = [
        ("qwen3_5_text-tied", "qwen3_5", qwen3_5.map(String::from)),
        ("gemma4_text", "gemma4", gemma4.map(String::from)),
        ("gemma4_text-inputs", "gemma4", unread),
    ];
    for (name, family, others) in cases {
        let (mut config, _) = case(name);
        let from = config.model.path.clone().expect("a case has one");
        let folder = tempfile::tempdir().expect("a place for files");
        let text = config_of(&from);
        let whole = serde_json::json!({ "model_type": family, "text_config": text });
        let place = folder.path().join("config.json");
        fs::write(place, whole.to_string()).expect("a directory of ours");
        let bytes = weights(&from);
        let own = read(&bytes).tensors();
        let (_, other) = own[0].clone();
        let long = |name: String| in_whole(&name);
        let others = others.map(|name| (name, other.clone()));
        let all = own.into_iter().map(|(name, tensor)| (long(name), tensor)).chain(others);
        let to = folder.path().join("model.safetensors");
        safetensors::serialize_to_file(all, None, &to).expect("a directory of ours");
        let mut digests = Vec::new();
        for path in [from, folder.path().into()] {
            config.model.path = Some(path);
            let mut trainer = Trainer::start(config.clone()).await.expect("a case of ours");
            digests.push(trainer.digest().await.expect("nothing fails here"));
            trainer.stop().await.expect("nothing fails here");
        }
        assert_eq!(digests[0], digests[1], "{name}");
    }
}

/// Qwen3.5 with experts is released with those of a block in one tensor, beside what reads images.
#[tokio::test]
async fn fused_experts_of_a_whole_model_are_read_and_written_by_themselves() {
    let (mut config, _) = case("qwen3_5_moe_text");
    let from = config.model.path.clone().expect("a case has one");
    let single = expert_files::golden("qwen3_5_moe_text");
    let whole = |tensors: &Tensors, long: &dyn Fn(&str) -> String| {
        let own = tensors.iter().map(|(name, tensor)| (long(name), tensor.clone()));
        let (_, other) = tensors.first_key_value().expect("it has some");
        let others = ["model.visual.merger.norm.weight", "mtp.layers.0.mlp.experts.gate_up_proj"];
        let others = others.map(|name| (name.to_string(), other.clone()));
        own.chain(others).collect::<Tensors>()
    };
    let older = |name: &str| format!("{PART}{name}");
    for long in [&in_whole as &dyn Fn(&str) -> String, &older] {
        let folder = tempfile::tempdir().expect("a place for files");
        let directories = ["single", "fused"].map(|name| folder.path().join(name));
        let layouts = [single.clone(), expert_files::fused(&single)];
        for (at, tensors) in directories.iter().zip(&layouts) {
            fs::create_dir(at).expect("a directory of ours");
            let text = json!({ "model_type": "qwen3_5_moe", "text_config": config_of(&from) });
            fs::write(at.join("config.json"), text.to_string()).expect("a directory of ours");
            expert_files::write(&whole(tensors, long), &at.join("model.safetensors"));
        }
        let expected = expert_files::digest(case("qwen3_5_moe_text").0).await;
        config.model.path = Some(directories[1].clone());
        assert_eq!(expert_files::digest(config.clone()).await, expected);
        let exported = folder.path().join("exported");
        hf::export(&directories[1], None, &exported, ExportOptions::default()).expect("ours");
        assert_eq!(expert_files::read(&exported), whole(&single, long));
        let (_, adapters) = adapted(config.clone(), folder.path(), None).await;
        let merged = directories.each_ref().map(|base| {
            let to = base.join("merged");
            hf::export(&adapters, Some(base), &to, ExportOptions::default()).expect("ours");
            expert_files::read(&to)
        });
        assert_eq!(merged[0], merged[1]);
        let expert = long("model.layers.1.mlp.experts.0.up_proj.weight");
        assert_ne!(merged[1][&expert], single["model.layers.1.mlp.experts.0.up_proj.weight"]);
    }
}

/// Without Text in the names, transformers' models of embeddings also read images.
#[tokio::test]
async fn embeddings_of_qwen3_5_are_models_of_text() {
    for (name, expected) in
        [("qwen3_5_text", "Qwen3_5TextModel"), ("qwen3_5_moe_text", "Qwen3_5MoeTextModel")]
    {
        let (mut config, _) = case(name);
        config.model.task = Some(Task::SentenceEmbedding);
        config.objective.kind = ObjectiveKind::Contrastive;
        let folder = tempfile::tempdir().expect("a place for files");
        let place = folder.path().join("checkpoint");
        let mut trainer = Trainer::start(config).await.expect("a case of ours");
        trainer.checkpoint(&place).await.expect("a directory of ours");
        trainer.stop().await.expect("nothing fails here");
        assert_eq!(config_of(&place)["architectures"], json!([expected]));
    }
}

/// Where config.json has no key and value heads.
#[test]
fn defaults_of_qwen3_5_are_those_of_the_family() {
    for (name, expected) in [("qwen3_5_text", 4), ("qwen3_5_moe_text", 2)] {
        let (mut config, _) = case(name);
        let folder = tempfile::tempdir().expect("a place for files");
        let mut of_model = config_of(config.model.path.as_deref().expect("a case has one"));
        of_model.as_object_mut().expect("it is one").remove("num_key_value_heads");
        of_model["num_attention_heads"] = 4.into();
        fs::write(folder.path().join("config.json"), of_model.to_string()).expect("ours");
        config.model.path = Some(folder.path().into());
        assert_eq!(l2l::shape_of(&config).expect("a shape of ours").kv_heads, expected, "{name}");
    }
}
