//! Ten steps of transformers' GPT-2 on small odd shapes: losses and gradient norms are PyTorch's.
//! `goldens/gpt2.py` makes what is compared with; `goldens/families.py` and `goldens/experts.py`
//! make that of the other families.

use std::fs;
use std::path::Path;

use l2l::config::{GroupConfig, Recompute, ScheduleKind, StashPlace};
use l2l::data::{Batch, Batches, Dataset, Predicts, Sequence};
use l2l::kernels::LogitForm;
use l2l::{Config, Trainer};
use serde_json::{Value, json};

pub(crate) fn numbers(golden: &Value, key: &str) -> Vec<f64> {
    let list = golden["float64"][key].as_array().expect("a list");
    list.iter().map(|number| number.as_f64().expect("a number")).collect()
}

/// The golden in a folder.
pub(crate) fn golden_of(folder: &Path) -> Value {
    let text = fs::read_to_string(folder.join("golden.json")).expect("it is committed");
    serde_json::from_str(&text).expect("it is JSON")
}

/// A case's config, and its golden.
pub(crate) fn case(name: &str) -> (Config, Value) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(name);
    let golden = golden_of(&folder);
    let mut config = Config::default();
    config.data.train = folder.join("data.jsonl").display().to_string().into();
    config.data.shuffle = false;
    config.model.path = Some(folder);
    config.step.batch = golden["batch"].as_u64().expect("a number") as usize;
    config.step.micro_batch = 2;
    config.step.steps = golden["steps"].as_u64();
    config.optimizer.learning_rate = golden["learning_rate"].as_f64().expect("a number");
    config.optimizer.weight_decay = golden["weight_decay"].as_f64().expect("a number");
    config.optimizer.clip_norm = golden["clip_norm"].as_f64();
    (config, golden)
}

/// Runs a case against its golden; the digest it ends with.
pub(crate) async fn check(config: Config, golden: &Value) -> String {
    let name = config.model.path.clone().expect("a case has one");
    let name = name.display().to_string();
    let steps = config.step.steps.expect("a case has them");
    let mut batches = Batches::open(&config).expect("it is committed");
    let mut trainer = Trainer::start(config).await.expect("a case of ours");
    let losses = numbers(golden, "losses");
    let norms = numbers(golden, "norms");
    let mut loss_off = 0.0_f64;
    let mut norm_off = 0.0_f64;
    for step in 0..steps as usize {
        let report = trainer
            .step(batches.next().await.expect("good data"))
            .await
            .expect("nothing fails here");
        let loss = losses[step];
        let norm = norms[step];
        assert!((report.loss - loss).abs() < 2e-5, "{name} {step}: {} {loss}", report.loss);
        let error = (report.grad_norm / norm - 1.0).abs();
        (loss_off, norm_off) = (loss_off.max((report.loss - loss).abs()), norm_off.max(error));
        assert!(error < 1e-4, "{name} {step}: norm {} {norm}", report.grad_norm);
    }
    println!("{name}: losses within {loss_off:.1e}, norms within {norm_off:.1e}");
    trainer.digest().await.expect("nothing fails here")
}

#[tokio::test]
async fn a_tied_gpt2_with_padding_is_pytorchs() {
    let (config, golden) = case("tied");
    check(config, &golden).await;
}

#[tokio::test]
async fn a_clipped_gpt2_is_pytorchs() {
    let (config, golden) = case("clipped");
    check(config, &golden).await;
}

#[tokio::test]
async fn an_untied_gpt2_of_one_block_is_pytorchs() {
    let (mut config, golden) = case("untied");
    config.schedule.kind = ScheduleKind::Resident;
    config.schedule.recompute = false.into();
    config.stash.place = StashPlace::Device;
    check(config, &golden).await;
}

/// A group with a learning rate and a largest norm of its own; all else is clipped together.
#[tokio::test]
async fn groups_that_are_clipped_are_pytorchs() {
    let (mut config, _) = case("llama");
    let folder = config.model.path.clone().expect("a case has one");
    let text = fs::read_to_string(folder.join("clipped_groups.json")).expect("it is committed");
    let golden: Value = serde_json::from_str(&text).expect("it is JSON");
    let clip_norm = golden["group_norm"].as_f64();
    let learning_rate = golden["group_rate"].as_f64();
    let patterns = vec!["mlp".into()];
    config.optimizer.groups =
        vec![GroupConfig { patterns, learning_rate, clip_norm, ..GroupConfig::default() }];
    config.optimizer.clip_norm = golden["clip_norm"].as_f64();
    let relay = check(config.clone(), &golden).await;
    config.schedule.kind = ScheduleKind::Resident;
    config.stash.place = StashPlace::Device;
    assert_eq!(check(config, &golden).await, relay);
}

