//! The fuzz targets on their corpora and on mutations of them, the same each time: each input ends
//! with nothing or with an error that says something. `fuzz/` runs the same with libFuzzer.

use std::fs;
use std::path::Path;

use targets::TARGETS;
use targets::mutate::Mutator;

#[path = "../../fuzz/targets/mod.rs"]
mod targets;

/// Runs the corpus of a target, and a number of its mutants.
fn fuzz(name: &str, mutants: usize) {
    let mutants = if crate::whole() { 20 * mutants } else { mutants };
    let folder = tempfile::tempdir().expect("a place for files");
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(name);
    let mut files: Vec<_> =
        fs::read_dir(corpus).expect("a corpus").map(|file| file.expect("ours").path()).collect();
    files.sort();
    let read = |file: &std::path::PathBuf| fs::read(file).expect("a file of ours");
    let mut seeds: Vec<Vec<u8>> = files.iter().map(read).collect();
    if name == "checkpoint" {
        seeds.push(targets::record(folder.path()));
    }
    let run = |bytes: &[u8]| {
        let outcome = targets::named(name)(folder.path(), bytes);
        assert!(outcome.as_ref().err().is_none_or(|error| !error.is_empty()));
        outcome
    };
    let good = seeds.iter().filter(|seed| run(seed).is_ok()).count();
    assert!(good > 0, "{name}: mutants of what is refused anyway find little");
    let mut mutator = Mutator::new(1);
    let mut fine = 0;
    for at in 0..mutants {
        let seed = &seeds[at % seeds.len()];
        let other = &seeds[(at / 7) % seeds.len()];
        fine += usize::from(run(&mutator.mutant(seed, other)).is_ok());
    }
    println!("{name}: {} seeds ({good} fine), {mutants} mutants ({fine} fine)", seeds.len());
}

#[test]
fn bin() {
    fuzz("bin", 300);
}

#[test]
fn checkpoint() {
    fuzz("checkpoint", 60);
}

#[test]
fn config_json() {
    fuzz("config_json", 1000);
}

#[test]
fn experts() {
    fuzz("experts", 100);
}

#[test]
fn http() {
    fuzz("http", 200);
}

#[test]
fn index() {
    fuzz("index", 60);
}

#[test]
fn jsonl() {
    fuzz("jsonl", 200);
}

#[test]
fn template() {
    fuzz("template", 400);
}

#[test]
fn tokenizer() {
    fuzz("tokenizer", 400);
}

#[test]
fn toml() {
    fuzz("toml", 1000);
}

#[test]
fn weights() {
    fuzz("weights", 100);
}

#[test]
fn every_target_is_run() {
    let text = include_str!("fuzz.rs");
    for (name, _) in TARGETS {
        assert!(text.contains(&format!("fuzz({name:?}, ")), "{name} has no test");
    }
}
