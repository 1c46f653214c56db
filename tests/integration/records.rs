//! Records as people have them: other names of columns, columns that are not used, ShareGPT,
//! Alpaca, messages in parts, tables.

use std::fs;
use std::path::Path;

use l2l::config::{Config, Labels, Task};
use l2l::data::{Dataset, Sequence};
use l2l::{Error, shape_of};
use serde_json::{Value, json};

fn config(directory: &str) -> Config {
    let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/text");
    let mut config = Config::default();
    config.model.path = Some(goldens.join(directory));
    config.data.sequence_length = Some(64);
    config
}

fn open(config: &mut Config, name: &str, text: &str) -> Result<Dataset, Error> {
    let folder = tempfile::tempdir().expect("a place for files");
    let file = folder.path().join(name);
    fs::write(&file, text).expect("a directory of ours");
    config.data.train = file.display().to_string().into();
    config.data.validation_split = Some(0.0);
    Ok(Dataset::open(config, &shape_of(config)?)?.0)
}

fn all(data: &Dataset) -> Vec<Sequence> {
    let each = (0..data.len().expect("it ends")).map(|index| data.sequence(index));
    each.collect::<Result<_, _>>().expect("it is there")
}

fn one(line: &Value) -> Sequence {
    let data = open(&mut config("bpe"), "one.jsonl", &line.to_string());
    all(&data.unwrap_or_else(|error| panic!("{line}: {error}"))).remove(0)
}

fn message(role: &str, content: impl Into<Value>) -> Value {
    json!({ "role": role, "content": content.into() })
}

/// The same chat in each of the ways in which people keep chats.
#[test]
fn a_chat_is_the_same_in_every_form() {
    let asked = "What is the bound?";
    let said = "One layer, twice.";
    let chat = one(&json!({ "messages": [message("user", asked), message("assistant", said)] }));
    let sharegpt = json!([{ "from": "human", "value": asked }, { "from": "gpt", "value": said }]);
    let parts =
        json!([{ "type": "text", "text": "What is " }, { "type": "text", "text": "the bound?" }]);
    for line in [
        json!({ "conversations": sharegpt }),
        json!({ "conversations": [message("user", asked), message("assistant", said)], "id": 7 }),
        json!({ "messages": [message("user", parts), message("assistant", said)] }),
        json!({ "prompt": [message("user", asked)], "completion": [message("assistant", said)] }),
        json!({ "instruction": asked, "input": "", "output": said, "text": null }),
    ] {
        assert_eq!(one(&line), chat, "{line}");
    }
    let system =
        [message("system", "Be brief."), message("user", asked), message("assistant", said)];
    let with_system = one(&json!({ "messages": system }));
    for line in [
        json!({ "system": "Be brief.", "conversations": sharegpt }),
        json!({ "prompt": system[..2], "completion": system[2..] }),
    ] {
        assert_eq!(one(&line), with_system, "{line}");
    }
}

/// Of a prompt in messages, what the assistant said in it is not learnt.
#[test]
fn only_the_completion_of_a_conversation_is_learnt() {
    let before = [message("user", "a"), message("assistant", "b"), message("user", "c")];
    let answer = message("assistant", "d e f");
    let all = [&before[..], std::slice::from_ref(&answer)].concat();
    let whole = one(&json!({ "messages": all }));
    let last = one(&json!({ "prompt": before, "completion": [answer] }));
    assert_eq!(whole.tokens, last.tokens);
    let learnt = |one: &Sequence| one.labels.iter().filter(|&&label| label >= 0).count();
    assert!(learnt(&last) < learnt(&whole) && learnt(&last) > 0);
    let first = last.labels.iter().position(|&label| label >= 0).expect("some");
    assert!(last.labels[first..].iter().all(|&label| label >= 0), "{last:?}");
}

