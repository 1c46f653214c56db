//! Layers that are added while a model trains: what PyTorch gives, what a checkpoint says, and what
//! is refused.

use std::path::Path;

use l2l::config::{EpsTier, NewLayers, ScheduleKind};
use l2l::data::Batches;
use l2l::inference::{Evaluator, load_from};
use l2l::models::LayerSelection;
use l2l::{Config, NewLayer, Trainer};
use serde::Deserialize;

#[derive(Deserialize)]
struct Golden {
    learning_rate: f64,
    weight_decay: f64,
    batch: usize,
    steps: Vec<Step>,
    sums: Vec<f64>,
}

#[derive(Deserialize)]
struct Step {
    added: Vec<Added>,
    loss: f64,
    norm: f64,
}

#[derive(Clone, Copy, Deserialize)]
struct Added {
    copy_of: usize,
    zero_residual: bool,
}

impl From<Added> for NewLayer {
    fn from(Added { copy_of, zero_residual }: Added) -> NewLayer {
        NewLayer { copy_of, zero_residual }
    }
}

fn golden() -> Golden {
    serde_json::from_str(include_str!("../goldens/growth.json")).expect("it is committed")
}

/// The case `tied`, of three layers, with room for nine.
fn config() -> Config {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/tied");
    let mut config = Config::default();
    config.data.train = folder.join("data.jsonl").display().to_string().into();
    config.data.shuffle = false;
    config.model.path = Some(folder);
    config.model.max_layers = Some(9);
    let Golden { learning_rate, weight_decay, batch, .. } = golden();
    (config.step.batch, config.step.micro_batch) = (batch, 2);
    config.optimizer.learning_rate = learning_rate;
    config.optimizer.weight_decay = weight_decay;
    config
}

/// Runs the golden's steps, and through a checkpoint before step `resumes`; the digest at the end.
async fn run(config: Config, resumes: Option<usize>) -> String {
    let golden = golden();
    let folder = tempfile::tempdir().expect("a place for files");
    let mut batches = Batches::open(&config).expect("it is committed");
    let mut trainer = Trainer::start(config.clone()).await.expect("a case of ours");
    for (at, step) in golden.steps.iter().enumerate() {
        if resumes == Some(at) {
            let saved = folder.path().join("saved");
            trainer.checkpoint(&saved).await.expect("room on a disk");
            trainer.stop().await.expect("nothing fails here");
            let mut builder = Trainer::builder(config.clone());
            if config.eps.tier == EpsTier::File {
                builder = builder.resume_file();
            } else {
                builder = builder.resume(saved);
            }
            trainer = builder.start().await.expect("a checkpoint of ours");
        }
        let new: Vec<NewLayer> = step.added.iter().map(|&added| added.into()).collect();
        trainer.add_layers(&new).await.expect("there is room");
        let batch = batches.next().await.expect("good data");
        let report = trainer.step(batch).await.expect("nothing fails here");
        assert!((report.loss - step.loss).abs() < 2e-5, "{at}: {} {}", report.loss, step.loss);
        let error = (report.grad_norm / step.norm - 1.0).abs();
        assert!(error < 1e-4, "{at}: norm {} {}", report.grad_norm, step.norm);
    }
    assert_eq!(trainer.model().shape.layers, golden.sums.len());
    let names: Vec<String> =
        trainer.model().blocks.iter().flatten().map(|tensor| tensor.name.clone()).collect();
    for (layer, sum) in golden.sums.iter().enumerate() {
        let mut found = 0.0;
        for name in names.iter().filter(|name| name.contains(&format!("h.{layer}."))) {
            let (_, weights) = trainer.weights(name).await.expect("a name of the model's");
            found += weights.iter().map(|&weight| f64::from(weight.abs())).sum::<f64>();
        }
        assert!((found / sum - 1.0).abs() < 2e-4, "layer {layer}: {found} {sum}");
    }
    trainer.digest().await.expect("nothing fails here")
}

