//! A resumed run gives the same bits as an uninterrupted one: losses and weights, also with other
//! channel depths and another place of the stash.

use std::fs;
use std::io::ErrorKind;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use async_trait::async_trait;
use l2l::checkpoint::{Hold, Keeper};
use l2l::config::{DataFile, EpsTier, Files, ScheduleKind, StashPlace};
use l2l::data::{Batches, Dataset};
use l2l::inference::Sampling;
use l2l::{Callbacks, Config, Error, RunMessage, StepReport, Trainer, shape_of};

const STEPS: u64 = 6;

fn config(clip: bool) -> Config {
    let mut config = Config::default();
    config.data.train = "random".into();
    config.data.sequence_length = Some(7);
    config.model.layers = Some(3);
    config.model.hidden = Some(24);
    config.model.heads = Some(3);
    config.model.vocabulary = Some(51);
    config.model.positions = Some(10);
    config.model.dropout = Some(0.1);
    config.step.batch = 5;
    config.step.micro_batch = 2;
    config.step.steps = Some(STEPS);
    config.optimizer.learning_rate = 1e-2;
    config.optimizer.schedule = l2l::config::RateSchedule::Cosine;
    config.optimizer.clip_norm = clip.then_some(0.5);
    config
}

/// Runs the steps `from..to`, and gives the bits of each loss and gradient norm.
async fn run(trainer: &mut Trainer, from: u64, to: u64) -> Vec<(u64, u64)> {
    let config = trainer.config().clone();
    let (data, _) = Dataset::open(&config, &shape_of(&config).expect("ours")).expect("random");
    let mut batches = Batches::start(&config, data, from).expect("a thread");
    let mut bits = Vec::new();
    for step in from..to {
        let batch = batches.next().await.expect("random data");
        let report = trainer.step(batch).await.expect("nothing fails here");
        assert_eq!(report.step, step + 1);
        bits.push((report.loss.to_bits(), report.grad_norm.to_bits()));
    }
    bits
}

/// An uninterrupted run: the bits of each step, and the digest of the weights.
async fn uninterrupted(config: &Config) -> (Vec<(u64, u64)>, String) {
    let mut trainer = Trainer::start(config.clone()).await.expect("a case of ours");
    let bits = run(&mut trainer, 0, STEPS).await;
    (bits, trainer.digest().await.expect("nothing fails here"))
}

#[tokio::test]
async fn a_resumed_run_gives_the_bits_of_an_uninterrupted_one() {
    for clip in [false, true] {
        let config = config(clip);
        let (expected, digest) = uninterrupted(&config).await;
        for at in [1, 4, STEPS] {
            let folder = tempfile::tempdir().expect("a place for files");
            let place = folder.path().join("here");
            let mut first = Trainer::start(config.clone()).await.expect("a case of ours");
            let mut bits = run(&mut first, 0, at).await;
            first.checkpoint(&place).await.expect("a directory of ours");
            first.checkpoint(&place).await.expect("again, over the first");
            drop(first);
            let mut other = config.clone();
            other.channels.weights = 3;
            other.channels.stash = 1;
            other.stash.place = StashPlace::Device;
            other.schedule.kind = ScheduleKind::Resident;
            other.device.threads = Some(1);
            let resumed = Trainer::builder(other).resume(&place).start().await;
            let mut second = resumed.expect("a checkpoint of ours");
            assert_eq!(second.progress().step, at);
            bits.extend(run(&mut second, at, STEPS).await);
            assert_eq!(bits, expected);
            let summary = crate::stop(second).await.expect("nothing fails here");
            assert_eq!((summary.steps, &summary.weights_digest), (STEPS, &digest));
            let left: Vec<_> = fs::read_dir(folder.path()).expect("ours").collect();
            assert_eq!(left.len(), 1, "nothing is left beside it: {left:?}");
        }
    }
}

