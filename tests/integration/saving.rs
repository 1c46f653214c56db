//! Checkpoints that are written while training goes on: they hold the state of their step, whatever
//! the steps behind them do, and steps behind them compute what they would without.

use std::path::Path;

use l2l::config::{CompressionKind, Dtype, EpsTier, MasterDtype, OptimizerKind};
use l2l::data::Batches;
use l2l::{Config, Trainer};
use tempfile::TempDir;

const STEPS: u64 = 5;
/// The step whose state is saved.
const SAVED: u64 = 2;

fn config() -> Config {
    let mut config = Config::default();
    config.data.train = "random".into();
    config.data.sequence_length = Some(6);
    config.model.layers = Some(3);
    config.model.hidden = Some(16);
    config.model.heads = Some(2);
    config.model.vocabulary = Some(51);
    config.model.positions = Some(6);
    config.step.batch = 4;
    config.step.micro_batch = 2;
    config.step.steps = Some(STEPS);
    config.optimizer.learning_rate = 1e-2;
    config
}

/// Losses' bits of a run, and the digest of its weights.
type Result = (Vec<u64>, String);

/// Trains from step `from` on; begins a checkpoint at a step, if there is one to begin.
async fn run(mut trainer: Trainer, mut batches: Batches, save: Option<(u64, &Path)>) -> Result {
    let mut losses = Vec::new();
    while trainer.progress().step < STEPS {
        let batch = batches.next().await.expect("random data");
        losses.push(trainer.step(batch).await.expect("nothing fails here").loss.to_bits());
        if let Some((_, place)) = save.filter(|(step, _)| *step == trainer.progress().step) {
            trainer.begin_checkpoint(place).await.expect("a directory of ours");
        }
    }
    trainer.end_checkpoint().await.expect("room on a disk");
    let ending = crate::stop(trainer).await.expect("nothing fails here");
    (losses, ending.weights_digest)
}

/// The kinds of runs whose states are kept or changed differently.
fn runs(folder: &TempDir) -> Vec<(&'static str, Config)> {
    let with = |change: &dyn Fn(&mut Config)| {
        let mut config = config();
        change(&mut config);
        config
    };
    let on_file = |config: &mut Config| {
        config.eps.tier = EpsTier::File;
        config.eps.path = Some(tempfile::tempdir_in(folder).expect("a place").keep());
    };
    vec![
        ("eager", config()),
        ("deferred", with(&|config| config.optimizer.clip_norm = Some(0.1))),
        ("on file", with(&on_file)),
        (
            "deferred, on file",
            with(&|config| {
                on_file(config);
                config.optimizer.clip_norm = Some(0.1);
            }),
        ),
        (
            "bf16 masters, 8-bit states",
            with(&|config| {
                config.device.dtype = Dtype::Bf16;
                config.optimizer.masters = MasterDtype::Bf16;
                config.optimizer.kind = OptimizerKind::Adamw8bit;
            }),
        ),
        (
            "errors of compressed gradients",
            with(&|config| {
                config.compression.kind = CompressionKind::Int8;
                config.parallel.groups = 2;
            }),
        ),
        ("two devices", with(&|config| config.device.count = Some(2))),
    ]
}

/// At this rate a checkpoint takes longer than the step behind it, whose updates wait for it.
const SLOW_DISK: &str = "400KB/s";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_checkpoint_has_the_state_of_its_step_while_training_goes_on() {
    let folder = tempfile::tempdir().expect("a place for files");
    for (what, config) in runs(&folder) {
        let start = async |config: &Config, resume: Option<&Path>| {
            let mut config = config.clone();
            if config.eps.tier == EpsTier::File {
                config.eps.path = Some(tempfile::tempdir_in(&folder).expect("a place").keep());
            }
            let builder = Trainer::builder(config);
            let builder = resume.into_iter().fold(builder, |builder, from| builder.resume(from));
            builder.open().await.expect("a case of ours")
        };
        let (trainer, batches) = start(&config, None).await;
        let (losses, digest) = run(trainer, batches, None).await;
        for disk_rate in [None, Some(SLOW_DISK.to_string())] {
            let place = folder.path().join(what);
            let mut slow = config.clone();
            slow.eps.disk_rate = disk_rate.clone();
            let (trainer, batches) = start(&slow, None).await;
            let beside = run(trainer, batches, Some((SAVED, &place))).await;
            assert_eq!(beside, (losses.clone(), digest.clone()), "{what}, {disk_rate:?}");
            let (trainer, batches) = start(&config, Some(&place)).await;
            assert_eq!(trainer.progress().step, SAVED, "{what}, {disk_rate:?}");
            let resumed = run(trainer, batches, None).await;
            let expected = (losses[SAVED as usize..].to_vec(), digest.clone());
            assert_eq!(resumed, expected, "{what}, {disk_rate:?}");
        }
    }
}

/// A checkpoint of the state after a step that failed behind it is complete: nothing of it was
/// updated before it was written.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_checkpoint_is_complete_also_where_the_next_step_fails() {
    let folder = tempfile::tempdir().expect("a place for files");
    let place = folder.path().join("here");
    let mut config = config();
    config.eps.disk_rate = Some(SLOW_DISK.into());
    // The losses overflow at the second step: its rate is far too high.
    config.optimizer.learning_rate = 1e30;
    let (mut trainer, mut batches) = Trainer::open(config.clone()).await.expect("a case of ours");
    let batch = batches.next().await.expect("random data");
    trainer.step(batch).await.expect("nothing fails here");
    let digest = trainer.digest().await.expect("it is in memory");
    trainer.begin_checkpoint(&place).await.expect("a directory of ours");
    let batch = batches.next().await.expect("random data");
    trainer.step(batch).await.expect_err("no number is finite any more");
    trainer.end_checkpoint().await.expect("it was complete before");
    let (mut resumed, _) =
        Trainer::builder(config).resume(&place).open().await.expect("a checkpoint of ours");
    assert_eq!(resumed.digest().await.expect("it is in memory"), digest);
}
