//! Makes a trainer: everything is looked at first, then made.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use l2l_actors::schedule::BlockId;

use super::Trainer;
use crate::checkpoint::{self, Identity, Progress};
use crate::config::{Config, EpsTier, Labels};
use crate::engine::Engine;
use crate::eps::{self, Eps, FileTier, Folder, StateOnFile};
use crate::error::Error;
use crate::hf;
use crate::hf::shape_of;
use crate::machine::available_memory as available;
use crate::models::{Model, Part};
use crate::optimizers::UpdateRule;
use crate::plan::Plan;
use crate::telemetry::{Ledger, Observe, Story, Watch, Watched, made_up_name, seconds_of};
use crate::worker::{Parts, Worker};

/// What a trainer is made of. What is not given comes from the config.
pub struct Builder {
    pub(super) config: Config,
    pub(super) model: Option<Model>,
    rule: Option<Box<dyn UpdateRule>>,
    steps: Option<u64>,
    data: String,
    resume: Option<PathBuf>,
    goes_on: bool,
    is_trial: bool,
    copies: bool,
    observers: Vec<Arc<dyn Observe>>,
}

impl Builder {
    pub(super) fn new(config: Config) -> Builder {
        let data = String::new();
        let observers = Vec::new();
        Builder {
            config,
            model: None,
            rule: None,
            steps: None,
            data,
            resume: None,
            goes_on: false,
            is_trial: false,
            copies: true,
            observers,
        }
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

    /// Goes on from the state that `eps.path` holds, as [`resume`](Builder::resume) does from a
    /// checkpoint. See [`state_on_file`].
    pub fn go_on(mut self) -> Builder {
        self.goes_on = true;
        self
    }

    /// Leaves nothing behind: with the model on file, the file goes with the run, and what `eps.path` holds
    /// stays.
    pub fn trial(mut self) -> Builder {
        self.is_trial = true;
        self
    }

    /// Leaves out all copies between host and device but those of the first step, to tell what time they
    /// cost. What such a run computes means nothing, and its losses are 0.
    pub fn without_copies(mut self) -> Builder {
        self.copies = false;
        self.trial()
    }

    /// Lets somebody hear of every operation as it ends.
    pub fn observe(mut self, observer: Arc<dyn Observe>) -> Builder {
        self.observers.push(observer);
        self
    }

    /// Whether [`resume`](Builder::resume) or [`go_on`](Builder::go_on) was called.
    pub(super) fn says_where_it_begins(&self) -> bool {
        self.resume.is_some() || self.goes_on
    }

    /// Makes everything: memory, weights, threads, tasks on the caller's tokio.
    ///
    /// # Errors
    /// What is wrong with the config or what it names; nothing was started then.
    ///
    /// # Panics
    /// There is no tokio runtime.
    pub fn start(self) -> Result<Trainer, Error> {
        let Builder { config, model, rule, steps, data, resume, goes_on, .. } = self;
        let (is_trial, copies, observers) = (self.is_trial, self.copies, self.observers);
        config.check()?;
        let model = match model {
            Some(model) => model,
            None => Model::new(shape_of(&config)?),
        };
        let rule = rule.unwrap_or_else(|| Box::new(config.update_rule()));
        let plan = Arc::new(Plan::new(&config, &model, &*rule)?);
        let model = Arc::new(model);
        if let Some(misfit) = plan.misfits(&model, &*rule).into_iter().next() {
            return Err(Error::DoesNotFit(misfit));
        }
        if steps.is_none() && config.step.epochs.is_some() {
            let problem = "counts data that a trainer does not see: set step.steps, or tell the \
                           builder the steps that config.steps(data.len()) gives";
            return Err(Error::config("step.epochs", problem));
        }
        let learning_rate = config.learning_rate(steps.map_or_else(|| config.steps(None), Ok)?);
        model.check_names()?;
        let mut came_with = match &config.model.path {
            Some(path) => hf::read_config(path)?,
            None => serde_json::Value::Null,
        };
        if config.model.path.is_none() {
            hf::mark_byte_tokens(&mut came_with);
        }
        if let Some(Labels::Names(names)) = &config.model.labels {
            hf::set_label_names(&mut came_with, names);
        }
        let mut progress = Progress::default();
        let run = Identity {
            config: &config,
            model: &model,
            came_with: &came_with,
            steps: learning_rate.steps,
            data: &data,
        };
        let checked = resume.as_deref().map(|from| checkpoint::check(from, run)).transpose()?;
        let (eps, found) = open_eps(&config, &model, &plan, &resume, goes_on, is_trial)?;
        let ledger = Arc::new(Ledger::new(model.parts.len(), observers));
        let worker = Parts {
            model: model.clone(),
            plan: plan.clone(),
            rule,
            learning_rate,
            eps,
            records: ledger.clone(),
            copies,
        };
        let worker = Worker::new(&config, worker)?;
        match (found, checked, &config.model.path) {
            (Some(found), ..) => progress = checkpoint::recall(found.run, found.step, run)?,
            (None, Some(checked), _) => progress = checkpoint::read(checked, run, worker.eps())?,
            (None, None, Some(path)) if !config.model.random_weights => {
                worker.eps().randomise(config.step.seed)?; // what the file has not
                hf::load(path, &model, worker.eps(), true)?;
            }
            (None, None, _) => worker.eps().randomise(config.step.seed)?,
        }
        if let Some(file) = worker.eps().file() {
            file.set_run(checkpoint::remembered(run, &progress));
            file.seal(progress.step).map_err(|error| Error::storage("eps.path", error))?;
        }
        let engine = Engine::start(config.clone(), worker, progress.step)?;
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
            ledger: ledger.clone(),
            used: engine.worker().used().clone(),
            story: Mutex::new(story),
            observer: engine.observer(),
            plan: plan.clone(),
            link: config.device.link.clone(),
            layers: layers(&model),
            budget: plan
                .budget()
                .or_else(|| plan.gpu_bytes())
                .or_else(available)
                .unwrap_or(plan.device_bytes()),
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
            engine,
            ledger,
            progress,
            begin: now,
            last_end: now,
            last_disk: Duration::ZERO,
            watch,
            disk_rate,
        })
    }
}

