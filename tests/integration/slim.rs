//! Without default features, the library brings along no more than this. With them, tests ask
//! nothing more of it than the program does.

use std::collections::BTreeSet;
use std::process::Command;

/// Every dependency, direct and indirect, on any platform. Add one with its reason, or better, do
/// without.
const ALLOWED: &str = "
allocator-api2 async-trait bitflags block-buffer bytemuck bytemuck_derive cfg-if cpufeatures
crossbeam-deque crossbeam-epoch crossbeam-utils crypto-common csv csv-core digest either equivalent
fastrand flume foldhash futures-core futures-sink generic-array getrandom half hashbrown itoa l2l
l2l-actors libc libm linux-raw-sys lock_api memchr memmap2 num-complex num-traits once_cell paste
pin-project-lite proc-macro2 pulp pulp-wasm-simd-flag quote raw-cpuid rayon rayon-core reborrow
rustix ryu safetensors scopeguard serde serde_core serde_derive serde_json serde_spanned sha2 spin
syn tempfile thiserror thiserror-impl tokio toml toml_datetime toml_parser typenum unicode-ident
winnow xxhash-rust zerocopy zerocopy-derive zmij
";

/// The lines that `cargo tree` prints for l2l.
fn tree(arguments: &[&str]) -> BTreeSet<String> {
    let tree = Command::new(env!("CARGO"))
        .args(["tree", "--package", "l2l", "--prefix", "none", "--offline"])
        .args(arguments)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    assert!(tree.status.success(), "{}", String::from_utf8_lossy(&tree.stderr));
    let text = String::from_utf8(tree.stdout).expect("UTF-8");
    text.lines().map(|line| line.trim_end_matches(" (*)").to_string()).collect()
}

#[test]
fn a_slim_library_is_slim() {
    let found = tree(&["--no-default-features", "--edges", "normal", "--format", "{p}"]);
    let found: BTreeSet<&str> = found.iter().filter_map(|line| line.split(' ').next()).collect();
    let allowed: BTreeSet<&str> = ALLOWED.split_whitespace().collect();
    let new: Vec<_> = found.difference(&allowed).collect();
    assert!(new.is_empty(), "new below the slim library: {new:?}");
    for heavy in ["clap", "indicatif", "schemars", "metrics", "hyper", "toml_edit"] {
        assert!(!found.contains(heavy), "{heavy} in the slim library");
    }
}

/// If a dependency had more features for tests, everything that uses it would be built twice: for
/// `cargo test`, and for `cargo build`.
#[test]
fn tests_and_the_program_share_a_build() {
    let with_features = ["--format", "{p} {f}", "--edges"];
    let program = tree(&[&with_features[..], &["normal,build"]].concat());
    let tests = tree(&[&with_features[..], &["normal,build,dev"]].concat());
    let twice: Vec<_> = program.difference(&tests).collect();
    assert!(twice.is_empty(), "with more features in tests: {twice:?}");
}
