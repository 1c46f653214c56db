//! Checkpoints, which are written while training goes on: block by block, each before its next
//! update. One that was begun is completed also when nobody waits for it any more.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use l2l_actors::schedule::{BlockId, Version};
use l2l_actors::work::Lane;
use serde_json::Value;
use tokio::task::JoinHandle;

use super::Trainer;
use crate::checkpoint::{self, Draft, Identity, Progress};
use crate::config::Config;
use crate::eps::{Eps, Saving};
use crate::error::Error;
use crate::folder;
use crate::machine;
use crate::models::Model;
use crate::telemetry::{Ledger, Slice, SliceKind, State, Watch, unix_seconds};
use crate::worker::{Worker, throttle};

/// A checkpoint that was begun and is not known to have ended.
pub(super) struct Begun {
    directory: PathBuf,
    written: JoinHandle<Result<(), Error>>,
}

impl Trainer {
    /// Writes everything that a run resumes from to a new directory, and waits for it. The
    /// directory appears when it is complete.
    ///
    /// # Errors
    /// The ring failed, or a file cannot be written.
    pub async fn checkpoint(&mut self, directory: &Path) -> Result<(), Error> {
        self.begin_checkpoint(directory).await?;
        self.end_checkpoint().await
    }

    /// Begins a checkpoint of the steps done so far. It is written while further steps run: an
    /// update waits where its block is not written yet. With several processes it is complete when
    /// this returns. One that was begun before is waited for.
    ///
    /// # Errors
    /// The ring failed, or that one failed.
    pub async fn begin_checkpoint(&mut self, directory: &Path) -> Result<(), Error> {
        self.end_checkpoint().await?;
        self.refresh();
        let writing = Writing {
            directory: directory.to_path_buf(),
            before: self.last_checkpoint.take(),
            // One that is taken away from now on is not made again.
            makes_folder: !folder::parent(directory).is_dir(),
            config: self.config.clone(),
            model: self.model.clone(),
            source_config: self.source_config.clone(),
            steps: self.learning_rate.steps,
            data: self.data.clone(),
            progress: self.progress.clone(),
            disk_rate: self.disk_rate,
            is_backward: !self.plan.deferred,
            begun: self.engine.begun(),
            begin: self.engine.now(),
            watch: self.watch.clone(),
            ledger: self.ledger.clone(),
        };
        if self.worker().eps().parts().is_some() {
            self.settle().await?;
            let write = move |worker: &Worker| writing.write(worker.eps(), None);
            let began = Instant::now();
            let written = self.engine.between_steps(write).await;
            self.ledger.waited_for_checkpoint(began.elapsed());
            self.last_checkpoint = written.is_ok().then(|| directory.to_path_buf());
            return written;
        }
        let write = move |worker: &Worker, saving: &Saving| {
            writing.write(worker.eps(), Some(saving)) // the last look at `saving`
        };
        let written = self.engine.save_beside(write).await;
        let written = written.inspect_err(|error| self.note_failure(error))?;
        self.writing = Some(Begun { directory: directory.to_path_buf(), written });
        Ok(())
    }

    /// Waits until the checkpoint that was begun last is complete.
    ///
    /// # Errors
    /// It could not be written.
    pub async fn end_checkpoint(&mut self) -> Result<(), Error> {
        let Some(Begun { directory, written }) = &mut self.writing else { return Ok(()) };
        let began = Instant::now();
        let before = std::mem::replace(&mut self.watch.status().state, State::Checkpointing);
        let done = written.await;
        self.watch.status().state = before;
        self.ledger.waited_for_checkpoint(began.elapsed());
        self.last_checkpoint = matches!(done, Ok(Ok(()))).then(|| std::mem::take(directory));
        self.writing = None;
        match done {
            Ok(done) => done,
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(error) => Err(Error::system(error)),
        }
    }

    /// The checkpoint that is being written.
    pub fn writes_checkpoint(&self) -> Option<&Path> {
        let begun = self.writing.as_ref().filter(|begun| !begun.written.is_finished());
        begun.map(|begun| &*begun.directory)
    }
}

/// A checkpoint with all that it needs.
struct Writing {
    directory: PathBuf,
    /// A complete checkpoint with the same frozen tensors.
    before: Option<PathBuf>,
    /// Whether the folder that it is in is to be made.
    makes_folder: bool,
    config: Config,
    model: Arc<Model>,
    source_config: Value,
    steps: u64,
    data: String,
    progress: Progress,
    disk_rate: Option<f64>,
    /// Whether the next step updates the last blocks first.
    is_backward: bool,
    /// Steps of the ring that began before.
    begun: Version,
    /// The time on the lanes' clock.
    begin: Duration,
    watch: Watch,
    ledger: Arc<Ledger>,
}

impl Writing {
    /// Writes the checkpoint, and shows that in the run's status and timeline.
    fn write(self, eps: &Eps, saving: Option<&Saving>) -> Result<(), Error> {
        let (began, mut bytes) = (Instant::now(), 0);
        let written = eps.once(|| {
            bytes = self.write_all(eps, saving, began)?;
            Ok(())
        });
        self.ledger.heard(&Slice {
            number: None,
            lane: Lane::File,
            device: None,
            kind: SliceKind::Checkpoint,
            step: self.begun,
            layer: None,
            phase: None,
            micro_batch: None,
            block: None,
            version: Some(self.begun),
            bytes,
            begin: self.begin,
            end: self.begin + began.elapsed(),
            released_by: None,
        });
        if written.is_err() {
            checkpoint::discard(&self.directory);
        }
        let mut status = self.watch.status();
        match &written {
            Ok(()) => {
                status.checkpoint = Some(unix_seconds());
                status.checkpoint_disk = machine::free_disk(&self.directory).map(|f| (bytes, f));
            }
            Err(_) => status.checkpoint_failures += 1,
        }
        written
    }

    /// Writes block by block, in the order of the next updates, then all else.
    fn write_all(&self, eps: &Eps, saving: Option<&Saving>, began: Instant) -> Result<u64, Error> {
        let run = Identity {
            config: &self.config,
            model: &self.model,
            source_config: &self.source_config,
            steps: self.steps,
            data: &self.data,
            changes: false,
        };
        if self.makes_folder {
            let made = folder::create(folder::parent(&self.directory));
            made.map_err(|error| Error::storage(self.directory.display(), error))?;
        }
        let draft =
            Draft::begin(&self.directory, self.before.as_deref(), run, eps, &self.progress)?;
        let mut blocks: Vec<BlockId> = (0..self.model.blocks.len() as u32).map(BlockId).collect();
        if self.is_backward {
            blocks.reverse();
        }
        let mut bytes = 0;
        for id in blocks {
            bytes += draft.write_block(id, eps)?;
            throttle(began, || bytes, self.disk_rate);
            if let Some(saving) = saving {
                saving.saved(id);
            }
        }
        draft.publish(run, eps)?;
        Ok(bytes)
    }
}
