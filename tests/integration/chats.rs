//! Chats become the texts that transformers renders, and what they learn is what the assistant
//! wrote.

use std::fs;
use std::path::{Path, PathBuf};

use l2l::config::Config;
use l2l::data::{Dataset, Sequence};
use l2l::hf::Tokenizer;
use l2l::{Error, shape_of};
use serde_json::{Value, json};
use tempfile::TempDir;

fn goldens() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens")
}

/// A template that drops the thoughts of earlier turns, and writes an empty one for the last.
const THINKS: &str = include_str!("../../fuzz/corpus/template/qwen");

/// A template that marks what the assistant wrote.
const MARKS: &str = "{%- for m in messages %}{{- '<' ~ m.role ~ '>' }}\
                     {%- if m.role == 'assistant' %}{%- generation %}\
                     {{- m.content ~ '.' }}{%- endgeneration %}{%- else %}{{- m.content }}\
                     {%- endif %}{%- endfor %}\
                     {%- if add_generation_prompt %}{{- '<assistant>' }}{%- endif %}";

const PLAIN: &str = "{%- for m in messages %}{{- '<' ~ m.role ~ '>' ~ (m.content or '') }}\
                     {%- for call in m.tool_calls or [] %}{{- call | tojson }}{%- endfor %}\
                     {{- '\\n' }}{%- endfor %}\
                     {%- if add_generation_prompt %}{{- '<assistant>' }}{%- endif %}";

/// A model's directory with these chat templates, by name.
fn model(templates: &[(&str, &str)]) -> TempDir {
    let folder = tempfile::tempdir().expect("a place for files");
    let from = goldens().join("text/bpe");
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(from.join(file), folder.path().join(file)).expect("it is committed");
    }
    let config = fs::read_to_string(from.join("config.json")).expect("it is committed");
    let mut config: Value = serde_json::from_str(&config).expect("JSON");
    config["n_positions"] = 4096.into();
    fs::write(folder.path().join("config.json"), config.to_string()).expect("a directory of ours");
    for (name, text) in templates {
        let file = match *name {
            "default" => "chat_template.jinja".into(),
            name => format!("additional_chat_templates/{name}.jinja"),
        };
        let file = folder.path().join(file);
        fs::create_dir_all(file.parent().expect("a folder")).expect("a directory of ours");
        fs::write(file, text).expect("a directory of ours");
    }
    folder
}

fn config(model: &TempDir) -> Config {
    let mut config = Config::default();
    config.model.path = Some(model.path().into());
    config.data.sequence_length = Some(4096);
    config.data.shuffle = false;
    config.data.date = Some("2025-03-09".into());
    config
}

/// The data of a file with this text.
fn data(config: &mut Config, name: &str, text: &str) -> Result<Dataset, Error> {
    let folder = tempfile::tempdir().expect("a place for files");
    let file = folder.path().join(name);
    fs::write(&file, text).expect("a directory of ours");
    config.data.train = file.display().to_string().into();
    Ok(Dataset::open(config, &shape_of(config)?)?.0)
}

/// Why a line of data is refused.
fn refused(config: &mut Config, line: &str) -> String {
    match data(config, "one.jsonl", line) {
        Ok(_) => panic!("it is read: {line}"),
        Err(error) => error.to_string(),
    }
}

/// A sequence as text.
fn text(data: &Dataset, one: &Sequence) -> String {
    data.vocabulary().decode(&one.tokens, true)
}

/// The parts of a sequence that are learnt, as texts.
fn learnt(data: &Dataset, one: &Sequence) -> Vec<String> {
    let mut parts: Vec<Vec<u32>> = Vec::new();
    let mut was_learnt = false;
    for (&token, &label) in one.tokens.iter().zip(&one.labels) {
        if label >= 0 && !was_learnt {
            parts.push(Vec::new());
        }
        was_learnt = label >= 0;
        parts
            .iter_mut()
            .last()
            .into_iter()
            .filter(|_| label >= 0)
            .for_each(|part| part.push(token));
    }
    parts.iter().map(|part| data.vocabulary().decode(part, true)).collect()
}

