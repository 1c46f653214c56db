//! A training run: a model, its update rule, a device and a ring, which trains batch by batch.

mod builder;
mod depth;
mod events;
mod fit;
mod growth;
mod reference;
mod sample;
mod start;
mod writing;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use futures_core::Stream;

pub use builder::{Builder, state_on_file};
pub use fit::{Callbacks, End, Fit, Fitted, Prepared, RunMessage, StopRequest};
pub use growth::NewLayer;
use writing::Begun;

use crate::blocking::unblock;
use crate::checkpoint::{Identity, Progress};
use crate::config::{Config, ReferenceKind};
use crate::data::{Batch, Batches};
use crate::devices::{KernelTime, ProductTable};
use crate::engine::{Engine, Outcome, StepReport, Summary};
use crate::eps::{Eps, lost};
use crate::error::Error;
use crate::fabric::Channel;
use crate::hf;
use crate::inference::{Evaluation, evaluate};
use crate::models::{Head, LayerSelection, Model};
use crate::optimizers::LearningRate;
use crate::plan::{Plan, Purpose, Room, Term};
use crate::telemetry::{MemoryView, Point, State, StepEnd, StepReports, Trace, Watch};
use crate::worker::Worker;

/// A training run.
///
/// A [`step`](Trainer::step) resolves when loss and norm are known. Its updates may still run on
/// the host, under the next step; [`weights`](Trainer::weights), [`save`](Trainer::save) and
/// [`stop`](Trainer::stop) wait for them.
///
/// *Cancelled* (its future dropped), a step that has begun goes on and counts, and its report is
/// lost; a step that has not begun is not done, and its batch is lost. *After an error* of kind
/// [`Ring`](Error::Ring) the run is over: every call fails, and the first error says whether the
/// model is whole; any other error leaves the trainer as it was. *Dropped*, the trainer ends its
/// tasks and threads without waiting for them, and steps since the last checkpoint are lost.
pub struct Trainer {
    /// The config, and the model with the layers that it has now.
    run: Identity,
    plan: Arc<Plan>,
    learning_rate: LearningRate,
    engine: Engine,
    progress: Progress,
    begin: Instant,
    reports: StepReports,
    watch: Watch,
    trace: Option<Arc<Trace>>,
    /// The prompts and tokens that it has room to generate.
    room: Option<Room>,
    /// The checkpoint that is being written.
    writing: Option<Begun>,
    /// The newest complete checkpoint of this process, if it is of the model's layers.
    last_checkpoint: Option<PathBuf>,
    /// The keys that differ from those of the run that it resumes, as sentences.
    changes: Vec<String>,
    /// Tensors that begin at random, because `model.path` does not have them.
    new_tensors: Vec<String>,
}

impl Trainer {
    /// Makes a trainer from a config. The caller trains it step by step, and decides when to
    /// validate and to save: only [`fit`](Trainer::fit) obeys the keys of `validation`,
    /// `checkpoint`, `log` and `metrics`.
    ///
    /// # Errors
    /// As [`Builder::start`].
    pub async fn start(config: Config) -> Result<Trainer, Error> {
        Trainer::builder(config).start().await
    }

    /// Makes a trainer from a config, and the batches of its training data.
    ///
    /// # Errors
    /// As [`Builder::open`].
    pub async fn open(config: Config) -> Result<(Trainer, Batches), Error> {
        Trainer::builder(config).open().await
    }

    /// Begins a trainer that has more than its config says, for instance a model of one's own.
    pub fn builder(config: Config) -> Builder {
        Builder::new(config)
    }

    /// The plan of its memory and traffic.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The model, with the layers that it has now.
    pub fn model(&self) -> &Model {
        &self.run.model
    }

    /// The config that it was made from.
    pub fn config(&self) -> &Config {
        &self.run.config
    }

    /// The keys that differ from those of the run that it resumes, as sentences. Only a run
    /// [`with_changes`](Builder::with_changes) has some.
    pub fn changes(&self) -> &[String] {
        &self.changes
    }

    /// The names of the tensors that `model.path` does not have, such as those of a new head. They
    /// began at random.
    pub fn new_tensors(&self) -> &[String] {
        &self.new_tensors
    }

