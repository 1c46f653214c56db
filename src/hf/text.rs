//! Messages, rendered chats and encoded text, as plain data.

use std::ops::Range;

use serde::{Deserialize, Serialize, Serializer};

use super::record_value::RecordValue;

/// A message of a chat, read from `{"role", "content", ...}` or, as ShareGPT writes it, from
/// `{"from", "value"}`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(try_from = "RecordValue")]
pub struct Message {
    /// The role of the author: `system`, `user`, `assistant` or `tool`.
    pub role: String,
    /// The text. `None` if an assistant only calls tools.
    pub content: Option<String>,
    /// All other keys, such as `tool_calls`. A chat template may read them.
    pub more: Vec<(String, RecordValue)>,
    /// True if an assistant's message is context, and not an answer to learn.
    pub is_context: bool,
    /// The places of `role` and `content` among the keys of the data. Equal places mean that
    /// `content` follows `role`.
    pub places: [usize; 2],
}

/// The names of an assistant's thoughts in the data. Templates read the first.
const THOUGHTS: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// Keys that say whether a message is learnt: of OpenAI's format, Axolotl's and ms-swift's.
const SCORES: [&str; 3] = ["weight", "train", "loss"];

impl Message {
    /// A message with a text.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Message {
        Message { role: role.into(), content: Some(content.into()), ..Message::default() }
    }

    /// The keys and values that a chat template sees, in the order of the data. As in
    /// transformers, a key without a value is left out, and thoughts have two names.
    fn fields(&self) -> Vec<(&str, Field<'_>)> {
        let mut all: Vec<(&str, Field<'_>)> =
            self.more.iter().map(|(key, value)| (&**key, Field::Value(value))).collect();
        let role = Some(("role", Field::Text(&self.role)));
        let content = self.content.as_ref().map(|text| ("content", Field::Text(text)));
        let [role_at, content_at] = self.places;
        let content_at = content_at + usize::from(content_at == role_at);
        let mut own = [(role_at, role), (content_at, content)];
        own.sort_by_key(|(place, _)| *place);
        for (place, field) in own {
            field.into_iter().for_each(|field| all.insert(place.min(all.len()), field));
        }
        all.retain(|(_, field)| !matches!(field, Field::Value(RecordValue::Null)));
        let named = |key: &&str| all.iter().find(|(name, _)| name == key).map(|(_, value)| *value);
        if let Some(thoughts) = THOUGHTS.iter().find_map(named) {
            let thinking = named(&THOUGHTS[1]).unwrap_or(thoughts);
            all.retain(|(key, _)| *key != THOUGHTS[1]);
            all.insert(0, (THOUGHTS[1], thinking));
            match all.iter_mut().find(|(key, _)| *key == THOUGHTS[0]) {
                Some((_, value)) => *value = thoughts,
                None => all.push((THOUGHTS[0], thoughts)),
            }
        }
        all
    }
}

/// A value of a message.
#[derive(Clone, Copy, Serialize)]
#[serde(untagged)]
enum Field<'a> {
    Text(&'a str),
    Value(&'a RecordValue),
}

impl Serialize for Message {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.fields())
    }
}

impl TryFrom<RecordValue> for Message {
    type Error = String;

    fn try_from(value: RecordValue) -> Result<Message, String> {
        let RecordValue::Object(mut all) = value else {
            return Err("a message is no object with role and content".into());
        };
        let has = |key: &str| all.iter().any(|(name, _)| name == key);
        let is_sharegpt = !has("role") && has("from");
        let calls_tools = has("tool_calls");
        let [role, content] = if is_sharegpt { ["from", "value"] } else { ["role", "content"] };
        let scores = SCORES.map(|key| take(&mut all, key));
        let place = |key: &str| all.iter().position(|(name, _)| name == key).unwrap_or(all.len());
        let places = [place(role), place(content)];
        let Some(RecordValue::Text(name)) = take(&mut all, role) else {
            return Err(
                "a message has no role: it needs role and content, or from and value".into()
            );
        };
        let role = if is_sharegpt { role_of(&name)?.to_string() } else { name };
        let content = match take(&mut all, content) {
            Some(RecordValue::Text(text)) => Some(text),
            Some(RecordValue::List(parts)) => Some(text_of(&parts)?),
            Some(RecordValue::Null) | None if calls_tools => None,
            Some(RecordValue::Null) | None => {
                return Err(format!("a message of {role:?} has no {content}"));
            }
            Some(_) => return Err(format!("{content} of a message of {role:?} is no text")),
        };
        if let Some((_, calls)) = all.iter_mut().find(|(key, _)| key == "tool_calls") {
            *calls =
                list_of(std::mem::take(calls)).map_err(|what| format!("tool_calls: {what}"))?;
        }
        if all.iter().any(|(key, value)| key == "train_detail" && !value.is_null()) {
            return Err("train_detail: parts of a message cannot be trained; train or weight \
                        apply to a whole message"
                .into());
        }
        let is_context = is_context(&role, scores)?;
        Ok(Message { role, content, more: all, is_context, places })
    }
}

