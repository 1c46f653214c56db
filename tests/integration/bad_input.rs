//! Bad input: one clear message that names the problem and its place, exit status 2, nothing
//! started.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};
use tempfile::TempDir;

fn l2l(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_l2l")).args(arguments).output().expect("it was built")
}

fn goldens() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/tied")
}

/// Trains with a config in a directory of its own, and expects a refusal that says all of this.
#[track_caller]
pub(crate) fn refused(folder: &TempDir, config: &str, says: &[&str]) {
    let path = folder.path().join("config.toml");
    fs::write(&path, config).expect("a directory of ours");
    let output = l2l(&["train", path.to_str().expect("UTF-8"), "--format", "json"]);
    let out = String::from_utf8_lossy(&output.stdout);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{out}{error}");
    assert!(out.is_empty(), "nothing was started: {out}");
    assert!(error.starts_with("error: ") && !error.contains("panicked"), "{error}");
    for text in says {
        assert!(error.contains(text), "{text:?} expected in: {error}");
    }
}

pub(crate) fn folder() -> TempDir {
    tempfile::tempdir().expect("a place for files")
}

/// A config that trains on a file with these lines.
fn with_lines(folder: &TempDir, lines: &str) -> String {
    let path = folder.path().join("data.jsonl");
    fs::write(&path, lines).expect("a directory of ours");
    format!(
        "model = {{ layers = 1, hidden = 8, heads = 2, vocabulary = 10, positions = 4 }}\n\
         data.train = \"{}\"\nstep = {{ batch = 1, steps = 1 }}\n",
        path.display()
    )
}

#[test]
fn lines_of_data() {
    let folder = folder();
    for (lines, says) in [
        ("", vec!["data.jsonl", "no sequence"]),
        (
            "{\"input_ids\": [1, 2]}\n{\"input_ids\": [1, 10]}",
            vec!["line 2", "token 10", "vocabulary of 10"],
        ),
        ("{\"input_ids\": [1, -2]}", vec!["line 1", "token -2 at 1"]),
        ("{\"input_ids\": [1, 2], \"labels\": [1, 77]}", vec!["line 1", "label 77"]),
        ("{\"input_ids\": [1, 2], \"labels\": [1]}", vec!["line 1", "1 labels for 2 input_ids"]),
        ("{\"input_ids\": [1, 2, 3, 4, 5]}", vec!["line 1", "5 tokens", "too_long"]),
        ("{\"input_ids\": []}", vec!["line 1", "empty"]),
        ("{\"input_ids\": [1, 2], \"attention_mask\": [1, 0]}", vec!["line 1", "attention_mask"]),
        ("{\"input_ids\": [1, 2]", vec!["line 1", "EOF"]),
        ("{\"ids\": [1, 2]}", vec!["line 1", "it needs one of text", "data.fields"]),
        ("{\"input_ids\": \"text\"}", vec!["line 1", "expected a sequence"]),
        ("{\"input_ids\": [1]}", vec!["data.jsonl", "step 1", "label"]),
        ("{\"input_ids\": [1, 2], \"labels\": [-100, -100]}", vec!["no position", "label"]),
    ] {
        let config = with_lines(&folder, lines);
        refused(&folder, &config, &says);
    }
}

