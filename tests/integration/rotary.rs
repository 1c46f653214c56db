//! Kinds of rotary positions beside transformers: ten steps, and texts that grow beyond the
//! positions that a model was first trained with. `goldens/rotary.py` makes what is compared with.

use std::fs;
use std::path::{Path, PathBuf};

use l2l::config::{Deal, LoraConfig, ScheduleKind, StashPlace};
use l2l::data::{Batch, Dataset, Predicts, Sequence};
use l2l::inference::{Generator, Room, Sampling, Then};
use l2l::{Config, Trainer, hf, shape_of};
use serde_json::{Value, json};

use crate::pytorch::{case, check, numbers};

const CASES: [&str; 9] = [
    "gemma3-layers",
    "llama-dynamic",
    "llama-linear",
    "llama-yarn",
    "mistral-yarn",
    "phi3-longrope",
    "phi3-partial",
    "qwen2-yarn",
    "qwen3-longrope",
];

/// A case with its own limits: sequences are longer than `max_position_embeddings` of some.
fn case_of(name: &str) -> (Config, Value) {
    let (mut config, golden) = case(&format!("rotary/{name}"));
    config.data.sequence_length = Some(24);
    (config, golden)
}

/// Ten steps of micro-batches of unequal lengths; also resident, which is the same bits.
#[tokio::test]
async fn every_kind_is_trained_as_in_transformers() {
    for name in CASES {
        let (config, golden) = case_of(name);
        let relay = check(config.clone(), &golden).await;
        let mut resident = config;
        resident.schedule.kind = ScheduleKind::Resident;
        resident.schedule.recompute = false.into();
        resident.stash.place = StashPlace::Device;
        assert_eq!(check(resident, &golden).await, relay, "{name}");
    }
}

#[tokio::test]
async fn sequences_alone_score_as_in_transformers() {
    for name in CASES {
        let (config, golden) = case_of(name);
        let shape = shape_of(&config).expect("a case of ours");
        let (data, _) = Dataset::open(&config, &shape).expect("it is committed");
        let mut trainer = Trainer::start(config).await.expect("a case of ours");
        for (index, expected) in (0..).zip(numbers(&golden, "singles")) {
            let found = trainer.evaluate([data.batch([index])]).await.expect("nothing fails here");
            assert!(
                (found.loss - expected).abs() < 2e-5,
                "{name} {index}: {} {expected}",
                found.loss
            );
        }
        trainer.stop().await.expect("nothing fails here");
    }
}

fn lists(golden: &Value, key: &str) -> Vec<Vec<u32>> {
    serde_json::from_value(golden[key].clone()).expect("lists of tokens")
}

pub(crate) async fn greedy(config: Config, prompts: &[Vec<u32>], most: usize) -> Vec<Vec<u32>> {
    let prompt = prompts.iter().map(Vec::len).max().expect("a prompt");
    let room = Room { prompts: prompts.len(), prompt, tokens: prompt + most };
    let mut generator = Generator::start(config, room).await.expect("a case of ours");
    let mut all = vec![Vec::new(); prompts.len()];
    let each = |prompt: usize, token, _| {
        all[prompt].push(token);
        Then::GoOn
    };
    let how = Sampling::default();
    generator.generate(prompts, most, how, &[], each).await.expect("good prompts");
    generator.stop().await.expect("a clean end");
    all
}

/// Each prompt is continued as transformers continues it alone, also among others.
#[tokio::test]
async fn every_kind_generates_as_in_transformers() {
    for name in CASES {
        let (mut config, golden) = case_of(name);
        let prompts = lists(&golden, "prompts");
        let expected = lists(&golden, "greedy");
        let most = expected[0].len();
        assert_eq!(greedy(config.clone(), &prompts, most).await, expected, "{name}");
        config.step.micro_batch = 1;
        (config.schedule.kind, config.stash.place) = (ScheduleKind::Resident, StashPlace::Device);
        let alone = greedy(config.clone(), &prompts[1..2], most).await;
        assert_eq!(alone, expected[1..2], "{name}");
        (config.parallel.deal, config.parallel.groups) = (Deal::Sequences, 2);
        (config.schedule.kind, config.stash.place) = (ScheduleKind::Relay, StashPlace::Host);
        (config.step.batch, config.device.count) = (2, Some(2));
        assert_eq!(greedy(config, &prompts, most).await, expected, "{name}");
    }
}

/// A text of Phi-3 that gets long is read anew, and the plan has memory for it.
#[test]
fn the_plan_has_room_to_read_a_text_anew() {
    let bytes = |name: &str, tokens: usize| {
        let (config, _) = case_of(name);
        let room = Room { prompts: 2, prompt: 3, tokens };
        Generator::plan(&config, room).expect("a case of ours").device_bytes()
    };
    // Of 12 positions nothing is read anew, but the KV cache grows with the 13th.
    let growth = |name| bytes(name, 13) - bytes(name, 12);
    assert!(growth("phi3-longrope") > growth("qwen3-longrope"));
}

