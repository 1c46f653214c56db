//! A training run: a model, its update rule, a device and a ring, driven a batch at a time.

mod bottleneck;
mod builder;
mod depth;
mod events;
mod fit;
mod growth;
mod sample;
mod start;
mod writing;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_core::Stream;
use l2l_actors::work::Lane;

pub use builder::{Builder, state_on_file};
pub use fit::{Callbacks, End, Fit, Fitted, Prepared, RunMessage, StopRequest};
pub use growth::NewLayer;
use writing::Begun;

use crate::blocking::unblock;
use crate::checkpoint::{Identity, Progress};
use crate::config::Config;
use crate::data::{Batch, Batches};
use crate::devices::{KernelTime, ProductTable};
use crate::engine::{Engine, Outcome, StepReport, Summary};
use crate::eps::{Eps, lost};
use crate::error::Error;
use crate::fabric::Channel;
use crate::hf;
use crate::inference::{Evaluation, evaluate};
use crate::models::{LayerSelection, Model};
use crate::optimizers::LearningRate;
use crate::plan::{Plan, Purpose, Room, Term};
use crate::telemetry::{Ledger, Point, State, Tally, Trace, Watch};
use crate::worker::Worker;

/// A run.
///
/// A [`step`](Trainer::step) resolves when loss and norm are known. The updates it caused may
/// still run on the host, under the next step; [`weights`](Trainer::weights),
/// [`save`](Trainer::save) and [`stop`](Trainer::stop) wait for them.
///
/// *Cancelled* (its future dropped), a step that has begun goes on, counts, and its report is
/// lost; one that has not begun never will, and its batch is gone. *After an error* of kind
/// [`Ring`](Error::Ring) the run is over: every call fails, and the first error said whether the
/// model is whole; any other error leaves the trainer as it was. *Dropped*, it ends its tasks and
/// threads without waiting for them, and what was not saved is lost.
pub struct Trainer {
    config: Config,
    /// Of the layers that there are now.
    model: Arc<Model>,
    plan: Arc<Plan>,
    learning_rate: LearningRate,
    /// The `config.json` that the model was read with, or null.
    source_config: serde_json::Value,
    data: String,
    engine: Engine,
    ledger: Arc<Ledger>,
    progress: Progress,
    begin: Instant,
    last_end: Instant,
    /// What the disk had taken by then.
    last_disk: Duration,
    watch: Watch,
    trace: Option<Arc<Trace>>,
    /// What it has room to generate.
    room: Option<Room>,
    disk_rate: Option<f64>,
    /// The checkpoint that is being written.
    writing: Option<Begun>,
    /// The newest complete checkpoint of this process, if its frozen tensors are the model's.
    last_checkpoint: Option<PathBuf>,
    /// What it changed of the run that it resumes.
    changes: Vec<String>,
    /// Tensors that begin at random, because the directory of the model does not have them.
    new_tensors: Vec<String>,
}

impl Trainer {
    /// Makes a trainer of what a config names, to be driven step by step. Its caller decides when
    /// it is validated and saved: the keys of `validation`, `checkpoint`, `log` and `metrics` are
    /// what [`fit`](Trainer::fit) acts on.
    ///
    /// # Errors
    /// As [`Builder::start`].
    pub async fn start(config: Config) -> Result<Trainer, Error> {
        Trainer::builder(config).start().await
    }

    /// Makes a trainer of what a config names, and the batches of its training data.
    ///
    /// # Errors
    /// As [`Builder::open`].
    pub async fn open(config: Config) -> Result<(Trainer, Batches), Error> {
        Trainer::builder(config).open().await
    }

    /// Begins a trainer whose parts are not all from a config.
    pub fn builder(config: Config) -> Builder {
        Builder::new(config)
    }

    /// The plan it runs by.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The model, of the layers that there are now.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The config it was made from.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// What it changed of the run that it resumes, a line each. See
    /// [`with_changes`](Builder::with_changes).
    pub fn changes(&self) -> &[String] {
        &self.changes
    }

    /// Names of the tensors that `model.path` does not have, those of a new head: they began at
    /// random.
    pub fn new_tensors(&self) -> &[String] {
        &self.new_tensors
    }

    /// What makes the devices slower than they could be, as sentences: host memory that could not
    /// be pinned, products that a GPU's library has no algorithm for, a choice of algorithms that
    /// cannot be used. Each is returned once.
    pub fn take_warnings(&mut self) -> Vec<String> {
        self.engine.worker().take_warnings()
    }

