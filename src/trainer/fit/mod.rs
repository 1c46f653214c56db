//! A whole run as its config says: data, steps, validation, early stopping, checkpoints, the log
//! and metrics. The command `l2l train` calls it, and prints in its callbacks.
//!
//! A run is prepared first: an error in its data or directories is found before memory is taken.

mod callbacks;
mod remarks;
mod resume;
mod run;

use std::sync::Arc;

pub use callbacks::{Callbacks, RunMessage, StopRequest};
use remarks::remarks;
use resume::{Beginning, Resume};
use run::Run;

use super::{Builder, Trainer, state_on_file};
use crate::blocking::unblock;
use crate::checkpoint::Keeper;
use crate::config::{Config, DataConfig, EpsTier};
use crate::data::{Baseline, Batches, Dataset, baselines};
use crate::devices;
use crate::engine::Summary;
use crate::eps::{agreed_step, lost};
use crate::error::Error;
use crate::telemetry::{EventLog, Exporter, Observe, Trace, made_up_name};

/// A run of [`Trainer::fit`] before it is prepared.
pub struct Fit {
    builder: Builder,
    resume: Option<Resume>,
    stop: StopRequest,
    measures_peak: bool,
}

/// A run whose data and directories are open.
pub struct Prepared {
    fit: Fit,
    train: Dataset,
    steps: u64,
    between: Between,
    beginning: Beginning,
    warnings: Vec<String>,
}

/// The data and the directory that a run uses between training steps.
struct Between {
    /// The validation sets. The first one decides which model is the best.
    validation: Vec<Dataset>,
    /// The losses that counting bytes gives, for a run on the built-in text.
    baseline: Option<Baseline>,
    keeper: Option<Arc<Keeper>>,
}

/// The reason why a run ended without an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// All its steps were done.
    Complete,
    /// Too many validations in a row brought nothing better (`validation.patience`).
    Early,
    /// A [`StopRequest`] ended it.
    Stopped,
}

/// The result of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Fitted {
    /// The reason why it ended.
    pub end: End,
    /// The summary of its steps.
    pub summary: Summary,
    /// SHA-256 of all weights, as [`Trainer::digest`] gives it.
    pub weights_digest: String,
    /// The last validation loss, if there was a validation.
    pub validation_loss: Option<f64>,
}

impl Trainer {
    /// Begins a whole run of a config. [`Fit::run`] trains on `data.train` for all steps, and obeys
    /// `validation.*`, `checkpoint.*`, `log.*` and `metrics.*`.
    pub fn fit(config: Config) -> Fit {
        Trainer::builder(config).fit()
    }
}

impl Builder {
    /// Begins a whole run of the trainer that this builder makes, as [`Trainer::fit`] does.
    pub fn fit(self) -> Fit {
        Fit { builder: self, resume: None, stop: StopRequest::new(), measures_peak: false }
    }
}

impl Fit {
    /// If `resume` is true, the run resumes from the newest state in `checkpoint.directory` or
    /// `eps.path`. A run that finds no state begins.
    pub fn resume(mut self, resume: bool) -> Fit {
        self.resume = resume.then(Resume::default);
        self
    }

    /// Resumes, and fails if the newest state or checkpoint is damaged. [`resume`](Fit::resume)
    /// takes an older one instead, with a warning.
    pub fn resume_strictly(mut self) -> Fit {
        self.resume = Some(Resume { strict: true });
        self
    }

    /// Resumes even if some keys have other values than in the run before, as
    /// [`with_changes`](Builder::with_changes) says.
    pub fn resume_with_changes(mut self) -> Fit {
        self.builder = self.builder.with_changes();
        self.resume.get_or_insert_default();
        self
    }

    /// Ends the run after the current step, with a checkpoint, once the request is made.
    pub fn stop(mut self, stop: StopRequest) -> Fit {
        self.stop = stop;
        self
    }

    /// Measures the device's fastest matrix product before the run, so that its
    /// [`Watch`](crate::telemetry::Watch) can compare the run with it. A run with `metrics.listen`
    /// or `metrics.file` always measures it.
    pub fn measure_peak(mut self) -> Fit {
        self.measures_peak = true;
        self
    }

