//! `l2l data`, `eval` and `generate` as their users meet them.

use std::fs;
use std::path::{Path, PathBuf};

use crate::program::{events, good, output};
use serde_json::{Value, json};

fn goldens(path: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(path).display().to_string()
}

#[track_caller]
fn refused(arguments: &[&str], says: &str) {
    let output = output(arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains(says), "{says:?} expected in: {error}");
    assert_eq!(error.lines().count(), 1, "{error}");
}

fn write(folder: &tempfile::TempDir, name: &str, text: &str) -> String {
    let path: PathBuf = folder.path().join(name);
    fs::write(&path, text).expect("a directory of ours");
    path.display().to_string()
}

#[test]
fn data_is_shown() {
    let folder = tempfile::tempdir().expect("a place for files");
    let line = json!({ "prompt": "The ring", "completion": " turns." }).to_string();
    let file = write(&folder, "data.jsonl", &format!("{line}\n").repeat(9));
    let (model, train) =
        (format!("model.path={}", goldens("text/bpe")), format!("data.train={file}"));
    let sets = ["--set", &model, "--set", &train, "--set", "step.batch=4"];
    let shown = good(&[&["data"], &sets[..]].concat());
    assert!(
        shown.contains("9 sequences") && shown.contains("The ring⟦ turns.<|endoftext|>⟧"),
        "{shown}"
    );
    let all = events(&good(&[&["data", "--format", "json", "--rows", "1"], &sets[..]].concat()));
    assert_eq!((&all[0]["event"], &all[0]["sequences"]), (&json!("data"), &json!(9)));
    assert_eq!(all[1]["text"], "The ring turns.<|endoftext|>");
    assert_eq!(all[1]["labels"][0], -100);
    let batches = events(&good(&[&["data", "--batches", "3"], &sets[..]].concat()));
    assert_eq!(batches.len(), 3);
    assert_eq!(batches[2]["step"], 3);
    assert_eq!(batches[0]["input_ids"].as_array().map(Vec::len), Some(4));
}

#[test]
fn text_is_generated() {
    let folder = tempfile::tempdir().expect("a place for files");
    let model = format!("model.path={}", goldens("text/bpe"));
    let sets = ["generate", "--set", &model, "--ignore-end"];
    let plain = good(&[&sets[..], &["--prompt", "The ring", "--tokens", "9"]].concat());
    let json = ["--format", "json", "--prompt", "The ring", "--tokens", "9"];
    let all = events(&good(&[&sets[..], &json].concat()));
    assert_eq!(all.iter().filter(|event| event["event"] == "token").count(), 9);
    let generated = all.last().expect("an end");
    assert_eq!(generated["ended"], "length");
    assert_eq!(format!("{}\n", generated["text"].as_str().expect("a text")), plain);
    // Together with others it is the same.
    let lines = [
        json!({ "prompt": "a" }),
        json!({ "prompt": "The ring" }),
        json!({ "messages": [{ "role": "user", "content": "hello" }] }),
        json!({ "input_ids": [5, 6, 7, 8] }),
    ];
    let lines: Vec<String> = lines.iter().map(Value::to_string).collect();
    let prompts = write(&folder, "prompts.jsonl", &lines.join("\n"));
    let many = ["--format", "json", "--prompts", &prompts, "--tokens", "9"];
    let many = events(&good(&[&sets[..], &many].concat()));
    let of_second = many.iter().find(|event| event["event"] == "generated" && event["prompt"] == 1);
    assert_eq!(of_second.expect("an end")["tokens"], generated["tokens"]);
    let seeded = |seed: &str| {
        let draws = ["--prompt", "a", "--tokens", "20", "--temperature", "1", "--seed", seed];
        good(&[&sets[..], &draws].concat())
    };
    assert_eq!(seeded("1"), seeded("1"));
    assert_ne!(seeded("1"), seeded("2"));
    assert!(good(&[&sets[..], &["--prompt", "a", "--plan"]].concat()).contains("memory"));
    good(&[&sets[..], &["--prompt", "a"]].concat());
}

