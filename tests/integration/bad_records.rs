//! Records that cannot be used or teach nothing: refused by line, or left out and counted. Files as
//! people have them: tables, folders, byte order marks, tokenizers with more tokens than the model.

use std::fs;
use std::path::{Path, PathBuf};

use l2l::config::{BadRecords, Config, Labels, Task, TooLong};
use l2l::data::{Batches, Dataset, Sequence};
use l2l::{Error, shape_of};
use serde_json::{Value, json};
use tempfile::TempDir;

fn goldens(directory: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/text").join(directory)
}

fn config(directory: impl Into<PathBuf>) -> Config {
    let mut config = Config::default();
    config.model.path = Some(directory.into());
    config.data.sequence_length = Some(64);
    config.data.validation_split = Some(0.0);
    config
}

/// Opens files of a folder, all of them.
fn open_folder(config: &mut Config, files: &[(&str, &str)]) -> Result<Dataset, Error> {
    let folder = folder_with(files);
    config.data.train = folder.path().display().to_string().into();
    Ok(Dataset::open(config, &shape_of(config)?)?.0)
}

fn folder_with(files: &[(&str, &str)]) -> TempDir {
    let folder = tempfile::tempdir().expect("a place for files");
    for (name, text) in files {
        let file = folder.path().join(name);
        fs::create_dir_all(file.parent().expect("it is in a folder")).expect("ours");
        fs::write(file, text).expect("a directory of ours");
    }
    folder
}

fn open(config: &mut Config, name: &str, text: &str) -> Result<Dataset, Error> {
    let folder = folder_with(&[(name, text)]);
    config.data.train = folder.path().join(name).display().to_string().into();
    Ok(Dataset::open(config, &shape_of(config)?)?.0)
}

#[track_caller]
fn refusal(config: &mut Config, name: &str, text: &str) -> String {
    open(config, name, text).map(|_| ()).expect_err(text).to_string()
}

fn all(data: &Dataset) -> Vec<Sequence> {
    let each = (0..data.len().expect("it ends")).map(|index| data.sequence(index));
    each.collect::<Result<_, _>>().expect("it is there")
}

/// A model's directory with another `tokenizer.json`.
fn with_tokenizer(directory: &str, change: impl Fn(&mut Value)) -> TempDir {
    let folder = tempfile::tempdir().expect("a place for files");
    for entry in fs::read_dir(goldens(directory)).expect("it is committed") {
        let from = entry.expect("it is readable").path();
        fs::copy(&from, folder.path().join(from.file_name().expect("a file"))).expect("ours");
    }
    let path = folder.path().join("tokenizer.json");
    let text = fs::read_to_string(&path).expect("it was copied");
    let mut tokenizer: Value = serde_json::from_str(&text).expect("JSON");
    change(&mut tokenizer);
    fs::write(&path, tokenizer.to_string()).expect("ours");
    folder
}

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
    let cut = json!({ "tokens": vec!["word"; 80], "tags": [vec![-100; 79], vec![1]].concat() });
    let words = json!({ "tokens": ["a", "b"], "tags": [0, 1] });
    let ids = json!({ "input_ids": [5, 6, 7], "labels": [-100, 6, -100] });
    let none = json!({ "input_ids": [5, 6, 7], "labels": [-100, -100, -100] });
    let first = json!({ "input_ids": [5, 6, 7], "labels": [5, -100, -100] });
    let behind = [vec![-100; 79], vec![5]].concat();
    let lost = json!({ "input_ids": vec![5; 80], "labels": behind });
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

