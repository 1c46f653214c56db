//! Checkpoints, which are written while training goes on: block by block, each before its next
//! update. A checkpoint that was begun is completed even if no future waits for it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use l2l_actors::schedule::{BlockId, Version};
use l2l_actors::work::Lane;
use tokio::task::JoinHandle;

use super::Trainer;
use crate::checkpoint::{self, Draft, Identity, Keeper, Progress};
use crate::eps::{Eps, Saving};
use crate::error::Error;
use crate::folder;
use crate::machine;
use crate::telemetry::{Slice, SliceKind, State, Watch, unix_seconds};
use crate::worker::{Worker, throttle};

/// A checkpoint that is being written, as far as the trainer knows.
pub(super) struct Begun {
    directory: PathBuf,
    written: JoinHandle<Result<(), Error>>,
}

impl Trainer {
    /// Writes everything that a run resumes from to a new directory, and waits until it is
    /// complete. Then the directory appears.
    ///
    /// # Errors
    /// The ring failed, or a file cannot be written.
    pub async fn checkpoint(&mut self, directory: &Path) -> Result<(), Error> {
        self.begin_checkpoint(directory).await?;
        self.end_checkpoint().await
    }

    /// Begins a checkpoint of the steps done so far, once the checkpoint before is complete. It is
    /// written while further steps run: an update waits until its block is written. With several
    /// ranks the checkpoint is complete when this returns.
    ///
    /// # Errors
    /// The ring failed, or the checkpoint before could not be written.
    pub async fn begin_checkpoint(&mut self, directory: &Path) -> Result<(), Error> {
        self.begin_kept_checkpoint(directory, None).await
    }

    /// Begins a checkpoint in the keeper's directory. The thread that writes it keeps the
    /// directory's lock, so that no other run writes there, even if this trainer is dropped.
    pub(super) async fn begin_kept_checkpoint(
        &mut self,
        directory: &Path,
        keeper: Option<Arc<Keeper>>,
    ) -> Result<(), Error> {
        self.end_checkpoint().await?;
        self.refresh();
        let writing = Writing {
            directory: directory.to_path_buf(),
            keeper,
            before: self.last_checkpoint.take(),
            // A folder that is removed later is not made again.
            makes_folder: !folder::parent(directory).is_dir(),
            run: self.run.clone(),
            progress: self.progress.clone(),
            is_backward: !self.plan.deferred() || self.config().schedule.delay().is_some(),
            begun: self.engine.begun(),
            begin: self.engine.now(),
            watch: self.watch.clone(),
        };
        if self.worker().eps().parts().is_some() {
            self.settle().await?;
            let write = move |worker: &Worker| writing.write(worker.eps(), None);
            let began = Instant::now();
            let written = self.engine.between_steps(write).await.flatten();
            self.watch.0.ledger.waited_for_checkpoint(began.elapsed());
            self.last_checkpoint = written.is_ok().then(|| directory.to_path_buf());
            return written;
        }
        let write =
            move |worker: &Worker, saving: &Saving| writing.write(worker.eps(), Some(saving));
        let written = self.engine.save_beside(write).await;
        let written = self.count(written)?;
        self.writing = Some(Begun { directory: directory.to_path_buf(), written });
        Ok(())
    }

    /// Waits until the checkpoint that was begun is complete.
    ///
    /// # Errors
    /// It could not be written.
    pub async fn end_checkpoint(&mut self) -> Result<(), Error> {
        let Some(Begun { directory, written }) = &mut self.writing else { return Ok(()) };
        let began = Instant::now();
        let before = std::mem::replace(&mut self.watch.status().state, State::Checkpointing);
        let done = written.await;
        self.watch.status().state = before;
        self.watch.0.ledger.waited_for_checkpoint(began.elapsed());
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

/// The inputs of a checkpoint, which is written on a thread of its own.
struct Writing {
    directory: PathBuf,
    /// The lock of the folder above, which is freed when the checkpoint is complete.
    keeper: Option<Arc<Keeper>>,
    /// A complete checkpoint, to whose files unchanged files can be links.
    before: Option<PathBuf>,
    /// True if the folder above must be made.
    makes_folder: bool,
    run: Identity,
    progress: Progress,
    /// True if the next step updates the last blocks first.
    is_backward: bool,
    /// The number of steps of the ring that began before.
    begun: Version,
    /// The time at which the checkpoint began, by the lanes' clock.
    begin: Duration,
    watch: Watch,
}

impl Writing {
    /// Writes the checkpoint, and notes it in the run's status and timeline.
    fn write(self, eps: &Eps, saving: Option<&Saving>) -> Result<(), Error> {
        let began = Instant::now();
        let mut bytes = 0;
        let written = eps.once(|| {
            bytes = self.write_all(eps, saving, began)?;
            Ok(())
        });
        self.watch.0.ledger.heard(&Slice {
            number: None,
            lane: Lane::File,
            device: None,
            kind: SliceKind::Checkpoint,
            step: self.begun,
            layer: None,
            phase: None,
            micro_batch: None,
            block: None,
            version: Some(self.progress.step),
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
                let disk = machine::disk(&self.directory);
                status.checkpoint_disk = disk.map(|disk| (bytes, disk.free));
            }
            Err(_) => status.checkpoint_failures += 1,
        }
        drop(self.keeper);
        written
    }

    /// Writes the blocks in the order of their next updates, then the other files. Returns the
    /// number of bytes.
    fn write_all(&self, eps: &Eps, saving: Option<&Saving>, began: Instant) -> Result<u64, Error> {
        let run = &self.run;
        let disk_rate = run.config.disk_bytes_per_second()?;
        if self.makes_folder {
            let made = folder::create(folder::parent(&self.directory));
            made.map_err(|error| Error::storage(self.directory.display(), error))?;
        }
        let draft =
            Draft::begin(&self.directory, self.before.as_deref(), run, eps, &self.progress)?;
        let mut blocks: Vec<BlockId> = (0..run.model.blocks.len() as u32).map(BlockId).collect();
        if self.is_backward {
            blocks.reverse();
        }
        if run.config.schedule.delay().is_some() && run.model.shape.tied {
            // The head needs the regions of its tiles first.
            blocks.rotate_right(run.model.tiles.len());
        }
        let mut bytes = 0;
        for id in blocks {
            bytes += draft.write_block(id, eps)?;
            throttle(began, || bytes, disk_rate);
            if let Some(saving) = saving {
                saving.saved(id);
            }
        }
        draft.publish(run, eps)?;
        Ok(bytes)
    }
}