#[test]
fn files_that_are_not_there_or_not_files() {
    let folder = folder();
    let here = folder.path().display().to_string();
    refused(&folder, "data.train = \"/none.jsonl\"", &["/none.jsonl", "No such file"]);
    refused(
        &folder,
        "data.train = \"/none.xyz\"",
        &["/none.xyz", ".tsv, .parquet, .bin file, a folder of them, \"random\""],
    );
    let binary = folder.path().join("binary.jsonl");
    fs::write(&binary, [0xff, 0xfe, 0x00]).expect("a directory of ours");
    let config = format!("data.train = \"{}\"", binary.display());
    refused(&folder, &config, &["binary.jsonl, line 1", "UTF-8"]);
    refused(&folder, &format!("model.path = \"{here}\""), &["config.json", "No such file"]);
    let output = l2l(&["train", "/none.toml"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("config /none.toml"));
    assert_eq!(l2l(&["fly"]).status.code(), Some(2));
}

#[test]
fn shapes_and_budgets() {
    let folder = folder();
    refused(&folder, "model.hidden = 10\nmodel.heads = 3", &["multiple of heads"]);
    refused(&folder, "model.layers = 0", &["model.layers is 0"]);
    refused(&folder, "model.vocabulary = 0", &["model.vocabulary is 0"]);
    refused(
        &folder,
        "data.sequence_length = 1000",
        &["data.sequence_length is 1000", "256 positions"],
    );
    refused(&folder, "model.preset = \"gpt-7\"", &["gpt-7", "gpt-small"]);
    refused(&folder, "model.experts = 4", &["model.experts is set", "no experts", "moe-small"]);
    let experts = "model.preset = \"moe-small\"\nmodel.";
    let few = format!("{experts}experts = 1");
    refused(&folder, &few, &["model.experts_per_token is 2, and a block has 1 experts"]);
    let dense = format!("{experts}intermediate = 64");
    refused(&folder, &dense, &["model.intermediate is set", "model.expert_intermediate"]);
    let grows = format!("{experts}max_layers = 7");
    refused(&folder, &grows, &["model.max_layers is 7", "layers are not added"]);
    let goldens = env!("CARGO_MANIFEST_DIR");
    let path = format!("{goldens}/tests/goldens/gemma4_text");
    let two_sizes = format!("data.train = \"random\"\nmodel.path = \"{path}\"\nmodel.");
    let grows = format!("{two_sizes}max_layers = 7");
    refused(&folder, &grows, &["model.max_layers is 7", "with heads of two sizes"]);
    let sparse =
        format!("{experts}layers = 1\nstash.relu_density = 0.5\nschedule.recompute = false");
    refused(&folder, &sparse, &["stash.relu_density is for feed-forwards of ReLU"]);
    let budget = "device.memory = \"1MiB\"";
    refused(&folder, budget, &["device.memory is", "the plan needs", "most of it for", "give it"]);
    refused(&folder, "model.layers = 1000\nmodel.hidden = 16384\nmodel.heads = 64", &["free"]);
    refused(&folder, "model.layers = 9999\nmodel.hidden = 16384\nmodel.heads = 64", &["smaller"]);
    let turns = "model.layers = 9\nstep = { batch = 1048576, micro_batch = 1 }";
    refused(&folder, turns, &["step.micro_batch larger"]);
    refused(&folder, "watchdog.seconds = 1e20", &["watchdog.seconds must be at most"]);
    refused(&folder, "optimizer.epsilon = 1e-50", &["optimizer.epsilon must be"]);
    let rises = "optimizer = { learning_rate = 1e-4, min_learning_rate = 1e-2 }";
    refused(&folder, rises, &["optimizer.min_learning_rate must be at most"]);
    refused(&folder, "[step]\nbach = 1", &["config.toml", "line 2", "did you mean step.batch?"]);
}

#[test]
fn labels_and_weights_of_data() {
    let folder = folder();
    refused(&folder, "model.labels = [\"a\", \"b\", \"a\"]", &["model.labels must be names"]);
    refused(&folder, "model.labels = [\"a\", \"\"]", &["model.labels must be names"]);
    refused(&folder, "model.random_weights = true", &["set model.path"]);
    let weight = "data.train = [{ path = \"a.txt\", weight = 0 }]";
    refused(&folder, weight, &["data.train must be of weights"]);
    refused(&folder, "data.train = []", &["data.train must be at least one file"]);
    refused(&folder, "data.train = [1]", &["data.train", "a list of names"]);
    refused(&folder, "data.train = [\"random\"]", &["cannot be combined"]);
    refused(&folder, "data.attend_across = true", &["set data.packing"]);
    refused(&folder, "data.mask_probability = 0", &["data.mask_probability must be"]);
    let here = folder.path().display();
    refused(&folder, &format!("data.train = \"{here}\""), &["in this folder"]);
    let odd = folder.path().join("odd.bin");
    fs::write(&odd, [1, 0, 2]).expect("a directory of ours");
    refused(&folder, &format!("data.train = \"{}\"", odd.display()), &["an odd number of bytes"]);
    fs::write(&odd, [1, 0, 2, 1]).expect("a directory of ours");
    refused(&folder, &format!("data.train = \"{}\"", odd.display()), &["token 258 is outside"]);
}

#[test]
fn texts() {
    let folder = folder();
    let at = folder.path().join("text.txt");
    let config = format!("data.train = \"{}\"\ndata.sequence_length = 16\n", at.display());
    refused(&folder, &config, &["text.txt", "No such file"]);
    for text in ["", "x"] {
        fs::write(&at, text).expect("a directory of ours");
        refused(&folder, &config, &["text.txt", "too short"]);
    }
    fs::write(&at, "some text that is long enough to be cut into sequences").expect("ours");
    let small = format!("{config}model.vocabulary = 255\n");
    refused(&folder, &small, &["text.txt", "model.vocabulary must be at least 256"]);
    let all = format!("{config}data.validation_split = 0.99\n");
    refused(&folder, &all, &["config.toml, line 3", "data.validation_split", "none to train on"]);
    fs::remove_file(&at).expect("it is there");
    fs::create_dir(&at).expect("a directory of ours");
    refused(&folder, &config, &["text.txt", "in this folder"]);
}

#[test]
fn what_contradicts_itself() {
    let folder = folder();
    for (config, says) in [
        ("step = { steps = 3, epochs = 1 }", "step.epochs is set together with step.steps"),
        (
            "data.train = \"random\"\nstep.epochs = 1",
            "line 2: step.epochs cannot count random data",
        ),
        ("validation.patience = 2", "validation.patience counts validations that never happen"),
        ("checkpoint.every_steps = 2", "checkpoint.every_steps has no place to write to"),
        (
            "data.train = \"random\"\n[validation]\nevery_steps = 2",
            "line 3: validation.every_steps needs a validation set",
        ),
        ("data = { validation = \"random\", validation_split = 0.1 }", "data.validation_split is"),
        ("data.validation_split = 1.5", "data.validation_split must be in [0, 1)"),
        ("step.batch = 99999999999999999999", "line 1"),
        ("step.seed = 1.5", "line 1: step.seed: invalid type: floating point `1.5`"),
        ("device.kind = \"gpu\"", "device.kind: unknown value `gpu`, expected `cpu` or `cuda`"),
        (
            "device = { kind = \"cuda\", link = \"1GB/s\" }",
            "device.link is only emulated on the CPU",
        ),
        (
            "device.kind = \"cuda\"\nstash.place = \"device\"",
            "line 2: stash.place cannot be \"device\" with device.kind = \"cuda\": leave it out",
        ),
        ("device.count = 0", "line 1: device.count must be at least 1"),
        ("device.count = 200", "line 1: device.count is 200, and the model has 9 layers"),
        ("parallel.groups = 0", "line 1: parallel.groups must be at least 1"),
        ("parallel.slices = 0", "line 1: parallel.slices must be from 1 to 64"),
        ("parallel.slices = 65", "line 1: parallel.slices must be from 1 to 64"),
        ("parallel.slices = -1", "line 1: parallel.slices"),
        ("parallel.groups = 3\nstep.batch = 8\nstep.micro_batch = 1", "set a divisor (1, 2, 4, 8)"),
        (
            "parallel.deal = \"sequences\"\ndevice.count = 2",
            "parallel.groups is 1, and device 0 of 2 gets none of them",
        ),
        ("parallel.weights = [1, 2]", "parallel.weights has 2 numbers for 1 devices"),
        (
            "parallel.weights = [1, 2]\ndevice.count = 2",
            "parallel.weights is for parallel.deal = \"sequences\"",
        ),
        ("schedule.chunks = 2", "schedule.chunks is for schedule.kind = \"gpipe\""),
        (
            "schedule = { kind = \"gpipe\", chunks = 100 }",
            "schedule.chunks is 100, which with device.count makes 100 stages",
        ),
        (
            "schedule = { kind = \"interleaved\", chunks = 2 }\ndevice.count = 2\n\
             step = { batch = 5, micro_batch = 1 }",
            "schedule.kind cannot run: an interleaved pipeline of 2 devices has 2 rounds",
        ),
        ("depth.ramp_steps = 5", "depth.ramp_steps has no effect: set depth.drop above 0"),
        ("depth.drop = 1.0", "depth.drop must be in [0, 1)"),
        ("depth.stack_at = [9]", "depth.stack_at adds layers: set model.max_layers"),
        (
            "depth.stack_at = [9, 9]\nmodel.max_layers = 40",
            "depth.stack_at must be numbers of steps, each larger than the one before",
        ),
        ("model.max_layers = 0", "model.max_layers must be at least 1"),
        ("model.max_layers = 3", "model.max_layers is 3, and the model has"),
        (
            "parallel.transfer = \"sharded\"",
            "parallel.transfer is \"sharded\", which needs parallel.deal = \"sequences\"",
        ),
        (
            "parallel = { deal = \"sequences\", transfer = \"sharded\" }\n\
             schedule.kind = \"resident\"",
            "parallel.transfer is \"sharded\", which needs schedule.kind = \"relay\"",
        ),
        ("schedule.kind = \"file\"", "schedule.path is missing"),
        ("schedule.path = \"x.csv\"", "schedule.path is for schedule.kind = \"file\""),
        (
            "schedule = { kind = \"file\", path = \"no-such.csv\" }",
            "schedule.path no-such.csv: No such file",
        ),
        (
            "schedule.kind = \"gpipe\"\nparallel = { deal = \"sequences\", groups = 2 }\n\
             step = { batch = 2, micro_batch = 1 }",
            "parallel.deal must be \"layers\" with a pipeline",
        ),
        ("device = { kind = \"cuda\", count = 2 }", "device.count is for device.kind = \"cpu\""),
        (
            "device.count = 2\nstash.place = \"device\"",
            "line 2: stash.place cannot be \"device\" with several devices",
        ),
        (
            "device.dtype = \"f8\"",
            "device.dtype: unknown value `f8`, expected one of `f32`, `bf16`",
        ),
        (
            "device.dtype = \"f16\"\nloss_scale.kind = \"none\"",
            "line 2: loss_scale.kind is none, and device.dtype is f16",
        ),
        (
            "device.dtype = \"f16\"\neps = { tier = \"file\", path = \"x\" }",
            "line 2: eps.tier is file, and steps that change nothing",
        ),
        ("loss_scale.initial = 0.0", "line 1: loss_scale.initial must be above 0"),
        ("loss_scale.growth_factor = 1.0", "line 1: loss_scale.growth_factor must be above 1"),
        ("loss_scale.backoff_factor = 1.0", "line 1: loss_scale.backoff_factor must be in (0, 1)"),
        ("loss_scale.growth_interval = 0", "line 1: loss_scale.growth_interval must be at least 1"),
        (
            "optimizer.masters = \"split\"",
            "line 1: optimizer.masters is split, which is for a device of bf16",
        ),
        (
            "device.dtype = \"f16\"\noptimizer.masters = \"bf16\"",
            "line 2: optimizer.masters is bf16, which is for a device of bf16",
        ),
        (
            "device = { kind = \"cuda\", dtype = \"bf16\" }\nmodel = { hidden = 21, heads = 3 }",
            "device.dtype is bf16, and the model's width of 21 is odd",
        ),
    ] {
        refused(&folder, config, &[says]);
    }
}

#[test]
fn flags_and_environment() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let taken = port.local_addr().expect("it is bound").to_string();
    for (arguments, says) in [
        (
            vec!["train", "--set", "step.bach=1"],
            "--set step.bach=1: unknown key step.bach: did you",
        ),
        (vec!["train", "--set", "step.batch=0"], "--set step.batch=0: step.batch must be at least"),
        (vec!["plan", "--set", "model.heads=7"], "model.hidden is 256, model.heads 7"),
        (
            vec!["train", "--resume"],
            "--resume: the config names no place to resume from: set checkpoint.directory",
        ),
        (vec!["train", "--set", "checkpoint.directory=/dev/null/x"], "cannot be written to"),
        (vec!["train", "--format", "xml"], "invalid value 'xml'"),
        (vec!["train", "--metrics", "here"], "--metrics: metrics.listen is \"here\""),
        (vec!["train", "--metrics", "0.0.0.0:0"], "which others can reach"),
        (vec!["train", "--metrics", &taken], "cannot listen there"),
        (vec!["train", "--set", "metrics.hosts=[\"a:80\"]"], "metrics.hosts must be names of this"),
        (vec!["train", "--set", "metrics.hosts=[\"*\"]"], "without a scheme, a port or a *"),
    ] {
        let output = l2l(&arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
        assert!(output.stdout.is_empty() && error.contains(says), "{says:?} expected in: {error}");
    }
    let output = Command::new(env!("CARGO_BIN_EXE_l2l"))
        .arg("plan")
        .env("L2L__STEP__MICRO_BATCH", "0")
        .output()
        .expect("the program runs");
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2));
    assert!(error.contains("environment L2L__STEP__MICRO_BATCH: step.micro_batch must"), "{error}");
}

