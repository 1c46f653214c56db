//! The engine: a ring and its lanes, which run one step after another.
//!
//! The [`Purpose`] of a step (train, evaluate, encode, score, generate) decides its schedule. The
//! engine keeps the plans of the last steps, counts the steps that began, and gives the result
//! of a step as an [`Outcome`]. Training and inference are both built on it.

mod checks;
mod plans;
mod report;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::task::JoinHandle;

use l2l_actors::ports::Lanes;
use l2l_actors::schedule::Version;
use l2l_actors::threads::ThreadLanes;
use l2l_actors::{Integrity, Observer, Patience, Relay, Resolved, RingConfig};

pub use report::{Bottleneck, StepReport, Summary};

use self::plans::{Planned, StepPlans};
use crate::blocking::unblock;
use crate::config::{Config, NonFinite};
use crate::data::Batch;
use crate::eps::{self, Saving};
use crate::error::{self, Error};
use crate::fabric::parts::Parts;
use crate::models::{LayerSelection, Model};
use crate::objectives::ObjectiveMetrics;
use crate::optimizers::{LossScale, ScaleState};
use crate::plan::{
    DealtStep, Plan, Purpose, StepShape, StepSpec, Units, most_positions, schedule_of,
};
use crate::stash;
use crate::worker::{CacheSlot, Dealt, Emulated, RouterReport, StepInput, Worker};

/// A ring, its lanes, and the counts of its steps.
pub(crate) struct Engine {
    config: Config,
    pub(crate) model: Arc<Model>,
    pub(crate) plan: Arc<Plan>,
    relay: Relay<ThreadLanes<Emulated>>,
    lanes: Arc<ThreadLanes<Emulated>>,
    plans: StepPlans,
    counts: Counts,
    /// How many of the layers that a step can leave out are used; `None`: all.
    layers: Option<usize>,
    loss_scale: Option<LossScale>,
    /// Whether a step whose gradient is not finite changes nothing.
    skips: bool,
    /// Held while the model is read between steps, even if nothing waits for that read any more.
    reading: Arc<Mutex<()>>,
}

/// The steps that were run so far. Counts of training steps include those before this run.
#[derive(Default)]
struct Counts {
    /// Steps of the ring that began.
    begun: u64,
    /// Training steps that began.
    trained: u64,
    /// Training steps that changed nothing.
    skipped: u64,
    visits: u64,
    /// The purpose of the last step, until the step is counted.
    pending: Option<Purpose>,
    /// Whether the last step that began trains.
    last_trained: bool,
}

/// The result of a step.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Outcome {
    /// The mean loss over the labelled positions; of a window, the mean over its batches.
    pub(crate) loss: f64,
    /// The global gradient norm of a training step.
    pub(crate) norm: f64,
    /// The loss scale of a training step, if there is one.
    pub(crate) loss_scale: Option<f64>,
    /// True for a training step that changed nothing, as its gradient is not finite.
    pub(crate) skipped: bool,
    /// What the routers of layers with experts did in a training step.
    pub(crate) routers: Option<RouterReport>,
    /// The logits of each labelled position, or of each sequence, if the step scores.
    pub(crate) logits: Vec<f32>,
    /// The hidden states that the head reads, if the step encodes.
    pub(crate) hidden: Vec<f32>,
    /// The log-probability of each sequence, if the step measures them.
    pub(crate) log_probabilities: Vec<f64>,
    /// The embedding of each sequence, if the model makes them and the step does not train.
    pub(crate) embeddings: Vec<f32>,
    /// The metrics of the model's objective.
    pub(crate) metrics: ObjectiveMetrics,
}