    /// Times each kernel of the GPUs from now on, which makes steps slower. The CPU device has none
    /// to time: see [`kernel_rates`](crate::devices::kernel_rates).
    pub fn time_kernels(&mut self) {
        self.engine.worker().time_kernels();
    }

    /// How long each kernel of the GPUs took since the last call.
    ///
    /// # Errors
    /// A GPU failed.
    pub async fn take_kernel_times(&mut self) -> Result<Vec<KernelTime>, Error> {
        let times = self.engine.between_steps(Worker::take_kernel_times).await;
        times.map_err(|error| Error::Device(error.to_string()))
    }

    /// Times the algorithms that a GPU's library has for each product, when it first comes from now
    /// on. They are not used by this trainer, whose products take the library's first algorithms.
    pub fn time_products(&mut self) {
        self.engine.worker().time_products();
    }

    /// Chooses the fastest algorithm of each product that was timed, and stores the choice in
    /// `device.kernel_cache`. Later runs on the same GPU, with the same library, take them. The
    /// result has a table for each GPU.
    ///
    /// # Errors
    /// A GPU failed, or the file cannot be written.
    pub async fn store_products(&mut self) -> Result<Vec<ProductTable>, Error> {
        let tables = self.engine.between_steps(Worker::store_products).await;
        tables.map_err(|error| Error::Device(error.to_string()))
    }

    /// How far the run is, and its best validation. A step that was cancelled is counted by the
    /// next call of any method.
    pub fn progress(&self) -> &Progress {
        &self.progress
    }

    /// Records a validation, for patience, by the metric that `validation.best` names. Returns true
    /// when it is the best so far.
    pub fn record_validation(&mut self, evaluation: &Evaluation) -> bool {
        self.refresh();
        let metric = self.config.validation.best;
        let is_best = self.progress.note(metric, evaluation.value(metric).unwrap_or(f64::NAN));
        self.remember();
        is_best
    }

