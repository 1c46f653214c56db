//! The program of README.md runs with the config of README.md.

use std::fs;
use std::path::Path;
use std::process::Command;

/// Set where README's program runs.
const RUNS: &str = "L2L_README_RUNS";

/// README's program. `readme_program.txt` is its text, to the letter.
mod program {
    include!("readme_program.txt");

    /// It is run by the test below, in a folder of its own.
    #[test]
    fn runs() {
        if std::env::var_os(super::RUNS).is_some() {
            main().expect("nothing fails here");
        }
    }
}

fn block<'t>(text: &'t str, kind: &str) -> &'t str {
    let (_, block) = text.split_once(&format!("```{kind}\n")).expect("README has one");
    block.split_once("```").expect("it ends").0
}

#[test]
fn the_readmes_program_runs_with_the_readmes_config() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let readme = fs::read_to_string(root.join("README.md")).expect("it is committed");
    assert_eq!(block(&readme, "rust,no_run"), include_str!("readme_program.txt"));
    let folder = tempfile::tempdir().expect("a place for files");
    let at = |name: &str| folder.path().join(name);
    let config = block(&readme, "toml");
    assert!(config.contains("path = \"gpt2\"") && config.contains("epochs = 3"), "{config}");
    fs::write(at("run.toml"), config).expect("ours");
    for name in ["gpt2", "novels"] {
        fs::create_dir(at(name)).expect("ours");
    }
    for entry in fs::read_dir(root.join("tests/goldens/text/llama")).expect("it is committed") {
        let entry = entry.expect("it is committed");
        fs::copy(entry.path(), at("gpt2").join(entry.file_name())).expect("ours");
    }
    // Long sequences of so small a model take time and show nothing.
    let model = fs::read_to_string(at("gpt2/config.json")).expect("ours");
    let short =
        model.replace("\"max_position_embeddings\": 128", "\"max_position_embeddings\": 32");
    assert_ne!(model, short);
    fs::write(at("gpt2/config.json"), short).expect("ours");
    fs::write(at("novels").join("one.txt"), &readme).expect("ours");
    let tests = std::env::current_exe().expect("this program");
    let mut run = Command::new(tests);
    run.args(["readme::program::runs", "--exact", "--nocapture"]).env(RUNS, "1");
    let output = run.current_dir(folder.path()).output().expect("it runs");
    let shown = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{shown}{}", String::from_utf8_lossy(&output.stderr));
    assert!(shown.contains("step 100: loss ") && shown.contains("1 passed"), "{shown}");
    assert!(at("checkpoints").is_dir());
}
