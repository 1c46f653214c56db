//! Work that blocks, on threads of its own, so that an executor can run its other tasks.

use std::panic::resume_unwind;

use tokio::task::spawn_blocking;

/// Runs work on one of tokio's threads for blocking work. If the future is dropped, work that has
/// begun goes on.
///
/// # Panics
/// The work panics, or there is no tokio runtime.
pub(crate) async fn unblock<T, W>(work: W) -> T
where
    T: Send + 'static,
    W: FnOnce() -> T + Send + 'static,
{
    match spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) if error.is_panic() => resume_unwind(error.into_panic()),
        Err(error) => panic!("the tokio runtime has ended: {error}"),
    }
}
