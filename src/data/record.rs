//! A record of data: the values of the columns with known names.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{DeserializeOwned, Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use serde_json::value::RawValue;

use super::json_error;
use crate::hf::{Message, RecordValue, list_of};

/// The label of a sequence or a word: a class, by number or name, or a value.
#[derive(Deserialize)]
#[serde(untagged, expecting = "it must be a number or a name")]
pub(super) enum Label {
    Number(f64),
    Name(String),
    /// A list, which is refused where a sequence or a word has one label.
    Several(Vec<Value>),
}

/// A prompt or a completion.
pub(super) enum Turns {
    Text(String),
    Messages(Vec<Message>),
}

impl<'de> Deserialize<'de> for Turns {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Turns, D::Error> {
        let raw = Box::<RawValue>::deserialize(deserializer)?;
        let turns = match raw.get().as_bytes().first() {
            Some(b'"') => serde_json::from_str(raw.get()).map(Turns::Text),
            Some(b'[') => serde_json::from_str(raw.get()).map(Turns::Messages),
            _ => {
                let what = "it must be a text, or a list of messages with role and content";
                return Err(D::Error::custom(what));
            }
        };
        turns.map_err(|error| D::Error::custom(json_error::of_value(raw.get(), &error)))
    }
}

/// The messages of a chat. A table of text has them as a JSON text.
struct Chat(Vec<Message>);

impl<'de> Deserialize<'de> for Chat {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Chat, D::Error> {
        let raw = Box::<RawValue>::deserialize(deserializer)?;
        let messages = match serde_json::from_str::<String>(raw.get()) {
            Ok(text) => serde_json::from_str(&text),
            Err(_) => serde_json::from_str(raw.get()),
        };
        messages
            .map(Chat)
            .map_err(|error| D::Error::custom(json_error::of_value(raw.get(), &error)))
    }
}

/// The JSON texts of columns by name. Each is read as the type that its column has, so that
/// nothing is lost in between.
pub(super) type ColumnTexts = BTreeMap<String, Box<RawValue>>;

/// The columns of a JSON object. Deserialization refuses a name that comes twice.
pub(super) struct Columns(pub(super) ColumnTexts);

impl<'de> Deserialize<'de> for Columns {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Columns, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = Columns;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Columns, A::Error> {
                let mut columns = BTreeMap::new();
                while let Some((name, value)) = access.next_entry::<String, Box<RawValue>>()? {
                    if columns.insert(name.clone(), value).is_some() {
                        return Err(A::Error::custom(format_args!("duplicate field `{name}`")));
                    }
                }
                Ok(Columns(columns))
            }
        }
        deserializer.deserialize_map(Object)
    }
}

/// The values of a record's columns. A column that the record does not have is `None`.
pub(super) struct Record {
    pub(super) text: Option<String>,
    pub(super) text_pair: Option<String>,
    pub(super) messages: Option<Vec<Message>>,
    pub(super) prompt: Option<Turns>,
    pub(super) completion: Option<Turns>,
    pub(super) instruction: Option<String>,
    pub(super) input: Option<String>,
    pub(super) output: Option<String>,
    /// The system message of a chat.
    pub(super) system: Option<String>,
    /// Descriptions of tools for the chat template, or null.
    pub(super) tools: RecordValue,
    /// The words of a text: the column `tokens`.
    pub(super) words: Option<Vec<String>>,
    /// A class for each word.
    pub(super) tags: Option<Vec<Label>>,
    pub(super) input_ids: Option<Vec<i64>>,
    pub(super) labels: Option<Vec<i64>>,
    pub(super) label: Option<Label>,
    pub(super) token_type_ids: Option<Vec<i64>>,
    /// Written by tokenizers. It must be all ones, because a record has no padding.
    pub(super) attention_mask: Option<Vec<i64>>,
    /// The columns that the data has, for messages.
    has: String,
}

/// The columns that decide the kind of a record, which has exactly one of them.
const KINDS: [&str; 6] = ["text", "messages", "prompt", "instruction", "tokens", "input_ids"];

