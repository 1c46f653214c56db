//! The tokio runtime of a command: one thread runs the tasks of the ring and of signals, and the
//! main thread the command itself.
//!
//! tokio's own runtime of several threads panics if the system does not start them.

use std::thread::{self, JoinHandle};

use l2l::{Error, limits};
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

/// A runtime with a thread of its own. Dropping it ends its tasks.
pub(super) struct Runtime {
    handle: Handle,
    /// Dropped to end the thread.
    ends: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Runtime {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system starts no thread, or opens no more files.
    pub(super) fn new() -> Result<Runtime, Error> {
        let runtime = Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| Error::System(limits::named(error)))?;
        let handle = runtime.handle().clone();
        let (ends, ended) = oneshot::channel();
        let thread = thread::Builder::new().name("l2l-tasks".into()).spawn(move || {
            _ = runtime.block_on(ended);
        });
        let thread = thread.map_err(|error| Error::System(limits::no_thread(error)))?;
        Ok(Runtime { handle, ends: Some(ends), thread: Some(thread) })
    }

    /// Runs a future on this thread.
    pub(super) fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.handle.block_on(future)
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        drop(self.ends.take());
        // A panic in it was reported when it came.
        _ = self.thread.take().map(JoinHandle::join);
    }
}
