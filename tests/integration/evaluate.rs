//! An evaluation gives the same loss as validation during training, and holds no optimizer state.

use std::path::{Path, PathBuf};

use l2l::config::{Config, Deal, ScheduleKind, Task, Transfer};
use l2l::data::Dataset;
use l2l::inference::{Evaluation, Evaluator, Quality};
use l2l::{Trainer, shape_of};

fn goldens(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(name)
}

fn config(name: &str) -> Config {
    let mut config = Config::default();
    config.model.path = Some(goldens(name));
    config.data.train = goldens(name).join("data.jsonl").display().to_string().into();
    config.data.validation = Some(config.data.train.clone());
    (config.step.batch, config.step.micro_batch) = (7, 3);
    config
}

async fn evaluated(config: &Config) -> Evaluation {
    let data =
        &Dataset::open_validation(config, &shape_of(config).expect("good")).expect("committed")[0];
    let mut evaluator = Evaluator::start(config.clone()).await.expect("good");
    let found = evaluator.evaluate(data.in_order(config.step.batch, u64::MAX)).await;
    evaluator.stop().await.expect("a clean end");
    found.expect("good batches")
}

#[tokio::test]
async fn it_gives_the_loss_of_training_s_validation() {
    for name in [
        "tied",
        "llama",
        "qwen3",
        "bert",
        "bert-classes",
        "bert-value",
        "distilbert",
        "gpt2-classes",
    ] {
        let config = config(name);
        let shape = shape_of(&config).expect("good");
        let data = &Dataset::open_validation(&config, &shape).expect("committed")[0];
        let mut trainer = Trainer::start(config.clone()).await.expect("good");
        let looked = trainer.evaluate(data.in_order(7, u64::MAX)).await.expect("good batches");
        trainer.stop().await.expect("a clean end");
        assert_eq!(evaluated(&config).await, looked, "{name}");
        let mut other = config.clone();
        other.schedule.kind = ScheduleKind::Resident;
        other.schedule.recompute = false.into();
        other.channels.stash = 1;
        (other.step.batch, other.step.micro_batch) = (7, 2);
        assert_eq!(evaluated(&other).await, looked, "{name}");
        assert!(looked.sequences > 7 && looked.loss.is_finite());
    }
}

/// On several devices, whoever gets what.
#[tokio::test]
async fn it_is_the_same_on_several_devices() {
    for name in ["tied", "bert-classes"] {
        let expected = evaluated(&config(name)).await;
        for (kind, deal, devices) in [
            (ScheduleKind::Relay, Deal::Layers, 3),
            (ScheduleKind::Resident, Deal::Sequences, 3),
            (ScheduleKind::Relay, Deal::Sequences, 2),
            (ScheduleKind::OneForwardOneBackward, Deal::Layers, 2),
        ] {
            let mut other = config(name);
            other.schedule.kind = kind;
            (other.parallel.deal, other.parallel.groups) = (deal, 3);
            other.device.count = Some(devices);
            assert_eq!(evaluated(&other).await, expected, "{name} {kind:?} {deal:?}");
            if (kind, deal) == (ScheduleKind::Relay, Deal::Sequences) {
                other.parallel.transfer = Transfer::Sharded;
                assert_eq!(evaluated(&other).await, expected, "{name} in shards");
            }
            // A last batch with groups of unequal sizes.
            (other.step.batch, other.step.micro_batch) = (9, 1);
            assert_eq!(evaluated(&other).await, expected, "{name} {kind:?} {deal:?}");
        }
    }
}

/// Hidden states come in the order of the batch, whichever device was faster.
#[tokio::test]
async fn hidden_states_are_the_same_on_several_devices() {
    let encoded = async |deal, devices| {
        let mut config = config("tied");
        (config.step.batch, config.step.micro_batch) = (8, 1);
        (config.parallel.deal, config.parallel.groups) = (deal, 4);
        config.device.count = Some(devices);
        let shape = shape_of(&config).expect("good");
        let data = &Dataset::open_validation(&config, &shape).expect("committed")[0];
        let mut trainer = Trainer::start(config).await.expect("good");
        let batch = data.in_order(8, 1).next().expect("a batch").expect("good");
        let hidden = trainer.encode(batch).await.expect("a good batch");
        trainer.stop().await.expect("a clean end");
        hidden
    };
    let expected = encoded(Deal::Layers, 1).await;
    for (deal, devices) in [(Deal::Layers, 3), (Deal::Sequences, 2), (Deal::Sequences, 4)] {
        assert_eq!(encoded(deal, devices).await, expected, "{deal:?} {devices}");
    }
}

/// Every sequence is counted once.
#[tokio::test]
async fn classes_are_counted() {
    let found = evaluated(&config("bert-classes")).await;
    let Some(Quality::Classes(confusion)) = &found.quality else { panic!("{found:?}") };
    assert_eq!(confusion.rows().flatten().sum::<u64>(), found.sequences);
    assert_eq!(found.labelled, found.sequences);
    let names: Vec<&str> = found.values().iter().map(|(name, _)| *name).collect();
    assert_eq!(names, ["loss", "accuracy", "f1", "matthews"]);
}

/// A model without a trained head is not evaluated.
#[tokio::test]
async fn a_missing_head_is_refused() {
    let mut config = config("bert");
    config.model.task = Some(Task::SequenceClassification);
    let Err(error) = Evaluator::start(config).await else { panic!("a random head") };
    assert!(error.to_string().contains("classifier.weight is missing"), "{error}");
}

#[test]
fn it_holds_no_optimizer() {
    let config = Config::default();
    let model = l2l::models::Model::new(shape_of(&config).expect("good"));
    let plan = l2l::Plan::of_evaluation(&config, &model).expect("good");
    let bytes = |name: &str| {
        let terms = plan.device.iter().chain(&plan.host);
        terms.filter(|term| term.name == name).map(|term| term.bytes).sum::<u64>()
    };
    for none in ["optimizer_states", "gradient_regions", "gradients", "landing"] {
        assert_eq!(bytes(none), 0, "{none}");
    }
    assert_eq!(bytes("masters"), 4 * model.parameters() as u64);
}
