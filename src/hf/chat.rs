//! Chat templates: render a chat as text, and find the part of it that the assistant wrote.
//!
//! A template may mark that part, from `{% generation %}` to `{% endgeneration %}`. Without marks,
//! it is what each message of the assistant adds to the prompt before it. Templates are rendered
//! as transformers renders them.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use minijinja::context;
use serde_json::{Map, Value};

use super::caught::caught;
use super::chat_source::{MARKS, Source, templates};
use super::clock::Clock;
use super::companions::MORE_TEMPLATES;
use super::metered;
use super::record_value::RecordValue;
use super::text::{Message, RenderedChat};
use crate::error::Error;

fn is_assistant(message: &Message) -> bool {
    message.role == "assistant"
}

/// The tags around the thoughts of models. A template may put an empty pair before an answer.
const THOUGHTS: [[&str; 2]; 6] = [
    ["<think>", "</think>"],
    ["<thinking>", "</thinking>"],
    ["<seed:think>", "</seed:think>"],
    ["<|START_THINKING|>", "<|END_THINKING|>"],
    ["[THINK]", "[/THINK]"],
    ["\u{25c1}think\u{25b7}", "\u{25c1}/think\u{25b7}"],
];

/// The chat template of a model: one for all chats, or one for chats with tools and one for others.
#[derive(Clone)]
pub struct Template {
    /// The template called `default`, or why there is none.
    default: Result<Source, String>,
    /// The template called `tool_use`.
    tool_use: Option<Source>,
    special_tokens: Map<String, Value>,
    clock: Arc<Clock>,
}

impl Template {
    /// Reads the templates of a directory: `chat_template.jinja` and the files of
    /// `additional_chat_templates`, or else those of `tokenizer_config.json`. `None` if the
    /// directory has no template.
    pub(super) fn open(
        directory: &Path,
        special_tokens: &Map<String, Value>,
    ) -> Result<Option<Template>, Error> {
        let mut all = templates(directory)?;
        if all.is_empty() {
            return Ok(None);
        }
        let names = Vec::from_iter(all.keys().cloned()).join(", ");
        let clock = Arc::new(Clock::default());
        let source = |text| Source::new(text, clock.clone());
        let tool_use = all.remove("tool_use").map(source).transpose()?;
        let none = format!(
            "{}: of its chat templates ({names}) none is called \"default\": that one is for chats \
             without tools",
            directory.display()
        );
        let default = all.remove("default").map(source).transpose()?.ok_or(none);
        let special_tokens = special_tokens.clone();
        Ok(Some(Template { default, tool_use, special_tokens, clock }))
    }

    /// The day on which the template's `strftime_now` is called.
    pub(super) fn clock(&self) -> &Clock {
        &self.clock
    }

    /// The texts of templates in the folder of further ones, for the tokenizer's digest.
    pub(super) fn texts_of_more_files(&self) -> impl Iterator<Item = &str> {
        let all = self.default.iter().chain(&self.tool_use);
        all.filter(|one| one.place.contains(MORE_TEMPLATES)).map(|one| &*one.text)
    }

    /// The template for a chat with these tools, or without tools.
    fn source(&self, tools: &RecordValue) -> Result<&Source, String> {
        match self.tool_use.as_ref().filter(|_| !tools.is_null()) {
            Some(source) => Ok(source),
            None => self.default.as_ref().map_err(Clone::clone),
        }
    }

    fn render(
        &self,
        messages: &[Message],
        tools: &RecordValue,
        add_prompt: bool,
    ) -> Result<String, String> {
        let none = minijinja::Value::from(());
        let values = context! {
            messages => messages,
            add_generation_prompt => add_prompt,
            tools => minijinja::Value::from_serialize(tools),
            documents => none,
        };
        let values =
            context! { ..values, ..minijinja::Value::from_serialize(&self.special_tokens) };
        let source = self.source(tools)?;
        let text = caught(|| metered::render(&source.environment, values));
        let text = text.and_then(|text| text.map_err(|error| error.to_string()));
        text.map_err(|error| format!("{}: chat template: {error}", source.place))
    }

    /// Renders a chat as the prompt for the assistant's next message. `tools` describes the tools
    /// that the assistant may call, or is null.
    ///
    /// # Errors
    /// The template fails.
    pub fn ask(&self, messages: &[Message], tools: &RecordValue) -> Result<String, String> {
        Ok(remove_marks(&self.render(messages, tools, true)?).text)
    }

    /// Renders messages as they stand before a later message.
    fn without_prompt(&self, messages: &[Message], tools: &RecordValue) -> Result<String, String> {
        match self.render(messages, tools, false) {
            Err(_) if messages.is_empty() => Ok(String::new()), // some templates refuse it
            text => Ok(remove_marks(&text?).text),
        }
    }