    /// The reasons why the devices are slower than they could be, as sentences: host memory that
    /// could not be pinned, products without an algorithm in a GPU's library, a choice of
    /// algorithms that cannot be used. Each sentence is returned once.
    pub fn take_warnings(&mut self) -> Vec<String> {
        self.engine.worker().take_warnings()
    }

    /// Times each kernel of the GPUs from now on, which makes steps slower. For the CPU device,
    /// [`kernel_rates`](crate::devices::kernel_rates) measures kernels instead.
    pub fn time_kernels(&mut self) {
        self.engine.worker().time_kernels();
    }

    /// The time that each kernel of the GPUs took since the last call.
    ///
    /// # Errors
    /// A GPU failed.
    pub async fn take_kernel_times(&mut self) -> Result<Vec<KernelTime>, Error> {
        let times = self.engine.between_steps(Worker::take_kernel_times).await?;
        times.map_err(|error| Error::Device(error.to_string()))
    }

    /// From now on, times all algorithms of a GPU's library for a product when the product first
    /// comes. This trainer's own products still use the library's first algorithms.
    pub fn time_products(&mut self) {
        self.engine.worker().time_products();
    }

    /// Chooses the fastest algorithm of each product that was timed, and stores the choice in
    /// `device.kernel_cache`. Later runs on the same GPU with the same library use it. Returns a
    /// table for each GPU.
    ///
    /// # Errors
    /// A GPU failed, or the file cannot be written.
    pub async fn store_products(&mut self) -> Result<Vec<ProductTable>, Error> {
        let tables = self.engine.between_steps(Worker::store_products).await?;
        tables.map_err(|error| Error::Device(error.to_string()))
    }

    /// The progress of the run, and its best validation. A step that was cancelled counts from the
    /// next call of any method on.
    pub fn progress(&self) -> &Progress {
        &self.progress
    }

    /// Records a validation for patience, by the metric that `validation.best` names. Returns true
    /// if it is the best so far.
    pub fn record_validation(&mut self, evaluation: &Evaluation) -> bool {
        self.refresh();
        let metric = self.run.config.validation.best;
        let is_best = self.progress.note(metric, evaluation.value(metric).unwrap_or(f64::NAN));
        self.remember();
        is_best
    }

    /// True for rank 0 of a run with a [`fabric`](Builder::fabric), and for a run without one.
    pub fn is_first(&self) -> bool {
        self.worker().eps().parts().is_none_or(|parts| parts.exchanges.rank() == 0)
    }

    /// True if `flag` is true on any rank. Collective: every rank must call it.
    fn any_rank(&self, flag: bool) -> Result<bool, Error> {
        let Some(parts) = self.worker().eps().parts() else { return Ok(flag) };
        let own = [u8::from(flag)];
        let all = parts.exchanges.gather(Channel::Control, &own, &|| ()).map_err(lost)?;
        Ok(all.contains(&vec![1]))
    }

    /// True if the model is on file and the file system refuses direct I/O. Then the file goes
    /// through the system's page cache.
    pub fn reads_through_cache(&self) -> bool {
        self.worker().eps().file().is_some_and(|file| !file.is_direct())
    }

    /// Trains one step on a batch of `step.batch` sequences. With `schedule.window` it trains all
    /// steps of a window, on the sequences of its batches, one batch behind the other.
    /// `depth` of the config says which layers are added before it and which are left out. See
    /// [`Trainer`] for what holds when it returns, is cancelled, or fails.
    ///
    /// # Errors
    /// The batch is not what the plan was made for, and nothing was done; or the ring failed.
    pub async fn step(&mut self, batch: Batch) -> Result<StepReport, Error> {
        self.refresh();
        self.check_batch(&batch)?;
        self.grow().await?;
        let seed = self.run.config.step.seed;
        let count = self.run.model.optional_layers().len();
        let layers = depth::selection(&self.run.config.depth, seed, self.progress.step, count);
        self.train_batch(batch, &layers).await
    }