/// Evaluation, generation and reading weights between steps do not change training.
#[tokio::test]
async fn inference_between_steps_changes_nothing() {
    for clip in [false, true] {
        let config = config(clip);
        let (expected, digest) = uninterrupted(&config).await;
        let shape = shape_of(&config).expect("a shape of ours");
        let mut other = config.clone();
        other.step.seed = 99;
        let (data, _) = Dataset::open(&other, &shape).expect("random data");
        let batches: Vec<_> =
            data.in_order(4, 3).map(|batch| batch.expect("random data")).collect();
        let validation = || batches.iter().cloned().map(Ok);
        let mut trainer = Trainer::start(config).await.expect("a case of ours");
        let mut bits = Vec::new();
        for step in 0..STEPS {
            let losses =
                [trainer.evaluate(validation()).await, trainer.evaluate(validation()).await];
            let [first, again] =
                losses.map(|loss| loss.expect("nothing fails here").loss.to_bits());
            assert_eq!(first, again);
            let how = Sampling { temperature: 0.8, seed: step, ..Sampling::default() };
            let drawn = trainer.sample(&[1, 2, 3], 9, how).await.expect("good tokens");
            assert!(drawn.len() == 9 && drawn.iter().all(|&token| token < 51));
            let (shape, values) = trainer.weights("transformer.wte.weight").await.expect("it is");
            assert_eq!((shape, values.len()), (vec![51, 24], 51 * 24));
            bits.extend(run(&mut trainer, step, step + 1).await);
        }
        assert_eq!(bits, expected);
        assert!(trainer.weights("wte").await.is_err());
        let summary = crate::stop(trainer).await.expect("nothing fails here");
        assert_eq!(summary.weights_digest, digest);
    }
}

/// A step whose future was dropped is done and counted, and the next step follows it.
#[tokio::test]
async fn a_step_with_a_dropped_future_is_done_and_counted() {
    let config = config(false);
    let (expected, digest) = uninterrupted(&config).await;
    let mut batches = Batches::open(&config).expect("random data");
    let mut trainer = Trainer::start(config).await.expect("a case of ours");
    let batch = batches.next().await.expect("random data");
    {
        let mut step = std::pin::pin!(trainer.step(batch));
        let once = std::future::poll_fn(|context| {
            assert!(step.as_mut().poll(context).is_pending());
            std::task::Poll::Ready(())
        });
        once.await;
    }
    for (step, bits) in (2..).zip(&expected[1..]) {
        let batch = batches.next().await.expect("random data");
        let report = trainer.step(batch).await.expect("nothing fails here");
        assert_eq!((report.step, report.loss.to_bits()), (step, bits.0));
    }
    let summary = crate::stop(trainer).await.expect("nothing fails here");
    assert_eq!((summary.steps, summary.weights_digest), (STEPS, digest));
}

async fn checkpoint(config: &Config, place: &Path) {
    let mut trainer = Trainer::start(config.clone()).await.expect("a case of ours");
    run(&mut trainer, 0, 2).await;
    trainer.checkpoint(place).await.expect("a directory of ours");
}

async fn refusal(config: Config, place: &Path) -> String {
    let refused = Trainer::builder(config).resume(place).start().await;
    let error = refused.err().expect("a bad checkpoint");
    assert_eq!(error.exit_code(), 2);
    error.to_string()
}

#[tokio::test]
async fn checkpoints_of_other_runs_and_broken_ones_are_refused() {
    let config = config(false);
    let folder = tempfile::tempdir().expect("a place for files");
    let place = folder.path().join("good");
    checkpoint(&config, &place).await;
    let mut other = config.clone();
    (other.step.batch, other.optimizer.learning_rate) = (4, 0.5);
    let error = refusal(other, &place).await;
    for says in ["step.batch was 5, is 4", "optimizer.learning_rate was 0.01, is 0.5"] {
        assert!(error.contains(says), "{error}");
    }
    let mut deeper = config.clone();
    deeper.model.layers = Some(4);
    assert!(refusal(deeper, &place).await.contains("model.layers was 3, is 4"));
    assert!(refusal(config.clone(), folder.path()).await.contains("l2l.json"));

    for file in ["l2l.json", "config.json", "model.safetensors", "optimizer.safetensors"] {
        let whole = fs::read(place.join(file)).expect("it was written");
        for cut in [0, 7, whole.len() / 2, whole.len() - 2] {
            fs::write(place.join(file), &whole[..cut]).expect("a directory of ours");
            refusal(config.clone(), &place).await;
        }
        fs::remove_file(place.join(file)).expect("it is there");
        assert!(refusal(config.clone(), &place).await.contains(file));
        fs::write(place.join(file), &whole).expect("a directory of ours");
    }
    // One bit of one weight.
    let file = place.join("model.safetensors");
    let mut bytes = fs::read(&file).expect("it was written");
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&file, bytes).expect("a directory of ours");
    assert!(refusal(config, &place).await.contains("not what was written"));
}