/// Columns that cannot be told apart, and messages that say what was found.
#[test]
fn names_of_columns() {
    let mut config = config(goldens("wordpiece"));
    config.model.task = Some(Task::SequenceClassification);
    for (name, text, says) in [
        ("twice.csv", "text,label,text\na,0,b\n", "columns 1 and 3 are both \"text\""),
        ("semi.csv", "text;label\na;0\n", "its only column is \"text;label\", so semicolons"),
        ("tabs.csv", "text\tlabel\na\t0\n", "so tabs seem to separate the cells"),
        ("commas.tsv", "text,label\na,0\n", "so commas seem to separate the cells"),
        ("space.csv", "text, label\na, 0\n", ": leave the spaces around names out"),
        ("other.csv", "sentence,gold\na,0\n", "\"sentence\""),
        ("empty.csv", "text,label\na,\n", "\"label\" (empty)"),
        ("a.jsonl", "{\"a\": 1, \"text\": null}", "the record has \"a\", \"text\" (empty)"),
        ("b.jsonl", "{}", "the record is empty"),
        (
            "c.jsonl",
            "{\"text\": \"a\", \"label\": NaN}",
            "line 1: expected value at column 24: JSON",
        ),
        ("c.json", "[\n{\"text\": \"a\", \"label\": NaN}]", "line 2 column 24: JSON has no NaN"),
        ("d.jsonl", "{\"text\": \"a \\ud83d\", \"label\": 0}", "one half of a surrogate pair"),
        ("d.json", "[{\"text\": \"a \\ude00\", \"label\": 0}]", "one half of a surrogate pair"),
        ("e.json", "[{\"text\": \"a\", \"label\": 0, \"label\": 1}]", "record 1: duplicate field"),
        ("f.json", "[\n{\"text\": \"a\"\n}\n,\n3]", "f.json, line 2: record 1: label is missing"),
    ] {
        let error = refusal(&mut config, name, text);
        assert!(error.contains(says) && error.contains(name), "{says:?} in: {error}");
    }
    config.data.fields.text = Some("review".into());
    let error = refusal(&mut config, "named.csv", "text,label\na,0\n");
    assert!(
        error.contains("\"review\" is missing") && error.contains("; the record has \""),
        "{error}"
    );
    config.data.fields.text = None;
    // Spreadsheets write empty columns, which are not used.
    let data = open(&mut config, "wide.csv", "text,label,,\na,0,,\n").expect("good");
    assert_eq!(data.unused_columns(), [""]);
}

/// A class by name or by number is the same in each format.
#[test]
fn classes_whose_names_are_numbers() {
    let mut config = config(goldens("wordpiece"));
    config.model.task = Some(Task::SequenceClassification);
    let labels = |config: &mut Config, name: &str, text: &str| -> Result<Vec<i32>, Error> {
        Ok(all(&open(config, name, text)?).iter().map(|one| one.labels[0]).collect())
    };
    let lines = |labels: &[&str]| {
        let line = |label: &&str| format!("{{\"text\": \"a\", \"label\": {label}}}\n");
        labels.iter().map(line).collect::<String>()
    };
    for (names, given, classes) in [
        (["1", "2", "3"], ["1", "3", "2.0"], [0, 2, 1]),
        (["0", "1", "2"], ["1", "0", "2"], [1, 0, 2]),
        (["none", "1", "2"], ["1", "2", "1"], [1, 2, 1]),
        (["a", "b", "c"], ["1", "0", "2"], [1, 0, 2]),
    ] {
        config.model.labels = Some(Labels::Names(names.map(String::from).into()));
        let table = format!("text,label\n{}", given.map(|label| format!("a,{label}\n")).concat());
        let quoted = given.map(|label| format!("\"{label}\""));
        let quoted = quoted.each_ref().map(String::as_str);
        for (name, text) in [
            ("a.csv", table),
            ("a.jsonl", lines(&given)),
            ("a.jsonl", lines(&quoted)),
            ("a.json", format!("[{}]", lines(&given).trim().replace('\n', ","))),
        ] {
            assert_eq!(labels(&mut config, name, &text).expect("good"), classes, "{text}");
        }
    }
    config.model.labels = Some(Labels::Names(["1", "2", "3"].map(String::from).into()));
    for (name, text) in [("a.jsonl", lines(&["0"])), ("a.csv", "text,label\na,0\n".into())] {
        let error = labels(&mut config, name, &text).expect_err("no class has this name");
        assert!(error.to_string().contains("label 0 is none of 1, 2, 3"), "{error}");
    }
}

