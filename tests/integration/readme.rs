//! The programs of README.md and docs/start.md run with the configs of these pages.

use std::fs;
use std::path::Path;
use std::process::Command;

/// Set where a page's program runs.
const RUNS: &str = "L2L_README_RUNS";

/// README's program. `readme_program.txt` is its text, to the letter.
mod program {
    include!("readme_program.txt");

    /// It is run by a test below, in a folder of its own.
    #[test]
    fn runs() {
        if std::env::var_os(super::RUNS).is_some() {
            main().expect("nothing fails here");
        }
    }
}

/// The program of docs/start.md. `start_program.txt` is its text, to the letter.
mod start {
    include!("start_program.txt");

    /// It is run by a test below, in a folder of its own.
    #[test]
    fn runs() {
        if std::env::var_os(super::RUNS).is_some() {
            main().expect("nothing fails here");
        }
    }
}

fn page(name: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    fs::read_to_string(root.join(name)).expect("it is committed")
}

/// What stands between a line and the next `end` of a page.
fn between<'t>(text: &'t str, line: &str, end: &str) -> &'t str {
    let (_, rest) = text.split_once(&format!("{line}\n")).expect("the page has it");
    rest.split_once(end).expect("it ends").0
}

/// Copies a small Llama with a tokenizer and a chat template, for sequences of other lengths.
fn lay_model(to: &Path, positions: usize) {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/text/llama");
    fs::create_dir(to).expect("ours");
    for entry in fs::read_dir(from).expect("it is committed") {
        let entry = entry.expect("it is committed");
        fs::copy(entry.path(), to.join(entry.file_name())).expect("ours");
    }
    let config = fs::read_to_string(to.join("config.json")).expect("ours");
    let key = "\"max_position_embeddings\": ";
    let other = config.replace(&format!("{key}128"), &format!("{key}{positions}"));
    assert_ne!(config, other);
    fs::write(to.join("config.json"), other).expect("ours");
}

/// Runs a page's program in a folder, and returns what it prints.
fn run(program: &str, folder: &Path) -> String {
    let tests = std::env::current_exe().expect("this program");
    let mut run = Command::new(tests);
    run.args([program, "--exact", "--nocapture"]).env(RUNS, "1");
    let output = run.current_dir(folder).output().expect("it runs");
    let shown = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{shown}{}", String::from_utf8_lossy(&output.stderr));
    assert!(shown.contains("1 passed"), "{shown}");
    shown
}

#[test]
fn the_readmes_program_runs_with_the_readmes_config() {
    let readme = page("README.md");
    assert_eq!(between(&readme, "```rust,no_run", "```"), include_str!("readme_program.txt"));
    let folder = tempfile::tempdir().expect("a place for files");
    let at = |name: &str| folder.path().join(name);
    let config = between(&readme, "```toml", "```");
    assert!(config.contains("path = \"gpt2\"") && config.contains("epochs = 3"), "{config}");
    fs::write(at("run.toml"), config).expect("ours");
    // Long sequences of so small a model take time and show nothing.
    lay_model(&at("gpt2"), 32);
    fs::create_dir(at("novels")).expect("ours");
    fs::write(at("novels").join("one.txt"), &readme).expect("ours");
    let shown = run("readme::program::runs", folder.path());
    assert!(shown.contains("step 100: loss "), "{shown}");
    assert!(at("checkpoints").is_dir());
}

#[test]
fn the_start_pages_program_trains_on_its_chats_and_exports() {
    let start = page("docs/start.md");
    assert_eq!(between(&start, "```rust,no_run", "```"), include_str!("start_program.txt"));
    let folder = tempfile::tempdir().expect("a place for files");
    let at = |name: &str| folder.path().join(name);
    fs::write(at("chats.jsonl"), between(&start, "cat > chats.jsonl <<'END'", "END"))
        .expect("ours");
    fs::write(at("run.toml"), between(&start, "cat > run.toml <<'END'", "END")).expect("ours");
    // The page's sequences have up to 1,024 tokens.
    lay_model(&at("model"), 1024);
    let shown = run("readme::start::runs", folder.path());
    assert!(shown.contains("10 steps, weights "), "{shown}");
    for file in ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"] {
        assert!(at("cat").join(file).is_file(), "{file}");
    }
}
