//! Chat templates: render a chat as text, and find the part of it that the assistant wrote.
//!
//! A template may mark that part, from `{% generation %}` to `{% endgeneration %}`. Without marks,
//! it is what each message of the assistant adds to the prompt before it. Templates are rendered
//! as transformers renders them, with one exception: there is no `strftime_now`, because training
//! must not depend on the date.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Write};
use std::path::Path;

use minijinja::value::Kwargs;
use minijinja::{Environment, ErrorKind, context};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};
use serde_json::{Map, Value};

use super::caught::caught;
use super::text::{Message, RenderedChat};
use super::{metered, template_text};
use crate::error::Error;

fn is_assistant(message: &Message) -> bool {
    message.role == "assistant"
}

/// Characters that stand in the rendered text where a marked part begins and ends, until
/// [`remove_marks`] removes them. They belong to Unicode's private use area.
const MARKS: [char; 2] = ['\u{e000}', '\u{e001}'];

/// A chat template.
#[derive(Clone)]
pub struct Template {
    /// The file of the template.
    place: String,
    environment: Environment<'static>,
    special_tokens: Map<String, Value>,
    /// Whether the template marks what the assistant wrote.
    has_marks: bool,
}

impl Template {
    /// Reads the template of a directory, from `chat_template.jinja` or `tokenizer_config.json`.
    /// `None` if the directory has no template.
    pub(super) fn open(
        directory: &Path,
        special_tokens: &Map<String, Value>,
    ) -> Result<Option<Template>, Error> {
        let own = directory.join("chat_template.jinja");
        let config = directory.join("tokenizer_config.json");
        let at = if own.is_file() { &own } else { &config };
        let Ok(text) = fs::read_to_string(at) else { return Ok(None) };
        let source = if own.is_file() {
            Some(text)
        } else {
            let all: Value = serde_json::from_str(&text).unwrap_or_default();
            template_of_config(&all["chat_template"])
        };
        let Some(source) = source else { return Ok(None) };
        let place = at.display().to_string();
        Template::new(&place, &source, special_tokens.clone()).map(Some)
    }

    fn new(
        place: &str,
        source: &str,
        special_tokens: Map<String, Value>,
    ) -> Result<Template, Error> {
        let refuse = |error| Error::bad_model(place, format_args!("chat template: {error}"));
        let (source, has_marks) = add_marks(source);
        template_text::check(&source).map_err(refuse)?;
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.add_function("raise_exception", |what: String| -> Result<String, _> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, what))
        });
        environment.add_filter("tojson", python_json);
        metered::add_limits(&mut environment);
        let compiled = caught(|| environment.add_template_owned("chat", source));
        compiled.map_err(refuse)?.map_err(|error| refuse(error.to_string()))?;
        let place = place.to_string();
        Ok(Template { place, environment, special_tokens, has_marks })
    }

    fn render(
        &self,
        messages: &[Message],
        tools: &Value,
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
        let text = caught(|| metered::render(&self.environment, values));
        let text = text.and_then(|text| text.map_err(|error| error.to_string()));
        text.map_err(|error| format!("{}: chat template: {error}", self.place))
    }

    /// Renders a chat as the prompt for the assistant's next message. `tools` describes the tools
    /// that the assistant may call, or is null.
    ///
    /// # Errors
    /// The template fails.
    pub fn ask(&self, messages: &[Message], tools: &Value) -> Result<String, String> {
        Ok(remove_marks(&self.render(messages, tools, true)?).text)
    }

    /// Renders a chat to train on, up to the assistant's last message: the messages behind it have
    /// nothing to learn. `tools` describes the tools that the assistant may call, or is null.
    ///
    /// # Errors
    /// The template fails; no message is the assistant's; or the template changes earlier messages
    /// when later ones follow, so that the assistant's part is unknown.
    pub fn render_chat(&self, messages: &[Message], tools: &Value) -> Result<RenderedChat, String> {
        let has_marks =
            |one: &Message| one.content.as_ref().is_some_and(|text| text.contains(MARKS));
        if let Some(at) = messages.iter().position(has_marks) {
            return Err(format!(
                "message {at} contains U+E000 or U+E001, reserved characters of private use"
            ));
        }
        let Some(last) = messages.iter().rposition(is_assistant) else {
            let roles: BTreeSet<&str> = messages.iter().map(|one| one.role.as_str()).collect();
            return Err(match messages.is_empty() {
                true => "messages is empty".into(),
                false => format!(
                    "the chat has no answer to learn: its roles are {}, and an answer has the role \
                     \"assistant\" (in ShareGPT's form: from \"gpt\", \"chatgpt\" or \"model\")",
                    Vec::from_iter(roles).join(", ")
                ),
            });
        };
        let messages = &messages[..=last];
        let all = self.render(messages, tools, false)?;
        if self.has_marks {
            return Ok(remove_marks(&all));
        }
        let mut assistant = Vec::new();
        for at in (0..messages.len()).filter(|&at| is_assistant(&messages[at])) {
            let before = match self.render(&messages[..at], tools, true) {
                Err(_) if at == 0 => String::new(), // some templates refuse an empty chat
                before => before?,
            };
            let with = self.render(&messages[..=at], tools, false)?;
            if !with.starts_with(&before) || !all.starts_with(&with) {
                return Err(format!(
                    "the chat template changes earlier turns when it comes to message {at}, so the \
                     assistant's text cannot be found: mark it in the template with \
                     {{% generation %}} and {{% endgeneration %}}"
                ));
            }
            assistant.push(before.len()..with.len());
        }
        Ok(RenderedChat { text: all, assistant })
    }
}

