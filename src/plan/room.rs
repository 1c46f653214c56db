//! The room that generation has.

use crate::error::Error;
use crate::models::{Head, Model};

/// What generation has room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Prompts at once.
    pub prompts: usize,
    /// Tokens of the longest.
    pub prompt: usize,
    /// Tokens of a prompt and what is generated behind it.
    pub tokens: usize,
}

impl Room {
    /// Refuses a room that a model cannot fill.
    pub(crate) fn check(self, model: &Model) -> Result<(), Error> {
        if model.shape.head != Head::Tokens {
            return Err(Error::argument("tokens are drawn from models that predict the next one"));
        }
        let Room { prompts, prompt, tokens } = self;
        let positions = model.shape.positions;
        if tokens > positions {
            return Err(Error::argument(format_args!(
                "a prompt of {prompt} tokens and what is to come behind it are {tokens}: the model \
                 has {positions} positions"
            )));
        }
        if prompts == 0 || prompt == 0 || tokens < prompt {
            return Err(Error::argument(format_args!("there is no room in {self:?}")));
        }
        Ok(())
    }
}
