//! What a trainer is made of, chosen one by one before it starts.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::Trainer;
use super::start::Checked;
use crate::blocking::unblock;
use crate::config::{Config, EpsTier};
use crate::data::{Batches, Dataset};
use crate::eps;
use crate::error::Error;
use crate::fabric::{Exchanges, Fabric};
use crate::models::Model;
use crate::optimizers::UpdateRule;
use crate::plan::Room;
use crate::resolve::shape_of;
use crate::telemetry::{Observe, Trace};

/// What a trainer is made of. What is not given comes from the config.
pub struct Builder {
    pub(super) config: Config,
    pub(super) model: Option<Model>,
    pub(super) rule: Option<Box<dyn UpdateRule>>,
    pub(super) steps: Option<u64>,
    pub(super) data: String,
    pub(super) resume: Option<PathBuf>,
    /// Whether the checkpoint was compared with its seal already.
    pub(super) resume_is_checked: bool,
    pub(super) resumes_file: bool,
    pub(super) changes: bool,
    pub(super) is_trial: bool,
    pub(super) copies: bool,
    pub(super) observers: Vec<Arc<dyn Observe>>,
    pub(super) trace: Option<Arc<Trace>>,
    pub(super) room: Option<Room>,
    /// Those with the other processes, if there are any.
    pub(super) exchanges: Option<Arc<Exchanges>>,
}

impl Builder {
    pub(super) fn new(config: Config) -> Builder {
        Builder {
            config,
            model: None,
            rule: None,
            steps: None,
            data: String::new(),
            resume: None,
            resume_is_checked: false,
            resumes_file: false,
            changes: false,
            is_trial: false,
            copies: true,
            observers: Vec::new(),
            trace: None,
            room: None,
            exchanges: None,
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

    /// The name of the training data. Checkpoints keep it, and a run that resumes must have the
    /// same. See [`Dataset::fingerprint`](crate::data::Dataset::fingerprint).
    pub fn data(mut self, data: impl Into<String>) -> Builder {
        self.data = data.into();
        self
    }

    /// Resumes from a checkpoint: the run continues bit for bit as if it had not ended.
    pub fn resume(mut self, checkpoint: impl Into<PathBuf>) -> Builder {
        self.resume = Some(checkpoint.into());
        self
    }

    /// The same, from a checkpoint that was compared with its seal before.
    pub(super) fn resume_checked(mut self, checkpoint: PathBuf) -> Builder {
        self.resume_is_checked = true;
        self.resume(checkpoint)
    }

    /// Resumes from the state that `eps.path` holds, as [`resume`](Builder::resume) does from a
    /// checkpoint. See [`state_on_file`].
    pub fn resume_file(mut self) -> Builder {
        self.resumes_file = true;
        self
    }

    /// Allows the run to resume one with other values of some keys: of the learning rate and the
    /// other settings of the optimizer but its rule, of `step.batch`, `step.micro_batch`,
    /// `step.chunk_positions`, the number of steps, the data. Weights, states of the optimizer and
    /// the number of steps done are kept; the next batch is that of the next step, by the new
    /// settings. See [`Trainer::changes`](Trainer::changes).
    pub fn with_changes(mut self) -> Builder {
        self.changes = true;
        self
    }

    /// Leaves nothing behind: with `eps.tier = "file"`, the run has an unnamed file of its own, and
    /// the state that `eps.path` holds stays.
    pub fn trial(mut self) -> Builder {
        self.is_trial = true;
        self
    }

    /// Leaves out all copies between host and device but those of the first step, to measure the
    /// time that copies cost. Such a run computes nothing of use, and its losses are 0.
    pub fn without_copies(mut self) -> Builder {
        self.copies = false;
        self.trial()
    }

    /// Trains in several processes, the ranks of this fabric. All of them make the same trainer and
    /// the same calls; each holds a part of every block, and computes some of each step's groups
    /// (`parallel.groups`). With `eps.tier = "file"` each has a folder of its own in `eps.path`.
    pub fn fabric(mut self, fabric: Arc<dyn Fabric>) -> Builder {
        if fabric.ranks() > 1 {
            let patience = Duration::from_secs_f64(self.config.watchdog.seconds);
            let path = &mut self.config.eps.path;
            *path = path.take().map(|path| eps::rank_folder(&path, fabric.rank()));
            self.exchanges = Some(Arc::new(Exchanges::new(fabric, patience)));
        }
        self
    }

    /// Makes room in the plan for [`Trainer::generate`]: for a KV cache, beside all that training
    /// holds. Prompts are at most as long as sequences (`data.sequence_length`), and as many as
    /// those of a step (`step.batch`).
    pub fn generates(mut self, room: Room) -> Builder {
        self.room = Some(room);
        self
    }

    /// Adds an observer, which receives every operation as it ends.
    pub fn observe(mut self, observer: Arc<dyn Observe>) -> Builder {
        self.observers.push(observer);
        self
    }

    /// Writes a timeline, which is ended with [`Trace::finish`] after the run. With several
    /// processes, the first has [`Trace::create`] and the others [`Trace::unnamed`]. Then
    /// [`Trainer::stop`] brings the events of all into the first one's file, in the time of its
    /// clock.
    pub fn trace(mut self, trace: Arc<Trace>) -> Builder {
        self.trace = Some(trace.clone());
        self.observe(trace)
    }

    /// Whether [`resume`](Builder::resume) or [`resume_file`](Builder::resume_file) was called.
    pub(super) fn says_where_it_begins(&self) -> bool {
        self.resume.is_some() || self.resumes_file
    }

    /// Checks everything, then makes it: memory, weights, threads, tasks on the caller's tokio.
    ///
    /// # Errors
    /// What is wrong with the config or what it names; nothing was started then.
    ///
    /// # Panics
    /// There is no tokio runtime.
    pub async fn start(self) -> Result<Trainer, Error> {
        unblock(|| Checked::new(self)?.make()).await
    }

    /// Opens the training data of the config, and makes a trainer of it and its batches. The
    /// trainer knows the number of steps, also of `step.epochs`, and the data. The first batch is
    /// that of its next step.
    ///
    /// # Errors
    /// As [`start`](Builder::start); or the data cannot be trained on.
    ///
    /// # Panics
    /// There is no tokio runtime.
    pub async fn open(self) -> Result<(Trainer, Batches), Error> {
        unblock(|| {
            let config = self.config.clone();
            let shape = match &self.model {
                Some(model) => model.shape,
                None => shape_of(&config)?,
            };
            let (data, _) = Dataset::open(&config, &shape)?;
            let steps = config.steps(data.len())?;
            Batches::check(&config, &data, steps)?;
            let builder = self.steps(steps).data(data.fingerprint());
            let trainer = Checked::new(builder)?.make()?;
            let batches = Batches::start(&config, data, trainer.progress().step)?;
            Ok((trainer, batches))
        })
        .await
    }
}

/// Training steps of the state that a config's `eps.path` holds; `None` where there is no state, or
/// where the model is in memory.
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