    /// Trains one step through these layers. Compiles and allocates nothing for it.
    ///
    /// # Errors
    /// As [`step`](Trainer::step); or the model does not have these layers, or the plan has no room
    /// for another order of them in a pipeline, and nothing was done.
    pub async fn step_with(
        &mut self,
        batch: Batch,
        layers: &LayerSelection,
    ) -> Result<StepReport, Error> {
        self.check_batch(&batch)?;
        if let Some(kind) = self.run.config.schedule.kind.of_windows() {
            let what = "has the same layers in all steps";
            return Err(Error::argument(format_args!("schedule.kind = \"{kind}\" {what}")));
        }
        let objective = self.run.model.objective.as_ref();
        let is_in_step = self.run.config.objective.reference == Some(ReferenceKind::InStep);
        let compares = objective.is_some_and(|one| one.needs_reference());
        if is_in_step || (compares && layers.layers.is_some()) {
            let what = "an objective with a reference has the reference's layers in all steps";
            return Err(Error::argument(what));
        }
        layers.check(&self.run.model)?;
        if !layers.frozen.is_empty() && !self.run.config.depth.freezes {
            let what = "a step freezes layers: set depth.freezes = true, which makes room for that";
            return Err(Error::argument(what));
        }
        self.train_batch(batch, layers).await
    }

    /// Refuses a batch that has not `step.batch` records, or does not fit the plan or the model.
    fn check_batch(&self, batch: &Batch) -> Result<(), Error> {
        let has = batch.sequences();
        let records = self.run.config.records_of_window();
        let each = self.run.model.sequences_of_record();
        if has != self.run.model.sequences_of(records) {
            let of_records = match each {
                1 => String::new(),
                _ => format!(" records of {each} sequences"),
            };
            let what = match self.run.config.window() {
                1 => format!("step.batch is {records}{of_records}"),
                window => {
                    format!("a window of {window} batches of step.batch has {records}{of_records}")
                }
            };
            let what = format_args!("a batch of {has} sequences: {what}");
            return Err(Error::bad_batch(what));
        }
        self.engine.check(batch)?;
        let window = self.run.config.window() as usize;
        let each = has / window;
        let is_unlabelled = |nth: &usize| batch.labelled_in(nth * each..(nth + 1) * each) == 0;
        if let Some(nth) = (0..window).filter(|_| window > 1).find(is_unlabelled) {
            let what = format_args!("batch {nth} of a window of {window}: it has no label");
            return Err(Error::bad_batch(what));
        }
        self.engine.check_reference(batch)
    }

    /// The log-probability of each sequence of a batch: the sum over its labelled tokens, without
    /// dropout. An objective that compares sequences with a [reference](Batch::with_reference)
    /// takes the numbers of the model as training begins. A batch has at most as many sequences as
    /// one to train on.
    ///
    /// # Errors
    /// As [`step`](Trainer::step); or the model does not predict next tokens.
    pub async fn log_probabilities(&mut self, batch: Batch) -> Result<Vec<f64>, Error> {
        if self.run.model.shape.head != Head::Tokens {
            let what = "log-probabilities of sequences are those of next tokens: set model.task = \
                        \"causal-lm\"";
            return Err(Error::argument(what));
        }
        Ok(self.run(batch, Purpose::Measure).await?.log_probabilities)
    }

    /// Trains one step on a batch that passed [`check_batch`](Trainer::check_batch).
    async fn train_batch(
        &mut self,
        batch: Batch,
        layers: &LayerSelection,
    ) -> Result<StepReport, Error> {
        let tokens = batch.token_count();
        let lengths = batch.document_lengths();
        let model_flops = self.run.model.training_flops_of(layers, &lengths, batch.labelled);
        let begin = self.reports.begin();
        let trained = self.engine.train(batch, layers).await;
        let outcome = &self.count(trained)?;
        let updated = self.progress.step - self.progress.skipped - u64::from(!outcome.skipped);
        let end = StepEnd {
            step: self.progress.step,
            ring_step: self.engine.begun(),
            outcome,
            learning_rate: self.learning_rate.at(updated),
            tokens,
            model_flops,
            waited_for_saving: self.worker().eps().waited_for_saving(),
        };
        Ok(self.reports.end(begin, end))
    }

    /// Trains on every batch of a stream, until the stream ends or a callback returns
    /// [`Break`](std::ops::ControlFlow::Break). Calls only [`Callbacks::step`].
    ///
    /// # Errors
    /// The first error of the stream or of the callback, or as [`step`](Trainer::step).
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

    /// Evaluates the model on these batches, each of at most `step.batch` sequences. Without a
    /// batch the loss is NaN. The training does not change: no parameter, no random number, no
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