    /// What a checkpoint says of the run, and what a run that resumes must agree with.
    fn identity(&self) -> Identity<'_> {
        Identity {
            config: &self.config,
            model: &self.model,
            source_config: &self.source_config,
            steps: self.learning_rate.steps,
            data: &self.data,
            changes: false,
        }
    }

    /// True for the first process of a run, which is its only one unless it has a
    /// [`fabric`](Builder::fabric).
    pub fn is_first(&self) -> bool {
        self.worker().eps().parts().is_none_or(|parts| parts.exchanges.rank() == 0)
    }

    /// Whether this is so in any process of the run. All of them ask.
    fn any(&self, is_so: bool) -> Result<bool, Error> {
        let Some(parts) = self.worker().eps().parts() else { return Ok(is_so) };
        let own = [u8::from(is_so)];
        let all = parts.exchanges.gather(Channel::Control, &own, &|| ()).map_err(lost)?;
        Ok(all.contains(&vec![1]))
    }

    /// True when the model is on file and the file system refuses direct I/O: then the file goes
    /// through the system's page cache.
    pub fn reads_through_cache(&self) -> bool {
        self.worker().eps().file().is_some_and(|file| !file.is_direct())
    }

    /// The next step, on a batch of `step.batch` sequences: `depth` of the config says which layers
    /// are added before it and which are left out. See [`Trainer`] for what holds when it returns,
    /// is cancelled, or fails.
    ///
    /// # Errors
    /// The batch is not what the plan was made for, and nothing was done; or the ring failed.
    pub async fn step(&mut self, batch: Batch) -> Result<StepReport, Error> {
        self.refresh();
        self.check_batch(&batch)?;
        self.grow().await?;
        let (seed, count) = (self.config.step.seed, self.model.optional_layers().len());
        let layers = depth::selection(&self.config.depth, seed, self.progress.step, count);
        self.step_with(batch, &layers).await
    }

    /// Refuses a batch of another number of sequences than the config says, or one that does not
    /// fit the plan or the model.
    fn check_batch(&self, batch: &Batch) -> Result<(), Error> {
        let (has, sequences) = (batch.sequences(), self.config.step.batch);
        if has != sequences {
            let what = format_args!("a batch of {has} sequences: step.batch is {sequences}");
            return Err(Error::bad_batch(what));
        }
        batch.check(&self.model, self.plan.positions, self.plan.sequences)
    }

    /// The next step, through these layers. Nothing is compiled or allocated for it.
    ///
    /// # Errors
    /// As [`step`](Trainer::step); or the model has not these layers, or the plan has no room for
    /// another order of them in a pipeline, and nothing was done.
    pub async fn step_with(
        &mut self,
        batch: Batch,
        layers: &LayerSelection,
    ) -> Result<StepReport, Error> {
        self.check_batch(&batch)?;
        layers.check(&self.model)?;
        if !layers.frozen.is_empty() && !self.config.depth.freezes {
            let what = "a step freezes layers: set depth.freezes = true, which makes room for that";
            return Err(Error::argument(what));
        }
        let tokens = batch.token_count();
        let lengths = batch.document_lengths();
        let model_flops = self.model.training_flops_of(layers, &lengths, batch.labelled);
        self.watch.status().state = State::Training;
        let (before, began) = (self.watch.tally(), self.engine.now());
        let resolved = self.run_layers(batch, Purpose::Train, layers).await?;
        let counted = u64::from(!resolved.skipped);
        let updated = self.progress.step - self.progress.skipped - counted;
        let now = Instant::now();
        let seconds = (now - std::mem::replace(&mut self.last_end, now)).as_secs_f64();
        let (step, tally) = (self.progress.step, self.watch.tally());
        let waited = std::array::from_fn(|cause| tally.waited[cause] - before.waited[cause]);
        let computed = |device: usize| {
            let busy = |tally: &Tally| tally.devices[device].lanes[Lane::Compute as usize].busy;
            busy(&tally).saturating_sub(busy(&before))
        };
        let devices = tally.devices.len();
        let slowest = (0..devices).rev().max_by_key(|&device| computed(device));
        let slowest = slowest.filter(|_| devices > 1);
        let share = |device| (device as u8, computed(device).as_secs_f64() / seconds);
        let disk = tally.checkpoints + self.worker().eps().waited_for_saving();
        let of_disk = disk - std::mem::replace(&mut self.last_disk, disk);
        let report = StepReport {
            step,
            loss: resolved.loss,
            grad_norm: resolved.norm,
            loss_scale: resolved.loss_scale,
            skipped: resolved.skipped,
            learning_rate: self.learning_rate.at(updated),
            tokens,
            model_flops,
            seconds,
            exposed_wait_seconds: waited.iter().sum::<Duration>().as_secs_f64(),
            bottleneck: bottleneck::of_step(seconds, waited, of_disk),
            device_peak_bytes: self.device_peak().iter().map(|term| term.bytes).sum(),
            slowest_device: slowest.map(share),
        };
        let mut status = self.watch.status();
        status.stepped(&report);
        status.bound(self.engine.begun(), began, self.engine.now());
        drop(status);
        self.ledger.stepped(&report);
        Ok(report)
    }

    /// Trains on every batch of a stream, until the stream ends or a callback returns
    /// [`Break`](std::ops::ControlFlow::Break). Of the callbacks it calls
    /// [`Callbacks::step`] alone.
    ///
    /// # Errors
    /// The first of the stream or of the callback, or as [`step`](Trainer::step).
    pub async fn train<S>(&mut self, batches: S, callbacks: &mut dyn Callbacks) -> Result<(), Error>
    where
        S: Stream<Item = Result<Batch, Error>>,
    {
        let mut batches = std::pin::pin!(batches);
        let mut next = std::future::poll_fn(|context| batches.as_mut().poll_next(context));
        while let Some(batch) = (&mut next).await {
            let report = self.step(batch?).await?;
            if callbacks.step(self, &report).await?.is_break() {
                break;
            }
        }
        Ok(())
    }

    /// Evaluates the model on these batches, each of at most `step.batch` sequences. The loss of no
    /// batch is NaN. Evaluation changes nothing of the training: no parameter, no random number, no
    /// step.
    ///
    /// # Errors
    /// As [`step`](Trainer::step).
    pub async fn evaluate(
        &mut self,
        batches: impl IntoIterator<Item = Result<Batch, Error>>,
    ) -> Result<Evaluation, Error> {
        self.evaluate_set(None, true, batches).await
    }

    /// The same for one of several validation sets. The first one's loss is the run's.
    async fn evaluate_set(
        &mut self,
        set: Option<&str>,
        is_first: bool,
        batches: impl IntoIterator<Item = Result<Batch, Error>>,
    ) -> Result<Evaluation, Error> {
        let before = std::mem::replace(&mut self.watch.status().state, State::Validating);
        let evaluated = evaluate(&mut self.engine, batches).await;
        self.refresh();
        let mut evaluation = evaluated.inspect_err(|error| self.note_failure(error))?;
        evaluation.set = set.map(str::to_string);
        let mut status = self.watch.status();
        status.state = before;
        if evaluation.labelled > 0 {
            status.measured(set.unwrap_or("validation"), &evaluation.values());
        }
        if evaluation.labelled > 0 && is_first {
            status.validated(Point { step: self.progress.step, loss: evaluation.loss });
        }
        drop(status);
        Ok(evaluation)
    }

    /// One step of the ring.
    async fn run(&mut self, batch: Batch, purpose: Purpose) -> Result<Outcome, Error> {
        self.run_layers(batch, purpose, &LayerSelection::default()).await
    }

    /// The same through these layers.
    async fn run_layers(
        &mut self,
        batch: Batch,
        purpose: Purpose,
        layers: &LayerSelection,
    ) -> Result<Outcome, Error> {
        let outcome = self.engine.run_layers(batch, purpose, Vec::new(), layers).await;
        self.refresh();
        outcome.inspect_err(|error| self.note_failure(error))
    }

    /// Waits for all updates, then does this with the model, and not on the caller's thread.
    async fn with_model<T: Send + 'static>(
        &mut self,
        work: impl FnOnce(&Model, &Eps) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        self.settle().await?;
        let model = self.model.clone();
        self.engine.between_steps(move |worker| work(&model, worker.eps())).await
    }

    /// Counts a step whose future was dropped after it began.
    fn refresh(&mut self) {
        self.engine.refresh();
        self.progress.step = self.engine.trained();
        self.progress.skipped = self.engine.skipped();
        self.progress.loss_scale = self.engine.scale_state();
    }

    fn note_failure(&self, error: &Error) {
        if let Error::Ring(l2l_actors::RingError::Failed { cause, .. }) = error {
            self.watch.status().failed(&cause.problem);
        }
    }

    fn worker(&self) -> &Worker {
        self.engine.worker()
    }

    /// The peak use of each term of device memory: the most slots in use at once, and the highest
    /// use of the workspace.
    pub fn device_peak(&self) -> Vec<Term> {
        let term = |used: &crate::telemetry::MemoryView| Term { name: used.kind, bytes: used.used };
        self.watch.device_memory().iter().map(term).collect()
    }

    /// Waits for every update.
    async fn settle(&mut self) -> Result<(), Error> {
        let settled = self.engine.settle().await;
        self.refresh();
        settled.inspect_err(|error| self.note_failure(error))
    }

    /// The sizes and current values of a parameter, by its name in a checkpoint of its family.
    ///
    /// # Errors
    /// There is none of this name, or the ring failed.
    pub async fn weights(&mut self, name: &str) -> Result<(Vec<usize>, Vec<f32>), Error> {
        let name = name.to_string();
        self.with_model(move |model, eps| hf::tensor(&name, model, eps)).await
    }

    /// Waits for all updates and returns the SHA-256 of all weights, the masters in block order.
    ///
    /// # Errors
    /// The ring failed, or the weights cannot be read from their file.
    pub async fn digest(&mut self) -> Result<String, Error> {
        self.with_model(|model, eps| eps.digest(model)).await
    }

    /// Waits for all updates and writes the weights to a directory's `model.safetensors`, under
    /// transformers' names.
    ///
    /// # Errors
    /// The ring failed, or the file cannot be written.
    pub async fn save(&mut self, directory: &Path) -> Result<(), Error> {
        let directory = directory.to_path_buf();
        self.with_model(move |model, eps| eps.once(|| hf::save(&directory, model, eps))).await
    }

    /// A handle that shows the run. It can be cloned, sent to other tasks, and kept after the end.
    pub fn watch(&self) -> Watch {
        self.watch.clone()
    }

    /// Waits for the last updates, ends all threads and tasks, and sums up.
    ///
    /// # Errors
    /// The ring failed; or a checkpoint that was begun could not be written.
    pub async fn stop(mut self) -> Result<Summary, Error> {
        self.end_checkpoint().await?;
        self.refresh();
        let Trainer { engine, progress, begin, watch, trace, .. } = self;
        let visits = engine.visits();
        let lanes = engine.stop().await?;
        watch.set_ended();
        let end = move || {
            let worker = lanes.work().worker();
            let used = worker.used();
            let moved = used.all_links();
            if let Some(parts) = worker.eps().parts() {
                Trace::collect(trace.as_deref(), &parts.exchanges);
                parts.exchanges.end();
            }
            Summary {
                steps: progress.step,
                seconds: begin.elapsed().as_secs_f64(),
                visits,
                bytes_uploaded: moved.upload,
                bytes_downloaded: moved.download,
                links: used.links(),
                pinned_bytes: worker.pinned_bytes(),
            }
            // Memory is given back here, which takes its time.
        };
        Ok(unblock(end).await)
    }
}
