//! `l2l tune`: finds the best settings on this machine: channel depths, micro-batch, place of the
//! stash and, with several devices, the way in which they share a step, and the chunks of a
//! sequence too long for one micro-batch to keep them busy.
//!
//! A first trial measures the speed of each lane. A simulation in virtual time with those rates
//! finds settings that could be better. These are tried in turns with the user's own. A setting
//! wins if it is faster by more than its trials differ among themselves. Of equally fast settings,
//! the one with less memory wins. A setting whose device memory grows with depth must be faster by
//! 5 %.

mod candidates;
mod growth;
mod tell;
mod trial;

pub(super) use trial::Layout;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use l2l::config::Format;
use l2l::data::{Batch, Batches, Dataset};
use l2l::models::Model;
use l2l::plan::Keeping;
use l2l::telemetry::{Observe, Rates, Slice};
use l2l::{
    Bottleneck, Config, Error, Plan, StepReport, Trainer, largest_shape_of, model_of, shape_of,
};

use super::common::BUILT_IN;
use super::output::{OutputFile, has_ended, lose, print};
use super::runtime::Runtime;
use super::{RateArguments, TuneArguments, outlook, say};
use candidates::candidates;
use tell::{conclude, tell, tuned};
use trial::{Settings, Trial, best_of};

pub(super) fn tune(arguments: &TuneArguments) -> Result<(), Error> {
    let TuneArguments { common, to, steps, rounds } = arguments;
    let (mut config, layers) = common.read()?;
    let text = source(common.config.as_deref())?;
    let format = config.log.format;
    // The settings of the file itself, without the environment and flags.
    let written = Config::parse(&text).map_or_else(|_| Settings::of(&config), |c| Settings::of(&c));
    let mut to = to.as_deref().map(|path| OutputFile::open("--to", path)).transpose()?;
    if *steps == 0 || *rounds == 0 {
        return Err(Error::Argument("--steps and --rounds must be at least 1".into()));
    }
    if let Some(to) = &mut to {
        to.check_room(&text, "# a config that l2l tune found\n")?;
    }
    let every = config.checkpoint.every_steps;
    let directory = config.checkpoint.directory.take();
    let saves = every.and(directory).map(|directory| parent_of(&directory));
    config.checkpoint = Default::default();
    config.validation = Default::default();
    let windows = steps.saturating_add(1);
    config.step.steps = Some(windows.saturating_mul(config.window().into()));
    config.step.epochs = None;
    let run = || {
        let model = model_of(&config, largest_shape_of(&config)?)?;
        let batches = Runtime::new()?.block_on(first_batches(&config, windows))?;
        let search = Search { config: &config, model, batches, prints_all: to.is_none() };
        let Some(Found { trials, checkpoint }) = search.run(saves.as_deref(), *rounds)? else {
            return Ok(());
        };
        let choice = best_of(&trials);
        let disk = every.zip(checkpoint).map(|(every, seconds)| seconds / every as f64);
        let text = tuned(&text, &written, &trials[choice.best], &trials[0])?;
        conclude(format, &trials, &choice, disk, &text);
        let is_written = to.map(|to| to.write(&text).map_err(lose).is_ok());
        // A config that could not be written to its file is printed.
        if is_written != Some(true) && format == Format::Pretty {
            print(text);
        }
        Ok(())
    };
    run().map_err(|error| layers.locate(error))
}

/// A search for better settings than those of a config.
struct Search<'c> {
    config: &'c Config,
    model: Model,
    /// The batches of each trial.
    batches: Vec<Batch>,
    /// True if the result is printed and has no file. Then the search ends when nobody reads it.
    prints_all: bool,
}

/// The trials of a search, the first with the user's own settings.
struct Found {
    trials: Vec<Trial>,
    /// Seconds of a checkpoint.
    checkpoint: Option<f64>,
}