    /// Renders a chat to train on, up to the last answer to learn: the messages behind it have
    /// nothing to learn. `tools` describes the tools that the assistant may call, or is null.
    ///
    /// # Errors
    /// The template fails; no message is an answer to learn; or the template changes earlier
    /// messages when later ones follow, so that no answer can be found.
    pub fn render_chat(
        &self,
        messages: &[Message],
        tools: &RecordValue,
    ) -> Result<RenderedChat, String> {
        let has_marks =
            |one: &Message| one.content.as_ref().is_some_and(|text| text.contains(MARKS));
        if let Some(at) = messages.iter().position(has_marks) {
            return Err(format!(
                "message {at} contains U+E000 or U+E001, reserved characters of private use"
            ));
        }
        let last = messages.iter().rposition(is_answer);
        let messages = &messages[..=last.ok_or_else(|| no_answer(messages))?];
        let all = self.render(messages, tools, false)?;
        if self.source(tools)?.has_marks {
            return self.keep_answers(messages, tools, remove_marks(&all));
        }
        self.find_answers(messages, tools, all)
    }

    /// Finds the answers of a chat that is rendered as `text`. An answer can be learnt if the
    /// template renders the prompt before it and the answer as the beginning of the whole chat.
    fn find_answers(
        &self,
        messages: &[Message],
        tools: &RecordValue,
        text: String,
    ) -> Result<RenderedChat, String> {
        let mut chat = RenderedChat { text, ..RenderedChat::default() };
        let mut from = 0;
        let mut lost = None;
        for at in (0..messages.len()).filter(|&at| is_assistant(&messages[at])) {
            if messages[at].is_context {
                continue;
            }
            let with = self.render(&messages[..=at], tools, false)?;
            let begin = self.begin_of_answer(&messages[..=at], tools, &with)?;
            if let Some(begin) = begin.filter(|_| chat.text.starts_with(&with)) {
                from = with.len();
                chat.assistant.push(begin..from);
                continue;
            }
            lost = Some(at);
            let content = messages[at].content.as_deref().unwrap_or_default().trim();
            let found = chat.text[from..].find(content).map(|place| from + place);
            let range = found.map_or(from..from, |begin| begin..begin + content.len());
            from = range.end;
            chat.not_found.push(range);
        }
        match lost.filter(|_| chat.assistant.is_empty()) {
            None => Ok(chat),
            Some(at) => Err(format!(
                "the chat template changes earlier turns when it comes to message {at}, so the \
                 assistant's text cannot be found: mark it in the template with \
                 {{% generation %}} and {{% endgeneration %}}"
            )),
        }
    }

    /// The byte at which the answer begins in a chat that ends with it and is rendered as `with`.
    fn begin_of_answer(
        &self,
        messages: &[Message],
        tools: &RecordValue,
        with: &str,
    ) -> Result<Option<usize>, String> {
        let Some((answer, history)) = messages.split_last() else { return Ok(None) };
        let content = answer.content.as_deref().unwrap_or_default().trim();
        let prompt = match self.render(history, tools, true) {
            Err(_) if history.is_empty() => String::new(), // some templates refuse an empty chat
            prompt => prompt?,
        };
        if let Some(text) = with.strip_prefix(&prompt) {
            // Data may have an empty thought of its own, which is learnt.
            let thought = empty_thought(text).filter(|tag| !content.starts_with(tag.open));
            return Ok(Some(prompt.len() + thought.map_or(0, |thought| thought.bytes)));
        }
        // Some prompts open a thought, as DeepSeek R1's, which an answer without thoughts has not.
        let plain = self.without_prompt(history, tools)?;
        let Some(text) = with.strip_prefix(&plain).filter(|_| prompt.starts_with(&plain)) else {
            return Ok(None);
        };
        let same = text.chars().zip(prompt[plain.len()..].chars()).take_while(|(a, b)| a == b);
        let same: usize = same.map(|(one, _)| one.len_utf8()).sum();
        let opens = THOUGHTS.iter().any(|[open, _]| prompt.trim_end().ends_with(open));
        let content = text.find(content).unwrap_or(same);
        Ok(opens.then_some(plain.len() + same.min(content)))
    }

