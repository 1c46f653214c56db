//! Data of every kind becomes the same tokens and labels as in transformers.

use std::fs;
use std::path::{Path, PathBuf};

use l2l::config::{Config, Task, TooLong};
use l2l::data::{Batches, Dataset, Sequence};
use l2l::{Error, shape_of};
use serde_json::{Value, json};

fn goldens() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/text")
}

fn config(directory: &str, file: &Path, positions: usize) -> Config {
    let mut config = Config::default();
    config.model.path = Some(goldens().join(directory));
    config.data.train = file.display().to_string().into();
    config.data.validation_split = Some(0.0);
    config.data.sequence_length = Some(positions);
    config.data.shuffle = false;
    config.step.batch = 1;
    config
}

fn open(config: &Config) -> Result<Dataset, Error> {
    Ok(Dataset::open(config, &shape_of(config)?)?.0)
}

/// The sequences of a file with this text.
fn sequences(config: &mut Config, name: &str, text: &str) -> Result<Vec<Sequence>, Error> {
    let folder = tempfile::tempdir().expect("a place for files");
    let file = folder.path().join(name);
    fs::write(&file, text).expect("a directory of ours");
    config.data.train = file.display().to_string().into();
    let data = open(config)?;
    (0..data.len().expect("it ends")).map(|index| data.sequence(index)).collect()
}

fn ids(value: &Value) -> Vec<i64> {
    value.as_array().into_iter().flatten().filter_map(Value::as_i64).collect()
}

fn as_ids<'a>(tokens: impl IntoIterator<Item = &'a u32>) -> Vec<i64> {
    tokens.into_iter().map(|&id| i64::from(id)).collect()
}

/// A text file: its tokens are the reference's, and every sequence but the last is full.
fn stream_is(case: &Value, directory: &str, positions: usize) {
    let mut config = config(directory, &goldens().join("stream.txt"), positions);
    let text = fs::read_to_string(goldens().join("stream.txt")).expect("committed");
    let all = sequences(&mut config, "stream.txt", &text).expect("good");
    let found = as_ids(all.iter().flat_map(|one| &one.tokens));
    assert_eq!(found, ids(&case["input_ids"]), "{case}");
    assert!(all[..all.len() - 1].iter().all(|one| one.tokens.len() == positions));
}

/// A chat that ends unanswered: what follows its last answer is left out, for nothing of it is
/// learnt.
fn unanswered_is(case: &Value, mut config: Config, line: &str) {
    let found = sequences(&mut config, "one.jsonl", line).expect("the first is answered");
    let tokens = as_ids(&found[0].tokens);
    let labels: Vec<i64> = found[0].labels.iter().map(|&label| i64::from(label)).collect();
    let left = tokens.len();
    assert_eq!(tokens, ids(&case["input_ids"])[..left]);
    let expected = ids(&case["labels"]);
    assert_eq!(labels, expected[..left]);
    assert!(left < expected.len() && expected[left..].iter().all(|&label| label == -100));
}

