//! Checks the config, the model, the plan and the names before anything is opened.

use std::sync::Arc;

use serde_json::Value;

use crate::checkpoint::{Identity, Space};
use crate::config::{Config, Labels};
use crate::error::Error;
use crate::hf;
use crate::inference::Evaluation;
use crate::kernels::ProblemType;
use crate::models::{Head, Model};
use crate::optimizers::{LearningRate, UpdateRule};
use crate::plan::{Plan, RankShare, Room};
use crate::resolve::{self, largest_shape_of};
use crate::trainer::Builder;
use crate::trainer::builder::StartOptions;

/// A run whose config, model and plan fit together.
pub(super) struct CheckedRun {
    pub(super) run: Identity,
    /// The model with all layers that the run has room for.
    pub(super) largest: Arc<Model>,
    pub(super) plan: Arc<Plan>,
    pub(super) rule: Box<dyn UpdateRule>,
    pub(super) learning_rate: LearningRate,
    pub(super) options: StartOptions,
}

impl CheckedRun {
    /// Checks the parts by themselves and together. Allocates and writes nothing.
    pub(super) fn new(builder: Builder) -> Result<CheckedRun, Error> {
        let Builder { config, model, rule, objective, options } = builder;
        config.check()?;
        let mut model = model_of_run(&config, model)?;
        model.objective = objective.or(model.objective);
        if let Some(objective) =
            model.objective.as_ref().filter(|_| config.model.max_layers.is_some())
        {
            let problem = format_args!(
                "is for models without an objective, and this run has {}: leave it out",
                objective.name()
            );
            return Err(Error::config("model.max_layers", problem));
        }
        let rule = rule.unwrap_or_else(|| config.update_rule());
        if let Some(room) = options.room {
            check_room(room, &config, &model)?;
        }
        let exchanges = options.exchanges.as_ref();
        let share = exchanges
            .map_or(RankShare::WHOLE, |all| RankShare { rank: all.rank(), ranks: all.ranks() });
        let plan = Arc::new(Plan::of_run(&config, &model, &*rule, share, options.room)?);
        let checkpoints = match (&config.checkpoint.directory, share.rank) {
            (Some(at), 0) => Space::of(&config, &model, &*rule).map(|space| space.need(at)),
            _ => None,
        };
        if let Some(misfit) = plan.misfits(&model, &*rule, checkpoints).into_iter().next() {
            return Err(Error::DoesNotFit(misfit));
        }
        if options.steps.is_none() && config.step.epochs.is_some() {
            let problem = "counts data that a trainer does not see: set step.steps, or tell the \
                           builder the steps that config.steps(data.len()) gives";
            return Err(Error::config("step.epochs", problem));
        }
        let steps = options.steps.map_or_else(|| config.steps(None), Ok)?;
        config.check_steps_of_run(steps)?;
        model.check_names()?;
        let best = config.validation.best;
        if !Evaluation::has(&model, best) {
            let problem =
                format_args!("is {:?}, which this model's task does not have", best.name());
            return Err(Error::config("validation.best", problem));
        }
        let largest = Arc::new(model);
        let learning_rate = config.learning_rate(steps);
        let run = Identity {
            source_config: source_config(&config)?,
            config,
            model: largest.clone(),
            steps,
            data: options.data.clone(),
            references: Arc::default(),
            changes: options.changes,
        };
        Ok(CheckedRun { run, largest, plan, rule, learning_rate, options })
    }
}

/// The model to train: the program's own, or the one that the config names.
fn model_of_run(config: &Config, own: Option<Model>) -> Result<Model, Error> {
    let mut model = match own {
        Some(_) if config.model.max_layers.is_some() => {
            let problem = "is for a model that the config names: give a model of your own all \
                           its layers, and choose among them (Trainer::step_with)";
            return Err(Error::config("model.max_layers", problem));
        }
        Some(_) if config.schedule.bundles.is_some() => {
            let problem = "is for a model that the config names: a model of your own says it in \
                           Experts::bundles of its shape";
            return Err(Error::config("schedule.bundles", problem));
        }
        Some(_) if config.experts.first_set().is_some() => {
            let problem = "is for a model that the config names: a model of your own says it in \
                           the Experts of its shape";
            return Err(Error::config(config.experts.first_set().unwrap_or("experts"), problem));
        }
        Some(mut model) => {
            resolve::freeze_own(config, &mut model)?;
            resolve::set_objective(config, &mut model);
            model
        }
        None => resolve::model_of(config, largest_shape_of(config)?)?,
    };
    model.label_smoothing = model.label_smoothing.max(config.train.label_smoothing);
    let what = match model.shape.head {
        Head::Classes { problem: ProblemType::Regression, .. } => Some("a value"),
        Head::Classes { problem: ProblemType::MultiLabelClassification, .. } => {
            Some("several labels, each by itself")
        }
        _ => None,
    };
    if let Some(what) = what.filter(|_| model.label_smoothing > 0.0) {
        let problem = format_args!("is for classes, and this model predicts {what}: leave it out");
        return Err(Error::config("train.label_smoothing", problem));
    }
    Ok(model)
}

/// Refuses a room for generation that is larger than a step.
fn check_room(room: Room, config: &Config, model: &Model) -> Result<(), Error> {
    room.check(model)?;
    let Room { prompts, .. } = room;
    let most = config.step.batch;
    let longest = config.sequence_length(&model.shape)?;
    let read = room.longest_read(model);
    if prompts <= most && read <= longest {
        return Ok(());
    }
    Err(Error::argument(format_args!(
        "a room of {prompts} texts of which {read} tokens are read at once: a run generates from \
         at most {most} (step.batch) and reads at most {longest} (data.sequence_length)"
    )))
}

/// The `config.json` that the model comes with, completed by the run's config. Null for a preset,
/// unless a key adds to it.
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
