//! The library inside an application: it shares no state between trainers, runs on any tokio
//! runtime and with any stream of batches, and a refused batch changes nothing.

use std::ops::ControlFlow;
use std::pin::Pin;
use std::task::{Context, Poll};

use async_trait::async_trait;
use futures_core::Stream;
use l2l::data::{Batch, Batches, Sequence};
use l2l::{Callbacks, Config, Error, StepReport, Trainer};

fn config(seed: u64) -> Config {
    let mut config = Config::default();
    config.data.train = "random".into();
    config.data.sequence_length = Some(6);
    config.model.layers = Some(2);
    config.model.hidden = Some(16);
    config.model.heads = Some(2);
    config.model.vocabulary = Some(30);
    config.step.batch = 3;
    config.step.micro_batch = 2;
    config.step.seed = seed;
    config
}

async fn alone(seed: u64) -> String {
    let mut batches = Batches::open(&config(seed)).expect("random data");
    let mut trainer = Trainer::start(config(seed)).await.expect("a case of ours");
    for _ in 0..4 {
        trainer.step(batches.next().await.expect("random data")).await.expect("nothing fails");
    }
    trainer.digest().await.expect("nothing fails")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn two_trainers_at_once_are_two_trainers_alone() {
    let expected = (alone(1).await, alone(2).await);
    assert_ne!(expected.0, expected.1);
    let one = tokio::spawn(alone(1));
    let other = tokio::spawn(alone(2));
    assert_eq!((one.await.expect("no panic"), other.await.expect("no panic")), expected);
}

#[tokio::test]
async fn a_current_thread_runtime_will_do() {
    let one = tokio::spawn(alone(1));
    let other = tokio::spawn(alone(2));
    assert_ne!(one.await.expect("no panic"), other.await.expect("no panic"));
}

/// Batches of an application's own.
struct Counting {
    left: u32,
}

impl Stream for Counting {
    type Item = Result<Batch, Error>;

    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let sequences = [3, 4, 5].map(|len| Sequence::plain((0..len).collect()));
        let batch = self.left.checked_sub(1).map(|left| {
            self.left = left;
            Ok(Batch::new(&sequences))
        });
        Poll::Ready(batch)
    }
}

/// Ends a run after a step.
struct Until(u64);

#[async_trait]
impl Callbacks for Until {
    async fn step(
        &mut self,
        _: &mut Trainer,
        report: &StepReport,
    ) -> Result<ControlFlow<()>, Error> {
        let is_last = report.step == self.0;
        Ok(if is_last { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    }
}

#[tokio::test]
async fn any_stream_will_do() {
    let mut trainer = Trainer::start(config(1)).await.expect("a case of ours");
    trainer.train(Counting { left: 5 }, &mut ()).await.expect("nothing fails");
    assert_eq!(trainer.progress().step, 5);
    trainer.train(Counting { left: 9 }, &mut Until(7)).await.expect("nothing fails");
    assert_eq!(trainer.progress().step, 7);
    trainer.stop().await.expect("nothing fails");
}

#[tokio::test]
async fn a_refused_batch_changes_nothing() {
    let expected = alone(1).await;
    let mut batches = Batches::open(&config(1)).expect("random data");
    let mut trainer = Trainer::start(config(1)).await.expect("a case of ours");
    let plain = |tokens: &[u32]| Sequence::plain(tokens.to_vec());
    let unlabelled =
        Sequence { tokens: vec![1, 2], labels: vec![-100, -100], ..Sequence::default() };
    let bad = [
        (vec![plain(&[1, 2]); 2], "a batch of 2 sequences"),
        (vec![plain(&[1, 30]); 3], "token 30"),
        (vec![plain(&[1; 7]); 3], "7 tokens"),
        (vec![unlabelled; 3], "no position"),
    ];
    for _ in 0..4 {
        for (sequences, says) in &bad {
            let error = trainer.step(Batch::new(sequences)).await.expect_err("a bad batch");
            assert!(error.exit_code() == 2 && error.to_string().contains(says), "{error}");
        }
        trainer.step(batches.next().await.expect("random data")).await.expect("nothing fails");
    }
    assert_eq!(trainer.digest().await.expect("nothing fails"), expected);
}

/// The number of this trainer's threads in this process.
#[cfg(target_os = "linux")]
fn threads_of(trainer: &str) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").expect("there is proc");
    let names = tasks.filter_map(|task| {
        std::fs::read_to_string(task.ok()?.path().join("comm")).ok() // it may have just ended
    });
    names.filter(|name| name.trim() == trainer).count()
}

/// A trainer that is dropped ends its threads.
#[cfg(target_os = "linux")]
#[test]
fn a_dropped_trainer_leaves_nothing_behind() {
    // Other tests run in this process, so the threads are found by the trainer's own name.
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(async {
        let mut config = config(1);
        config.device.threads = Some(7);
        let mut trainer = Trainer::start(config.clone()).await.expect("a case of ours");
        let mut batches = Batches::open(&config).expect("random data");
        trainer.step(batches.next().await.expect("random data")).await.expect("nothing fails");
        assert!(threads_of("l2l-cpu-6") >= 1);
        drop((trainer, batches));
        while threads_of("l2l-cpu-6") > 0 {
            tokio::task::yield_now().await;
        }
    });
}
