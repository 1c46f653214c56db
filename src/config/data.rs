//! `[data]`: the training and validation data, and how they become sequences.

use serde::{Deserialize, Serialize};

use super::check::{must, refuse};
use super::{Config, OnResume};
use crate::error::Error;
use crate::models::Shape;

/// `[data]`
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct DataConfig {
    /// The training data: `built-in` (this project's own source and documentation), `random`
    /// tokens, a file, a folder of files, or a list of these. `.txt` and `.md` are text, read with
    /// the model's `tokenizer.json`, or as bytes if it has none. `.jsonl` (an object a line),
    /// `.json` (a list of objects), `.csv` and `.tsv` (with a line of names) and `.parquet` have
    /// records of one sequence each, in columns: `text` (with `text_pair`, and with `label` or,
    /// where a sequence may have several, `labels` for classification); `messages` or ShareGPT's
    /// `conversations`; `prompt` and `completion`, texts or messages; Alpaca's `instruction`,
    /// `input` and `output`; `tokens`, the words of a text, and `tags` (or `ner_tags`), a class for
    /// each, for classification of tokens; or `input_ids` (with `labels`, not shifted, where -100
    /// is not scored, or `label`, and `token_type_ids`). Other columns are not used. `.bin` is
    /// tokens of two bytes. An entry of a list is a name, or `{ path = "...", weight = 2.0 }`: an
    /// epoch then has each of its sequences that many times.
    pub train: Files,
    /// The validation data, in the same formats as `train`. Entries
    /// `{ path = "...", name = "..." }` of a list make several validation sets, one for each name,
    /// which are measured one by one.
    pub validation: Option<Files>,
    /// Instead of `validation`: the fraction of `train` that becomes the validation set, spread
    /// evenly over it. When absent, 0.1 for text files and 0 for other data.
    pub validation_split: Option<f64>,
    /// The columns of records that have other names in the data, for instance `text = "sentence"`.
    /// If records have the columns of several kinds, the kind that is named here is used.
    pub fields: FieldsConfig,
    /// With a loss of sentence embeddings: what comes before each text of a column, in training and
    /// validation, as in `anchor = "query: "` (`prompts` of sentence-transformers' trainer).
    pub prompts: PromptsConfig,
    /// Length of the longest sequence, in tokens; when absent, the model's `positions`, at most
    /// 1024.
    pub sequence_length: Option<usize>,
    /// Shuffles the sequences in each epoch.
    pub shuffle: bool,
    /// Puts sequences of about the same length into a batch: the sequences of every 50 shuffled
    /// batches (of an epoch, if it has fewer) are sorted by length. Micro-batches then take about
    /// the same time.
    pub group_by_length: bool,
    /// What happens to a sequence longer than `sequence_length`: `error` refuses it, `cut` cuts its
    /// end off, `split` continues it in further sequences, `drop` leaves its record out and counts
    /// it. A `.txt` or `.md` file is always split.
    pub too_long: TooLong,
    /// What happens to a record that cannot be used or of which nothing is learnt: a broken line,
    /// an unknown label, a text that is too long, labels that are all -100 or were all cut off.
    /// `error` refuses a record that cannot be used, and a batch without any label, before the run
    /// starts. `skip` leaves all such records out, counts them, and names the first few by file and
    /// line.
    pub bad_records: BadRecords,
    /// Packs several short texts into one sequence. They do not attend to each other, and each
    /// begins at position 0.
    pub packing: bool,
    /// With `packing`: the texts of a sequence attend to the texts before them, as one text with
    /// running positions.
    pub attend_across: bool,
    /// Adds the tokenizer's end-of-text token after each text of a causal model, so that it learns
    /// where texts end. A `completion` always gets it.
    pub end_of_text: bool,
    /// The date that a chat template writes (`strftime_now`), as in `"2026-01-31"`; when absent,
    /// the day on which the run starts.
    pub date: Option<String>,
    /// Fraction of the tokens that a masked language model must predict. 80 % of them are masked,
    /// 10 % are replaced by another token and 10 % stay; masks are drawn anew in each epoch.
    pub mask_probability: f64,
}

impl Default for DataConfig {
    fn default() -> DataConfig {
        DataConfig {
            train: DataConfig::BUILT_IN.into(),
            validation: None,
            validation_split: None,
            fields: FieldsConfig::default(),
            prompts: PromptsConfig::default(),
            sequence_length: None,
            shuffle: true,
            group_by_length: false,
            too_long: TooLong::Error,
            bad_records: BadRecords::Error,
            packing: false,
            attend_across: false,
            end_of_text: false,
            date: None,
            mask_probability: 0.15,
        }
    }
}

