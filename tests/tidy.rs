//! Style rules that matter, kept by a test.

use std::fs;
use std::path::{Path, PathBuf};

/// Files with `unsafe` in them. Add one with its reason, or better, do without.
const MAY_BE_UNSAFE: [&str; 23] = [
    "src/tensor/arena.rs",            // one allocation, handed out by range
    "src/tensor/guards.rs",           // calls of AddressSanitizer
    "src/tensor/lease.rs",            // slots that the ring granted
    "src/devices/cpu/attention.rs",   // columns of a head, written by several threads
    "src/devices/cpu/mod.rs",         // slots of the ring
    "src/product/micro_kernel.rs",    // vectors, by pointer
    "src/product/mod.rs",             // tiles of c, each written by one task
    "src/product/pack.rs",            // blocks that vectors transpose
    "src/product/task.rs",            // one tile of c, by pointer
    "src/product/tests.rs",           // a tile of c, by pointer
    "src/product/scattered.rs",       // pieces of a slice
    "src/devices/cpu/views.rs",       // views, resolved
    "src/devices/cuda/compile.rs",    // calls of NVRTC
    "src/devices/cuda/libraries.rs",  // what is loaded
    "src/devices/cuda/mod.rs",        // batch metadata on its way
    "src/devices/cuda/product.rs",    // calls of cuBLASLt
    "src/devices/cuda/real.rs",       // calls of the driver
    "src/fabric/mpi/world.rs",        // calls of MPI
    "src/hf/weight_file.rs",          // a file as memory
    "src/worker/memory.rs",           // the one lease of an operation
    "tests/cuda/emulated/mod.rs",     // memory as a device has it
    "tests/cuda/emulated/product.rs", // matrices in that memory
    "tests/memory.rs",                // an allocator that counts
];

/// Every Rust file of the workspace, relative to its root.
fn rust_files() -> Vec<(PathBuf, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut folders: Vec<PathBuf> = ["src", "tests", "examples", "benches", "actors", "fuzz"]
        .map(|folder| root.join(folder))
        .into();
    let mut files = Vec::new();
    while let Some(folder) = folders.pop() {
        let Ok(entries) = fs::read_dir(&folder) else { continue };
        for entry in entries {
            let path = entry.expect("a folder of ours is readable").path();
            if path.ends_with("target") {
                continue;
            } else if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).expect("a file of ours is UTF-8");
                files.push((path.strip_prefix(root).expect("it is below").to_path_buf(), text));
            }
        }
    }
    assert!(files.len() > 20, "the walk found the workspace");
    files
}

fn refuse(rule: &str, breaks: impl Fn(&Path, &str) -> bool) {
    let offenders: Vec<_> =
        rust_files().into_iter().filter(|(path, text)| breaks(path, text)).map(|f| f.0).collect();
    assert!(offenders.is_empty(), "{rule}: {offenders:?}");
}

#[test]
fn every_file_opens_with_its_job() {
    refuse("opens with //!", |_, text| !text.starts_with("//!"));
}

#[test]
fn files_stay_below_500_lines() {
    refuse("at most 500 lines", |_, text| text.lines().count() > 500);
}

#[test]
fn unsafe_stays_in_few_files() {
    let word = concat!("uns", "afe ");
    let keyword = |line: &str| {
        let code = line.split("//").next().unwrap_or_default();
        code.contains(word) && !code.contains('"')
    };
    refuse("no unsafe code", |path, text| {
        text.lines().any(keyword) && !MAY_BE_UNSAFE.iter().any(|allowed| path.ends_with(allowed))
    });
}

#[test]
fn cuda_stays_below_devices() {
    let feature = concat!("feature = ", "\"cuda\"");
    refuse("cfg(cuda) only in src/devices", |path, text| {
        text.contains(feature) && !path.starts_with("src/devices")
    });
}

#[test]
fn models_and_optimizers_know_no_tokio() {
    refuse("no tokio in models and optimizers", |path, text| {
        let mathematics = path.starts_with("src/models") || path.starts_with("src/optimizers");
        mathematics && text.contains("tokio")
    });
}

#[test]
fn actors_depend_on_no_mathematics() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let manifest = fs::read_to_string(root.join("actors/Cargo.toml")).expect("it is there");
    let dependencies = manifest.split("[dependencies]").nth(1).expect("it has some");
    let names: Vec<&str> = dependencies
        .lines()
        .skip(1)
        .take_while(|line| !line.starts_with('['))
        .filter_map(|line| line.split(['.', ' ', '=']).next().filter(|name| !name.is_empty()))
        .collect();
    assert_eq!(names, ["async-trait", "flume", "thiserror", "tokio"]);
}

