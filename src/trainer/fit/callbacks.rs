//! What a program hears from [`fit`](crate::Trainer::fit) while it trains, and how it asks for an
//! early end.

use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use async_trait::async_trait;
use serde_json::Value;

use super::Fitted;
use crate::engine::StepReport;
use crate::error::Error;
use crate::inference::Evaluation;
use crate::trainer::Trainer;

/// Methods that [`fit`](crate::Trainer::fit) calls as it goes. Each does nothing by default; `()`
/// has no other. They run between two steps, so training waits for them. An `impl` with
/// [`step`](Callbacks::step) has the attribute `#[async_trait]`.
#[async_trait]
pub trait Callbacks: Send {
    /// Everything is made, and the first step of a run of `steps` comes next.
    fn started(&mut self, trainer: &Trainer, steps: u64) {
        _ = (trainer, steps);
    }

    /// A training step ended. With the trainer it can evaluate, generate, or write a checkpoint.
    /// [`Break`](ControlFlow::Break) ends the run, as a [`StopRequest`] does.
    ///
    /// # Errors
    /// An error ends the run. What is no error of this crate becomes [`Error::Own`].
    async fn step(
        &mut self,
        trainer: &mut Trainer,
        report: &StepReport,
    ) -> Result<ControlFlow<()>, Error> {
        _ = (trainer, report);
        Ok(ControlFlow::Continue(()))
    }

    /// A validation ended, after training step `step`.
    fn validation(&mut self, step: u64, evaluation: &Evaluation) {
        _ = (step, evaluation);
    }

    /// A checkpoint was written to a new directory.
    fn checkpoint(&mut self, directory: &Path) {
        _ = directory;
    }

    /// An event as JSON, as `log.file` has it: steps, validations, the summary and others. It comes
    /// before the method for the same event.
    fn event(&mut self, event: &Value) {
        _ = event;
    }

    /// Something that a person may want to read.
    fn message(&mut self, message: &RunMessage) {
        _ = message;
    }

    /// The run is over. Called once if [`started`](Callbacks::started) was, also after an error.
    fn ended(&mut self, outcome: Result<&Fitted, &Error>) {
        _ = outcome;
    }
}

impl Callbacks for () {}

/// A message for people.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RunMessage {
    /// What the run does: where it resumes, why it stops early.
    Info(String),
    /// What did not work as the config says, while the run goes on.
    Warning(String),
    /// Which file of the run is not complete, because it could not be written, while the run goes
    /// on.
    Lost(String),
    /// The address at which metrics and the live page are served.
    Listening(SocketAddr),
}

/// A request to end a run after its step, from any thread. Clones share the request.
#[derive(Clone, Debug, Default)]
pub struct StopRequest(Arc<AtomicBool>);

impl StopRequest {
    /// Nothing is requested yet.
    pub fn new() -> StopRequest {
        StopRequest::default()
    }

    /// Requests the end. Returns true when it had been requested before.
    pub fn stop(&self) -> bool {
        self.0.swap(true, Relaxed)
    }

    /// Whether the end was requested.
    pub fn is_requested(&self) -> bool {
        self.0.load(Relaxed)
    }
}
