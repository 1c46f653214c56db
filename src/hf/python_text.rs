//! Text of a template's values as Python writes it: `str`, `repr` and `json.dumps`.
//!
//! The engine prints texts, integers, `True` and `None` as Python does, but not floats, lists and
//! maps.

use std::borrow::Cow;
use std::fmt::Write;

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Error, Value};

use super::metered::{MOST_BYTES, refusal};

/// The widest indent of JSON that a template may ask for. Published templates use up to 4.
const MOST_INDENT: usize = 64;

/// The text of a value, as Python's `str` makes it.
pub(super) fn str_of(value: &Value) -> Cow<'_, str> {
    if let Some(text) = value.as_str() {
        return Cow::Borrowed(text);
    }
    let mut text = String::new();
    write_repr(value, &mut text);
    Cow::Owned(text)
}

/// A value as Python's `str` prints it, if that is another text than the engine's.
pub(super) fn printed(value: &Value) -> Option<Value> {
    let is_float = value.is_number() && !value.is_integer();
    let is_list = matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable | ValueKind::Map);
    (is_float || is_list).then(|| Value::from(str_of(value).into_owned()))
}

fn write_repr(value: &Value, to: &mut String) {
    match value.kind() {
        ValueKind::String => write_quoted(value.as_str().unwrap_or_default(), to),
        ValueKind::Number if !value.is_integer() => *to += &float(value, ["nan", "inf"]),
        ValueKind::Seq | ValueKind::Iterable => {
            to.push('[');
            for (place, item) in value.try_iter().into_iter().flatten().enumerate() {
                *to += if place == 0 { "" } else { ", " };
                write_repr(&item, to);
            }
            to.push(']');
        }
        ValueKind::Map => {
            to.push('{');
            for (place, key) in value.try_iter().into_iter().flatten().enumerate() {
                *to += if place == 0 { "" } else { ", " };
                write_repr(&key, to);
                *to += ": ";
                write_repr(&value.get_item(&key).unwrap_or_default(), to);
            }
            to.push('}');
        }
        _ => write!(to, "{value}").expect("a string takes all"),
    }
}

/// A text as Python's `repr` writes it. Python and the standard library agree on the characters
/// that can be printed, but for marks that combine with the character before them.
fn write_quoted(text: &str, to: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    to.push(quote);
    for one in text.chars() {
        let code = u32::from(one);
        let is_printable = || format!("a{one}").escape_debug().eq(['a', one]);
        let written = match one {
            '\\' => write!(to, "\\\\"),
            '\n' => write!(to, "\\n"),
            '\r' => write!(to, "\\r"),
            '\t' => write!(to, "\\t"),
            _ if one == quote => write!(to, "\\{one}"),
            ' '..='~' => write!(to, "{one}"),
            _ if is_printable() => write!(to, "{one}"),
            _ if code < 0x100 => write!(to, "\\x{code:02x}"),
            _ if code < 0x10000 => write!(to, "\\u{code:04x}"),
            _ => write!(to, "\\U{code:08x}"),
        };
        written.expect("a string takes all");
    }
    to.push(quote);
}

/// A float as Python's `repr` writes it: the shortest digits that read back, with an exponent below
/// 1e-4 and from 1e16 on. `names` are those of numbers that are not finite.
fn float(value: &Value, [nan, infinity]: [&str; 2]) -> String {
    let number = f64::try_from(value.clone()).unwrap_or(f64::NAN);
    if number.is_nan() {
        return nan.into();
    }
    if number.is_infinite() {
        return if number > 0.0 { infinity.into() } else { format!("-{infinity}") };
    }
    let scientific = format!("{number:e}");
    let split = scientific.split_once('e');
    let (digits, exponent) = split.expect("the format has an exponent");
    let exponent: i32 = exponent.parse().expect("it is a number");
    if !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    format!("{number:?}")
}