#[test]
fn nothing_is_left_open() {
    let marks =
        [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X"), concat!("#[ign", "ore")];
    refuse("no open ends", |_, text| marks.iter().any(|mark| text.contains(mark)));
}

/// Pages of documentation, relative to the workspace's root.
fn pages() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut folders: Vec<PathBuf> = vec![root.into()];
    let mut pages = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("a folder of ours is readable") {
            let path = entry.expect("a folder of ours is readable").path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if path.is_dir() && !name.starts_with('.') && name != "target" && name != "shared" {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "md") {
                pages.push(path);
            }
        }
    }
    assert!(pages.len() > 10, "the walk found the pages");
    pages
}

#[test]
fn links_lead_somewhere() {
    for page in pages() {
        let text = fs::read_to_string(&page).expect("a page of ours is UTF-8");
        let folder = page.parent().expect("a page is in a folder");
        let targets = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        for target in targets.filter(|target| !target.contains("://")) {
            let file = target.split('#').next().unwrap_or_default();
            let exists = file.is_empty() || folder.join(file).exists();
            assert!(exists, "{}: the link to {target} leads nowhere", page.display());
        }
    }
}

/// The rooms of ARCHITECTURE.md's table, from the ground up.
fn rooms() -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("ARCHITECTURE.md");
    let page = fs::read_to_string(path).expect("it is there");
    let section = page.split("## Rooms").nth(1).expect("it has a section of rooms");
    let section = section.split("\n## ").next().unwrap_or_default();
    let rows = section.lines().filter_map(|line| line.strip_prefix("| `")?.split_once('`'));
    let rooms: Vec<String> = rows.map(|(room, _)| room.trim_end_matches('/').into()).collect();
    assert!(rooms.len() > 20, "the table was found");
    rooms
}

/// What a line imports of this crate: `crate::{a, b}` and `crate::a::B`, or `l2l::` in the program.
fn imported(line: &str) -> Vec<&str> {
    let code = line.split("//").next().unwrap_or_default();
    let mut names = Vec::new();
    for root in ["crate::", "l2l::"] {
        for (at, _) in code.match_indices(root) {
            let rest = &code[at + root.len()..];
            let is_word = |c: char| c.is_alphanumeric() || c == '_';
            match rest.strip_prefix('{') {
                Some(list) => names.extend(
                    list.split(['{', '}', ',', ' '])
                        .map(|name| name.split("::").next().unwrap_or_default()),
                ),
                None => names.push(&rest[..rest.find(|c| !is_word(c)).unwrap_or(rest.len())]),
            }
        }
    }
    names
}

#[test]
fn imports_run_downward() {
    let rooms = rooms();
    let place = |room: &str| rooms.iter().position(|known| known == room);
    let mut offenders = Vec::new();
    for (path, text) in rust_files() {
        let Ok(inside) = path.strip_prefix("src") else { continue };
        let room = inside.components().next().expect("a file has a name").as_os_str();
        let room = room.to_string_lossy().trim_end_matches(".rs").to_string();
        if ["lib", "main"].contains(&room.as_str()) {
            continue;
        }
        let own = place(&room).unwrap_or_else(|| panic!("{room} is in no row of ARCHITECTURE.md"));
        // Tests may look at everything: modules of tests, and what stands behind them in a file.
        let is_test = path.ends_with("tests.rs");
        let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
        for name in code.lines().filter(|_| !is_test).flat_map(imported) {
            if place(name).is_some_and(|other| other > own) {
                offenders.push(format!("{} imports {name}", path.display()));
            }
        }
    }
    assert!(offenders.is_empty(), "imports that run upward: {offenders:#?}");
}

#[test]
fn lines_have_at_most_100_columns() {
    let is_long = |line: &str| line.chars().count() > 100;
    refuse("at most 100 columns", |_, text| text.lines().any(is_long));
}

#[test]
fn no_two_public_types_share_a_name() {
    let mut met = std::collections::BTreeMap::<String, Vec<String>>::new();
    for (path, text) in rust_files() {
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_string();
        let is_code = path.starts_with("src") || path.starts_with("actors/src");
        // What stands for a feature that is off has the names of what it stands for.
        if !is_code || name.starts_with("no_") {
            continue;
        }
        for line in text.lines() {
            let Some(item) = line.strip_prefix("pub ").or(line.strip_prefix("pub(crate) ")) else {
                continue;
            };
            let kinds = ["struct ", "enum ", "trait ", "type "];
            let Some(rest) = kinds.iter().find_map(|kind| item.strip_prefix(kind)) else {
                continue;
            };
            let is_word = |c: char| c.is_alphanumeric() || c == '_';
            let name = &rest[..rest.find(|c| !is_word(c)).unwrap_or(rest.len())];
            met.entry(name.into()).or_default().push(path.display().to_string());
        }
    }
    met.retain(|_, places| places.len() > 1);
    assert!(met.is_empty(), "public types of one name: {met:#?}");
}

