//! Sequences with any number of labels: as transformers trains them (`problem_type` is
//! `multi_label_classification`), in every form of records, and from training to export.

use std::fs;
use std::path::{Path, PathBuf};

use l2l::config::{BestMetric, Config, Labels, ScheduleKind, StashPlace, Task};
use l2l::data::{Batches, Dataset, Sequence};
use l2l::kernels::ProblemType;
use l2l::{Error, Trainer, shape_of};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::pytorch::{case, check, numbers};
use crate::ranks;

fn golden() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/multi_label.json");
    serde_json::from_str(&fs::read_to_string(path).expect("it is committed")).expect("it is JSON")
}

fn lines_of(file: &Path) -> Vec<Value> {
    let text = fs::read_to_string(file).expect("it is there");
    text.lines().map(|line| serde_json::from_str(line).expect("it is JSON")).collect()
}

fn write(folder: &Path, name: &str, lines: &[Value]) -> PathBuf {
    let file = folder.join(name);
    let text: Vec<String> = lines.iter().map(Value::to_string).collect();
    fs::write(&file, text.join("\n")).expect("a directory of ours");
    file
}

/// The case of a classifier, with three labels a sequence, as `goldens/multi_label.py` has them.
fn labelled(name: &str, folder: &Path) -> Config {
    let (mut config, _) = case(name);
    let path = config.model.path.clone().expect("a case has one");
    let mut lines = lines_of(&path.join("data.jsonl"));
    for (index, line) in lines.iter_mut().enumerate() {
        let length = line["input_ids"].as_array().expect("a list").len();
        let [yes, no] = if index % 10 == 9 { [0.75, 0.25] } else { [1.0, 0.0] };
        let label = |label: usize| if (7 * index + 3 * label + length) % 5 < 2 { yes } else { no };
        line["labels"] = [0, 1, 2].map(label).to_vec().into();
        line.as_object_mut().expect("an object").remove("label");
    }
    let data = write(folder, &format!("{name}.jsonl"), &lines);
    config.data.train = data.display().to_string().into();
    config.model.problem_type = Some(ProblemType::MultiLabelClassification);
    config
}

fn folder() -> TempDir {
    tempfile::tempdir().expect("a place for files")
}

/// Ten steps of each family that classifies sequences; also resident, which is the same bits.
#[tokio::test]
async fn every_family_is_transformers() {
    let folder = folder();
    let golden = golden();
    for (name, expected) in golden.as_object().expect("families") {
        let config = labelled(name, folder.path());
        let expected = json!({ "float64": expected });
        let relay = check(config.clone(), &expected).await;
        let mut resident = config;
        resident.schedule.kind = ScheduleKind::Resident;
        resident.schedule.recompute = false.into();
        resident.stash.place = StashPlace::Device;
        resident.step.micro_batch = 5;
        check(resident.clone(), &expected).await;
        resident.step.micro_batch = 2;
        assert_eq!(check(resident, &expected).await, relay, "{name}");
    }
}

/// Losses of single sequences, metrics of all, and scores, which are found from losses: a label
/// that is there takes its score's share from the loss.
#[tokio::test]
async fn scores_and_metrics_are_transformers() {
    let folder = folder();
    for (name, expected) in golden().as_object().expect("families") {
        let config = labelled(name, folder.path());
        let data = Dataset::open(&config, &shape_of(&config).expect("good")).expect("good").0;
        let mut none = config.clone();
        let path = folder.path().join(format!("{name}.jsonl"));
        let mut lines = lines_of(&path);
        let all: Vec<Value> = lines.drain(..3).collect();
        let with = |line: &Value, labels: Value| {
            let mut line = line.clone();
            line["labels"] = labels;
            line
        };
        let each = all.iter().flat_map(|line| {
            let sets = [json!([0, 0, 0]), json!([1, 0, 0]), json!([0, 1, 0]), json!([0, 0, 1])];
            sets.map(|set| with(line, set))
        });
        let sets = write(folder.path(), "sets.jsonl", &each.collect::<Vec<_>>());
        none.data.train = sets.display().to_string().into();
        let sets = Dataset::open(&none, &shape_of(&none).expect("good")).expect("good").0;
        let mut trainer = Trainer::start(config).await.expect("a case of ours");
        for (index, single) in
            numbers(&json!({ "float64": expected }), "singles").iter().enumerate()
        {
            let batch = data.batch([index as u64]);
            let found = trainer.evaluate([batch]).await.expect("good").loss;
            assert!((found - single).abs() < 1e-5, "{name} {index}: {found} {single}");
        }
        for (index, scores) in expected["scores"].as_array().expect("scores").iter().enumerate() {
            let mut losses = Vec::new();
            for at in 0..4 {
                let batch = sets.batch([index as u64 * 4 + at]);
                losses.push(trainer.evaluate([batch]).await.expect("good").loss);
            }
            for label in 0..3 {
                let score = 3.0 * (losses[0] - losses[1 + label]);
                let expected = scores[label].as_f64().expect("a score");
                assert!((score - expected).abs() < 1e-4, "{name} {index}: {score} {expected}");
            }
        }
        let found = trainer.evaluate(data.in_order(5, u64::MAX)).await.expect("good");
        let metrics = expected["metrics"].as_object().expect("metrics");
        assert_eq!(found.values().len(), metrics.len());
        for (metric, value) in found.values() {
            let expected = metrics[metric].as_f64().expect("a number");
            assert!((value - expected).abs() < 1e-5, "{name} {metric}: {value} {expected}");
        }
        let best = found.value(BestMetric::F1Macro);
        assert_eq!(best, found.values().last().map(|(_, value)| *value));
    }
}