impl Engine {
    /// Starts the lanes' threads, and the actors on the caller's tokio runtime. `trained` is the
    /// number of training steps before this run.
    ///
    /// # Errors
    /// The system gives no threads.
    pub(crate) fn start(config: Config, work: Emulated, trained: u64) -> Result<Engine, Error> {
        let worker = work.worker();
        let model = worker.model().clone();
        let plan = worker.plan().clone();
        let records = worker.records().clone();
        let lanes = ThreadLanes::start(work, &plan.pools, Some(records));
        let lanes = Arc::new(lanes.map_err(Error::no_thread)?);
        let patience = Patience {
            ring: Duration::from_secs_f64(config.watchdog.seconds),
            storage: eps::STORAGE_PATIENCE,
        };
        let ring = ring_config(&config, &model, &plan, trained, Some(patience));
        let relay = Relay::start(ring, lanes.clone()).map_err(Error::no_thread)?;
        let loss_scale = config.loss_scale();
        let skips = config.non_finite() == NonFinite::Skip;
        Ok(Engine {
            config,
            model,
            plan,
            relay,
            lanes,
            plans: StepPlans::default(),
            counts: Counts { trained, ..Counts::default() },
            layers: None,
            loss_scale,
            skips,
            reading: Arc::default(),
        })
    }

    /// Continues an earlier run: with its loss scale, and after `skipped` steps that changed
    /// nothing.
    pub(crate) fn resume(&mut self, skipped: u64, state: Option<ScaleState>) {
        self.counts.skipped = skipped;
        if let (Some(scale), Some(state)) = (&mut self.loss_scale, state) {
            *scale = scale.resumed(state);
        }
    }

    /// From the next step on, only the first `count` of the layers that a step can leave out are
    /// used.
    pub(crate) fn use_layers(&mut self, count: usize) {
        self.layers = Some(count);
    }

    /// The layers of a step. A selection without layers means all layers that are used now.
    fn layers_of_step(&self, asked: &LayerSelection) -> LayerSelection {
        let all = || self.layers.map(|count| (0..count).collect());
        LayerSelection { layers: asked.layers.clone().or_else(all), ..asked.clone() }
    }

    /// Runs one step that does not train. `cache` has the KV cache slot of each sequence, if the
    /// step generates.
    ///
    /// # Errors
    /// The batch does not fit the plan or the model, and nothing was done; or the ring failed.
    pub(crate) async fn run(
        &mut self,
        batch: Batch,
        purpose: Purpose,
        cache: Vec<CacheSlot>,
    ) -> Result<Outcome, Error> {
        self.check(&batch)?;
        self.check_purpose(&batch, purpose)?;
        self.run_layers(batch, purpose, cache, &LayerSelection::default()).await
    }

    /// Runs one training step through these layers of the model, on a batch that passed
    /// [`check`](Engine::check).
    ///
    /// # Errors
    /// The plan has no memory for this order of layers, and nothing was done; or the ring failed.
    pub(crate) async fn train(
        &mut self,
        batch: Batch,
        layers: &LayerSelection,
    ) -> Result<Outcome, Error> {
        self.run_layers(batch, Purpose::Train, Vec::new(), layers).await
    }

    async fn run_layers(
        &mut self,
        batch: Batch,
        purpose: Purpose,
        cache: Vec<CacheSlot>,
        layers: &LayerSelection,
    ) -> Result<Outcome, Error> {
        self.finish_step().await?;
        drop(self.reading.lock().await);
        let layers = &self.layers_of_step(layers);
        let shape = StepShape { sequences: batch.sequences(), positions: batch.longest(), purpose };
        let (batch, dealt) = self.deal(batch, purpose)?;
        let lengths: Vec<usize> = batch.lengths().collect();
        let most = most_positions(&self.config, &self.model, purpose);
        let units = Arc::new(Units::new(&lengths, self.config.step.micro_batch, most));
        let planned = |may_wait, may_stay| {
            let units = Some(&*units);
            let layers = Some(layers);
            let step = StepSpec { units, layers, may_wait, may_stay, ..self.plan.step(shape) };
            let schedule = schedule_of(&self.config, &self.model, step)?;
            let stash = stash::layout(&schedule);
            let of_stash = ("the stash", stash.floats, self.plan.stash_floats());
            let of_kept = ("what layers keep", stash.kept_floats, self.plan.kept_floats());
            for (what, needs, has) in [of_stash, of_kept] {
                if needs > has {
                    let what = format_args!(
                        "a step of these sequences and layers needs {needs} floats of {what}, \
                         and the plan has {has}"
                    );
                    return Err(Error::argument(what));
                }
            }
            let plan = self.relay.plan(schedule).map_err(l2l_actors::RingError::from)?;
            Ok(Planned { plan, stash: Arc::new(stash) })
        };
        // A plan of larger steps may not have the memory for what stays on the device, or for what
        // rows choose.
        let make = || {
            let found = planned(true, true).or_else(|_| planned(false, true));
            found.or_else(|_| planned(true, false)).or_else(|_| planned(false, false))
        };
        let Planned { plan, stash } = self.plans.of(shape, &units, layers, make)?;
        self.counts.visits += plan.schedule.visits.len() as u64;
        self.counts.pending = Some(purpose);
        let trained = self.counts.trained;
        let updated = self.counts.trained - self.counts.skipped;
        let loss_scale = self.loss_scale.filter(|_| purpose.trains()).map(|one| one.scale.into());
        let input = StepInput {
            batch,
            purpose,
            stash,
            units,
            trained,
            updated,
            loss_scale: loss_scale.unwrap_or(1.0),
            cache,
            dealt,
        };
        let resolved = self.relay.step(plan, input).await;
        self.count_step();
        let end = if resolved.is_ok() { self.relay.resolved_at() } else { self.lanes.now() };
        self.worker().records().resolved(end);
        let resolved = resolved.map_err(Engine::failed)?;
        let skipped = self.note(&resolved);
        Ok(self.outcome(&resolved, skipped, loss_scale))
    }