/// Text of bytes that are no character, and of tokens that are bytes, is shown to its end.
#[test]
fn broken_characters_do_not_stop_the_text() {
    let model = format!("model.path={}", goldens("text/llama"));
    for seed in ["0", "1", "2"] {
        let all = events(&good(&[
            "generate",
            "--set",
            &model,
            "--ignore-end",
            "--format",
            "json",
            "--prompt",
            "hé there",
            "--tokens",
            "40",
            "--temperature",
            "1",
            "--seed",
            seed,
        ]));
        let shown: Vec<&str> = all.iter().filter_map(|event| event["text"].as_str()).collect();
        let (whole, pieces) = shown.split_last().expect("an end");
        assert!(whole.chars().count() > 20, "{whole:?}");
        // What comes last is not held back.
        let last = pieces.iter().rev().take(9).map(|piece| piece.len()).sum::<usize>();
        assert!(last > 0, "{pieces:?}");
    }
}

#[test]
fn what_cannot_be_generated_is_refused() {
    let folder = tempfile::tempdir().expect("a place for files");
    let model = format!("model.path={}", goldens("text/bpe"));
    let of =
        |more: &[&str], says: &str| refused(&[&["generate", "--set", &model], more].concat(), says);
    of(&["--prompt", ""], "prompt 0 is empty");
    of(&["--prompt", "a", "--tokens", "5000"], "128 positions");
    of(&["--prompt", "a", "--tokens", "18446744073709551615"], "128 positions");
    of(&["--prompt", "a", "--temperature=-1"], "temperature");
    of(&["--prompt", "a", "--top-p", "0"], "top-p");
    of(&["--prompts", &write(&folder, "none.jsonl", "\n\n")], "no prompt in it");
    of(&["--prompts", &write(&folder, "big.jsonl", "{\"input_ids\": [999]}")], "line 1: token 999");
    of(&["--prompts", &write(&folder, "no.jsonl", "{}")], "line 1: it needs one of");
    of(&["--prompts", &write(&folder, "m.jsonl", "{\"messages\": []}")], "messages is empty");
    let gpt2 = format!("model.path={}", goldens("generate/gpt2"));
    let chat = ["generate", "--set", &gpt2, "--chat", "--prompt", "a"];
    refused(&chat, "no chat template");
    refused(&["generate", "--prompt", "a"], "no model is named");
    let bert = format!("model.path={}", goldens("text/wordpiece"));
    refused(&["generate", "--set", &bert, "--prompt", "a"], "models that predict the next");
}

/// A model of bytes goes on from its checkpoint, whatever its vocabulary.
#[test]
fn a_run_is_evaluated_and_continued() {
    let folder = tempfile::tempdir().expect("a place for files");
    let run = format!("checkpoint.directory={}", folder.path().join("run").display());
    let config = write(
        &folder,
        "run.toml",
        "model = { layers = 1, hidden = 32, heads = 2, vocabulary = 300 }\n\
         data = { sequence_length = 32 }\n\
         step = { batch = 4, micro_batch = 4, steps = 6 }\n\
         validation = { every_steps = 3, batches = 2 }\n",
    );
    let trained = events(&good(&["train", &config, "--set", &run, "--format", "json"]));
    let looks: Vec<&Value> =
        trained.iter().filter(|event| event["event"] == "validation").collect();
    let eval = ["eval", &config, "--set", &run, "--format", "json", "--batches", "2"];
    let found = &events(&good(&eval))[0];
    assert_eq!(found["loss"], looks[1]["loss"], "the last look");
    assert_eq!(found["perplexity"].as_f64(), found["loss"].as_f64().map(f64::exp));
    assert!(
        good(&["eval", &config, "--set", &run, "--best", "--batches", "1"]).contains("perplexity")
    );
    good(&["generate", &config, "--set", &run, "--prompt", "//! The", "--tokens", "8"]);
    refused(&["eval", &config], "no model is named");
    refused(&["eval", &config, "--set", "checkpoint.directory=/none"], "does not exist");
}