/// Functions that are one table, or one list of cases, and may be longer than a screen.
const TABLES: [&str; 3] = [
    "actors/src/virtual_time/touch.rs: of", // kinds of work, and the memory each touches
    "actors/src/work/mod.rs: row",          // kinds of work
    "tests/integration/bad_input.rs: what_contradicts_itself", // configs
];

/// The names of functions of more lines than a screen shows.
fn long_functions(text: &str) -> Vec<&str> {
    let lines: Vec<&str> = text.lines().collect();
    let mut long = Vec::new();
    for (begin, line) in lines.iter().enumerate() {
        let (indent, _) = line.split_at(line.len() - line.trim_start().len());
        let is_declared = line.trim_start().starts_with(['f', 'p', 'a', 'c', 'u']);
        let Some((_, rest)) = line.split_once("fn ").filter(|_| is_declared) else { continue };
        let is_end = |line: &&str| line.strip_prefix(indent).is_some_and(|rest| rest == "}");
        let has_no_body = |line: &&str| {
            line.strip_prefix(indent).is_some_and(|l| l.starts_with(')') && l.ends_with(';'))
        };
        let after = &lines[begin..];
        let Some(length) = after.iter().position(|l| is_end(l) || has_no_body(l)) else { continue };
        if length + 1 > 70 && !line.ends_with(';') {
            long.push(rest.split(['(', '<']).next().unwrap_or_default());
        }
    }
    long
}

#[test]
fn functions_fit_a_screen() {
    let mut offenders = Vec::new();
    for (path, text) in rust_files() {
        let long = long_functions(&text).into_iter();
        offenders.extend(long.map(|name| format!("{}: {name}", path.display())));
    }
    offenders.retain(|found| !TABLES.contains(&found.as_str()));
    assert!(offenders.is_empty(), "functions of more than 70 lines: {offenders:#?}");
}

/// The text between a bracket and the one that closes it, and the text behind both.
fn bracketed(text: &str) -> Option<(&str, &str)> {
    let mut depth = 0;
    for (at, character) in text.char_indices() {
        match character {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' if depth == 1 => return Some((&text[1..at], &text[at + 1..])),
            ')' | ']' | '}' => depth -= 1,
            _ => {}
        }
    }
    None
}

/// True for `(x, y)`, and for its type.
fn is_tuple(text: &str) -> bool {
    let text = text.trim_start().trim_start_matches('&').trim_start_matches("mut ");
    text.starts_with('(') && bracketed(text).is_some_and(|(inside, _)| top_level(inside).len() > 1)
}

/// The parts of a list between its outermost commas.
fn top_level(list: &str) -> Vec<&str> {
    let mut depth = 0;
    let mut begin = 0;
    let mut parts = Vec::new();
    let mut before = ' ';
    for (at, character) in list.char_indices() {
        match character {
            '(' | '[' | '{' | '<' => depth += 1,
            '>' if before == '-' || before == '=' => {}
            ')' | ']' | '}' | '>' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&list[begin..at]);
                begin = at + 1;
            }
            _ => {}
        }
        before = character;
    }
    parts.push(&list[begin..]);
    parts.retain(|part| !part.trim().is_empty());
    parts
}

#[test]
fn a_let_binds_one_value() {
    refuse("one binding a let: no tuples on both sides", |_, text| {
        text.match_indices("let (").any(|(at, _)| {
            let Some((_, behind)) = bracketed(&text[at + 4..]) else { return false };
            let Some((_, value)) = behind.split_once("= ") else { return false };
            let is_let = behind.starts_with(" = ") || behind.starts_with(": (");
            is_let && is_tuple(value) && {
                let (_, end) = bracketed(value).expect("it is a tuple");
                end.starts_with(';')
            }
        })
    });
}

#[test]
fn a_parameter_is_no_tuple() {
    refuse("a parameter that is a tuple hides a struct", |_, text| {
        text.match_indices("fn ").any(|(at, _)| {
            let is_word = |c: char| c.is_alphanumeric() || c == '_';
            let rest = text[at + 3..].trim_start_matches(is_word);
            let Some(open) = rest.find('(').filter(|&open| !rest[..open].contains('\n')) else {
                return false;
            };
            let is_generic = open == 0 || rest.starts_with('<');
            let Some((parameters, _)) = bracketed(&rest[open..]) else { return false };
            let is_tuple = |parameter: &str| {
                parameter.rsplit_once(": ").is_some_and(|(_, kind)| is_tuple(kind))
            };
            is_generic && top_level(parameters).into_iter().any(is_tuple)
        })
    });
}
