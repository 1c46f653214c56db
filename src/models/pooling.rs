//! Embeddings of sequences, from their hidden states.

use serde::{Deserialize, Serialize};

use super::dense::MOST_DENSE;
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

impl Head {
    /// None, with the mean of the hidden states, scaled to length 1.
    pub(crate) const EMBEDDING: Head = Head::Embedding {
        pooling: EmbeddingPooling::Mean,
        dense: [None; MOST_DENSE],
        normalise: true,
        include_prompt: true,
    };
}

impl Shape {
    /// True for a model whose output is an embedding of each sequence.
    pub fn embeds(&self) -> bool {
        matches!(self.head, Head::Embedding { .. })
    }
}
