//! Tokenizers and chat templates of strangers: what would overflow the stack, hang, take all memory
//! or panic is refused, with the file's name and the limit.

use std::fs;
use std::path::{Path, PathBuf};

use l2l::hf::{Message, RecordValue, Tokenizer};
use serde_json::{Value, json};
use tempfile::TempDir;

fn goldens(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/text").join(name)
}

fn folder_with(files: &[(&str, &[u8])]) -> TempDir {
    let folder = tempfile::tempdir().expect("a place for files");
    for (name, bytes) in files {
        fs::write(folder.path().join(name), bytes).expect("a directory of ours");
    }
    folder
}

/// A chat rendered by a template.
fn render(template: &str, messages: &[Message]) -> Result<String, String> {
    let tokenizer = fs::read(goldens("bpe").join("tokenizer.json")).expect("it is committed");
    let files = [("tokenizer.json", &tokenizer[..]), ("chat_template.jinja", template.as_bytes())];
    let folder = folder_with(&files);
    let opened = Tokenizer::open(folder.path()).expect("it is read").expect("it is there");
    opened.template()?.expect("it is there").ask(messages, &RecordValue::Null)
}

fn chat() -> Vec<Message> {
    vec![Message::new("user", "a"), Message::new("assistant", "b")]
}

#[track_caller]
fn refused(template: &str, says: &str) {
    let shown = &template[..template.len().min(60)];
    let error = render(template, &chat()).expect_err(shown);
    let names = error.contains("chat_template.jinja: chat template: ") || says.is_empty();
    assert!(names && error.contains(says), "{shown}: {error}");
}

/// Before, each of these ended the process: with an overflow of the stack.
#[test]
fn templates_that_nest_too_deep() {
    const DEEP: usize = 100_000;
    let around = |open: &str, inner: &str, close: &str| {
        format!("{}{inner}{}", open.repeat(DEEP), close.repeat(DEEP))
    };
    for (template, says) in [
        (around("{% if a %}", "", "{% endif %}"), "at most"),
        (format!("{{{{ {} }}}}", around("(", "1", ")")), "500"),
        (format!("{{{{ {} }}}}", around("[", "", "]")), "500"),
        (format!("{{{{ {} a }}}}", "not ".repeat(DEEP)), "500"),
        (format!("{{{{ {}1 }}}}", "-".repeat(DEEP)), "500"),
        (format!("{{{{ a{} }}}}", ".b".repeat(DEEP)), "500"),
        (format!("{{{{ a{} }}}}", "|e".repeat(DEEP)), "500"),
        (format!("{{{{ a{} }}}}", "[0]".repeat(DEEP)), "500"),
        (format!("{{{{ a{} }}}}", "()".repeat(DEEP)), "500"),
        (format!("{{{{ 1{} }}}}", "+1".repeat(DEEP)), "500"),
        (format!("{{{{ 1{} }}}}", " if a else 1".repeat(40_000)), "500"),
        (format!("{{% if a %}}{}{{% endif %}}", "{% elif a %}".repeat(40_000)), "300"),
        ("{% if a %}".repeat(50_000), "recursion"),
        (" ".repeat(1 << 20), "524288"),
    ] {
        refused(&template, says);
    }
}

/// As deep as the checks let pass: on the 2 MB of a test's thread.
#[test]
fn templates_that_nest_as_deep_as_they_may() {
    const OPERATORS: usize = 498;
    const BLOCKS: usize = 140;
    let if_chain = format!("{{% if a %}}{}{{% endif %}}", "{% elif a %}".repeat(300));
    let inside = |inner: String| {
        format!("{}{inner}{}", "{% if not a %}".repeat(BLOCKS), "{% endif %}".repeat(BLOCKS))
    };
    for inner in [
        format!("{{{{ {}a }}}}", "not ".repeat(OPERATORS)),
        format!("{{{{ {}1 }}}}", "- ".repeat(OPERATORS)),
        format!("{{{{ a{} }}}}", "|e".repeat(OPERATORS)),
        format!("{{{{ 1{} }}}}", "+ 1".repeat(OPERATORS)),
        format!("{{{{ 'a'{} }}}}", "~a".repeat(OPERATORS)),
        format!("{{{{ 1{} }}}}", " if a else 1".repeat(OPERATORS / 2)),
        if_chain,
    ] {
        render(&inside(inner), &chat()).expect("it is within the limits");
    }
}

/// Before, these ran forever, or until memory was gone.
#[test]
fn templates_that_run_on_and_on() {
    let loops = "{% for a in range(99999) %}".repeat(4) + &"{% endfor %}".repeat(4);
    for (template, says) in [
        (&loops[..], "10000000 instructions"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% macro f(x) %}{{ f(x + 1) }}{{ f(x + 2) }}{% endmacro %}{{ f(1) }}", ""),
        ("{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}", "recursion"),
        ("{{ 5 in [1] * 1000000000000000000 }}", ""),
        ("{% set n = 1000000000000 %}{{ 5 in [1] * n }}", "256 MiB"),
        ("{% set n = 1000000000000 %}{{ ([1] * n)|length }}", "256 MiB"),
        ("{{ 'abc'.count('') }}{% for a in range(99999) %}{{ messages|sum }}{% endfor %}", ""),
        // Each value is in the next one twice: it has 2^60 parts.
        (
            "{% set ns = namespace(a=[]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}\
          {% endfor %}{{ ns.a == [ns.a] }}",
            "256 MiB",
        ),
    ] {
        refused(template, says);
    }
}

