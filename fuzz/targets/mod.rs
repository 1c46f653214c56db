//! What is fuzzed: files and requests of strangers, through the library's public functions.
//!
//! Each target takes a folder, which it fills when it finds it empty, and the bytes of one file or
//! request in it. It ends with what the library says of them, and must not panic, hang or take
//! memory without bound. The programs for libFuzzer and `tests/integration/fuzz.rs` share it.

use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::Duration;

use l2l::data::Dataset;
use l2l::hf::{Message, RecordValue, Tokenizer};
use l2l::telemetry::Server;
use l2l::{Config, Error, Trainer, shape_of};
use serde_json::json;

pub(crate) mod mutate;

/// What a target says: nothing, or the library's error.
pub(crate) type Outcome = Result<(), String>;
/// A target.
pub(crate) type Target = fn(&Path, &[u8]) -> Outcome;

/// All targets. Each has a folder of this name in `fuzz/corpus`.
pub(crate) const TARGETS: [(&str, Target); 11] = [
    ("bin", bin),
    ("checkpoint", checkpoint),
    ("config_json", config_json),
    ("experts", experts),
    ("http", http),
    ("index", index),
    ("jsonl", jsonl),
    ("template", template),
    ("tokenizer", tokenizer),
    ("toml", toml),
    ("weights", weights),
];

/// A target by its name.
pub(crate) fn named(name: &str) -> Target {
    let found = TARGETS.iter().find(|(known, _)| *known == name);
    found.expect("it has a target").1
}

/// A model of GPT-2's family with 308 parameters.
const MODEL: &[u8] = include_bytes!("../corpus/config_json/gpt2");
/// A Mixtral with 2 experts in one block.
const EXPERTS: &[u8] = include_bytes!("../corpus/config_json/mixtral");
const WEIGHTS: &[u8] = include_bytes!("../corpus/weights/gpt2");
const TOKENIZER: &[u8] = include_bytes!("../../tests/goldens/text/bpe/tokenizer.json");
const TEMPLATE: &[u8] = include_bytes!("../../tests/goldens/text/bpe/chat_template.jinja");
const TEXT_MODEL: &[u8] = include_bytes!("../../tests/goldens/text/bpe/config.json");

fn told(error: Error) -> String {
    error.to_string()
}

/// Writes files that the fuzzed one stands beside, once.
fn prepare(folder: &Path, files: &[(&str, &[u8])]) {
    for (name, bytes) in files {
        if !folder.join(name).exists() {
            fs::write(folder.join(name), bytes).expect("a folder of ours");
        }
    }
}

fn put(folder: &Path, name: &str, bytes: &[u8]) {
    fs::write(folder.join(name), bytes).expect("a folder of ours");
}

fn run_of(folder: &Path) -> Config {
    let mut config = Config::default();
    config.model.path = Some(folder.into());
    config.data.train = "random".into();
    config.data.sequence_length = Some(4);
    config.step.batch = 1;
    config.step.steps = Some(1);
    config.device.threads = Some(1);
    config
}

/// Waits for the library. Its threads are few: they are made anew for each input.
fn wait<T>(work: impl Future<Output = T>) -> T {
    static RUNTIME: LazyLock<tokio::runtime::Runtime> = LazyLock::new(|| {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder.worker_threads(1).build().expect("a thread")
    });
    RUNTIME.block_on(work)
}

fn start(config: Config, from: Option<&Path>) -> Outcome {
    wait(async {
        let builder = Trainer::builder(config);
        let builder = match from {
            Some(from) => builder.resume(from),
            None => builder,
        };
        let trainer = builder.start().await.map_err(told)?;
        trainer.stop().await.map(drop).map_err(told)
    })
}

fn config_json(folder: &Path, bytes: &[u8]) -> Outcome {
    put(folder, "config.json", bytes);
    shape_of(&run_of(folder)).map(drop).map_err(told)
}

fn weights(folder: &Path, bytes: &[u8]) -> Outcome {
    prepare(folder, &[("config.json", MODEL)]);
    put(folder, "model.safetensors", bytes);
    start(run_of(folder), None)
}

/// Weights with experts, in one of their two layouts.
fn experts(folder: &Path, bytes: &[u8]) -> Outcome {
    prepare(folder, &[("config.json", EXPERTS)]);
    put(folder, "model.safetensors", bytes);
    start(run_of(folder), None)
}

fn index(folder: &Path, bytes: &[u8]) -> Outcome {
    prepare(folder, &[("config.json", MODEL), ("model-00001-of-00001.safetensors", WEIGHTS)]);
    put(folder, "model.safetensors.index.json", bytes);
    start(run_of(folder), None)
}

/// A checkpoint of a run on the folder's model, made if it is not there.
fn checkpoint_of(folder: &Path) -> PathBuf {
    prepare(folder, &[("config.json", MODEL), ("model.safetensors", WEIGHTS)]);
    let place = folder.join("checkpoint");
    if !place.exists() {
        wait(async {
            let mut trainer = Trainer::start(run_of(folder)).await.expect("a model of ours");
            trainer.checkpoint(&place).await.expect("a folder of ours");
        });
    }
    place
}

fn checkpoint(folder: &Path, bytes: &[u8]) -> Outcome {
    let place = checkpoint_of(folder);
    put(&place, "l2l.json", bytes);
    start(run_of(folder), Some(&place))
}

