//! Signals that end a command in an orderly way: an interrupt (Ctrl-C), a termination, and a hangup
//! of the terminal.

use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering::Relaxed};

use l2l::{Error, StopRequest, limits};

use super::{Exit, say};

/// Listens to signals. Clones share the first signal that came.
#[derive(Clone)]
pub(super) struct Signals {
    stop: StopRequest,
    /// The number of the first signal, or 0.
    first: Arc<AtomicU8>,
    /// True to tell the user that the command is about to end.
    says: bool,
}

impl Signals {
    /// Requests a stop at the first signal, with a message if `says`. A second signal ends the
    /// process at once. Must be called on a tokio runtime.
    pub(super) fn stop(stop: &StopRequest, says: bool) -> Signals {
        let signals = Signals { stop: stop.clone(), first: Arc::default(), says };
        signals.listen();
        IS_HEARD.store(true, Relaxed);
        signals
    }

    #[cfg(unix)]
    fn listen(&self) {
        let own = self.clone();
        each_signal(move |number| own.came(number));
    }

    #[cfg(not(unix))]
    fn listen(&self) {
        const INTERRUPT: u8 = 2;
        let own = self.clone();
        tokio::spawn(async move {
            while tokio::signal::ctrl_c().await.is_ok() {
                own.came(INTERRUPT);
            }
        });
    }

    fn came(&self, number: u8) {
        if self.first.compare_exchange(0, number, Relaxed, Relaxed).is_err() {
            process::exit(128 + i32::from(number));
        }
        self.stop.stop();
        if self.says {
            say("finishing this step; interrupt once more to stop at once");
        }
    }

    /// The end of a command: by the first signal, if there was one.
    pub(super) fn ended(&self) -> Exit {
        match self.first.load(Relaxed) {
            0 => Exit::Well,
            number => Exit::Signalled(number),
        }
    }
}

/// True once a command listens to signals.
static IS_HEARD: AtomicBool = AtomicBool::new(false);

/// Prepares the process for signals, before its command begins.
///
/// - A write beyond the largest file that the process may write (`ulimit -f`) would end it by a
///   signal (SIGXFSZ). Once the signal has a listener, the write is an error of that file.
/// - A signal ends the process until its command listens to signals. The system does that for all
///   processes but the first one of a container, which has no signals unless it listens.
///
/// # Errors
/// The system starts no thread, or opens no more files.
#[cfg(unix)]
pub(super) fn prepare() -> Result<(), Error> {
    use std::io;
    use std::os::unix::net::UnixStream;
    use tokio::signal::unix::{SignalKind, signal};
    const FIRST: u32 = 1;
    // tokio panics if it cannot open its files for signals: it opens fewer than these pairs.
    const PAIRS: usize = 4;
    let refused = |error: io::Error| Error::System(limits::named(error));
    let room: io::Result<Vec<_>> = (0..PAIRS).map(|_| UnixStream::pair()).collect();
    drop(room.map_err(refused)?);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(refused)?;
    let listens = runtime.enter();
    // The listener stays when this is dropped.
    let too_large = SignalKind::from_raw(rustix::process::Signal::XFSZ.as_raw());
    drop(signal(too_large).map_err(refused)?);
    if process::id() != FIRST {
        return Ok(());
    }
    each_signal(|number| {
        if !IS_HEARD.load(Relaxed) {
            process::exit(128 + i32::from(number));
        }
    });
    drop(listens);
    let listen = move || runtime.block_on(std::future::pending::<()>());
    let thread = std::thread::Builder::new().name("l2l-signals".into()).spawn(listen);
    thread.map(|_| ()).map_err(|error| Error::System(limits::no_thread(error)))
}

#[cfg(not(unix))]
pub(super) fn prepare() -> Result<(), Error> {
    Ok(())
}

/// Calls `came` with the number of each signal that ends a command. Must be called on a tokio
/// runtime.
#[cfg(unix)]
fn each_signal(came: impl Fn(u8) + Clone + Send + 'static) {
    use tokio::signal::unix::{SignalKind, signal};
    let mut kinds = vec![SignalKind::interrupt(), SignalKind::terminate()];
    kinds.extend((!ignores_hangup()).then(SignalKind::hangup));
    for kind in kinds {
        let Ok(mut signals) = signal(kind) else { continue };
        let came = came.clone();
        tokio::spawn(async move {
            while signals.recv().await.is_some() {
                came(kind.as_raw_value() as u8);
            }
        });
    }
}

/// True if hangups were ignored when this process started, as `nohup` does so that a process
/// outlives its terminal. They stay ignored. Where the system does not report it, hangups are left
/// to the system.
#[cfg(unix)]
fn ignores_hangup() -> bool {
    const HANGUP: u64 = 1; // the lowest bit of the mask is signal 1
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(HANGUP) & HANGUP
        != 0
}
