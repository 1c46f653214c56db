//! Opens the checkpoint that a run resumes from, and the EPS, before anything is started.

use std::path::PathBuf;
use std::sync::Arc;

use l2l_actors::schedule::BlockId;
use serde_json::json;
use sha2::{Digest, Sha256};

use super::check::CheckedRun;
use crate::checkpoint::{self, Checkpoint, LayerCount, Progress};
use crate::config::{Config, DeviceConfig, EpsConfig, EpsTier, LogConfig, MetricsConfig};
use crate::data::References;
use crate::eps::{Eps, ErrorFeedback, FileTier, Folder, RankParts, StateOnFile, agreed_step, lost};
use crate::error::Error;
use crate::fabric::Exchanges;
use crate::hf::OLDER;
use crate::trainer::growth;

/// A run whose files are open.
pub(super) struct OpenRun {
    pub(super) checked: CheckedRun,
    pub(super) eps: Eps,
    pub(super) origin: Origin,
    /// The layers that the model begins with, if the run can add some.
    pub(super) layers: Option<LayerCount>,
    /// The keys that differ from those of the run that it resumes, as sentences.
    pub(super) changes: Vec<String>,
}

/// Where the parameters and the progress of a run come from.
pub(super) enum Origin {
    /// `model.path`, or random numbers.
    New,
    Checkpoint(Checkpoint),
    /// The state that the EPS has on file.
    File(Progress),
}

/// The place of an EPS.
enum Place {
    Memory,
    /// A file in this folder that has no name, so it leaves nothing behind.
    Unnamed(PathBuf),
    /// The files of a folder. The run goes on from the state after `step`, or makes a new one.
    Folder {
        path: PathBuf,
        folder: Folder,
        step: Option<u64>,
    },
}

impl CheckedRun {
    /// Opens the checkpoint or the state that the run resumes from, and the EPS.
    ///
    /// # Errors
    /// There is nothing to resume from; it is of another run, or damaged; the ranks differ; a file
    /// cannot be made.
    pub(super) fn open(mut self) -> Result<OpenRun, Error> {
        let from = self.options.resume.as_deref();
        if let Some(from) = from.filter(|_| !self.options.resume_is_checked) {
            checkpoint::check_seal(from)?;
        }
        let checkpoint = from.map(Checkpoint::open).transpose()?;
        let mut layers = match checkpoint.as_ref().and_then(Checkpoint::layers) {
            Some(layers) => Some(layers),
            None => growth::first_layers(&self.run.config)?,
        };
        self.use_layers(layers)?;
        let lacks_older = checkpoint.as_ref().is_some_and(Checkpoint::lacks_older);
        let checked = checkpoint.as_ref().map(|checkpoint| checkpoint.check(&self.run));
        let mut changes = checked.transpose()?.unwrap_or_default();
        if let Some(exchanges) = &self.options.exchanges {
            self.agree(exchanges)?;
        }
        let exchanges = self.options.exchanges.clone();
        let parts = exchanges.map(|all| RankParts::new(all, &self.largest, &*self.rule));
        let (place, found) = self.find_place(parts.as_ref())?;
        let origin = match (found, checkpoint) {
            (Some(StateOnFile { step, run }), _) => {
                layers = checkpoint::remembered_layers(&run).or(layers);
                self.use_layers(layers)?;
                let (progress, of_state) = checkpoint::recall(run, step, &self.run)?;
                changes = of_state;
                Origin::File(progress)
            }
            (None, Some(checkpoint)) => Origin::Checkpoint(checkpoint),
            (None, None) => Origin::New,
        };
        let from = match &origin {
            Origin::New => None,
            Origin::Checkpoint(_) => self.options.resume.as_deref(),
            Origin::File(_) => self.run.config.eps.path.as_deref(),
        };
        self.run.references = Arc::new(from.map(References::read).transpose()?.unwrap_or_default());
        let eps = self.open_eps(place, parts)?;
        if eps.has_older() && lacks_older {
            changes.push(format!(
                "the checkpoint has no {OLDER}: the next batch reads the newest weights, as if \
                 they were those before the last update"
            ));
        }
        Ok(OpenRun { checked: self, eps, origin, layers, changes })
    }

    fn use_layers(&mut self, layers: Option<LayerCount>) -> Result<(), Error> {
        self.run.model = growth::model_of(&self.run.config, &self.largest, layers)?;
        Ok(())
    }