impl Search<'_> {
    /// Tries the user's own settings and the candidates, each in all rounds. With `saves`, the
    /// first trial also writes a checkpoint below that folder. Returns `None` if nobody reads the
    /// output any more.
    fn run(&self, saves: Option<&Path>, rounds: usize) -> Result<Option<Found>, Error> {
        let Search { config, model, .. } = self;
        let format = config.log.format;
        let own = Settings::of(config);
        let first = self.try_once(own, saves)?;
        tell(format, &first.trial, 0);
        let rates = outlook::rates(config, model, &RateArguments::default())?;
        let plan = Plan::new(config, model, &config.update_rule())?;
        let rates = Rates::measured(&first.slices, config, model, &plan, rates);
        let mut trials = vec![first.trial];
        // All candidates are planned for the free memory of one moment.
        let mut planned = (*config).clone();
        if let Some(Keeping { ceiling, .. }) = plan.keeping {
            planned.device.memory = ceiling.into();
        }
        let longest = self.batches.iter().map(Batch::longest).max().unwrap_or(0);
        for (settings, predicted) in candidates(&planned, model, &rates, own, longest) {
            if self.has_ended() {
                return Ok(None);
            }
            match self.try_once(settings, None) {
                Ok(Tried { mut trial, .. }) => {
                    trial.predicted = Some(predicted);
                    tell(format, &trial, 0);
                    trials.push(trial);
                }
                Err(error) => say(format_args!("left out: {settings}: {error}")),
            }
        }
        for round in 1..rounds {
            for trial in &mut trials {
                if self.has_ended() {
                    return Ok(None);
                }
                let again = self.try_once(trial.settings, None)?.trial;
                tell(format, &again, round);
                trial.seconds.extend(again.seconds);
                trial.bottleneck = again.bottleneck;
                trial.exposed = again.exposed;
            }
        }
        Ok(Some(Found { trials, checkpoint: first.checkpoint }))
    }

    fn has_ended(&self) -> bool {
        self.prints_all && has_ended()
    }

    /// Runs one trial: one step that does not count, then those that do.
    fn try_once(&self, settings: Settings, saves: Option<&Path>) -> Result<Tried, Error> {
        let config = settings.on(self.config);
        let growth = growth::of(&config, &self.model, settings);
        Runtime::new()?.block_on(async {
            let slices = Arc::new(Slices::default());
            let mut trainer =
                Trainer::builder(config).observe(slices.clone()).trial().start().await?;
            let device_bytes = trainer.plan().device_bytes();
            let mut reports: Vec<StepReport> = Vec::new();
            for batch in &self.batches {
                reports.push(trainer.step(batch.clone()).await?);
            }
            let mut checkpoint = None;
            if let Some(place) = saves {
                let folder = tempfile::tempdir_in(place)
                    .map_err(|error| Error::System(error.to_string()))?;
                let begin = Instant::now();
                trainer.checkpoint(&folder.path().join("trial")).await?;
                checkpoint = Some(begin.elapsed().as_secs_f64());
            }
            trainer.stop().await?;
            let counted = &reports[1..];
            let sum = |of: fn(&StepReport) -> f64| counted.iter().map(of).sum::<f64>();
            let seconds = sum(|report| report.seconds);
            let most = |of: Bottleneck| counted.iter().filter(|one| one.bottleneck == of).count();
            let all = counted.iter().map(|report| report.bottleneck);
            let trial = Trial {
                settings,
                predicted: None,
                device_bytes,
                growth,
                seconds: vec![seconds / counted.len() as f64],
                bottleneck: all.max_by_key(|&of| most(of)).expect("a trial has steps"),
                exposed: sum(|report| report.exposed_wait_seconds) / seconds,
            };
            let mut slices = std::mem::take(&mut *slices.0.lock().expect("nothing panics inside"));
            slices.retain(|slice| slice.step > 1); // the first touches memory for the first time
            Ok(Tried { trial, slices, checkpoint })
        })
    }
}

/// The nearest existing folder above a path.
fn parent_of(place: &Path) -> PathBuf {
    let found = place.ancestors().find(|folder| folder.is_dir());
    found.map_or_else(std::env::temp_dir, Path::to_path_buf)
}

/// The text of the config to tune.
fn source(path: Option<&Path>) -> Result<String, Error> {
    let Some(path) = path else { return Ok(BUILT_IN.into()) };
    std::fs::read_to_string(path)
        .map_err(|error| Error::Argument(format!("{}: {error}", path.display())))
}

/// The first `count` batches of the training data.
async fn first_batches(config: &Config, count: u64) -> Result<Vec<Batch>, Error> {
    let (mut train, _) = Dataset::open(config, &shape_of(config)?)?;
    train.refer_to_nothing();
    Batches::check(config, &train, config.steps(train.len())?)?;
    let mut batches = Batches::start(config, train, 0)?;
    let mut taken = Vec::new();
    for _ in 0..count {
        taken.push(batches.next().await?);
    }
    Ok(taken)
}

/// Collects the operations of a trial.
#[derive(Default)]
struct Slices(Mutex<Vec<Slice>>);

impl Observe for Slices {
    fn heard(&self, slice: &Slice) {
        self.0.lock().expect("nothing panics inside").push(*slice);
    }
}

/// The results of one trial.
struct Tried {
    trial: Trial,
    slices: Vec<Slice>,
    /// Seconds of a checkpoint.
    checkpoint: Option<f64>,
}
