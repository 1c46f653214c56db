//! Checkpoints that are written while training goes on: they hold the state of their step, whatever
//! the steps behind them do, and steps behind them compute what they would without.

use std::collections::BTreeSet;
use std::fs;
use std::ops::ControlFlow;
use std::os::unix::fs::DirEntryExt;
use std::path::{Path, PathBuf};

use async_trait::async_trait;
use l2l::checkpoint::Keeper;
use l2l::config::{ByteSize, CompressionKind, Dtype, EpsTier, MasterDtype, OnError, OptimizerKind};
use l2l::data::Batches;
use l2l::models::LayerSelection;
use l2l::{Callbacks, Config, Error, RunMessage, StepReport, Trainer};
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
type Outcome = (Vec<u64>, String);

/// Trains from step `from` on; begins a checkpoint at a step, if there is one to begin.
async fn run(mut trainer: Trainer, mut batches: Batches, save: Option<(u64, &Path)>) -> Outcome {
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

/// The files of a checkpoint's weights in the order of their names, each with its inode number.
fn weight_files(checkpoint: &Path) -> Vec<(PathBuf, u64)> {
    let entries = fs::read_dir(checkpoint).expect("it was written").flatten();
    let files = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("model-"));
    let mut files: Vec<_> = files.map(|entry| (entry.path(), entry.ino())).collect();
    files.sort();
    files
}

/// All checkpoints of a run link to one file of frozen tensors. After that file was damaged, the
/// next checkpoint has a new one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn checkpoints_share_the_files_of_frozen_tensors() {
    let folder = tempfile::tempdir().expect("a place for files");
    let places: Vec<PathBuf> =
        (0..=STEPS).map(|step| folder.path().join(step.to_string())).collect();
    let mut config = config();
    config.train.frozen = vec!["h.0".into(), "h.2.mlp".into()];
    let (mut trainer, mut batches) = Trainer::open(config.clone()).await.expect("a case of ours");
    for step in 1..=STEPS {
        let batch = batches.next().await.expect("random data");
        trainer.step(batch).await.expect("nothing fails here");
        trainer.checkpoint(&places[step as usize]).await.expect("room on a disk");
        if step == 2 {
            let (frozen, _) = &weight_files(&places[2])[0];
            let mut bytes = fs::read(frozen).expect("it was just written");
            *bytes.last_mut().expect("it is not empty") ^= 1;
            fs::write(frozen, bytes).expect("a file of ours");
        }
    }
    let digest = trainer.digest().await.expect("it is in memory");
    let files: Vec<_> = places[1..].iter().map(|place| weight_files(place)).collect();
    assert!(files.iter().all(|files| files.len() == 2), "{files:?}");
    let frozen: Vec<u64> = files.iter().map(|files| files[0].1).collect();
    assert_eq!(frozen[0], frozen[1]);
    assert_ne!(frozen[1], frozen[2], "the damaged file was written anew");
    assert_eq!(frozen[2], frozen[4]);
    let trained: BTreeSet<u64> = files.iter().map(|files| files[1].1).collect();
    assert_eq!(trained.len(), STEPS as usize);
    let resume = async |step: u64| {
        let resumed = Trainer::builder(config.clone()).resume(&places[step as usize]);
        resumed.open().await.map(|(trainer, _)| trainer)
    };
    assert!(resume(2).await.is_err(), "its file was changed");
    let mut resumed = resume(STEPS).await.expect("a checkpoint of ours");
    assert_eq!(resumed.digest().await.expect("it is in memory"), digest);
}