/// The size of chunks decides bits where sequences are longer, and only there.
#[tokio::test]
async fn a_run_with_chunks_keeps_their_size() {
    let folder = tempfile::tempdir().expect("a place for files");
    let mut config = config(false);
    (config.model.positions, config.step.chunk_positions) = (Some(300), 128);
    let larger = |config: &Config| {
        let mut config = config.clone();
        config.step.chunk_positions = 256;
        config
    };
    config.data.sequence_length = Some(128);
    let place = folder.path().join("whole");
    checkpoint(&config, &place).await;
    let resumed = Trainer::builder(larger(&config)).resume(&place).start().await;
    drop(resumed.expect("no sequence is cut"));
    config.data.sequence_length = Some(300);
    let place = folder.path().join("cut");
    checkpoint(&config, &place).await;
    let error = refusal(larger(&config), &place).await;
    assert!(error.contains("step.chunk_positions was 128, is 256"), "{error}");
    let resumed = Trainer::builder(larger(&config)).resume(&place).with_changes().start().await;
    assert_eq!(resumed.expect("a change that may be").changes().len(), 1);
}

/// A run can resume from the best checkpoint when it is the newest one, and removing old
/// checkpoints does not remove it.
#[test]
fn the_best_checkpoint_can_be_resumed() {
    let folder = tempfile::tempdir().expect("a place for files");
    let keeper = Keeper::open(folder.path(), 1).expect("a directory of ours");
    let places = [keeper.place(1), keeper.place(2), keeper.best_place(7)];
    for place in &places {
        fs::create_dir(place).expect("a directory of ours");
        fs::write(place.join("l2l.json"), "").expect("a directory of ours");
    }
    keeper.tidy(&places[1]).expect("a directory of ours");
    assert_eq!(newest(&keeper).as_ref(), Some(&places[2]));
    assert_eq!(places.map(|place| place.exists()), [false, true, true]);
}

/// A checkpoint that the run could not resume from neither counts nor goes: what the run writes
/// stays.
#[test]
fn checkpoints_of_later_steps_do_not_count() {
    let folder = tempfile::tempdir().expect("a place for files");
    let keeper = Keeper::open(folder.path(), 2).expect("a directory of ours");
    let places = [3, 4, 5, 8].map(|step| keeper.place(step));
    for place in &places {
        fs::create_dir(place).expect("a directory of ours");
        fs::write(place.join("l2l.json"), "").expect("a directory of ours");
    }
    keeper.tidy(&places[2]).expect("a directory of ours");
    assert_eq!(places.each_ref().map(|place| place.exists()), [false, true, true, true]);
    keeper.tidy(&places[3]).expect("a directory of ours");
    assert_eq!(places.map(|place| place.exists()), [false, false, true, true]);
}

/// A checkpoint that is being read is removed the next time.
#[test]
fn a_held_checkpoint_stays() {
    let folder = tempfile::tempdir().expect("a place for files");
    let keeper = Keeper::open(folder.path(), 1).expect("a directory of ours");
    let places = [1, 2, 3].map(|step| keeper.place(step));
    for place in &places {
        fs::create_dir(place).expect("a directory of ours");
        fs::write(place.join("l2l.json"), "").expect("a directory of ours");
    }
    let holds = [&places[0], &places[0]].map(|place| Hold::of(place).expect("it is there"));
    keeper.tidy(&places[1]).expect("a directory of ours");
    assert!(places[0].exists());
    drop(holds);
    keeper.tidy(&places[2]).expect("a directory of ours");
    assert_eq!(places.each_ref().map(|place| place.exists()), [false, false, true]);
    assert!(Hold::of(&places[0]).is_none(), "it is gone");
}