fn json_of(file: &Path) -> Value {
    let text = fs::read_to_string(file).expect("it is there");
    serde_json::from_str(&text).expect("JSON")
}

/// The keys of rotary positions of a `config.json`.
fn rope(folder: &Path) -> Vec<(&'static str, Value)> {
    let keys = ["rope_parameters", "rope_scaling", "partial_rotary_factor"];
    let all = json_of(&folder.join("config.json"));
    keys.into_iter()
        .map(|key| (key, all[key].clone()))
        .filter(|(_, value)| !value.is_null())
        .collect()
}

async fn first_loss(config: Config) -> f64 {
    let (data, _) = Dataset::open(&config, &shape_of(&config).expect("ours")).expect("ours");
    let mut trainer = Trainer::start(config).await.expect("a case of ours");
    let loss = trainer.evaluate([data.batch([0, 1])]).await.expect("nothing fails here").loss;
    trainer.stop().await.expect("nothing fails here");
    loss
}

/// A checkpoint keeps what the source says of rotary positions, and a model that is read without it
/// is the same.
#[tokio::test]
async fn a_checkpoint_keeps_the_kind() {
    for name in CASES {
        let (config, _) = case_of(name);
        let folder = tempfile::tempdir().expect("a place for files");
        let to = folder.path().join("saved");
        let source = config.model.path.clone().expect("a case has one");
        let mut trainer = Trainer::start(config.clone()).await.expect("a case of ours");
        trainer.checkpoint(&to).await.expect("room on a disk");
        trainer.stop().await.expect("nothing fails here");
        let kept = rope(&to);
        for (key, value) in rope(&source) {
            assert!(kept.contains(&(key, value)), "{name} {key}: {kept:?}");
        }
        let mut saved = config.clone();
        saved.model.path = Some(to.clone());
        let loss = first_loss(config).await;
        assert_eq!(first_loss(saved.clone()).await, loss, "{name}");
        // Transformers 4 reads the other keys.
        let shape = shape_of(&saved).expect("ours");
        for (kept, others) in [(0, 1), (1, 0)].map(|(a, b)| {
            let keys = ["rope_parameters", "rope_scaling"];
            (keys[a], keys[b])
        }) {
            if name.starts_with("gemma3") && kept == "rope_scaling" {
                continue; // version 4 had one kind of positions in windows
            }
            let mut half = json_of(&to.join("config.json"));
            half[others] = Value::Null;
            assert_eq!(shape_in(folder.path(), &half), shape, "{name} {kept}");
        }
    }
}

/// The config of a model in a folder.
fn of(folder: &Path) -> Config {
    let mut config = Config::default();
    config.model.path = Some(folder.into());
    config
}

/// The shape that a `config.json` describes.
fn shape_in(folder: &Path, config: &Value) -> l2l::models::Shape {
    let at = folder.join("of");
    fs::create_dir_all(&at).expect("a place for files");
    fs::write(at.join("config.json"), config.to_string()).expect("a place for files");
    shape_of(&of(&at)).expect("good keys")
}

/// Adapters of a model with a part of each head rotated, in and out.
#[tokio::test]
async fn adapters_of_every_kind_are_merged() {
    for name in ["phi3-partial", "llama-dynamic"] {
        let (mut config, _) = case_of(name);
        let base: PathBuf = config.model.path.clone().expect("a case has one");
        config.train.lora = Some(LoraConfig { rank: Some(2), ..LoraConfig::default() });
        let folder = tempfile::tempdir().expect("a place for files");
        let to = folder.path().join("saved");
        let shape = shape_of(&config).expect("a case of ours");
        let (data, _) = Dataset::open(&config, &shape).expect("it is committed");
        let mut trainer = Trainer::start(config.clone()).await.expect("a case of ours");
        for step in 0..3 {
            let batch = data.batch(step * 5..step * 5 + 5).expect("it is there");
            trainer.step(batch).await.expect("nothing fails here");
        }
        let expected = trainer.evaluate([data.batch([0, 1])]).await.expect("nothing fails").loss;
        trainer.checkpoint(&to).await.expect("room on a disk");
        trainer.stop().await.expect("nothing fails here");
        let merged = folder.path().join("merged");
        hf::export(&to, Some(&base), &merged, Default::default()).expect("it was written");
        config.train.lora = None;
        config.model.path = Some(merged);
        let found = first_loss(config).await;
        assert!((found - expected).abs() < 1e-5, "{name}: {found} {expected}");
    }
}