    /// Opens data and directories, and finds where the run begins. It reads files and blocks.
    ///
    /// # Errors
    /// The config, its data or its directories cannot be used. Nothing was started.
    pub fn prepare(mut self) -> Result<Prepared, Error> {
        self.builder.config.metrics.run.get_or_insert_with(made_up_name);
        let config = &self.builder.config;
        let shape = self.builder.shape()?;
        let (train, validation) = Dataset::open(config, &shape)?;
        let steps = config.steps(train.len())?;
        config.check_steps_of_run(steps)?;
        Batches::check(config, &train, steps)?;
        let baseline = baseline(config, &train, validation.first())?;
        if validation.is_empty() && config.validation.every_steps.is_some() {
            let problem = match config.data.validation_split {
                Some(split) if split > 0.0 => {
                    "needs a validation set: data.validation_split holds out no sequence"
                }
                _ => "needs a validation set: set data.validation or data.validation_split",
            };
            return Err(Error::config("validation.every_steps", problem));
        }
        let keeper = self.open_keeper()?;
        let mut warnings: Vec<String> = Vec::new();
        for data in [&train].into_iter().chain(&validation) {
            let notes = data.notes().into_iter();
            warnings.extend(notes.map(|note| format!("data {}: {note}", data.name())));
        }
        let beginning = self.beginning(keeper.as_ref(), &mut warnings)?;
        let between = Between { validation, baseline, keeper: keeper.map(Arc::new) };
        Ok(Prepared { fit: self, train, steps, between, beginning, warnings })
    }

    /// Opens `checkpoint.directory`, if it is set.
    fn open_keeper(&self) -> Result<Option<Keeper>, Error> {
        let config = &self.builder.config;
        let exchanges = self.builder.options.exchanges.as_deref();
        let is_first = exchanges.is_none_or(|exchanges| exchanges.rank() == 0);
        let directory = config.checkpoint.directory.as_deref();
        let keeper = |at| match is_first {
            true => Keeper::open(at, config.checkpoint.keep),
            false => Ok(Keeper::peek(at)),
        };
        let keeper = directory.map(keeper).transpose();
        // The other ranks look for checkpoints when rank 0 has repaired what a killed run left.
        if let Some(exchanges) = exchanges {
            let problem = keeper.as_ref().err().map(Error::to_string).unwrap_or_default();
            let problems = exchanges.meet(problem.as_bytes()).map_err(lost)?;
            if !is_first && !problems[0].is_empty() {
                let problem = String::from_utf8_lossy(&problems[0]);
                return Err(Error::System(format!("rank 0: {problem}")));
            }
        }
        keeper
    }

    fn beginning(
        &self,
        keeper: Option<&Keeper>,
        warnings: &mut Vec<String>,
    ) -> Result<Beginning, Error> {
        if self.builder.says_where_it_begins() {
            return Ok(Beginning::AsBuilt);
        }
        let config = &self.builder.config;
        let mut on_file = state_on_file(config);
        if let Some(exchanges) = self.builder.options.exchanges.as_deref() {
            let agreed = agreed_step(exchanges, on_file.as_ref().copied());
            on_file = on_file.and(agreed);
        }
        Beginning::find(config, keeper, on_file, self.resume, &mut |text| warnings.push(text))
    }

    /// Prepares the run and trains, on the caller's tokio.
    ///
    /// # Errors
    /// As [`prepare`](Fit::prepare) and [`Prepared::run`].
    pub async fn run(self, callbacks: &mut dyn Callbacks) -> Result<Fitted, Error> {
        unblock(|| self.prepare()).await??.run(callbacks).await
    }
}

/// The losses that counting bytes gives, if the run trains on the built-in text.
fn baseline(
    config: &Config,
    train: &Dataset,
    validation: Option<&Dataset>,
) -> Result<Option<Baseline>, Error> {
    let is_built_in = config.data.train.is(DataConfig::BUILT_IN);
    let Some(validation) = validation.filter(|held| is_built_in && held.is_bytes()) else {
        return Ok(None);
    };
    let most = config.validation.batches.saturating_mul(config.step.batch as u64);
    baselines(train, validation, most).map(Some)
}

impl Prepared {
    /// Adds an observer, which receives every operation as it ends.
    pub fn observe(mut self, observer: Arc<dyn Observe>) -> Prepared {
        self.fit.builder = self.fit.builder.observe(observer);
        self
    }

    /// Writes a timeline, as [`Builder::trace`] does.
    pub fn trace(mut self, trace: Arc<Trace>) -> Prepared {
        self.fit.builder = self.fit.builder.trace(trace);
        self
    }