/// The best validation is one of a metric and of data: with others, it is searched anew.
#[tokio::test]
async fn the_best_validation_of_another_measure_does_not_count() {
    let folder = tempfile::tempdir().expect("a place for files");
    let data = |name: &str, rows: usize| {
        let row = |row: usize| format!("{{\"input_ids\": [{}, 4, 5, 6]}}\n", 1 + row % 40);
        let path = folder.path().join(name);
        fs::write(&path, (0..rows).map(row).collect::<String>()).expect("a place for files");
        path.display().to_string()
    };
    let mut config = config(false);
    config.data.train = data("train.jsonl", 40).into();
    config.data.validation = Some(data("held.jsonl", 5).into());
    config.data.sequence_length = Some(4);
    config.validation.every_steps = Some(1);
    config.checkpoint.directory = Some(folder.path().join("run"));
    config.step.steps = Some(2);
    let run = async |config: &Config| {
        let mut warnings = Warnings::default();
        let fit = Trainer::fit(config.clone()).resume_with_changes();
        fit.run(&mut warnings).await.expect("a case of ours");
        let is_told = |text: &String| text.contains("the best validation is searched anew");
        warnings.0.iter().filter(|text| is_told(text)).count()
    };
    assert_eq!(run(&config).await, 0);
    config.step.steps = Some(3);
    assert_eq!(run(&config).await, 0);
    config.data.validation = Some(data("other.jsonl", 6).into());
    config.step.steps = Some(4);
    assert_eq!(run(&config).await, 1);
    config.step.steps = Some(5);
    assert_eq!(run(&config).await, 0);
}

/// The warnings of a run.
#[derive(Default)]
struct Warnings(Vec<String>);

#[async_trait]
impl Callbacks for Warnings {
    fn message(&mut self, message: &RunMessage) {
        if let RunMessage::Warning(text) = message {
            self.0.push(text.clone());
        }
    }
}

/// The same data may lie elsewhere. Other data is another run.
#[tokio::test]
async fn data_may_move_between_runs() {
    let folder = tempfile::tempdir().expect("a place for files");
    let text = "{\"input_ids\": [1, 2, 3]}\n{\"input_ids\": [4, 5]}\n";
    let [here, there, other] = ["here.jsonl", "there.jsonl", "other.jsonl"].map(|name| {
        let path = folder.path().join(name);
        let more = if name == "other.jsonl" { text } else { "" };
        fs::write(&path, format!("{text}{more}")).expect("a place for files");
        path.display().to_string()
    });
    let mut config = config(false);
    config.data.sequence_length = Some(4);
    config.data.train = here.as_str().into();
    config.checkpoint.directory = Some(folder.path().join("run"));
    config.step.steps = Some(1);
    Trainer::fit(config.clone()).run(&mut ()).await.expect("a case of ours");
    let resumed = async |train: Files| {
        let mut config = config.clone();
        config.data.train = train;
        Trainer::fit(config).resume(true).run(&mut ()).await.map(|_| ())
    };
    resumed(there.as_str().into()).await.expect("the same data");
    let entry = |weight| DataFile::Described { path: there.clone(), weight, name: None };
    resumed(Files::Several(vec![entry(1.0)])).await.expect("the same data");
    let weighted = resumed(Files::Several(vec![entry(2.0)])).await;
    assert!(weighted.expect_err("another weight").to_string().contains("data.train was"));
    let error = resumed(other.as_str().into()).await.expect_err("other data").to_string();
    assert!(error.contains("the data was"), "{error}");
}

fn newest(keeper: &Keeper) -> Option<std::path::PathBuf> {
    keeper.newest().expect("a directory of ours")
}