pub(crate) const FAMILIES: [&str; 58] = [
    "bert",
    "bert-classes",
    "bert-tokens",
    "bert-value",
    "camembert-classes",
    "cohere",
    "cohere2",
    "distilbert",
    "distilbert-classes",
    "distilbert-tokens",
    "electra-classes",
    "electra-tokens",
    "ernie4_5",
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "gpt2-classes",
    "gpt2-tokens",
    "gpt_neox",
    "granite",
    "helium",
    "llama",
    "llama-classes",
    "llama-tokens",
    "ministral",
    "ministral3",
    "mistral",
    "mistral-classes",
    "modernbert",
    "modernbert-classes",
    "modernbert-tokens",
    "olmo2",
    "olmo3",
    "opt",
    "opt-classes",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3-classes",
    "qwen3_5_text",
    "qwen3_5_text-tied",
    "roberta",
    "roberta-classes",
    "seed_oss",
    "smollm3",
    "starcoder2",
    "xlm-roberta",
    "electra-small-classes",
    "electra-small-tokens",
    "gemma4_text",
    "gemma4_text-values",
    "gemma4_text-inputs",
    "gemma4_text-shared",
    "olmo2-grouped",
    "cohere-norms",
    "gpt2-unscaled",
    "modernbert-unbiased",
];

/// Models with experts: each row's choices are far from ties in f32.
pub(crate) const EXPERTS: [&str; 14] = [
    "gpt_oss",
    "gpt_oss-classes",
    "mixtral",
    "mixtral-classes",
    "mixtral-tokens",
    "olmoe",
    "qwen2_moe",
    "qwen2_moe-window",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_moe-idle",
    "qwen3_moe-sparse",
    "qwen3_moe-window",
    "qwen3_next",
];

/// Each family, ten steps; also resident, which is the same bits.
#[tokio::test]
async fn every_family_is_pytorchs() {
    for name in FAMILIES.into_iter().chain(EXPERTS) {
        let (config, golden) = case(name);
        let relay = check(config.clone(), &golden).await;
        let mut resident = config;
        resident.schedule.kind = ScheduleKind::Resident;
        resident.schedule.recompute = false.into();
        resident.stash.place = StashPlace::Device;
        resident.device.threads = Some(1);
        assert_eq!(check(resident, &golden).await, relay, "{name}");
    }
}

/// Smoothed labels, of tokens and of classes; also resident, which is the same bits. Evaluation has
/// none of it.
#[tokio::test]
async fn smoothed_labels_are_pytorchs() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/smoothed.json");
    let text = fs::read_to_string(path).expect("it is committed");
    let smoothed: Value = serde_json::from_str(&text).expect("it is JSON");
    for name in ["llama", "bert-classes", "gpt2-classes"] {
        let (mut config, golden) = case(name);
        config.train.label_smoothing = smoothed["label_smoothing"].as_f64().expect("it is") as f32;
        let expected = json!({ "float64": smoothed[name] });
        let relay = check(config.clone(), &expected).await;
        config.schedule.kind = ScheduleKind::Resident;
        config.schedule.recompute = false.into();
        config.stash.place = StashPlace::Device;
        assert_eq!(check(config.clone(), &expected).await, relay, "{name}");
        let (data, _) = Dataset::open(&config, &l2l::shape_of(&config).expect("a case of ours"))
            .expect("it is committed");
        let mut trainer = Trainer::start(config).await.expect("a case of ours");
        let found = trainer.evaluate([data.batch([0])]).await.expect("nothing fails here");
        assert!((found.loss - numbers(&golden, "singles")[0]).abs() < 1e-4, "{name}");
    }
    let (mut config, _) = case("bert-value");
    config.train.label_smoothing = 0.1;
    let refused = Trainer::start(config).await.map(drop).expect_err("it has no classes");
    assert!(refused.to_string().contains("predicts a value"), "{refused}");
}

/// Sequences that are walked in chunks, beside a shorter one.
#[tokio::test]
async fn long_sequences_are_pytorchs() {
    let (mut config, golden) = case("long");
    config.data.sequence_length = Some(4200);
    config.step.chunk_positions = 2048;
    check(config.clone(), &golden).await;
    // That attention alone is recomputed with the same bits is shown by `exact`, on short chunks.
    if crate::whole() {
        config.schedule.recompute = Recompute::ATTENTION;
        config.step.micro_batch = 1;
        check(config, &golden).await;
    }
}

/// Scores sequences one by one, without padding. When the mean log-probability is close to
/// PyTorch's, so are the logits.
#[tokio::test]
async fn sequences_alone_score_as_pytorchs() {
    for name in FAMILIES.into_iter().chain(EXPERTS) {
        let (config, golden) = case(name);
        let shape = l2l::shape_of(&config).expect("a case of ours");
        let (data, _) = Dataset::open(&config, &shape).expect("it is committed");
        let mut trainer = Trainer::start(config).await.expect("a case of ours");
        for (index, expected) in (0..).zip(numbers(&golden, "singles")) {
            let loss =
                trainer.evaluate([data.batch([index])]).await.expect("nothing fails here").loss;
            assert!((loss - expected).abs() < 1e-4, "{name} {index}: {loss} {expected}");
        }
        trainer.stop().await.expect("nothing fails here");
    }
}