#[tokio::test]
async fn added_layers_train_as_in_pytorch_in_every_way() {
    let expected = run(config(), None).await;
    let mut resident = config();
    resident.schedule.kind = ScheduleKind::Resident;
    resident.schedule.recompute = false.into();
    let mut dealt = config();
    dealt.device.count = Some(2);
    for config in [resident, dealt] {
        assert_eq!(run(config, None).await, expected);
    }
    for resumes in [3, 7] {
        assert_eq!(run(config(), Some(resumes)).await, expected);
        let folder = tempfile::tempdir().expect("a place for files");
        let mut on_file = config();
        (on_file.eps.tier, on_file.eps.path) = (EpsTier::File, Some(folder.path().into()));
        assert_eq!(run(on_file, Some(resumes)).await, expected);
    }
}

/// A checkpoint of a model that has grown is a model of that many layers, and one that starts from
/// there trains the same.
#[tokio::test]
async fn a_grown_model_is_one_that_has_its_layers() {
    let folder = tempfile::tempdir().expect("a place for files");
    let saved = folder.path().join("saved");
    let mut config = config();
    config.optimizer.weight_decay = 0.0;
    let mut trainer = Trainer::start(config.clone()).await.expect("a case of ours");
    let new = [2, 1].map(|copy_of| NewLayer { copy_of, zero_residual: false });
    trainer.add_layers(&new).await.expect("there is room");
    trainer.checkpoint(&saved).await.expect("room on a disk");
    let text = std::fs::read_to_string(saved.join("config.json")).expect("it was written");
    let written: serde_json::Value = serde_json::from_str(&text).expect("it is JSON");
    assert_eq!(written["n_layer"], 5);
    let mut direct = config.clone();
    (direct.model.path, direct.model.max_layers) = (Some(saved), None);
    let mut direct = Trainer::start(direct).await.expect("a model of ours");
    assert_eq!(direct.model().shape.layers, 5);
    let mut batches = Batches::open(&config).expect("it is committed");
    for _ in 0..4 {
        let batch = batches.next().await.expect("good data");
        let grown = trainer.step(batch.clone()).await.expect("nothing fails here");
        let same = direct.step(batch).await.expect("nothing fails here");
        assert_eq!((grown.loss, grown.grad_norm), (same.loss, same.grad_norm));
    }
    let evaluated = [trainer.evaluate([batches.next().await]).await, {
        let mut again = Batches::open(&config).expect("it is committed");
        for _ in 0..4 {
            again.next().await.expect("good data");
        }
        direct.evaluate([again.next().await]).await
    }];
    let [grown, same] = evaluated.map(|evaluated| evaluated.expect("nothing fails here").loss);
    assert_eq!(grown, same);
    // A config that adds layers evaluates what it saved.
    let mut evaluates = config.clone();
    evaluates.depth.stack_at = vec![100];
    let saved = folder.path().join("again");
    trainer.checkpoint(&saved).await.expect("room on a disk");
    load_from(&mut evaluates, &saved);
    let mut evaluator = Evaluator::start(evaluates).await.expect("a checkpoint of ours");
    let mut again = Batches::open(&config).expect("it is committed");
    for _ in 0..4 {
        again.next().await.expect("good data");
    }
    let loaded = evaluator.evaluate([again.next().await]).await.expect("nothing fails here");
    assert_eq!(loaded.loss, grown);
    let digests = [crate::stop(trainer).await, crate::stop(direct).await];
    let [grown, same] = digests.map(|end| end.expect("nothing fails here").weights_digest);
    assert_eq!(grown, same);
}