/// Without a chat template, Alpaca's records have the prompt that Alpaca was trained with.
#[test]
fn instructions_without_a_template_have_alpacas_prompt() {
    let folder = tempfile::tempdir().expect("a place for files");
    let mut config = config("bpe");
    let from = config.model.path.take().expect("set above");
    for file in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        fs::copy(from.join(file), folder.path().join(file)).expect("ours");
    }
    config.model.path = Some(folder.path().into());
    config.data.sequence_length = None;
    let line = json!({ "instruction": "Add.", "output": "3" }).to_string();
    let data = open(&mut config, "one.jsonl", &line).expect("good");
    let text = data.vocabulary().decode(&all(&data)[0].tokens, false);
    let begins = "Below is an instruction that describes a task. Write a response";
    let ends = "### Instruction:\nAdd.\n\n### Response:\n3";
    assert!(text.starts_with(begins) && text.contains(ends), "{text}");
}

#[test]
fn columns_may_have_other_names_and_others_are_not_used() {
    let text = json!({ "sentence": "a word", "gold": 1, "idx": 4, "text": "another" }).to_string();
    let expected = json!({ "text": "a word", "label": 1 }).to_string();
    let mut config = config("wordpiece");
    config.model.task = Some(Task::SequenceClassification);
    let plain = open(&mut config, "plain.jsonl", &expected).expect("good");
    assert!(plain.unused_columns().is_empty());
    config.data.fields.text = Some("sentence".into());
    config.data.fields.label = Some("gold".into());
    let named = open(&mut config, "named.jsonl", &text).expect("good");
    assert_eq!(all(&named), all(&plain));
    assert_eq!(named.unused_columns(), ["idx", "text"]);
    let error = open(&mut config, "bad.jsonl", &expected).err().expect("no such column");
    assert!(error.to_string().contains("column \"sentence\" is missing"), "{error}");
}

/// The first token of each word has its class, as transformers' examples align them; the tokens are
/// those of `tokenizer(words, is_split_into_words=True)`.
#[test]
fn words_have_classes() {
    let mut config = config("wordpiece");
    config.model.task = Some(Task::TokenClassification);
    config.model.labels = Some(Labels::Names(vec!["O".into(), "LOC".into()]));
    let words = json!(["Wordpieces", "live", "in", "Oslo", "."]);
    let tokens = vec![2, 288, 74, 86, 79, 75, 185, 89, 41, 79, 92, 75, 187, 44, 89, 82, 85, 15, 3];
    let mut labels = vec![-100; tokens.len()];
    for (at, class) in [(1, 0), (8, -100), (12, 0), (13, 1), (17, 0)] {
        labels[at] = class;
    }
    let line = json!({ "tokens": words, "tags": ["O", -100, "O", "LOC", 0] });
    let data = open(&mut config, "one.jsonl", &line.to_string()).expect("good");
    let found = all(&data).remove(0);
    assert_eq!((&found.tokens, &found.labels), (&tokens, &labels));
    let named = json!({ "tokens": words, "ner_tags": [0, -100, 0, 1, 0], "id": "3" });
    let ids = json!({ "input_ids": tokens, "labels": labels });
    for line in [named, ids] {
        let data = open(&mut config, "same.jsonl", &line.to_string()).expect("good");
        assert_eq!(all(&data)[0].labels, labels, "{line}");
    }
    for (line, says) in [
        (json!({ "tokens": words }), "tags is missing"),
        (json!({ "tokens": words, "tags": [0] }), "1 tags for 5 tokens"),
        (json!({ "tokens": ["a"], "tags": ["PER"] }), "\"PER\" is none of O, LOC"),
        (json!({ "tokens": ["a"], "tags": [2] }), "none of the 2 classes"),
        (json!({ "input_ids": [2, 3], "labels": [2, 0] }), "none of the 2 classes"),
        (json!({ "input_ids": [2, 3] }), "labels is missing"),
        (json!({ "text": "a word" }), "this model classifies tokens"),
    ] {
        let error = open(&mut config, "bad.jsonl", &line.to_string()).err().expect("refused");
        assert!(error.to_string().contains(says), "{line}: {error}");
    }
}

