//! What somebody who fine-tunes does beside training: choose the best, resume with changes, compare
//! with the base, export, chat.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Stdio;

use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::program::{events, good, l2l, of_kind, output};

fn golden(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(name).display().to_string()
}

fn folder() -> TempDir {
    tempfile::tempdir().expect("a place for files")
}

/// An empty config: what is not set has its default, in place of the built-in config's value.
const EMPTY: &str = "/dev/null";

/// The arguments of a command with these keys.
fn with(command: &[&str], keys: &[String]) -> Vec<String> {
    let sets = keys.iter().flat_map(|key| ["--set".to_string(), key.clone()]);
    command.iter().chain(&[EMPTY]).map(|word| word.to_string()).chain(sets).collect()
}

/// A run of three steps on the data of a golden model, with checkpoints.
fn run_of(name: &str, folder: &TempDir) -> Vec<String> {
    vec![
        format!("model.path={}", golden(name)),
        format!("data.train={}/data.jsonl", golden(name)),
        format!("data.validation={}/data.jsonl", golden(name)),
        format!("checkpoint.directory={}", folder.path().join("run").display()),
        "step.batch=4".into(),
        "step.steps=3".into(),
    ]
}

#[track_caller]
fn refused(arguments: &[String], says: &str) {
    let output = output(arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains(says), "{says:?} expected in: {error}");
}

fn tensors(folder: &Path, file: &str) -> Vec<(String, Dtype, Vec<u8>)> {
    let bytes = fs::read(folder.join(file)).expect("it was written");
    let all = SafeTensors::deserialize(&bytes).expect("a file of ours");
    let each = all.tensors().into_iter();
    let mut each: Vec<_> =
        each.map(|(name, tensor)| (name, tensor.dtype(), tensor.data().to_vec())).collect();
    each.sort_by(|one, other| one.0.cmp(&other.0));
    each
}

/// The only validation of a run is the one at its end, and finds the best.
#[test]
fn the_last_validation_counts() {
    let folder = folder();
    let keys = run_of("bert-classes", &folder);
    good(&with(&["train"], &keys));
    assert!(folder.path().join("run/best-00000003/l2l.json").is_file());
    good(&with(&["eval", "--best"], &keys));
}

#[test]
fn the_best_is_decided_by_any_metric() {
    let folder = folder();
    let mut keys = run_of("bert-classes", &folder);
    keys.extend(["validation.best=accuracy".into(), "validation.every_steps=1".into()]);
    // Every step is too large, so the accuracy changes at random.
    keys.extend(["optimizer.learning_rate=0.3".into(), "step.steps=8".into()]);
    let all = events(&good(&with(&["train", "--format", "json"], &keys)));
    let best = of_kind(&all, "validation").into_iter().fold((0, -1.0), |best, event| {
        let step = event["step"].as_u64();
        let value = event["accuracy"].as_f64();
        let step = step.expect("a step");
        let value = value.expect("an accuracy");
        if value > best.1 { (step, value) } else { best }
    });
    let place = folder.path().join(format!("run/best-{:08}/l2l.json", best.0));
    let record: Value =
        serde_json::from_str(&fs::read_to_string(place).expect("it is the best")).expect("JSON");
    assert_eq!(record["progress"]["best"], json!({ "step": best.0, "value": best.1 }));
    let mut of_text = run_of("llama", &self::folder());
    of_text.push("validation.best=f1".into());
    refused(&with(&["train"], &of_text), "validation.best is \"f1\", which this model's task");
}