/// What is learnt of one line of data.
fn learnt_of(template: &str, line: &Value) -> Result<Vec<String>, String> {
    let model = model(&[("default", template)]);
    let data = data(&mut config(&model), "one.jsonl", &line.to_string());
    let data = data.map_err(|error| error.to_string())?;
    Ok(learnt(&data, &data.sequence(0).expect("it was read")))
}

fn turns(roles: &[(&str, &str)]) -> Value {
    roles.iter().map(|(role, content)| json!({ "role": role, "content": content })).collect()
}

#[test]
fn chats_are_as_transformers_renders_them() {
    let cases = fs::read_to_string(goldens().join("chats/cases.json")).expect("it is committed");
    let cases: Value = serde_json::from_str(&cases).expect("JSON");
    let mut seen = 0;
    for case in cases.as_array().expect("a list") {
        let templates = case["templates"].as_object().expect("by name");
        let templates: Vec<(&str, &str)> =
            templates.iter().map(|(name, text)| (&**name, text.as_str().expect("text"))).collect();
        let model = model(&templates);
        let line = case["line"].as_str().expect("a line");
        let data = data(&mut config(&model), "one.jsonl", line)
            .unwrap_or_else(|error| panic!("{}: {error}", case["name"]));
        let found = text(&data, &data.sequence(0).expect("it was read"));
        assert_eq!(found, case["text"].as_str().expect("text"), "{}", case["name"]);
        seen += 1;
    }
    assert!(seen >= 26, "{seen} cases");
}

/// Named templates may stand in `tokenizer_config.json`, too. Without a default one, a chat without
/// tools has no template.
#[test]
fn a_template_for_tools_is_taken_for_tools() {
    let line = |tools: &str| {
        format!("{{\"messages\": {}{tools}}}", turns(&[("user", "a"), ("assistant", "b")]))
    };
    let tools = ", \"tools\": [{\"b\": 1, \"a\": 2}]";
    let tool_use = "{{- tools | tojson }}".to_string() + PLAIN;
    let named = |names: &[(&str, &str)]| -> Value {
        names.iter().map(|(name, text)| json!({ "name": name, "template": text })).collect()
    };
    let both = model(&[]);
    let only = model(&[]);
    for (model, all) in [
        (&both, named(&[("default", PLAIN), ("tool_use", &tool_use), ("rag", "{% broken")])),
        (&only, named(&[("tool_use", &tool_use)])),
    ] {
        let path = model.path().join("tokenizer_config.json");
        let keys = fs::read_to_string(&path).expect("it was copied");
        let mut keys: Value = serde_json::from_str(&keys).expect("JSON");
        keys["chat_template"] = all;
        fs::write(path, keys.to_string()).expect("a directory of ours");
    }
    for (model, more, right) in [
        (&both, "", "<user>a\n<assistant>b\n"),
        (&both, tools, "[{\"b\": 1, \"a\": 2}]<user>a\n<assistant>b\n"),
        (&only, tools, "[{\"b\": 1, \"a\": 2}]<user>a\n<assistant>b\n"),
    ] {
        let data = data(&mut config(model), "one.jsonl", &line(more)).expect("good");
        assert_eq!(text(&data, &data.sequence(0).expect("it was read")), right);
    }
    let error = refused(&mut config(&only), &line(""));
    assert!(error.contains("none is called \"default\""), "{error}");
}

