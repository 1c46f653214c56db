//! A training run: a model, its update rule, a device and a ring, driven a batch at a time.

mod builder;
mod report;
mod sample;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_core::Stream;
use l2l_actors::ports::{Lane, Lanes};
use l2l_actors::schedule::{Schedule, Version};
use l2l_actors::threads::ThreadLanes;
use l2l_actors::{Relay, Resolved};

pub use builder::{Builder, state_on_file};
pub(crate) use builder::{Ring, ring_of, start_ring};
pub use report::{Bottleneck, StepReport, Summary};

use crate::checkpoint::{self, Identity, Progress};
use crate::config::Config;
use crate::data::Batch;
use crate::error::Error;
use crate::hf;
use crate::inference::Evaluation;
use crate::models::Model;
use crate::optimizers::LearningRate;
use crate::plan::{Carries, Plan, Purpose, Term, Walk, schedule_of};
use crate::telemetry::{Point, Slice, State, Watch, unix_seconds};
use crate::worker::{Goal, Turn, Worker, take_as_long};

/// A run.
///
/// A [`step`](Trainer::step) resolves when loss and norm are known. The updates it caused may
/// still run on the host, under the next step; [`checkpoint`](Trainer::checkpoint),
/// [`weights`](Trainer::weights), [`save`](Trainer::save) and [`stop`](Trainer::stop) wait for
/// them.
///
/// *Cancelled* (its future dropped), a step that has begun goes on, counts, and its report is
/// lost; one that has not begun never will, and its batch is gone. *After an error* of kind
/// [`Ring`](Error::Ring) the run is over: every call fails, and the first error said whether the
/// model is whole; any other error leaves the trainer as it was. *Dropped*, it ends its tasks and
/// threads without waiting for them, and what was not saved is lost.
pub struct Trainer {
    config: Config,
    model: Arc<Model>,
    plan: Arc<Plan>,
    learning_rate: LearningRate,
    /// The `config.json` that the model was read with, or null.
    came_with: serde_json::Value,
    data: String,
    relay: Relay<ThreadLanes<Worker>>,
    lanes: Arc<ThreadLanes<Worker>>,
    /// The last schedule that trained, and the last that did not.
    schedules: [Option<Walked>; 2],
    progress: Progress,
    /// Steps of the ring that are accounted for.
    begun: Version,
    /// Whether the turn that was handed to the ring last trains.
    pending: Option<bool>,
    /// Whether the turn that began last trains.
    last_trained: bool,
    visits: u64,
    begin: Instant,
    last_end: Instant,
    /// What the disk had taken by then.
    last_disk: Duration,
    watch: Watch,
    disk_rate: Option<f64>,
}

/// A schedule and what it was made for.
pub(crate) struct Walked {
    walk: Walk,
    pub(crate) schedule: Schedule,
    pub(crate) carries: Arc<Carries>,
}

impl Walked {
    /// The one that is kept, made anew when it is for another walk.
    pub(crate) fn of<'w>(
        kept: &'w mut Option<Walked>,
        walk: Walk,
        config: &Config,
        model: &Model,
    ) -> Result<&'w Walked, Error> {
        if kept.as_ref().is_none_or(|kept| kept.walk != walk) {
            let (schedule, carries) = schedule_of(config, model, walk)?;
            *kept = Some(Walked { walk, schedule, carries: Arc::new(carries) });
        }
        Ok(kept.as_ref().expect("it was just made"))
    }
}

impl Trainer {
    /// Makes a trainer of what a config names.
    ///
    /// # Errors
    /// As [`Builder::start`].
    pub fn start(config: Config) -> Result<Trainer, Error> {
        Trainer::builder(config).start()
    }

    /// Begins a trainer whose parts are not all from a config.
    pub fn builder(config: Config) -> Builder {
        Builder::new(config)
    }

    /// The plan it runs by.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The config it was made from.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// What it remembers beside the parameters. After a step that was cancelled, what it comes to
    /// is known once another call has been made.
    pub fn progress(&self) -> &Progress {
        &self.progress
    }

    /// Notes the loss of a validation; true when it is the best so far.
    pub fn note(&mut self, loss: f64) -> bool {
        self.account();
        let is_best = self.progress.note(loss);
        if let Some(file) = self.worker().eps().file() {
            file.remember(checkpoint::remembered(self.identity(), &self.progress));
        }
        is_best
    }

