//! Measures how long the library keeps a tokio executor from its other tasks. A ticker wakes every
//! 5 ms on a current-thread runtime; for each part of a run, the bench prints the longest delay.
//!
//! `cargo bench --bench executor`. The checkpoint has 340 MB. On busy cores the system itself
//! causes delays of some milliseconds: the first line shows the ticker alone.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use l2l::inference::{Generator, Room, Sampling, Then};
use l2l::{Config, Error, Trainer};

const INTERVAL: Duration = Duration::from_millis(5);

/// The ticker's longest delay since `show` last printed it.
static LONGEST: Mutex<Duration> = Mutex::new(Duration::ZERO);

async fn tick() {
    loop {
        let slept = Instant::now();
        tokio::time::sleep(INTERVAL).await;
        let gap = slept.elapsed().saturating_sub(INTERVAL);
        let mut longest = LONGEST.lock().expect("nothing panics inside");
        *longest = gap.max(*longest);
    }
}

/// Prints the duration of a part of the run and the longest gap in it. `began` becomes the start of
/// the next part.
fn show(part: &str, began: &mut Instant) {
    let gap = std::mem::take(&mut *LONGEST.lock().expect("nothing panics inside"));
    let took = began.elapsed().as_secs_f64();
    println!("{part:<22} {took:>8.3} s, longest gap {:>8.1} ms", gap.as_secs_f64() * 1e3);
    *began = Instant::now();
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Error> {
    let folder = tempfile::tempdir().expect("a folder for checkpoints");
    let mut config = Config::default();
    config.model.layers = Some(8);
    config.model.hidden = Some(512);
    config.model.heads = Some(8);
    config.model.vocabulary = Some(6000);
    config.data.train = "random".into();
    config.data.sequence_length = Some(64);
    config.step.batch = 8;
    config.step.steps = Some(100);

    tokio::spawn(tick());
    let mut began = Instant::now();
    tokio::time::sleep(Duration::from_secs(1)).await;
    show("nothing", &mut began);
    let room = Room { prompts: 1, prompt: 8, tokens: 64 };
    let builder = Trainer::builder(config.clone()).generates(room);
    let (mut trainer, mut batches) = builder.open().await?;
    show("Trainer::open", &mut began);
    trainer.step(batches.next().await?).await?;
    show("the first step", &mut began);
    for _ in 0..8 {
        trainer.step(batches.next().await?).await?;
    }
    show("8 more steps", &mut began);
    let some = [batches.next().await, batches.next().await];
    trainer.evaluate(some).await?;
    show("Trainer::evaluate", &mut began);
    let how = Sampling::default();
    trainer.generate(&[vec![1, 2, 3]], 32, how, &[], |_, _, _| Then::GoOn).await?;
    show("Trainer::generate", &mut began);
    let place = folder.path().join("checkpoint");
    trainer.checkpoint(&place).await?;
    show("Trainer::checkpoint", &mut began);
    trainer.digest().await?;
    show("Trainer::digest", &mut began);
    trainer.stop().await?;
    show("Trainer::stop", &mut began);
    let resumed = Trainer::builder(config.clone()).resume(&place).open().await?;
    show("resume", &mut began);
    drop(resumed);
    show("a dropped trainer", &mut began);
    let mut saved = config;
    l2l::inference::load_from(&mut saved, &place);
    let generator = Generator::start(saved, room).await?;
    show("Generator::start", &mut began);
    generator.stop().await?;
    show("Generator::stop", &mut began);
    Ok(())
}