/// Sequences may be as long as the stretched positions, and no longer.
#[tokio::test]
async fn longer_sequences_than_the_kind_allows_are_refused() {
    for (name, most) in [("llama-dynamic", 42), ("llama-linear", 40), ("qwen2-yarn", 40)] {
        let (mut config, _) = case_of(name);
        let shape = shape_of(&config).expect("a case of ours");
        assert_eq!(shape.most_positions(), most, "{name}");
        config.data.sequence_length = Some(most);
        assert_eq!(config.sequence_length(&shape).expect("it fits"), most);
        config.data.sequence_length = Some(most + 1);
        let refused = config.sequence_length(&shape).expect_err("too long").to_string();
        assert!(refused.contains(&format!("{most} positions")), "{refused}");
    }
}

/// The documents of a packed sequence have the frequencies of the longest of their micro-batch.
#[tokio::test]
async fn documents_have_the_frequencies_of_their_longest() {
    let (mut config, _) = case_of("qwen3-longrope");
    config.step.batch = 4;
    config.step.micro_batch = 4;
    let tokens = |count: u32, first: u32| (first..first + count).collect::<Vec<u32>>();
    let documents = [tokens(8, 3), tokens(9, 20)];
    let apart: Vec<Sequence> = documents.iter().cloned().map(Sequence::plain).collect();
    let mut joined = Sequence::plain(documents.concat());
    joined.documents = vec![8, 9];
    joined.labels[8] = -100; // the second document's first token, which nothing predicts
    let mut trainer = Trainer::start(config).await.expect("a case of ours");
    let mut loss = async |sequences: &[Sequence]| {
        let batch = Batch::of(sequences, Predicts::Next);
        trainer.evaluate([Ok(batch)]).await.expect("nothing fails here").loss
    };
    // 17 positions, but no document has more than 12.
    let packed = loss(&[joined]).await;
    assert!((packed - loss(&apart).await).abs() < 1e-5);
}

/// Keys that contradict each other, or that the family does not have, are named.
#[test]
fn wrong_keys_are_named() {
    let scaled = |scaling: Value| json!({ "rope_scaling": scaling });
    let short = json!({ "type": "longrope", "short_factor": [1.0] });
    let few = json!({ "type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [2.0, 3.0] });
    let zero = json!({ "type": "longrope", "short_factor": [0.0], "long_factor": [1.0] });
    for (case, keys, says) in [
        ("llama-linear", scaled(short), "long_factor is missing"),
        ("llama-linear", scaled(few), "short_factor has 2 numbers: it must have 6"),
        ("llama-linear", scaled(zero), "short_factor is [0.0]: it must be a list of numbers above"),
        ("llama-linear", scaled(json!({ "type": "yarn" })), "factor must be given, at least 1"),
        ("llama-linear", scaled(json!({ "type": "dynamic" })), "factor must be given, at least 1"),
        (
            "llama-linear",
            scaled(json!({ "type": "yarn", "factor": 2, "beta_fast": 0.5 })),
            "beta_fast not below beta_slow",
        ),
        (
            "llama-linear",
            scaled(json!({ "type": "yarn", "factor": 2, "attention_factor": -1 })),
            "attention_factor is -1: it must be above 0",
        ),
        (
            "llama-linear",
            scaled(json!({ "type": "yarn", "factor": 2, "rope_theta": 1.0 })),
            "rope_theta is 1: it must be above 1",
        ),
        (
            "llama-linear",
            scaled(json!({ "full_attention": { "rope_type": "default" } })),
            "has \"full_attention\": only layers of gemma3_text",
        ),
        (
            "llama-linear",
            json!({ "partial_rotary_factor": 0.5 }),
            "heads of llama rotate as a whole",
        ),
        ("phi3-longrope", json!({ "partial_rotary_factor": 1.5 }), "above 0 and at most 1"),
        ("phi3-longrope", json!({ "partial_rotary_factor": 0.25 }), "cannot be rotated in pairs"),
        (
            "gemma3-layers",
            json!({ "rope_parameters": { "rope_type": "linear", "factor": 2.0 } }),
            "it must have two objects, full_attention and sliding_attention",
        ),
        (
            "gemma3-layers",
            scaled(json!({ "rope_type": "yarn", "truncate": false })),
            "transformers 5 does not read it by kind of layer",
        ),
    ] {
        let (config, _) = case_of(case);
        let source = config.model.path.expect("a case has one");
        let mut changed = json_of(&source.join("config.json"));
        let all = changed.as_object_mut().expect("an object");
        all.extend(keys.as_object().expect("an object").clone());
        let folder = tempfile::tempdir().expect("a place for files");
        fs::write(folder.path().join("config.json"), changed.to_string()).expect("a disk");
        let refused = shape_of(&of(folder.path())).expect_err(says).to_string();
        assert!(refused.contains(says), "{case}: {refused}");
    }
}