/// The widest indent of JSON that a template may ask for. Published templates use up to 4.
const MOST_INDENT: usize = 64;

/// The filter `tojson`: JSON as Python's `json.dumps` writes it.
fn python_json(value: minijinja::Value, more: Kwargs) -> Result<String, minijinja::Error> {
    let indent: Option<usize> = more.get("indent")?;
    let bad = |error: serde_json::Error| {
        minijinja::Error::new(ErrorKind::BadSerialization, error.to_string())
    };
    let mut json = Bounded(Vec::new());
    match indent {
        Some(indent) if indent > MOST_INDENT => {
            let what = format!("indent = {indent} of tojson can be at most {MOST_INDENT}");
            return Err(minijinja::Error::new(ErrorKind::InvalidOperation, what));
        }
        Some(indent) => {
            let spaces = " ".repeat(indent);
            let formatter = PrettyFormatter::with_indent(spaces.as_bytes());
            value.serialize(&mut Serializer::with_formatter(&mut json, formatter)).map_err(bad)?;
        }
        None => {
            value.serialize(&mut Serializer::with_formatter(&mut json, Spaced)).map_err(bad)?;
        }
    }
    Ok(String::from_utf8(json.0).expect("JSON is UTF-8"))
}

/// A buffer that refuses more bytes than a rendering may make.
struct Bounded(Vec<u8>);

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let most = metered::MOST_BYTES;
        if (self.0.len() + bytes.len()) as u64 > most {
            return Err(io::Error::other(format!("JSON of more than {} MiB", most >> 20)));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes a space behind each comma and colon, as Python does.
struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: Write + ?Sized>(&mut self, to: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { to.write_all(b", ") }
    }

    fn begin_object_key<W: Write + ?Sized>(&mut self, to: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { to.write_all(b", ") }
    }

    fn begin_object_value<W: Write + ?Sized>(&mut self, to: &mut W) -> io::Result<()> {
        to.write_all(b": ")
    }
}

/// The template in a `tokenizer_config.json`: the only one, or the default of several.
fn template_of_config(template: &Value) -> Option<String> {
    if let Some(one) = template.as_str() {
        return Some(one.into());
    }
    let several = template.as_array()?;
    let default = several.iter().find(|one| one["name"] == "default");
    default.or(several.first())?["template"].as_str().map(str::to_string)
}