/// Tables keep tools, calls and chats as JSON texts.
#[test]
fn json_texts_are_read_as_what_they_hold() {
    let template = "{%- for t in tools or [] %}{{- t | tojson }}{%- endfor %}".to_string() + PLAIN;
    let model = model(&[("default", &template)]);
    let tools = r#"[{"z": 1, "a": {"y": 2, "x": 3}}]"#;
    let calls = r#"[{"name": "go", "at": 1}]"#;
    let messages = json!([
        { "role": "user", "content": "a" },
        { "role": "assistant", "content": null, "tool_calls": calls },
    ]);
    let right = format!(
        "{{\"z\": 1, \"a\": {{\"y\": 2, \"x\": 3}}}}<user>a\n<assistant>{}\n",
        &calls[1..calls.len() - 1]
    );
    let quoted = |text: &str| format!("\"{}\"", text.replace('"', "\"\""));
    let table = format!("messages,tools\n{},{}\n", quoted(&messages.to_string()), quoted(tools));
    let line = json!({ "messages": messages, "tools": tools }).to_string();
    for (name, content) in [("one.jsonl", line), ("one.csv", table)] {
        let data = data(&mut config(&model), name, &content).expect(name);
        assert_eq!(text(&data, &data.sequence(0).expect("it was read")), right, "{name}");
    }
    for (tools, says) in [
        (json!("[{"), "tools: it is a text, which must be a list in JSON"),
        (json!("{\"a\": 1}"), "tools: it must be a list of objects"),
        (json!({ "a": 1 }), "tools: it must be a list of objects"),
        (json!(["go"]), "tools: it must be a list of objects"),
    ] {
        let line = json!({ "messages": messages, "tools": tools }).to_string();
        let error = refused(&mut config(&model), &line);
        assert!(error.contains(says) && error.contains("line 1"), "{error}");
    }
    let line = json!({ "messages": [{ "role": "assistant", "content": "", "tool_calls": "go" }] });
    let error = refused(&mut config(&model), &line.to_string());
    assert!(error.contains("tool_calls: it is a text"), "{error}");
}

/// Of a template that drops thoughts, the last answer is learnt, and a note counts the others.
#[test]
fn the_turns_that_a_template_keeps_are_learnt() {
    let history = [("user", "one"), ("assistant", "two"), ("user", "three")];
    let chat = turns(&[&history[..], &[("assistant", "four")]].concat());
    let thoughtful = "<think>\nhm\n</think>\n\nfour";
    let own = "<think>\n\n</think>\n\nfour";
    for (line, right) in [
        (json!({ "messages": chat }), vec!["four<|im_end|>\n"]),
        (
            json!({ "prompt": turns(&history), "completion": turns(&[("assistant", "four")]) }),
            vec!["four<|im_end|>\n"],
        ),
        (
            json!({ "prompt": turns(&history), "completion": turns(&[("assistant", thoughtful)]) }),
            vec!["<think>\nhm\n</think>\n\nfour<|im_end|>\n"],
        ),
        // The data has this empty thought, so the model learns it.
        (
            json!({ "prompt": turns(&history), "completion": turns(&[("assistant", own)]) }),
            vec!["<think>\n\n</think>\n\nfour<|im_end|>\n"],
        ),
        // All thoughts behind the last question stay.
        (
            json!({ "messages": turns(&[
                ("user", "one"), ("assistant", "<think>\nx\n</think>\n\ntwo"), ("tool", "three"),
                ("assistant", "<think>\ny\n</think>\n\nfour"),
            ]) }),
            vec![
                "<think>\nx\n</think>\n\ntwo<|im_end|>\n",
                "<think>\ny\n</think>\n\nfour<|im_end|>\n",
            ],
        ),
    ] {
        assert_eq!(learnt_of(THINKS, &line).expect("good"), right, "{line}");
    }
    let model = model(&[("default", THINKS)]);
    let lines = format!(
        "{}\n{}\n",
        json!({ "messages": chat }),
        json!({ "messages": turns(&history[..2]) })
    );
    let data = data(&mut config(&model), "two.jsonl", &lines).expect("good");
    let tokens = data.vocabulary().encode("two", None, false).expect("good").tokens.len();
    let note = data.notes().join("\n");
    let says = format!("{tokens} tokens of 1 answers in 1 chats are not learnt");
    assert!(note.contains(&says), "{note}");
}

/// A prompt that opens a thought, as DeepSeek R1's: an answer without thoughts begins where the
/// thought would.
#[test]
fn prompts_may_open_a_thought() {
    let template = "{%- for m in messages %}{{- '<' ~ m.role ~ '>' }}\
                    {{- m.content.split('</think>')[-1] }}{%- if m.role == 'assistant' %}\
                    {{- '<end>' }}{%- endif %}{%- endfor %}\
                    {%- if add_generation_prompt %}{{- '<assistant><think>\\n' }}{%- endif %}";
    let chat = |answer: &str| {
        let first = [("user", "a"), ("assistant", "<b>"), ("user", "c")];
        json!({ "messages": turns(&[&first[..], &[("assistant", answer)]].concat()) })
    };
    assert_eq!(learnt_of(template, &chat("d")).expect("good"), ["<b><end>", "d<end>"]);
    let thought = "<think>\nso\n</think>d";
    assert_eq!(learnt_of(template, &chat(thought)).expect("good"), ["<b><end>", "d<end>"]);
}