    /// Of the parts that the template marks, keeps those of answers to learn.
    fn keep_answers(
        &self,
        messages: &[Message],
        tools: &RecordValue,
        mut chat: RenderedChat,
    ) -> Result<RenderedChat, String> {
        let turns: Vec<usize> =
            (0..messages.len()).filter(|&at| is_assistant(&messages[at])).collect();
        let mut context: Vec<usize> =
            turns.iter().copied().filter(|&at| messages[at].is_context).collect();
        if context.is_empty() {
            return Ok(chat);
        }
        let mut is_kept = vec![true; chat.assistant.len()];
        // Most chats have their context first, as the prompt of a completion.
        let first = messages.iter().position(is_answer).unwrap_or(0);
        let before = self.ask(&messages[..first], tools)?;
        if chat.text.starts_with(&before) {
            context.retain(|&at| at > first);
            let kept = is_kept.iter_mut().zip(&chat.assistant);
            kept.for_each(|(is_kept, range)| *is_kept = range.end > before.len());
        }
        for at in context {
            let before = self.without_prompt(&messages[..at], tools)?;
            let with = self.without_prompt(&messages[..=at], tools)?;
            let turn = turns.iter().position(|&turn| turn == at).unwrap_or(0);
            if with.starts_with(&before) && chat.text.starts_with(&with) {
                let kept = is_kept.iter_mut().zip(&chat.assistant);
                let part = before.len()..with.len();
                kept.filter(|(_, range)| part.start <= range.start && range.end <= part.end)
                    .for_each(|(is_kept, _)| *is_kept = false);
            } else if turns.len() == chat.assistant.len() {
                is_kept[turn] = false;
            } else {
                return Err(format!(
                    "message {at} is not to be learnt, and the chat template changes it when later \
                     messages follow, so its text cannot be found: leave the chat out, or end it \
                     before that message"
                ));
            }
        }
        let mut is_kept = is_kept.into_iter();
        chat.assistant.retain(|_| is_kept.next().unwrap_or(true));
        Ok(chat)
    }
}

/// Why a chat has no answer to learn.
fn no_answer(messages: &[Message]) -> String {
    if messages.is_empty() {
        return "messages is empty".into();
    }
    if messages.iter().any(is_assistant) {
        return "the chat has no answer to learn: weight or train of all its answers says that they \
                are context"
            .into();
    }
    let roles: BTreeSet<&str> = messages.iter().map(|one| one.role.as_str()).collect();
    format!(
        "the chat has no answer to learn: its roles are {}, and an answer has the role \
         \"assistant\" (in ShareGPT's form: from \"gpt\", \"chatgpt\" or \"model\")",
        Vec::from_iter(roles).join(", ")
    )
}

/// An empty thought with which a text begins.
struct EmptyThought {
    /// The tag that opens it.
    open: &'static str,
    /// Its length, with the white space around it.
    bytes: usize,
}

/// The empty thought with which a text begins, such as `<think>\n\n</think>\n\n`.
fn empty_thought(text: &str) -> Option<EmptyThought> {
    THOUGHTS.iter().find_map(|[open, close]| {
        let inside = text.trim_start().strip_prefix(open)?;
        let behind = inside.trim_start().strip_prefix(close)?.trim_start();
        Some(EmptyThought { open, bytes: text.len() - behind.len() })
    })
}

/// Removes the marks from a rendered text, and returns the ranges between them.
fn remove_marks(text: &str) -> RenderedChat {
    let mut chat = RenderedChat::default();
    for piece in text.split_inclusive(MARKS) {
        let plain = piece.trim_end_matches(MARKS);
        chat.text += plain;
        let at = chat.text.len();
        match (piece.ends_with(MARKS[0]), piece.ends_with(MARKS[1])) {
            (true, _) => chat.assistant.push(at..at),
            (_, true) => chat.assistant.iter_mut().last().into_iter().for_each(|one| one.end = at),
            _ => {}
        }
    }
    chat
}

/// Whether a message is an answer to learn.
fn is_answer(message: &Message) -> bool {
    message.role == "assistant" && !message.is_context
}

#[cfg(test)]
mod tests {
    use minijinja::Environment;
    use minijinja_contrib::pycompat::unknown_method_callback;

    use super::*;
    use crate::hf::chat_source::{TemplateText, add_marks};
    use crate::hf::python_text;

    fn chat(roles: &[(&str, &str)]) -> Vec<Message> {
        let message = |&(role, content): &(&str, &str)| Message::new(role, content);
        roles.iter().map(message).collect()
    }

    fn of_source(source: &str) -> Template {
        let clock = Arc::new(Clock::default());
        let default = Source::new(TemplateText::of_test(source), clock.clone());
        let default = default.map_err(|error| error.to_string());
        assert!(default.is_ok(), "{source}");
        Template { default, tool_use: None, special_tokens: Map::new(), clock }
    }

