//! Builds the built-in corpus: the project's own source and documentation, concatenated in the
//! order of the files' names.

use std::fs;
use std::path::{Path, PathBuf};

fn main() {
    let root = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let mut files = Vec::new();
    // A packaged crate does not contain the crate in `actors`, so its corpus is smaller.
    for name in ["README.md", "ARCHITECTURE.md", "docs", "src", "actors", "tests"] {
        walk(&root.join(name), &mut files);
    }
    files.sort();
    // Not the folders, in which scripts and goldens change, too.
    files.iter().for_each(|file| println!("cargo::rerun-if-changed={}", file.display()));
    let corpus: Vec<u8> = files.iter().flat_map(|file| read(file)).collect();
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets it"));
    fs::write(out.join("corpus.txt"), corpus).expect("cargo's own folder is writable");
}

fn walk(path: &Path, files: &mut Vec<PathBuf>) {
    let is_text = path.extension().is_some_and(|extension| extension == "rs" || extension == "md");
    if let Ok(entries) = fs::read_dir(path) {
        entries.flatten().for_each(|entry| walk(&entry.path(), files));
    } else if is_text && path.is_file() {
        files.push(path.to_path_buf());
    }
}

fn read(file: &Path) -> Vec<u8> {
    fs::read(file).expect("a file that was just listed is readable")
}