/// The micro-batches, devices and ranks change no bit.
#[test]
fn ranks_give_the_same_bits() {
    let folder = folder();
    for name in ["bert-classes", "llama-classes"] {
        let config = labelled(name, folder.path());
        let of = |groups: u32, devices: u32| {
            let mut config = config.clone();
            (config.step.batch, config.step.micro_batch) = (6, 1);
            config.parallel.groups = groups;
            config.device.count = Some(devices);
            ranks::Task { evaluates: true, ..ranks::Task::new(config, 3) }
        };
        let (expected, reference) = of(3, 1).run(None).expect("a case of ours");
        for devices in [1, 2] {
            for (seen, _) in ranks::on_ranks(3, |_| of(3, devices)) {
                let (bits, summary) = seen.expect("a case of ours");
                assert_eq!(bits, expected, "{name}");
                assert_eq!(summary.weights_digest, reference.weights_digest, "{name}");
            }
        }
    }
}

/// A model of text with these labels, of which a sequence may have several.
fn of_text(labels: Labels) -> Config {
    let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/text");
    let mut config = Config::default();
    config.model.path = Some(goldens.join("wordpiece"));
    config.model.task = Some(Task::SequenceClassification);
    config.model.labels = Some(labels);
    config.model.problem_type = Some(ProblemType::MultiLabelClassification);
    config.data.sequence_length = Some(64);
    config
}

fn names(names: &[&str]) -> Labels {
    Labels::Names(names.iter().map(|name| name.to_string()).collect())
}

fn open(config: &mut Config, name: &str, text: &str) -> Result<Vec<Sequence>, Error> {
    let folder = folder();
    let file = folder.path().join(name);
    fs::write(&file, text).expect("a directory of ours");
    config.data.train = file.display().to_string().into();
    config.data.validation_split = Some(0.0);
    let data = Dataset::open(config, &shape_of(config)?)?.0;
    (0..data.len().expect("it ends")).map(|index| data.sequence(index)).collect()
}

fn labels(found: Result<Vec<Sequence>, Error>, what: &str) -> Vec<f32> {
    let one = found.unwrap_or_else(|error| panic!("{what}: {error}")).remove(0);
    one.labels.iter().map(|&bits| f32::from_bits(bits as u32)).collect()
}

