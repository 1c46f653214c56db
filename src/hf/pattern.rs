//! PEFT's patterns of modules: regular expressions for the ends of their names, each with a number.
//! The first that names a module counts, so the order of the file is kept.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::Value;

/// A table of expressions and numbers, in the order of the file.
#[derive(Default)]
pub(super) struct Pattern(Vec<(String, Value)>);

impl Pattern {
    /// The number of the first expression that names a module.
    ///
    /// # Errors
    /// An entry before it has no number, or is no expression.
    pub(super) fn of(&self, module: &str) -> Result<Option<f64>, String> {
        for (expression, value) in &self.0 {
            let number = value.as_f64().filter(|number| number.is_finite());
            let number =
                number.ok_or_else(|| format!("has {expression:?}: {value} is no number"))?;
            let names = ends_with(expression, module);
            if names.map_err(|what| format!("has {expression:?}: {what}"))? {
                return Ok(Some(number));
            }
        }
        Ok(None)
    }
}

impl<'de> Deserialize<'de> for Pattern {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Pattern, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Pattern;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Pattern, M::Error> {
                let mut all = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    all.push(entry);
                }
                Ok(Pattern(all))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// Whether a module's name, or what follows one of its dots, matches a regular expression.
///
/// # Errors
/// The text is no regular expression.
#[cfg(feature = "tokenizers")]
fn ends_with(expression: &str, module: &str) -> Result<bool, String> {
    let whole = regex::Regex::new(&format!(r"^(?:.*\.)?(?:{expression})$"));
    let whole = whole.map_err(|_| String::from("it is no regular expression that l2l reads"))?;
    Ok(whole.is_match(module))
}

/// Whether a module's name, or what follows one of its dots, is this text. Without the feature
/// `tokenizers` there are no regular expressions.
///
/// # Errors
/// The text has characters that only an expression has.
#[cfg(not(feature = "tokenizers"))]
fn ends_with(expression: &str, module: &str) -> Result<bool, String> {
    if expression.contains(|c: char| !c.is_alphanumeric() && c != '_' && c != '.') {
        return Err("regular expressions need the feature `tokenizers`".into());
    }
    let before = module.strip_suffix(expression);
    Ok(before.is_some_and(|before| before.is_empty() || before.ends_with('.')))
}

#[cfg(all(test, feature = "tokenizers"))]
mod tests {
    use super::{Pattern, ends_with};

    #[test]
    fn expressions_name_ends_of_modules_as_in_peft() {
        let module = "model.layers.12.self_attn.q_proj";
        let of_layers = r"model\.layers\.(1[0-2])\..*q_proj";
        let from_the_begin = r"^model\.layers\.12\.self_attn\.q_proj";
        for expression in ["q_proj", "self_attn.q_proj", of_layers, from_the_begin, ".*_proj"] {
            assert_eq!(ends_with(expression, module), Ok(true), "{expression}");
        }
        for expression in ["proj", "self_attn", "layers.12", "^layers.*", "q|v"] {
            assert_eq!(ends_with(expression, module), Ok(false), "{expression}");
        }
        assert!(ends_with("(", module).is_err());
    }

    #[test]
    fn the_first_expression_counts() {
        let file = r#"{"z_proj": 1, "q_proj": 2, ".*_proj": 3, "a.q_proj": 4, "v": "x"}"#;
        let pattern: Pattern = serde_json::from_str(file).expect("an object");
        for (module, expected) in [("a.q_proj", Some(2.0)), ("a.k_proj", Some(3.0))] {
            assert_eq!(pattern.of(module), Ok(expected), "{module}");
        }
        assert!(pattern.of("a.v").is_err_and(|what| what.contains("is no number")));
    }
}
