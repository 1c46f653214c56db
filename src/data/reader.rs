//! Turns a record, such as a line of a `.jsonl` file, into sequences. The kinds of records are
//! texts, chats, instructions, prompts with completions, words with tags, and token ids.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Mutex;

use super::chats::NotFound;
use super::json_error;
use super::known::no_class;
use super::pairs::Pair;
use super::record::{ColumnTexts, Columns, Label, Record, Turns};
use super::texts::Prompt;
use super::vocabulary::{SpecialTokens, Vocabulary};
use super::{OwnLabel, Predicts, Sequence};
use crate::config::{BadRecords, ReferenceKind, ScoreRecord, TextRecord, TooLong};
use crate::hf::Encoded;
use crate::objectives::Preference;

/// The problem of a record without a label.
pub(super) const NOTHING_LEARNT: &str =
    "nothing of it is learnt: the part to learn is empty or was cut off";

/// The end of the problem of a record that is too long and is left out.
pub(super) const DROPPED: &str = "data.too_long = \"drop\" leaves it out";

/// What to do about such records.
pub(super) const SKIP_THEM: &str = "data.bad_records = \"skip\" leaves such records out";

/// Turns records into sequences, by these settings of the model and the config.
pub(super) struct Reader {
    pub(super) vocabulary: Vocabulary,
    /// The size of the model's vocabulary.
    pub(super) tokens: usize,
    /// The most tokens of a sequence.
    pub(super) positions: usize,
    pub(super) too_long: TooLong,
    pub(super) bad_records: BadRecords,
    pub(super) end_of_text: bool,
    /// The preference loss, if a record is a pair of answers.
    pub(super) preference: Option<Preference>,
    /// Where the preference's reference comes from, if the config says it.
    pub(super) reference: Option<ReferenceKind>,
    /// The texts of a record, for a loss of sentence embeddings.
    pub(super) texts: Option<TextRecord>,
    /// What comes before its anchor, its positive and each of its negatives.
    pub(super) prompts: [Prompt; 3],
    /// The record of a loss of scores.
    pub(super) scored: Option<ScoreRecord>,
    /// The number of the model's token types.
    pub(super) kinds: usize,
    pub(super) predicts: Predicts,
    /// The number of the model's classes.
    pub(super) classes: usize,
    /// The names of the classes, if they have any.
    pub(super) names: Vec<String>,
    /// Columns that have another name in the data: our name, and the data's.
    pub(super) fields: Vec<(&'static str, String)>,
    /// The columns met so far that are not used.
    pub(super) unused: Mutex<BTreeSet<String>>,
    /// The answers met so far that cannot be learnt.
    pub(super) not_found: Mutex<NotFound>,
    /// Whether the config has the date that a chat template writes.
    pub(super) has_date: bool,
}

/// The columns of a line of JSON.
pub(super) fn columns_of_line(line: &str) -> Result<ColumnTexts, String> {
    if line.is_empty() {
        return Err("it is empty: each line must be a JSON object".into());
    }
    if !line.starts_with('{') {
        return Err("it is not a JSON object".into());
    }
    let columns = serde_json::from_str(line);
    let Columns(columns) = columns.map_err(|error| json_error::explain(line, &error))?;
    Ok(columns)
}

impl Reader {
    /// Reads a line of JSON. It becomes one sequence, unless a long text is split.
    pub(super) fn read(&self, line: &str) -> Result<Vec<Sequence>, String> {
        self.read_record(columns_of_line(line)?)
    }

    /// Reads a record, which is given as the JSON texts of its columns by name.
    pub(super) fn read_record(&self, columns: ColumnTexts) -> Result<Vec<Sequence>, String> {
        let sequences = self.sequences(columns)?;
        sequences.iter().try_for_each(|one| self.check_known(&one.tokens))?;
        Ok(sequences)
    }

