//! What can go wrong, by what the caller can do about it.

use std::fmt;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A key of the config that cannot be: nothing was started.
    #[error("{key} {problem}")]
    Config {
        /// The key, with its section.
        key: String,
        /// What is wrong with it.
        problem: String,
    },
    /// Bad arguments or input, or a plan that was refused: nothing was started.
    #[error("{0}")]
    Refused(String),
    /// The ring failed: by which actor, at which layer, in which operation.
    #[error(transparent)]
    Ring(l2l_actors::Error),
    /// Something failed while running.
    #[error("{0}")]
    Failed(String),
}

impl Error {
    /// A refusal: what, where, what to do.
    pub(crate) fn refused(what: impl fmt::Display) -> Error {
        Error::Refused(what.to_string())
    }

    /// A key that cannot be.
    pub(crate) fn config(key: &str, problem: impl fmt::Display) -> Error {
        Error::Config { key: key.into(), problem: problem.to_string() }
    }

    /// A failure.
    pub(crate) fn failed(what: impl fmt::Display) -> Error {
        Error::Failed(what.to_string())
    }

    /// The exit status of a command that ends with it.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::Config { .. } | Error::Refused(_) => 2,
            Error::Ring(_) | Error::Failed(_) => 1,
        }
    }
}

impl From<l2l_actors::Refusal> for Error {
    fn from(refusal: l2l_actors::Refusal) -> Error {
        Error::refused(refusal)
    }
}

impl From<l2l_actors::Error> for Error {
    fn from(error: l2l_actors::Error) -> Error {
        match error {
            l2l_actors::Error::Refused(refusal) => Error::refused(refusal),
            error => Error::Ring(error),
        }
    }
}

/// A loss or a gradient that is no number: the error of the operation that met it.
#[derive(Debug, thiserror::Error)]
#[error("{0}: the learning rate may be too high")]
pub(crate) struct NotFinite(pub(crate) String);