    /// The steps of the run.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Makes the trainer and trains, on the caller's tokio. If a step fails and the ring does not,
    /// the run writes a checkpoint of the steps before.
    ///
    /// # Errors
    /// The trainer cannot be made, and no step was done; or training failed.
    ///
    /// # Panics
    /// There is no tokio runtime.
    pub async fn run(mut self, callbacks: &mut dyn Callbacks) -> Result<Fitted, Error> {
        std::mem::take(&mut self.warnings).into_iter().for_each(|text| callbacks.warn(text));
        let config = self.fit.builder.config.clone();
        let name = config.metrics.run.clone().expect("a prepared run has a name");
        let exporter = Exporter::open(&config.metrics, &name)?;
        if let Some(address) = exporter.address() {
            callbacks.message(&RunMessage::Listening(address));
        }
        let held = self.between.validation.iter().filter_map(Dataset::len).sum::<u64>();
        let sequences = self.train.len();
        let steps = self.steps;
        let (run, train) = self.start(&exporter, callbacks).await?;
        if let Some(sequences) = sequences {
            let model = run.trainer.model();
            run.callbacks.info(format!(
                "{sequences} sequences to train on, {held} held out; {steps} steps, {:.1} epochs; \
                 {} of {} parameters are trained",
                (steps * config.step.batch as u64) as f64 / sequences.max(1) as f64,
                model.trained_parameters(),
                model.parameters()
            ));
        }
        let done = run.trainer.progress().step;
        let remarks = remarks(&config, run.trainer.model(), steps, done);
        remarks.into_iter().for_each(|text| run.callbacks.warn(text));
        let watch = run.trainer.watch();
        let outcome = run.finish(train).await;
        match &outcome {
            Ok(_) => watch.set_ended(),
            Err(_) => watch.set_failed(),
        }
        if let (Err(error), Ok(Some(step))) = (&outcome, state_on_file(&config)) {
            callbacks.warn(if error.is_damage() {
                "eps.path has a damaged block: remove the folder, and --resume goes on from the \
                 newest checkpoint"
                    .into()
            } else {
                format!("eps.path holds the state after step {step}: continue with --resume")
            });
        }
        callbacks.ended(outcome.as_ref());
        if let Some(lost) = exporter.write_file() {
            callbacks.message(&RunMessage::Lost(lost));
        }
        if let Some(waits) = exporter.waits_for_last_scrape() {
            callbacks.info(waits);
            // Without a thread, the run ends at once.
            let _ = unblock(move || exporter.wait_for_last_scrape()).await;
        }
        outcome
    }

    /// Makes the trainer and opens the log. Returns the data to train on.
    async fn start<'r>(
        self,
        exporter: &Exporter,
        callbacks: &'r mut dyn Callbacks,
    ) -> Result<(Run<'r>, Dataset), Error> {
        let Prepared { fit, train, steps, between, beginning, .. } = self;
        let Fit { builder, resume, stop, measures_peak } = fit;
        let config = builder.config.clone();
        let peak = match measures_peak || exporter.is_active() {
            true => {
                let config = config.clone();
                Some(unblock(move || devices::device_flops_per_second(&config)).await??)
            }
            false => None,
        };
        if resume.is_some() && matches!(beginning, Beginning::New) {
            let text = "--resume: there is no checkpoint yet, so this run begins";
            callbacks.warn(text);
        }
        let keeps_state = between.keeper.is_some() || config.eps.tier == EpsTier::File;
        let data = keeps_state.then(|| train.fingerprint());
        let mut trainer = start_trainer(builder, steps, data, beginning, exporter).await?;
        if trainer.reads_through_cache() {
            callbacks.warn(
                "eps.path: no direct requests there, so the file goes through the system's cache",
            );
        }
        peak.into_iter().for_each(|peak| trainer.watch().set_peak_flops(peak));
        exporter.show(&trainer.watch());
        if let Some(validation) = between.validation.first() {
            let data = validation.fingerprint();
            if trainer.progress.measure_by(config.validation.best, &data) {
                callbacks.warn(
                    "validation.best or the validation data is another than before: the best \
                     validation is searched anew, and validation.patience counts from here",
                );
            }
        }
        let log = EventLog::open(&config.log)?;
        let skipped_records = train.skipped_records();
        callbacks.started(&trainer, steps);
        let run = Run {
            trainer,
            steps,
            between,
            skipped_records,
            log,
            callbacks,
            stop,
            saved: None,
            writing: None,
            skipped: 0,
            lost: None,
            validated: None,
        };
        Ok((run, train))
    }
}

/// Starts the trainer at the place where the run begins.
async fn start_trainer(
    builder: Builder,
    steps: u64,
    data: Option<String>,
    beginning: Beginning,
    exporter: &Exporter,
) -> Result<Trainer, Error> {
    let mut builder = builder.steps(steps);
    if let Some(data) = data {
        builder = builder.data(data);
    }
    builder = match beginning {
        Beginning::New | Beginning::AsBuilt => builder,
        Beginning::Checkpoint(directory) => builder.resume_checked(directory),
        Beginning::StateOnFile => builder.resume_file(),
    };
    if let Some(observer) = exporter.observer() {
        builder = builder.observe(observer);
    }
    builder.start().await
}
