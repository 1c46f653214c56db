//! Records of texts for sentence embeddings, the modules of sentence-transformers, and what is
//! refused of them.

use std::fs;
use std::path::Path;

use l2l::config::{ObjectiveKind, ScheduleKind, Task, TooLong};
use l2l::data::{Batch, Batches, Dataset, Sequence, sequences_of_texts};
use l2l::models::EmbeddingPooling;
use l2l::{Config, Error, Trainer};
use serde_json::{Value, json};

use crate::embeddings::{on_file, pairs};

/// The layouts of sentence-transformers that are read, and what of them is not built.
#[test]
fn modules_are_read_or_refused_by_name() {
    let folder = tempfile::tempdir().expect("a place for files");
    let at = folder.path();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/bert/config.json");
    fs::copy(source, at.join("config.json")).expect("ours");
    fs::create_dir(at.join("1_Pooling")).expect("ours");
    let mut config = Config::default();
    config.model.path = Some(at.into());
    config.model.random_weights = true;
    config.model.task = Some(Task::SentenceEmbedding);
    let head = |modules: &[&str], pooling: Value, config: &Config| {
        let module = |kind: &&str| {
            let path = if kind.ends_with("Pooling") { "1_Pooling" } else { "" };
            json!({ "path": path, "type": format!("sentence_transformers.models.{kind}") })
        };
        let modules: Vec<Value> = modules.iter().map(module).collect();
        fs::write(at.join("modules.json"), json!(modules).to_string()).expect("ours");
        fs::write(at.join("1_Pooling/config.json"), pooling.to_string()).expect("ours");
        l2l::shape_of(config).map(|shape| format!("{:?}", shape.head))
    };
    let all = ["Transformer", "Pooling", "Normalize"];
    let v5 = json!({ "pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false });
    let found = head(&all, v5.clone(), &config).expect("it is built");
    assert_eq!(
        found,
        "Embedding { pooling: Cls, dense: [None, None], normalise: true, include_prompt: true }"
    );
    let v6 = json!({ "embedding_dimension": 48, "pooling_mode": "lasttoken" });
    let found = head(&all[..2], v6, &config).expect("it is built");
    assert_eq!(
        found,
        "Embedding { pooling: Last, dense: [None, None], normalise: false, include_prompt: true }"
    );
    let mut own = config.clone();
    (own.model.pooling, own.model.normalise) = (Some(EmbeddingPooling::Mean), Some(true));
    let found = head(&all[..2], v5.clone(), &own).expect("the config says it");
    assert_eq!(
        found,
        "Embedding { pooling: Mean, dense: [None, None], normalise: true, include_prompt: true }"
    );
    let refused = |modules: &[&str], pooling: Value, says: &str| {
        let error = head(modules, pooling, &config).expect_err("it is refused").to_string();
        assert!(error.contains(says), "{error}");
    };
    let norm = ["Transformer", "Pooling", "LayerNorm", "Normalize"];
    refused(&norm, v5.clone(), "its modules are Transformer, Pooling, LayerNorm, Normalize: only");
    refused(&all, json!({ "pooling_mode": "max" }), "pooling is \"max\": one of mean, cls and");
    let both = json!({ "pooling_mode_cls_token": true, "pooling_mode_mean_tokens": true });
    refused(&all, both, "pooling is \"mean and cls\"");
    let lower = json!({ "do_lower_case": true }).to_string();
    fs::write(at.join("sentence_bert_config.json"), lower).expect("ours");
    refused(&all, v5.clone(), "do_lower_case is true");
    let of_version_6 = |modalities: Value| {
        let settings = json!({ "transformer_task": "feature-extraction",
            "modality_config": modalities, "module_output_name": "token_embeddings" });
        fs::write(at.join("sentence_bert_config.json"), settings.to_string()).expect("ours");
    };
    let forward = json!({ "method": "forward", "method_output_name": "last_hidden_state" });
    of_version_6(json!({ "text": forward, "message": forward }));
    refused(&all, v5.clone(), "sentence_bert_config.json: modality_config has message");
    of_version_6(json!({ "text": forward }));
    head(&all, v5, &config).expect("texts are no messages");
}

#[test]
fn records_that_are_no_pairs_are_refused_by_name() {
    let refused = |kind: ObjectiveKind, line: Value, change: &dyn Fn(&mut Config), says: &str| {
        let folder = tempfile::tempdir().expect("a place for files");
        let mut config = on_file(folder.path(), kind, &[line]);
        change(&mut config);
        let shape = l2l::shape_of(&config).expect("a shape of ours");
        let error: Error = Dataset::open(&config, &shape).map(drop).expect_err("it is refused");
        assert!(error.to_string().contains(says), "{error}");
    };
    let contrastive = ObjectiveKind::Contrastive;
    let pair = json!({ "anchor": "a", "positive": "b" });
    let none = |_: &mut Config| {};
    refused(
        contrastive,
        json!({ "anchor": "a" }),
        &none,
        "positive (or answer, sentence2) is missing",
    );
    refused(contrastive, json!({ "anchor": "", "positive": "b" }), &none, "anchor: it is empty");
    let long = json!({ "anchor": "a", "positive": "b".repeat(99) });
    refused(contrastive, long, &none, "positive: it has 99 tokens");
    let negative = json!({ "anchor": "a", "positive": "b", "negative": "c" });
    refused(contrastive, negative, &none, "it has 1 negatives, and the objective reads 0");
    let two = |config: &mut Config| config.objective.negatives = 2;
    refused(contrastive, pair.clone(), &two, "it has 0 negatives, and the objective reads 2");
    refused(ObjectiveKind::Triplet, pair.clone(), &none, "it has 0 negatives, and the objective");
    refused(ObjectiveKind::Cosine, pair.clone(), &none, "score (or label) is missing");
    let high = json!({ "sentence1": "a", "sentence2": "b", "score": 4.5 });
    refused(ObjectiveKind::Cosine, high, &none, "score is 4.5: it must be a number from -1 to 1");
    let text = |config: &mut Config| config.data.train = "built-in".into();
    refused(contrastive, pair.clone(), &text, "needs records with the columns anchor and positive");
    let field = |config: &mut Config| config.data.fields.anchor = Some("title".into());
    refused(contrastive, pair.clone(), &field, "which data.fields.anchor names");
    let field = |config: &mut Config| config.data.fields.prompt = Some("anchor".into());
    refused(contrastive, pair.clone(), &field, "data.fields.prompt is set");
    let without = |config: &mut Config| {
        config.objective.kind = ObjectiveKind::CrossEntropy;
        config.model.task = Some(Task::SentenceEmbedding);
    };
    refused(contrastive, pair, &without, "set objective.kind = \"contrastive\"");
}

/// Names of columns, lists of negatives, and texts that are cut.
#[test]
fn records_have_the_columns_of_sentence_transformers() {
    let folder = tempfile::tempdir().expect("a place for files");
    let lines = [
        json!({ "question": "a", "positive": "bb", "negative": "c", "negative_1": "dddd" }),
        json!({ "title": "x", "anchor": "a", "answer": "bb", "negatives": ["c", "dddd"] }),
    ];
    let mut config = on_file(folder.path(), ObjectiveKind::Contrastive, &lines);
    config.objective.negatives = 2;
    config.data.too_long = TooLong::Cut;
    config.data.sequence_length = Some(3);
    let shape = l2l::shape_of(&config).expect("a shape of ours");
    let (data, _) = Dataset::open(&config, &shape).expect("good records");
    for record in 0..2 {
        let one = data.sequence(record).expect("it is there");
        assert_eq!(one.documents, [1, 2, 1, 3]);
        assert_eq!(one.tokens, b"abbcddd".map(u32::from));
    }
    assert_eq!(data.unused_columns(), ["title"]);
    config.data.fields.anchor = Some("title".into());
    fs::write(folder.path().join("pairs.jsonl"), format!("{}\n", lines[1])).expect("ours");
    let (data, _) = Dataset::open(&config, &shape).expect("good records");
    assert_eq!(data.sequence(0).expect("it is there").tokens[0], u32::from(b'x'));
    let of_texts = sequences_of_texts(&config, &shape, &["abcdef".into()]).expect("a text");
    assert_eq!(of_texts[0].tokens, b"abc".map(u32::from));
    let empty = sequences_of_texts(&config, &shape, &[String::new()]).expect_err("no token");
    assert!(empty.to_string().contains("text 1: it is empty"), "{empty}");
}

#[test]
fn settings_of_embeddings_are_refused_by_name() {
    let refused = |change: &dyn Fn(&mut Config), says: &str| {
        let mut config = Config::default();
        config.data.train = "pairs.jsonl".into();
        config.objective.kind = ObjectiveKind::Contrastive;
        change(&mut config);
        let error = config.check().and_then(|()| l2l::shape_of(&config).map(drop));
        let error = error.expect_err("it is refused").to_string();
        assert!(error.contains(says), "{says:?} expected in: {error}");
    };
    refused(&|config| config.objective.scale = Some(0.0), "objective.scale");
    refused(&|config| config.objective.dimensions = vec![8, 8], "numbers from 1 on that differ");
    refused(&|config| config.objective.margin = Some(1.0), "is for kind = \"triplet\"");
    refused(&|config| config.objective.beta = Some(1.0), "objective.beta is for a preference");
    refused(&|config| config.data.packing = true, "each text has an embedding of its own");
    refused(&|config| config.data.train = "random".into(), "which has no pairs");
    refused(&|config| config.data.too_long = TooLong::Split, "a text has one embedding");
    refused(&|config| config.train.label_smoothing = 0.1, "smooths labels, and texts have none");
    refused(
        &|config| config.model.task = Some(Task::CausalLm),
        "is \"causal-lm\", and objective.kind",
    );
    let kind = |kind| move |config: &mut Config| config.objective.kind = kind;
    let with = |first: ObjectiveKind, then: &dyn Fn(&mut Config), says: &str| {
        refused(
            &|config| {
                kind(first)(config);
                then(config);
            },
            says,
        );
    };
    let cosine = ObjectiveKind::Cosine;
    with(cosine, &|config| config.objective.symmetric = true, "is for kind = \"contrastive\"");
    with(cosine, &|config| config.objective.negatives = 1, "is for kind = \"contrastive\"");
    with(cosine, &|config| config.objective.scale = Some(2.0), "\"contrastive\" or \"cosent\"");
    let entropy = ObjectiveKind::CrossEntropy;
    with(entropy, &|config| config.objective.dimensions = vec![8], "objective.dimensions is for");
    with(
        entropy,
        &|config| config.model.pooling = Some(EmbeddingPooling::Cls),
        "is for sentence-embedding",
    );
    with(entropy, &|config| config.model.normalise = Some(true), "is for sentence-embedding");
}

async fn refusal(config: Config) -> String {
    Trainer::start(config).await.err().expect("it is refused").to_string()
}

#[tokio::test]
async fn runs_of_embeddings_that_cannot_be_are_refused_by_name() {
    let folder = tempfile::tempdir().expect("a place for files");
    let config = on_file(folder.path(), ObjectiveKind::Contrastive, &pairs(4));
    let mut resident = config.clone();
    resident.schedule.kind = ScheduleKind::Resident;
    let text = refusal(resident).await;
    assert!(text.contains("objective contrastive: its loss is of the whole step"), "{text}");
    let mut none = config.clone();
    none.objective.kind = ObjectiveKind::CrossEntropy;
    none.model.task = Some(Task::SentenceEmbedding);
    let text = refusal(none).await;
    assert!(text.contains("set objective.kind = \"contrastive\""), "{text}");
    let mut wide = config.clone();
    wide.objective.dimensions = vec![8, 64];
    let mut trainer = Trainer::start(wide.clone()).await.expect("a config of ours");
    let mut batches = Batches::open(&wide).expect("good records");
    let batch = batches.next().await.expect("good records");
    let text = trainer.step(batch).await.expect_err("too wide").to_string();
    assert!(text.contains("dimensions have 64, and embeddings have 32 numbers"), "{text}");
    let mut trainer = Trainer::start(config).await.expect("a config of ours");
    let batch = Batch::new(&[Sequence::plain(vec![1, 2])]);
    let text = trainer.encode(batch.clone()).await.expect_err("no head").to_string();
    assert!(text.contains("take its embeddings (Trainer::embed)"), "{text}");
    let text = trainer.log_probabilities(batch).await.expect_err("no labels").to_string();
    assert!(text.contains("those of next tokens"), "{text}");
    let cosine = on_file(folder.path(), ObjectiveKind::Cosine, &pairs(4));
    let mut trainer = Trainer::start(cosine).await.expect("a config of ours");
    let unscored = Batch::of_texts(&vec![Sequence::plain(vec![1, 2]); 8]);
    let text = trainer.step(unscored).await.expect_err("no scores").to_string();
    assert!(text.contains("objective cosine needs a score of each record"), "{text}");
}
