//! PEFT's patterns of modules: regular expressions for the ends of their names.

/// Whether a module's name, or what follows one of its dots, matches a regular expression.
///
/// # Errors
/// The text is no regular expression.
#[cfg(feature = "tokenizers")]
pub(super) fn ends_with(expression: &str, module: &str) -> Result<bool, String> {
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
pub(super) fn ends_with(expression: &str, module: &str) -> Result<bool, String> {
    if expression.contains(|c: char| !c.is_alphanumeric() && c != '_' && c != '.') {
        return Err("regular expressions need the feature `tokenizers`".into());
    }
    let before = module.strip_suffix(expression);
    Ok(before.is_some_and(|before| before.is_empty() || before.ends_with('.')))
}

#[cfg(all(test, feature = "tokenizers"))]
mod tests {
    use super::ends_with;

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
}