#[test]
fn templates_that_eat_memory() {
    let double = "{% set ns = namespace(s='xxxxxxxx', l=[1]) %}{% for i in range(99) %}";
    let large = "{% set s = 'x' * 999999 %}{% set s = s ~ s ~ s ~ s ~ s ~ s ~ s ~ s ~ s %}";
    for (body, says) in [
        ("{% set ns.s = ns.s ~ ns.s %}{% endfor %}", "256 MiB"),
        ("{% set ns.s = ns.s + ns.s %}{% endfor %}", "256 MiB"),
        ("{% set ns.s = ns.s * 8 %}{% endfor %}", "too large"),
        ("{% set ns.l = ns.l + ns.l %}{% endfor %}", "256 MiB"),
        ("{% set ns.l = ns.l * 8 %}{% endfor %}", "256 MiB"),
        ("{% set ns.s = ns.s|replace('x', 'xxxx') %}{% endfor %}", "256 MiB"),
        ("{% set ns.s = ns.s.replace('x', 'xxxx') %}{% endfor %}", "256 MiB"),
        ("{% set ns.s = [ns.s, ns.s]|join(ns.s) %}{% endfor %}", "256 MiB"),
        ("{% set ns.s = ns.s.join([ns.s, ns.s]) %}{% endfor %}", "256 MiB"),
        ("{% set ns.s = '%s%s'|format(ns.s, ns.s) %}{% endfor %}", "256 MiB"),
        ("{% set ns.s = '{0}{0}'.format(ns.s) %}{% endfor %}", "256 MiB"),
        ("{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = x %}{% endfor %}", "256 MiB"),
        ("{% set ns.s = [ns.s, ns.s]|tojson %}{% endfor %}", "256 MiB"),
        ("{% set ns.s = [ns.s, ns.s]|string %}{% endfor %}", "256 MiB"),
        ("{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}", "256 MiB"),
        ("{% endfor %}{{ 'a\n'|indent(1000000000) }}", "1000 columns"),
        ("{% endfor %}{{ 'a\n'|indent(width=1000000000) }}", "1000 columns"),
        ("{% endfor %}{{ ['a\n']|map('indent', 1000000000)|list }}", "1000 columns"),
        ("{% endfor %}{{ '%999999999d'|format(1) }}", "256 MiB"),
        ("{% endfor %}{{ '%*d'|format(999999999, 1) }}", "1000 columns"),
        ("{% endfor %}{{ '{:999999999}'.format(1) }}", "256 MiB"),
        ("{% endfor %}{{ [1]|batch(1000000000000)|list }}", "100000"),
        ("{% endfor %}{{ [1]|slice(1000000000000)|list }}", "100000"),
        ("{% endfor %}{{ [1]|tojson(indent=1000000000) }}", "at most 64"),
        ("{% endfor %}{{ range(1000000000) }}", "range"),
        ("{% endfor %}{{ 'x' * 99999999 }}{{ 'x' * 99999999 }}", "64 MiB"),
        ("{% endfor %}{{ 'x' * 10 ** 8 }}", "64 MiB"),
    ] {
        refused(&format!("{double}{body}"), says);
    }
    // Text between tags counts as well, and what is shown many times.
    let raw = "x".repeat(100_000);
    refused(&format!("{{% for a in range(9999) %}}{raw}{{% endfor %}}"), "256 MiB");
    let set = format!("{{% set s %}}{{% for a in range(9999) %}}{raw}{{% endfor %}}{{% endset %}}");
    refused(&set, "256 MiB");
    refused(&format!("{large}{{% for i in range(99) %}}{{{{ s }}}}{{% endfor %}}"), "256 MiB");
    refused(&format!("{large}{{{{ s|list }}}}"), "256 MiB");
}

/// Values that nest without end: dropping or printing them would overflow the stack.
#[test]
fn templates_that_nest_values() {
    let deep = |body: &str| {
        format!("{{% set ns = namespace(a=[]) %}}{{% for i in range(99999) %}}{body}{{% endfor %}}")
    };
    refused(&deep("{% set ns.a = [ns.a] %}"), "deeper than 256");
    refused(&deep("{% set ns.a = {'a': ns.a} %}"), "deeper than 256");
    refused(&deep("{% set ns.a = dict(a=ns.a) %}"), "deeper than 256");
    refused(&deep("{% set ns.a = namespace(a=ns.a) %}"), "namespace");
    refused(&deep("{% set ns.a = ns %}"), "namespace");
    refused(&deep("{% set ns.a = [ns] %}"), "namespace");
    refused(&deep("{% macro f() %}{{ ns }}{% endmacro %}{% set ns.a = f %}"), "macro");
    // A slice of a slice is a list again.
    render(&deep("{% set ns.a = ns.a[1:] %}"), &chat()).expect("lists of nothing");
    render(&deep("{% set ns.a = ns.a + [] %}"), &chat()).expect("lists of nothing");
}

