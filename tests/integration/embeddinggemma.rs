//! EmbeddingGemma: the dense modules of sentence-transformers behind pooling, trained, read and
//! written (`goldens/embeddinggemma.py`). `embeddings.rs` compares its training.

use std::fs;
use std::path::{Path, PathBuf};

use l2l::config::{LoraConfig, Task};
use l2l::data::Batch;
use l2l::hf::{ExportOptions, export};
use l2l::inference::Evaluator;
use l2l::{Config, Trainer};
use serde_json::{Value, json};

use crate::embeddings::{golden, of_case, records, texts};
use crate::pytorch::{case, golden_of};

const NAME: &str = "embeddinggemma";

/// A config that only embeds with the model of a directory.
fn embedder(at: &Path) -> Config {
    let mut config = Config::default();
    config.model.path = Some(at.into());
    config.model.task = Some(Task::SentenceEmbedding);
    config.step.batch = 12;
    config
}

fn json_of(path: &Path) -> Value {
    let text = fs::read_to_string(path).expect("it was written");
    serde_json::from_str(&text).expect("it is JSON")
}

/// Copies a directory, whose files a test changes.
fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a place for files");
    for entry in fs::read_dir(from).expect("it is committed") {
        let path = entry.expect("it is committed").path();
        let to = to.join(path.file_name().expect("it has a name"));
        match path.is_dir() {
            true => copy(&path, &to),
            false => drop(fs::copy(&path, to).expect("a place for files")),
        }
    }
}

fn committed() -> PathBuf {
    case(NAME).0.model.path.expect("a case has one")
}

/// The golden's training, scaled as its directory says, and a step's batch.
fn training() -> (Config, Batch) {
    let mut config = of_case(NAME, &golden(), "triplet");
    (config.model.pooling, config.model.normalise) = (None, None);
    let batch = Batch::of_texts(&records(&texts(&config), 0, 4, 3));
    (config, batch)
}

#[tokio::test]
async fn embeddings_are_those_of_sentence_transformers() {
    let at = committed();
    let config = embedder(&at);
    let all = texts(&config);
    let batch = Batch::of_texts(&records(&all, 0, 5, 1));
    let mut evaluator = Evaluator::start(config).await.expect("it is a model");
    let found = evaluator.embed(batch).await.expect("it embeds");
    let golden = golden_of(&at);
    let expected = golden["embeddings"].as_array().expect("a list");
    let expected = expected.iter().flat_map(|one| one.as_array().expect("a list"));
    let expected: Vec<f64> = expected.map(|number| number.as_f64().expect("a number")).collect();
    assert_eq!(found.len(), expected.len());
    let off = found.iter().zip(&expected).map(|(a, b)| (f64::from(*a) - b).abs());
    let off = off.fold(0.0, f64::max);
    assert!(off < 1e-6, "{off}");
}

/// A directory that is written has the same modules, and makes the same embeddings.
#[tokio::test]
async fn a_checkpoint_has_its_dense_modules() {
    let folder = tempfile::tempdir().expect("a place for files");
    let (config, batch) = training();
    let from = committed();
    let mut trainer = Trainer::start(config).await.expect("a case of ours");
    let first = folder.path().join("first");
    trainer.checkpoint(&first).await.expect("a place for files");
    for file in ["2_Dense/model.safetensors", "3_Dense/model.safetensors", "model.safetensors"] {
        let [own, theirs] = [&first, &from].map(|at| fs::read(at.join(file)).expect("it is there"));
        let [own, theirs] =
            [&own, &theirs].map(|file| safetensors::SafeTensors::deserialize(file).expect("ours"));
        assert_eq!(own.len(), theirs.len(), "{file}");
        for name in own.names() {
            // Files of the model without a head leave the prefix out.
            let stored = name.strip_prefix("model.").unwrap_or(name);
            let own = own.tensor(name).expect("its name");
            let theirs = theirs.tensor(stored).expect("the same name");
            assert!(own.data() == theirs.data() && own.shape() == theirs.shape(), "{name}");
        }
    }
    for file in ["2_Dense/config.json", "3_Dense/config.json"] {
        assert_eq!(json_of(&first.join(file)), json_of(&from.join(file)), "{file}");
    }
    let config_of = json_of(&first.join("config.json"));
    assert_eq!(config_of["use_bidirectional_attention"], true);
    assert_eq!(config_of["sliding_window"], 8);
    assert_eq!(config_of["architectures"], json!(["Gemma3TextModel"]));
    let paths: Vec<Value> = json_of(&first.join("modules.json"))
        .as_array()
        .expect("a list")
        .iter()
        .map(|module| module["path"].clone())
        .collect();
    assert_eq!(paths, ["", "1_Pooling", "2_Dense", "3_Dense", "4_Normalize"]);
    trainer.step(batch.clone()).await.expect("a step");
    let second = folder.path().join("second");
    trainer.checkpoint(&second).await.expect("a place for files");
    let file = "3_Dense/model.safetensors";
    let [old, new] = [&first, &second].map(|at| fs::read(at.join(file)).expect("it was written"));
    assert_ne!(old, new, "dense modules are trained");
    let own = trainer.embed(batch.clone()).await.expect("it embeds");
    for at in [second.clone(), {
        let to = folder.path().join("exported");
        export(&second, None, &to, ExportOptions::default()).expect("it is a model");
        to
    }] {
        let mut evaluator = Evaluator::start(embedder(&at)).await.expect("it is a model");
        assert_eq!(evaluator.embed(batch.clone()).await.expect("it embeds"), own);
    }
    let options = ExportOptions { average: true, ..ExportOptions::default() };
    let error = export(&second, None, &folder.path().join("average"), options);
    let error = error.expect_err("it has no average of them").to_string();
    assert!(error.contains("Dense modules, whose averages"), "{error}");
}