    fn sequences(&self, mut columns: ColumnTexts) -> Result<Vec<Sequence>, String> {
        match (self.predicts, self.texts, self.scored) {
            (Predicts::Embedding, Some(record), _) => {
                return Ok(vec![self.text_record(columns, record)?]);
            }
            (Predicts::Embedding, None, _) => {
                let what = "this model makes embeddings, and records of texts are read for a loss \
                            of them: set objective.kind = \"contrastive\"";
                return Err(what.into());
            }
            (_, _, Some(record)) => return Ok(vec![self.scored_record(columns, record)?]),
            _ => {}
        }
        let set = match self.predicts {
            Predicts::LabelSet => Some(self.take_label_set(&mut columns)?),
            _ => None,
        };
        let pair = self.preference.map(|_| Pair::take(&mut columns)).transpose()?;
        let (record, mut unused) = Record::of(columns, &self.fields)?;
        if let (Some(pair), Some(preference)) = (pair, self.preference) {
            self.unused.lock().expect("nothing panics inside").extend(unused);
            return Ok(vec![self.pair(&record, pair, preference)?]);
        }
        let kind = record.kind()?;
        let unused_by_kind = record.unused(kind, self.scores_sequences());
        unused.extend(unused_by_kind.into_iter().map(str::to_string));
        if !unused.is_empty() {
            self.unused.lock().expect("nothing panics inside").extend(unused);
        }
        let label = match (self.scores_sequences(), record.label.as_ref()) {
            _ if set.is_some() => set.map(OwnLabel::Set),
            (true, None) => {
                let what = "label is missing: this model is trained on one label for each sequence";
                return Err(record.lacks(what));
            }
            (true, Some(label)) => Some(OwnLabel::One(self.label(label)?)),
            (false, _) => None,
        };
        let sequence = match kind {
            "input_ids" => self.ids(record, label),
            "tokens" => self.words(&record),
            _ if self.predicts == Predicts::TokenClass => Err(format!(
                "{kind}: this model classifies tokens; give tokens (words) with tags, or \
                 input_ids with labels"
            )),
            "text" => return self.text(&record, label),
            _ if self.predicts != Predicts::Next => Err(format!(
                "{kind}: this model does not predict the next token; give text or input_ids"
            )),
            "messages" => {
                let messages = record.with_system(record.messages.clone().unwrap_or_default());
                self.chat(&[], &messages, &record.tools)
            }
            "instruction" => self.instruction(&record),
            _ => self.prompted(&record),
        };
        Ok(vec![sequence?])
    }

    /// A record of a prompt and its completion.
    pub(super) fn prompted(&self, record: &Record) -> Result<Sequence, String> {
        match (&record.prompt, &record.completion) {
            (_, None) => Err(record.lacks("completion is missing")),
            (Some(Turns::Messages(prompt)), Some(Turns::Messages(completion))) => {
                let prompt = record.with_system(prompt.clone());
                self.chat(&prompt, completion, &record.tools)
            }
            (Some(Turns::Text(prompt)), Some(Turns::Text(completion))) => {
                self.completion(prompt, completion)
            }
            _ => Err("prompt and completion: both must be texts, or both messages".into()),
        }
    }

    /// Whether an end token is appended to each text.
    fn ends_text(&self) -> bool {
        self.end_of_text && self.predicts == Predicts::Next
    }

    /// Whether the model has one label for each sequence.
    fn scores_sequences(&self) -> bool {
        matches!(self.predicts, Predicts::Class | Predicts::Value | Predicts::LabelSet)
    }

