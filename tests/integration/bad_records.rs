//! Records that cannot be used or teach nothing: refused by line, or left out and counted. Also
//! tokenizers with more tokens than the model, and tokens of spaces.

use std::fs;
use std::path::Path;

use l2l::config::{BadRecords, Task, TooLong};
use l2l::data::{Batches, Dataset};
use serde_json::{Value, json};

use crate::data_files::{all, config, goldens, open, refusal, with_tokenizer};
use crate::program::{events, good, of_kind, output};

/// Adds a token to a tokenizer, beyond the model's vocabulary of 384.
fn add_token(tokenizer: &mut Value) {
    let token = json!({
        "id": 384, "content": "<|extra|>", "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true
    });
    tokenizer["added_tokens"].as_array_mut().expect("a list").push(token);
}

/// A file of each format with the same bad records between the same good ones, and the number of
/// bad ones.
fn mixed_files() -> Vec<(&'static str, String, u64)> {
    let lines = [
        r#"{"text": "one word", "label": "ham"}"#,
        r#"{"text": "a text without a label"}"#,
        r#"{"text": "another word", "label": "spam"}"#,
        r#"{"text": "", "label": "spam"}"#,
        r#"{"text": "of no class", "label": "eggs"}"#,
        r#"{}"#,
    ];
    let csv = "text,label\none word,ham\na text without a label,\nanother word,spam\n,spam\n\
               of no class,eggs\n,\ntoo,many,cells\n";
    vec![
        ("a.jsonl", format!("{}\n\n{{\"text\": \n", lines.join("\n")) + lines[5], 7),
        ("a.json", format!("\u{feff}[{},\n 3]", lines.join(",\n")), 5),
        ("a.csv", csv.into(), 5),
        ("a.tsv", csv.replace(',', "\t"), 5),
    ]
}

/// The good records of each format are read as if the bad ones were not there, and the bad ones
/// are counted and named.
#[test]
fn bad_records_of_every_format_are_left_out() {
    let mut config = config(goldens("wordpiece"));
    config.model.task = Some(Task::SequenceClassification);
    let good = "text,label\none word,ham\nanother word,spam\n";
    let expected = all(&open(&mut config, "good.csv", good).expect("good"));
    for (name, text, bad) in mixed_files() {
        config.data.bad_records = BadRecords::Error;
        let error = refusal(&mut config, name, &text);
        assert!(error.contains(name) && error.contains("label is missing"), "{error}");
        assert!(error.contains("\"text\""), "the columns that are there: {error}");
        config.data.bad_records = BadRecords::Skip;
        let data = open(&mut config, name, &text).expect(name);
        assert_eq!(all(&data), expected, "{name}");
        assert_eq!(data.skipped_records(), bad, "{name}: {:?}", data.notes());
        let notes = data.notes().join("\n");
        let of_empty = if text.starts_with("text") { "the record has" } else { "text is empty" };
        let named = [name, "label is missing", of_empty, "is none of ham, spam", "more"];
        assert!(named.iter().all(|one| notes.contains(one)), "{notes}");
    }
    let none = "text,label\na,eggs\nb,\n";
    let error = refusal(&mut config, "none.csv", none);
    assert!(error.contains("left out all of its 2 records"), "{error}");
    assert!(error.contains("none.csv, line 2: record 1: label \"eggs\""), "{error}");
}

