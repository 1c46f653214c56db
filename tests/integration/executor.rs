//! The library on an application's executor: nothing holds up its other tasks, futures may be
//! dropped and sent to other threads, and callbacks wait.

use std::future::poll_fn;
use std::ops::ControlFlow;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::task::Poll;

use async_trait::async_trait;
use l2l::data::{Batch, Batches, Sequence};
use l2l::inference::{Evaluator, Generator, Room, Sampling, Then};
use l2l::models::Model;
use l2l::{Callbacks, Config, End, Error, ErrorKind, StepReport, Trainer, shape_of};

fn config() -> Config {
    let mut config = Config::default();
    config.data.train = "random".into();
    config.data.sequence_length = Some(16);
    config.model.layers = Some(2);
    config.model.hidden = Some(48);
    config.model.heads = Some(2);
    config.model.vocabulary = Some(2000);
    config.model.positions = Some(32);
    config.step.batch = 3;
    config.step.micro_batch = 2;
    config.step.steps = Some(8);
    config
}

/// Runs work beside another task on one thread until that task was polled meanwhile, and returns
/// the last result. The runtime's only thread for blocking work is busy until then: work that is
/// given to that thread cannot end before.
///
/// Work of another thread may end before the executor first looks for its result. Such work held
/// up nothing, and is done again.
async fn beside<T>(name: &str, mut work: impl AsyncFnMut() -> T) -> T {
    for _ in 0..100 {
        let polls = Arc::new(AtomicUsize::new(0));
        let ended = Arc::new(AtomicBool::new(false));
        let counts = polls.clone();
        let seen = polls.clone();
        let ends = ended.clone();
        let occupied = tokio::task::spawn_blocking(move || {
            while seen.load(Relaxed) == 0 && !ends.load(Relaxed) {
                std::thread::yield_now();
            }
        });
        let ticker = tokio::spawn(async move {
            loop {
                counts.fetch_add(1, Relaxed);
                tokio::task::yield_now().await;
            }
        });
        let done = work().await;
        let polls = polls.load(Relaxed);
        ticker.abort();
        ended.store(true, Relaxed);
        occupied.await.expect("it only waits");
        if polls > 0 {
            return done;
        }
    }
    panic!("{name} held up the other task, 100 times in a row");
}

/// What takes long is not done on the executor's thread: another task runs meanwhile. How long it
/// may have to wait is measured by `benches/executor.rs`.
#[test]
fn other_tasks_go_on() {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_all().max_blocking_threads(1).build().expect("a small runtime");
    runtime.block_on(async {
        let folder = tempfile::tempdir().expect("a place for files");
        let opened = beside("open", async || Trainer::open(config()).await).await;
        let (mut trainer, mut batches) = opened.expect("a case of ours");
        let batch = batches.next().await.expect("random data");
        trainer.step(batch).await.expect("a case of ours");
        let place = folder.path().join("checkpoint");
        let written = beside("checkpoint", async || trainer.checkpoint(&place).await).await;
        written.expect("a directory of ours");
        beside("digest", async || trainer.digest().await).await.expect("it is in memory");
        let saved = beside("save", async || trainer.save(folder.path()).await).await;
        saved.expect("a directory of ours");
        let mut trainers = vec![trainer];
        let stop = async || match trainers.pop() {
            Some(trainer) => trainer.stop().await,
            None => panic!("stop held up the other task"),
        };
        beside("stop", stop).await.expect("a clean end");
        let room = Room { prompts: 1, prompt: 4, tokens: 8 };
        let started = beside("generator", async || Generator::start(config(), room).await).await;
        started.expect("a case of ours");
        let started = beside("evaluator", async || Evaluator::start(config()).await).await;
        started.expect("a case of ours");
    });
}

/// A checkpoint whose future was dropped is written all the same, and holds the state of its step
/// while the next step goes on.
#[tokio::test]
async fn a_dropped_checkpoint_is_whole() {
    let folder = tempfile::tempdir().expect("a place for files");
    let (mut trainer, mut batches) = Trainer::open(config()).await.expect("a case of ours");
    trainer.step(batches.next().await.expect("random data")).await.expect("a case of ours");
    let expected = trainer.digest().await.expect("it is in memory");
    let place = folder.path().join("checkpoint");
    {
        // No update is left to wait for: the first poll begins to write.
        let mut writing = pin!(trainer.checkpoint(&place));
        poll_fn(|context| Poll::Ready(_ = writing.as_mut().poll(context))).await;
    }
    trainer.step(batches.next().await.expect("random data")).await.expect("a case of ours");
    assert_ne!(trainer.digest().await.expect("it is in memory"), expected);
    trainer.end_checkpoint().await.expect("a directory of ours");
    let resumed = Trainer::builder(config()).resume(&place).open().await;
    let (mut resumed, _) = resumed.expect("a whole checkpoint");
    assert_eq!(resumed.progress().step, 1);
    assert_eq!(resumed.digest().await.expect("it is in memory"), expected);
}

#[derive(Debug, thiserror::Error)]
#[error("out of coffee")]
struct OutOfCoffee;

/// What a callback does after a step.
enum Does {
    Looks,
    Trains,
    Fails,
}

struct Hook<'p> {
    place: &'p Path,
    does: Does,
    losses: Vec<f64>,
}

fn batch() -> Batch {
    Batch::new(&[Sequence::plain(vec![1, 2, 3]), Sequence::plain(vec![4, 5, 6])])
}