#[test]
fn every_kind_of_line_is_as_transformers_reads_it() {
    let text = fs::read_to_string(goldens().join("cases.json")).expect("it is committed");
    let cases: Value = serde_json::from_str(&text).expect("JSON");
    let mut seen = 0;
    for case in cases.as_array().expect("a list") {
        let directory = case["directory"].as_str().expect("a name");
        let kind = case["kind"].as_str().expect("a kind");
        let positions = case["positions"].as_u64().expect("a number") as usize;
        let expected = ids(&case["input_ids"]);
        if kind == "stream" {
            stream_is(case, directory, positions);
            seen += 1;
            continue;
        }
        let mut config = config(directory, Path::new(""), positions);
        if case["too_long"] == "cut" {
            config.data.too_long = TooLong::Cut;
        }
        if kind == "label" || kind == "pair" {
            config.model.task = Some(Task::SequenceClassification);
        }
        let line = case["line"].to_string();
        let last = case["line"]["messages"].as_array().and_then(|all| all.last());
        if last.is_some_and(|last| last["role"] != "assistant") {
            unanswered_is(case, config, &line);
            continue;
        }
        let found =
            sequences(&mut config, "one.jsonl", &line).unwrap_or_else(|e| panic!("{case}: {e}"));
        let [one] = &found[..] else { panic!("{case}: {} sequences", found.len()) };
        let is_masked = directory == "wordpiece" && kind == "text";
        let mut tokens = one.tokens.clone();
        let labels = &one.labels;
        if is_masked {
            // The labels stand where the masked tokens were.
            let hidden = tokens.iter_mut().zip(labels).filter(|(_, label)| **label >= 0);
            hidden.for_each(|(token, label)| *token = *label as u32);
            // A text may consist of unknown tokens only, which are special and not masked.
            let is_known = |id: &i64| *id > 4;
            assert_eq!(labels.iter().any(|&l| l >= 0), expected.iter().any(is_known), "{case}");
        }
        assert_eq!(as_ids(&tokens), expected, "{case}");
        let expected = ids(&case["labels"]);
        match kind {
            "label" | "pair" => assert_eq!(i64::from(labels[0]), expected[0], "{case}"),
            _ if is_masked => {}
            _ => {
                let labels: Vec<i64> = labels.iter().map(|&label| i64::from(label)).collect();
                assert_eq!(labels, expected, "{case}");
            }
        }
        if !case["token_type_ids"].is_null() && directory == "wordpiece" {
            let kinds: Vec<i64> = one.kinds.iter().map(|&kind| i64::from(kind)).collect();
            assert_eq!(kinds, ids(&case["token_type_ids"]), "{case}");
        }
        seen += 1;
    }
    assert!(seen >= 90, "{seen} cases");
}

/// 15 % of the tokens are predicted: 8 in 10 of them are masked, 1 in 10 is a random token. The
/// same seed gives the same masks, and another epoch other ones.
#[test]
fn masks_are_drawn_as_transformers_draws_them() {
    let words =
        "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi".repeat(40);
    let mut config = config("wordpiece", Path::new(""), 100);
    let folder = tempfile::tempdir().expect("a place for files");
    let file = folder.path().join("words.txt");
    fs::write(&file, &words).expect("a directory of ours");
    config.data.train = file.display().to_string().into();
    let data = open(&config).expect("good");
    let rows = data.len().expect("it ends");
    let mut tokens = 0.0;
    let mut found = 0.0;
    let mut masked = 0.0;
    let mut kept = 0.0;
    const EPOCHS: u64 = 200;
    let tokenizer = data.vocabulary().tokenizer().expect("a directory's");
    let mask = tokenizer.mask().expect("an encoder's");
    for index in 0..rows * EPOCHS {
        let [one] = &Batches::of_step(&config, &data, index).expect("good")[..] else { panic!() };
        assert_eq!(one, &Batches::of_step(&config, &data, index).expect("good")[0]);
        for (&token, &label) in one.tokens.iter().zip(&one.labels) {
            if label < 0 {
                tokens += f64::from(u8::from(!tokenizer.is_special(token)));
                continue;
            }
            tokens += 1.0;
            found += 1.0;
            masked += f64::from(u8::from(token == mask));
            kept += f64::from(u8::from(token as i32 == label));
        }
    }
    let within = |share: f64, of: f64, count: f64| {
        let error = (of * (1.0 - of) / count).sqrt();
        assert!((share - of).abs() < 5.0 * error, "{share} of {of}, ± {error}");
    };
    within(found / tokens, 0.15, tokens);
    within(masked / found, 0.8, found);
    within(kept / found, 0.1 + 0.1 / tokenizer.vocabulary() as f64, found);
    let of = |index: u64| Batches::of_step(&config, &data, index).expect("good")[0].labels.clone();
    assert_ne!(of(0), of(rows), "an epoch masks anew");
    let mut seeded = config.clone();
    seeded.step.seed = 1;
    let other = open(&seeded).expect("good");
    assert_ne!(of(0), Batches::of_step(&seeded, &other, 0).expect("good")[0].labels);
}

