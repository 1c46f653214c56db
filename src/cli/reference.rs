//! The config's JSON schema, and the reference page generated from it.

use std::fmt::Write;

use l2l::Config;
use serde_json::Value;

/// A JSON schema of config files.
pub(super) fn schema() -> String {
    let schema = schemars::schema_for!(Config);
    serde_json::to_string_pretty(&schema).expect("a schema is JSON")
}

/// A page with every key, its default and its meaning.
pub(super) fn page() -> String {
    let schema = schemars::schema_for!(Config).to_value();
    let defaults = serde_json::to_value(Config::default()).expect("a config is plain data");
    let mut page = String::from(
        "# Configuration\n\n\
         Every key of a config file. This page is generated from `src/config` by `l2l config\n\
         reference`. A value comes from `--set section.key=value`; else from the environment\n\
         (`L2L__SECTION__KEY`); else from the file; else it is the default. `l2l config show` \
         prints\n\
         the resolved config, and `l2l config schema` prints a JSON schema for editors.\n",
    );
    let sections = schema["properties"].as_object().into_iter().flatten();
    for (section, of_section) in sections {
        let resolved = resolve(&schema, of_section);
        let about = of_section["description"].as_str().unwrap_or_default();
        let _ = write!(page, "\n## `[{section}]`\n\n{}\n\n", one_line(about));
        page.push_str("| key | default | meaning |\n|---|---|---|\n");
        rows(&mut page, "", &schema, resolved, &defaults[section]);
    }
    page
}

/// Writes a row for each key of a section. The keys of a section inside it follow its own row.
fn rows(page: &mut String, prefix: &str, schema: &Value, section: &Value, defaults: &Value) {
    for (key, of_key) in section["properties"].as_object().into_iter().flatten() {
        let default = match &defaults[key] {
            Value::Null => String::new(),
            value => format!("`{value}`"),
        };
        let mut meaning = one_line(of_key["description"].as_str().unwrap_or_default());
        let choices = choices(schema, of_key);
        if !choices.is_empty() {
            let _ = write!(meaning, " One of {}.", choices.join(", "));
        }
        let meaning = meaning.replace('|', "\\|");
        let _ = writeln!(page, "| `{prefix}{key}` | {default} | {meaning} |");
        let inner = resolve(schema, &of_key["anyOf"][0]);
        let inner_defaults: Value = inner["properties"]
            .as_object()
            .into_iter()
            .flatten()
            .map(|(key, of_key)| (key.clone(), of_key["default"].clone()))
            .collect();
        rows(page, &format!("{prefix}{key}."), schema, inner, &inner_defaults);
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The schema that a `$ref`, or an `allOf` of one `$ref`, refers to.
fn resolve<'s>(schema: &'s Value, of: &'s Value) -> &'s Value {
    let reference = of["$ref"].as_str().or_else(|| of["allOf"][0]["$ref"].as_str());
    match reference.and_then(|reference| reference.strip_prefix('#')) {
        Some(pointer) => schema.pointer(pointer).unwrap_or(of),
        None => of,
    }
}

/// The values of an enumeration.
fn choices(schema: &Value, of: &Value) -> Vec<String> {
    let resolved = resolve(schema, of);
    let listed = resolved["enum"].as_array().into_iter().flatten();
    let alternatives = resolved["oneOf"].as_array().into_iter().flatten();
    let constant = |one: &Value| one["const"].as_str().map(|text| format!("`\"{text}\"`"));
    let text = |one: &Value| one.as_str().map(|text| format!("`\"{text}\"`"));
    listed.filter_map(text).chain(alternatives.filter_map(constant)).collect()
}