/// The logits of the first sequence: the hidden states that the head reads, times its table.
#[tokio::test]
async fn logits_are_pytorchs() {
    for name in FAMILIES.into_iter().chain(EXPERTS) {
        let (mut config, golden) = case(name);
        config.step.batch = 1;
        let shape = l2l::shape_of(&config).expect("a case of ours");
        if !shape.scores_vocabulary() {
            continue;
        }
        let text = fs::read_to_string(config.data.train.to_string()).expect("it is committed");
        let line: Value = serde_json::from_str(text.lines().next().expect("a line")).expect("JSON");
        let tokens = line["input_ids"].as_array().expect("a list").iter();
        let tokens = tokens.map(|id| id.as_u64().expect("a token") as u32).collect();
        let mut trainer = Trainer::start(config).await.expect("a case of ours");
        let batch = Batch::of(&[Sequence::plain(tokens)], Predicts::Own);
        let hidden = trainer.encode(batch).await.expect("nothing fails here");
        let table = if shape.tied { shape.names.embedding } else { shape.names.head };
        let (_, table) = trainer.weights(table).await.expect("it has one");
        let mut bias = vec![0.0; shape.vocabulary];
        if shape.masked_head() && shape.token_bias {
            bias = trainer.weights(shape.names.head_bias).await.expect("it has one").1;
        }
        let rows = hidden.chunks(shape.hidden).flat_map(|h| {
            let dot = move |w: &[f32]| w.iter().zip(h).map(|(w, h)| f64::from(w * h)).sum::<f64>();
            table.chunks(shape.hidden).zip(&bias).map(move |(w, b)| dot(w) + f64::from(*b))
        });
        let LogitForm { scale, cap } = shape.logits;
        let formed = |product: f64| {
            let scaled = f64::from(scale) * product;
            cap.map(f64::from).map_or(scaled, |cap| cap * (scaled / cap).tanh())
        };
        let found = rows.map(formed).collect::<Vec<_>>();
        let expected = numbers(&golden, "logits");
        assert_eq!(found.len(), expected.len());
        let off = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        println!("{name}: logits within {off:.1e}");
        assert!(off < 1e-4, "{name}: {off}");
        trainer.stop().await.expect("nothing fails here");
    }
}

/// Weights are also read by the names that a model without a head has for them: transformers'
/// `OPTModel` and its likes leave out the prefix.
#[tokio::test]
async fn names_without_a_prefix_are_read() {
    for name in ["bert-classes", "gpt2-classes", "llama", "opt"] {
        let (mut config, _) = case(name);
        let prefix = l2l::shape_of(&config).expect("a case of ours").names.prefix;
        let from = config.model.path.clone().expect("a case has one");
        let folder = tempfile::tempdir().expect("a place for files");
        fs::copy(from.join("config.json"), folder.path().join("config.json")).expect("committed");
        let bytes = fs::read(from.join("model.safetensors")).expect("it is committed");
        let all = safetensors::SafeTensors::deserialize(&bytes).expect("it is whole").tensors();
        assert!(all.iter().any(|(name, _)| name.starts_with(prefix)), "{name}");
        let short = |name: String| name.strip_prefix(prefix).unwrap_or(&name).to_string();
        let all = all.into_iter().map(|(name, tensor)| (short(name), tensor));
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

/// Exported weights equal those that were read, under transformers' names.
#[tokio::test]
async fn weights_survive_a_round_trip() {
    for name in ["tied", "untied"].into_iter().chain(FAMILIES).chain(EXPERTS) {
        let (config, _) = case(name);
        let folder = tempfile::tempdir().expect("a place for files");
        let mut trainer = Trainer::start(config.clone()).await.expect("a case of ours");
        trainer.save(folder.path()).await.expect("a directory of ours");
        let from = config.model.path.expect("a case has one").join("model.safetensors");
        let from = fs::read(from);
        let to = fs::read(folder.path().join("model.safetensors"));
        let from = from.expect("it is committed");
        let to = to.expect("it was written");
        let read = |bytes| safetensors::SafeTensors::deserialize(bytes).expect("it is whole");
        let from = read(&from);
        let to = read(&to);
        assert_eq!(from.len(), to.len());
        for (name, tensor) in from.tensors() {
            let written = to.tensor(&name).expect("every tensor is written");
            assert_eq!(
                (tensor.shape(), tensor.data()),
                (written.shape(), written.data()),
                "{name}"
            );
        }
        trainer.stop().await.expect("nothing fails here");
    }
}
