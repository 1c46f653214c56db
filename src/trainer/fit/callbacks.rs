//! How a program follows a run of [`fit`](crate::Trainer::fit), and how it requests an early end.

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

/// The methods that [`fit`](crate::Trainer::fit) calls during a run. By default each does nothing,
/// as all those of `()` do. They run between two steps, so training waits for them. An `impl` with
/// [`step`](Callbacks::step) needs the attribute `#[async_trait]`.
#[async_trait]
pub trait Callbacks: Send {
    /// The trainer is made, and the first step of a run of `steps` comes next.
    fn started(&mut self, trainer: &Trainer, steps: u64) {
        _ = (trainer, steps);
    }

    /// A training step ended. The method can use the trainer to evaluate, to generate, or to write
    /// a checkpoint. [`Break`](ControlFlow::Break) ends the run, as a [`StopRequest`] does.
    ///
    /// # Errors
    /// An error ends the run. Other errors than this crate's become [`Error::Own`].
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

    /// An event as JSON, as in `log.file`: steps, validations, the summary and others. It is called
    /// before the method of the same event.
    fn event(&mut self, event: &Value) {
        _ = event;
    }

    /// A message for people.
    fn message(&mut self, message: &RunMessage) {
        _ = message;
    }

    /// The run is over, with or without an error. Called once if [`started`](Callbacks::started)
    /// was called.
    fn ended(&mut self, outcome: Result<&Fitted, &Error>) {
        _ = outcome;
    }
}

impl Callbacks for () {}

impl dyn Callbacks + '_ {
    pub(super) fn info(&mut self, text: impl Into<String>) {
        self.message(&RunMessage::Info(text.into()));
    }

    pub(super) fn warn(&mut self, text: impl Into<String>) {
        self.message(&RunMessage::Warning(text.into()));
    }
}

/// A message for people.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RunMessage {
    /// What the run does, for instance where it resumes or why it stops early.
    Info(String),
    /// Something does not work as the config says, and the run goes on.
    Warning(String),
    /// A file of the run could not be written and is not complete, and the run goes on.
    Lost(String),
    /// The address at which metrics and the live page are served.
    Listening(SocketAddr),
}

/// A request to end a run after its step, from any thread. Clones share the request.
#[derive(Clone, Debug, Default)]
pub struct StopRequest(Arc<AtomicBool>);

impl StopRequest {
    /// Makes a request that is not made yet.
    pub fn new() -> StopRequest {
        StopRequest::default()
    }

    /// Requests the end. Returns true if it was requested before.
    pub fn stop(&self) -> bool {
        self.0.swap(true, Relaxed)
    }

    /// True if the end was requested.
    pub fn is_requested(&self) -> bool {
        self.0.load(Relaxed)
    }
}
