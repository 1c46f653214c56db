//! Makes a trainer: everything is checked first, then made.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use l2l_actors::schedule::BlockId;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::{Builder, Trainer, growth};
use crate::checkpoint::{self, Identity, LayerCount, Progress};
use crate::config::{Config, DeviceConfig, EpsConfig, EpsTier, Labels, LogConfig, MetricsConfig};
use crate::engine::Engine;
use crate::eps::{Eps, ErrorFeedback, FileTier, Folder, RankParts, StateOnFile, agreed_step, lost};
use crate::error::Error;
use crate::fabric::Exchanges;
use crate::hf::{self, Load};
use crate::inference::Evaluation;
use crate::machine;
use crate::models::{Head, Model, ModelLayer};
use crate::optimizers::{LearningRate, UpdateRule};
use crate::plan::{Plan, RankShare, Room};
use crate::resolve::{self, largest_shape_of};
use crate::telemetry::{
    Ledger, Observe, RunStatus, Trace, Watch, Watched, made_up_name, seconds_of,
};
use crate::worker::{Worker, WorkerParts};

/// Everything that a trainer is made of, checked by itself and together.
pub(super) struct Checked {
    config: Config,
    model: Arc<Model>,
    plan: Arc<Plan>,
    rule: Box<dyn UpdateRule>,
    learning_rate: LearningRate,
    /// The `config.json` that the model was read with, or null.
    source_config: Value,
    data: String,
    resume: Option<PathBuf>,
    resume_is_checked: bool,
    resumes_file: bool,
    changes: bool,
    is_trial: bool,
    copies: bool,
    observers: Vec<Arc<dyn Observe>>,
    trace: Option<Arc<Trace>>,
    room: Option<Room>,
    exchanges: Option<Arc<Exchanges>>,
}

impl Checked {
    /// Checks config, model, plan and names. Nothing is allocated or written.
    pub(super) fn new(builder: Builder) -> Result<Checked, Error> {
        let Builder { config, model, rule, steps, data, resume, room, exchanges, .. } = builder;
        config.check()?;
        let share = exchanges
            .as_ref()
            .map_or(RankShare::WHOLE, |all| RankShare { rank: all.rank(), ranks: all.ranks() });
        let mut model = match model {
            Some(_) if config.model.max_layers.is_some() => {
                let problem = "is for a model that the config names: give a model of your own all \
                               its layers, and choose among them (Trainer::step_with)";
                return Err(Error::config("model.max_layers", problem));
            }
            Some(mut model) => {
                resolve::freeze_own(&config, &mut model)?;
                model
            }
            None => resolve::model_of(&config, largest_shape_of(&config)?)?,
        };
        model.label_smoothing = model.label_smoothing.max(config.train.label_smoothing);
        if model.label_smoothing > 0.0
            && matches!(model.shape.head, Head::Classes { is_value: true, .. })
        {
            let problem = "is for classes, and this model predicts a value: leave it out";
            return Err(Error::config("train.label_smoothing", problem));
        }
        let rule = rule.unwrap_or_else(|| Box::new(config.update_rule()));
        if let Some(room) = room {
            room.check(&model)?;
            let Room { prompts, prompt, .. } = room;
            let (most, longest) = (config.step.batch, config.sequence_length(&model.shape)?);
            if prompts > most || prompt > longest {
                return Err(Error::argument(format_args!(
                    "a room of {prompts} prompts of {prompt} tokens: a run generates from at most \
                     {most} (step.batch) of at most {longest} (data.sequence_length)"
                )));
            }
        }
        let plan = Arc::new(Plan::of_run(&config, &model, &*rule, share, room)?);
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
        let best = config.validation.best;
        if !Evaluation::has(model.shape.head, best) {
            let problem =
                format_args!("is {:?}, which this model's task does not have", best.name());
            return Err(Error::config("validation.best", problem));
        }
        Ok(Checked {
            source_config: source_config(&config)?,
            config,
            model: Arc::new(model),
            plan,
            rule,
            learning_rate,
            data,
            resume,
            resume_is_checked: builder.resume_is_checked,
            resumes_file: builder.resumes_file,
            changes: builder.changes,
            is_trial: builder.is_trial,
            copies: builder.copies,
            observers: builder.observers,
            trace: builder.trace,
            room,
            exchanges,
        })
    }