/// Random weights of a model with room are those of the model without; the config's stacking
/// doubles the layers, once, also in a run that resumes there.
#[tokio::test]
async fn the_config_stacks_layers() {
    let folder = tempfile::tempdir().expect("a place for files");
    let small = |max_layers: Option<usize>| {
        let mut config = Config::default();
        config.data.train = "random".into();
        (config.model.layers, config.model.max_layers) = (Some(2), max_layers);
        (config.model.hidden, config.model.heads) = (Some(16), Some(2));
        (config.model.vocabulary, config.model.positions) = (Some(31), Some(8));
        (config.step.batch, config.step.micro_batch) = (4, 2);
        config
    };
    let digest = async |config: Config| {
        let mut trainer = Trainer::start(config).await.expect("a case of ours");
        trainer.digest().await.expect("nothing fails here")
    };
    assert_eq!(digest(small(Some(7))).await, digest(small(None)).await);
    let mut config = small(Some(7));
    (config.depth.stack_at, config.depth.new_layers) = (vec![2, 4], NewLayers::ZeroResidual);
    let mut batches = Batches::open(&config).expect("random data");
    let mut trainer = Trainer::start(config.clone()).await.expect("a case of ours");
    let mut layers = Vec::new();
    for step in 0..6 {
        if step == 4 {
            let saved = folder.path().join("saved");
            trainer.checkpoint(&saved).await.expect("room on a disk");
            trainer =
                Trainer::builder(config.clone()).resume(saved).start().await.expect("it is whole");
        }
        let batch = batches.next().await.expect("random data");
        let before = trainer.evaluate([Ok(batch.clone())]).await.expect("nothing fails here").loss;
        let report = trainer.step(batch).await.expect("nothing fails here");
        // What was added changes nothing before it is trained.
        assert!((report.loss - before).abs() < 1e-12, "{} {before}", report.loss);
        layers.push(trainer.model().shape.layers);
    }
    assert_eq!(layers, [2, 2, 4, 4, 7, 7]);
}

#[tokio::test]
async fn layers_without_room_are_refused() {
    let mut trainer = Trainer::start(config()).await.expect("a case of ours");
    let copies = |of: &[usize]| {
        let new = |&copy_of: &usize| NewLayer { copy_of, zero_residual: false };
        of.iter().map(new).collect::<Vec<_>>()
    };
    for (new, says) in [
        (copies(&[0; 7]), "7 layers more: the model has 3, and room for 9: set model.max_layers"),
        (copies(&[3]), "a copy of layer 3: the model has layers 0 to 2"),
    ] {
        let error = trainer.add_layers(&new).await.expect_err("it is refused").to_string();
        assert!(error.contains(says), "{error}");
    }
    let mut batches = Batches::open(&config()).expect("it is committed");
    let batch = batches.next().await.expect("good data");
    let unknown = trainer.step_with(batch.clone(), &LayerSelection::of([0, 3])).await;
    let error = unknown.expect_err("it is not there yet").to_string();
    assert!(error.contains("layer 3 is selected, and the model has layers 0 to 2"), "{error}");
    trainer.add_layers(&copies(&[1])).await.expect("there is room");
    let selected = LayerSelection::of([0, 3]);
    trainer.step_with(batch, &selected).await.expect("it is there now");
    let refused = async |change: &dyn Fn(&mut Config), says: &str| {
        let mut config = config();
        change(&mut config);
        let error =
            Trainer::start(config).await.map(|_| ()).expect_err("it is refused").to_string();
        assert!(error.contains(says), "{error}");
    };
    refused(&|config| config.model.max_layers = Some(2), "is 2, and the model has 3 layers").await;
    refused(&|config| config.model.max_layers = Some(1 << 40), "it must be 1 to 100000").await;
    refused(
        &|config| (config.model.max_layers, config.depth.stack_at) = (Some(3), vec![5]),
        "depth.stack_at has no effect: the model has model.max_layers = 3",
    )
    .await;
    let bert = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/bert");
    refused(
        &|config| {
            config.model.path = Some(bert.clone());
            config.depth.stack_at = vec![5];
            config.depth.new_layers = NewLayers::ZeroResidual;
        },
        "depth.new_layers is \"zero-residual\", but such a layer would change the hidden states",
    )
    .await;
}
