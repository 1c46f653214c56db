//! Fails a ring in which nothing moves.
//!
//! A thread, not a task: a task that blocks its executor would block a watchdog task with it. It
//! ends when its leash is dropped, or when after a failure nothing moves for as long again: an
//! update that was committed may be slow. A ring with nothing to do is idle, not hung.

use std::io;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use flume::{RecvTimeoutError, Sender};

use crate::cause::{Cause, Problem};
use crate::config::Patience;
use crate::ring::Ring;

/// Stops the watchdog when it is dropped.
#[derive(Debug)]
pub(crate) struct Leash {
    _leash: Sender<()>,
}

/// Watches a ring until the leash is dropped.
///
/// # Errors
/// The system gives no thread.
pub(crate) fn watch(ring: &Arc<Ring>, patience: Patience) -> io::Result<Leash> {
    let (leash, held) = flume::bounded(1);
    let ring = ring.clone();
    let watchdog = thread::Builder::new().name("l2l-watchdog".into());
    watchdog.spawn(move || {
        let mut progress = ring.progress();
        let mut since = Instant::now();
        let mut tripped = false;
        while held.recv_timeout(patience.ring / 4) == Err(RecvTimeoutError::Timeout) {
            let now = (ring.progress(), ring.switch.tripped());
            let is_idle = !tripped && !ring.is_working();
            let patience = match !tripped && ring.is_at_storage() {
                true => patience.ring.max(patience.storage),
                false => patience.ring,
            };
            if now != (progress, tripped) || is_idle {
                ((progress, tripped), since) = (now, Instant::now());
            } else if since.elapsed() >= patience {
                if tripped {
                    // A caller that waits for the end gets the cause even if the end does not come.
                    _ = ring.given_up.set(());
                    return;
                }
                let snapshot = ring.snapshot();
                let problem = Problem::Hang(patience, Box::new(snapshot.clone()));
                ring.switch.trip(Cause::hang(snapshot.suspect(), problem));
            }
        }
    })?;
    Ok(Leash { _leash: leash })
}
