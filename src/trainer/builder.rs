//! The parts of a trainer and its options, chosen one by one before it starts.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::Trainer;
use super::start::start;
use crate::blocking::unblock;
use crate::config::{Config, EpsTier};
use crate::data::{Batches, Dataset};
use crate::eps;
use crate::error::Error;
use crate::fabric::{Exchanges, Fabric};
use crate::models::{Model, Shape};
use crate::objectives::Objective;
use crate::optimizers::UpdateRule;
use crate::plan::Room;
use crate::resolve::shape_of;
use crate::telemetry::{Observe, Trace};

/// The parts of a trainer. The config decides the parts that a program does not give.
pub struct Builder {
    pub(super) config: Config,
    pub(super) model: Option<Model>,
    pub(super) rule: Option<Box<dyn UpdateRule>>,
    pub(super) objective: Option<Box<dyn Objective>>,
    pub(super) options: StartOptions,
}

/// The options of a run beside its config, model and update rule.
#[derive(Default)]
pub(super) struct StartOptions {
    /// The steps of the run; the config decides when absent.
    pub(super) steps: Option<u64>,
    /// The fingerprint of the training data, or empty.
    pub(super) data: String,
    /// The checkpoint that the run resumes from.
    pub(super) resume: Option<PathBuf>,
    /// True if that checkpoint was compared with its seal already.
    pub(super) resume_is_checked: bool,
    /// True if the run resumes from the state that `eps.path` holds.
    pub(super) resumes_file: bool,
    /// True if some keys may differ from those of the run that it resumes.
    pub(super) changes: bool,
    /// True if the run leaves no file of the EPS behind.
    pub(super) is_trial: bool,
    /// True if only the first step copies between host and device.
    pub(super) without_copies: bool,
    pub(super) observers: Vec<Arc<dyn Observe>>,
    pub(super) trace: Option<Arc<Trace>>,
    /// The prompts and tokens that the run has room to generate.
    pub(super) room: Option<Room>,
    /// The exchanges with the other processes, if there are any.
    pub(super) exchanges: Option<Arc<Exchanges>>,
}