/// The same labels in each of the ways in which people keep them.
#[test]
fn labels_are_the_same_in_every_form() {
    let mut config = of_text(names(&["anger", "joy", "fear", "trust"]));
    let expected = [1.0, 0.0, 0.0, 1.0];
    for set in [
        json!(["anger", "trust"]),
        json!(["trust", "anger"]),
        json!([0, 3]),
        json!([3, 0]),
        json!([1, 0, 0, 1]),
        json!([1.0, 0.0, 0.0, 1.0]),
        json!([true, false, false, true]),
    ] {
        for column in ["labels", "label"] {
            let line = json!({ "text": "a word", column: set }).to_string();
            assert_eq!(labels(open(&mut config, "one.jsonl", &line), &line), expected, "{line}");
        }
    }
    let columns = json!({ "text": "a", "anger": 1, "joy": 0, "fear": false, "trust": 1.0 });
    let ids = json!({ "input_ids": [2, 7, 3], "labels": [1.0, 0.0, 0.0, 1.0] });
    for line in [columns, ids] {
        let line = line.to_string();
        assert_eq!(labels(open(&mut config, "one.jsonl", &line), &line), expected, "{line}");
    }
    for (name, text) in [
        ("data.csv", "id,text,anger,joy,fear,trust\n7,\"a, b\",1,0,0,1\n"),
        ("data.csv", "text,trust,anger,joy,fear\nword,True,True,False,False\n"),
        ("data.tsv", "text\tlabels\nword\t[1, 0, 0, 1]\n"),
        ("data.csv", "text,labels\nword,\"[\"\"anger\"\", \"\"trust\"\"]\"\n"),
    ] {
        assert_eq!(labels(open(&mut config, name, text), text), expected, "{text}");
    }
    let soft = json!({ "text": "a word", "labels": [0.9, 0, 0.1, 1] }).to_string();
    assert_eq!(labels(open(&mut config, "one.jsonl", &soft), &soft), [0.9, 0.0, 0.1, 1.0]);
    let none = json!({ "text": "a word", "labels": [] }).to_string();
    assert_eq!(labels(open(&mut config, "one.jsonl", &none), &none), [0.0; 4]);
    config.data.fields.label = Some("emotions".into());
    let named = json!({ "text": "a", "emotions": ["joy"], "label": 3 }).to_string();
    assert_eq!(labels(open(&mut config, "one.jsonl", &named), &named), [0.0, 1.0, 0.0, 0.0]);
}

/// One label, and more labels than tokens.
#[test]
fn there_may_be_one_label_or_many() {
    let mut config = of_text(Labels::Count(1));
    for set in [json!([1]), json!([1.0]), json!(1), json!(true)] {
        let line = json!({ "text": "a word", "label": set }).to_string();
        assert_eq!(labels(open(&mut config, "one.jsonl", &line), &line), [1.0], "{line}");
    }
    let table = "text,label\nword,1\n";
    assert_eq!(labels(open(&mut config, "one.csv", table), table), [1.0]);
    let mut config = of_text(Labels::Count(300));
    let line = json!({ "text": "a", "labels": [299] }).to_string();
    let found = labels(open(&mut config, "one.jsonl", &line), &line);
    assert_eq!((found.len(), found[299]), (300, 1.0));
    assert_eq!(found.iter().sum::<f32>(), 1.0);
}

#[test]
fn labels_that_are_none_are_refused() {
    let four = names(&["anger", "joy", "fear", "trust"]);
    let two = names(&["yes", "no"]);
    for (of, set, says) in [
        (
            &four,
            json!(["angr"]),
            "line 1: labels: label \"angr\" is none of anger, joy, fear, trust",
        ),
        (&four, json!([4]), "label 4 is none of the 4 labels"),
        (&four, json!([-1]), "label -1 is none of the 4 labels"),
        (&four, json!([0, 1, 0, 1, 1]), "label 0 stands twice"),
        (&four, json!([0.0, 1.0]), "2 numbers for 4 labels"),
        (&four, json!([0, 1, 2, null]), "label null is none"),
        (&four, json!(2), "it must be a list"),
        (&four, json!("[1, 0"), "is no list in JSON"),
        (&four, json!("['joy']"), "is no list in JSON"),
        (&four, json!({ "joy": 1 }), "it must be a list"),
        (&four, json!(null), "labels is missing"),
        (&two, json!([0]), "1 numbers for 2 labels"),
        (&Labels::Count(3), json!(["joy"]), "the labels have no names"),
    ] {
        let line = json!({ "text": "a word", "labels": set }).to_string();
        let error = open(&mut of_text(of.clone()), "bad.jsonl", &line).expect_err(&line);
        assert!(error.to_string().contains(says), "{line}: {error}");
    }
    for (line, says) in [
        (json!({ "text": "a", "anger": 1, "fear": 0 }), "no column joy, trust: there must be"),
        (json!({ "text": "a", "anger": 1, "joy": 2, "fear": 0, "trust": 0 }), "\"joy\" is 2"),
        (json!({ "text": "a", "label": [1], "labels": [1] }), "it has label and labels"),
        (json!({ "text": "a" }), "or give a column for each of anger, joy, fear, trust"),
    ] {
        let error = open(&mut of_text(four.clone()), "bad.jsonl", &line.to_string());
        let error = error.expect_err("refused").to_string();
        assert!(error.contains(says), "{line}: {error}");
    }
    let mut single = of_text(four);
    single.model.problem_type = None;
    let line = json!({ "text": "a word", "label": ["joy"] }).to_string();
    let error = open(&mut single, "bad.jsonl", &line).expect_err("one label a sequence");
    assert!(error.to_string().contains("with model.problem_type"), "{error}");
}