/// A broken template is no reason to train on another format.
#[test]
fn instructions_need_a_template_that_can_be_read() {
    let line = json!({ "instruction": "a", "output": "b" }).to_string();
    let broken = model(&[("default", "{% if %}")]);
    let error = refused(&mut config(&broken), &line);
    assert!(error.contains("chat_template.jinja: chat template"), "{error}");
    let none = model(&[]);
    let data = data(&mut config(&none), "one.jsonl", &line).expect("in Alpaca's prompt");
    assert!(text(&data, &data.sequence(0).expect("it was read")).contains("### Instruction:\na"));
}

#[test]
fn a_message_may_say_that_it_is_context() {
    let chat = |first: Value, last: Value| {
        let mut messages =
            turns(&[("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]);
        for (at, more) in [(1, first), (3, last)] {
            let message = messages[at].as_object_mut().expect("a message");
            message.extend(more.as_object().cloned().unwrap_or_default());
        }
        json!({ "messages": messages })
    };
    for (first, last, plain) in [
        (json!({ "weight": 0 }), json!({ "weight": 1 }), vec!["d\n"]),
        (json!({ "train": false }), json!({}), vec!["d\n"]),
        (json!({ "loss": false }), json!({ "loss": true }), vec!["d\n"]),
        (json!({}), json!({ "weight": 0.0 }), vec!["b\n"]),
        (json!({ "weight": null }), json!({ "train": true }), vec!["b\n", "d\n"]),
    ] {
        let line = chat(first, last);
        assert_eq!(learnt_of(PLAIN, &line).expect("good"), plain, "{line}");
        let marked: Vec<String> = plain.iter().map(|part| part.replace('\n', ".")).collect();
        assert_eq!(learnt_of(MARKS, &line).expect("good"), marked, "{line}");
    }
    // The part behind the context is learnt, and the last answer ends the text.
    let line = json!({ "messages": [
        { "role": "user", "content": "a" }, { "role": "assistant", "content": "b" },
        { "role": "user", "content": "c" }, { "role": "assistant", "content": "d", "weight": 0 },
        { "role": "user", "content": "e" }, { "role": "assistant", "content": "f" },
    ] });
    assert_eq!(learnt_of(PLAIN, &line).expect("good"), ["b\n", "f\n"]);
    assert_eq!(learnt_of(MARKS, &line).expect("good"), ["b.", "f."]);
    let zero = json!({ "weight": 0 });
    for (first, last, says) in [
        (zero.clone(), zero.clone(), "no answer to learn: weight or train of all its answers"),
        (zero, json!({ "weight": 0.5 }), "weight of a message of \"assistant\" is 0.5"),
        (json!({ "train": "yes" }), json!({}), "train of a message of \"assistant\" is \"yes\""),
        (json!({ "train_detail": [] }), json!({}), "train_detail: parts of a message"),
    ] {
        let error = learnt_of(PLAIN, &chat(first, last)).expect_err(says);
        assert!(error.contains(says), "{error}");
    }
    let line = json!({ "messages": [{ "role": "user", "content": "a", "train": true },
        { "role": "assistant", "content": "b" }] });
    let error = learnt_of(PLAIN, &line).expect_err("a user's");
    assert!(error.contains("only the assistant's messages can be learnt"), "{error}");
}

/// Without `data.date`, a note names the date that the template writes. The data's fingerprint has
/// it, so that a run does not resume with other data.
#[test]
fn the_date_is_said_and_can_be_fixed() {
    let dated = "{{- strftime_now('%Y') }}".to_string() + PLAIN;
    let line = json!({ "messages": turns(&[("user", "a"), ("assistant", "b")]) }).to_string();
    let with_date = model(&[("default", &dated)]);
    let mut config_of_day = config(&with_date);
    let fixed = data(&mut config_of_day, "one.jsonl", &line).expect("good");
    assert!(fixed.notes().is_empty(), "{:?}", fixed.notes());
    assert!(fixed.fingerprint().ends_with(", on 2025-03-09"), "{}", fixed.fingerprint());
    assert!(text(&fixed, &fixed.sequence(0).expect("it was read")).starts_with("2025<user>"));
    config_of_day.data.date = None;
    let today = data(&mut config_of_day, "one.jsonl", &line).expect("good");
    assert!(today.notes().join("\n").contains("set data.date"), "{:?}", today.notes());
    assert_ne!(today.fingerprint(), fixed.fingerprint());
    let without = model(&[("default", PLAIN)]);
    let plain = data(&mut config(&without), "one.jsonl", &line).expect("good");
    assert!(plain.notes().is_empty() && !plain.fingerprint().contains(", on "));
    for bad in ["2025-02-29", "2025-2-2", "today", "2025-13-01"] {
        let error = Config::parse(&format!("data.date = {bad:?}")).expect_err(bad).to_string();
        assert!(error.contains("data.date"), "{error}");
    }
    Config::parse("data.date = \"2024-02-29\"").expect("a leap year");
    let asks = format!("{{{{- strftime_now('%Q') }}}}{PLAIN}");
    let error = learnt_of(&asks, &serde_json::from_str(&line).expect("JSON")).expect_err("%Q");
    assert!(error.contains("strftime_now does not know a part of \"%Q\""), "{error}");
}

/// A tokenizer's directory with another `tokenizer_config.json`.
fn tokenizer_with(directory: &str, keys: &Value) -> Result<Tokenizer, Error> {
    let folder = tempfile::tempdir().expect("a place for files");
    let from = goldens().join("text").join(directory).join("tokenizer.json");
    fs::copy(from, folder.path().join("tokenizer.json")).expect("it is committed");
    fs::write(folder.path().join("tokenizer_config.json"), keys.to_string()).expect("ours");
    Ok(Tokenizer::open(folder.path())?.expect("it has a tokenizer.json"))
}

#[test]
fn settings_of_tokenizers_are_those_of_transformers() {
    let cases = fs::read_to_string(goldens().join("tokenizer_settings.json")).expect("committed");
    let cases: Value = serde_json::from_str(&cases).expect("JSON");
    let mut seen = 0;
    for case in cases.as_array().expect("a list") {
        let directory = case["directory"].as_str().expect("a name");
        let tokenizer = tokenizer_with(directory, &case["config"])
            .unwrap_or_else(|error| panic!("{}: {error}", case["config"]));
        let found = tokenizer.encode(case["text"].as_str().expect("a text"), None, true);
        let found = json!(found.expect("good").tokens);
        assert_eq!(found, case["input_ids"], "{}", case["config"]);
        seen += 1;
    }
    assert!(seen >= 23, "{seen} cases");
    let keys = json!({ "tokenizer_class": "LlamaTokenizer", "add_prefix_space": false });
    let llama = tokenizer_with("llama", &keys).expect("good");
    let tokens = llama.encode(" one", None, false).expect("good").tokens;
    assert_eq!(llama.decode(&tokens, true), " one");
}

#[test]
fn settings_that_cannot_be_applied_are_refused() {
    let token = json!({ "content": "<new>", "special": true });
    for (directory, keys, says) in [
        (
            "llama",
            json!({ "tokenizer_class": "BertTokenizer", "do_lower_case": true }),
            "do_lower_case is true, and the normalizer of tokenizer.json does otherwise",
        ),
        (
            "bpe",
            json!({ "added_tokens_decoder": { "400": token } }),
            "has the token \"<new>\" with the id 400",
        ),
        (
            "bpe",
            json!({ "added_tokens_decoder": { "x": token } }),
            "added_tokens_decoder.x is no token",
        ),
    ] {
        let Err(error) = tokenizer_with(directory, &keys) else { panic!("{says}") };
        let error = error.to_string();
        assert!(error.contains(says) && error.contains("tokenizer_config.json"), "{error}");
    }
}