impl Builder {
    pub(super) fn new(config: Config) -> Builder {
        let model = None;
        let rule = None;
        let objective = None;
        Builder { config, model, rule, objective, options: StartOptions::default() }
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

    /// An objective of one's own, in place of the mean loss of all labelled positions. Then
    /// `step.batch` counts records, and a batch has the sequences of each record one behind the
    /// other.
    pub fn objective(mut self, objective: impl Objective + 'static) -> Builder {
        self.config.objective.own_sequences = Some(objective.sequences());
        self.objective = Some(Box::new(objective));
        self
    }

    /// The number of steps of the run, which a decaying learning rate depends on.
    pub fn steps(mut self, steps: u64) -> Builder {
        self.options.steps = Some(steps);
        self
    }

    /// The name of the training data, such as
    /// [`Dataset::fingerprint`](crate::data::Dataset::fingerprint). Checkpoints keep it, and a run
    /// that resumes must have the same.
    pub fn data(mut self, data: impl Into<String>) -> Builder {
        self.options.data = data.into();
        self
    }

    /// Resumes from a checkpoint. The run continues bit for bit as if it had not ended.
    pub fn resume(mut self, checkpoint: impl Into<PathBuf>) -> Builder {
        self.options.resume = Some(checkpoint.into());
        self
    }

    /// Resumes from a checkpoint that was compared with its seal already.
    pub(super) fn resume_checked(mut self, checkpoint: PathBuf) -> Builder {
        self.options.resume_is_checked = true;
        self.resume(checkpoint)
    }

    /// Resumes from the state in `eps.path`, as [`resume`](Builder::resume) does from a checkpoint.
    /// [`state_on_file`] says whether there is one.
    pub fn resume_file(mut self) -> Builder {
        self.options.resumes_file = true;
        self
    }

    /// Allows the run to resume a run that had other values of some keys: the learning rate and all
    /// settings of the optimizer except its rule, `step.batch`, `step.micro_batch`,
    /// `step.chunk_positions`, the number of steps, the data. The run keeps the weights, the
    /// optimizer's states and the number of steps done, and continues with the next step's batch by
    /// the new settings. [`Trainer::changes`] lists the changes.
    pub fn with_changes(mut self) -> Builder {
        self.options.changes = true;
        self
    }

    /// Leaves no file behind. With `eps.tier = "file"` the run uses an unnamed file, and the state
    /// in `eps.path` stays.
    pub fn trial(mut self) -> Builder {
        self.options.is_trial = true;
        self
    }

    /// Leaves out all copies between host and device except those of the first step, to measure the
    /// time that copies cost. The results of the run are useless, and its losses are 0.
    pub fn without_copies(mut self) -> Builder {
        self.options.without_copies = true;
        self.trial()
    }

    /// Trains in several processes, the ranks of this fabric. All ranks make the same trainer and
    /// the same calls. Each holds a part of every block, and computes some of each step's groups
    /// (`parallel.groups`). With `eps.tier = "file"` each has a folder of its own in `eps.path`.
    pub fn fabric(mut self, fabric: Arc<dyn Fabric>) -> Builder {
        if fabric.ranks() > 1 {
            let patience = Duration::from_secs_f64(self.config.watchdog.seconds);
            let path = &mut self.config.eps.path;
            *path = path.take().map(|path| eps::rank_folder(&path, fabric.rank()));
            self.options.exchanges = Some(Arc::new(Exchanges::new(fabric, patience)));
        }
        self
    }

    /// Makes room in the plan for [`Trainer::generate`]: for a KV cache, beside the memory of
    /// training. Prompts are at most as long as sequences (`data.sequence_length`), and at most
    /// `step.batch` at once.
    pub fn generates(mut self, room: Room) -> Builder {
        self.options.room = Some(room);
        self
    }

    /// Adds an observer, which receives every operation as it ends.
    pub fn observe(mut self, observer: Arc<dyn Observe>) -> Builder {
        self.options.observers.push(observer);
        self
    }

    /// Writes a timeline. The caller ends it with [`Trace::finish`] after the run. With several
    /// ranks, rank 0 has [`Trace::create`] and the others [`Trace::unnamed`], and [`Trainer::stop`]
    /// brings the events of all ranks into the file of rank 0, in the time of its clock.
    pub fn trace(mut self, trace: Arc<Trace>) -> Builder {
        self.options.trace = Some(trace.clone());
        self.observe(trace)
    }

    /// The shape that the model begins with.
    pub(super) fn shape(&self) -> Result<Shape, Error> {
        match &self.model {
            Some(model) => Ok(model.shape),
            None => shape_of(&self.config),
        }
    }

    /// True if [`resume`](Builder::resume) or [`resume_file`](Builder::resume_file) was called.
    pub(super) fn says_where_it_begins(&self) -> bool {
        self.options.resume.is_some() || self.options.resumes_file
    }

    /// Checks everything, then makes memory, weights, threads, and tasks on the caller's tokio.
    ///
    /// # Errors
    /// The config, or a file or a device that it names, cannot be used. Nothing was started.
    ///
    /// # Panics
    /// There is no tokio runtime.
    pub async fn start(self) -> Result<Trainer, Error> {
        unblock(|| start(self)).await?
    }

    /// Opens the training data of the config, and makes a trainer and its batches. The trainer
    /// knows the data and the number of steps, even if the config has `step.epochs`. The first
    /// batch is that of the trainer's next step.
    ///
    /// # Errors
    /// As [`start`](Builder::start); or the data cannot be trained on; or as [`Trainer::step`], if
    /// the objective needs a reference, which is measured then.
    ///
    /// # Panics
    /// There is no tokio runtime.
    pub async fn open(self) -> Result<(Trainer, Batches), Error> {
        let (mut trainer, mut data) = unblock(|| {
            let config = self.config.clone();
            let shape = self.shape()?;
            let (data, _) = Dataset::open(&config, &shape)?;
            let steps = config.steps(data.len())?;
            Batches::check(&config, &data, steps)?;
            let builder = self.steps(steps).data(data.fingerprint());
            Ok::<_, Error>((start(builder)?, data))
        })
        .await??;
        trainer.refer(&mut data, &mut |_, _| Ok(true)).await?;
        trainer.keep_references().await?;
        let batches = Batches::start(trainer.config(), data, trainer.progress().step)?;
        Ok((trainer, batches))
    }
}

/// The number of training steps of the state in a config's `eps.path`; `None` if there is no state,
/// or if the model is in memory.
///
/// # Errors
/// There is a state, and it is damaged.
pub fn state_on_file(config: &Config) -> Result<Option<u64>, Error> {
    let path = config.eps.path.as_ref().filter(|_| config.eps.tier == EpsTier::File);
    let Some(path) = path else { return Ok(None) };
    let found = eps::state_in(path);
    let refused = |error| Error::unusable(format_args!("eps.path {}", path.display()), error);
    Ok(found.map_err(refused)?.map(|found| found.step))
}