/// A text that is too long is split into several sequences, and no token is lost.
#[test]
fn text_is_split_when_asked() {
    let text = "one two three four five six seven eight nine ten ".repeat(8);
    let line = json!({ "text": text }).to_string();
    for directory in ["bpe", "llama", "wordpiece"] {
        let mut config = config(directory, Path::new(""), 20);
        config.data.too_long = TooLong::Split;
        let pieces = sequences(&mut config, "one.jsonl", &line).expect("good");
        config.data.sequence_length = Some(128);
        config.data.too_long = TooLong::Cut;
        let whole = sequences(&mut config, "one.jsonl", &line).expect("good");
        assert!(pieces.iter().all(|one| one.tokens.len() <= 20) && pieces.len() > 3);
        if directory != "wordpiece" {
            let all: Vec<u32> = pieces.iter().flat_map(|one| one.tokens.clone()).collect();
            assert_eq!(all[..whole[0].tokens.len()], whole[0].tokens);
        }
    }
}

/// An epoch sees each file as often as its weight says, and several epochs see all of it.
#[test]
fn files_have_weights() {
    let folder = tempfile::tempdir().expect("a place for files");
    let file = |name: &str, from: u32, count: u32| {
        let path = folder.path().join(name);
        let lines: Vec<String> =
            (from..from + count).map(|id| format!("{{\"input_ids\": [{id}, {id}]}}")).collect();
        fs::write(&path, lines.join("\n")).expect("a directory of ours");
        path.display().to_string()
    };
    let a = file("a.jsonl", 0, 4);
    let b = file("b.jsonl", 100, 6);
    let text = format!(
        "data = {{ train = [\"{a}\", {{ path = \"{b}\", weight = 0.5 }}], shuffle = false }}\n\
         step.batch = 1"
    );
    let data = open(&Config::parse(&text).expect("good")).expect("good");
    assert_eq!(data.len(), Some(7));
    let first = |index: u64| data.sequence(index).expect("good").tokens[0];
    let two_epochs: Vec<u32> = (0..14).map(first).collect();
    assert_eq!(two_epochs, [0, 1, 2, 3, 100, 101, 102, 0, 1, 2, 3, 103, 104, 105]);
    let folder = folder.path().display();
    let whole = format!("data.train = \"{folder}\"");
    assert_eq!(open(&Config::parse(&whole).expect("good")).expect("good").len(), Some(10));
}