#[test]
fn validation_sets_have_names() {
    let folder = folder();
    let mut keys = run_of("bert-classes", &folder);
    let data = format!("{}/data.jsonl", golden("bert-classes"));
    let first = fs::read_to_string(&data).expect("it is committed");
    let few = folder.path().join("few.jsonl");
    fs::write(&few, first.lines().take(3).collect::<Vec<_>>().join("\n")).expect("ours");
    let sets = format!(
        "data.validation=[{{ path = {few:?}, name = \"few\" }}, \
         {{ path = {data:?}, name = \"all\" }}]"
    );
    keys.extend([sets, "validation.batches=20".into()]);
    let metrics = folder.path().join("last.prom");
    keys.push(format!("metrics.file={}", metrics.display()));
    let trained = events(&good(&with(&["train", "--format", "json"], &keys)));
    let found = of_kind(&trained, "validation");
    let names: Vec<&Value> = found.iter().map(|event| &event["set"]).collect();
    assert_eq!(names, ["few", "all"]);
    let evaluated = events(&good(&with(&["eval", "--format", "json"], &keys)));
    assert_eq!(evaluated.len(), 2);
    for (one, other) in evaluated.iter().zip(found) {
        assert_eq!((&one["set"], &one["accuracy"]), (&other["set"], &other["accuracy"]));
    }
    assert_eq!(evaluated[0]["sequences"], 3);
    let metrics = fs::read_to_string(metrics).expect("it was written");
    for labels in ["metric=\"accuracy\",set=\"all\"", "metric=\"matthews\",set=\"few\""] {
        let (one, other) = labels.split_once(',').expect("two");
        let is_there = |line: &str| {
            line.starts_with("l2l_validation_metric") && line.contains(one) && line.contains(other)
        };
        assert!(metrics.lines().any(is_there), "{labels} in {metrics}");
    }
    keys.push(format!("data.validation=[{{ path = {few:?}, name = \"few\" }}, {data:?}]"));
    refused(&with(&["train"], &keys), "data.validation must be entries that all have a name");
}

#[test]
fn a_run_is_resumed_with_changes() {
    let folder = folder();
    let mut keys = run_of("tied", &folder);
    keys.push("optimizer.schedule=linear".into());
    good(&with(&["train"], &keys));
    let mut longer = keys.clone();
    longer.extend(["step.steps=5".into(), "step.micro_batch=2".into()]);
    longer.push("optimizer.learning_rate=1e-4".into());
    refused(&with(&["train", "--resume"], &longer), "--resume-with-changes");
    let shown = good(&with(&["train", "--resume-with-changes"], &longer));
    for change in ["step.steps was 3, is 5", "step.micro_batch was 4, is 2", "learning_rate was"] {
        assert!(shown.contains("changed: ") && shown.contains(change), "{shown}");
    }
    let place = folder.path().join("run/step-00000005/l2l.json");
    let record = fs::read_to_string(place).expect("two more steps");
    let record: Value = serde_json::from_str(&record).expect("JSON");
    assert_eq!((&record["progress"]["step"], &record["steps"]), (&json!(5), &json!(5)));
    // Its moments go on: each block has been updated in all steps.
    assert!(record["updates"].as_array().expect("a list").iter().all(|count| count == 5));
    longer.extend(["optimizer.schedule=constant".into(), "step.steps=6".into()]);
    let shown = good(&with(&["train", "--resume-with-changes"], &longer));
    assert!(shown.contains("changed: step.steps was 5, is 6"), "{shown}");
    longer.push("optimizer.kind=lion".into());
    let arguments = with(&["train", "--resume-with-changes"], &longer);
    refused(&arguments, "optimizer.kind was \"adamw\", is \"lion\"");
}

#[test]
fn the_base_is_measured_whatever_the_run() {
    let folder = folder();
    let mut keys = run_of("llama", &folder);
    keys.push("train.lora.rank=2".into());
    good(&with(&["train"], &keys));
    let loss = |arguments: &[&str], keys: &[String]| {
        let all = events(&good(&with(&[&["eval", "--format", "json"], arguments].concat(), keys)));
        all[0]["loss"].as_f64().expect("a loss")
    };
    let tuned = loss(&[], &keys);
    let base = loss(&["--model", &golden("llama")], &keys);
    keys.push("checkpoint.directory=".into());
    keys.push("train.lora=".into());
    assert_ne!(tuned, base);
    keys.retain(|key| !key.starts_with("train.lora"));
    assert_eq!(base, loss(&[], &keys));
    let nothing = folder.path().display().to_string();
    let error = output(&with(&["eval", "--model", &nothing], &keys));
    assert!(String::from_utf8_lossy(&error.stderr).contains("config.json is missing"));
}

