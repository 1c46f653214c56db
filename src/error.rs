//! What can go wrong, by what the caller can do about it: a closed list to match on.

use std::{fmt, io};

use l2l_actors::{Cause, Problem};

/// An error of this crate. [`kind`](Error::kind) also looks into errors of the ring.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A key of the config has a value that cannot be.
    #[error("{key} {problem}")]
    Config {
        /// The key, with its section.
        key: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A text that is no config.
    #[error("{0}")]
    ConfigText(String),
    /// A bad argument of a call, or of the command line.
    #[error("{0}")]
    Argument(String),
    /// The plan needs more than there is.
    #[error("{0}")]
    DoesNotFit(Misfit),
    /// A batch that is not what the plan or the model is made for.
    #[error("{0}")]
    BadBatch(String),
    /// Data that cannot be trained on.
    #[error("data {file}{}: {problem}", .line.map(|l| format!(", line {l}")).unwrap_or_default())]
    BadData {
        /// The file, or the name of the data in the config.
        file: String,
        /// The line, from 1, where the file has lines.
        line: Option<u64>,
        /// What is wrong there.
        problem: String,
    },
    /// A model, or a file of one, that cannot be used.
    #[error("{place}: {problem}")]
    BadModel {
        /// The file, or the tensor.
        place: String,
        /// What is wrong there.
        problem: String,
    },
    /// A checkpoint, or a state in `eps.path`, that this run cannot resume from.
    #[error("{place}: {problem}")]
    BadCheckpoint {
        /// The checkpoint, or the folder of the state.
        place: String,
        /// What is wrong there.
        problem: String,
    },
    /// A file or a folder that cannot be opened, read or written.
    #[error("{place}: {source}")]
    Storage {
        /// Its path, with the key or the flag that names it.
        place: String,
        /// The system's error.
        source: io::Error,
        /// False when it was found before anything was started.
        started: bool,
    },
    /// The device that the config names cannot be used.
    #[error("device.kind = \"cuda\": {0}")]
    NoDevice(String),
    /// The device failed, or computes something else than it should.
    #[error("{0}")]
    Device(String),
    /// A number that the model computed is infinite or not a number.
    #[error("{0}")]
    NotFinite(String),
    /// A schedule that would never end with these pools of slots.
    #[error(transparent)]
    Schedule(l2l_actors::Refusal),
    /// The ring failed: by which actor, at which layer, in which operation.
    #[error(transparent)]
    Ring(l2l_actors::RingError),
    /// The system refused threads or memory that the plan counted on.
    #[error("{0}")]
    System(String),
    /// The program's own, of a callback or a stream of batches. See [`Error::own`].
    #[error("{0}")]
    Own(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// The kinds of errors. An error of the ring has the kind of its cause, where that is one of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[allow(missing_docs, reason = "they are the variants of Error")]
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

/// What a plan needs and there is not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Misfit {
    /// What there is too little of.
    pub resource: Resource,
    /// The plan's term that needs most of it, where it has terms.
    pub largest_term: Option<&'static str>,
    /// Bytes that are needed, or files.
    pub needed: u64,
    /// Bytes that are available, or files.
    pub available: u64,
    /// All of it as a sentence, with what would fit.
    pub(crate) text: String,
}

/// What a plan needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Resource {
    /// Memory of the device, or of its ceiling `device.memory`.
    DeviceMemory,
    /// Memory of the host, or of this process's limits.
    HostMemory,
    /// Room on the disk under `eps.path`.
    Disk,
    /// Files that a process may open.
    OpenFiles,
}

impl fmt::Display for Misfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Error {
    pub(crate) fn config(key: &str, problem: impl fmt::Display) -> Error {
        Error::Config { key: key.into(), problem: problem.to_string() }
    }

    pub(crate) fn argument(problem: impl fmt::Display) -> Error {
        Error::Argument(problem.to_string())
    }

    pub(crate) fn bad_batch(problem: impl fmt::Display) -> Error {
        Error::BadBatch(problem.to_string())
    }

    pub(crate) fn bad_data(file: impl fmt::Display, problem: impl fmt::Display) -> Error {
        Error::BadData { file: file.to_string(), line: None, problem: problem.to_string() }
    }

    pub(crate) fn bad_model(place: impl fmt::Display, problem: impl fmt::Display) -> Error {
        Error::BadModel { place: place.to_string(), problem: problem.to_string() }
    }

    pub(crate) fn bad_checkpoint(place: impl fmt::Display, problem: impl fmt::Display) -> Error {
        Error::BadCheckpoint { place: place.to_string(), problem: problem.to_string() }
    }

    /// A file that failed while the run, or what was asked for, was on its way.
    pub(crate) fn storage(place: impl fmt::Display, source: io::Error) -> Error {
        Error::Storage { place: place.to_string(), source, started: true }
    }

    /// A file that was found to be unusable before anything was started.
    pub(crate) fn unusable(place: impl fmt::Display, source: io::Error) -> Error {
        Error::Storage { place: place.to_string(), source, started: false }
    }

    pub(crate) fn system(what: impl fmt::Display) -> Error {
        Error::System(what.to_string())
    }

    /// An error of a program's own, which a callback or a stream of batches returns. It is the
    /// [source](std::error::Error::source) of what the run returns.
    pub fn own(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
        Error::Own(error.into())
    }

    /// What kind it is. Of the ring's errors: what kind its first cause is.
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

    /// Whether a block of the EPS is not what was written: the state on file is of no use.
    pub(crate) fn is_damage(&self) -> bool {
        let damaged = l2l_actors::Integrity::Damaged;
        let Error::Ring(l2l_actors::RingError::Failed { integrity, .. }) = self else {
            return false;
        };
        *integrity == damaged
    }

    /// The exit status of a command that ends with it: 2 when nothing was started, else 1.
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

/// The kind of the error that stopped the ring, or of what that error came from.
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

/// Whether the ring was stopped by a block that is not what was written.
pub(crate) fn is_damage(cause: &Cause) -> bool {
    let is = |error: &(dyn std::error::Error + 'static)| {
        let storage = error.downcast_ref::<io::Error>();
        storage.is_some_and(|error| error.kind() == io::ErrorKind::InvalidData)
    };
    sources(cause).any(is)
}

/// The error that stopped the ring, and what it came from.
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

/// A loss or a gradient that is no number: the error of the operation that met it.
#[derive(Debug, thiserror::Error)]
#[error("{0}: the learning rate may be too high")]
pub(crate) struct NotFinite(pub(crate) String);