/// A layer that no step has updated since the checkpoint before is not written again; the others
/// are.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn checkpoints_share_the_files_of_layers_that_were_skipped() {
    let folder = tempfile::tempdir().expect("a place for files");
    let place = |step: u64| folder.path().join(step.to_string());
    let mut config = config();
    config.checkpoint.shard_size = ByteSize::from(1); // a file for each tensor
    let (mut trainer, mut batches) = Trainer::open(config.clone()).await.expect("a case of ours");
    let mut digests = Vec::new();
    for step in 1..=3 {
        let layers = if step == 2 { vec![0, 2] } else { vec![0, 1, 2] };
        let batch = batches.next().await.expect("random data");
        trainer.step_with(batch, &LayerSelection::of(layers)).await.expect("nothing fails here");
        trainer.checkpoint(&place(step)).await.expect("room on a disk");
        digests.push(trainer.digest().await.expect("it is in memory"));
    }
    let files = [1, 2, 3].map(|step| weight_files(&place(step)));
    let index = fs::read(place(1).join("model.safetensors.index.json")).expect("it was written");
    let index: serde_json::Value = serde_json::from_slice(&index).expect("it is JSON");
    for (name, file) in index["weight_map"].as_object().expect("names") {
        let inode = |files: &[(PathBuf, u64)]| {
            let is_it =
                |(path, _): &&(PathBuf, u64)| path.ends_with(file.as_str().expect("a name"));
            files.iter().find(is_it).expect("it was written").1
        };
        let [first, second, third] = [0, 1, 2].map(|at| inode(&files[at]));
        assert_eq!(first == second, name.contains("h.1."), "{name}");
        assert_ne!(second, third, "{name}");
    }
    for (step, digest) in (1..).zip(digests) {
        let resumed = Trainer::builder(config.clone()).resume(place(step)).open().await;
        let (mut resumed, _) = resumed.expect("a checkpoint of ours");
        assert_eq!(resumed.digest().await.expect("it is in memory"), digest);
    }
}

/// Puts a file where the directory of a checkpoint is to be made.
struct Obstacle {
    directory: PathBuf,
    /// The step of that checkpoint.
    of_step: u64,
    messages: Vec<RunMessage>,
}

#[async_trait]
impl Callbacks for Obstacle {
    async fn step(&mut self, _: &mut Trainer, it: &StepReport) -> Result<ControlFlow<()>, Error> {
        if it.step + 1 == self.of_step {
            let at = self.directory.join(format!("step-{:08}.l2l-partial", self.of_step));
            fs::write(at, "in the way").expect("a directory of ours");
        }
        Ok(ControlFlow::Continue(()))
    }

    fn message(&mut self, message: &RunMessage) {
        self.messages.push(message.clone());
    }
}

/// A checkpoint that cannot be written ends the run, or is reported while the run trains on. Those
/// before it stay.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_checkpoint_that_cannot_be_written_costs_none_of_the_others() {
    for on_error in [OnError::Stop, OnError::Continue] {
        let folder = tempfile::tempdir().expect("a place for files");
        let mut config = config();
        config.checkpoint.directory = Some(folder.path().into());
        (config.checkpoint.every_steps, config.checkpoint.keep) = (Some(1), 9);
        config.checkpoint.on_error = on_error;
        let directory = folder.path().to_path_buf();
        let mut obstacle = Obstacle { directory, of_step: 2, messages: Vec::new() };
        let fitted = Trainer::fit(config).run(&mut obstacle).await;
        let is_there = |step: u64| folder.path().join(format!("step-{step:08}/l2l.json")).exists();
        assert!(is_there(1) && !is_there(2));
        if on_error == OnError::Stop {
            let error = fitted.expect_err("the second one cannot be written").to_string();
            assert!(error.contains("step-00000002"), "{error}");
            continue;
        }
        assert_eq!(fitted.expect("it trains on").summary.steps, STEPS);
        assert!(is_there(3) && is_there(STEPS));
        let is_told = |message: &RunMessage| {
            matches!(message, RunMessage::Warning(text)
            if text.contains("the checkpoint of step 2 was not written"))
        };
        assert_eq!(obstacle.messages.iter().filter(|message| is_told(message)).count(), 1);
    }
}

