//! One program for each target: its name says which.
#![no_main]

use std::path::PathBuf;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;

// The program uses one of the targets.
#[allow(dead_code)]
#[path = "../targets/mod.rs"]
mod targets;

static FOLDER: LazyLock<PathBuf> =
    LazyLock::new(|| tempfile::tempdir().expect("a place for files").keep());

fuzz_target!(
    init: {
        // Panics that the library catches at its one door end nothing. Others end the program all
        // the same, because libFuzzer's driver catches them.
        std::panic::set_hook(Box::new(|panic| eprintln!("{panic}")));
    },
    |bytes: &[u8]| {
        // An error is as good as none.
        let _ = targets::named(env!("CARGO_BIN_NAME"))(&FOLDER, bytes);
    }
);