/// The filter `tojson`, with the arguments that transformers gives it.
pub(super) fn tojson(value: Value, arguments: Rest<Value>) -> Result<String, Error> {
    let mut positional = arguments.0;
    let named = positional.pop_if(|last| last.is_kwargs());
    let named = named.map(Kwargs::try_from).transpose()?;
    let named = named.unwrap_or_else(|| Kwargs::from_iter::<[(String, Value); 0]>([]));
    let names = ["ensure_ascii", "indent", "separators", "sort_keys"];
    if positional.len() > names.len() {
        return Err(refusal("tojson has too many arguments"));
    }
    let mut values = names.map(|_| Value::from(()));
    for (place, name) in names.iter().enumerate() {
        let given: Option<Value> = named.get(name)?;
        values[place] = given.or(positional.get(place).cloned()).unwrap_or_default();
    }
    named.assert_all_used()?;
    let [ensure_ascii, indent, separators, sort_keys] = values;
    let indent = indent_of(&indent)?;
    let [between, behind_key] = match separators.is_none() || separators.is_undefined() {
        true => [if indent.is_some() { "," } else { ", " }, ": "].map(String::from),
        false => {
            let both: Vec<Value> = separators.try_iter()?.collect();
            let both = <[Value; 2]>::try_from(both)
                .ok()
                .filter(|both| both.iter().all(|one| one.as_str().is_some()));
            let both = both.ok_or_else(|| refusal("separators of tojson must be two texts"))?;
            both.map(|one| str_of(&one).into_owned())
        }
    };
    let mut json = Json {
        text: String::new(),
        ensure_ascii: ensure_ascii.is_true(),
        sort_keys: sort_keys.is_true(),
        indent,
        between,
        behind_key,
    };
    json.write(&value, 0)?;
    Ok(json.text)
}

/// The text by which a level is indented: a number of spaces, or any text.
fn indent_of(indent: &Value) -> Result<Option<String>, Error> {
    if indent.is_none() || indent.is_undefined() {
        return Ok(None);
    }
    if let Some(text) = indent.as_str() {
        return Ok(Some(text.into()));
    }
    let columns = i64::try_from(indent.clone())?.max(0) as usize;
    match columns > MOST_INDENT {
        true => Err(refusal(format!("indent = {columns} of tojson can be at most {MOST_INDENT}"))),
        false => Ok(Some(" ".repeat(columns))),
    }
}

/// JSON as Python's `json.dumps` writes it.
struct Json {
    text: String,
    ensure_ascii: bool,
    sort_keys: bool,
    indent: Option<String>,
    /// The text between two items.
    between: String,
    behind_key: String,
}

impl Json {
    fn write(&mut self, value: &Value, level: usize) -> Result<(), Error> {
        if self.text.len() as u64 > MOST_BYTES {
            return Err(refusal(format!("JSON of more than {} MiB", MOST_BYTES >> 20)));
        }
        match value.kind() {
            ValueKind::None => self.text += "null",
            ValueKind::Bool => self.text += if value.is_true() { "true" } else { "false" },
            ValueKind::Number => self.text += &number(value),
            ValueKind::String => self.quote(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                self.text.push('[');
                let mut count = 0;
                for item in value.try_iter()? {
                    self.begin(count, level + 1);
                    self.write(&item, level + 1)?;
                    count += 1;
                }
                self.end(count, level);
                self.text.push(']');
            }
            ValueKind::Map => {
                let mut pairs = Vec::new();
                for key in value.try_iter()? {
                    pairs.push((key_text(&key)?, value.get_item(&key)?));
                }
                if self.sort_keys {
                    pairs.sort_by(|a, b| a.0.cmp(&b.0));
                }
                self.text.push('{');
                let count = pairs.len();
                for (place, (key, value)) in pairs.into_iter().enumerate() {
                    self.begin(place, level + 1);
                    self.quote(&key);
                    self.text += &self.behind_key;
                    self.write(&value, level + 1)?;
                }
                self.end(count, level);
                self.text.push('}');
            }
            kind => return Err(refusal(format!("tojson: a value of type {kind} is no JSON"))),
        }
        Ok(())
    }

    /// Writes what stands before an item.
    fn begin(&mut self, place: usize, level: usize) {
        if place > 0 {
            self.text += &self.between;
        }
        self.new_line(level);
    }

    /// Writes what stands behind the last of `count` items.
    fn end(&mut self, count: usize, level: usize) {
        if count > 0 {
            self.new_line(level);
        }
    }

    fn new_line(&mut self, level: usize) {
        if let Some(indent) = &self.indent {
            self.text.push('\n');
            (0..level).for_each(|_| self.text += indent);
        }
    }