/// A run that trains on without a checkpoint does not succeed without the last one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_without_its_last_checkpoint_ends_with_the_error() {
    let folder = tempfile::tempdir().expect("a place for files");
    let mut config = config();
    config.checkpoint.directory = Some(folder.path().into());
    config.checkpoint.every_steps = Some(2);
    config.checkpoint.on_error = OnError::Continue;
    let directory = folder.path().to_path_buf();
    let mut obstacle = Obstacle { directory, of_step: STEPS, messages: Vec::new() };
    let fitted = Trainer::fit(config).run(&mut obstacle).await;
    let error = fitted.expect_err("the last one cannot be written").to_string();
    assert!(error.contains("step-00000005"), "{error}");
    assert!(folder.path().join("step-00000004/l2l.json").exists());
}

/// Waits until a directory has a checkpoint, under any name.
async fn a_checkpoint_has_begun(directory: &Path) {
    let is_one = |entry: fs::DirEntry| entry.file_name().to_string_lossy().starts_with("step-");
    while !fs::read_dir(directory).expect("a folder of ours").flatten().any(is_one) {
        tokio::task::yield_now().await;
    }
}

/// Drops a run while its first checkpoint is being written at a rate, and opens its directory.
fn dropped_while_writing(rate: &str, and_then: impl FnOnce(&Path, Config)) {
    let folder = tempfile::tempdir().expect("a place for files");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let mut config = config();
    config.checkpoint.directory = Some(folder.path().into());
    config.checkpoint.every_steps = Some(1);
    config.eps.disk_rate = Some(rate.into());
    runtime.block_on(async {
        let mut no_callbacks = ();
        tokio::select! {
            ended = Trainer::fit(config.clone()).run(&mut no_callbacks) => panic!("{ended:?}"),
            () = a_checkpoint_has_begun(folder.path()) => {}
        }
    });
    and_then(folder.path(), config);
    runtime.shutdown_background();
}

/// A checkpoint that is being written keeps its directory locked, even if its run was dropped.
#[test]
fn a_dropped_run_keeps_its_directory_until_its_checkpoint_is_complete() {
    // Some 20 seconds for the checkpoint.
    dropped_while_writing("6KB/s", |folder, _| {
        let error = Keeper::open(folder, 1).expect_err("it is being written").to_string();
        assert!(error.contains("another run has it"), "{error}");
    });
    dropped_while_writing("1GB/s", |folder, config| {
        let mut opened = Keeper::open(folder, 1);
        while opened.is_err() {
            std::thread::yield_now();
            opened = Keeper::open(folder, 1);
        }
        drop(opened);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let fit = Trainer::fit(config).resume_strictly();
        let fitted = runtime.expect("a runtime").block_on(fit.run(&mut ()));
        assert_eq!(fitted.expect("a whole checkpoint").summary.steps, STEPS);
    });
}

/// Fails at a step whose checkpoint cannot be written.
struct Fails(Obstacle);

#[async_trait]
impl Callbacks for Fails {
    async fn step(
        &mut self,
        trainer: &mut Trainer,
        it: &StepReport,
    ) -> Result<ControlFlow<()>, Error> {
        if it.step == self.0.of_step {
            return Err(Error::own("the program's own"));
        }
        self.0.step(trainer, it).await
    }

    fn message(&mut self, message: &RunMessage) {
        self.0.message(message);
    }
}

/// An error of a callback is returned even if the checkpoint after it cannot be written.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_error_of_a_callback_is_kept() {
    let folder = tempfile::tempdir().expect("a place for files");
    let mut config = config();
    config.checkpoint.directory = Some(folder.path().into());
    let directory = folder.path().to_path_buf();
    let mut fails = Fails(Obstacle { directory, of_step: 3, messages: Vec::new() });
    let error = Trainer::fit(config).run(&mut fails).await.expect_err("the callback fails");
    assert_eq!(error.to_string(), "the program's own");
    let is_told = |message: &RunMessage| match message {
        RunMessage::Warning(text) => text.contains("step-00000003"),
        _ => false,
    };
    assert!(fails.0.messages.iter().any(is_told), "{:?}", fails.0.messages);
}