#[test]
fn a_keeper_keeps_the_newest_and_the_best() {
    let folder = tempfile::tempdir().expect("a place for files");
    let keeper = Keeper::open(&folder.path().join("new/deep"), 2).expect("a directory of ours");
    assert_eq!(newest(&keeper), None);
    let places = [1, 20, 300].map(|step| keeper.place(step));
    let best = [20, 300].map(|step| keeper.best_place(step));
    let torn = keeper.place(400).with_extension("l2l-partial");
    for place in places.iter().chain(&best).chain([&torn]) {
        fs::create_dir(place).expect("a directory of ours");
        fs::write(place.join("l2l.json"), "").expect("a directory of ours");
    }
    keeper.tidy(&places[2]).and_then(|()| keeper.tidy(&best[0])).expect("a directory of ours");
    assert_eq!(newest(&keeper).as_ref(), Some(&places[2]));
    assert_eq!(places.map(|place| place.exists()), [false, true, true]);
    assert_eq!(best.map(|place| place.exists()), [true, false]);
    let error = Keeper::open(&folder.path().join("new/deep"), 2).expect_err("it is taken");
    assert!(error.to_string().contains("another run has it"), "{error}");
    // After a kill: the checkpoint that was being replaced is restored, and the one that was being
    // written is removed.
    drop(keeper);
    let made_way = folder.path().join("new/deep/step-00000300");
    fs::rename(&made_way, made_way.with_extension("l2l-old")).expect("a directory of ours");
    let keeper = Keeper::open(&folder.path().join("new/deep"), 2).expect("it is free");
    assert!(made_way.exists() && !made_way.with_extension("l2l-old").exists() && !torn.exists());
    assert_eq!(newest(&keeper), Some(made_way));
}

/// What somebody does to a directory while a run has it.
#[derive(Clone, Copy, Debug)]
enum Happens {
    Removed,
    Renamed,
    /// Another run begins there.
    Replaced,
}

/// Does it after the second step.
struct Meddler {
    happens: Happens,
    directory: PathBuf,
    /// Where the directory is renamed to.
    moved: PathBuf,
}

#[async_trait]
impl Callbacks for Meddler {
    async fn step(&mut self, _: &mut Trainer, it: &StepReport) -> Result<ControlFlow<()>, Error> {
        if it.step == 2 {
            match self.happens {
                Happens::Removed => remove(&self.directory),
                Happens::Renamed => fs::rename(&self.directory, &self.moved).expect("it is there"),
                Happens::Replaced => {
                    fs::rename(&self.directory, &self.moved).expect("it is there");
                    fs::create_dir(&self.directory).expect("the place is free");
                    fs::write(self.directory.join("of another run"), "").expect("it is there");
                }
            }
        }
        Ok(ControlFlow::Continue(()))
    }
}

/// Removes a directory that files may still be written to.
fn remove(directory: &Path) {
    loop {
        match fs::remove_dir_all(directory) {
            Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => {}
            other => return other.expect("it is there"),
        }
    }
}

/// A run whose directory was removed, renamed or replaced ends with an error, writes nothing to
/// whoever is there now, and loses nothing that it had written.
#[cfg(unix)]
#[tokio::test]
async fn a_directory_that_is_taken_away_is_noticed() {
    for (is_eps, key) in [(false, "checkpoint.directory"), (true, "eps.path")] {
        for happens in [Happens::Removed, Happens::Renamed, Happens::Replaced] {
            let folder = tempfile::tempdir().expect("a place for files");
            let directory = folder.path().join("here");
            let moved = folder.path().join("moved");
            let mut config = config(false);
            if is_eps {
                (config.eps.tier, config.eps.path) = (EpsTier::File, Some(directory.clone()));
            } else {
                config.checkpoint.directory = Some(directory.clone());
                config.checkpoint.every_steps = Some(1);
            }
            let (_, expected) = uninterrupted(&config).await;
            if is_eps {
                remove(&directory);
            }
            let mut meddler = Meddler { happens, directory: directory.clone(), moved };
            let failed = Trainer::fit(config.clone()).run(&mut meddler).await;
            let error = failed.expect_err("its directory is gone").to_string();
            assert!(error.contains(key) && error.contains("while this run had it"), "{error}");
            let there = fs::read_dir(&directory).into_iter().flatten().flatten();
            let there: Vec<_> = there.map(|entry| entry.file_name()).collect();
            match happens {
                Happens::Removed | Happens::Renamed => assert!(there.is_empty(), "{there:?}"),
                Happens::Replaced => assert_eq!(there, ["of another run"]),
            }
            if !matches!(happens, Happens::Removed) {
                _ = fs::remove_dir_all(&directory);
                fs::rename(&meddler.moved, &directory).expect("it was moved there");
                let resumed = Trainer::fit(config).resume(true).run(&mut ()).await;
                assert_eq!(resumed.expect("it is back").weights_digest, expected);
            }
        }
    }
}
