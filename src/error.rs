//! What can go wrong, by what the caller can do about it.

use std::fmt;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Bad arguments, config or input, or a plan that was refused: nothing was started.
    #[error("{0}")]
    Refused(String),
    /// Something failed while running.
    #[error("{0}")]
    Failed(String),
}

impl Error {
    /// A refusal: what, where, what to do.
    pub(crate) fn refused(what: impl fmt::Display) -> Error {
        Error::Refused(what.to_string())
    }

    /// A failure.
    pub(crate) fn failed(what: impl fmt::Display) -> Error {
        Error::Failed(what.to_string())
    }

    /// The exit status of a command that ends with it.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::Refused(_) => 2,
            Error::Failed(_) => 1,
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
            error => Error::failed(error),
        }
    }
}
