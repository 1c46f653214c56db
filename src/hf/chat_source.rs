//! The files and the programs of chat templates.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use minijinja::{Environment, ErrorKind};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde_json::Value;

use super::caught::caught;
use super::clock::Clock;
use super::companions::MORE_TEMPLATES;
use super::{metered, python_text, template_text};
use crate::error::Error;

/// Characters that stand in the rendered text where a marked part begins and ends, until
/// they are removed. They belong to Unicode's private use area.
pub(super) const MARKS: [char; 2] = ['\u{e000}', '\u{e001}'];

/// The text of a template, and its file.
pub(super) struct TemplateText {
    place: String,
    text: String,
}

#[cfg(test)]
impl TemplateText {
    /// A template without a file.
    pub(super) fn of_test(text: &str) -> TemplateText {
        TemplateText { place: "here".into(), text: text.into() }
    }
}

/// One template.
#[derive(Clone)]
pub(super) struct Source {
    /// The file of the template.
    pub(super) place: String,
    pub(super) text: String,
    pub(super) environment: Environment<'static>,
    /// Whether the template marks what the assistant wrote.
    pub(super) has_marks: bool,
}

impl Source {
    /// Compiles a template.
    pub(super) fn new(from: TemplateText, clock: Arc<Clock>) -> Result<Source, Error> {
        let TemplateText { place, text } = from;
        let refuse = |error| Error::bad_model(&place, format_args!("chat template: {error}"));
        let (source, has_marks) = add_marks(&text);
        template_text::check(&source).map_err(refuse)?;
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.add_function("raise_exception", |what: String| -> Result<String, _> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, what))
        });
        environment.add_function("strftime_now", move |format: &str| {
            clock.format(format).map_err(metered::refusal)
        });
        environment.add_filter("tojson", python_text::tojson);
        metered::add_limits(&mut environment);
        let compiled = caught(|| environment.add_template_owned("chat", source));
        compiled.map_err(refuse)?.map_err(|error| refuse(error.to_string()))?;
        Ok(Source { place, text, environment, has_marks })
    }
}

/// The templates of a directory, by name: `chat_template.jinja` and the files of
/// `additional_chat_templates`, or else those of `tokenizer_config.json`.
pub(super) fn templates(directory: &Path) -> Result<BTreeMap<String, TemplateText>, Error> {
    let of_files = templates_of_files(directory)?;
    if !of_files.is_empty() {
        return Ok(of_files);
    }
    let config = directory.join("tokenizer_config.json");
    let keys = fs::read_to_string(&config).unwrap_or_default();
    let keys: Value = serde_json::from_str(&keys).unwrap_or_default();
    let place = config.display().to_string();
    let named = templates_of_config(&keys["chat_template"]).into_iter();
    Ok(named.map(|(name, text)| (name, TemplateText { place: place.clone(), text })).collect())
}

/// The templates in files of their own: name, file and text.
fn templates_of_files(directory: &Path) -> Result<BTreeMap<String, TemplateText>, Error> {
    let mut files = BTreeMap::new();
    let own = directory.join("chat_template.jinja");
    if own.is_file() {
        files.insert("default".to_string(), own);
    }
    for entry in fs::read_dir(directory.join(MORE_TEMPLATES)).into_iter().flatten() {
        let path = entry.map_err(|error| Error::bad_model(directory.display(), error))?.path();
        let name = path.file_stem().map(|name| name.to_string_lossy().into_owned());
        let is_template = path.extension().is_some_and(|kind| kind == "jinja");
        files.extend(name.filter(|_| is_template).map(|name| (name, path)));
    }
    let read = |(name, path): (String, PathBuf)| {
        let place = path.display().to_string();
        let text = fs::read_to_string(&path).map_err(|error| Error::bad_model(&place, error))?;
        Ok((name, TemplateText { place, text }))
    };
    files.into_iter().map(read).collect()
}

/// The templates in a `tokenizer_config.json`, by name: the only one, or several.
fn templates_of_config(template: &Value) -> BTreeMap<String, String> {
    let own = template.as_str().map(|text| ("default".to_string(), text.to_string()));
    let several = template.as_array().into_iter().flatten();
    let several = several.filter_map(|one| {
        Some((one["name"].as_str()?.to_string(), one["template"].as_str()?.to_string()))
    });
    own.into_iter().chain(several).collect()
}

/// Replaces the generation tags of a template by output of the [`MARKS`], and says whether there
/// were any. Whitespace around the tags is trimmed as the tags ask for.
pub(super) fn add_marks(source: &str) -> (String, bool) {
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