/// Records of each task that teach nothing, beside one that does.
#[test]
fn records_of_which_nothing_is_learnt_are_left_out() {
    let long = "word ".repeat(80);
    let tokens = json!({ "tokens": ["a", "b"], "tags": [-100, -100] });
    let late = [vec![-100; 79], vec![1]].concat();
    let cut = json!({ "tokens": vec!["word"; 80], "tags": late });
    let words = json!({ "tokens": ["a", "b"], "tags": [0, 1] });
    let ids = json!({ "input_ids": [5, 6, 7], "labels": [-100, 6, -100] });
    let none = json!({ "input_ids": [5, 6, 7], "labels": [-100, -100, -100] });
    let first = json!({ "input_ids": [5, 6, 7], "labels": [5, -100, -100] });
    let lost = json!({ "input_ids": vec![5; 80], "labels": late });
    let asked = json!({ "prompt": "q", "completion": "ok" });
    let prompt = json!({ "prompt": long, "completion": "ok" });
    for (directory, task, good, bad) in [
        ("bpe", None, &ids, vec![&none, &first, &lost]),
        ("bpe", None, &asked, vec![&prompt]),
        ("wordpiece", None, &ids, vec![&none, &lost]),
        ("wordpiece", Some(Task::TokenClassification), &words, vec![&tokens, &cut]),
    ] {
        let mut config = config(goldens(directory));
        config.model.task = task;
        config.data.too_long = TooLong::Cut;
        config.step.batch = 1;
        let expected = all(&open(&mut config, "good.jsonl", &good.to_string()).expect("good"));
        for one in bad {
            let text = format!("{good}\n{one}\n{good}\n");
            config.data.bad_records = BadRecords::Skip;
            let data = open(&mut config, "mixed.jsonl", &text).expect("the others are good");
            assert_eq!(all(&data), [&expected[..], &expected].concat(), "{one}");
            assert_eq!(data.skipped_records(), 1, "{one}");
            let says = "mixed.jsonl, line 2: nothing of it is learnt";
            assert!(data.notes().join("\n").contains(says), "{:?}", data.notes());
            Batches::check(&config, &data, 1000).expect("each batch has a label");
            config.data.bad_records = BadRecords::Error;
            let refused = match open(&mut config, "mixed.jsonl", &text) {
                Err(error) => error,
                Ok(data) => {
                    assert!(data.notes().join("\n").contains(says), "{:?}", data.notes());
                    Batches::check(&config, &data, 3).expect_err("one batch has no label")
                }
            };
            assert!(refused.to_string().contains(says), "{refused}");
        }
    }
}

/// Before, only four epochs were searched: a batch without a label could end a run after days.
#[test]
fn a_batch_without_a_label_is_found_in_every_epoch() {
    let good = json!({ "input_ids": [5, 6, 7] }).to_string();
    let bad = json!({ "input_ids": [5, 6, 7], "labels": [-100, -100, -100] }).to_string();
    let lines = [vec![&*good; 9], vec![&*bad; 2]].concat().join("\n");
    let mut config = config(goldens("bpe"));
    config.step.batch = 2;
    let mut late = 0;
    for (seed, by_length) in (0..12).flat_map(|seed| [(seed, false), (seed, true)]) {
        config.step.seed = seed;
        config.data.group_by_length = by_length;
        let data = open(&mut config, "data.jsonl", &lines).expect("it is read");
        let has_label = |step: u64| {
            let batch = Batches::of_step(&config, &data, step).expect("it is there");
            batch.iter().any(|one| one.labelled(data.predicts()) > 0)
        };
        let first = (0..400).find(|&step| !has_label(step));
        assert!(Batches::check(&config, &data, first.unwrap_or(400)).is_ok(), "seed {seed}");
        if let Some(step) = first {
            let error = Batches::check(&config, &data, step + 1).expect_err("no label");
            let says = format!("step {} has a label", step + 1);
            let error = error.to_string();
            assert!(error.contains("line 10") && error.contains(&says), "{error}");
            assert!(error.contains("data.bad_records"), "{error}");
            late += u64::from(step > 4 * 6);
        }
    }
    assert!(late > 0, "some are found after four epochs");
}

/// Texts that attend to each other: the first token of a text is predicted, if it has a label.
#[test]
fn packed_texts_that_attend_across_may_have_no_label() {
    let mut config = config(goldens("bpe"));
    config.data.packing = true;
    config.data.attend_across = true;
    config.step.batch = 1;
    let none = json!({ "input_ids": [5, 6], "labels": [-100, -100] });
    let data = open(&mut config, "data.jsonl", &format!("{none}\n{none}\n")).expect("it is read");
    let error = Batches::check(&config, &data, 1).expect_err("no label").to_string();
    assert!(error.contains("data.jsonl, line 1: nothing of it is learnt"), "{error}");
    let single = json!({ "input_ids": [5] });
    let data = open(&mut config, "data.jsonl", &format!("{single}\n{single}\n")).expect("good");
    Batches::check(&config, &data, 1).expect("the second is predicted by the first");
}