/// Beside adapters they are trained, as a head is, and an export has both.
#[tokio::test]
async fn adapters_train_dense_modules_beside_them() {
    let folder = tempfile::tempdir().expect("a place for files");
    let (mut config, batch) = training();
    let targets = Some(vec!["q_proj".to_string()]);
    config.train.lora = Some(LoraConfig { targets, ..LoraConfig::default() });
    let mut trainer = Trainer::start(config.clone()).await.expect("a case of ours");
    trainer.step(batch.clone()).await.expect("a step");
    let at = folder.path().join("adapters");
    trainer.checkpoint(&at).await.expect("a place for files");
    let adapters = fs::read(at.join("adapter_model.safetensors")).expect("it was written");
    let adapters = safetensors::SafeTensors::deserialize(&adapters).expect("ours");
    assert!(adapters.names().iter().all(|name| name.contains(".lora_")), "PEFT knows no others");
    let own = trainer.embed(batch.clone()).await.expect("it embeds");
    trainer.step(batch.clone()).await.expect("a step");
    let digest = trainer.digest().await.expect("nothing fails here");
    let mut again = Trainer::builder(config.clone()).resume(&at).start().await.expect("it resumes");
    assert_eq!(again.embed(batch.clone()).await.expect("it embeds"), own);
    again.step(batch.clone()).await.expect("a step");
    assert_eq!(again.digest().await.expect("nothing fails here"), digest);
    config.train.lora = Some(LoraConfig { path: Some(at.clone()), ..LoraConfig::default() });
    config.step.batch = 12;
    let mut read = Evaluator::start(config.clone()).await.expect("adapters of a model");
    assert_eq!(read.embed(batch.clone()).await.expect("it embeds"), own);
    let merged = folder.path().join("merged");
    let base = config.model.path.as_deref();
    export(&at, base, &merged, ExportOptions::default()).expect("adapters of a model");
    let mut evaluator = Evaluator::start(embedder(&merged)).await.expect("it is a model");
    let found = evaluator.embed(batch).await.expect("it embeds");
    let off = found.iter().zip(&own).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(off < 1e-5, "{off}");
}

#[tokio::test]
async fn modules_that_are_not_built_are_refused_by_name() {
    type Change = fn(&mut Value);
    let cases: [(&str, Change, &str); 9] = [
        (
            "2_Dense/config.json",
            |c| c["activation_function"] = json!("torch.nn.modules.activation.Tanh"),
            "activation_function is torch.nn.modules.activation.Tanh",
        ),
        (
            "3_Dense/config.json",
            |c| drop(c.as_object_mut().map(|keys| keys.remove("activation_function"))),
            "activation_function is torch.nn.modules.activation.Tanh",
        ),
        ("2_Dense/config.json", |c| c["use_residual"] = json!(true), "use_residual is true"),
        (
            "2_Dense/config.json",
            |c| c["module_input_name"] = json!("token_embeddings"),
            "module_input_name is token_embeddings",
        ),
        ("2_Dense/config.json", |c| c["out_features"] = json!(0), "out_features is 0"),
        ("3_Dense/config.json", |c| c["out_features"] = json!(24), "embeddings of 24 numbers"),
        ("2_Dense/config.json", |c| c["out_features"] = json!(71), "[71, 48] expected, [70, 48]"),
        ("modules.json", |c| c[2]["path"] = json!("5_Dense"), "the folder of Dense is 5_Dense"),
        (
            "modules.json",
            |c| c[4]["type"] = json!("sentence_transformers.models.Dense"),
            "Transformer, Pooling, Dense, Dense, Dense: only Transformer, Pooling, up to two",
        ),
    ];
    for (file, change, says) in cases {
        let folder = tempfile::tempdir().expect("a place for files");
        copy(&committed(), folder.path());
        let mut value = json_of(&folder.path().join(file));
        change(&mut value);
        fs::write(folder.path().join(file), value.to_string()).expect("a place for files");
        let error = Evaluator::start(embedder(folder.path())).await.err().expect(says).to_string();
        assert!(error.contains(says), "{error}");
    }
}

/// It has no head.
#[tokio::test]
async fn other_tasks_are_refused() {
    for task in [Task::MaskedLm, Task::CausalLm, Task::SequenceClassification] {
        let mut config = embedder(&committed());
        config.model.task = Some(task);
        let error = Evaluator::start(config).await.err().expect("no such head").to_string();
        assert!(error.contains("gemma3_text can only do sentence-embedding"), "{error}");
    }
    let folder = tempfile::tempdir().expect("a place for files");
    copy(&committed(), folder.path());
    let mut config = json_of(&folder.path().join("config.json"));
    config["architectures"] = json!(["Gemma3TextForSequenceClassification"]);
    fs::write(folder.path().join("config.json"), config.to_string()).expect("a place for files");
    let error = Evaluator::start(embedder(folder.path())).await.err().expect("no such head");
    let says = "use_bidirectional_attention is true: only embeddings are built";
    assert!(error.to_string().contains(says), "{error}");
}
