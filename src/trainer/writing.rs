//! A checkpoint that is being written, with all that it needs: it is completed also when nobody
//! waits for it any more.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use l2l_actors::schedule::Version;
use l2l_actors::work::Lane;
use serde_json::Value;

use crate::checkpoint::{self, Identity, Progress};
use crate::config::Config;
use crate::eps::Eps;
use crate::error::Error;
use crate::models::Model;
use crate::telemetry::{Ledger, Slice, SliceKind, State, Watch, unix_seconds};
use crate::worker::take_as_long;

/// See the [module](self).
pub(super) struct Writing {
    pub(super) directory: PathBuf,
    pub(super) config: Config,
    pub(super) model: Arc<Model>,
    pub(super) source_config: Value,
    pub(super) steps: u64,
    pub(super) data: String,
    pub(super) progress: Progress,
    pub(super) disk_rate: Option<f64>,
    /// Steps of the ring that began before.
    pub(super) begun: Version,
    /// The time on the lanes' clock.
    pub(super) begin: Duration,
    pub(super) watch: Watch,
    pub(super) ledger: Arc<Ledger>,
}

impl Writing {
    /// Writes the checkpoint, and shows that in the run's status and timeline.
    pub(super) fn write(self, eps: &Eps) -> Result<(), Error> {
        let run = Identity {
            config: &self.config,
            model: &self.model,
            source_config: &self.source_config,
            steps: self.steps,
            data: &self.data,
            changes: false,
        };
        let before = std::mem::replace(&mut self.watch.status().state, State::Checkpointing);
        let began = Instant::now();
        let directory = &self.directory;
        let written = eps.once(|| checkpoint::write(directory, run, eps, &self.progress));
        let bytes = written.as_ref().map_or(0, |()| checkpoint::bytes_of(directory));
        take_as_long(began, bytes, self.disk_rate);
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
        let mut status = self.watch.status();
        status.state = before;
        match &written {
            Ok(()) => status.checkpoint = Some(unix_seconds()),
            Err(_) => status.checkpoint_failures += 1,
        }
        written
    }
}