impl DataConfig {
    /// The name of the built-in corpus.
    pub const BUILT_IN: &str = "built-in";

    /// The data's fingerprint has the date, if a template writes it.
    pub(super) const ON_RESUME: OnResume = OnResume::free("date validation").with_changes(
        "attend_across bad_records end_of_text fields group_by_length mask_probability packing \
         prompts sequence_length shuffle too_long train validation_split",
    );

    pub(super) fn check(&self) -> Result<(), Error> {
        let split = self.validation_split.unwrap_or(0.0);
        must((0.0..1.0).contains(&split), "data.validation_split", "in [0, 1)")?;
        must(self.sequence_length != Some(0), "data.sequence_length", "at least 1")?;
        let mask = self.mask_probability;
        let be = "above 0 and at most 1";
        must(mask > 0.0 && mask <= 1.0, "data.mask_probability", be)?;
        let is_day = self.date.as_deref().is_none_or(is_day);
        must(is_day, "data.date", "a day, as in \"2026-01-31\"")?;
        let is_weight = |(_, weight): (&str, f64)| (1e-6..=1e6).contains(&weight);
        let have_weights = |files: &Files| files.each().into_iter().all(is_weight);
        let be = "of weights from 1e-6 to 1e6";
        must(have_weights(&self.train), "data.train", be)?;
        must(self.validation.as_ref().is_none_or(have_weights), "data.validation", be)?;
        let names = self.validation.as_ref().map(Files::names).unwrap_or_default();
        let named = names.iter().filter(|name| name.is_some()).count();
        must(
            named == 0 || named == names.len(),
            "data.validation",
            "entries that all have a name, or none",
        )?;
        must(!names.contains(&Some("")), "data.validation", "names that are not empty")?;
        let problem = "has an entry with a name: only validation sets have names";
        refuse(self.train.names().iter().any(Option::is_some), "data.train", problem)?;
        must(!self.train.each().is_empty(), "data.train", "at least one file")?;
        let problem = "needs texts that share a sequence: set data.packing";
        refuse(self.attend_across && !self.packing, "data.attend_across", problem)
    }
}

/// Whether a text is a day in the form `2026-01-31`.
fn is_day(text: &str) -> bool {
    let parts: Vec<Option<u32>> = text.split('-').map(|part| part.parse().ok()).collect();
    let [Some(year), Some(month), Some(day)] = parts[..] else { return false };
    let is_leap = year.is_multiple_of(4) && !year.is_multiple_of(100) || year.is_multiple_of(400);
    let days = match month {
        2 => 28 + u32::from(is_leap),
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    };
    text.len() == 10 && (1..=12).contains(&month) && (1..=days).contains(&day)
}

impl Config {
    /// The most tokens of a sequence.
    ///
    /// # Errors
    /// The model has fewer positions.
    pub fn sequence_length(&self, shape: &Shape) -> Result<usize, Error> {
        let positions = self.data.sequence_length.unwrap_or(shape.positions.min(1024));
        let most = shape.most_positions();
        if positions == 0 || positions > most {
            let problem =
                format_args!("is {positions}: it must be from 1 to the model's {most} positions");
            return Err(Error::config("data.sequence_length", problem));
        }
        Ok(positions)
    }
}

/// `[data.fields]`
#[derive(Clone, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct FieldsConfig {
    /// The column with the text.
    pub text: Option<String>,
    /// The column with the second text of a pair.
    pub text_pair: Option<String>,
    /// The column with the label, or the labels, of a sequence.
    pub label: Option<String>,
    /// The column with the messages of a chat.
    pub messages: Option<String>,
    /// The column with the prompt.
    pub prompt: Option<String>,
    /// The column with the completion of a prompt.
    pub completion: Option<String>,
    /// The column with an instruction.
    pub instruction: Option<String>,
    /// The column with the input of an instruction.
    pub input: Option<String>,
    /// The column with the output of an instruction.
    pub output: Option<String>,
    /// The column with the system message of a chat.
    pub system: Option<String>,
    /// The column with the words of a text.
    pub tokens: Option<String>,
    /// The column with a class for each word.
    pub tags: Option<String>,
    /// The column with token ids.
    pub input_ids: Option<String>,
    /// The column with the anchor, for losses of sentence embeddings.
    pub anchor: Option<String>,
    /// The column with the positive.
    pub positive: Option<String>,
    /// The column with the hard negative.
    pub negative: Option<String>,
}

