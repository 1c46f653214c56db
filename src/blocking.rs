//! Work that blocks, on threads of its own, so that an executor can run its other tasks.
//!
//! tokio's threads for such work cannot be used: if the system starts no thread, tokio panics, or
//! lets the work wait for ever.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::thread;

use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::error::Error;

/// Runs work on a thread of its own. If the future is dropped, work that has begun goes on.
///
/// # Errors
/// The system starts no thread. The work was not begun.
///
/// # Panics
/// The work panics, or there is no tokio runtime.
pub(crate) async fn unblock<T, W>(work: W) -> Result<T, Error>
where
    T: Send + 'static,
    W: FnOnce() -> T + Send + 'static,
{
    let runtime = Handle::current();
    let (sender, done) = oneshot::channel();
    #[cfg(test)]
    let begin = inherited::BEGIN.with_borrow(Clone::clone);
    let run = move || {
        #[cfg(test)]
        begin.inspect(|begin| begin());
        let _within = runtime.enter(); // The work may start tasks.
        let _ = sender.send(catch_unwind(AssertUnwindSafe(work))); // Nobody may wait for it.
    };
    let thread = thread::Builder::new().name("l2l-blocking".into());
    thread.spawn(run).map_err(Error::no_thread)?;
    match done.await.expect("the thread sends what it did") {
        Ok(done) => Ok(done),
        Err(payload) => resume_unwind(payload),
    }
}

/// What a thread that works for a test takes over from the test's own.
#[cfg(test)]
pub(crate) mod inherited {
    use std::cell::RefCell;
    use std::sync::Arc;

    thread_local! {
        /// Called at the beginning of each thread that works for this one.
        pub(crate) static BEGIN: RefCell<Option<Arc<dyn Fn() + Send + Sync>>> =
            const { RefCell::new(None) };
    }
}