#[async_trait]
impl Callbacks for Hook<'_> {
    async fn step(
        &mut self,
        trainer: &mut Trainer,
        report: &StepReport,
    ) -> Result<ControlFlow<()>, Error> {
        match self.does {
            Does::Fails => return Err(Error::own(OutOfCoffee)),
            Does::Trains => {
                let three = [1, 2, 3].map(|token| Sequence::plain(vec![token, 7]));
                trainer.step(Batch::new(&three)).await?;
            }
            Does::Looks => self.losses.push(trainer.evaluate([Ok(batch())]).await?.loss),
        }
        if report.step == 3 {
            trainer.checkpoint(self.place).await?;
            return Ok(ControlFlow::Break(()));
        }
        Ok(ControlFlow::Continue(()))
    }
}

/// A callback evaluates, writes a checkpoint and ends the run; its error is the run's.
#[tokio::test]
async fn callbacks_wait() {
    let folder = tempfile::tempdir().expect("a place for files");
    let place = folder.path().join("checkpoint");
    let run = async |does| {
        let mut hook = Hook { place: &place, does, losses: Vec::new() };
        let fitted = Trainer::fit(config()).run(&mut hook).await;
        (fitted, hook.losses)
    };
    let (fitted, losses) = run(Does::Looks).await;
    let fitted = fitted.expect("nothing fails here");
    assert_eq!((fitted.end, fitted.summary.steps, losses.len()), (End::Stopped, 3, 3));
    assert!(place.join("l2l.json").is_file());
    let error = run(Does::Trains).await.0.expect_err("it may not train");
    assert!(error.to_string().contains("a callback trained"), "{error}");
    let error = run(Does::Fails).await.0.expect_err("it fails");
    let source = std::error::Error::source(&error).expect("its own");
    assert!(source.is::<OutOfCoffee>());
    assert_eq!((error.kind(), error.exit_code()), (ErrorKind::Own, 1));
}

/// Futures of a trainer can be sent to other threads, with callbacks that wait.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_loop_can_be_spawned() {
    let looped = tokio::spawn(async {
        let (mut trainer, batches) = Trainer::open(config()).await?;
        let folder = tempfile::tempdir().expect("a place for files");
        let place = folder.path().join("checkpoint");
        let mut hook = Hook { place: &place, does: Does::Looks, losses: Vec::new() };
        trainer.train(batches, &mut hook).await?;
        trainer.stop().await?;
        Ok::<_, Error>(hook.losses.len())
    });
    assert_eq!(looped.await.expect("no panic").expect("nothing fails here"), 3);
}

/// A trainer generates what a generator generates from its checkpoint, also for a model of one's
/// own, and trains on as if it had not.
#[tokio::test]
async fn a_trainer_generates() {
    let folder = tempfile::tempdir().expect("a place for files");
    let room = Room { prompts: 2, prompt: 5, tokens: 30 };
    let prompts = [vec![1, 2, 3, 4, 5], vec![7]];
    let model = || Model::new(shape_of(&config()).expect("a shape of ours"));
    let how = Sampling { temperature: 1.0, repetition_penalty: 1.2, ..Sampling::default() };
    let builder = || Trainer::builder(config()).model(model());
    let (mut trainer, mut batches) = builder().generates(room).open().await.expect("it fits");
    let (mut quiet, mut same) = builder().open().await.expect("it fits");
    let mut texts = [vec![Vec::new(); 2], vec![Vec::new(); 2]];
    for _ in 0..3 {
        let reports = [
            trainer.step(batches.next().await.expect("random data")).await,
            quiet.step(same.next().await.expect("random data")).await,
        ];
        let [one, other] = reports.map(|report| report.expect("nothing fails here").loss);
        assert_eq!(one, other);
        let each = |prompt: usize, token: u32, _| {
            texts[0][prompt].push(token);
            Then::GoOn
        };
        trainer.generate(&prompts, 9, how, &[], each).await.expect("there is room");
    }
    let refused = quiet.generate(&prompts, 9, how, &[], |_, _, _| Then::GoOn).await;
    assert!(refused.expect_err("there is no room").to_string().contains("Builder::generates"));
    trainer.save(folder.path()).await.expect("a directory of ours");
    let mut saved = config();
    saved.model.path = Some(folder.path().into());
    let generator = Generator::of_model(saved.clone(), model(), room).await;
    let mut generator = generator.expect("weights of ours");
    let each = |prompt: usize, token: u32, _| {
        texts[1][prompt].push(token);
        Then::GoOn
    };
    generator.generate(&prompts, 9, how, &[], each).await.expect("there is room");
    for (trained, generated) in texts[0].iter().zip(&texts[1]) {
        assert_eq!(trained[18..], generated[..]);
    }
    let evaluator = Evaluator::of_model(saved, model()).await;
    let found = evaluator.expect("weights of ours").evaluate([Ok(batch())]).await;
    let expected = quiet.evaluate([Ok(batch())]).await.expect("nothing fails here");
    assert_eq!(found.expect("nothing fails here").loss, expected.loss);
}

/// Batches that a program makes are trained on beside those of a config.
#[tokio::test]
async fn epochs_are_counted() {
    let mut config = config();
    (config.step.steps, config.step.epochs) = (None, Some(1.0));
    let refused = Trainer::start(config.clone()).await.map(drop);
    assert!(refused.expect_err("it sees no data").to_string().contains("step.epochs"));
    let open = Batches::open(&config).map(drop);
    let random = open.expect_err("it has no end").to_string();
    config.data.train = l2l::config::DataConfig::default().train;
    config.model.vocabulary = None;
    let opened = Trainer::open(config).await;
    assert!(opened.is_ok() && random.contains("epochs"), "{random}");
}