    /// The place of the EPS, and the state there that the run goes on from.
    fn find_place(&self, parts: Option<&RankParts>) -> Result<(Place, Option<StateOnFile>), Error> {
        let options = &self.options;
        let resumes_file = options.resumes_file;
        let config = &self.run.config.eps;
        let Some(path) = config.path.as_ref().filter(|_| config.tier == EpsTier::File) else {
            if resumes_file {
                return Err(Error::config(
                    "eps.tier",
                    "is memory: there is no state to go on from",
                ));
            }
            return Ok((Place::Memory, None));
        };
        let path = path.clone();
        if options.is_trial {
            return Ok((Place::Unnamed(path), None));
        }
        let unusable = |error| Error::unusable(format_args!("eps.path {}", path.display()), error);
        let folder = Folder::lock(&path).map_err(unusable)?;
        let found = match folder.states() {
            Err(_) if options.resume.is_some() => Ok(Vec::new()), // The checkpoint replaces them.
            found => found.map_err(unusable),
        };
        let newest = found.as_ref().map(|found| found.first().map(|found| found.step));
        let agreed = match parts {
            Some(parts) if resumes_file => agreed_step(&parts.exchanges, newest),
            _ => Ok(newest.unwrap_or(None)),
        };
        let found = found?;
        let newest = agreed?;
        match (newest, resumes_file, &options.resume) {
            // A new run begins with a state of step 0 as well, so replacing one loses nothing.
            (Some(step @ 1..), false, None) => {
                let problem = format_args!(
                    "holds the state of a run, of step {step}: go on from it (`--resume`), or \
                     remove the folder, or name another"
                );
                return Err(Error::config("eps.path", problem));
            }
            (None, true, _) => {
                return Err(Error::config("eps.path", "holds no state to go on from"));
            }
            _ => {}
        }
        let step = newest.filter(|_| resumes_file);
        let found = found.into_iter().find(|found| Some(found.step) == step);
        Ok((Place::Folder { path, folder, step }, found))
    }

    fn open_eps(&self, place: Place, parts: Option<RankParts>) -> Result<Eps, Error> {
        let CheckedRun { run, plan, largest, .. } = self;
        let states = plan.states.clone();
        let region = |id: BlockId| plan.has_region(id);
        let blocks = parts.as_ref().map_or_else(|| largest.blocks.clone(), RankParts::own_tensors);
        let feedback = run.config.compression().map(|kind| {
            let groups = run.config.parallel.groups;
            let share = plan.share();
            let own = if share.ranks > 1 { share.rank..share.rank + 1 } else { 0..groups };
            ErrorFeedback::new(kind, largest, groups, own)
        });
        let unusable = |path: PathBuf| {
            move |error| Error::unusable(format_args!("eps.path {}", path.display()), error)
        };
        let is_delayed = run.config.schedule.delay().is_some();
        let eps = match place {
            Place::Memory => {
                let tiles = is_delayed.then(|| largest.tables.len());
                Eps::in_memory(blocks, states, region, tiles)
            }
            Place::Unnamed(path) => {
                let file = FileTier::unnamed(&path, &blocks, true, &states, region, is_delayed);
                Eps::on_file(blocks, states, file.map_err(unusable(path))?)
            }
            Place::Folder { path, folder, step } => {
                let file = FileTier::open(folder, &blocks, &states, region, is_delayed, step);
                Eps::on_file(blocks, states, file.map_err(unusable(path))?)
            }
        };
        Ok(eps.of_rank(parts).with_feedback(feedback))
    }

    /// Refuses ranks that would not do the same work.
    fn agree(&self, exchanges: &Exchanges) -> Result<(), Error> {
        let tensors = self.largest.blocks.iter().map(|block| block.iter());
        let shapes: Vec<Vec<&Vec<usize>>> =
            tensors.map(|block| block.map(|tensor| &tensor.shape).collect()).collect();
        let program = std::env::current_exe().and_then(std::fs::read).unwrap_or_default();
        let shared = format!("{:?}", shared(&self.run.config));
        let run = json!({ "data": self.run.data, "resume": self.options.resume });
        let digest = |bytes: &[u8]| Sha256::digest(bytes).to_vec();
        let all = [
            ("program", digest(&program)),
            ("config", digest(shared.as_bytes())),
            ("model", digest(format!("{shapes:?}").as_bytes())),
            ("data or checkpoint", digest(run.to_string().as_bytes())),
        ];
        let own: Vec<u8> = all.iter().flat_map(|(_, digest)| digest.iter().copied()).collect();
        let ranks = exchanges.meet(&own).map_err(lost)?;
        for (rank, of_rank) in ranks.iter().enumerate().skip(1) {
            let pairs = ranks[0].chunks(32).zip(of_rank.chunks(32));
            let mut named = all.iter().zip(pairs);
            if let Some(((what, _), _)) = named.find(|(_, (first, other))| first != other) {
                return Err(Error::argument(format_args!(
                    "rank {rank} has another {what} than rank 0: start the same program with the \
                     same config, model and data on all hosts"
                )));
            }
        }
        Ok(())
    }
}

/// The config without the keys in which ranks may differ: their reports, their machine's devices
/// and the folders of their EPS.
fn shared(config: &Config) -> Config {
    let DeviceConfig { kind, dtype, gradient_dtype, .. } = config.device;
    let count = Some(config.devices());
    Config {
        metrics: MetricsConfig::default(),
        log: LogConfig::default(),
        device: DeviceConfig { kind, count, dtype, gradient_dtype, ..DeviceConfig::default() },
        eps: EpsConfig { path: None, ..config.eps.clone() },
        ..config.clone()
    }
}