    /// What the last step came to.
    fn outcome(&self, resolved: &Resolved, skipped: bool, loss_scale: Option<f64>) -> Outcome {
        let (logits, hidden) = self.worker().take_results();
        let batches = if self.counts.last_trained { self.config.window() } else { 1 };
        Outcome {
            loss: resolved.loss,
            // Of a window, the root of the mean square over its batches.
            norm: resolved.norm / loss_scale.unwrap_or(1.0) / f64::from(batches).sqrt(),
            loss_scale,
            skipped,
            routers: self.worker().router_report(),
            logits,
            hidden,
            log_probabilities: self.worker().log_probabilities(),
            embeddings: self.worker().embeddings(),
            metrics: self.worker().metrics(),
        }
    }

    /// Waits for a step whose future was dropped, if there is one, and counts it.
    async fn finish_step(&mut self) -> Result<(), Error> {
        self.count_step();
        let resolved = self.relay.resolve().await;
        if let Some(resolved) = resolved.map_err(Engine::failed)? {
            self.note(&resolved);
        }
        Ok(())
    }

    /// Counts a step that changed nothing, and changes the loss scale, once the norm of the last
    /// step that began is known. Returns true if that step changed nothing.
    fn note(&mut self, resolved: &Resolved) -> bool {
        if !self.counts.last_trained {
            return false;
        }
        let is_finite = resolved.norm.is_finite();
        if let Some(scale) = &mut self.loss_scale {
            scale.stepped(is_finite);
        }
        let skipped = self.skips && !is_finite;
        self.counts.skipped += u64::from(skipped);
        skipped
    }

    /// This rank's part of a batch, and facts about the whole batch. If each rank computes the
    /// whole step, the batch stays as it is.
    fn deal(&self, batch: Batch, purpose: Purpose) -> Result<(Batch, Option<Dealt>), Error> {
        let share = self.plan.share();
        if !share.deals(purpose) {
            return Ok((batch, None));
        }
        let DealtStep { groups, sequences } = share.deal(&self.config, batch.sequences())?;
        let own = sequences[share.rank as usize].clone();
        let ends = sequences.iter().map(|of_rank| batch.starts[of_rank.end]).collect();
        let first_sequence = own.start;
        let part = batch.part(own);
        let rows = Parts::new(ends);
        let Batch { tokens, starts, reference, scores, .. } = batch;
        let dealt = Dealt { groups, rows, tokens, starts, reference, scores, first_sequence };
        Ok((part, Some(dealt)))
    }

    /// Counts the last step, if the ring began it. It is counted even if its future was dropped.
    fn count_step(&mut self) {
        if self.relay.begun() > self.counts.begun {
            self.counts.begun = self.relay.begun();
            self.counts.last_trained = self.counts.pending.is_some_and(Purpose::trains);
            let batches = u64::from(self.config.window());
            self.counts.trained += if self.counts.last_trained { batches } else { 0 };
        }
        self.counts.pending = None;
    }