/// What was left out does not change the order, the packing or the fingerprint from run to run, and
/// other ranks, which read for themselves, have the same.
#[test]
fn what_is_left_out_is_the_same_in_every_run() {
    let line = |at: usize| match at % 5 {
        3 => json!({ "text": "" }).to_string(),
        _ => json!({ "text": format!("text number {at}") }).to_string(),
    };
    let lines: Vec<String> = (0..700).map(line).collect();
    let mut config = config(goldens("bpe"));
    config.data.packing = true;
    config.data.bad_records = BadRecords::Skip;
    config.step.batch = 3;
    let good: Vec<String> = lines.iter().filter(|line| !line.contains("\"\"")).cloned().collect();
    let clean = open(&mut config, "data.jsonl", &good.join("\n")).expect("good");
    let mixed = open(&mut config, "data.jsonl", &lines.join("\n")).expect("good");
    let again = open(&mut config, "data.jsonl", &lines.join("\n")).expect("good");
    assert_eq!(mixed.skipped_records(), 140);
    assert_eq!(mixed.fingerprint(), again.fingerprint());
    assert_ne!(mixed.fingerprint(), clean.fingerprint(), "the bytes of the file differ");
    for step in 0..40 {
        let batch = |data: &Dataset| Batches::of_step(&config, data, step).expect("it is there");
        assert_eq!(batch(&mixed), batch(&clean), "step {step}");
    }
}

/// Gemma 3's tokenizer has one token more than its table has rows. A text without it is good.
#[test]
fn tokens_beyond_the_models_vocabulary() {
    let folder = with_tokenizer("bpe", add_token);
    let mut config = config(folder.path());
    let good = json!({ "text": "one layer at a time" }).to_string();
    let bad = json!({ "text": "one <|extra|> layer" }).to_string();
    let data = open(&mut config, "good.jsonl", &good).expect("it does not have the token");
    let note = data.notes().join("\n");
    assert!(note.contains("up to 384, and the model has embeddings for 384"), "{note}");
    let ids = json!({ "input_ids": [5, 6] }).to_string();
    open(&mut config, "ids.jsonl", &ids).expect("token ids do not need it, either");
    for (name, text, says) in [
        ("bad.jsonl", format!("{good}\n{bad}\n"), "bad.jsonl, line 2: token 384 at "),
        ("bad.txt", "one\ntwo\nthree <|extra|> four\n".into(), "bad.txt, line 3: token 384"),
    ] {
        let error = refusal(&mut config, name, &text);
        assert!(error.contains(says), "{error}");
    }
    config.data.bad_records = BadRecords::Skip;
    let data = open(&mut config, "bad.jsonl", &format!("{good}\n{bad}\n")).expect("one is good");
    assert_eq!((data.len(), data.skipped_records()), (Some(1), 1));
}

/// Tokens that the masks draw are the model's, and a mask token is one of them.
#[test]
fn masks_draw_the_models_tokens() {
    let folder = with_tokenizer("wordpiece", |tokenizer| {
        for id in 384..4000 {
            add_token(tokenizer);
            let tokens = tokenizer["added_tokens"].as_array_mut().expect("a list");
            let last = tokens.last_mut().expect("just added");
            last["id"] = id.into();
            last["content"] = format!("<|extra {id}|>").into();
        }
    });
    let mut config = config(folder.path());
    config.data.mask_probability = 1.0;
    let line = json!({ "text": "one word and another and a third and a fourth" }).to_string();
    let data = open(&mut config, "text.jsonl", &line).expect("good");
    for index in 0..50 {
        let sequence = data.sequence(index).expect("it is there");
        assert!(sequence.tokens.iter().all(|&token| token < 384), "{sequence:?}");
    }
    let at = folder.path().join("tokenizer_config.json");
    let text = fs::read_to_string(&at).expect("it was copied");
    fs::write(&at, text.replace("[MASK]", "<|extra 390|>")).expect("ours");
    let error = refusal(&mut config, "text.jsonl", &line);
    assert!(error.contains("mask_token: token 390"), "{error}");
}

/// With `trim_offsets`, tokens of spaces have empty spans. What is learnt is the same without it.
#[test]
fn indentation_is_learnt() {
    let trimmed = with_tokenizer("bpe", |tokenizer| {
        tokenizer["post_processor"]["trim_offsets"] = true.into();
    });
    let code = "def f(x):\n        if x:\n            y = 1\n\n\n    return  y \n";
    let chat = |said: &str| {
        json!({ "messages": [
            { "role": "user", "content": "  Ask. " }, { "role": "assistant", "content": said },
            { "role": "user", "content": "   More?" }, { "role": "assistant", "content": "  b  " },
        ] })
    };
    let indented = format!("    {code}");
    for line in [
        chat(code),
        chat(&indented),
        json!({ "prompt": "Write\u{e9}:\n\n", "completion": code }),
        json!({ "prompt": "Write:  ", "completion": indented }),
        json!({ "prompt": "", "completion": indented }),
    ] {
        let read = |directory: &Path| {
            let mut config = config(directory);
            config.data.sequence_length = Some(128);
            all(&open(&mut config, "one.jsonl", &line.to_string()).expect("good")).remove(0)
        };
        let expected = read(&goldens("bpe"));
        assert_eq!(read(trimmed.path()), expected, "{line}");
        if !line["completion"].is_null() {
            let first = expected.labels.iter().position(|&label| label >= 0).expect("some");
            assert!(expected.labels[first..].iter().all(|&label| label >= 0), "{expected:?}");
        }
    }
}

