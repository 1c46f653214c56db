//! Adapters: PEFT's training on each family, its files, and what is left of them after a merge.
//! `goldens/peft_lora.py` makes what is compared with.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use l2l::config::{LoraConfig, ScheduleKind, StashPlace, TrainConfig};
use l2l::data::{Batches, Dataset};
use l2l::inference::{self, Evaluator};
use l2l::{Config, Trainer, hf, shape_of};
use safetensors::tensor::{SafeTensors, TensorView};
use serde_json::{Value, json};

use crate::families::ADAPTED;
use crate::pytorch::{self, check, golden_of};

fn adapters(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/lora").join(name)
}

/// A case that trains PEFT's adapters, and its golden.
fn case(name: &str) -> (Config, Value) {
    let ends = ["-linear", "-patterns", "-layers"];
    let model = ends.iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name);
    let (mut config, _) = pytorch::case(model);
    let golden = golden_of(&adapters(name));
    config.optimizer.clip_norm = None;
    config.train.lora = Some(LoraConfig { path: Some(adapters(name)), ..LoraConfig::default() });
    (config, golden)
}

#[tokio::test]
async fn every_family_is_pefts() {
    for name in ADAPTED {
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

/// The loss of a model on the data of a case.
async fn loss_of(config: &Config) -> f64 {
    let shape = shape_of(config).expect("a case of ours");
    let (data, _) = Dataset::open(config, &shape).expect("it is committed");
    let mut evaluator = Evaluator::start(config.clone()).await.expect("a case of ours");
    let loss = evaluator.evaluate(data.in_order(4, 3)).await.expect("nothing fails here").loss;
    evaluator.stop().await.expect("nothing fails here");
    loss
}

#[tokio::test]
async fn merged_weights_are_the_weights_and_their_adapters() {
    for name in ADAPTED {
        let (config, _) = case(name);
        let folder = tempfile::tempdir().expect("a place for files");
        let merged = folder.path().join("merged");
        let base = config.model.path.clone();
        hf::export(&adapters(name), base.as_deref(), &merged, Default::default())
            .expect("a case of ours");
        let mut plain = config.clone();
        plain.model.path = Some(merged);
        plain.train = TrainConfig::default();
        let with = loss_of(&config).await;
        let without = loss_of(&plain).await;
        assert!((with - without).abs() < 1e-5, "{name}: {with} {without}");
        plain.model.path = base;
        let bare = loss_of(&plain).await;
        assert!((with - bare).abs() > 1e-3, "{name}: adapters change something: {with} {bare}");
    }
}

/// Adapters that were not trained are written as they were read.
#[tokio::test]
async fn adapters_are_written_in_pefts_layout() {
    for name in ADAPTED {
        let (config, _) = case(name);
        let folder = tempfile::tempdir().expect("a place for files");
        let place = folder.path().join("checkpoint");
        let mut trainer = Trainer::start(config.clone()).await.expect("a case of ours");
        trainer.checkpoint(&place).await.expect("a directory of ours");
        drop(trainer);
        let tensors = |at: &Path| {
            let bytes = fs::read(at.join("adapter_model.safetensors")).expect("it was written");
            let all = SafeTensors::deserialize(&bytes).expect("good");
            let one = |(name, view): (String, TensorView<'_>)| (name, view.data().to_vec());
            all.tensors().into_iter().map(one).collect::<BTreeMap<_, _>>()
        };
        assert_eq!(tensors(&place), tensors(&adapters(name)), "{name}");
        let config_of = |at: &Path| -> Value {
            let text = fs::read_to_string(at.join("adapter_config.json")).expect("it was written");
            serde_json::from_str(&text).expect("JSON")
        };
        let ours = config_of(&place);
        let pefts = config_of(&adapters(name));
        for key in ["peft_type", "r", "use_rslora", "fan_in_fan_out", "bias"] {
            assert_eq!(ours[key], pefts[key], "{name}: {key}");
        }
        assert_eq!(ours["lora_alpha"].as_f64(), pefts["lora_alpha"].as_f64(), "{name}");
        assert!(!place.join("model.safetensors").exists(), "the base is not copied");
        // The directory is read as PEFT's is, alone or beside the model's.
        let mut read = config.clone();
        inference::load_from(&mut read, &place);
        assert_eq!(loss_of(&read).await, loss_of(&config).await, "{name}");
    }
}

#[tokio::test]
async fn a_resumed_run_has_the_bits_of_an_unbroken_one() {
    const STEPS: u64 = 5;
    let names = ["llama", "tied", "bert-classes", "bert-linear", "bert-classes-linear"];
    for name in names.into_iter().chain(["llama-patterns"]) {
        let (mut config, _) = case(name);
        config.step.steps = Some(STEPS);
        config.step.seed = 3;
        let lora = config.train.lora.as_mut().expect("the case has adapters");
        lora.dropout = 0.1;
        config.optimizer.clip_norm = (name == "llama").then_some(0.5);
        let steps = async |trainer: &mut Trainer, from: u64, to: u64| {
            let shape = shape_of(trainer.config()).expect("a case of ours");
            let (data, _) = Dataset::open(trainer.config(), &shape).expect("it is committed");
            let mut batches = Batches::start(trainer.config(), data, from).expect("a thread");
            for _ in from..to {
                let batch = batches.next().await.expect("good data");
                trainer.step(batch).await.expect("nothing fails here");
            }
        };
        let mut whole = Trainer::start(config.clone()).await.expect("a case of ours");
        steps(&mut whole, 0, STEPS).await;
        let expected = whole.digest().await.expect("nothing fails here");
        for at in [1, 4] {
            let folder = tempfile::tempdir().expect("a place for files");
            let place = folder.path().join("checkpoint");
            let mut first = Trainer::start(config.clone()).await.expect("a case of ours");
            steps(&mut first, 0, at).await;
            first.checkpoint(&place).await.expect("a directory of ours");
            drop(first);
            let mut other = config.clone();
            other.schedule.kind = ScheduleKind::Resident;
            other.stash.place = StashPlace::Device;
            other.channels.weights = 3;
            let mut second = Trainer::builder(other).resume(&place).start().await.expect("ours");
            steps(&mut second, at, STEPS).await;
            let digest = second.digest().await.expect("nothing fails here");
            assert_eq!(digest, expected, "{name} from {at}");
        }
    }
}

/// What a config that is refused says.
fn refusal(config: &Config) -> String {
    let made = shape_of(config).and_then(|shape| l2l::model_of(config, shape));
    match config.check().and(made) {
        Ok(_) => panic!("{:?} is accepted", config.train),
        Err(error) => error.to_string(),
    }
}

#[test]
fn what_cannot_be_trained_is_refused() {
    let with = |change: &dyn Fn(&mut TrainConfig)| {
        let (mut config, _) = pytorch::case("llama");
        change(&mut config.train);
        refusal(&config)
    };
    let texts = |texts: &[&str]| -> Vec<String> { texts.iter().map(|t| t.to_string()).collect() };
    let lora = |train: &mut TrainConfig, change: &dyn Fn(&mut LoraConfig)| {
        let mut lora = LoraConfig::default();
        change(&mut lora);
        train.lora = Some(lora);
    };
    for (error, parts) in [
        (with(&|t| t.only = texts(&["q_prj"])), ["train.only", "q_prj", "q_proj"]),
        (with(&|t| t.frozen = texts(&["layers.7"])), ["train.frozen", "layers.7", "q_proj"]),
        (with(&|t| t.frozen = texts(&["*"])), ["train.frozen", "nothing to train", ""]),
        (
            with(&|t| lora(t, &|l| l.targets = Some(texts(&["lm_head"])))),
            ["train.lora.targets", "lm_head", "down_proj"],
        ),
        (with(&|t| lora(t, &|l| l.targets = Some(Vec::new()))), ["targets", "is empty", "q_proj"]),
        (with(&|t| lora(t, &|l| l.rank = Some(21))), ["train.lora.rank", "is 21", "at most 20"]),
        (with(&|t| lora(t, &|l| l.rank = Some(0))), ["train.lora.rank", "at least 1", ""]),
        (
            with(&|t| lora(t, &|l| l.rank_pattern = Some([("q_prj".into(), 2)].into()))),
            ["train.lora.rank_pattern", "q_prj", "q_proj"],
        ),
        (
            with(&|t| lora(t, &|l| l.rank_pattern = Some([("k_proj".into(), 40)].into()))),
            ["train.lora.rank_pattern is 40", "k_proj", "at most 20"],
        ),
        (
            with(&|t| {
                lora(t, &|l| {
                    l.rank_pattern = Some(
                        [("k_proj".into(), 2), ("mlp".into(), 3), ("layers".into(), 5)].into(),
                    );
                })
            }),
            ["train.lora.rank_pattern", "k_proj", "layers"],
        ),
        (with(&|t| lora(t, &|l| l.alpha = Some(f64::NAN))), ["train.lora.alpha", "finite", ""]),
        (with(&|t| lora(t, &|l| l.dropout = 1.0)), ["train.lora.dropout", "[0, 1)", ""]),
        (
            with(&|t| lora(t, &|l| (l.rank, l.path) = (Some(2), Some(adapters("llama"))))),
            ["train.lora.rank", "train.lora.path", "leave it out"],
        ),
        (
            with(&|t| lora(t, &|l| l.path = Some(adapters("bert")))),
            ["adapter_config.json", "names nothing of the model", "q_proj"],
        ),
        (
            with(&|t| lora(t, &|l| l.path = Some("/nowhere".into()))),
            ["/nowhere/adapter_config.json", "No such file", ""],
        ),
    ] {
        for part in parts {
            assert!(error.contains(part), "{part:?} is not in: {error}");
        }
    }
}

/// Adapters of a model of the same family whose matrices have another size.
#[tokio::test]
async fn adapters_of_another_model_are_refused() {
    let (mut config, _) = case("qwen2");
    config.train.lora.as_mut().expect("it has adapters").path = Some(adapters("mistral"));
    let error = Trainer::start(config).await.err().expect("it is another model's").to_string();
    assert!(error.contains("expected") && error.contains("found"), "{error}");
    let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/qwen2");
    let folder = tempfile::tempdir().expect("a place for files");
    let to = folder.path().join("merged");
    let error = hf::export(&adapters("mistral"), Some(&base), &to, Default::default())
        .expect_err("another model's");
    assert!(error.to_string().contains("another model"), "{error}");
    assert!(!to.exists() && fs::read_dir(folder.path()).expect("ours").next().is_none());
}

#[tokio::test]
async fn frozen_tensors_keep_their_bits_and_have_no_state() {
    let (mut config, _) = pytorch::case("llama");
    config.train.only = vec!["q_proj".into(), "layers.2.input_layernorm".into()];
    let mut trainer = Trainer::start(config.clone()).await.expect("a case of ours");
    let names: Vec<String> =
        trainer.model().blocks.iter().flatten().map(|tensor| tensor.name.clone()).collect();
    let read = async |trainer: &mut Trainer| {
        let mut all = BTreeMap::new();
        for name in &names {
            let (_, values) = trainer.weights(name).await.expect("it has this name");
            all.insert(name.clone(), values);
        }
        all
    };
    let before = read(&mut trainer).await;
    let mut batches = Batches::open(&config).expect("it is committed");
    for _ in 0..2 {
        let batch = batches.next().await.expect("good data");
        trainer.step(batch).await.expect("nothing fails here");
    }
    let after = read(&mut trainer).await;
    // Queries, keys and values are one product of this family, and are trained together.
    let together = ["q_proj", "k_proj", "v_proj", "layers.2.input_layernorm"];
    for (name, values) in &before {
        let is_trained = together.iter().any(|module| name.contains(module));
        assert_eq!(after[name] != *values, is_trained, "{name}");
    }
    let folder = tempfile::tempdir().expect("a place for files");
    let place = folder.path().join("checkpoint");
    trainer.checkpoint(&place).await.expect("a directory of ours");
    let bytes = fs::read(place.join("optimizer.safetensors")).expect("it was written");
    let states = SafeTensors::deserialize(&bytes).expect("good");
    assert_eq!(states.len(), 2 * (3 * 6 + 1), "two states of each trained tensor");
}

/// Adapters of a kind that is not there, and files that are not whole: read and merged alike.
#[tokio::test]
async fn adapters_that_cannot_be_read_are_refused() {
    let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/llama");
    let refused = async |change: &dyn Fn(&mut Value), leave_out: &str| -> [String; 2] {
        let folder = tempfile::tempdir().expect("a place for files");
        let from = adapters("llama");
        let to = folder.path();
        let text = fs::read_to_string(from.join("adapter_config.json")).expect("it is committed");
        let mut value: Value = serde_json::from_str(&text).expect("JSON");
        change(&mut value);
        fs::write(to.join("adapter_config.json"), value.to_string()).expect("a place for files");
        let bytes = fs::read(from.join("adapter_model.safetensors")).expect("it is committed");
        let tensors = SafeTensors::deserialize(&bytes).expect("good").tensors();
        let kept = tensors.into_iter().filter(|(name, _)| !name.ends_with(leave_out));
        let kept = safetensors::serialize(kept, None).expect("plain tensors");
        fs::write(to.join("adapter_model.safetensors"), kept).expect("a place for files");
        let (mut config, _) = pytorch::case("llama");
        config.train.lora = Some(LoraConfig { path: Some(to.into()), ..LoraConfig::default() });
        let read = Trainer::start(config).await.err().expect("it is refused").to_string();
        let merged = hf::export(to, Some(&base), &to.join("merged"), Default::default())
            .expect_err("it is refused");
        [read, merged.to_string()]
    };
    let whole = "nothing";
    for (errors, says) in [
        (refused(&|config| config["peft_type"] = "IA3".into(), whole).await, "only reads LORA"),
        (refused(&|config| config["use_dora"] = true.into(), whole).await, "DoRA"),
        (
            refused(&|config| config["init_lora_weights"] = "pissa".into(), whole).await,
            "init_lora_weights is \"pissa\"",
        ),
        (
            refused(&|config| config["init_lora_weights"] = "olora".into(), whole).await,
            "path_initial_model_for_weight_conversion",
        ),
        (
            refused(&|config| config["alora_invocation_tokens"] = vec![7, 8].into(), whole).await,
            "alora_invocation_tokens is [7,8]",
        ),
        (
            refused(
                &|config| config["target_parameters"] = vec!["mlp.experts.gate_up_proj"].into(),
                whole,
            )
            .await,
            "of all experts of a block, are not built",
        ),
        (
            refused(&|config| config["use_nextlora"] = true.into(), whole).await,
            "use_nextlora is true, and l2l does not know",
        ),
        (
            refused(&|config| config["rank_pattern"]["q_proj"] = 2.into(), whole).await,
            "r and rank_pattern give model.layers.0.self_attn.q_proj rank 2",
        ),
        (
            refused(&|config| config["alpha_pattern"]["q_proj("] = 2.into(), whole).await,
            "alpha_pattern has \"q_proj(\"",
        ),
        (refused(&|config| config["r"] = 4.5.into(), whole).await, "r is no rank"),
        (refused(&|config| config["r"] = 3.into(), whole).await, "rank 3"),
        (
            refused(&|_| (), "layers.1.mlp.up_proj.lora_B.weight").await,
            "up_proj.lora_B.weight is missing",
        ),
    ] {
        errors.iter().for_each(|error| assert!(error.contains(says), "{says:?}: {error}"));
    }
}

/// Settings that only say which modules have adapters, or how adapters began.
#[tokio::test]
async fn settings_that_change_no_result_are_read() {
    let (config, _) = case("llama");
    let expected = loss_of(&config).await;
    for (key, value) in [
        ("init_lora_weights", Value::from("gaussian")),
        ("layers_to_transform", vec![0, 1, 2].into()),
        ("exclude_modules", "lm_head".into()),
        ("loftq_config", json!({})),
        ("eva_config", json!({ "rho": 2.0 })),
        ("auto_mapping", json!({ "unsloth_fixed": true })),
        ("peft_version", "99.0".into()),
    ] {
        let folder = tempfile::tempdir().expect("a place for files");
        let mut settings: Value = serde_json::from_str(
            &fs::read_to_string(adapters("llama").join("adapter_config.json")).expect("ours"),
        )
        .expect("JSON");
        settings[key] = value;
        let file = folder.path().join("adapter_config.json");
        fs::write(file, settings.to_string()).expect("a place for files");
        let weights = "adapter_model.safetensors";
        fs::copy(adapters("llama").join(weights), folder.path().join(weights)).expect("ours");
        let mut config = config.clone();
        let path = Some(folder.path().into());
        config.train.lora = Some(LoraConfig { path, ..LoraConfig::default() });
        assert_eq!(loss_of(&config).await, expected, "{key}");
    }
}

/// Modules that can have no adapter are named by the file's key.
#[tokio::test]
async fn adapters_of_heads_and_embeddings_are_refused() {
    let zeros = vec![0; 4 * 4 * 61];
    for (module, ends, says) in [
        ("lm_head", ["lora_A.weight", "lora_B.weight"], "target_modules has \"lm_head\": emb"),
        ("model.embed_tokens", ["lora_embedding_A", "lora_embedding_B"], "of an embedding"),
        ("model.layers.0.mlp.up_proj", ["lora_magnitude_vector", "x"], "DoRA"),
    ] {
        let folder = tempfile::tempdir().expect("a place for files");
        let name = |end: &str| format!("base_model.model.{module}.{end}");
        let shapes = [vec![4, 48], vec![61, 4]];
        let views = ends.iter().zip(shapes).map(|(end, shape)| {
            let len = 4 * shape.iter().product::<usize>();
            let view = TensorView::new(safetensors::Dtype::F32, shape, &zeros[..len]);
            (name(end), view.expect("a plain tensor"))
        });
        let file = safetensors::serialize(views, None).expect("plain tensors");
        fs::write(folder.path().join("adapter_model.safetensors"), file).expect("ours");
        let settings = adapters("llama").join("adapter_config.json");
        fs::copy(settings, folder.path().join("adapter_config.json")).expect("ours");
        let (mut config, _) = pytorch::case("llama");
        let path = Some(folder.path().into());
        config.train.lora = Some(LoraConfig { path, ..LoraConfig::default() });
        let error = Trainer::start(config.clone()).await.err().expect("refused").to_string();
        assert!(error.contains(says), "{says:?}: {error}");
        assert!(!error.contains("train.lora"), "{error}");
        let to = folder.path().join("merged");
        let error =
            hf::export(folder.path(), config.model.path.as_deref(), &to, Default::default());
        let error = error.expect_err("refused").to_string();
        assert!(error.contains(says), "{says:?}: {error}");
    }
}

/// Ranks and alphas by module: written as PEFT reads them, counted by the plan, and read back.
#[tokio::test]
async fn ranks_of_modules_are_trained_and_written() {
    let (mut config, _) = pytorch::case("llama");
    config.step.steps = Some(2);
    config.train.lora = Some(LoraConfig {
        rank: Some(4),
        alpha: Some(8.0),
        rank_pattern: Some([("q_proj".into(), 2), ("layers.1.mlp".into(), 6)].into()),
        alpha_pattern: Some(
            [("v_proj".into(), 3.0), ("layers.2.self_attn.v_proj".into(), 5.0)].into(),
        ),
        ..LoraConfig::default()
    });
    let mut trainer = Trainer::start(config.clone()).await.expect("a case of ours");
    // 3 layers; q 48 → 40, k and v 48 → 20, o 40 → 48, gate and up 48 → 56, down 56 → 48.
    let attention = 2 * (48 + 40) + 4 * (2 * (48 + 20) + (40 + 48));
    let mlp = 3 * (48 + 56);
    assert_eq!(trainer.model().trained_parameters(), 3 * attention + (4 + 6 + 4) * mlp);
    let mut batches = Batches::open(&config).expect("it is committed");
    for _ in 0..2 {
        trainer.step(batches.next().await.expect("good data")).await.expect("nothing fails here");
    }
    let folder = tempfile::tempdir().expect("a place for files");
    let place = folder.path().join("checkpoint");
    trainer.checkpoint(&place).await.expect("a directory of ours");
    drop(trainer);
    let text = fs::read_to_string(place.join("adapter_config.json")).expect("it was written");
    let written: Value = serde_json::from_str(&text).expect("JSON");
    let of = |module: &str| format!("model.layers.1.mlp.{module}_proj");
    let ranks = json!({ "q_proj": 2, of("gate"): 6, of("up"): 6, of("down"): 6 });
    assert_eq!(written["rank_pattern"], ranks);
    let of = |layer: usize| format!("model.layers.{layer}.self_attn.v_proj");
    assert_eq!(written["alpha_pattern"], json!({ of(0): 3.0, of(1): 3.0, of(2): 5.0 }));
    let mut read = config.clone();
    inference::load_from(&mut read, &place);
    let found = loss_of(&read).await;
    let merged = folder.path().join("merged");
    hf::export(&place, config.model.path.as_deref(), &merged, Default::default()).expect("ours");
    let mut plain = Config { train: TrainConfig::default(), ..config };
    plain.model.path = Some(merged);
    assert!((loss_of(&plain).await - found).abs() < 1e-5);
}
