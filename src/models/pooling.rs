//! Embeddings of sequences, from their hidden states.

use serde::{Deserialize, Serialize};

use super::shape::{Head, Shape};

/// How the hidden states of a sequence become its embedding.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum EmbeddingPooling {
    /// Their mean over all tokens.
    Mean,
    /// That of the first token.
    Cls,
    /// That of the last token.
    Last,
}

impl Shape {
    /// True for a model whose output is an embedding of each sequence.
    pub fn embeds(&self) -> bool {
        matches!(self.head, Head::Embedding { .. })
    }
}
