//! What objectives cannot have: settings, models, steps and numbers, refused by name.

use std::fs;
use std::path::Path;

use l2l::config::{LoraConfig, ObjectiveKind, ReferenceKind, Task};
use l2l::data::{Batch, Sequence};
use l2l::inference::Evaluator;
use l2l::kernels::{CrossEntropy, Loss};
use l2l::models::LayerSelection;
use l2l::objectives::Binary;
use l2l::{Config, Error, Trainer, model_of, shape_of};

use crate::preference::{answers, on_file};
use crate::pytorch::case;

#[test]
fn settings_of_another_objective_are_refused_by_name() {
    for (text, says) in [
        ("kind = \"dpo\"\n[data]\ntrain = \"random\"", "data.train is \"random\", which has no"),
        ("kind = \"dpo\"\ndistance = \"cosine\"", "objective.distance is for kind = \"triplet\""),
        ("kind = \"simpo\"\ngamma = -1.0", "objective.gamma must be a finite number, 0 or more"),
        ("kind = \"contrastive\"\nnegatives = 1025", "objective.negatives must be at most 1024"),
        ("kind = \"triplet\"\nmargin = -1.0", "objective.margin must be a finite number, 0 or"),
        ("kind = \"cosine\"\nduplicates = \"keep\"", "objective.duplicates is for kind = \"con"),
        ("kind = \"reward\"\nscale = 2.0", "objective.scale is for kind = \"contrastive\" or"),
        ("kind = \"reward\"\n[data.prompts]\nanchor = \"q\"", "data.prompts.anchor is for a loss"),
        ("kind = \"binary\"\nbeta = 0.1", "objective.beta is for a preference"),
        ("kind = \"contrastive\"\nreference = \"before\"", "objective.reference is for kind"),
    ] {
        let error = Config::parse(&format!("[objective]\n{text}")).expect_err(text).to_string();
        assert!(error.contains(says), "{says:?} expected in: {error}");
    }
}

async fn refusal(started: impl Future<Output = Result<Trainer, Error>>) -> String {
    started.await.map(drop).expect_err("it is refused").to_string()
}

/// A loss of a program's own, which is the usual one.
struct OwnLoss;

impl Loss for OwnLoss {
    fn value(&self, lse: f32, target: f32) -> f32 {
        CrossEntropy.value(lse, target)
    }

    fn slopes(&self, lse: f32, target: f32) -> [f32; 2] {
        CrossEntropy.slopes(lse, target)
    }
}

#[tokio::test]
async fn models_that_an_objective_cannot_have_are_refused_by_name() {
    let folder = tempfile::tempdir().expect("a place for files");
    let mut config = on_file(folder.path(), &answers(2));
    let text = refusal(Trainer::builder(config.clone()).objective(Binary).start()).await;
    assert!(text.contains("is for a program without an objective of its own"), "{text}");
    let shape = shape_of(&config).expect("a shape of ours");
    let mut model = model_of(&config, shape).expect("a model of ours");
    model.loss = Box::new(OwnLoss);
    let text = refusal(Trainer::builder(config.clone()).model(model).start()).await;
    assert!(text.contains("objective simpo: the model has a loss of its own as well"), "{text}");
    let (masked, _) = case("bert");
    config.model = masked.model;
    config.data.sequence_length = None;
    let text = refusal(Trainer::start(config.clone())).await;
    let says = "objective simpo: it reads log-probabilities of next tokens";
    assert!(text.contains(says) && text.contains("\"causal-lm\""), "{text}");
    config.model.task = Some(Task::SentenceEmbedding);
    let text = refusal(Trainer::start(config.clone())).await;
    assert!(text.contains(says), "{text}");
    // Without an objective it makes embeddings, and has no loss.
    config.objective = Default::default();
    let mut evaluator = Evaluator::start(config).await.expect("it is a model");
    let batch = Batch::of_texts(&[Sequence::plain(vec![1, 2])]);
    let text = evaluator.evaluate([Ok(batch)]).await.expect_err("no loss").to_string();
    assert!(text.contains("a model that makes embeddings has no loss without it"), "{text}");
}

/// The reference has all layers.
#[tokio::test]
async fn steps_without_some_layers_are_refused_where_there_is_a_reference() {
    let folder = tempfile::tempdir().expect("a place for files");
    for reference in [ReferenceKind::Before, ReferenceKind::InStep] {
        let mut config = on_file(folder.path(), &answers(2));
        config.objective.kind = ObjectiveKind::Dpo;
        config.objective.reference = Some(reference);
        let is_in_step = reference == ReferenceKind::InStep;
        config.train.lora = is_in_step.then(LoraConfig::default);
        let (mut trainer, mut batches) = Trainer::open(config).await.expect("a config of ours");
        let batch = batches.next().await.expect("good records");
        let error = trainer.step_with(batch, &LayerSelection::of([1])).await;
        let text = error.expect_err("the reference has two").to_string();
        assert!(text.contains("has the reference's layers in all steps"), "{text}");
    }
}

/// A loss that is not finite names the record, and a reference that cannot be computed the layer.
#[tokio::test]
async fn numbers_that_are_not_finite_are_named() {
    let folder = tempfile::tempdir().expect("a place for files");
    let mut config = on_file(folder.path(), &answers(2));
    config.objective.kind = ObjectiveKind::Dpo;
    let (mut trainer, mut batches) = Trainer::open(config.clone()).await.expect("one of ours");
    let place = folder.path().join("model");
    trainer.checkpoint(&place).await.expect("a place for files");
    let batch = batches.next().await.expect("good records");
    let batch = batch.with_reference(vec![-1.0, -2.0, f64::NAN, -3.0]);
    let text = trainer.step(batch).await.expect_err("no loss").to_string();
    let says = "objective dpo: the loss is NaN: sequence 2 of the step has log-probability";
    assert!(text.contains(says) && text.contains("slope there is NaN"), "{text}");
    overflow(&place.join("model.safetensors"));
    config.model = l2l::config::ModelConfig {
        path: Some(place),
        unsealed: true,
        ..l2l::config::ModelConfig::default()
    };
    let text = Trainer::open(config).await.map(drop).expect_err("it overflows").to_string();
    assert!(text.contains("is the first whose hidden states behind it are not finite"), "{text}");
}

/// Makes all weights of a file so large that products of them overflow.
fn overflow(file: &Path) {
    let mut bytes = fs::read(file).expect("it was written");
    let header = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    for number in bytes[8 + header..].chunks_exact_mut(4) {
        number.copy_from_slice(&1e30_f32.to_le_bytes());
    }
    fs::write(file, bytes).expect("a place for files");
}

/// `l2l score` asks for an objective that has scores.
#[test]
fn scores_need_an_objective_of_scores() {
    let folder = tempfile::tempdir().expect("a place for files");
    let config = on_file(folder.path(), &answers(2));
    let shape = shape_of(&config).expect("a shape of ours");
    let record = "{\"text\": \"one\"}".to_string();
    let error = l2l::data::sequences_to_score(&config, &shape, &[record]).expect_err("no score");
    let says = "record 1: scores are of the objectives \"reward\" and \"binary\"";
    assert!(error.to_string().contains(says), "{error}");
}
