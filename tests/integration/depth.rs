//! Steps through other layers: what PyTorch gives when the same layers are left out, what stays as
//! it was, and what is refused.

use std::path::Path;

use l2l::config::{Deal, DropRule, EpsTier, ScheduleKind};
use l2l::data::Batches;
use l2l::models::LayerSelection;
use l2l::{Config, Trainer};
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
    layers: Vec<usize>,
    frozen: Vec<usize>,
    loss: f64,
    norm: f64,
}

fn golden() -> Golden {
    serde_json::from_str(include_str!("../goldens/depth.json")).expect("it is committed")
}

fn config(golden: &Golden) -> Config {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/tied");
    let mut config = Config::default();
    config.data.train = folder.join("data.jsonl").display().to_string().into();
    config.data.shuffle = false;
    config.model.path = Some(folder);
    (config.step.batch, config.step.micro_batch) = (golden.batch, 2);
    config.optimizer.learning_rate = golden.learning_rate;
    config.optimizer.weight_decay = golden.weight_decay;
    config.depth.freezes = true;
    config
}

/// The weights of each layer.
async fn weights(trainer: &mut Trainer) -> Vec<Vec<f32>> {
    let mut layers = Vec::new();
    for layer in 0..3 {
        let names: Vec<String> = (trainer.model().blocks.iter().flatten())
            .map(|tensor| tensor.name.clone())
            .filter(|name| name.contains(&format!("h.{layer}.")))
            .collect();
        let mut all = Vec::new();
        for name in names {
            all.extend(trainer.weights(&name).await.expect("a name of the model's").1);
        }
        layers.push(all);
    }
    layers
}

/// Runs the golden's steps; the digest at the end.
async fn run(config: Config, golden: &Golden) -> String {
    let mut batches = Batches::open(&config).expect("it is committed");
    let mut trainer = Trainer::start(config).await.expect("a case of ours");
    let mut before = weights(&mut trainer).await;
    for (at, step) in golden.steps.iter().enumerate() {
        let selection =
            LayerSelection { layers: Some(step.layers.clone()), frozen: step.frozen.clone() };
        let batch = batches.next().await.expect("good data");
        let report = trainer.step_with(batch, &selection).await.expect("nothing fails here");
        assert!((report.loss - step.loss).abs() < 2e-5, "{at}: {} {}", report.loss, step.loss);
        let error = (report.grad_norm / step.norm - 1.0).abs();
        assert!(error < 1e-4, "{at}: norm {} {}", report.grad_norm, step.norm);
        let after = weights(&mut trainer).await;
        for layer in 0..3 {
            let trains = step.layers.contains(&layer) && !step.frozen.contains(&layer);
            assert_eq!(after[layer] != before[layer], trains, "step {at}, layer {layer}");
        }
        before = after;
    }
    for (layer, sum) in before.iter().zip(&golden.sums) {
        let found: f64 = layer.iter().map(|&weight| f64::from(weight.abs())).sum();
        assert!((found / sum - 1.0).abs() < 2e-4, "{found} {sum}");
    }
    trainer.digest().await.expect("nothing fails here")
}

#[tokio::test]
async fn layers_that_vary_are_pytorchs_in_every_way() {
    let golden = golden();
    let expected = run(config(&golden), &golden).await;
    let mut resident = config(&golden);
    resident.schedule.kind = ScheduleKind::Resident;
    resident.schedule.recompute = false.into();
    let mut dealt = config(&golden);
    dealt.device.count = Some(2);
    let mut on_file = config(&golden);
    let folder = tempfile::tempdir().expect("a place for files");
    (on_file.eps.tier, on_file.eps.path) = (EpsTier::File, Some(folder.path().into()));
    on_file.optimizer.clip_norm = Some(1e9); // never cuts
    for config in [resident, dealt, on_file] {
        assert_eq!(run(config, &golden).await, expected);
    }
    let mut groups = config(&golden);
    groups.parallel.groups = 3;
    let expected = run(groups.clone(), &golden).await;
    (groups.parallel.deal, groups.device.count) = (Deal::Sequences, Some(3));
    assert_eq!(run(groups, &golden).await, expected);
}

#[tokio::test]
async fn a_selection_that_cannot_be_changes_nothing() {
    let golden = golden();
    let mut config = config(&golden);
    config.depth.freezes = false;
    let mut batches = Batches::open(&config).expect("it is committed");
    let mut trainer = Trainer::start(config).await.expect("a case of ours");
    for (layers, says) in [
        (LayerSelection::of([0, 3]), "layer 3 is selected, and the model has layers 0 to 2"),
        (LayerSelection::of([1, 1]), "layer 1 is selected twice"),
        (LayerSelection { layers: None, frozen: vec![9] }, "layer 9 is selected"),
        (LayerSelection { layers: None, frozen: vec![1] }, "set depth.freezes = true"),
    ] {
        let batch = batches.next().await.expect("good data");
        let error = trainer.step_with(batch, &layers).await.expect_err("it cannot be");
        assert!(error.to_string().contains(says), "{error}");
    }
    assert_eq!(trainer.progress().step, 0);
    // Stem and final norm are left: still a model.
    let batch = batches.next().await.expect("good data");
    trainer.step_with(batch, &LayerSelection::of([])).await.expect("no layer is a selection");
    trainer.stop().await.expect("nothing fails here");
}