/// Weights come out in the dtype that they came in, in as many files as are asked for.
#[test]
fn exports_keep_the_dtype() {
    let folder = folder();
    let at = |name: &str| folder.path().join(name);
    let base = at("base");
    let out = at("out");
    let model = golden("llama");
    let to = base.display().to_string();
    let small =
        ["export", "--model", &model, "--to", &to, "--dtype", "bf16", "--shard-size", "4kB"];
    good(&small);
    let index = fs::read_to_string(base.join("model.safetensors.index.json")).expect("several");
    let index: Value = serde_json::from_str(&index).expect("JSON");
    let files: Vec<&str> = index["weight_map"]
        .as_object()
        .expect("a map")
        .values()
        .filter_map(Value::as_str)
        .collect();
    assert!(files.len() > 10 && files.iter().any(|file| file.contains("00002-of-")), "{files:?}");
    let config: Value =
        serde_json::from_slice(&fs::read(base.join("config.json")).expect("there")).expect("JSON");
    assert_eq!(config["dtype"], "bfloat16");
    // Each value is the nearest bf16 of the one that it was.
    let whole = tensors(Path::new(&model), "model.safetensors");
    for (name, dtype, bytes) in &whole {
        assert_eq!(*dtype, Dtype::F32);
        let file = index["weight_map"][name].as_str().expect("it is in a file");
        let found = tensors(&base, file).into_iter().find(|one| one.0 == *name).expect("there");
        assert_eq!(found.1, Dtype::BF16);
        let (floats, _) = bytes.as_chunks::<4>();
        let expected = floats.iter().map(|&four| half::bf16::from_f32(f32::from_le_bytes(four)));
        let expected: Vec<u8> = expected.flat_map(half::bf16::to_le_bytes).collect();
        assert_eq!(found.2, expected, "{name}");
    }
    // A run of this model, and its export.
    let mut keys = run_of("llama", &folder);
    keys[0] = format!("model.path={}", base.display());
    good(&with(&["train"], &keys));
    let to = out.display().to_string();
    good(&with(&["export", "--to", &to], &keys));
    let trained = tensors(&folder.path().join("run/step-00000003"), "model.safetensors");
    let exported = tensors(&out, "model.safetensors");
    assert_eq!(exported.len(), trained.len());
    assert!(exported.iter().all(|(_, dtype, _)| *dtype == Dtype::BF16));
    for (one, other) in exported.iter().zip(&trained) {
        assert_eq!((&one.0, 2 * one.2.len()), (&other.0, other.2.len()));
    }
    let to = at("exact").display().to_string();
    good(&with(&["export", "--to", &to, "--dtype", "f32"], &keys));
    assert_eq!(tensors(&at("exact"), "model.safetensors"), trained);
    refused(&with(&["export", "--to", "x", "--dtype", "int3"], &keys), "--dtype: export.dtype");
    // A directory that describes a model and has no weights has no dtype, either.
    let described = at("described");
    fs::create_dir(&described).expect("it is new");
    fs::copy(Path::new(&model).join("config.json"), described.join("config.json")).expect("there");
    keys[0] = format!("model.path={}", described.display());
    let run = at("other-run").display().to_string();
    keys.extend(["model.random_weights=true".into(), format!("checkpoint.directory={run}")]);
    good(&with(&["train"], &keys));
    good(&with(&["export", "--to", &at("described-out").display().to_string()], &keys));
}

/// The pooling of an encoder of sentence-transformers stays beside it.
#[test]
fn exports_keep_pooling() {
    let folder = folder();
    let base = folder.path().join("base");
    fs::create_dir_all(base.join("1_Pooling")).expect("ours");
    for file in ["config.json", "model.safetensors"] {
        fs::copy(Path::new(&golden("bert")).join(file), base.join(file)).expect("ours");
    }
    let modules = r#"[{"idx": 0, "path": ""}, {"idx": 1, "path": "1_Pooling"}, {"path": "../x"}]"#;
    fs::write(base.join("modules.json"), modules).expect("ours");
    fs::write(base.join("1_Pooling/config.json"), "{}").expect("ours");
    let mut keys = run_of("bert", &folder);
    keys[0] = format!("model.path={}", base.display());
    good(&with(&["train"], &keys));
    let out = folder.path().join("out");
    good(&with(&["export", "--to", &out.display().to_string()], &keys));
    assert_eq!(fs::read_to_string(out.join("modules.json")).expect("kept"), modules);
    assert_eq!(fs::read_to_string(out.join("1_Pooling/config.json")).expect("kept"), "{}");
}

