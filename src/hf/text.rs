//! Messages, rendered chats and encoded text, as plain data.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// A message of a chat, read from `{"role", "content", ...}` or, as ShareGPT writes it, from
/// `{"from", "value"}`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Map<String, Value>")]
pub struct Message {
    /// The role of the author: `system`, `user`, `assistant` or `tool`.
    pub role: String,
    /// The text. `None` if an assistant only calls tools.
    pub content: Option<String>,
    /// All other keys, such as `tool_calls`. A chat template may read them.
    #[serde(flatten)]
    pub more: Map<String, Value>,
}

impl Message {
    /// A message with a text.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Message {
        Message { role: role.into(), content: Some(content.into()), more: Map::new() }
    }
}

impl TryFrom<Map<String, Value>> for Message {
    type Error = String;

    fn try_from(mut all: Map<String, Value>) -> Result<Message, String> {
        let is_sharegpt = !all.contains_key("role") && all.contains_key("from");
        let [role, content] = if is_sharegpt { ["from", "value"] } else { ["role", "content"] };
        let Some(Value::String(mut name)) = all.remove(role) else {
            return Err(
                "a message has no role: it needs role and content, or from and value".into()
            );
        };
        if is_sharegpt {
            let role = match &*name {
                "human" | "user" => "user",
                "gpt" | "chatgpt" | "bard" | "model" | "assistant" | "function_call" => "assistant",
                "observation" | "function_response" | "tool" => "tool",
                "system" => "system",
                _ => {
                    return Err(format!(
                        "a message is from {name:?}: it can be from human, gpt, chatgpt, bard, \
                         model, observation, function_response, system, user, assistant, tool, \
                         function_call"
                    ));
                }
            };
            name = role.into();
        }
        let content = match all.remove(content) {
            Some(Value::String(text)) => Some(text),
            Some(Value::Array(parts)) => Some(text_of(&parts)?),
            Some(Value::Null) | None if all.contains_key("tool_calls") => None,
            Some(Value::Null) | None => {
                return Err(format!("a message of {name:?} has no {content}"));
            }
            Some(_) => return Err(format!("{content} of a message of {name:?} is no text")),
        };
        Ok(Message { role: name, content, more: all })
    }
}

/// The text of a message in parts, which must all be text.
fn text_of(parts: &[Value]) -> Result<String, String> {
    let text = |part: &Value| match (part, &part["text"]) {
        (Value::String(text), _) | (_, Value::String(text)) => Ok(text.clone()),
        _ => Err(format!("content has a part of type {}: only text can be read", part["type"])),
    };
    parts.iter().map(text).collect()
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
}