/// The EPS as the config has it; and what it holds of a run that is gone on from.
fn open_eps(
    config: &Config,
    model: &Model,
    plan: &Plan,
    resume: &Option<PathBuf>,
    goes_on: bool,
    is_trial: bool,
) -> Result<(Eps, Option<StateOnFile>), Error> {
    let (states, region) = (plan.states, |id: BlockId| plan.has_region(id));
    let dtype = config.device.dtype;
    let Some(path) = config.eps.path.as_ref().filter(|_| config.eps.tier == EpsTier::File) else {
        if goes_on {
            return Err(Error::config("eps.tier", "is memory: there is no state to go on from"));
        }
        return Ok((Eps::in_memory(model, states, region).published_as(dtype), None));
    };
    let refused = |error| Error::unusable(format_args!("eps.path {}", path.display()), error);
    if is_trial {
        let file = FileTier::unnamed(path, model, true, states, region).map_err(refused)?;
        return Ok((Eps::on_file(model, states, file).published_as(dtype), None));
    }
    let folder = Folder::lock(path).map_err(refused)?;
    let found = match folder.state() {
        Ok(found) => found,
        Err(_) if resume.is_some() => None, // a checkpoint takes its place
        Err(error) => return Err(refused(error)),
    };
    match (&found, goes_on, resume) {
        (Some(found), false, None) => {
            let problem = format_args!(
                "holds the state of a run, of step {}: go on from it (`--resume`), or remove the \
                 folder, or name another",
                found.step
            );
            return Err(Error::config("eps.path", problem));
        }
        (None, true, _) => return Err(Error::config("eps.path", "holds no state to go on from")),
        _ => {}
    }
    let file = FileTier::open(folder, model, states, region, goes_on).map_err(refused)?;
    let eps = Eps::on_file(model, states, file).published_as(dtype);
    Ok((eps, found.filter(|_| goes_on)))
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

/// Training steps of the state that a config's `eps.path` holds; `None` where there is none, or the
/// model is in memory.
///
/// # Errors
/// There is one, and it is not whole.
pub fn state_on_file(config: &Config) -> Result<Option<u64>, Error> {
    let path = config.eps.path.as_ref().filter(|_| config.eps.tier == EpsTier::File);
    let Some(path) = path else { return Ok(None) };
    let found = eps::state_in(path);
    let refused = |error| Error::unusable(format_args!("eps.path {}", path.display()), error);
    Ok(found.map_err(refused)?.map(|found| found.step))
}