/// Takes the value of a key.
fn take(all: &mut Vec<(String, RecordValue)>, key: &str) -> Option<RecordValue> {
    let place = all.iter().position(|(name, _)| name == key)?;
    Some(all.remove(place).1)
}

/// Whether a message is not learnt, by the values of [`SCORES`].
fn is_context(role: &str, scores: [Option<RecordValue>; 3]) -> Result<bool, String> {
    let mut is_context = false;
    for (key, value) in SCORES.iter().zip(scores) {
        let is_scored = match value {
            None | Some(RecordValue::Null) => continue,
            Some(RecordValue::Bool(is_scored)) => is_scored,
            Some(RecordValue::Integer(weight @ 0..=1)) => weight == 1,
            Some(RecordValue::Float(weight)) if weight == 0.0 || weight == 1.0 => weight == 1.0,
            Some(other) => {
                let other = serde_json::to_string(&other).unwrap_or_default();
                return Err(format!(
                    "{key} of a message of {role:?} is {other}: it can be 1 (or true) for an \
                     answer to learn, and 0 (or false) for context"
                ));
            }
        };
        if is_scored && role != "assistant" && *key == "train" {
            return Err(format!(
                "train of a message of {role:?} is true: only the assistant's messages can be \
                 learnt"
            ));
        }
        is_context |= !is_scored;
    }
    Ok(is_context)
}

/// The role of a message by ShareGPT's name of its author.
fn role_of(name: &str) -> Result<&'static str, String> {
    Ok(match name {
        "human" | "user" => "user",
        "gpt" | "chatgpt" | "bard" | "model" | "assistant" | "function_call" => "assistant",
        "observation" | "function_response" | "tool" => "tool",
        "system" => "system",
        _ => {
            return Err(format!(
                "a message is from {name:?}: it can be from human, gpt, chatgpt, bard, model, \
                 observation, function_response, system, user, assistant, tool, function_call"
            ));
        }
    })
}

/// A list of objects, which may be given as a JSON text: columns of tables have no other way to
/// keep objects with different keys.
pub(crate) fn list_of(value: RecordValue) -> Result<RecordValue, String> {
    let value = match value {
        RecordValue::Text(text) => RecordValue::parse(&text)
            .map_err(|error| format!("it is a text, which must be a list in JSON: {error}"))?,
        other => other,
    };
    match &value {
        RecordValue::Null => Ok(value),
        RecordValue::List(items)
            if items.iter().all(|item| matches!(item, RecordValue::Object(_))) =>
        {
            Ok(value)
        }
        _ => Err("it must be a list of objects, or such a list as a JSON text".into()),
    }
}

/// The text of a message in parts, which must all be text.
fn text_of(parts: &[RecordValue]) -> Result<String, String> {
    let text = |part: &RecordValue| {
        let text = part.as_str().or_else(|| part.get("text")?.as_str());
        text.map(str::to_string)
    };
    let kind = |part: &RecordValue| {
        let kind = part.get("type").cloned().unwrap_or_default();
        format!(
            "content has a part of type {}: only text can be read",
            serde_json::to_string(&kind).unwrap_or_default()
        )
    };
    parts.iter().map(|part| text(part).ok_or_else(|| kind(part))).collect()
}

/// A text as tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Encoded {
    /// Token ids.
    pub tokens: Vec<u32>,
    /// The type of each token (`token_type_ids`).
    pub kinds: Vec<u8>,
    /// The range of bytes of the text that each token covers. Empty for special tokens that the
    /// tokenizer added.
    pub spans: Vec<(usize, usize)>,
}

/// A chat as text, rendered by a chat template.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RenderedChat {
    /// The whole text.
    pub text: String,
    /// The ranges of bytes that the assistant wrote.
    pub assistant: Vec<Range<usize>>,
    /// The ranges of answers that cannot be learnt: the template writes another text once later
    /// messages follow. A range is empty if the answer's text is not in the chat.
    pub not_found: Vec<Range<usize>>,
}
