//! Messages about values that Python's `json` writes and JSON does not have, such as NaN. The
//! library's own messages do not name them.

/// The message of an error in the text of a value, without its place in that text.
pub(super) fn of_value(text: &str, error: &serde_json::Error) -> String {
    let place = format!(" at line {} column {}", error.line(), error.column());
    let short = format!(" at column {}", error.column());
    explain(text, error).replace(&place, "").replace(&short, "")
}

/// The message of an error in this text.
pub(super) fn explain(text: &str, error: &serde_json::Error) -> String {
    // serde_json counts lines from this text. The caller adds the line of the file.
    let plain = error.to_string().replace(" at line 1 column", " at column");
    if error.line() == 0 {
        return plain;
    }
    let line = text.lines().nth(error.line() - 1).unwrap_or_default();
    // The column of the last byte that was read; it may be that of the byte behind the value.
    let from = error.column().saturating_sub(1).min(line.len());
    let begins = |name: &str| {
        let around = from.saturating_sub(1)..=from;
        around.into_iter().any(|at| line.as_bytes()[at..].starts_with(name.as_bytes()))
    };
    for name in ["NaN", "-Infinity", "Infinity"] {
        if begins(name) {
            return format!("{plain}: JSON has no {name}: write null, or leave the value out");
        }
    }
    let message = plain.to_lowercase();
    if message.contains("surrogate") || message.contains("unexpected end of hex escape") {
        return format!(
            "{plain}: a \\u escape is one half of a surrogate pair, which is no character: the \
             text was cut within an emoji or another character of two halves"
        );
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_python_writes_and_json_does_not_have() {
        for (text, says) in [
            (r#"{"label": NaN}"#, "at column 11: JSON has no NaN: write null"),
            (r#"{"a": "é", "b": [1, Infinity]}"#, "JSON has no Infinity"),
            ("{\"a\": 1,\n \"b\": -Infinity}", "JSON has no -Infinity"),
            (r#"{"text": "a \ud83d"}"#, "one half of a surrogate pair"),
            (r#"{"text": "a \ud83d b"}"#, "one half of a surrogate pair"),
            (r#"{"text": "a \ude00 b"}"#, "one half of a surrogate pair"),
            (r#"{"text": "a \ud83d\u0041 b"}"#, "one half of a surrogate pair"),
            (r#"{"text": nope}"#, "expected ident at column 11"),
        ] {
            let error = serde_json::from_str::<serde_json::Value>(text).expect_err(text);
            let found = explain(text, &error);
            assert!(found.contains(says), "{says:?} in: {found}");
        }
    }
}