    /// Makes the trainer.
    pub(super) fn make(self) -> Result<Trainer, Error> {
        let Checked { config, model: ring, plan, learning_rate, source_config, data, .. } = self;
        let from = self.resume.as_deref();
        let layers = match from.and_then(checkpoint::layers_of) {
            Some(layers) => Some(layers),
            None => growth::first_layers(&config)?,
        };
        let saved = growth::model_of(&config, &ring, layers)?;
        let run = Identity {
            config: &config,
            model: &saved,
            source_config: &source_config,
            steps: learning_rate.steps,
            data: &data,
            changes: self.changes,
        };
        if let Some(from) = from.filter(|_| !self.resume_is_checked) {
            checkpoint::check_seal(from)?;
        }
        let checkpoint = from.map(|from| checkpoint::check(from, run)).transpose()?;
        let start = EpsStart { from, resumes_file: self.resumes_file, is_trial: self.is_trial };
        if let Some(exchanges) = &self.exchanges {
            agree(exchanges, &config, &ring, (&data, from))?;
        }
        let parts = self.exchanges.map(|exchanges| RankParts::new(exchanges, &ring, &*self.rule));
        let changes = checkpoint.as_ref().map(|checkpoint| checkpoint.changes.clone());
        let (eps, found) = open_eps(run, &ring, &plan, parts, start)?;
        let (found, changes) = match found {
            Some(Found { state, changes }) => (Some(state), Some(changes)),
            None => (None, changes),
        };
        let on_file = found.as_ref().and_then(|found| checkpoint::remembered_layers(&found.run));
        let layers = on_file.or(layers);
        let model = growth::model_of(&config, &ring, layers)?;
        let run = Identity { model: &model, ..run };
        let ledger = Arc::new(Ledger::new(ring.layers.len(), plan.devices, self.observers));
        let parts = WorkerParts {
            model: ring.clone(),
            plan: plan.clone(),
            rule: self.rule,
            learning_rate,
            eps,
            records: ledger.clone(),
            copies: self.copies,
        };
        let worker = Worker::new(&config, parts)?;
        let (progress, new_tensors) = fill(worker.eps(), found, checkpoint, run, layers)?;
        let mut engine = Engine::start(config.clone(), worker, progress.step)?;
        engine.resume(progress.skipped, progress.loss_scale);
        if config.model.max_layers.is_some() {
            engine.use_layers(model.shape.layers);
        }
        let status = status(&config, learning_rate.steps, progress.step, from);
        let watch = watch(&config, &engine, &ledger, status);
        if let Some(parts) = engine.worker().eps().parts() {
            let (exchanges, watch) = (&parts.exchanges, watch.clone());
            exchanges.report_with(move || watch.numbers());
            let clock = exchanges.clock_offset(&|| engine.now()).map_err(lost)?;
            self.trace.iter().for_each(|trace| trace.is_of(exchanges.rank(), clock));
        }
        let disk_rate = config.disk_bytes_per_second()?;
        let now = Instant::now();
        Ok(Trainer {
            config,
            model,
            plan,
            learning_rate,
            source_config,
            data,
            engine,
            ledger,
            progress,
            begin: now,
            last_end: now,
            last_disk: Duration::ZERO,
            watch,
            trace: self.trace,
            room: self.room,
            disk_rate,
            writing: None,
            last_checkpoint: None,
            changes: changes.unwrap_or_default(),
            new_tensors,
        })
    }
}

/// The `config.json` that the model comes with, completed by what the run's config says; null for a
/// model of a preset.
fn source_config(config: &Config) -> Result<Value, Error> {
    let mut source = match &config.model.path {
        Some(path) => hf::read_config(path)?,
        None => Value::Null,
    };
    if config.model.path.is_none() {
        hf::mark_byte_tokens(&mut source);
    }
    if let Some(Labels::Names(names)) = &config.model.labels {
        hf::set_label_names(&mut source, names);
    }
    Ok(source)
}

