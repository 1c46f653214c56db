//! The errors of this crate: a closed list, by what the caller can do about an error.

use std::{fmt, io};

use l2l_actors::{Cause, Problem};

use crate::limits::{named, named_error, no_thread};

/// An error of this crate. [`kind`](Error::kind) also tells the causes of the ring's errors apart.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A key of the config has a value that it cannot have.
    #[error("{key} {problem}")]
    Config {
        /// The key, with its section.
        key: String,
        /// The problem.
        problem: String,
    },
    /// A text is no config.
    #[error("{0}")]
    ConfigText(String),
    /// An argument of a call or of the command line cannot be used.
    #[error("{0}")]
    Argument(String),
    /// The plan needs more than the machine has.
    #[error("{0}")]
    DoesNotFit(Misfit),
    /// A batch does not fit the plan or the model.
    #[error("{0}")]
    BadBatch(String),
    /// The data cannot be trained on.
    #[error("data {file}{}: {problem}", .line.map(|l| format!(", line {l}")).unwrap_or_default())]
    BadData {
        /// The file, or the name of the data in the config.
        file: String,
        /// The line, from 1, where the file has lines.
        line: Option<u64>,
        /// The problem.
        problem: String,
    },
    /// A model, or a file of a model, cannot be used.
    #[error("{place}: {problem}")]
    BadModel {
        /// The file, or the tensor.
        place: String,
        /// The problem.
        problem: String,
    },
    /// This run cannot resume from a checkpoint, or from the state in `eps.path`.
    #[error("{place}: {problem}")]
    BadCheckpoint {
        /// The checkpoint, or the folder of the state.
        place: String,
        /// The problem.
        problem: String,
    },
    /// A file or a folder cannot be opened, read or written.
    #[error("{place}: {source}")]
    Storage {
        /// Its path, with the key or the flag that names it.
        place: String,
        /// The system's error.
        source: io::Error,
        /// False if the error was found before anything was started.
        started: bool,
    },
    /// The device that the config names cannot be used.
    #[error("device.kind = \"cuda\": {0}")]
    NoDevice(String),
    /// The device failed, or computes wrong results.
    #[error("{0}")]
    Device(String),
    /// A number that the model computed is infinite or not a number.
    #[error("{0}")]
    NotFinite(String),
    /// A schedule would never end with these pools of slots.
    #[error(transparent)]
    Schedule(l2l_actors::Refusal),
    /// The ring failed. The error says in which actor, layer and operation.
    #[error(transparent)]
    Ring(l2l_actors::RingError),
    /// The system refused threads or memory that the plan counted on.
    #[error("{0}")]
    System(String),
    /// An error of the program's own, from a callback or a stream of batches. See [`Error::own`].
    #[error("{0}")]
    Own(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// The kinds of errors. An error of the ring has the kind of its cause, if the cause has a kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[allow(missing_docs, reason = "they are named after the variants of Error")]
pub enum ErrorKind {
    Config,
    Argument,
    DoesNotFit,
    BadBatch,
    BadData,
    BadModel,
    BadCheckpoint,
    Storage,
    /// A [`Storage`](ErrorKind::Storage) error because a disk or a quota is full.
    StorageFull,
    Device,
    NotFinite,
    Schedule,
    /// An actor failed, hung or panicked for another reason.
    Ring,
    System,
    Own,
}

/// A need of a plan that the machine cannot meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Misfit {
    /// The resource that is too small.
    pub resource: Resource,
    /// The plan's term that needs most of the resource, if the resource has terms.
    pub largest_term: Option<&'static str>,
    /// The bytes that are needed, or the number of files.
    pub needed: u64,
    /// The bytes that are available, or the number of files.
    pub available: u64,
    /// The misfit as a sentence, with a plan that would fit.
    pub(crate) text: String,
}

/// A resource of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Resource {
    /// Memory of the device, up to the ceiling `device.memory`.
    DeviceMemory,
    /// Memory of the host, up to this process's limits.
    HostMemory,
    /// Room on the disk under `eps.path`.
    Disk,
    /// Files that a process can open.
    OpenFiles,
    /// Bytes of a file that a process can write.
    FileSize,
}

impl fmt::Display for Misfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Error {
    pub(crate) fn config(key: &str, problem: impl fmt::Display) -> Error {
        Error::Config { key: key.into(), problem: named(problem) }
    }

    pub(crate) fn argument(problem: impl fmt::Display) -> Error {
        Error::Argument(problem.to_string())
    }

    pub(crate) fn bad_batch(problem: impl fmt::Display) -> Error {
        Error::BadBatch(problem.to_string())
    }

    pub(crate) fn bad_data(file: impl fmt::Display, problem: impl fmt::Display) -> Error {
        Error::BadData { file: file.to_string(), line: None, problem: named(problem) }
    }