/// The message of a bad line names the file, the line and the problem.
#[test]
fn bad_lines_are_refused() {
    let no_template = tempfile::tempdir().expect("a place for files");
    for file in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        fs::copy(goldens().join("bpe").join(file), no_template.path().join(file)).expect("ours");
    }
    let classes = Some(Task::SequenceClassification);
    let chat = |roles: &[&str]| {
        let messages: Vec<Value> =
            roles.iter().map(|role| json!({ "role": role, "content": "x" })).collect();
        json!({ "messages": messages }).to_string()
    };
    let good = "{\"text\": \"a word\"}\n";
    let cases: Vec<(&str, Option<Task>, String, &str)> = vec![
        ("bpe", None, format!("{good}\n{good}"), "line 2: it is empty"),
        ("bpe", None, "{}".into(), "line 1: it needs one of text"),
        ("bpe", None, "[\"text\"]".into(), "line 1: it is not a JSON object"),
        ("bpe", None, format!("{good}{{\"text\": 1}}"), "line 2: text: invalid type: integer `1`"),
        ("bpe", None, r#"{"text": "a", "text": "b"}"#.into(), "duplicate field `text`"),
        ("bpe", None, format!("{good}{{\"text\": \"\"}}"), "line 2: text is empty"),
        (
            "bpe",
            None,
            r#"{"text": "a", "prompt": "b"}"#.into(),
            "it has text and prompt: name the one to use, for example data.fields.text",
        ),
        ("bpe", None, r#"{"text": "a", "labels": [1]}"#.into(), "labels goes with input_ids"),
        ("bpe", None, r#"{"prompt": "a"}"#.into(), "completion is missing"),
        ("bpe", None, r#"{"prompt": "a", "completion": ""}"#.into(), "completion is empty"),
        ("wordpiece", classes, r#"{"text": "a", "lable": 1}"#.into(), "label is missing"),
        (
            "bpe",
            None,
            r#"{"prompt": "a", "chosen": "b", "rejected": "c"}"#.into(),
            "data.fields.completion = \"chosen\"",
        ),
        ("bpe", None, format!("{}{}", good, chat(&["user"])), "line 2: the chat has no answer"),
        ("bpe", None, r#"{"messages": []}"#.into(), "messages is empty"),
        (
            "bpe",
            None,
            r#"{"messages": [{"role": "user"}]}"#.into(),
            "a message of \"user\" has no content",
        ),
        ("wordpiece", None, chat(&["assistant"]), "does not predict the next token"),
        ("wordpiece", classes, good.into(), "line 1: label is missing"),
        ("wordpiece", classes, r#"{"text": "a", "label": 2}"#.into(), "none of the 2 classes"),
        ("wordpiece", classes, r#"{"text": "a", "label": "eggs"}"#.into(), "none of ham, spam"),
        ("wordpiece", classes, r#"{"text": "a", "label": [1]}"#.into(), "a number or a name"),
    ];
    for (directory, task, text, says) in cases {
        let mut config = config(directory, Path::new(""), 64);
        config.model.task = task;
        let error = sequences(&mut config, "bad.jsonl", &text).expect_err(says);
        assert_eq!(error.exit_code(), 2);
        let error = error.to_string();
        assert!(error.contains(says) && error.contains("bad.jsonl"), "{says:?} in: {error}");
    }
    let mut config = config("bpe", Path::new(""), 64);
    config.model.path = Some(no_template.path().into());
    let error = sequences(&mut config, "bad.jsonl", &chat(&["user", "assistant"]));
    assert!(error.expect_err("no template").to_string().contains("no chat template"));
    fs::remove_file(no_template.path().join("tokenizer.json")).expect("ours");
    let error = sequences(&mut config, "bad.jsonl", good).expect_err("no tokenizer").to_string();
    assert!(error.contains("no tokenizer.json"), "{error}");
}

/// A resumed run refuses other data, and data of another tokenizer.
#[test]
fn another_tokenizer_is_other_data() {
    let folder = tempfile::tempdir().expect("a place for files");
    let other = folder.path().join("other");
    fs::create_dir(&other).expect("a directory of ours");
    for file in ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"] {
        fs::copy(goldens().join("bpe").join(file), other.join(file)).expect("ours");
    }
    let mut config = config("bpe", &goldens().join("stream.txt"), 32);
    let here = open(&config).expect("good").fingerprint();
    config.model.path = Some(other.clone());
    assert_eq!(open(&config).expect("good").fingerprint(), here, "the same, elsewhere");
    fs::write(other.join("chat_template.jinja"), "{{ messages }}").expect("ours");
    assert_ne!(open(&config).expect("good").fingerprint(), here);
    // Token ids need no tokenizer, so a broken one does not matter.
    fs::write(other.join("chat_template.jinja"), "{% if %}").expect("ours");
    let ids = sequences(&mut config, "ids.jsonl", "{\"input_ids\": [1, 2, 3]}").expect("good");
    assert_eq!(ids[0].tokens, [1, 2, 3]);
    let line = "{\"messages\": [{\"role\": \"assistant\", \"content\": \"a\"}]}";
    let error = sequences(&mut config, "chat.jsonl", line).expect_err("broken").to_string();
    assert!(error.contains("chat_template.jinja"), "{error}");
}

/// A chat is refused when the assistant's part is cut off, because no label is left.
#[test]
fn a_row_without_anything_to_learn_is_refused() {
    let mut config = config("bpe", Path::new(""), 8);
    config.data.too_long = TooLong::Cut;
    let line = json!({ "messages": [
        { "role": "user", "content": "a question that is longer than eight tokens are" },
        { "role": "assistant", "content": "yes" },
    ] });
    let error = sequences(&mut config, "bad.jsonl", &line.to_string()).expect_err("cut off");
    let error = error.to_string();
    assert!(error.contains("line 1: nothing of it is learnt"), "{error}");
}
