//! Every recipe runs at tiny size: its data is shown, it trains, and it is evaluated.

use std::fs;
use std::path::{Path, PathBuf};

use crate::program::good;
use serde_json::{Value, json};

fn root(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// Lines of a kind of data, enough for a few batches.
fn lines(of: impl Fn(usize) -> Value) -> String {
    (0..40).map(|number| of(number).to_string() + "\n").collect()
}

const WORDS: [&str; 5] = ["the ring turns", "a layer comes", "and goes again", "one", "two three"];

fn words(number: usize) -> String {
    format!("{} {} {number}", WORDS[number % 5], WORDS[number / 5 % 5])
}

fn says(role: &str, content: String) -> Value {
    json!({ "role": role, "content": content })
}

/// Two answers to a question.
fn preference(number: usize) -> Value {
    let [chosen, rejected] = [1, 2].map(|more| json!([says("assistant", words(number + more))]));
    let prompt = json!([says("user", words(number))]);
    json!({ "prompt": prompt, "chosen": chosen, "rejected": rejected })
}

/// A question and its answer.
fn question(number: usize) -> Value {
    json!({ "query": words(number), "answer": format!("{number} is it") })
}

/// A query with a document, and whether it is relevant.
fn relevant(number: usize) -> Value {
    let label = f64::from(u8::from(number.is_multiple_of(2)));
    json!({ "query": words(number), "document": words(number + 1), "label": label })
}

/// A conversation of two messages.
fn chat(number: usize) -> Value {
    json!({ "messages": [says("user", words(number)), says("assistant", words(number + 1))] })
}

/// Writes a file, and returns its path.
fn write(folder: &Path, name: &str, text: String) -> String {
    let path = folder.join(name);
    fs::write(&path, text).expect("a directory of ours");
    path.display().to_string()
}

/// The arguments of a command on a recipe.
fn command(name: &str, recipe: &str, sets: &[String]) -> Vec<String> {
    let recipe = root("examples/recipes").join(recipe).with_extension("toml");
    let mut all = vec![name.to_string(), recipe.display().to_string()];
    sets.iter().for_each(|set| all.extend(["--set".into(), set.clone()]));
    all
}

/// A model with experts that has the tokenizer and the chat template of another.
fn with_experts(folder: &Path, tokenizer: &Path) -> PathBuf {
    let text = fs::read_to_string(tokenizer.join("config.json")).expect("it is committed");
    let config: Value = serde_json::from_str(&text).expect("it is JSON");
    let run = folder.join("random").display().to_string();
    let to = folder.join("with-experts");
    let sets = [
        "model.preset=moe-small".into(),
        "model.layers=1".into(),
        "model.hidden=32".into(),
        "model.heads=2".into(),
        "model.expert_intermediate=16".into(),
        format!("model.vocabulary={}", config["vocab_size"]),
        "data.train=random".into(),
        "step.steps=1".into(),
        format!("checkpoint.directory={run}"),
    ];
    let all = |name: &str| {
        let sets = sets.iter().flat_map(|set| ["--set".to_string(), set.clone()]);
        [name.to_string(), "/dev/null".into()].into_iter().chain(sets).collect::<Vec<_>>()
    };
    good(&all("train"));
    good(&[all("export"), vec!["--to".into(), to.display().to_string()]].concat());
    for file in fs::read_dir(tokenizer).expect("it is committed").flatten() {
        let name = file.file_name();
        if !to.join(&name).exists() {
            fs::copy(file.path(), to.join(&name)).expect("a directory of ours");
        }
    }
    to
}

/// Generates with the model of a recipe, and exports it.
fn answers_and_is_exported(command: impl Fn(&str) -> Vec<String>, chats: bool, to: &str) {
    let prompt = ["--prompt", "the ring", "--tokens", "5"].map(String::from);
    let chat = chats.then(|| "--chat".to_string());
    good(&[command("generate"), prompt.into(), chat.into_iter().collect()].concat());
    good(&[command("export"), vec!["--to".into(), to.into()]].concat());
    assert!(Path::new(to).join("model.safetensors").is_file(), "{to}");
}

/// What makes a short run of a recipe.
fn tiny_run(recipe: &str, train: &str, run: &str) -> [String; 8] {
    // A batch of PipeDream is one micro-batch, and one of 2BW has whole ones.
    let micro_batch = match recipe {
        "pipedream" => 6,
        "2bw" => 2,
        _ => 4,
    };
    [
        format!("data.train={train}"),
        format!("checkpoint.directory={run}"),
        "step.steps=2".into(),
        "data.sequence_length=64".into(),
        "step.batch=6".into(),
        format!("step.micro_batch={micro_batch}"),
        format!("log.file={run}.jsonl"),
        format!("log.tensorboard={run}.board"),
    ]
}

/// The sizes of a small model.
fn of_sizes(layers: usize, heads: usize) -> Vec<String> {
    let sizes = [("layers", layers), ("hidden", 32), ("heads", heads)];
    sizes.map(|(key, size)| format!("model.{key}={size}")).into()
}

#[test]
fn every_recipe_runs() {
    let folder = tempfile::tempdir().expect("a place for files");
    let write = |name, text| write(folder.path(), name, text);
    let text = write("text.txt", (0..200).map(|number| words(number) + "\n").collect());
    let texts = write("texts.jsonl", lines(|number| json!({ "text": words(number) })));
    let label = |number: usize| if number.is_multiple_of(3) { "spam" } else { "ham" };
    let classes = |number| json!({ "text": words(number), "label": label(number) });
    let classes = write("classes.jsonl", lines(classes));
    let pairs = |number: usize| {
        let label = number as f64 / 9.0;
        json!({ "text": words(number), "text_pair": words(number + 1), "label": label })
    };
    let pairs = write("pairs.jsonl", lines(pairs));
    let chats = write("chats.jsonl", lines(chat));
    let preferences = write("preferences.jsonl", lines(preference));
    let questions = write("questions.jsonl", lines(question));
    let tiny = |directory: &str| {
        format!("model.path={}", root("tests/goldens/text").join(directory).display())
    };
    let of_stages = ["model.kv_heads=2", "model.intermediate=48", "schedule.window=2"];
    let stages = [of_sizes(3, 2), of_stages.map(String::from).to_vec()].concat();
    let double = [stages.clone(), vec!["schedule.stages=3".into()]].concat();
    let relevant = write("relevant.jsonl", lines(relevant));
    let of_llama = root("tests/goldens/text/llama");
    let with_experts = with_experts(folder.path(), &of_llama).display().to_string();
    let recipes: [(&str, Vec<String>, &str, &str); 16] = [
        ("pretrain", of_sizes(1, 2), &text, "perplexity"),
        ("megatron", of_sizes(2, 4), &text, "perplexity"),
        ("ptd-p", of_sizes(2, 4), &text, "perplexity"),
        ("pipedream", stages, &text, "perplexity"),
        ("2bw", double, &text, "perplexity"),
        ("continue", vec![tiny("bpe")], &texts, "perplexity"),
        ("masked", vec![tiny("wordpiece")], &text, "perplexity"),
        ("classify", vec![tiny("wordpiece")], &classes, "accuracy"),
        ("similarity", vec![tiny("wordpiece")], &pairs, "spearman"),
        ("embedding", vec![tiny("wordpiece")], &questions, "mrr_10"),
        ("chat", vec![tiny("llama")], &chats, "perplexity"),
        ("lora", vec![tiny("llama")], &chats, "perplexity"),
        ("preference", vec![tiny("llama")], &preferences, "reward_accuracy"),
        ("reward", vec![tiny("llama")], &preferences, "margin"),
        ("reranker", vec![tiny("wordpiece")], &relevant, "accuracy"),
        ("experts", vec![format!("model.path={with_experts}")], &chats, "perplexity"),
    ];
    let known = fs::read_dir(root("examples/recipes")).expect("a folder").count();
    assert_eq!(known, recipes.len(), "each recipe is tried");
    for (recipe, mut sets, train, metric) in recipes {
        let run = folder.path().join(recipe).display().to_string();
        if recipe == "classify" {
            sets.push(format!("data.validation={train}"));
        }
        sets.extend(tiny_run(recipe, train, &run));
        let command = |name: &str| command(name, recipe, &sets);
        assert!(good(&command("data")).contains("tokens"), "{recipe}");
        good(&command("train"));
        let logged = fs::read_to_string(format!("{run}.jsonl")).expect("it was written");
        let reports = if ["pipedream", "2bw"].contains(&recipe) { 1 } else { 2 };
        assert_eq!(logged.matches("\"event\":\"step\"").count(), reports, "{recipe}");
        assert_eq!(fs::read_dir(format!("{run}.board")).expect("a folder").count(), 1);
        let json = [command("eval"), vec!["--format".into(), "json".into()]].concat();
        let found: Value = serde_json::from_str(&good(&json)).expect("an object");
        assert!(found[metric].as_f64().is_some_and(f64::is_finite), "{recipe}: {found}");
        if ["chat", "experts", "lora", "preference", "pretrain"].contains(&recipe) {
            answers_and_is_exported(command, recipe != "pretrain", &format!("{run}.exported"));
        }
    }
}