#[test]
fn problems_that_do_not_fit_are_refused() {
    let mut config = of_text(Labels::Count(3));
    config.model.problem_type = Some(ProblemType::Regression);
    let error = shape_of(&config).expect_err("regression has one value").to_string();
    assert!(error.contains("model.problem_type is \"regression\" of 3 labels"), "{error}");
    config.model.problem_type = Some(ProblemType::MultiLabelClassification);
    for (task, name) in
        [(Some(Task::TokenClassification), "token-classification"), (None, "masked-lm")]
    {
        config.model.task = task;
        let error = shape_of(&config).expect_err("it classifies no sequences").to_string();
        let says = "model.problem_type is for sequence-classification, and the task is";
        assert!(error.contains(&format!("{says} {name:?}")), "{error}");
    }
}

/// A classifier of a kind, in a directory of its own.
fn classifier(folder: &Path, change: impl Fn(&mut Value)) -> PathBuf {
    let (config, _) = case("bert-classes");
    let from = config.model.path.expect("a case has one");
    let to = folder.join("model");
    fs::create_dir_all(&to).expect("ours");
    fs::copy(from.join("model.safetensors"), to.join("model.safetensors")).expect("ours");
    let text = fs::read_to_string(from.join("config.json")).expect("it is committed");
    let mut keys: Value = serde_json::from_str(&text).expect("it is JSON");
    change(&mut keys);
    fs::write(to.join("config.json"), keys.to_string()).expect("ours");
    to
}

/// The `config.json` says what its head predicts, and that its labels have names.
#[tokio::test]
async fn the_model_s_own_problem_is_used() {
    let folder = folder();
    let mut config = labelled("bert-classes", folder.path());
    let path = classifier(folder.path(), |keys| {
        keys["problem_type"] = "multi_label_classification".into();
        keys["id2label"] = json!({ "0": "anger", "1": "joy", "2": "fear" });
    });
    config.model.path = Some(path);
    config.model.problem_type = None;
    let golden = golden();
    check(config.clone(), &json!({ "float64": golden["bert-classes"] })).await;
    let line = json!({ "input_ids": [3, 4], "labels": ["joy"] }).to_string();
    assert_eq!(labels(open(&mut config, "one.jsonl", &line), &line), [0.0, 1.0, 0.0]);
}

/// A head that is replaced may predict what is not built, or what nobody knows.
#[tokio::test]
async fn a_head_that_is_replaced_does_not_matter() {
    let folder = folder();
    for kind in ["multi_label_classification", "regression", "ranking"] {
        let path = classifier(folder.path(), |keys| keys["problem_type"] = kind.into());
        for (task, problem) in [
            (Task::TokenClassification, None),
            (Task::MaskedLm, None),
            (Task::SequenceClassification, Some(ProblemType::SingleLabelClassification)),
        ] {
            let mut config = Config::default();
            config.model.path = Some(path.clone());
            config.model.task = Some(task);
            config.model.problem_type = problem;
            config.data.train = "random".into();
            config.data.sequence_length = Some(8);
            config.step.batch = 2;
            let mut batches = Batches::open(&config).expect("a base like any other");
            let mut trainer = Trainer::start(config).await.expect("a base like any other");
            let batch = batches.next().await.expect("good data");
            assert!(trainer.step(batch).await.expect("good").loss.is_finite(), "{kind} {task:?}");
            trainer.stop().await.expect("a clean end");
        }
        let mut config = Config::default();
        config.model.path = Some(path);
        match (kind, shape_of(&config)) {
            ("multi_label_classification", found) => drop(found.expect("it is built")),
            (_, found) => {
                let error = found.expect_err("its head is used").to_string();
                assert!(error.contains(&format!("problem_type is \"{kind}\" of 3")), "{error}");
            }
        }
    }
}

#[tokio::test]
async fn smoothing_is_for_classes() {
    let folder = folder();
    let mut config = labelled("bert-classes", folder.path());
    config.train.label_smoothing = 0.1;
    let refused = Trainer::start(config).await.map(drop).expect_err("labels are each by itself");
    assert!(refused.to_string().contains("predicts several labels"), "{refused}");
}