/// Refuses ranks that would not do the same work.
fn agree(
    exchanges: &Exchanges,
    config: &Config,
    model: &Model,
    (data, resume): (&str, Option<&Path>),
) -> Result<(), Error> {
    let shapes: Vec<Vec<Vec<usize>>> = model
        .blocks
        .iter()
        .map(|tensors| tensors.iter().map(|tensor| tensor.shape.clone()).collect())
        .collect();
    let program = std::env::current_exe().and_then(std::fs::read).unwrap_or_default();
    let of = |bytes: &[u8]| Sha256::digest(bytes).to_vec();
    // What a process shows, and on which of its machine's devices it runs, is its own.
    let (metrics, log) = (MetricsConfig::default(), LogConfig::default());
    let (kind, count) = (config.device.kind, Some(config.devices()));
    let DeviceConfig { dtype, gradient_dtype, .. } = config.device;
    let device = DeviceConfig { kind, count, dtype, gradient_dtype, ..DeviceConfig::default() };
    let eps = EpsConfig { path: None, ..config.eps.clone() };
    let shared = Config { metrics, log, device, eps, ..config.clone() };
    let run = json!({ "data": data, "resume": resume });
    let all = [
        ("program", of(&program)),
        ("config", of(format!("{shared:?}").as_bytes())),
        ("model", of(format!("{shapes:?}").as_bytes())),
        ("data or checkpoint", of(run.to_string().as_bytes())),
    ];
    let own: Vec<u8> = all.iter().flat_map(|(_, digest)| digest.iter().copied()).collect();
    let ranks = exchanges.meet(&own).map_err(lost)?;
    for (rank, of_rank) in ranks.iter().enumerate().skip(1) {
        let pairs = ranks[0].chunks(32).zip(of_rank.chunks(32));
        let mut named = all.iter().zip(pairs);
        if let Some(((what, _), _)) = named.find(|(_, (first, other))| first != other) {
            let problem = format_args!(
                "rank {rank} has another {what} than rank 0: start the same program with the same \
                 config, model and data on all hosts"
            );
            return Err(Error::argument(problem));
        }
    }
    Ok(())
}

/// How the EPS starts.
#[derive(Clone, Copy)]
struct EpsStart<'p> {
    /// The checkpoint that fills it.
    from: Option<&'p Path>,
    /// Whether it keeps the state that `eps.path` holds.
    resumes_file: bool,
    /// Whether its file is unnamed.
    is_trial: bool,
}

/// The state of an EPS on file, and what the run changes of the one that made it.
struct Found {
    state: StateOnFile,
    changes: Vec<String>,
}

/// Opens the EPS as the config says. Also returns the state that it keeps, where it resumes.
fn open_eps(
    run: Identity<'_>,
    model: &Model,
    plan: &Plan,
    parts: Option<RankParts>,
    start: EpsStart<'_>,
) -> Result<(Eps, Option<Found>), Error> {
    let config = run.config;
    let (states, region) = (plan.states.clone(), |id: BlockId| plan.has_region(id));
    let blocks = parts.as_ref().map_or_else(|| model.blocks.clone(), RankParts::own_tensors);
    let feedback = config.compression().map(|kind| {
        let (groups, share) = (config.parallel.groups, plan.share());
        let own = if share.ranks > 1 { share.rank..share.rank + 1 } else { 0..groups };
        ErrorFeedback::new(kind, model, groups, own)
    });
    let made = |eps: Eps, parts| eps.of_rank(parts).with_feedback(feedback);
    let Some(path) = config.eps.path.as_ref().filter(|_| config.eps.tier == EpsTier::File) else {
        if start.resumes_file {
            return Err(Error::config("eps.tier", "is memory: there is no state to go on from"));
        }
        return Ok((made(Eps::in_memory(blocks, states, region), parts), None));
    };
    let unusable = |error| Error::unusable(format_args!("eps.path {}", path.display()), error);
    if start.is_trial {
        let file = FileTier::unnamed(path, &blocks, true, &states, region).map_err(unusable)?;
        return Ok((made(Eps::on_file(blocks, states, file), parts), None));
    }
    let folder = Folder::lock(path).map_err(unusable)?;
    let found = match folder.states() {
        Err(_) if start.from.is_some() => Ok(Vec::new()), // the checkpoint replaces a damaged state
        found => found.map_err(unusable),
    };
    let newest = found.as_ref().map(|found| found.first().map(|found| found.step));
    let agreed = match &parts {
        Some(parts) if start.resumes_file => agreed_step(&parts.exchanges, newest),
        _ => Ok(newest.unwrap_or(None)),
    };
    let (found, newest) = (found?, agreed?);
    match (newest, start.resumes_file, start.from) {
        // A state of step 0 is what a new run begins with: nothing is lost if it is made again.
        (Some(step @ 1..), false, None) => {
            let problem = format_args!(
                "holds the state of a run, of step {step}: go on from it (`--resume`), or remove \
                 the folder, or name another"
            );
            return Err(Error::config("eps.path", problem));
        }
        (None, true, _) => return Err(Error::config("eps.path", "holds no state to go on from")),
        _ => {}
    }
    let step = newest.filter(|_| start.resumes_file);
    let found = found.into_iter().find(|found| Some(found.step) == step);
    let changes = found.as_ref().map(|found| checkpoint::check_keys(&found.run, run));
    let changes = changes.transpose()?;
    let file = FileTier::open(folder, &blocks, &states, region, step).map_err(unusable)?;
    Ok((
        made(Eps::on_file(blocks, states, file), parts),
        found.zip(changes).map(|(state, changes)| Found { state, changes }),
    ))
}