/// A data set as it is cloned: its card and its hidden files are no training data.
#[test]
fn a_folder_has_more_than_data() {
    let mut config = config(goldens("bpe"));
    let card = "---\nlicense: mit\n---\n# A card\n";
    let record = "{\"text\": \"a word\"}\n";
    let records = [
        ("README.md", "# No metadata"),
        ("data/a.jsonl", record),
        ("data/B.JSONL", record),
        ("data/c.json", "\u{feff}[{\"text\": \"a word\"}]"),
        (".hidden.jsonl", "no record"),
        (".git/config.json", "no record"),
        ("dataset_infos.json", "{}"),
        ("loader.py", "print()"),
    ];
    let data = open_folder(&mut config, &records).expect("good");
    assert_eq!(data.len(), Some(3));
    let note = data.notes().join("\n");
    for left_out in ["README.md (it desc", ".hidden.jsonl (hidden)", "dataset_infos.json", "loader"]
    {
        assert!(note.contains(left_out), "{left_out:?} in: {note}");
    }
    assert!(!note.contains(".git"), "{note}");
    let texts = [("README.md", card), ("C.TXT", "one two\n"), ("data/a.txt", "three four\n")];
    let data = open_folder(&mut config, &texts).expect("good");
    assert_eq!(data.len(), Some(2));
    assert!(data.notes()[0].contains("README.md"), "{:?}", data.notes());
    // A README.md without metadata among texts is one of them.
    let texts = [("README.md", "# A text"), ("a.txt", "one two\n")];
    let data = open_folder(&mut config, &texts).expect("good");
    assert_eq!((data.len(), data.notes().len()), (Some(2), 0), "{:?}", data.notes());
}

#[cfg(unix)]
#[test]
fn links_in_a_folder_of_data() {
    use std::os::unix::fs::symlink;

    let folder = folder_with(&[("set/a.txt", "one two\n"), ("blobs/b", "three four\n")]);
    let set = folder.path().join("set");
    symlink("../blobs/b", set.join("b.txt")).expect("ours");
    symlink("../blobs", set.join("linked")).expect("ours");
    let mut config = config(goldens("bpe"));
    config.data.train = set.display().to_string().into();
    let open = |config: &Config| {
        let shape = shape_of(config).expect("a shape of ours");
        Dataset::open(config, &shape).map(|(data, _)| data)
    };
    let data = open(&config).expect("links to files are followed");
    assert_eq!(data.len(), Some(2));
    assert!(data.notes()[0].contains("linked (a linked folder)"), "{:?}", data.notes());
    symlink("../blobs/none", set.join("c.txt")).expect("ours");
    let error = open(&config).err().expect("a file is missing").to_string();
    assert!(error.contains("c.txt is a link to ../blobs/none, which does not exist"), "{error}");
}

/// Windows' editors and shells begin files with byte order marks.
#[test]
fn byte_order_marks() {
    let folder = with_tokenizer("bpe", |_| ());
    let at = folder.path().join("config.json");
    let text = fs::read_to_string(&at).expect("it was copied");
    fs::write(&at, format!("\u{feff}{text}")).expect("ours");
    let mut config = config(folder.path());
    let record = json!({ "text": "a word" });
    let expected = all(&open(&mut config, "a.jsonl", &record.to_string()).expect("good"));
    for (name, text) in [
        ("list.json", format!("\u{feff}[{record}]")),
        ("lines.json", format!("\u{feff}{record}\n")),
        ("lines.jsonl", format!("\u{feff}{record}\r\n")),
        ("table.csv", "\u{feff}\"text\"\r\n\"a word\"\r\n".into()),
        ("table.tsv", "\u{feff}text\tmore\na word\tx\n".into()),
    ] {
        assert_eq!(all(&open(&mut config, name, &text).expect(name)), expected, "{name}");
    }
    for name in ["utf16.jsonl", "utf16.json"] {
        let utf16 = [&[0xff, 0xfe][..], b"{\0}\0"].concat();
        let folder = tempfile::tempdir().expect("a place for files");
        let file = folder.path().join(name);
        fs::write(&file, utf16).expect("ours");
        config.data.train = file.display().to_string().into();
        let shape = shape_of(&config).expect("a shape of ours");
        let error = Dataset::open(&config, &shape).err().expect("no UTF-8").to_string();
        assert!(error.contains("UTF-16: save it as UTF-8"), "{error}");
    }
}
