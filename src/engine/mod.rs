//! The engine: a ring and its lanes, which run one step after another.
//!
//! A step trains, evaluates, encodes, scores or generates: its [`Purpose`] decides which schedule it
//! walks. The engine keeps the last schedule of each kind, counts the steps that began, and reports
//! what a step came to as an [`Outcome`]. Training and inference are both built on it.

mod report;

use std::sync::Arc;
use std::time::Duration;

use l2l_actors::ports::Lanes;
use l2l_actors::schedule::{Schedule, Version};
use l2l_actors::threads::ThreadLanes;
use l2l_actors::{Config as RingConfig, Integrity, Observer, Relay};

pub use report::{Bottleneck, StepReport, Summary};

use crate::config::Config;
use crate::data::Batch;
use crate::error::Error;
use crate::models::Model;
use crate::plan::{Plan, Purpose, StepShape, schedule_of};
use crate::worker::{CacheSlot, StepInput, Worker};

/// See the [module](self).
pub(crate) struct Engine {
    config: Config,
    pub(crate) model: Arc<Model>,
    pub(crate) plan: Arc<Plan>,
    relay: Relay<ThreadLanes<Worker>>,
    lanes: Arc<ThreadLanes<Worker>>,
    /// The last schedule that did not train, and the last that did.
    schedules: [Option<Kept>; 2],
    /// Steps of the ring that are accounted for.
    begun: Version,
    /// Training steps that began, those before this run included.
    trained: u64,
    /// The purpose of the step that was handed to the ring last, until it is accounted for.
    pending: Option<Purpose>,
    /// Whether the step that began last trains.
    last_trained: bool,
    visits: u64,
}

/// A schedule and the steps it is for.
struct Kept {
    shape: StepShape,
    schedule: Schedule,
}

/// What a step came to.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Outcome {
    /// The mean loss of the labelled positions.
    pub(crate) loss: f64,
    /// The global gradient norm, of a training step.
    pub(crate) norm: f64,
    /// Logits of each labelled position, or scores of each sequence, of a step that scores.
    pub(crate) logits: Vec<f32>,
    /// What the head read, of a step that encodes.
    pub(crate) hidden: Vec<f32>,
}

impl Engine {
    /// Starts lanes and actors on the caller's tokio. `trained`: training steps before this run.
    ///
    /// # Errors
    /// The system gives no threads.
    pub(crate) fn start(config: Config, worker: Worker, trained: u64) -> Result<Engine, Error> {
        let (model, plan) = (worker.model().clone(), worker.plan().clone());
        let records = worker.records().clone();
        let lanes = ThreadLanes::start(worker, Some(records)).map_err(Error::system)?;
        let lanes = Arc::new(lanes);
        let patience = Duration::from_secs_f64(config.watchdog.seconds);
        let ring = ring_config(&model, &plan, Some(patience));
        let relay = Relay::start(ring, lanes.clone());
        Ok(Engine {
            config,
            model,
            plan,
            relay,
            lanes,
            schedules: [None, None],
            begun: 0,
            trained,
            pending: None,
            last_trained: false,
            visits: 0,
        })
    }

    /// Runs one step. `cache`: the KV cache slot of each sequence, of a step that generates.
    ///
    /// # Errors
    /// The batch is not what the plan was made for, and nothing was done; or the ring failed.
    pub(crate) async fn run(
        &mut self,
        batch: Batch,
        purpose: Purpose,
        cache: Vec<CacheSlot>,
    ) -> Result<Outcome, Error> {
        self.account();
        batch.check(&self.model, self.plan.positions, self.plan.sequences)?;
        let shape =
            StepShape { sequences: batch.lengths.len(), positions: batch.positions, purpose };
        let kept = &mut self.schedules[usize::from(purpose.trains())];
        if kept.as_ref().is_none_or(|kept| kept.shape != shape) {
            let states = self.plan.states;
            let schedule = schedule_of(&self.config, &self.model, shape, states)?;
            *kept = Some(Kept { shape, schedule });
        }
        let Kept { schedule, .. } = kept.as_ref().expect("it was just made");
        self.visits += schedule.visits.len() as u64;
        self.pending = Some(purpose);
        let input = StepInput { batch, purpose, trained: self.trained, cache };
        let resolved = self.relay.step(schedule, input).await;
        self.account();
        let end = if resolved.is_ok() { self.relay.resolved_at() } else { self.lanes.now() };
        self.worker().resolved(end);
        let resolved = resolved.map_err(|error| self.in_training_steps(error))?;
        let (logits, hidden) = self.worker().take_results();
        Ok(Outcome { loss: resolved.loss, norm: resolved.norm, logits, hidden })
    }

    /// Counts the step that was handed over last, if it has begun: also when its future was dropped.
    fn account(&mut self) {
        if self.relay.begun() > self.begun {
            self.begun = self.relay.begun();
            self.last_trained = self.pending.is_some_and(Purpose::trains);
            self.trained += u64::from(self.last_trained);
        }
        self.pending = None;
    }

    /// An error of the ring, which counts all its steps, said in training steps.
    fn in_training_steps(&self, error: l2l_actors::Error) -> Error {
        use l2l_actors::Error::Failed;
        match error {
            Failed { cause, integrity: Integrity::Whole(version) } => {
                // The model is whole as of the last step, or of the one before it.
                let undone = u64::from(version < self.begun && self.last_trained);
                let integrity = Integrity::Whole(self.trained - undone);
                Error::Ring(Failed { cause, integrity })
            }
            error => error.into(),
        }
    }

    /// Training steps that began, as far as is known: see [`Engine::refresh`].
    pub(crate) fn trained(&self) -> u64 {
        self.trained
    }

    /// Counts a step whose future was dropped after it began.
    pub(crate) fn refresh(&mut self) {
        self.account();
    }

    /// Steps of the ring that began, whatever their purpose.
    pub(crate) fn begun(&self) -> Version {
        self.begun
    }

    /// Visits of the device and the host until now.
    pub(crate) fn visits(&self) -> u64 {
        self.visits
    }

    /// The lanes' clock.
    pub(crate) fn now(&self) -> Duration {
        self.lanes.now()
    }

    /// The work behind the lanes.
    pub(crate) fn worker(&self) -> &Worker {
        self.lanes.work()
    }

    /// Looks at the ring from outside, also after its end.
    pub(crate) fn observer(&self) -> Observer {
        self.relay.observer()
    }

    /// Waits for every update.
    ///
    /// # Errors
    /// The ring failed.
    pub(crate) async fn settle(&mut self) -> Result<(), Error> {
        let settled = self.relay.settle().await;
        self.account();
        settled.map_err(|error| self.in_training_steps(error))
    }

    /// Waits for every update and ends all threads and tasks; what is left is the work behind them.
    ///
    /// # Errors
    /// The ring failed.
    pub(crate) async fn stop(self) -> Result<Arc<ThreadLanes<Worker>>, Error> {
        self.relay.stop().await?;
        Ok(self.lanes)
    }
}

/// The ring of a model's plan.
pub(crate) fn ring_config(model: &Model, plan: &Plan, watchdog: Option<Duration>) -> RingConfig {
    RingConfig {
        pools: plan.pools,
        blocks: model.blocks.len() as u32,
        max_layers: model.parts.len() as u32,
        max_micro_batches: plan.micro_batches.len() as u32,
        deferred: plan.deferred,
        watchdog,
        inject: None,
    }
}
