//! The keys of `[data]`: what is trained on, and how it becomes sequences.

use serde::{Deserialize, Serialize};

/// `[data]`
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct DataConfig {
    /// `built-in`: the project's own source and documentation. Or a file, or a folder of them:
    /// `.txt` and `.md`, text, through the model's `tokenizer.json`, or by bytes when it has none;
    /// `.jsonl`, a sequence a line (`text`, with `text_pair` and `label` where whole sequences are
    /// scored; `messages`; `prompt` and `completion`; or `input_ids`, with `labels`, not shifted,
    /// -100 is not scored, or `label`, and `token_type_ids`); `.bin`, tokens of two bytes. Or
    /// `random`. Or a list of these, each a name or `{ path = "...", weight = 2.0 }`: an epoch
    /// sees each of its sequences so often.
    pub train: Files,
    /// What is kept aside: others, of the same kinds.
    pub validation: Option<Files>,
    /// Or the share of `train` that is kept aside, spread evenly over it; 0.1 of text and 0 of
    /// other data when absent.
    pub validation_split: Option<f64>,
    /// Tokens of a sequence at most; the model's positions, up to 1024, when absent.
    pub sequence_length: Option<usize>,
    /// Whether sequences are drawn in an order of their own each epoch.
    pub shuffle: bool,
    /// What happens to a sequence that is longer than `sequence_length`; a file of text always
    /// goes on in the next.
    pub too_long: TooLong,
    /// Whether several short texts share a sequence, each blind to the others and with positions
    /// of its own.
    pub packing: bool,
    /// Whether texts that share a sequence see those before them, as one text.
    pub attend_across: bool,
    /// Whether a text to learn to write ends with the tokenizer's end-of-text token; a
    /// `completion` always does.
    pub end_of_text: bool,
    /// The share of a text's tokens that a masked language model has to find: of these, 8 in 10
    /// are masked and 1 is another token.
    pub mask_probability: f64,
}

impl Default for DataConfig {
    fn default() -> DataConfig {
        DataConfig {
            train: DataConfig::BUILT_IN.into(),
            validation: None,
            validation_split: None,
            sequence_length: None,
            shuffle: true,
            too_long: TooLong::Error,
            packing: false,
            attend_across: false,
            end_of_text: false,
            mask_probability: 0.15,
        }
    }
}

impl DataConfig {
    /// Names the built-in corpus.
    pub const BUILT_IN: &str = "built-in";
}

/// What data is named by: one file, or several.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(untagged, expecting = "expected a name, or a list of names and { path, weight }")]
pub enum Files {
    /// One.
    One(String),
    /// Several.
    Several(Vec<DataFile>),
}

/// One of several files.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(untagged, expecting = "expected a name, or { path, weight }")]
pub enum DataFile {
    /// By its name.
    Named(String),
    /// With a weight.
    Weighted {
        /// Its name.
        path: String,
        /// How often an epoch sees each of its sequences.
        weight: f64,
    },
}

impl From<&str> for Files {
    fn from(name: &str) -> Files {
        Files::One(name.into())
    }
}

impl From<String> for Files {
    fn from(name: String) -> Files {
        Files::One(name)
    }
}

impl Files {
    /// Each name, and its weight.
    pub fn each(&self) -> Vec<(&str, f64)> {
        match self {
            Files::One(name) => vec![(name, 1.0)],
            Files::Several(files) => files
                .iter()
                .map(|file| match file {
                    DataFile::Named(path) => (path.as_str(), 1.0),
                    DataFile::Weighted { path, weight } => (path.as_str(), *weight),
                })
                .collect(),
        }
    }

    /// True for this one name.
    pub fn is(&self, name: &str) -> bool {
        matches!(self, Files::One(one) if one == name)
    }
}

impl std::fmt::Display for Files {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<&str> = self.each().into_iter().map(|(name, _)| name).collect();
        f.write_str(&names.join(", "))
    }
}

/// See [`DataConfig::too_long`].
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum TooLong {
    /// It is refused.
    #[default]
    Error,
    /// Its end is cut off; of a pair that of the longer text.
    Cut,
    /// It goes on in sequences of its own: `text` alone.
    Split,
}