/// Nothing is started, also when the batch is not the first one.
#[test]
fn a_batch_without_a_label() {
    let folder = folder();
    let lines = "{\"input_ids\": [1, 2]}\n{\"input_ids\": [3]}\n";
    let config = with_lines(&folder, lines).replace("steps = 1", "steps = 2");
    let config = config.replace("data.train", "data.shuffle = false\ndata.train");
    refused(&folder, &config, &["data.jsonl", "step 2", "label"]);
}

/// A run that diverges fails, and says why.
#[test]
fn a_run_that_diverges() {
    let folder = folder();
    let path = folder.path().join("config.toml");
    let config = "model = { layers = 1, hidden = 8, heads = 2 }\nstep.batch = 2\n\
                  optimizer.learning_rate = 1e30\ndata.sequence_length = 8\n";
    fs::write(&path, config).expect("a directory of ours");
    let output = l2l(&["train", path.to_str().expect("UTF-8")]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("the learning rate may be too high"), "{error}");
}

/// The smallest budget that the message names is enough to run.
#[test]
fn the_budget_that_would_do_does() {
    let folder = folder();
    let path = folder.path().join("config.toml");
    let base = "model = { layers = 1, hidden = 8, heads = 2, positions = 4 }\nstep.steps = 1\n";
    let plan = |text: String| -> Value {
        fs::write(&path, text).expect("a directory of ours");
        let output = l2l(&["plan", path.to_str().expect("UTF-8"), "--format", "json"]);
        assert_eq!(output.status.code(), Some(0), "also when it does not fit");
        serde_json::from_slice(&output.stdout).expect("one object")
    };
    let needed = plan(base.to_string())["device_bytes"]["total"].as_u64().expect("bytes");
    let with = |bytes: u64| plan(format!("{base}device.memory = {bytes}\n"))["fits"].clone();
    assert_eq!((with(needed), with(needed - 1)), (json!(true), json!(false)));
}

