//! Text on its way to tokens, as plain data.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// What somebody says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Message {
    /// Who: `system`, `user`, `assistant`.
    pub role: String,
    /// What.
    pub content: String,
}

/// Text as tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Encoded {
    /// Token ids.
    pub tokens: Vec<u32>,
    /// The kind of each (`token_type_ids`).
    pub kinds: Vec<u8>,
    /// The bytes of the text that each is of; nothing: added.
    pub spans: Vec<(usize, usize)>,
}

/// A chat as text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// All of it.
    pub text: String,
    /// Bytes that the assistant wrote.
    pub learnt: Vec<Range<usize>>,
}