/// The record of a checkpoint, as this version writes it.
pub(crate) fn record(folder: &Path) -> Vec<u8> {
    _ = fs::remove_dir_all(folder.join("checkpoint"));
    fs::read(checkpoint_of(folder).join("l2l.json")).expect("a checkpoint of ours")
}

fn tokenizer(folder: &Path, bytes: &[u8]) -> Outcome {
    put(folder, "tokenizer.json", bytes);
    let Some(tokenizer) = Tokenizer::open(folder).map_err(told)? else { return Ok(()) };
    let text = "a b\u{e9}\u{2581}12 <|im_start|>\u{1f600}\n  ab";
    let tokens = tokenizer.encode(text, None, true)?.tokens;
    tokenizer.decode(&tokens, true);
    tokenizer.decode(&tokens, false);
    tokenizer.encode(text, Some("the other"), true)?;
    tokenizer.encode_cut(text, Some("the other"), 6)?;
    tokenizer.encode_words(&["one".into(), " two".into()]).map(drop)
}

/// A chat with a tool, as data has it.
fn chat() -> (Vec<Message>, RecordValue) {
    let call = json!({ "type": "function", "id": "a", "function": {
        "name": "weather", "arguments": { "city": "Bern", "days": [1, 2.5, null, true] } } });
    let mut calls = Message { role: "assistant".into(), ..Message::default() };
    calls.more.push(("tool_calls".into(), json!([call]).into()));
    let messages = vec![
        Message::new("system", "Be brief."),
        Message::new("user", "How is the \u{2600} in\nBern?"),
        calls,
        Message::new("tool", "fine"),
        Message::new("assistant", "<think>\nso\n</think>\n\nIt is fine."),
    ];
    let tools = json!([{ "type": "function", "function": { "name": "weather", "description": "d",
        "parameters": { "type": "object", "properties": { "city": { "type": "string" } },
            "required": ["city"] } } }]);
    (messages, tools.into())
}

fn template(folder: &Path, bytes: &[u8]) -> Outcome {
    prepare(folder, &[("tokenizer.json", TOKENIZER)]);
    put(folder, "chat_template.jinja", bytes);
    let Some(tokenizer) = Tokenizer::open(folder).map_err(told)? else { return Ok(()) };
    let Some(template) = tokenizer.template()? else { return Ok(()) };
    let (messages, tools) = chat();
    template.ask(&messages[..2], &RecordValue::Null)?;
    template.ask(&[], &RecordValue::Null)?;
    template.render_chat(&messages, &tools).map(drop)
}

/// Reads data as a run does.
fn read(config: &Config) -> Outcome {
    let (data, _) = Dataset::open(config, &shape_of(config).map_err(told)?).map_err(told)?;
    (0..data.len().unwrap_or(0).min(64))
        .try_for_each(|at| data.sequence(at).map(drop))
        .map_err(told)
}

fn jsonl(folder: &Path, bytes: &[u8]) -> Outcome {
    prepare(
        folder,
        &[
            ("config.json", TEXT_MODEL),
            ("tokenizer.json", TOKENIZER),
            ("chat_template.jinja", TEMPLATE),
        ],
    );
    put(folder, "data.jsonl", bytes);
    let mut config = run_of(folder);
    config.data.train = folder.join("data.jsonl").display().to_string().into();
    config.data.sequence_length = Some(16);
    config.data.validation_split = Some(0.0);
    read(&config)
}

fn bin(folder: &Path, bytes: &[u8]) -> Outcome {
    prepare(folder, &[("config.json", MODEL)]);
    put(folder, "data.bin", bytes);
    let mut config = run_of(folder);
    config.data.train = folder.join("data.bin").display().to_string().into();
    config.data.validation_split = Some(0.0);
    read(&config)
}

fn toml(_: &Path, bytes: &[u8]) -> Outcome {
    let text = std::str::from_utf8(bytes).map_err(|error| error.to_string())?;
    let config = Config::parse(text).map_err(told)?;
    match config.model.path {
        // A directory of a fuzzer's choice is none of ours.
        Some(_) => Ok(()),
        None => shape_of(&config).map(drop).map_err(told),
    }
}

fn http(_: &Path, bytes: &[u8]) -> Outcome {
    static SERVER: LazyLock<Server> = LazyLock::new(|| {
        let here = "127.0.0.1:0".parse().expect("an address");
        Server::start(Some(here), &[], "fuzz").expect("a port")
    });
    let address = SERVER.address().expect("it listens");
    let ask = |request: &[u8]| -> std::io::Result<Vec<u8>> {
        let mut stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        // The server may answer, and close, before it has read everything.
        _ = stream.write_all(request).and_then(|()| stream.shutdown(Shutdown::Write));
        let mut answer = Vec::new();
        match stream.read_to_end(&mut answer) {
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Err(error),
            _ => Ok(answer),
        }
    };
    ask(bytes).expect("it does not keep a connection that ended");
    let health = format!("GET /healthz HTTP/1.1\r\nHost: {address}\r\n\r\n");
    let answer = ask(health.as_bytes()).expect("it listens on");
    assert!(answer.starts_with(b"HTTP/1.1 "), "{}", String::from_utf8_lossy(&answer));
    Ok(())
}