/// Slices as Python has them. The engine panics at an empty list and a negative step.
#[test]
fn slices() {
    let templates = "{{ messages[::-1] }}{{ ''[::-1] }}{{ [1,2][1:5:-1] }}";
    assert_eq!(render(templates, &[]).expect("it is good"), "[][]");
    for (slice, expected) in [
        ("[1:]", "bcdef"),
        ("[:-1]", "abcde"),
        ("[::-1]", "fedcba"),
        ("[::2]", "ace"),
        ("[4:1:-2]", "ec"),
        ("[-2:]", "ef"),
        ("[9:]", ""),
        ("[:99]", "abcdef"),
        ("[2:2]", ""),
        ("[::-9223372036854775807]", "f"),
    ] {
        let template = format!("{{{{ 'abcdef'{slice} }}}}{{{{ ('abcdef'|list){slice}|join }}}}");
        let found = render(&template, &chat()).expect("it is good");
        assert_eq!(found, expected.repeat(2), "{slice}");
    }
}

/// Templates as they are published stay far below the limits: 10,000 messages with a tool's call.
#[test]
fn a_long_chat_is_rendered() {
    let template = include_str!("../../fuzz/corpus/template/qwen");
    let mut messages = chat();
    let calls = json!([{ "name": "f", "arguments": {} }]);
    messages[1].more.push(("tool_calls".into(), calls.into()));
    let few = render(template, &messages).expect("it is good");
    let count = if cfg!(debug_assertions) { 500 } else { 2_000 };
    let long = vec![messages; count].concat();
    let many = render(template, &long).expect("it is good");
    assert!(few.contains("\"arguments\": {}") && many.len() > count * few.len() / 2, "{few}");
    let long = vec![Message::new("user", "a ".repeat(5_000_000))];
    assert!(render(template, &long).expect("10 MB").len() > 10_000_000);
}

fn tokenizer(change: impl Fn(&mut Value)) -> Result<Option<Tokenizer>, String> {
    let text = fs::read(goldens("bpe").join("tokenizer.json")).expect("it is committed");
    let mut all: Value = serde_json::from_slice(&text).expect("JSON");
    change(&mut all);
    let folder = folder_with(&[("tokenizer.json", all.to_string().as_bytes())]);
    Tokenizer::open(folder.path()).map_err(|error| error.to_string())
}

/// Before, the library panicked: when it read the file, or at the first text.
#[test]
fn tokenizers_that_panic() {
    let piece = |id: &str| json!([{ "SpecialToken": { "id": id, "type_id": 0 } }]);
    let template = |single: Value, special: Value| {
        json!({ "type": "TemplateProcessing", "single": single, "pair": [],
            "special_tokens": special })
    };
    let second = json!([{ "Sequence": { "id": "B", "type_id": 0 } }]);
    let uneven = json!({ "x": { "id": "x", "ids": [1, 2], "tokens": ["x"] } });
    type Change<'a> = Box<dyn Fn(&mut Value) + 'a>;
    let cases: [(Change<'_>, &str); 7] = [
        (
            Box::new(|all| all["model"]["continuing_subword_prefix"] = json!("################")),
            "continuing_subword_prefix",
        ),
        (Box::new(|all| all["post_processor"] = template(piece("no"), json!({}))), "\"no\""),
        (Box::new(|all| all["post_processor"] = template(second.clone(), json!({}))), "names B"),
        (Box::new(|all| all["post_processor"] = template(piece("x"), uneven.clone())), "ids"),
        (
            Box::new(|all| {
                all["post_processor"] = json!({ "type": "Sequence",
                    "processors": [template(piece("no"), json!({}))] });
            }),
            "\"no\"",
        ),
        (
            Box::new(|all| {
                all["model"]["vocab"] = json!({ "a": 0, "b": 1 });
                all["model"]["merges"] = json!([["a", "b"]]);
            }),
            "vocab has not",
        ),
        (
            Box::new(|all| {
                let step = json!({ "type": "Replace", "pattern": { "String": "a" },
                    "content": "aaaaaaaa" });
                all["normalizer"] =
                    json!({ "type": "Sequence", "normalizers": vec![step.clone(); 40] });
            }),
            "times longer",
        ),
    ];
    for (change, says) in &cases {
        let error = tokenizer(change).err().unwrap_or_else(|| panic!("{says}: it was read"));
        assert!(error.contains("tokenizer.json: ") && error.contains(says), "{error}");
    }
    tokenizer(|_| ()).expect("it is good").expect("it is there");
}