    /// An error of the ring, which does not know of damage.
    fn failed(error: l2l_actors::RingError) -> Error {
        use l2l_actors::RingError::Failed;
        match error {
            Failed { cause, .. } if error::is_damage(&cause) => {
                Error::Ring(Failed { cause, integrity: Integrity::Damaged })
            }
            error => error.into(),
        }
    }

    /// The number of training steps that began, as of the last step or [`Engine::refresh`].
    pub(crate) fn trained(&self) -> u64 {
        self.counts.trained
    }

    /// The number of training steps that changed nothing, as far as their norms are known.
    pub(crate) fn skipped(&self) -> u64 {
        self.counts.skipped
    }

    pub(crate) fn scale_state(&self) -> Option<ScaleState> {
        self.loss_scale.map(|scale| scale.state())
    }

    /// Counts a step whose future was dropped after it began.
    pub(crate) fn refresh(&mut self) {
        self.count_step();
    }

    /// The number of steps that began, of all purposes.
    pub(crate) fn begun(&self) -> u64 {
        self.counts.begun
    }

    /// The number of visits until now, of the device and of the host.
    pub(crate) fn visits(&self) -> u64 {
        self.counts.visits
    }

    /// The time on the lanes' clock.
    pub(crate) fn now(&self) -> Duration {
        self.lanes.now()
    }

    /// The work behind the lanes.
    pub(crate) fn worker(&self) -> &Worker {
        self.lanes.work().worker()
    }

    /// Observes the ring from outside, also after its end.
    pub(crate) fn observer(&self) -> Observer {
        self.relay.observer()
    }

    /// Waits until every update is done.
    ///
    /// # Errors
    /// The ring failed.
    pub(crate) async fn settle(&mut self) -> Result<(), Error> {
        self.finish_step().await?;
        let settled = self.relay.settle().await;
        settled.map_err(Engine::failed)
    }

    /// Reads or changes the model between steps, when every update is done, and not on the
    /// executor's thread. If the future is dropped, `read` goes on, and the next step waits for it.
    ///
    /// # Errors
    /// The system gives no thread.
    pub(crate) async fn between_steps<T: Send + 'static>(
        &mut self,
        read: impl FnOnce(&Worker) -> T + Send + 'static,
    ) -> Result<T, Error> {
        let reading = self.reading.clone().lock_owned().await;
        let lanes = self.lanes.clone();
        unblock(move || {
            let _reading = reading;
            read(lanes.work().worker())
        })
        .await
    }

    /// Saves the model as of all steps that have begun, while further steps may run. If the handle
    /// is dropped, `save` goes on. One state is saved at a time.
    ///
    /// # Errors
    /// The ring failed, now or before all updates were done.
    pub(crate) async fn save_beside<T: Send + 'static>(
        &mut self,
        save: impl FnOnce(&Worker, &Saving) -> Result<T, Error> + Send + 'static,
    ) -> Result<JoinHandle<Result<T, Error>>, Error> {
        self.finish_step().await?;
        let settled = self.relay.settled();
        let lanes = self.lanes.clone();
        let saving = self.worker().eps().begin_saving(self.relay.newest());
        Ok(tokio::spawn(async move {
            if !settled.await {
                return Err(Error::System("the run failed before it could be saved".into()));
            }
            unblock(move || save(lanes.work().worker(), &saving)).await?
        }))
    }

    /// Waits until every update is done, and ends all threads and tasks. The returned lanes still
    /// hold the worker with the model.
    ///
    /// # Errors
    /// The ring failed.
    pub(crate) async fn stop(self) -> Result<Arc<ThreadLanes<Emulated>>, Error> {
        drop(self.reading.lock().await);
        self.relay.stop().await?;
        Ok(self.lanes)
    }
}

/// `trained` is the number of training steps before the run.
pub(crate) fn ring_config(
    config: &Config,
    model: &Model,
    plan: &Plan,
    trained: Version,
    watchdog: Option<Patience>,
) -> RingConfig {
    RingConfig {
        pools: plan.pools,
        blocks: model.blocks.len() as u32,
        max_layers: model.layers.len() as u32,
        max_micro_batches: plan.batch.most_micro_batches as u32,
        deferred: plan.deferred(),
        trained,
        delay_from: config.schedule.delay().filter(|_| plan.trains()),
        watchdog,
        inject: None,
    }
}
