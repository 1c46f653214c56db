//! `[model]`: the model's weights or shape, and its task.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::OnResume;
use super::check::{must, refuse};
use crate::error::Error;
use crate::kernels::ProblemType;
use crate::models::EmbeddingPooling;

/// `[model]`
#[derive(Clone, Debug, Default, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct ModelConfig {
    /// A directory with `config.json` and `model.safetensors`, as transformers writes it. The
    /// model's sizes, weights and tokenizer come from there.
    pub path: Option<PathBuf>,
    /// With `path`: start from random weights, and take only the shape and the tokenizer from the
    /// directory. Without `path` the weights are always random.
    pub random_weights: bool,
    /// Reads `path` and adapters even if the directory is a checkpoint that was changed after it
    /// was written, or has weights that are infinite or NaN. A run never resumes from a changed
    /// checkpoint.
    pub unsealed: bool,
    /// A known shape with random weights; `gpt-small` if neither this nor `path` is set. Presets:
    /// `gpt2` to `gpt2-xl`, `bert-base`, `bert-large`, `llama-1b`, `llama-7b`, `llama-70b`, `qwen`,
    /// `turing-nlg-17b`, `gpt3-175b`; with experts: `moe-small`, `switch-small`, `gshard-small`,
    /// `mixtral-8x7b`, `qwen3-30b-a3b`, `qwen3-235b-a22b`, `gpt-oss-20b`, `gpt-oss-120b`.
    pub preset: Option<String>,
    /// Number of transformer blocks. This key and the sizes below override those of the preset.
    pub layers: Option<usize>,
    /// The most transformer blocks that the model can have. `depth.stack_at` and
    /// `Trainer::add_layers` add blocks during a run. When absent, the number at the beginning.
    pub max_layers: Option<usize>,
    /// Width of the residual stream: a multiple of `heads`.
    pub hidden: Option<usize>,
    /// Number of attention heads.
    pub heads: Option<usize>,
    /// Number of key and value heads, in families with grouped-query attention; equal to `heads`
    /// when absent.
    pub kv_heads: Option<usize>,
    /// Width of the feed-forward layer; 4 × `hidden` if `hidden` is set and this key is not. In a
    /// model with experts this is the width in blocks without experts.
    pub intermediate: Option<usize>,
    /// Number of experts of a block, in presets with experts.
    pub experts: Option<usize>,
    /// Number of experts that each token chooses.
    pub experts_per_token: Option<usize>,
    /// Width of an expert.
    pub expert_intermediate: Option<usize>,
    /// Number of tokens in the vocabulary.
    pub vocabulary: Option<usize>,
    /// Length of the longest sequence that the model can read, in tokens.
    pub positions: Option<usize>,
    /// Probability of every dropout, in [0, 1); the model's own when absent.
    pub dropout: Option<f32>,
    /// The task that the model is trained for; when absent, the usual task of its family.
    pub task: Option<Task>,
    /// Classes of `sequence-classification` and `token-classification`: their number, or a list of
    /// their names. 1 class of sequences means one real value (regression), unless `problem_type`
    /// says otherwise. When absent, the model's own, else 2.
    pub labels: Option<Labels>,
    /// With `sequence-classification`: `single_label_classification` (one class for each
    /// sequence), `multi_label_classification` (any number of labels, each by itself) or
    /// `regression` (one value). When absent, that of the model's `config.json`, else as `labels`
    /// says.
    pub problem_type: Option<ProblemType>,
    /// With `sentence-embedding`: how the last hidden states of a text become its embedding:
    /// `mean` (of all tokens), `cls` (the first token's) or `last` (the last token's). When absent,
    /// what `modules.json` of sentence-transformers in `path` says, else `last` for a decoder and
    /// `mean` for an encoder.
    pub pooling: Option<EmbeddingPooling>,
    /// With `sentence-embedding`: scales embeddings to length 1. When absent, what `modules.json`
    /// says, else `true`.
    pub normalise: Option<bool>,
    /// With `sentence-embedding`: whether the tokens of a prompt count for the embedding. When
    /// absent, what the pooling module in `path` says, else `true`.
    pub include_prompt: Option<bool>,
    /// With `sentence-embedding`: the name of the prompt that `l2l embed` puts before each text;
    /// `""` for none. When absent, the one that `config_sentence_transformers.json` in `path`
    /// names, if it does.
    pub default_prompt: Option<String>,
    /// With `sentence-embedding`: texts by name that come before a text, as in
    /// `query = "query: "`. They are added to those of `config_sentence_transformers.json` in
    /// `path`, or replace those of the same name. Checkpoints have them all.
    pub prompts: BTreeMap<String, String>,
}

/// The classes of sequences or tokens.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(untagged, expecting = "expected the number of classes, or a list of their names")]
pub enum Labels {
    /// The number of classes. 1 means one real value.
    Count(usize),
    /// The names of the classes.
    Names(Vec<String>),
}

impl Labels {
    /// The number of classes.
    pub fn count(&self) -> usize {
        match self {
            Labels::Count(count) => *count,
            Labels::Names(names) => names.len(),
        }
    }
}

/// The task that a model is trained for.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Task {
    /// It predicts the next token.
    CausalLm,
    /// It predicts masked tokens.
    MaskedLm,
    /// It predicts a class or a real value for each sequence: at the first position in an encoder,
    /// at the last in a decoder.
    SequenceClassification,
    /// It predicts a class for each token.
    TokenClassification,
    /// It makes an embedding of each text, as sentence-transformers does. It has no head.
    SentenceEmbedding,
}

impl Task {
    /// The name in config files.
    pub fn name(self) -> &'static str {
        match self {
            Task::CausalLm => "causal-lm",
            Task::MaskedLm => "masked-lm",
            Task::SequenceClassification => "sequence-classification",
            Task::TokenClassification => "token-classification",
            Task::SentenceEmbedding => "sentence-embedding",
        }
    }
}

impl ModelConfig {
    pub(super) const ON_RESUME: OnResume =
        OnResume::free("default_prompt path prompts unsealed").with_changes("dropout");

    pub(super) fn check(&self) -> Result<(), Error> {
        let dropout = self.dropout.unwrap_or(0.0);
        must((0.0..1.0).contains(&dropout), "model.dropout", "in [0, 1)")?;
        let names = match &self.labels {
            Some(Labels::Names(names)) => &names[..],
            _ => &[],
        };
        let differs = |at: usize| !names[at].is_empty() && !names[..at].contains(&names[at]);
        must((0..names.len()).all(differs), "model.labels", "names that differ, none empty")?;
        must(self.max_layers != Some(0), "model.max_layers", "at least 1")?;
        let problem = "is set together with model.path: set only one of them";
        refuse(self.path.is_some() && self.preset.is_some(), "model.preset", problem)?;
        let problem = "needs a directory that gives the shape: set model.path";
        refuse(self.random_weights && self.path.is_none(), "model.random_weights", problem)
    }
}