/// Fills the EPS: from its own file, a checkpoint, a pretrained model, or at random. Also returns
/// the tensors that a pretrained model does not have.
fn fill(
    eps: &Eps,
    found: Option<StateOnFile>,
    checkpoint: Option<checkpoint::Checked<'_>>,
    run: Identity<'_>,
    layers: Option<LayerCount>,
) -> Result<(Progress, Vec<String>), Error> {
    let config = run.config;
    let mut new_tensors = Vec::new();
    let mut progress = Progress { layers, ..Progress::default() };
    match (found, checkpoint) {
        (Some(found), _) => progress = checkpoint::recall(found.run, found.step, run)?,
        (None, Some(checkpoint)) => progress = checkpoint::read(checkpoint, run, eps)?,
        (None, None) => {
            let how = Load::to_train(!config.model.unsealed);
            new_tensors = resolve::load_base(config, run.model, eps, how)?;
            resolve::load_adapters(config, run.model, eps)?;
        }
    }
    if let Some(file) = eps.file() {
        file.set_run(checkpoint::remembered(run, &progress));
        file.seal(progress.step).map_err(|error| Error::storage("eps.path", error))?;
    }
    Ok((progress, new_tensors))
}

/// The run as it is before its first step.
fn status(config: &Config, steps: u64, resumed: u64, from: Option<&Path>) -> RunStatus {
    let mut status = RunStatus::new(steps);
    status.resumed = resumed;
    if config.checkpoint.directory.is_some() {
        status.checkpoints_since = Some(status.started);
    }
    let written = from.and_then(|from| from.metadata().ok()?.modified().ok());
    status.checkpoint = written.map(seconds_of);
    status
}

/// The handle through which others look at the run.
fn watch(config: &Config, engine: &Engine, ledger: &Arc<Ledger>, status: RunStatus) -> Watch {
    let plan = &engine.plan;
    Watch(Arc::new(Watched {
        run: config.metrics.run.clone().unwrap_or_else(made_up_name),
        devices: config.device_names(),
        ledger: ledger.clone(),
        used: engine.worker().used().clone(),
        status: Mutex::new(status),
        observer: engine.observer(),
        plan: plan.clone(),
        reports: engine.worker().eps().parts().map(|parts| parts.exchanges.reports()),
        link: config.device.link.clone(),
        layers: layers(&engine.model),
        budget: plan
            .budget()
            .or_else(|| plan.gpu_bytes())
            .or_else(machine::available_memory)
            .unwrap_or(plan.device_bytes()),
        peak_flops: Mutex::new(None),
    }))
}

/// For each layer: whether the device computes it, and whether it is the first to use a block.
fn layers(model: &Model) -> Vec<(bool, bool)> {
    let mut met = BTreeSet::new();
    let parts = model.layers.iter().zip(&model.layer_blocks);
    let of = |(part, blocks): (&ModelLayer, &Vec<_>)| {
        let new = blocks.iter().filter(|&&block| met.insert(block)).count();
        (!matches!(part, ModelLayer::Embedding), new > 0)
    };
    parts.map(of).collect()
}