/// A checkpoint with one change.
fn checkpoint(folder: &TempDir, config: impl Fn(&mut Value), weights: Option<Vec<u8>>) -> String {
    let at = folder.path().join("model");
    fs::create_dir_all(&at).expect("a directory of ours");
    let text = fs::read_to_string(goldens().join("config.json")).expect("it is committed");
    let mut value: Value = serde_json::from_str(&text).expect("it is JSON");
    config(&mut value);
    fs::write(at.join("config.json"), value.to_string()).expect("a directory of ours");
    let whole = || fs::read(goldens().join("model.safetensors")).expect("it is committed");
    let weights = weights.unwrap_or_else(whole);
    fs::write(at.join("model.safetensors"), weights).expect("a directory of ours");
    format!("model.path = \"{}\"\nstep.steps = 1\ndata.train = \"random\"\n", at.display())
}

#[test]
fn checkpoints_of_other_models() {
    let folder = folder();
    let deeper = checkpoint(&folder, |c| c["n_layer"] = json!(4), None);
    refused(&folder, &deeper, &["model.safetensors", "transformer.h.3.ln_1.weight is missing"]);
    let shallower = checkpoint(&folder, |c| c["n_layer"] = json!(2), None);
    refused(&folder, &shallower, &["h.2.", "in the file and not in the model"]);
    let wider = checkpoint(&folder, |c| c["vocab_size"] = json!(38), None);
    refused(&folder, &wider, &["transformer.wte.weight: [38, 20] expected, [37, 20] found"]);
    let other = checkpoint(&folder, |c| c["model_type"] = json!("mamba"), None);
    refused(&folder, &other, &["config.json", "\"mamba\"", "known are bert", "gpt2", "qwen3"]);
    let llama = checkpoint(&folder, |c| c["model_type"] = json!("llama"), None);
    refused(&folder, &llama, &["config.json", "num_hidden_layers is missing"]);
    let none = checkpoint(&folder, |c| c["n_embd"] = json!(0), None);
    refused(&folder, &none, &["config.json", "model.hidden is 0"]);
    let drops = checkpoint(&folder, |c| c["embd_pdrop"] = json!(1.0), None);
    refused(&folder, &drops, &["config.json", "dropout must be in [0, 1)"]);
    let strange = checkpoint(&folder, |c| c["activation_function"] = json!("mish"), None);
    refused(&folder, &strange, &["activation_function is \"mish\": known are gelu"]);
    let sized = checkpoint(&folder, |_| (), None) + "model.hidden = 3\n";
    refused(&folder, &sized, &["model.path has its own sizes"]);
}

#[test]
fn weights_that_were_cut_or_are_none() {
    let folder = folder();
    let whole = fs::read(goldens().join("model.safetensors")).expect("it is committed");
    for cut in [0, 7, 8, 100, whole.len() / 2, whole.len() - 1] {
        let config = checkpoint(&folder, |_| (), Some(whole[..cut].to_vec()));
        refused(&folder, &config, &["model.safetensors"]);
    }
    let mut huge = whole.clone();
    huge[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    let config = checkpoint(&folder, |_| (), Some(huge));
    refused(&folder, &config, &["model.safetensors"]);
}