    /// The number of a class, or the bits of a value (f32).
    fn label(&self, label: &Label) -> Result<i32, String> {
        match (self.predicts, label) {
            (Predicts::TokenClass, Label::Number(-100.0)) => Ok(-100),
            (Predicts::Value, Label::Number(value)) if (*value as f32).is_finite() => {
                Ok((*value as f32).to_bits() as i32)
            }
            (Predicts::Value, Label::Number(value)) => {
                Err(format!("label {value} is not a finite number"))
            }
            (Predicts::Value, Label::Name(name)) if name.parse::<f64>().is_ok() => {
                self.label(&Label::Number(name.parse().expect("it was parsed")))
            }
            (Predicts::Value, Label::Name(name)) => {
                Err(format!("label {name:?} is not a number, and this model predicts a value"))
            }
            (_, Label::Several(list)) => Err(format!(
                "label: it must be a number or a name, and it is a list of {}; a sequence has \
                 several labels with model.problem_type = \"multi_label_classification\"",
                list.len()
            )),
            (_, Label::Number(number)) => self.class_of_number(*number),
            (_, Label::Name(name)) => {
                let class = self.names.iter().position(|known| known == name);
                // In a table, each number is a text.
                if let (None, Ok(number)) = (class, name.parse()) {
                    return self.label(&Label::Number(number));
                }
                class.map(|class| class as i32).ok_or_else(|| {
                    if self.names.is_empty() {
                        format!(
                            "label {name:?}: the classes have no names: list them in model.labels"
                        )
                    } else {
                        format!("label {name:?} is none of {}", self.names.join(", "))
                    }
                })
            }
        }
    }

    /// A record of `text`, perhaps with a `text_pair` and a `label`.
    fn text(&self, line: &Record, label: Option<OwnLabel>) -> Result<Vec<Sequence>, String> {
        let text = line.text.as_deref().unwrap_or_default();
        if text.is_empty() {
            return Err("text is empty".into());
        }
        if line.text_pair.is_some() && label.is_none() {
            return Err("text_pair: only models that classify sequences read pairs of texts".into());
        }
        let pair = line.text_pair.as_deref();
        let encoded = match (self.vocabulary.tokenizer(), self.too_long) {
            (Some(tokenizer), TooLong::Cut) if !self.ends_text() => {
                tokenizer.encode_cut(text, pair, self.positions)?
            }
            _ => self.vocabulary.encode(text, pair, true)?,
        };
        let Encoded { mut tokens, kinds, .. } = encoded;
        let kinds = if self.kinds > 1 { kinds } else { Vec::new() };
        if let Some(label) = label {
            self.check_length(tokens.len())?;
            return Ok(vec![Sequence::with_label(tokens, label, kinds)]);
        }
        if self.ends_text() {
            self.push_end(&mut tokens)?;
        }
        if tokens.len() <= self.positions {
            return Ok(vec![self.plain(tokens, kinds)]);
        }
        match self.too_long {
            TooLong::Split => self.split(text, tokens),
            TooLong::Cut => {
                tokens.truncate(self.positions);
                Ok(vec![self.plain(tokens, Vec::new())])
            }
            TooLong::Error | TooLong::Drop => Err(self.length_error(tokens.len())),
        }
    }

    /// A sequence of text. A causal model scores all of it; a masked one draws masks later.
    fn plain(&self, tokens: Vec<u32>, kinds: Vec<u8>) -> Sequence {
        match self.predicts {
            Predicts::Own => Sequence::unmasked(tokens, kinds),
            _ => Sequence { kinds, ..Sequence::plain(tokens) },
        }
    }

    /// Splits a text that is too long into several sequences.
    fn split(&self, text: &str, tokens: Vec<u32>) -> Result<Vec<Sequence>, String> {
        let SpecialTokens { before, after } = self.vocabulary.special_tokens()?;
        let (inner, room) = match self.predicts {
            // For a masked language model each sequence is a text, with special tokens around it.
            Predicts::Own => {
                let room = self.positions.saturating_sub(before.len() + after.len());
                (self.vocabulary.encode(text, None, false)?.tokens, room)
            }
            _ => (tokens, self.positions),
        };
        if room == 0 {
            return Err(format!(
                "data.sequence_length of {} leaves no room for text",
                self.positions
            ));
        }
        let piece = |piece: &[u32]| match self.predicts {
            Predicts::Own => [&before, piece, &after].concat(),
            _ => piece.to_vec(),
        };
        Ok(inner.chunks(room).map(|tokens| self.plain(piece(tokens), Vec::new())).collect())
    }

