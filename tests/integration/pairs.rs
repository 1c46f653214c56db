//! Records of two answers with a tokenizer: where a prompt ends, special tokens that stand once,
//! and noise that comparisons leave out.

use std::fs;
use std::path::Path;

use l2l::config::{ObjectiveKind, TooLong};
use l2l::data::{Dataset, Sequence};
use l2l::{Config, Error, Trainer, shape_of};
use serde_json::{Value, json};

/// A preference on these records, with a model of `goldens/text`.
fn config(folder: &Path, name: &str, lines: &[Value]) -> Config {
    let at = folder.join("pairs.jsonl");
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    fs::write(&at, text).expect("a place for files");
    let mut config = Config::default();
    let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/text");
    config.model.path = Some(goldens.join(name));
    config.data.train = at.display().to_string().into();
    config.objective.kind = ObjectiveKind::Dpo;
    (config.step.batch, config.step.micro_batch) = (2, 2);
    config
}

fn open(config: &Config) -> Result<Dataset, Error> {
    Dataset::open(config, &shape_of(config)?).map(|(data, _)| data)
}

/// The tokens and labels of both answers.
fn answers(record: &Sequence) -> [(&[u32], &[i32]); 2] {
    let (first, second) = record.tokens.split_at(record.documents[0]);
    let (of_first, of_second) = record.labels.split_at(record.documents[0]);
    [(first, of_first), (second, of_second)]
}

/// A chat's prompt may be told, or be the part that is the same, also beside a text that repeats
/// it.
#[test]
fn chats_have_one_prompt_in_every_form() {
    let folder = tempfile::tempdir().expect("a place for files");
    let message = |role: &str, content: &str| json!({ "role": role, "content": content });
    let user = message("user", "what is a layer?");
    let [good, bad] = ["a part", "a message"].map(|content| message("assistant", content));
    let lines = [
        json!({ "prompt": [user], "chosen": [good], "rejected": [bad] }),
        json!({ "chosen": [user, good], "rejected": [user, bad] }),
        json!({ "prompt": "what is a layer?", "chosen": [user, good], "rejected": [user, bad] }),
    ];
    for name in ["llama", "bpe"] {
        let data = open(&config(folder.path(), name, &lines)).expect("good records");
        let all: Vec<Sequence> = (0..3).map(|at| data.sequence(at).expect("there")).collect();
        assert!(all.iter().all(|one| *one == all[0]), "{name}");
        for (tokens, labels) in answers(&all[0]) {
            let learnt = labels.iter().filter(|label| **label >= 0).count();
            assert!(0 < learnt && learnt < tokens.len() / 2, "{name}: {learnt} of {tokens:?}");
        }
    }
    let refused = |line: Value| {
        let config = config(folder.path(), "llama", &[line]);
        open(&config).map(drop).expect_err("it is refused").to_string()
    };
    for line in [
        json!({ "chosen": [good], "rejected": [bad] }),
        json!({ "chosen": [user, good], "rejected": [user] }),
        json!({ "chosen": [user, good], "rejected": [user, good] }),
    ] {
        let error = refused(line);
        assert!(error.contains("they must begin alike, and end differently"), "{error}");
    }
}

/// The first token of a text stands before the prompt alone, and the last behind the answer alone.
#[test]
fn special_tokens_stand_once() {
    let folder = tempfile::tempdir().expect("a place for files");
    let line = json!({ "prompt": "what is ", "chosen": "a layer", "rejected": "a message" });
    let data = open(&config(folder.path(), "llama", &[line])).expect("good records");
    let record = data.sequence(0).expect("it is there");
    let [begin, end] = [1, 2];
    for (tokens, labels) in answers(&record) {
        let places =
            |of: u32| -> Vec<usize> { (0..tokens.len()).filter(|at| tokens[*at] == of).collect() };
        assert_eq!((places(begin), places(end)), (vec![0], vec![tokens.len() - 1]));
        assert_eq!(labels[tokens.len() - 1], end as i32, "it is learnt");
    }
}

/// An answer of which nothing is left teaches nothing, and would make a loss of nothing.
#[test]
fn an_answer_that_is_cut_away_is_refused() {
    let folder = tempfile::tempdir().expect("a place for files");
    let line = json!({ "prompt": "what is ".repeat(9), "chosen": "a layer", "rejected": "no" });
    let mut config = config(folder.path(), "llama", &[line]);
    config.data.sequence_length = Some(12);
    config.data.too_long = TooLong::Cut;
    let error = open(&config).map(drop).expect_err("it is refused").to_string();
    assert!(error.contains("line 1: chosen: nothing of it is learnt"), "{error}");
    config.data.too_long = TooLong::Error;
    let error = open(&config).map(drop).expect_err("it is refused").to_string();
    assert!(error.contains("line 1: chosen: it has"), "{error}");
}

/// The model of this directory has dropout: its noise enters a comparison only if the config says
/// so.
#[tokio::test]
async fn dropout_is_left_out_of_comparisons() {
    let folder = tempfile::tempdir().expect("a place for files");
    let line = json!({ "prompt": "what is ", "chosen": "a layer", "rejected": "a message" });
    let first = async |dropout| {
        let mut config = config(folder.path(), "bpe", &[line.clone(), line.clone()]);
        config.model.dropout = dropout;
        let (mut trainer, mut batches) = Trainer::open(config).await.expect("a config of ours");
        let batch = batches.next().await.expect("good records");
        trainer.step(batch).await.expect("a step").loss
    };
    assert_eq!(first(None).await, std::f64::consts::LN_2);
    assert_ne!(first(Some(0.1)).await, std::f64::consts::LN_2);
}
