//! Messages, rendered chats and encoded text, as plain data.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// A message of a chat.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Message {
    /// Who wrote it: `system`, `user` or `assistant`.
    pub role: String,
    /// Its text.
    pub content: String,
}

/// A text as tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Encoded {
    /// Token ids.
    pub tokens: Vec<u32>,
    /// The type of each token (`token_type_ids`).
    pub kinds: Vec<u8>,
    /// The first and last byte of the text that each token covers. Empty for special tokens that
    /// the tokenizer added.
    pub spans: Vec<(usize, usize)>,
}

/// A chat as text, rendered by a chat template.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RenderedChat {
    /// The whole text.
    pub text: String,
    /// The ranges of bytes that the assistant wrote.
    pub assistant: Vec<Range<usize>>,
}