#[test]
fn pickles_are_refused_with_how_to_convert_them() {
    let folder = folder();
    fs::copy(Path::new(&golden("bert")).join("config.json"), folder.path().join("config.json"))
        .expect("ours");
    fs::write(folder.path().join("pytorch_model.bin"), "x").expect("ours");
    let keys = [format!("model.path={}", folder.path().display()), "data.train=random".into()];
    refused(&with(&["plan"], &keys), "save_pretrained");
}

/// A masked language model gets a new head where the directory has none.
#[test]
fn a_masked_model_gets_a_head() {
    let folder = folder();
    let from = golden("bert");
    let to = folder.path().join("headless");
    fs::create_dir(&to).expect("ours");
    fs::copy(Path::new(&from).join("config.json"), to.join("config.json")).expect("ours");
    let bytes = fs::read(Path::new(&from).join("model.safetensors")).expect("committed");
    let all = SafeTensors::deserialize(&bytes).expect("good");
    let without_head = all.tensors().into_iter().filter(|(name, _)| !name.starts_with("cls."));
    safetensors::serialize_to_file(without_head, None, &to.join("model.safetensors"))
        .expect("ours");
    let mut keys = run_of("bert", &folder);
    keys[0] = format!("model.path={}", to.display());
    let shown = good(&with(&["train"], &keys));
    assert!(shown.contains("begin at random: cls.predictions"), "{shown}");
    // It is not evaluated before it was trained.
    let error = output(&with(&["eval", "--model", &to.display().to_string()], &keys));
    assert!(String::from_utf8_lossy(&error.stderr).contains("cls.predictions"), "a random head");
}

/// A decoder that predicts tokens is trained to classify, and its checkpoint is a classifier.
#[test]
fn a_decoder_classifies() {
    let folder = folder();
    let mut keys = run_of("llama-classes", &folder);
    keys[0] = format!("model.path={}", golden("text/llama"));
    let data = folder.path().join("data.jsonl");
    let line = |(text, label)| json!({ "text": text, "label": label }).to_string();
    let lines = [("a good one", "good"), ("a bad one", "bad"), ("so good", "good")].map(line);
    fs::write(&data, lines.join("\n")).expect("ours");
    keys[1] = format!("data.train={}", data.display());
    keys[2] = format!("data.validation={}", data.display());
    keys.extend([
        "model.task=sequence-classification".into(),
        "model.labels=[\"bad\", \"good\"]".into(),
        "optimizer.learning_rate=0.01".into(),
        "step.steps=30".into(),
    ]);
    let shown = good(&with(&["train"], &keys));
    assert!(shown.contains("begin at random: score.weight"), "{shown}");
    let found = events(&good(&with(&["eval", "--format", "json"], &keys)));
    assert_eq!(found[0]["accuracy"], 1.0);
    let to = folder.path().join("exported");
    good(&with(&["export", "--to", &to.display().to_string()], &keys));
    let written: Value =
        serde_json::from_str(&fs::read_to_string(to.join("config.json")).expect("it was written"))
            .expect("JSON");
    assert_eq!(written["architectures"][0], "LlamaForSequenceClassification");
    assert_eq!(written["id2label"]["1"], "good");
    let names: Vec<String> =
        tensors(&to, "model.safetensors").into_iter().map(|(name, ..)| name).collect();
    assert!(names.contains(&"score.weight".into()) && !names.contains(&"lm_head.weight".into()));
}