#[test]
fn tables_and_lists_are_read_as_lines_are() {
    let mut config = config("wordpiece");
    config.model.task = Some(Task::SequenceClassification);
    let lines = [json!({ "text": "a, b\nc", "label": 1 }), json!({ "text": "word", "label": 0 })];
    let jsonl = format!("{}\n{}\n", lines[0], lines[1]);
    let expected = all(&open(&mut config, "data.jsonl", &jsonl).expect("good"));
    let list = Value::from(lines.to_vec()).to_string();
    for (name, text) in [
        ("data.json", list.as_str()),
        ("lines.json", &jsonl),
        ("data.csv", "label,text,more\r\n1,\"a, b\nc\",x\r\n0,word,\r\n"),
        ("data.csv", "\u{feff}text,label\n\"a, b\nc\",spam\nword,ham\n"),
        ("data.tsv", "text\tlabel\n\"a, b\nc\"\t1\nword\t0\n"),
    ] {
        assert_eq!(all(&open(&mut config, name, text).expect(name)), expected, "{name}: {text}");
    }
    for (name, text, says) in [
        ("data.json", "[1]", "record 1: it is not a JSON object"),
        ("data.json", "[{}", "it is no list of JSON objects: EOF"),
        ("data.json", r#"[{"text": "a", "label": 9}]"#, "record 1: label 9 is none of the 2"),
        ("data.csv", "text,label\na,1\nb\n", "found record with 1 fields"),
        ("data.csv", "text,label\na,1\nb,eggs\n", "record 2: label \"eggs\" is none of ham"),
        ("data.csv", "text,label\n", "there is no sequence in it"),
    ] {
        let error = open(&mut config, name, text).err().expect(says).to_string();
        assert!(error.contains(says) && error.contains(name), "{says:?} in: {error}");
    }
}

#[test]
fn what_is_no_text_of_a_message_is_refused() {
    let image = json!([{ "type": "image", "image": "x.png" }]);
    for (messages, says) in [
        (json!([message("user", image), message("assistant", "b")]), "only text can be read"),
        (json!([message("user", "a"), message("assistant", Value::Null)]), "has no content"),
        (json!([{ "content": "a" }]), "a message has no role"),
        (json!([message("user", 3)]), "is no text"),
    ] {
        let line = json!({ "messages": messages }).to_string();
        let error = open(&mut config("bpe"), "one.jsonl", &line).err().expect(says).to_string();
        assert!(error.contains(says), "{says:?} in: {error}");
    }
}

/// Sequences of a batch have about the same length, and an epoch has each sequence once.
#[test]
fn sequences_are_grouped_by_length() {
    use l2l::data::Batches;
    let lines: Vec<String> =
        (0..64).map(|at| json!({ "input_ids": vec![5; 2 + (at * 29) % 60] }).to_string()).collect();
    let mut config = config("bpe");
    config.step.batch = 4;
    let spread = |config: &mut Config| {
        let data = open(config, "data.jsonl", &lines.join("\n")).expect("good");
        let mut spread = 0;
        let mut lengths = Vec::new();
        for step in 0..16 {
            let batch = Batches::of_step(config, &data, step).expect("it is there");
            let of_batch: Vec<usize> = batch.iter().map(|one| one.tokens.len()).collect();
            spread += of_batch.iter().max().expect("4") - of_batch.iter().min().expect("4");
            lengths.extend(of_batch);
        }
        lengths.sort_unstable();
        (spread, lengths)
    };
    let (shuffled, expected) = spread(&mut config);
    config.data.group_by_length = true;
    let (grouped, lengths) = spread(&mut config);
    assert!(grouped * 5 < shuffled, "{grouped} of {shuffled}");
    assert_eq!(lengths, expected);
}

/// Without the feature, a Parquet file is refused with what to do. `tests/parquet.rs` reads files.
#[cfg(not(feature = "parquet"))]
#[test]
fn a_parquet_file_needs_the_feature() {
    let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/records");
    let mut config = config("bpe");
    config.data.train = goldens.join("snappy.parquet").display().to_string().into();
    let shape = shape_of(&config).expect("a shape of ours");
    let error = Dataset::open(&config, &shape).map(|_| ()).expect_err("it cannot be read");
    let error = error.to_string();
    assert!(error.contains("--features parquet") && error.contains("pandas"), "{error}");
}