impl FieldsConfig {
    /// The columns that have other names in the data, each with its own name and the other.
    pub(crate) fn named(&self) -> Vec<(&'static str, String)> {
        let all = [
            ("text", &self.text),
            ("text_pair", &self.text_pair),
            ("label", &self.label),
            ("messages", &self.messages),
            ("prompt", &self.prompt),
            ("completion", &self.completion),
            ("instruction", &self.instruction),
            ("input", &self.input),
            ("output", &self.output),
            ("system", &self.system),
            ("tokens", &self.tokens),
            ("tags", &self.tags),
            ("input_ids", &self.input_ids),
            ("anchor", &self.anchor),
            ("positive", &self.positive),
            ("negative", &self.negative),
        ];
        let named = all.into_iter().filter_map(|(ours, theirs)| Some((ours, theirs.clone()?)));
        named.collect()
    }
}

/// `[data.prompts]`
#[derive(Clone, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct PromptsConfig {
    /// What comes before each anchor.
    pub anchor: Option<String>,
    /// What comes before each positive.
    pub positive: Option<String>,
    /// What comes before each hard negative.
    pub negative: Option<String>,
}

impl PromptsConfig {
    /// The prompts with their keys.
    pub(crate) fn each(&self) -> [(&'static str, Option<&str>); 3] {
        let PromptsConfig { anchor, positive, negative } = self;
        [
            ("anchor", anchor.as_deref()),
            ("positive", positive.as_deref()),
            ("negative", negative.as_deref()),
        ]
    }
}

/// The names of data files: one, or a list.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(untagged, expecting = "expected a name, or a list of names and { path, weight, name }")]
pub enum Files {
    /// A name.
    One(String),
    /// A list of names.
    Several(Vec<DataFile>),
}

/// One entry of a list.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(untagged, expecting = "expected a name, or { path, weight, name }")]
pub enum DataFile {
    /// A name.
    Named(String),
    /// A file or a folder with its weight and its set.
    Described {
        /// The file or folder.
        path: String,
        /// How many times an epoch sees each of its sequences; 1 when absent.
        #[serde(default = "one")]
        weight: f64,
        /// The validation set that it belongs to.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        name: Option<String>,
    },
}

fn one() -> f64 {
    1.0
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
    /// The names with their weights.
    pub fn each(&self) -> Vec<(&str, f64)> {
        match self {
            Files::One(name) => vec![(name, 1.0)],
            Files::Several(files) => files
                .iter()
                .map(|file| match file {
                    DataFile::Named(path) => (path.as_str(), 1.0),
                    DataFile::Described { path, weight, .. } => (path.as_str(), *weight),
                })
                .collect(),
        }
    }

    /// The name of the validation set of each entry.
    pub(crate) fn names(&self) -> Vec<Option<&str>> {
        match self {
            Files::One(_) => vec![None],
            Files::Several(files) => files.iter().map(DataFile::set).collect(),
        }
    }

    /// The validation sets with their names and entries, in the order of their first entries.
    pub(crate) fn sets(&self) -> Vec<(Option<&str>, Files)> {
        let Files::Several(files) = self else { return vec![(None, self.clone())] };
        let mut sets: Vec<(Option<&str>, Vec<DataFile>)> = Vec::new();
        for file in files {
            match sets.iter_mut().find(|(name, _)| *name == file.set()) {
                Some((_, files)) => files.push(file.clone()),
                None => sets.push((file.set(), vec![file.clone()])),
            }
        }
        sets.into_iter().map(|(name, files)| (name, Files::Several(files))).collect()
    }

    /// True if `name` is the only name.
    pub fn is(&self, name: &str) -> bool {
        matches!(self, Files::One(one) if one == name)
    }
}

impl DataFile {
    /// The validation set that it belongs to.
    fn set(&self) -> Option<&str> {
        match self {
            DataFile::Described { name, .. } => name.as_deref(),
            DataFile::Named(_) => None,
        }
    }
}

impl std::fmt::Display for Files {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<&str> = self.each().into_iter().map(|(name, _)| name).collect();
        f.write_str(&names.join(", "))
    }
}

/// What happens to a sequence that is too long.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum TooLong {
    /// It is refused.
    #[default]
    Error,
    /// Its end is cut off. Of a pair, the end of the longer text is cut off.
    Cut,
    /// It continues in further sequences. Only for `text`.
    Split,
    /// The record that has it is left out, and counted.
    Drop,
}

/// What happens to a record that cannot be used.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum BadRecords {
    /// It is refused.
    #[default]
    Error,
    /// It is left out, and counted.
    Skip,
}