    /// Appends the token that ends a text (`eos_token`), unless the text already ends with it.
    pub(super) fn push_end(&self, tokens: &mut Vec<u32>) -> Result<(), String> {
        match self.vocabulary.end() {
            Some(end) if tokens.last() == Some(&end) => Ok(()),
            Some(end) => {
                tokens.push(end);
                Ok(())
            }
            None => Err("the tokenizer has no eos_token: set data.end_of_text = false".into()),
        }
    }

    /// A prompt and its completion. Only the completion is scored.
    pub(super) fn completion(&self, prompt: &str, completion: &str) -> Result<Sequence, String> {
        if completion.is_empty() {
            return Err("completion is empty".into());
        }
        let text = [prompt, completion].concat();
        let mut encoded = self.vocabulary.encode(&text, None, true)?;
        let completion = prompt.len()..text.len();
        if self.vocabulary.end().is_some() {
            self.push_end(&mut encoded.tokens)?;
            // The end token belongs to the completion, even if the tokenizer has added it.
            encoded.spans.truncate(encoded.tokens.len() - 1);
            encoded.spans.push((completion.start, completion.end));
        }
        self.score_only(encoded, &[completion])
    }

    /// A sequence in which, for each of these ranges of the text, all tokens from the first to the
    /// last with bytes in it are scored. A token between them may cover no bytes, as a space that
    /// the tokenizer inserts.
    pub(super) fn score_only(
        &self,
        encoded: Encoded,
        ranges: &[Range<usize>],
    ) -> Result<Sequence, String> {
        let Encoded { mut tokens, spans, .. } = encoded;
        let mut is_scored = vec![false; spans.len()];
        for range in ranges {
            let covers =
                |&(from, to): &(usize, usize)| from < to && from < range.end && range.start < to;
            let first = spans.iter().position(covers);
            let last = spans.iter().rposition(covers);
            if let Some((first, last)) = first.zip(last) {
                is_scored[first..=last].fill(true);
            }
        }
        tokens.truncate(self.kept(tokens.len())?);
        let labels = tokens.iter().zip(is_scored);
        let labels: Vec<i32> =
            labels.map(|(&token, is_scored)| if is_scored { token as i32 } else { -100 }).collect();
        let sequence = Sequence { tokens, labels, ..Sequence::default() };
        if sequence.labelled(self.predicts) == 0 {
            return Err(NOTHING_LEARNT.into());
        }
        Ok(sequence)
    }

    /// The number of tokens that are kept of a sequence of `tokens`.
    fn kept(&self, tokens: usize) -> Result<usize, String> {
        if self.too_long != TooLong::Cut {
            self.check_length(tokens)?;
        }
        Ok(tokens.min(self.positions))
    }

    /// Refuses a sequence that is too long.
    fn check_length(&self, tokens: usize) -> Result<(), String> {
        if tokens <= self.positions { Ok(()) } else { Err(self.length_error(tokens)) }
    }

    pub(super) fn length_error(&self, tokens: usize) -> String {
        let most = self.positions;
        let what = format!("it has {tokens} tokens, and data.sequence_length allows {most}: ");
        let remedy = match self.too_long {
            TooLong::Drop => DROPPED,
            _ => "set data.too_long = \"cut\" to cut the rest off",
        };
        what + remedy
    }

    /// The words of a text with a class for each. The first token of a word has the word's class;
    /// all other tokens are not scored.
    fn words(&self, record: &Record) -> Result<Sequence, String> {
        if self.predicts != Predicts::TokenClass {
            return Err(
                "tokens: this model does not classify tokens; give text or input_ids".into()
            );
        }
        let words = record.words.as_deref().unwrap_or_default();
        let missing = || record.lacks("tags is missing: a class for each of tokens");
        let tags = record.tags.as_deref().ok_or_else(missing)?;
        if words.is_empty() || words.len() != tags.len() {
            return Err(format!("{} tags for {} tokens", tags.len(), words.len()));
        }
        let tags = tags.iter().map(|tag| self.label(tag)).collect::<Result<Vec<_>, _>>()?;
        let tokenizer = self.vocabulary.tokenizer();
        let tokenizer = tokenizer.ok_or("tokens: words need a model with a tokenizer.json")?;
        let (Encoded { mut tokens, mut kinds, .. }, begins) = tokenizer.encode_words(words)?;
        tokens.truncate(self.kept(tokens.len())?);
        kinds.truncate(if self.kinds > 1 { tokens.len() } else { 0 });
        let label = |word: &Option<usize>| word.map_or(-100, |word| tags[word]);
        let labels: Vec<i32> = begins[..tokens.len()].iter().map(label).collect();
        Ok(Sequence { tokens, labels, kinds, ..Sequence::default() })
    }