    /// Evaluates the model on one of several validation sets. The run shows the loss of the first.
    async fn evaluate_set(
        &mut self,
        set: Option<&str>,
        is_first: bool,
        batches: impl IntoIterator<Item = Result<Batch, Error>>,
    ) -> Result<Evaluation, Error> {
        let before = std::mem::replace(&mut self.watch.status().state, State::Validating);
        let evaluated = evaluate(&mut self.engine, batches).await;
        let mut evaluation = self.count(evaluated)?;
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

    /// Runs one step of the ring that does not train.
    async fn run(&mut self, batch: Batch, purpose: Purpose) -> Result<Outcome, Error> {
        let outcome = self.engine.run(batch, purpose, Vec::new()).await;
        self.count(outcome)
    }

    /// Waits for all updates, then runs `work` on the model, on a thread for blocking work.
    async fn with_model<T: Send + 'static>(
        &mut self,
        work: impl FnOnce(&Model, &Eps) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        self.settle().await?;
        let model = self.run.model.clone();
        self.engine.between_steps(move |worker| work(&model, worker.eps())).await?
    }

    /// Counts a step whose future was dropped after it began.
    fn refresh(&mut self) {
        self.engine.refresh();
        self.progress.step = self.engine.trained();
        self.progress.skipped = self.engine.skipped();
        self.progress.loss_scale = self.engine.scale_state();
    }

    /// Counts the steps that a call of the engine began, and notes if the ring failed.
    fn count<T>(&mut self, outcome: Result<T, Error>) -> Result<T, Error> {
        self.refresh();
        if let Err(Error::Ring(l2l_actors::RingError::Failed { cause, .. })) = &outcome {
            self.watch.status().failed(&cause.problem);
        }
        outcome
    }

    fn worker(&self) -> &Worker {
        self.engine.worker()
    }

    /// The peak use of each term of device memory: of slots and of the workspace.
    pub fn device_peak(&self) -> Vec<Term> {
        let term = |used: &MemoryView| Term { name: used.kind, bytes: used.used };
        self.watch.device_memory().iter().map(term).collect()
    }

    /// Waits for every update.
    async fn settle(&mut self) -> Result<(), Error> {
        let settled = self.engine.settle().await;
        self.count(settled)
    }

    /// The sizes and current values of a parameter, by its name in a checkpoint of its family.
    ///
    /// # Errors
    /// No parameter has this name, or the ring failed.
    pub async fn weights(&mut self, name: &str) -> Result<(Vec<usize>, Vec<f32>), Error> {
        let name = name.to_string();
        self.with_model(move |model, eps| hf::tensor(&name, model, eps)).await
    }

    /// Waits for all updates, and returns the SHA-256 of all masters in block order.
    ///
    /// # Errors
    /// The ring failed, or the weights cannot be read from their file.
    pub async fn digest(&mut self) -> Result<String, Error> {
        self.with_model(|model, eps| eps.digest(model)).await
    }

    /// Waits for all updates, and writes the weights to `model.safetensors` in a directory, under
    /// transformers' names.
    ///
    /// # Errors
    /// The ring failed, or the file cannot be written.
    pub async fn save(&mut self, directory: &Path) -> Result<(), Error> {
        let directory = directory.to_path_buf();
        self.with_model(move |model, eps| eps.once(|| hf::save(&directory, model, eps))).await
    }

    /// A handle that shows the run. It can be cloned, sent to other tasks, and used after the end.
    pub fn watch(&self) -> Watch {
        self.watch.clone()
    }

    /// Waits for the last updates, ends all threads and tasks, and returns a summary.
    ///
    /// # Errors
    /// The ring failed, or the last checkpoint could not be written.
    pub async fn stop(mut self) -> Result<Summary, Error> {
        self.end_checkpoint().await?;
        self.refresh();
        let Trainer { engine, progress, begin, watch, trace, .. } = self;
        let visits = engine.visits();
        let lanes = engine.stop().await?;
        watch.set_ended();
        let last = watch.status().last;
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
                skipped: progress.skipped,
                balance_loss: last.and_then(|step| step.balance_loss),
                z_loss: last.and_then(|step| step.z_loss),
                seconds: begin.elapsed().as_secs_f64(),
                visits,
                bytes_uploaded: moved.upload,
                bytes_downloaded: moved.download,
                links: used.links(),
                pinned_bytes: worker.pinned_bytes(),
            }
            // The worker is dropped here. To free its memory takes time.
        };
        unblock(end).await
    }
}