    pub(crate) fn bad_model(place: impl fmt::Display, problem: impl fmt::Display) -> Error {
        Error::BadModel { place: place.to_string(), problem: named(problem) }
    }

    pub(crate) fn bad_checkpoint(place: impl fmt::Display, problem: impl fmt::Display) -> Error {
        Error::BadCheckpoint { place: place.to_string(), problem: named(problem) }
    }

    /// The error of a file after the run or the command had started.
    pub(crate) fn storage(place: impl fmt::Display, source: io::Error) -> Error {
        Error::Storage { place: place.to_string(), source: named_error(source), started: true }
    }

    /// The error of a file before anything was started.
    pub(crate) fn unusable(place: impl fmt::Display, source: io::Error) -> Error {
        Error::Storage { place: place.to_string(), source: named_error(source), started: false }
    }

    pub(crate) fn system(what: impl fmt::Display) -> Error {
        Error::System(named(what))
    }

    /// The error of a thread that the system did not start.
    pub(crate) fn no_thread(error: impl fmt::Display) -> Error {
        Error::System(no_thread(error))
    }

    /// Makes an error of a program's own, for a callback or a stream of batches to return. The run
    /// returns it, and the program's error is its [source](std::error::Error::source).
    pub fn own(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
        Error::Own(error.into())
    }

    /// The kind of the error. An error of the ring has the kind of its first cause.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::Config { .. } | Error::ConfigText(_) => ErrorKind::Config,
            Error::Argument(_) => ErrorKind::Argument,
            Error::DoesNotFit(_) => ErrorKind::DoesNotFit,
            Error::BadBatch(_) => ErrorKind::BadBatch,
            Error::BadData { .. } => ErrorKind::BadData,
            Error::BadModel { .. } => ErrorKind::BadModel,
            Error::BadCheckpoint { .. } => ErrorKind::BadCheckpoint,
            Error::Storage { source, .. } => of_storage(source),
            Error::NoDevice(_) | Error::Device(_) => ErrorKind::Device,
            Error::NotFinite(_) => ErrorKind::NotFinite,
            Error::Schedule(_) => ErrorKind::Schedule,
            Error::Ring(error) => of_ring(error),
            Error::System(_) => ErrorKind::System,
            Error::Own(_) => ErrorKind::Own,
        }
    }

    /// True if a block of the EPS is not what was written. Then the state on file is useless.
    pub(crate) fn is_damage(&self) -> bool {
        use l2l_actors::{Integrity, RingError};
        matches!(self, Error::Ring(RingError::Failed { integrity: Integrity::Damaged, .. }))
    }

    /// The exit status of a command that ends with this error: 2 if nothing was started, else 1.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::Storage { started, .. } => 2 - u8::from(*started),
            Error::Device(_) | Error::NotFinite(_) | Error::Ring(_) => 1,
            Error::System(_) | Error::Own(_) => 1,
            _ => 2,
        }
    }
}

fn of_storage(error: &io::Error) -> ErrorKind {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorKind::StorageFull,
        _ => ErrorKind::Storage,
    }
}

/// The kind of the error that stopped the ring, or of one of its sources.
fn of_ring(error: &l2l_actors::RingError) -> ErrorKind {
    let l2l_actors::RingError::Failed { cause, .. } = error else { return ErrorKind::Ring };
    for error in sources(cause) {
        if let Some(error) = error.downcast_ref::<io::Error>() {
            return of_storage(error);
        }
        if error.is::<NotFinite>() {
            return ErrorKind::NotFinite;
        }
    }
    ErrorKind::Ring
}

/// True if the ring was stopped by a block that is not what was written.
pub(crate) fn is_damage(cause: &Cause) -> bool {
    let is = |error: &(dyn std::error::Error + 'static)| {
        let storage = error.downcast_ref::<io::Error>();
        storage.is_some_and(|error| error.kind() == io::ErrorKind::InvalidData)
    };
    sources(cause).any(is)
}

/// The error that stopped the ring, and its sources.
fn sources(cause: &Cause) -> impl Iterator<Item = &(dyn std::error::Error + 'static)> {
    let first: Option<&(dyn std::error::Error + 'static)> = match &cause.problem {
        Problem::Error(first) => Some(first.as_ref()),
        _ => None,
    };
    std::iter::successors(first, |error| error.source())
}

impl From<l2l_actors::Refusal> for Error {
    fn from(refusal: l2l_actors::Refusal) -> Error {
        Error::Schedule(refusal)
    }
}

impl From<l2l_actors::RingError> for Error {
    fn from(error: l2l_actors::RingError) -> Error {
        match error {
            l2l_actors::RingError::Refused(refusal) => Error::Schedule(refusal),
            error => Error::Ring(error),
        }
    }
}

/// The error of an operation that found a loss or a gradient that is infinite or not a number.
#[derive(Debug, thiserror::Error)]
#[error("{0}: the learning rate may be too high")]
pub(crate) struct NotFinite(pub(crate) String);
