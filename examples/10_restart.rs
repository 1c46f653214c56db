//! A run that a program drops at any moment, and begins again in the same process.
//!
//! `cargo run --release --example 10_restart`. A dropped run leaves a thread that completes its
//! checkpoint, and no other run gets the directory before. So a run that is refused for that reason
//! is tried again. `benches/kills.py` calls this program with a config (the JSON of `l2l config
//! show`), a number of drops, and a seed.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use l2l::checkpoint::Keeper;
use l2l::{Callbacks, Config, Error, Trainer};
use serde_json::{Value, json};

/// The steps of one start.
#[derive(Default)]
struct Steps {
    /// The number of steps that were done before this start. `None` if it did not come so far.
    before: Option<u64>,
    last: u64,
}

impl Callbacks for Steps {
    fn started(&mut self, trainer: &Trainer, _: u64) {
        self.before = Some(trainer.progress().step);
    }

    fn event(&mut self, event: &Value) {
        if event["event"] == "step" {
            self.last = event["step"].as_u64().expect("a number");
        }
    }
}

/// Pseudo-random numbers.
struct Chance(u64);

impl Chance {
    /// A time from zero to `most`.
    fn time(&mut self, most: Duration) -> Duration {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        most.mul_f64(self.0 as f64 / u64::MAX as f64)
    }
}

/// What happened on the way to the end of the run.
#[derive(Default)]
struct Tally {
    drops: u64,
    /// Starts that were refused, because a dropped run was still writing.
    waits: u64,
    /// Starts that began before a step that was complete on the disk.
    lost: u64,
    weights_digest: String,
}

/// How long a refused start waits before it is tried again.
const PAUSE: Duration = Duration::from_millis(10);

/// Drops a run several times, each time within `most`, and then leaves it to its end.
async fn drop_often(
    config: &Config,
    drops: u64,
    most: Duration,
    chance: &mut Chance,
) -> Result<Tally, Error> {
    let mut tally = Tally::default();
    let mut complete = 0;
    loop {
        let mut steps = Steps::default();
        // It fails if the newest checkpoint is not whole.
        let run = Trainer::fit(config.clone()).resume_strictly().run(&mut steps);
        let outcome = match tally.drops < drops {
            true => tokio::time::timeout(chance.time(most), run).await.ok(),
            false => Some(run.await),
        };
        let is_early = steps.before.is_some_and(|before| before < complete);
        tally.lost += u64::from(is_early);
        match outcome {
            // The future was dropped at the end of its time.
            None => tally.drops += 1,
            Some(Err(error)) if error.to_string().contains("another run has it") => {
                tally.waits += 1;
                tokio::time::sleep(PAUSE).await;
            }
            Some(ended) => {
                tally.weights_digest = ended?.weights_digest;
                return Ok(tally);
            }
        }
        complete = complete.max(completed(config, &steps)?);
    }
}

/// The newest step that a resumed run must not lose: that of a complete checkpoint; or, of a model
/// on file, the second step before the last one, since a step is sealed while the next one runs.
fn completed(config: &Config, steps: &Steps) -> Result<u64, Error> {
    let newest = match &config.checkpoint.directory {
        Some(directory) => Keeper::peek(directory).newest_first()?.first().map(|(step, _)| *step),
        None => None,
    };
    Ok(newest.unwrap_or(0).max(steps.last.saturating_sub(2)))
}

/// Checks that every checkpoint can be resumed from.
async fn check_all(config: &Config) -> Result<(), Error> {
    let Some(directory) = &config.checkpoint.directory else { return Ok(()) };
    for (_, checkpoint) in Keeper::peek(directory).newest_first()? {
        Trainer::builder(config.clone()).resume(checkpoint).start().await?.stop().await?;
    }
    Ok(())
}

/// A small run, with a checkpoint after each step.
fn small(folder: &Path) -> Config {
    let mut config = Config::default();
    config.model.layers = Some(2);
    config.model.hidden = Some(32);
    config.model.heads = Some(4);
    config.data.train = "random".into();
    config.data.sequence_length = Some(16);
    config.step.batch = 4;
    config.step.micro_batch = 2;
    config.step.steps = Some(20);
    config.checkpoint.directory = Some(folder.join("checkpoints"));
    config.checkpoint.every_steps = Some(1);
    config
}

#[tokio::main]
async fn main() -> Result<(), Error> {
    let folder = tempfile::tempdir().expect("a folder for checkpoints");
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize| arguments.get(at).and_then(|text| text.parse().ok());
    let config = match arguments.first() {
        Some(path) => {
            let text = fs::read_to_string(path).expect("the first argument is a file");
            serde_json::from_str(&text).expect("the JSON of `l2l config show`")
        }
        None => small(folder.path()),
    };
    // The same run in other folders is not dropped.
    let mut whole = config.clone();
    whole.checkpoint.directory = whole.checkpoint.directory.map(|_| folder.path().join("whole"));
    whole.eps.path = whole.eps.path.map(|_| folder.path().join("eps"));
    let began = Instant::now();
    let expected = Trainer::fit(whole).run(&mut ()).await?.weights_digest;
    let most = began.elapsed().mul_f64(0.4);
    let mut chance = Chance(number(2).unwrap_or(1));
    let came = drop_often(&config, number(1).unwrap_or(5), most, &mut chance).await?;
    check_all(&config).await?;
    let Tally { drops, waits, lost, weights_digest } = came;
    println!(
        "{}",
        json!({
            "event": "restarts", "dropped": drops, "waits": waits, "lost": lost,
            "weights_digest": weights_digest, "expected": expected,
        })
    );
    assert!(lost == 0 && weights_digest == expected, "the run is not the one that was not dropped");
    Ok(())
}