/// Frozen layers have room, also where their workspace is the largest.
#[tokio::test]
async fn wide_layers_can_be_frozen() {
    let mut config = Config::default();
    config.data.train = "random".into();
    (config.model.layers, config.model.hidden) = (Some(3), Some(64));
    (config.model.heads, config.model.vocabulary) = (Some(4), Some(51));
    (config.model.positions, config.data.sequence_length) = (Some(16), Some(16));
    (config.step.batch, config.step.micro_batch) = (4, 2);
    config.depth.freezes = true;
    let mut batches = Batches::open(&config).expect("random data");
    let mut trainer = Trainer::start(config).await.expect("a case of ours");
    for frozen in [vec![0], vec![1, 2], vec![0, 1, 2], vec![]] {
        let batch = batches.next().await.expect("random data");
        let layers = LayerSelection { layers: None, frozen };
        trainer.step_with(batch, &layers).await.expect("there is room");
    }
    trainer.stop().await.expect("nothing fails here");
}

/// In a pipeline a layer keeps its stage, and a stage may be empty.
#[tokio::test]
async fn dropped_layers_are_the_same_in_a_pipeline() {
    let golden = golden();
    let digest = async |kind, devices| {
        let mut config = config(&golden);
        config.depth.drop = 0.6;
        (config.step.micro_batch, config.schedule.kind) = (1, kind);
        config.device.count = Some(devices);
        let mut batches = Batches::open(&config).expect("it is committed");
        let mut trainer = Trainer::start(config).await.expect("a case of ours");
        for _ in 0..10 {
            let batch = batches.next().await.expect("good data");
            trainer.step(batch).await.expect("nothing fails here");
        }
        trainer.digest().await.expect("nothing fails here")
    };
    let expected = digest(ScheduleKind::Relay, 1).await;
    for (kind, devices) in [
        (ScheduleKind::Relay, 4),
        (ScheduleKind::Gpipe, 5),
        (ScheduleKind::OneForwardOneBackward, 3),
    ] {
        assert_eq!(digest(kind, devices).await, expected, "{kind:?} {devices}");
    }
}

/// Layers are dropped by seed and step, whoever computes; a resumed run goes on as it would have.
#[tokio::test]
async fn dropped_layers_resume() {
    let golden = golden();
    let mut config = config(&golden);
    (config.depth.drop, config.depth.rule) = (0.4, DropRule::Uniform);
    config.depth.ramp_steps = Some(3);
    config.step.steps = Some(8);
    let steps = |from: usize, to: usize, mut trainer: Trainer, config: Config| async move {
        let mut batches = Batches::open(&config).expect("it is committed");
        let mut visits = Vec::new();
        for step in 0..to {
            let batch = batches.next().await.expect("good data");
            if step >= from {
                let report = trainer.step(batch).await.expect("nothing fails here");
                visits.push(report.loss.to_bits());
            }
        }
        (trainer, visits)
    };
    let whole = Trainer::start(config.clone()).await.expect("a case of ours");
    let (whole, losses) = steps(0, 8, whole, config.clone()).await;
    let expected = crate::stop(whole).await.expect("nothing fails here");

    let folder = tempfile::tempdir().expect("a place for files");
    let at = folder.path().join("checkpoint");
    let first = Trainer::start(config.clone()).await.expect("a case of ours");
    let (mut first, begun) = steps(0, 3, first, config.clone()).await;
    first.checkpoint(&at).await.expect("room on a disk");
    first.stop().await.expect("nothing fails here");
    let rest =
        Trainer::builder(config.clone()).resume(&at).start().await.expect("a checkpoint of ours");
    let (rest, ended) = steps(3, 8, rest, config.clone()).await;
    assert_eq!([begun, ended].concat(), losses);
    let found = crate::stop(rest).await.expect("nothing fails here");
    assert_eq!(found.weights_digest, expected.weights_digest);

    (config.depth.drop, config.depth.ramp_steps) = (0.0, None);
    let all = Trainer::start(config.clone()).await.expect("a case of ours");
    let (all, _) = steps(0, 8, all, config).await;
    let all = all.stop().await.expect("nothing fails here");
    assert!(all.visits > expected.visits, "layers were left out");
}