    const PLAIN: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}\
                         {% if add_generation_prompt %}<assistant>{% endif %}";

    #[test]
    fn without_marks_the_assistants_part_is_what_its_messages_add() {
        let template = of_source(PLAIN);
        let messages =
            chat(&[("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]);
        let RenderedChat { text, assistant, .. } =
            template.render_chat(&messages, &RecordValue::Null).expect("good");
        let parts: Vec<&str> = assistant.into_iter().map(|range| &text[range]).collect();
        assert_eq!(text, "<user>a\n<assistant>b\n<user>c\n<assistant>d\n");
        assert_eq!(parts, ["b\n", "d\n"]);
        assert_eq!(
            template.ask(&messages[..1], &RecordValue::Null).expect("good"),
            "<user>a\n<assistant>"
        );
    }

    #[test]
    fn with_marks_the_assistants_part_is_what_the_template_marks() {
        let source = "{%- for m in messages %}\n  {%- if m.role == 'assistant' %}\n    \
                      {%- generation -%}\n    {{ m.content + eos_token }}\n    \
                      {%- endgeneration -%}\n  {%- else %}[{{ m.content }}]{% endif %}\n\
                      {%- endfor %}";
        let specials = Map::from_iter([("eos_token".to_string(), Value::from("</s>"))]);
        let template = Template { special_tokens: specials, ..of_source(source) };
        let messages =
            chat(&[("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]);
        let RenderedChat { text, assistant, .. } =
            template.render_chat(&messages, &RecordValue::Null).expect("good");
        let parts: Vec<&str> = assistant.into_iter().map(|range| &text[range]).collect();
        assert_eq!((text.as_str(), parts), ("[a]b</s>[c]d</s>", vec!["b</s>", "d</s>"]));
    }

    #[test]
    fn values_are_written_as_python_writes_them() {
        let source = "{% if tools is not none %}tools{% endif %}{{ messages[0] | tojson }}";
        let template = of_source(source);
        let asked =
            template.ask(&chat(&[("user", "hi <b> & \"c\"")]), &RecordValue::Null).expect("good");
        assert_eq!(asked, r#"{"role": "user", "content": "hi <b> & \"c\""}"#);
    }

    #[test]
    fn chats_that_cannot_be_trained_on_are_refused() {
        let template = of_source(PLAIN);
        let refused = |roles: &[(&str, &str)]| {
            template.render_chat(&chat(roles), &RecordValue::Null).expect_err("bad")
        };
        assert!(refused(&[]).contains("empty"));
        assert!(refused(&[("user", "a")]).contains("no answer to learn: its roles are user"));
        assert!(refused(&[("assistant", "\u{e000}")]).contains("private use"));
        let last = "{% if messages %}{{ messages[-1].content }}{% endif %}";
        let rewrites = of_source(last);
        let messages = chat(&[("assistant", "b"), ("user", "c"), ("assistant", "d")]);
        assert!(
            rewrites
                .render_chat(&messages, &RecordValue::Null)
                .expect_err("bad")
                .contains("{% generation %}")
        );
        let raises = of_source("{{ raise_exception('no ' + 'way') }}");
        assert!(
            raises.render_chat(&messages, &RecordValue::Null).expect_err("bad").contains("no way")
        );
    }

    /// The engine renders the same text without limits.
    #[test]
    fn limits_change_no_text() {
        let call =
            serde_json::json!({ "function": { "name": "f", "arguments": { "a": [1, 2.5] } } });
        let mut messages =
            chat(&[("system", " s\n"), ("user", "How\n?"), ("assistant", "<think>x</think>b")]);
        messages[2].more.push(("tool_calls".into(), serde_json::json!([call]).into()));
        let properties = serde_json::json!({
            "a": { "enum": ["x", 1] }, "b": { "type": "object", "properties": {} }
        });
        let parameters = serde_json::json!({
            "type": "object", "required": ["a"], "properties": properties
        });
        let tools = serde_json::json!([{ "function": { "name": "f", "parameters": parameters } }]);
        let tools = RecordValue::from(tools);
        for source in [
            include_str!("../../fuzz/corpus/template/qwen"),
            include_str!("../../fuzz/corpus/template/llama"),
            include_str!("../../fuzz/corpus/template/macros"),
        ] {
            let with = of_source(source);
            let mut without = Environment::new();
            without.set_trim_blocks(true);
            without.set_lstrip_blocks(true);
            without.set_unknown_method_callback(unknown_method_callback);
            without.add_filter("tojson", python_text::tojson);
            without.add_template_owned("chat", add_marks(source).0).expect("good");
            for tools in [&tools, &RecordValue::Null] {
                let values = context! { messages => messages, add_generation_prompt => true,
                tools => minijinja::Value::from_serialize(tools) };
                let plain = without.get_template("chat").expect("added").render(values);
                let found = with.render(&messages, tools, true);
                match plain {
                    Ok(plain) => assert_eq!(found.expect("it is good without limits"), plain),
                    Err(error) => assert!(tools.is_null() && found.is_err(), "{error}"),
                }
            }
        }
    }
}