    /// What its checkpoints say it is.
    fn identity(&self) -> Identity<'_> {
        Identity {
            config: &self.config,
            model: &self.model,
            came_with: &self.came_with,
            steps: self.learning_rate.steps,
            data: &self.data,
        }
    }

    /// True when the model is on file and its file system gives no direct requests: then what is read
    /// goes through the system's cache.
    pub fn reads_through_cache(&self) -> bool {
        self.worker().eps().file().is_some_and(|file| !file.is_direct())
    }

    /// The next step, on a batch of `step.batch` sequences. See [`Trainer`] for what holds when it
    /// returns, is cancelled, or fails.
    ///
    /// # Errors
    /// The batch is not what the plan was made for, and nothing was done; or the ring failed.
    pub async fn step(&mut self, batch: Batch) -> Result<StepReport, Error> {
        let sequences = self.config.step.batch;
        if batch.lengths.len() != sequences {
            let has = batch.lengths.len();
            let what = format_args!("a batch of {has} sequences: step.batch is {sequences}");
            return Err(Error::refused(what));
        }
        let tokens = batch.token_count();
        let model_flops = self.model.training_flops(&batch.document_lengths(), batch.labelled);
        self.watch.story().state = State::Training;
        let (before, began) = (self.watch.tally(), self.lanes.now());
        let resolved = self.turn(batch, Goal::Train).await?;
        let now = Instant::now();
        let seconds = (now - std::mem::replace(&mut self.last_end, now)).as_secs_f64();
        let (step, tally) = (self.progress.step, self.watch.tally());
        let waited = std::array::from_fn(|cause| tally.waited[cause] - before.waited[cause]);
        let disk = tally.checkpoints;
        let of_disk = disk - std::mem::replace(&mut self.last_disk, disk);
        let report = StepReport {
            step,
            loss: resolved.loss,
            grad_norm: resolved.norm,
            learning_rate: self.learning_rate.at(step - 1),
            tokens,
            model_flops,
            seconds,
            exposed_wait_seconds: waited.iter().sum::<Duration>().as_secs_f64(),
            bottleneck: Bottleneck::of(seconds, waited, of_disk),
            device_peak_bytes: self.device_peak().iter().map(|term| term.bytes).sum(),
        };
        let mut story = self.watch.story();
        story.stepped(&report);
        story.bound(self.begun - 1, began, self.lanes.now());
        drop(story);
        Ok(report)
    }

    /// Steps on every batch of a stream, until it ends or `goes_on` says no.
    ///
    /// # Errors
    /// The stream's first, or as [`step`](Trainer::step).
    pub async fn train<S>(
        &mut self,
        batches: S,
        mut goes_on: impl FnMut(&StepReport) -> bool,
    ) -> Result<(), Error>
    where
        S: Stream<Item = Result<Batch, Error>>,
    {
        let mut batches = std::pin::pin!(batches);
        let mut next = std::future::poll_fn(|context| batches.as_mut().poll_next(context));
        while let Some(batch) = (&mut next).await {
            let report = self.step(batch?).await?;
            if !goes_on(&report) {
                break;
            }
        }
        Ok(())
    }

    /// How good the model is on these batches, each of at most `step.batch` sequences; of none,
    /// the loss is NaN. Training's state is not touched: no parameter, no random number, no step.
    ///
    /// # Errors
    /// As [`step`](Trainer::step).
    pub async fn evaluate(
        &mut self,
        batches: impl IntoIterator<Item = Result<Batch, Error>>,
    ) -> Result<Evaluation, Error> {
        let mut found = Evaluation::begin(self.model.shape.head);
        let goal = if found.quality.is_some() { Goal::Tell } else { Goal::Evaluate };
        let before = std::mem::replace(&mut self.watch.story().state, State::Validating);
        for batch in batches {
            let batch = batch?;
            let labels = found.meet(&batch);
            let resolved = self.turn(batch, goal).await?;
            found.take(&labels, resolved.loss, &self.worker().take_told());
        }
        let found = found.end();
        let mut story = self.watch.story();
        story.state = before;
        if found.labelled > 0 {
            story.looked(Point { step: self.progress.step, loss: found.loss });
        }
        drop(story);
        Ok(found)
    }

    /// One walk of the ring.
    async fn turn(&mut self, batch: Batch, goal: Goal) -> Result<Resolved, Error> {
        self.account();
        batch.check(&self.model, self.plan.positions, self.config.step.batch)?;
        let trains = goal == Goal::Train;
        let purpose = match goal {
            Goal::Train => Purpose::Train { states: self.worker().eps().states() },
            Goal::Evaluate | Goal::Encode => Purpose::Evaluate,
            Goal::Tell => Purpose::Tell,
        };
        let walk = Walk { sequences: batch.lengths.len(), positions: batch.positions, purpose };
        let cached = &mut self.schedules[usize::from(trains)];
        let walked = Walked::of(cached, walk, &self.config, &self.model)?;
        self.visits += walked.schedule.visits.len() as u64;
        self.pending = Some(trains);
        let carries = walked.carries.clone();
        let turn = Turn { batch, goal, trained: self.progress.step, carries, memory: Vec::new() };
        let resolved = self.relay.step(&walked.schedule, turn).await;
        self.account();
        let end = if resolved.is_ok() { self.relay.resolved_at() } else { self.lanes.now() };
        self.worker().ledger.resolves(end);
        resolved.map_err(|error| self.in_steps(error))
    }

    /// An error of the ring, which counts turns, told in training steps.
    fn in_steps(&self, error: l2l_actors::Error) -> Error {
        use l2l_actors::{Error::Failed, Integrity::Whole};
        if let Failed { cause, .. } = &error {
            self.watch.story().failed(&cause.problem);
        }
        match error {
            Failed { cause, integrity: Whole(version) } => {
                // Whole it is as of the last turn, or of the one before it.
                let undone = u64::from(version < self.begun && self.last_trained);
                let integrity = Whole(self.progress.step - undone);
                Error::Ring(Failed { cause, integrity })
            }
            error => error.into(),
        }
    }

    /// Counts the turn that was handed over last, if it has begun: also when nobody waited for it.
    fn account(&mut self) {
        if self.relay.begun() > self.begun {
            self.begun = self.relay.begun();
            self.last_trained = self.pending == Some(true);
            self.progress.step += u64::from(self.last_trained);
        }
        self.pending = None;
    }

    fn worker(&self) -> &Worker {
        self.lanes.hands()
    }

    /// The high-water mark of each term of the plan's device: slots handed out at once at most,
    /// and the workspace's greatest height.
    pub fn device_peak(&self) -> Vec<Term> {
        let term = |used: &crate::telemetry::MemoryView| Term { name: used.kind, bytes: used.used };
        self.watch.device_memory().iter().map(term).collect()
    }

    /// Waits for every update.
    async fn settle(&mut self) -> Result<(), Error> {
        let settled = self.relay.settle().await;
        self.account();
        settled.map_err(|error| self.in_steps(error))
    }

    /// A parameter by its name in a checkpoint of the family: its sizes and values, as of now.
    ///
    /// # Errors
    /// There is none of this name, or the ring failed.
    pub async fn weights(&mut self, name: &str) -> Result<(Vec<usize>, Vec<f32>), Error> {
        self.settle().await?;
        hf::tensor(name, &self.model, self.worker().eps())
    }

    /// Waits for all updates and writes the weights to a directory's `model.safetensors`, under
    /// transformers' names.
    ///
    /// # Errors
    /// The ring failed, or the file cannot be written.
    pub async fn save(&mut self, directory: &Path) -> Result<(), Error> {
        self.settle().await?;
        hf::save(directory, &self.model, self.worker().eps())
    }

    /// Waits for all updates and writes everything that a run goes on from to a new directory,
    /// which is there whole or not at all.
    ///
    /// # Errors
    /// The ring failed, or a file cannot be written.
    pub async fn checkpoint(&mut self, directory: &Path) -> Result<(), Error> {
        self.settle().await?;
        let run = self.identity();
        let before = std::mem::replace(&mut self.watch.story().state, State::Checkpointing);
        let (began, begin) = (Instant::now(), self.lanes.now());
        let written = checkpoint::write(directory, run, self.worker().eps(), &self.progress);
        let bytes = written.as_ref().map_or(0, |()| checkpoint::bytes_of(directory));
        take_as_long(began, bytes, self.disk_rate);
        self.worker().ledger.heard(&Slice {
            number: None,
            lane: Lane::File,
            kind: "checkpoint",
            step: self.begun.saturating_sub(1),
            layer: None,
            phase: None,
            micro_batch: None,
            block: None,
            version: Some(self.begun),
            bytes,
            begin,
            end: self.lanes.now(),
            released_by: None,
        });
        let mut story = self.watch.story();
        story.state = before;
        match &written {
            Ok(()) => story.checkpoint = Some(unix_seconds()),
            Err(_) => story.checkpoint_failures += 1,
        }
        written
    }

    /// Watches the run: from now on, also from elsewhere, and when it has ended.
    pub fn watch(&self) -> Watch {
        self.watch.clone()
    }

    /// Waits for the last updates, ends all threads and tasks, and sums up.
    ///
    /// # Errors
    /// The ring failed.
    pub async fn stop(mut self) -> Result<Summary, Error> {
        self.account();
        let Trainer { relay, lanes, progress, begin, visits, watch, .. } = self;
        relay.stop().await?;
        watch.ended();
        let worker = lanes.hands();
        Ok(Summary {
            steps: progress.step,
            seconds: begin.elapsed().as_secs_f64(),
            weights_digest: worker.eps().digest()?,
            visits,
            bytes_uploaded: worker.used.uploaded(),
            bytes_downloaded: worker.used.downloaded(),
        })
    }
}