impl Record {
    /// The record of these columns, and the names of the unused columns. `fields` has the columns
    /// with another name in the data: our name, and the data's.
    ///
    /// # Errors
    /// The column that is missing, or has a value of the wrong type.
    pub(super) fn of(
        mut columns: ColumnTexts,
        fields: &[(&'static str, String)],
    ) -> Result<(Record, Vec<String>), String> {
        let has = columns_of(&columns);
        let mut renamed = Vec::new();
        for (ours, theirs) in fields {
            let value = columns.remove(theirs).ok_or_else(|| {
                format!("column {theirs:?} is missing, which data.fields.{ours} names; {has}")
            })?;
            renamed.push((*ours, value));
        }
        let mut unused = Vec::new();
        // If the config names a kind, the columns of other kinds are not used.
        if fields.iter().any(|(ours, _)| KINDS.contains(ours)) {
            let others = KINDS.iter().filter_map(|kind| columns.remove_entry(*kind));
            unused.extend(others.map(|(name, _)| name));
        }
        columns.extend(renamed.into_iter().map(|(ours, value)| (ours.to_string(), value)));
        for (synonym, ours) in [("conversations", "messages"), ("ner_tags", "tags")] {
            if let Some(value) = columns.remove(synonym) {
                columns.entry(ours.into()).or_insert(value);
            }
        }
        let all = &mut columns;
        let record = Record {
            text: take(all, "text")?,
            text_pair: take(all, "text_pair")?,
            messages: take(all, "messages")?.map(|Chat(messages)| messages),
            prompt: take(all, "prompt")?,
            completion: take(all, "completion")?,
            instruction: take(all, "instruction")?,
            input: take(all, "input")?,
            output: take(all, "output")?,
            system: take(all, "system")?,
            tools: list_of(take(all, "tools")?.unwrap_or_default())
                .map_err(|what| format!("tools: {what}"))?,
            words: take(all, "tokens")?,
            tags: take(all, "tags")?,
            input_ids: take(all, "input_ids")?,
            labels: take(all, "labels")?,
            label: take(all, "label")?,
            token_type_ids: take(all, "token_type_ids")?,
            attention_mask: take(all, "attention_mask")?,
            has,
        };
        let is_pair = columns.contains_key("chosen") && columns.contains_key("rejected");
        if is_pair && record.completion.is_none() && record.messages.is_none() {
            return Err("chosen and rejected: to train on preferences set objective.kind, for \
                        example to \"simpo\"; to train on the chosen answers set \
                        data.fields.completion = \"chosen\", or data.fields.messages = \"chosen\" \
                        where it has the whole chat"
                .into());
        }
        unused.extend(columns.into_keys());
        Ok((record, unused))
    }

    /// The kind of the record: the one column of [`KINDS`] that it has.
    ///
    /// # Errors
    /// It has none of these columns, or several, or a column that belongs to another kind.
    pub(super) fn kind(&self) -> Result<&'static str, String> {
        let given = [
            self.text.is_some(),
            self.messages.is_some(),
            self.prompt.is_some(),
            self.instruction.is_some(),
            self.words.is_some(),
            self.input_ids.is_some(),
        ];
        let kinds = KINDS.iter().zip(given).filter(|(_, given)| *given);
        let kinds: Vec<&'static str> = kinds.map(|(kind, _)| *kind).collect();
        let [kind] = kinds[..] else {
            return Err(match kinds[..] {
                [] => self.lacks(
                    "it needs one of text, messages (or conversations), prompt with completion, \
                     instruction with output, tokens with tags, or input_ids; data.fields names \
                     columns that are called otherwise",
                ),
                [first, ..] => format!(
                    "it has {}: name the one to use, for example data.fields.{first} = {first:?}",
                    kinds.join(" and ")
                ),
            });
        };
        let others = [
            ("text_pair", self.text_pair.is_some(), "text"),
            ("completion", self.completion.is_some(), "prompt"),
            ("tags", self.tags.is_some(), "tokens"),
            ("labels", self.labels.is_some(), "input_ids"),
            ("token_type_ids", self.token_type_ids.is_some(), "input_ids"),
            ("attention_mask", self.attention_mask.is_some(), "input_ids"),
        ];
        match others.iter().find(|(_, is_given, of)| *is_given && *of != kind) {
            Some((name, _, of)) => Err(format!("{name} goes with {of}, not with {kind}")),
            None => Ok(kind),
        }
    }

    /// The message about a column that is missing, with the columns that are there.
    pub(super) fn lacks(&self, what: &str) -> String {
        format!("{what}; {}", self.has)
    }

    /// Columns that a record of this kind does not use.
    pub(super) fn unused(&self, kind: &str, scores_sequences: bool) -> Vec<&'static str> {
        let is_alpaca = kind == "instruction";
        let is_chat = is_alpaca || kind == "messages" || kind == "prompt";
        let columns = [
            ("input", self.input.is_some() && !is_alpaca),
            ("output", self.output.is_some() && !is_alpaca),
            ("system", self.system.is_some() && !is_chat),
            ("tools", !self.tools.is_null() && !is_chat),
            ("label", self.label.is_some() && !scores_sequences),
        ];
        columns.into_iter().filter(|(_, is)| *is).map(|(name, _)| name).collect()
    }

    /// The messages, after the message of the column `system` if there is one.
    pub(super) fn with_system(&self, mut messages: Vec<Message>) -> Vec<Message> {
        if let Some(system) = self.system.as_ref().filter(|system| !system.is_empty()) {
            messages.insert(0, Message::new("system", system.clone()));
        }
        messages
    }
}

/// A sentence about the columns of a record. Quotation marks show spaces around a name.
pub(super) fn columns_of(columns: &ColumnTexts) -> String {
    /// A message with more names than these is no help.
    const NAMED: usize = 20;
    let named = columns.iter().take(NAMED).map(|(name, value)| match value.get() {
        "null" => format!("{name:?} (empty)"),
        _ => format!("{name:?}"),
    });
    let mut names: Vec<String> = named.collect();
    if columns.len() > NAMED {
        names.push(format!("{} more", columns.len() - NAMED));
    }
    let has_spaces = columns.keys().any(|name| name.trim() != name);
    let hint = if has_spaces { ": leave the spaces around names out" } else { "" };
    match names.is_empty() {
        true => "the record is empty".into(),
        false => format!("the record has {}{hint}", names.join(", ")),
    }
}

/// Takes a column. A null means that the value is missing.
pub(super) fn take<T: DeserializeOwned>(
    columns: &mut ColumnTexts,
    name: &str,
) -> Result<Option<T>, String> {
    let value = columns.remove(name).filter(|value| value.get() != "null");
    let read = |value: Box<RawValue>| {
        let problem = |error| format!("{name}: {}", json_error::of_value(value.get(), &error));
        serde_json::from_str(value.get()).map_err(problem)
    };
    value.map(read).transpose()
}