/// A run leaves bad records out, says so, and resumes to the same weights; other commands count
/// them too.
#[test]
fn a_run_with_bad_records() {
    let folder = tempfile::tempdir().expect("a place for files");
    let line = |at: usize| match at % 4 {
        2 => "{\"text\": \"\"}\n".to_string(),
        _ => format!("{}\n", json!({ "text": format!("text number {at}") })),
    };
    let data = folder.path().join("data.jsonl");
    fs::write(&data, (0..12).map(line).collect::<String>()).expect("ours");
    let run = folder.path().join("run.toml");
    let text = format!(
        "model.path = {:?}\nstep = {{ batch = 2 }}\n[data]\ntrain = {data:?}\n\
         validation = {data:?}\nbad_records = \"skip\"\nsequence_length = 64\n",
        goldens("bpe")
    );
    fs::write(&run, text).expect("ours");
    let run = run.display().to_string();
    let train = |steps: u32, directory: &str, more: &[&str]| {
        let steps = format!("step.steps={steps}");
        let directory = format!("checkpoint.directory={}", folder.path().join(directory).display());
        let arguments = ["train", &run, "--format", "json", "--set", &steps, "--set", &directory];
        let output = output(&[&arguments[..], more].concat());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(0), "{said}");
        assert!(said.contains("records left out: 3: data "), "{said}");
        assert!(said.contains("data.jsonl, line 3: text is empty"), "{said}");
        let events = events(&String::from_utf8_lossy(&output.stdout));
        of_kind(&events, "summary")[0].clone()
    };
    let whole = train(6, "whole", &[]);
    assert_eq!(whole["skipped_records"], 3, "{whole}");
    train(3, "halves", &[]);
    let resumed = train(6, "halves", &["--resume"]);
    assert_eq!(resumed["weights_digest"], whole["weights_digest"]);
    let shown = events(&good(&["data", &run, "--format", "json"]));
    for part in of_kind(&shown, "data") {
        assert_eq!((&part["sequences"], &part["skipped_records"]), (&json!(9), &json!(3)));
        assert!(part["notes"][0].as_str().is_some_and(|note| note.contains("line 3")), "{part}");
    }
    let found = events(&good(&["eval", &run, "--format", "json"]));
    assert_eq!(of_kind(&found, "evaluation")[0]["skipped_records"], 3, "{found:?}");
}

/// Prompts are refused only if they have a token that the model does not have.
#[test]
fn prompts_with_tokens_beyond_the_models_vocabulary() {
    let folder = with_tokenizer("bpe", add_token);
    let model = folder.path().display().to_string();
    let prompts = folder.path().join("prompts.jsonl");
    let lines = "\u{feff}{\"prompt\": \"one\"}\n{\"prompt\": \"two <|extra|>\"}\n";
    fs::write(&prompts, lines).expect("ours");
    let prompts = prompts.display().to_string();
    let generate = |more: &[&str]| {
        let all = ["generate", "--model", &model, "--tokens", "2", "--format", "json"];
        output(&[&all[..], more].concat())
    };
    let found = generate(&["--prompt", "one"]);
    let said = String::from_utf8_lossy(&found.stderr);
    assert_eq!(found.status.code(), Some(0), "{said}");
    assert!(said.contains("the tokenizer has tokens up to 384"), "{said}");
    for (more, says) in [
        (["--prompt", "one <|extra|>"], "prompt 0: token 384 at"),
        (["--prompts", &prompts], "prompts.jsonl, line 2: token 384 at"),
    ] {
        let found = generate(&more);
        let said = String::from_utf8_lossy(&found.stderr);
        assert_eq!(found.status.code(), Some(2), "{said}");
        assert!(said.contains(says), "{says:?} in: {said}");
    }
}