/// Replaces the generation tags of a template by output of the [`MARKS`], and says whether there
/// were any. Whitespace around the tags is trimmed as the tags ask for.
fn add_marks(source: &str) -> (String, bool) {
    let mut out = String::new();
    let mut rest = source;
    let mut has_marks = false;
    while let Some(at) = rest.find("{%") {
        let Some(end) = rest[at + 2..].find("%}").map(|end| at + 2 + end) else { break };
        let inner = &rest[at + 2..end];
        let sign = |sign: Option<char>| match sign {
            Some('-') => "-",
            Some('+') => "+",
            _ => "",
        };
        let left = sign(inner.chars().next());
        let right = sign(inner.chars().last());
        out.push_str(&rest[..at]);
        match inner.trim_matches(['-', '+']).trim() {
            "generation" => {
                let mark = MARKS[0];
                out += &format!("{{%{left} if true %}}{{{{ '{mark}' }}}}{{% if true {right}%}}");
                has_marks = true;
            }
            "endgeneration" => {
                let mark = MARKS[1];
                out += &format!("{{%{left} endif %}}{{{{ '{mark}' }}}}{{% endif {right}%}}");
            }
            _ => out.push_str(&rest[at..end + 2]),
        }
        rest = &rest[end + 2..];
    }
    (out + rest, has_marks)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn chat(roles: &[(&str, &str)]) -> Vec<Message> {
        let message = |&(role, content): &(&str, &str)| Message::new(role, content);
        roles.iter().map(message).collect()
    }

    const PLAIN: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}\
                         {% if add_generation_prompt %}<assistant>{% endif %}";

    #[test]
    fn without_marks_the_assistants_part_is_what_its_messages_add() {
        let template = Template::new("here", PLAIN, Map::new()).expect("good");
        let messages =
            chat(&[("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]);
        let RenderedChat { text, assistant } =
            template.render_chat(&messages, &Value::Null).expect("good");
        let parts: Vec<&str> = assistant.into_iter().map(|range| &text[range]).collect();
        assert_eq!(text, "<user>a\n<assistant>b\n<user>c\n<assistant>d\n");
        assert_eq!(parts, ["b\n", "d\n"]);
        assert_eq!(
            template.ask(&messages[..1], &Value::Null).expect("good"),
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
        let template = Template::new("here", source, specials).expect("good");
        let messages =
            chat(&[("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]);
        let RenderedChat { text, assistant } =
            template.render_chat(&messages, &Value::Null).expect("good");
        let parts: Vec<&str> = assistant.into_iter().map(|range| &text[range]).collect();
        assert_eq!((text.as_str(), parts), ("[a]b</s>[c]d</s>", vec!["b</s>", "d</s>"]));
    }

    #[test]
    fn values_are_written_as_python_writes_them() {
        let source = "{% if tools is not none %}tools{% endif %}{{ messages[0] | tojson }}";
        let template = Template::new("here", source, Map::new()).expect("good");
        let asked = template.ask(&chat(&[("user", "hi <b> & \"c\"")]), &Value::Null).expect("good");
        assert_eq!(asked, r#"{"role": "user", "content": "hi <b> & \"c\""}"#);
    }

    #[test]
    fn chats_that_cannot_be_trained_on_are_refused() {
        let template = Template::new("here", PLAIN, Map::new()).expect("good");
        let refused = |roles: &[(&str, &str)]| {
            template.render_chat(&chat(roles), &Value::Null).expect_err("bad")
        };
        assert!(refused(&[]).contains("empty"));
        assert!(refused(&[("user", "a")]).contains("no answer to learn: its roles are user"));
        assert!(refused(&[("assistant", "\u{e000}")]).contains("private use"));
        let last = "{% if messages %}{{ messages[-1].content }}{% endif %}";
        let rewrites = Template::new("here", last, Map::new()).expect("good");
        let messages = chat(&[("assistant", "b"), ("user", "c"), ("assistant", "d")]);
        assert!(
            rewrites
                .render_chat(&messages, &Value::Null)
                .expect_err("bad")
                .contains("{% generation %}")
        );
        let raises = Template::new("here", "{{ raise_exception('no ' + 'way') }}", Map::new());
        assert!(
            raises
                .expect("good")
                .render_chat(&messages, &Value::Null)
                .expect_err("bad")
                .contains("no way")
        );
    }

    /// The engine renders the same text without limits.
    #[test]
    fn limits_change_no_text() {
        let call =
            serde_json::json!({ "function": { "name": "f", "arguments": { "a": [1, 2.5] } } });
        let mut messages =
            chat(&[("system", " s\n"), ("user", "How\n?"), ("assistant", "<think>x</think>b")]);
        messages[2].more.insert("tool_calls".into(), serde_json::json!([call]));
        let properties = serde_json::json!({
            "a": { "enum": ["x", 1] }, "b": { "type": "object", "properties": {} }
        });
        let parameters = serde_json::json!({
            "type": "object", "required": ["a"], "properties": properties
        });
        let tools = serde_json::json!([{ "function": { "name": "f", "parameters": parameters } }]);
        for source in [
            include_str!("../../fuzz/corpus/template/qwen"),
            include_str!("../../fuzz/corpus/template/llama"),
            include_str!("../../fuzz/corpus/template/macros"),
        ] {
            let with = Template::new("here", source, Map::new()).expect("good");
            let mut without = Environment::new();
            without.set_trim_blocks(true);
            without.set_lstrip_blocks(true);
            without.set_unknown_method_callback(unknown_method_callback);
            without.add_filter("tojson", python_json);
            without.add_template_owned("chat", add_marks(source).0).expect("good");
            for tools in [&tools, &Value::Null] {
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
