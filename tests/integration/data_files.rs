//! Data as people have it: tables and lists, folders as they were cloned, byte order marks, classes
//! whose names are numbers.

use std::fs;
use std::path::{Path, PathBuf};

use l2l::config::{Config, Labels, Task};
use l2l::data::{Dataset, Sequence};
use l2l::kernels::ProblemType;
use l2l::{Error, shape_of};
use serde_json::{Value, json};
use tempfile::TempDir;

pub(crate) fn goldens(directory: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/text").join(directory)
}

pub(crate) fn config(directory: impl Into<PathBuf>) -> Config {
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

pub(crate) fn open(config: &mut Config, name: &str, text: &str) -> Result<Dataset, Error> {
    let folder = folder_with(&[(name, text)]);
    config.data.train = folder.path().join(name).display().to_string().into();
    Ok(Dataset::open(config, &shape_of(config)?)?.0)
}

#[track_caller]
pub(crate) fn refusal(config: &mut Config, name: &str, text: &str) -> String {
    open(config, name, text).map(|_| ()).expect_err(text).to_string()
}

pub(crate) fn all(data: &Dataset) -> Vec<Sequence> {
    let each = (0..data.len().expect("it ends")).map(|index| data.sequence(index));
    each.collect::<Result<_, _>>().expect("it is there")
}

/// A model's directory with another `tokenizer.json`.
pub(crate) fn with_tokenizer(directory: &str, change: impl Fn(&mut Value)) -> TempDir {
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

/// The same holds for the names in a set of labels.
#[test]
fn sets_of_labels_whose_names_are_numbers() {
    let mut config = config(goldens("wordpiece"));
    config.model.task = Some(Task::SequenceClassification);
    config.model.problem_type = Some(ProblemType::MultiLabelClassification);
    config.model.labels = Some(Labels::Names(["1", "2", "3", "4"].map(String::from).into()));
    for (name, text) in [
        ("a.jsonl", "{\"text\": \"a\", \"labels\": [1, 3]}"),
        ("a.jsonl", "{\"text\": \"a\", \"labels\": [\"3\", \"1\"]}"),
        ("a.csv", "text,labels\na,\"[1, 3]\"\n"),
        ("a.csv", "text,1,2,3,4\na,1,0,1,0\n"),
    ] {
        let set = all(&open(&mut config, name, text).expect(text)).remove(0).labels;
        let set: Vec<f32> = set.into_iter().map(|bits| f32::from_bits(bits as u32)).collect();
        assert_eq!(set, [1.0, 0.0, 1.0, 0.0], "{text}");
    }
    let text = "{\"text\": \"a\", \"labels\": [0]}";
    let error = refusal(&mut config, "a.jsonl", text);
    assert!(error.contains("label 0 is none of 1, 2, 3, 4"), "{error}");
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

/// A name that is no data is told from a folder that is not there.
#[test]
fn a_folder_that_is_not_there_is_named() {
    let folder = folder_with(&[("notes.pdf", "")]);
    let mut config = config(goldens("llama"));
    for (name, says) in [
        ("there/not", "no file or folder of this name is there"),
        ("notes.pdf", "it is not a known kind of data"),
    ] {
        config.data.train = folder.path().join(name).display().to_string().into();
        let opened = Dataset::open(&config, &shape_of(&config).expect("a golden"));
        let error = opened.err().expect("it is no data").to_string();
        assert!(error.contains(says), "{error}");
    }
}