/// A masked language model is trained to classify words. What is measured is that of all labelled
/// tokens.
#[test]
fn an_encoder_classifies_tokens() {
    let folder = folder();
    let mut keys = run_of("bert", &folder);
    keys[0] = format!("model.path={}", golden("text/wordpiece"));
    let data = folder.path().join("data.jsonl");
    let line = |words: [&str; 3]| {
        let tags = words.map(|word| if word == "Oslo" { "place" } else { "none" });
        json!({ "tokens": words, "tags": tags }).to_string()
    };
    let lines = [["in", "Oslo", "live"], ["Oslo", "is", "good"], ["a", "good", "Oslo"]].map(line);
    fs::write(&data, lines.join("\n")).expect("ours");
    keys[1] = format!("data.train={}", data.display());
    keys[2] = format!("data.validation={}", data.display());
    keys.extend([
        "model.task=token-classification".into(),
        "model.labels=[\"none\", \"place\"]".into(),
        "model.dropout=0.0".into(),
        "optimizer.learning_rate=0.01".into(),
        "step.steps=40".into(),
        "device.count=2".into(),
    ]);
    let shown = good(&with(&["train"], &keys));
    assert!(shown.contains("begin at random: classifier.bias, classifier.weight"), "{shown}");
    let found = events(&good(&with(&["eval", "--format", "json"], &keys)));
    assert_eq!((&found[0]["accuracy"], &found[0]["labelled"]), (&json!(1.0), &json!(9)));
    let rows = good(&with(&["data", "--rows", "1"], &keys));
    assert!(rows.contains("o⟦1⟧"), "{rows}");
    let to = folder.path().join("exported");
    good(&with(&["export", "--to", &to.display().to_string()], &keys));
    let written = fs::read_to_string(to.join("config.json")).expect("it was written");
    let written: Value = serde_json::from_str(&written).expect("JSON");
    assert_eq!(written["architectures"][0], "BertForTokenClassification");
    assert_eq!(written["id2label"]["1"], "place");
}

