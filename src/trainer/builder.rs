//! Makes a trainer: everything is looked at first, then made.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use l2l_actors::threads::ThreadLanes;
use l2l_actors::{Config as RingConfig, Relay};

use super::Trainer;
use crate::checkpoint::{self, Identity, Progress};
use crate::config::{Config, Labels, Plan, shape_of};
use crate::devices::cpu::Cpu;
use crate::error::Error;
use crate::hf;
use crate::machine::available_memory as available;
use crate::models::{Model, Part};
use crate::optimizers::UpdateRule;
use crate::telemetry::{Observe, Story, Watch, Watched, made_up_name, seconds_of};

/// What a trainer is made of. What is not given comes from the config.
pub struct Builder {
    config: Config,
    model: Option<Model>,
    rule: Option<Box<dyn UpdateRule>>,
    steps: Option<u64>,
    data: String,
    resume: Option<PathBuf>,
    observers: Vec<Arc<dyn Observe>>,
}

impl Builder {
    pub(super) fn new(config: Config) -> Builder {
        let data = String::new();
        let observers = Vec::new();
        Builder { config, model: None, rule: None, steps: None, data, resume: None, observers }
    }

    /// A model of one's own.
    pub fn model(mut self, model: Model) -> Builder {
        self.model = Some(model);
        self
    }

    /// An update rule of one's own.
    pub fn update_rule(mut self, rule: impl UpdateRule + 'static) -> Builder {
        self.rule = Some(Box::new(rule));
        self
    }

    /// Steps of the run, for the learning rate's shape.
    pub fn steps(mut self, steps: u64) -> Builder {
        self.steps = Some(steps);
        self
    }

    /// What it is trained on, by a name that checkpoints remember and that must be the same when one
    /// is gone on from. See [`Dataset::fingerprint`](crate::data::Dataset::fingerprint).
    pub fn data(mut self, data: impl Into<String>) -> Builder {
        self.data = data.into();
        self
    }

    /// Goes on from a checkpoint, bit for bit as if the run had not ended.
    pub fn resume(mut self, checkpoint: impl Into<PathBuf>) -> Builder {
        self.resume = Some(checkpoint.into());
        self
    }

    /// Lets somebody hear of every operation as it ends.
    pub fn observe(mut self, observer: Arc<dyn Observe>) -> Builder {
        self.observers.push(observer);
        self
    }

    /// Makes everything: memory, weights, threads, tasks on the caller's tokio.
    ///
    /// # Errors
    /// What is wrong with the config or what it names; nothing was started then.
    ///
    /// # Panics
    /// There is no tokio runtime.
    pub fn start(self) -> Result<Trainer, Error> {
        let Builder { config, model, rule, steps, data, resume, observers } = self;
        config.check()?;
        let model = match model {
            Some(model) => model,
            None => Model::new(shape_of(&config)?),
        };
        let rule = rule.unwrap_or_else(|| Box::new(config.update_rule()));
        let plan = Arc::new(Plan::new(&config, &model, &*rule)?);
        let model = Arc::new(model);
        if let Some(misfit) = plan.misfits().into_iter().next() {
            return Err(Error::refused(misfit));
        }
        if steps.is_none() && config.step.epochs.is_some() {
            let problem = "counts data that a trainer does not see: set step.steps, or tell the \
                           builder the steps that config.steps(data.len()) gives";
            return Err(Error::config("step.epochs", problem));
        }
        let learning_rate = config.learning_rate(steps.map_or_else(|| config.steps(None), Ok)?);
        model.check_names()?;
        let cpu = Cpu::new(&config, model.clone(), plan.clone(), rule, learning_rate, observers)?;
        let mut came_with = match &config.model.path {
            Some(path) => hf::read_config(path)?,
            None => serde_json::Value::Null,
        };
        if config.model.path.is_none() {
            hf::let_read_bytes(&mut came_with);
        }
        if let Some(Labels::Names(names)) = &config.model.labels {
            hf::name_labels(&mut came_with, names);
        }
        let mut progress = Progress::default();
        match (&resume, &config.model.path) {
            (Some(from), _) => {
                let (config, model, came_with) = (&config, &*model, &came_with);
                let steps = learning_rate.steps;
                let run = Identity { config, model, came_with, steps, data: &data };
                progress = checkpoint::read(from, run, cpu.eps())?;
            }
            (None, Some(path)) if !config.model.random_weights => {
                cpu.eps().randomise(config.step.seed); // what the file has not
                hf::load(path, &model, cpu.eps(), true)?;
            }
            (None, _) => cpu.eps().randomise(config.step.seed),
        }
        let Ring { relay, lanes } = start_ring(&config, &model, &plan, cpu)?;
        let now = Instant::now();
        let mut story = Story::new(learning_rate.steps);
        story.resumed = progress.step;
        if config.checkpoint.directory.is_some() {
            story.checkpoints_since = Some(story.started);
        }
        let written = resume.and_then(|from| from.metadata().ok()?.modified().ok());
        story.checkpoint = written.map(seconds_of);
        let watch = Watch(Arc::new(Watched {
            run: config.metrics.run.clone().unwrap_or_else(made_up_name),
            ledger: lanes.hands().ledger.clone(),
            used: lanes.hands().used.clone(),
            story: Mutex::new(story),
            observer: relay.observer(),
            plan: plan.clone(),
            link: config.device.link.clone(),
            layers: layers(&model),
            budget: plan.budget().or_else(available).unwrap_or(plan.device_bytes()),
            light: Mutex::new(None),
        }));
        let disk_rate = config.disk_bytes_per_second()?;
        Ok(Trainer {
            config,
            model,
            plan,
            learning_rate,
            came_with,
            data,
            relay,
            lanes,
            schedules: [None, None],
            progress,
            begun: 0,
            pending: None,
            last_trained: false,
            visits: 0,
            begin: now,
            last_end: now,
            last_disk: Duration::ZERO,
            watch,
            disk_rate,
        })
    }
}

/// Of each layer, whether the device meets it, and whether it is the first to meet a block.
fn layers(model: &Model) -> Vec<(bool, bool)> {
    let mut met = BTreeSet::new();
    let parts = model.parts.iter().zip(&model.part_blocks);
    let of = |(part, blocks): (&Part, &Vec<_>)| {
        let new = blocks.iter().filter(|&&block| met.insert(block)).count();
        (!matches!(part, Part::Embedding), new > 0)
    };
    parts.map(of).collect()
}

/// Actors, and the lanes that they queue on.
pub(crate) struct Ring {
    pub(crate) relay: Relay<ThreadLanes<Cpu>>,
    pub(crate) lanes: Arc<ThreadLanes<Cpu>>,
}

/// Starts lanes and actors of a plan, on the caller's tokio.
pub(crate) fn start_ring(
    config: &Config,
    model: &Model,
    plan: &Plan,
    cpu: Cpu,
) -> Result<Ring, Error> {
    let lanes = Arc::new(ThreadLanes::start(cpu).map_err(Error::failed)?);
    let ring = ring_of(model, plan, Some(Duration::from_secs_f64(config.watchdog.seconds)));
    Ok(Ring { relay: Relay::start(ring, lanes.clone()), lanes })
}

/// A ring for a model's plan.
pub(crate) fn ring_of(model: &Model, plan: &Plan, watchdog: Option<Duration>) -> RingConfig {
    RingConfig {
        pools: plan.pools,
        blocks: model.blocks.len() as u32,
        max_layers: model.parts.len() as u32,
        max_micro_batches: plan.micro_batches.len() as u32,
        deferred: plan.deferred,
        watchdog,
        drill: None,
    }
}