    /// A record of `input_ids`, perhaps with `labels` or a `label`.
    fn ids(&self, line: Record, label: Option<OwnLabel>) -> Result<Sequence, String> {
        let Record { input_ids, labels, token_type_ids, attention_mask, .. } = line;
        let mut ids = input_ids.unwrap_or_default();
        match (&labels, &label) {
            (Some(_), Some(_)) => {
                return Err("labels: this model is trained on one label for each sequence".into());
            }
            (None, None) if self.predicts == Predicts::TokenClass => {
                return Err("labels is missing: a class for each of input_ids, or -100".into());
            }
            (None, None) if self.predicts == Predicts::Own => {
                let what = "labels is missing: the original tokens at masked positions, and -100 \
                            elsewhere";
                return Err(what.into());
            }
            _ => {}
        }
        if attention_mask.is_some_and(|mask| mask != vec![1; ids.len()]) {
            return Err("attention_mask is not all ones: leave padding out of input_ids".into());
        }
        let mut labels = labels.unwrap_or_else(|| ids.clone());
        if ids.is_empty() {
            return Err("input_ids is empty".into());
        }
        if labels.len() != ids.len() {
            return Err(format!("{} labels for {} input_ids", labels.len(), ids.len()));
        }
        let mut types = token_type_ids.unwrap_or_default();
        if !types.is_empty() && types.len() != ids.len() {
            return Err(format!("{} token_type_ids for {} input_ids", types.len(), ids.len()));
        }
        let kinds = self.kinds;
        let is_kind = |kind: &i64| (0..kinds.clamp(1, 256) as i64).contains(kind);
        if let Some((at, kind)) = types.iter().enumerate().find(|(_, kind)| !is_kind(kind)) {
            return Err(format!("token type {kind} at {at}: the model has {kinds} types"));
        }
        let kept = self.kept(ids.len())?;
        ids.truncate(kept);
        labels.truncate(kept);
        types.truncate(kept);
        self.check_ids(&ids, &labels)?;
        let tokens: Vec<u32> = ids.into_iter().map(|id| id as u32).collect();
        let kinds: Vec<u8> = types.into_iter().map(|kind| kind as u8).collect();
        if let Some(label) = label {
            return Ok(Sequence::with_label(tokens, label, kinds));
        }
        let labels = labels.into_iter().map(|label| label as i32).collect();
        Ok(Sequence { tokens, labels, kinds, ..Sequence::default() })
    }

    /// Refuses tokens and labels that are not in the vocabulary.
    fn check_ids(&self, ids: &[i64], labels: &[i64]) -> Result<(), String> {
        let vocabulary = self.tokens;
        let is_token = |id: &i64| (0..vocabulary as i64).contains(id);
        if let Some((at, id)) = ids.iter().enumerate().find(|(_, id)| !is_token(id)) {
            return Err(format!("token {id} at {at} is outside the vocabulary of {vocabulary}"));
        }
        if self.predicts == Predicts::TokenClass {
            let classes = self.classes;
            let is_class = |label: &&i64| **label == -100 || (0..classes as i64).contains(*label);
            return match labels.iter().find(|label| !is_class(label)) {
                Some(label) => Err(no_class(label, classes)),
                None => Ok(()),
            };
        }
        let is_label = |label: &i64| *label == -100 || is_token(label);
        if let Some((at, id)) = labels.iter().enumerate().find(|(_, id)| !is_label(id)) {
            return Err(format!("label {id} at {at} is outside the vocabulary of {vocabulary}"));
        }
        Ok(())
    }
}