fn chat(arguments: &[&str], lines: &str) -> String {
    let model = format!("model.path={}", golden("text/bpe"));
    let all = [&["chat", "--set", &model, "--tokens", "6", "--ignore-end"], arguments].concat();
    let mut child =
        l2l(&all).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it runs");
    child.stdin.take().expect("a pipe").write_all(lines.as_bytes()).expect("it reads");
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// A chat answers as `generate` does for the messages so far, and an empty line begins anew.
#[test]
fn a_chat_remembers_what_was_said() {
    let replies = |lines: &str, more: &[&str]| -> Vec<String> {
        let all = events(&chat(&[&["--format", "json"], more].concat(), lines));
        let text = |event: &&Value| event["text"].as_str().expect("a text").to_string();
        of_kind(&all, "generated").iter().map(text).collect()
    };
    let two = replies("Hello\nAnd you?\n", &[]);
    assert_eq!(two.len(), 2);
    let folder = folder();
    let file = folder.path().join("prompts.jsonl");
    let message = |role: &str, content: &str| json!({ "role": role, "content": content });
    let so_far =
        [message("user", "Hello"), message("assistant", &two[0]), message("user", "And you?")];
    let mut with_system = vec![message("system", "Be brief.")];
    with_system.extend(so_far[..1].to_vec());
    let prompts =
        format!("{}\n{}", json!({ "messages": so_far }), json!({ "messages": with_system }));
    fs::write(&file, prompts).expect("ours");
    let model = format!("model.path={}", golden("text/bpe"));
    let file = file.display().to_string();
    let generate = ["generate", "--set", &model, "--tokens", "6", "--ignore-end"];
    let all = [&generate[..], &["--format", "json", "--prompts", &file]].concat();
    let all = events(&good(&all));
    let generated = of_kind(&all, "generated");
    assert_eq!(generated[0]["text"], *two[1]);
    assert_eq!(generated[1]["text"], *replies("Hello\n", &["--system", "Be brief."])[0]);
    let anew = replies("Hello\n\nHello\n", &[]);
    assert_eq!(anew, [two[0].clone(), two[0].clone()]);
    // Fewer tokens than the conversation has: its beginning is left out.
    assert_eq!(replies(&"What is the bound?\n".repeat(12), &[]).len(), 12);
}

#[test]
fn text_ends_at_a_stop_string() {
    let model = format!("model.path={}", golden("text/bpe"));
    let base =
        ["generate", "--set", &model, "--tokens", "24", "--ignore-end", "--prompt", "The ring"];
    let whole = good(&base);
    let whole = whole.trim_end_matches('\n');
    let middle = whole.char_indices().nth(whole.chars().count() / 2).expect("a text").0;
    let stop: String = whole[middle..].chars().take(2).collect();
    let cut = good(&[&base[..], &["--stop", &stop]].concat());
    let expected = &whole[..whole.find(&stop).expect("it is in it")];
    assert_eq!(cut, format!("{expected}\n"));
    let all = events(&good(&[&base[..], &["--stop", &stop, "--format", "json"]].concat()));
    let last = all.last().expect("an end");
    assert_eq!((&last["ended"], &last["text"]), (&json!("stop"), &json!(expected)));
    let shown: String =
        of_kind(&all, "token").iter().filter_map(|one| one["text"].as_str()).collect();
    assert_eq!(shown, expected);
    let penalised = good(&[&base[..], &["--repetition-penalty", "5"]].concat());
    assert_ne!(penalised.trim_end(), whole.trim_end());
}

/// A masked language model learns labels, of which a text may have several; with adapters, too. The
/// checkpoint and the export say so, and need no key to be evaluated.
#[test]
fn an_encoder_gives_several_labels() {
    for lora in [false, true] {
        let folder = folder();
        let mut keys = run_of("bert", &folder);
        keys[0] = format!("model.path={}", golden("text/wordpiece"));
        let data = folder.path().join("data.csv");
        let rows = ["text,good,long,bad", "a good one,1,0,0", "a bad one,0,0,1"];
        let more = ["so good and so bad and so long,1,1,1", "nothing,0,0,0"];
        fs::write(&data, [rows.join("\n"), more.join("\n")].join("\n")).expect("ours");
        keys[1] = format!("data.train={}", data.display());
        keys[2] = format!("data.validation={}", data.display());
        keys.extend([
            "model.task=sequence-classification".into(),
            "model.labels=[\"good\", \"long\", \"bad\"]".into(),
            "model.problem_type=multi_label_classification".into(),
            "model.dropout=0".into(),
            "optimizer.learning_rate=0.003".into(),
            "step.steps=40".into(),
            "validation.every_steps=10".into(),
            "validation.best=f1_micro".into(),
            "export.dtype=f32".into(),
        ]);
        if lora {
            keys.extend(["train.lora.rank=4".into(), "train.lora.targets=[\"all-linear\"]".into()]);
        }
        good(&with(&["train"], &keys));
        let to = folder.path().join("exported");
        good(&with(&["export", "--to", &to.display().to_string()], &keys));
        let text = fs::read_to_string(to.join("config.json")).expect("it was written");
        let written: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(written["problem_type"], "multi_label_classification");
        assert_eq!(written["id2label"], json!({ "0": "good", "1": "long", "2": "bad" }));
        assert_eq!(written["architectures"][0], "BertForSequenceClassification");
        let plain =
            [format!("model.path={}", to.display()), format!("data.validation={}", data.display())];
        let found = events(&good(&with(&["eval", "--format", "json"], &plain)));
        let number = |value: &Value| value.as_f64().expect("a number");
        assert!(number(&found[0]["f1_micro"]) > 0.5, "{found:?}");
        let of_run = events(&good(&with(&["eval", "--format", "json"], &keys)));
        for metric in ["loss", "subset_accuracy", "f1_micro", "f1_macro"] {
            let off = number(&of_run[0][metric]) - number(&found[0][metric]);
            assert!(off.abs() < 1e-5, "{metric}: {of_run:?} {found:?}");
        }
        let long = &found[0]["by_label"][1];
        let counts = ["true_positives", "false_negatives"].map(|count| number(&long[count]));
        assert_eq!((&long["label"], counts.iter().sum()), (&json!("long"), 1.0));
        let shown = good(&with(&["eval"], &plain));
        assert!(shown.contains("\n  precision_macro ") && shown.contains("\n  long "), "{shown}");
        let rows = good(&with(&["data"], &[keys.clone(), vec!["step.batch=1".into()]].concat()));
        assert!(rows.contains("⟦[0.0,0.0,1.0]⟧"), "{rows}");
        keys.push("validation.best=f1".into());
        keys.push(format!("checkpoint.directory={}", folder.path().join("other").display()));
        refused(&with(&["train"], &keys), "validation.best");
    }
}