    fn quote(&mut self, text: &str) {
        let quoted = serde_json::to_string(text).expect("a text is plain data");
        if !self.ensure_ascii {
            self.text += &quoted;
            return;
        }
        let mut units = [0; 2];
        for one in quoted.chars() {
            match one {
                ' '..='~' => self.text.push(one),
                _ => one.encode_utf16(&mut units).iter().for_each(|unit| {
                    self.text += &format!("\\u{unit:04x}");
                }),
            }
        }
    }
}

/// A number in JSON.
fn number(value: &Value) -> String {
    match value.is_integer() {
        true => value.to_string(),
        false => float(value, ["NaN", "Infinity"]),
    }
}

/// The text of a key: JSON has no other keys.
fn key_text(key: &Value) -> Result<String, Error> {
    Ok(match key.kind() {
        ValueKind::String => str_of(key).into_owned(),
        ValueKind::None => "null".into(),
        ValueKind::Bool => (if key.is_true() { "true" } else { "false" }).into(),
        ValueKind::Number => number(key),
        kind => return Err(refusal(format!("tojson: a key of type {kind} is no JSON"))),
    })
}

#[cfg(test)]
mod tests {
    use minijinja::Environment;

    use super::*;

    fn rendered(source: &str) -> Result<String, Error> {
        let mut environment = Environment::new();
        environment.add_filter("tojson", tojson);
        environment.add_filter("str", |value: &Value| str_of(value).into_owned());
        environment.render_str(source, ())
    }

    /// Right values are Python 3.12's.
    #[test]
    fn values_are_printed_as_python_prints_them() {
        for (source, right) in [
            (
                "['a', \"it's\", '\"\\'', 1.0, 1e-5, 1e16, 1e22, 123456.789]",
                "['a', \"it's\", '\"\\'', 1.0, 1e-05, 1e+16, 1e+22, 123456.789]",
            ),
            ("{'k': [none, true, {}], 2: 0.0001}", "{'k': [None, True, {}], 2: 0.0001}"),
            ("'tab\\tand\\nline'", "tab\tand\nline"),
            (
                "['tab\\t', 'é\u{301}\u{200b}\u{e000}\u{1f600}\u{7f}', 'a\\\\b']",
                "['tab\\t', 'é\u{301}\\u200b\\ue000\u{1f600}\\x7f', 'a\\\\b']",
            ),
            (
                "[[], 9999999999999998.0, -1.5e-9, 0.1 + 0.2]",
                "[[], 9999999999999998.0, -1.5e-09, 0.30000000000000004]",
            ),
        ] {
            assert_eq!(rendered(&format!("{{{{ ({source}) | str }}}}")).expect("good"), right);
        }
    }

    /// Right values are Python 3.12's `json.dumps`.
    #[test]
    fn json_has_the_arguments_of_python() {
        let value = "{'b': [1, 'é\\n', {}], 'a': 1e-07, 'c': []}";
        for (arguments, right) in [
            ("", r#"{"b": [1, "é\n", {}], "a": 1e-07, "c": []}"#),
            ("(ensure_ascii=true)", r#"{"b": [1, "\u00e9\n", {}], "a": 1e-07, "c": []}"#),
            ("(separators=(',', ':'), sort_keys=true)", r#"{"a":1e-07,"b":[1,"é\n",{}],"c":[]}"#),
            ("(true, none, [';', '='])", r#"{"b"=[1;"\u00e9\n";{}];"a"=1e-07;"c"=[]}"#),
            (
                "(indent=2)",
                "{\n  \"b\": [\n    1,\n    \"é\\n\",\n    {}\n  ],\n  \"a\": 1e-07,\n  \
                 \"c\": []\n}",
            ),
            (
                "(indent='\t', separators=(', ', ':'))",
                "{\n\t\"b\":[\n\t\t1, \n\t\t\"é\\n\", \n\t\t{}\n\t], \n\t\"a\":1e-07, \n\t\
                 \"c\":[]\n}",
            ),
        ] {
            let source = format!("{{{{ {value} | tojson{arguments} }}}}");
            assert_eq!(rendered(&source).expect("good"), right, "{arguments}");
        }
        let smile = rendered("{{ '\u{1f600}\u{7f}' | tojson(ensure_ascii=true) }}").expect("good");
        assert_eq!(smile, r#""\ud83d\ude00\u007f""#);
        assert!(rendered("{{ 1 | tojson(indent=65) }}").is_err());
        assert!(rendered("{{ 1 | tojson(indents=1) }}").is_err());
        assert!(rendered("{{ nothing | tojson }}").is_err());
    }
}
