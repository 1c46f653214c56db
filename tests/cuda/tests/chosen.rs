//! Algorithms of products: timed, stored, and taken by later runs.

use std::fs;
use std::path::Path;

use serde_json::Value;

use super::config;
use crate::Trainer;
use crate::config::{Config, DeviceKind, ScheduleKind};
use crate::data::Batches;
use crate::devices::ProductTable;
use crate::devices::cuda::driver::ProductKey;
use crate::devices::cuda::emulated::{self, Limits};
use crate::tensor::Dtype;

/// The first takes 300 s and the second too little less. A third is fast with a bias, a fourth
/// where the first factor is transposed, as in gradients of weights.
fn takes(key: &ProductKey, index: u64) -> Option<f64> {
    match index {
        0 => Some(300.0),
        1 => Some(298.0),
        2 => Some(if key.has_bias { 100.0 } else { 400.0 }),
        3 if key.transposed[0] => Some(200.0),
        _ => None,
    }
}

/// The number of the fastest.
fn fastest(row: &Value) -> u64 {
    match (row["has_bias"].as_bool(), row["transposed"][0].as_bool()) {
        (Some(true), _) => 2,
        (_, Some(true)) => 3,
        _ => 0,
    }
}

/// A library that has these algorithms.
fn library(takes: fn(&ProductKey, u64) -> Option<f64>) {
    emulated::limit(Limits { takes: Some(takes), ..Limits::default() });
}

fn case(cache: &Path, schedule: ScheduleKind) -> Config {
    let mut config = config(DeviceKind::Cuda);
    (config.device.kernel_cache, config.schedule.kind) = (Some(cache.into()), schedule);
    config
}

/// The end of two steps: losses and the digest of weights, warnings, tables.
struct End {
    bits: (Vec<f64>, String),
    warnings: Vec<String>,
    tables: Vec<ProductTable>,
}

fn run(config: Config, times: bool) -> End {
    emulated::runtime().block_on(async {
        let mut batches = Batches::open(&config).expect("data of ours");
        let mut trainer = Trainer::start(config).await.expect("a case of ours");
        if times {
            trainer.time_products();
        }
        let mut losses = Vec::new();
        for _ in 0..2 {
            let batch = batches.next().await.expect("a batch");
            losses.push(trainer.step(batch).await.expect("nothing fails").loss);
        }
        let warnings = trainer.take_warnings();
        let tables = trainer.store_products().await.expect("nothing fails");
        let digest = trainer.digest().await.expect("it is in memory");
        trainer.stop().await.expect("a clean end");
        End { bits: (losses, digest), warnings, tables }
    })
}

/// The file of a folder, and its contents.
fn file(folder: &Path) -> (std::path::PathBuf, Value) {
    let files = fs::read_dir(folder).expect("it is there");
    let paths = files.map(|file| file.expect("it is readable").path());
    // Beside it is the lock of the processes that write it.
    let mut files = paths.filter(|path| path.extension().is_none_or(|of| of != "lock"));
    let path = files.next().expect("a file");
    assert!(files.next().is_none(), "one file, and nothing half");
    let text = fs::read_to_string(&path).expect("it is text");
    (path, serde_json::from_str(&text).expect("it is JSON"))
}

#[test]
fn algorithms_that_were_timed_are_taken() {
    if !emulated::instead() {
        return;
    }
    library(takes);
    let folder = tempfile::tempdir().expect("a place for files");
    let of = |schedule, times| run(case(folder.path(), schedule), times);
    let before = of(ScheduleKind::Relay, false);
    assert!(before.tables.is_empty() && before.warnings.is_empty());
    assert_eq!(fs::read_dir(folder.path()).expect("it is there").count(), 0);
    // The run that times has the bits of one that does not.
    let timed = of(ScheduleKind::Relay, true);
    assert_eq!(timed.bits, before.bits);
    let [table] = &timed.tables[..] else { panic!("{:?}", timed.tables) };
    let (path, stored) = file(folder.path());
    assert_eq!(table.path, path);
    assert_eq!(stored["library"]["gpu"], "emulated");
    let rows = stored["products"].as_array().expect("rows");
    assert_eq!(rows.len(), table.products.len());
    for row in rows {
        assert_eq!(row["algorithm"][0], fastest(&row["product"]), "{row}");
    }
    assert!(rows.iter().any(|row| row["algorithm"][0] == 3));
    for time in &table.products {
        let is_faster = time.product.contains("bias") || time.product.contains("the first");
        assert_eq!(time.best < 0.8 * time.first, is_faster, "{time:?}");
        assert!(time.algorithms >= 3 && time.first >= 300.0, "{time:?}");
    }
    // Later runs take these algorithms in every schedule, and time nothing.
    let relay = of(ScheduleKind::Relay, false);
    let resident = of(ScheduleKind::Resident, false);
    assert_ne!(relay.bits, before.bits);
    assert_eq!(relay.bits, resident.bits);
    assert!(relay.warnings.is_empty() && resident.warnings.is_empty());
    // Those of another library, and of no folder, do not.
    emulated::limit(Limits { architecture: Some(80), ..Limits::default() });
    assert_eq!(of(ScheduleKind::Relay, false).bits, before.bits);
    library(takes);
    assert_eq!(run(config(DeviceKind::Cuda), false).bits, before.bits);
    // Times of another model come beside them.
    let mut other = case(folder.path(), ScheduleKind::Relay);
    (other.model.hidden, other.model.heads) = (Some(32), Some(2));
    let more = run(other, true).tables[0].products.len();
    let (_, both) = file(folder.path());
    let both = both["products"].as_array().expect("rows").len();
    assert!(rows.len() < both && both <= rows.len() + more, "{both}");
    assert_eq!(of(ScheduleKind::Relay, false).bits, relay.bits);
}

/// A file that cannot be used is warned of, and changes nothing.
#[test]
fn a_broken_choice_is_ignored() {
    if !emulated::instead() {
        return;
    }
    library(takes);
    let folder = tempfile::tempdir().expect("a place for files");
    let of = |times| run(case(folder.path(), ScheduleKind::Relay), times);
    let before = of(false);
    of(true);
    let (path, _) = file(folder.path());
    let whole = fs::read_to_string(&path).expect("it is text");
    let half = whole[..whole.len() / 2].to_string();
    let foreign = whole.replace("emulated", "another");
    let other = whole.replace("first_microseconds", "microseconds");
    for text in [half, foreign, other, String::new()] {
        fs::write(&path, text).expect("room on a disk");
        let found = of(false);
        assert_eq!(found.bits, before.bits);
        let [told] = &found.warnings[..] else { panic!("{:?}", found.warnings) };
        assert!(told.contains(&path.display().to_string()) && told.contains("ignored"), "{told}");
    }
    // It is written again.
    of(true);
    let (_, again) = file(folder.path());
    let whole: Value = serde_json::from_str(&whole).expect("it was JSON");
    let rows = |table: &Value| table["products"].as_array().expect("rows").len();
    assert_eq!(rows(&again), rows(&whole));
}

/// If the library refuses a chosen algorithm, its first computes the product. In bf16.
#[test]
fn an_algorithm_that_is_refused_falls_back() {
    if !emulated::instead() {
        return;
    }
    library(takes);
    let folder = tempfile::tempdir().expect("a place for files");
    let of = |schedule, times| {
        let mut config = case(folder.path(), schedule);
        config.device.dtype = Dtype::Bf16;
        run(config, times)
    };
    let before = of(ScheduleKind::Relay, false);
    of(ScheduleKind::Relay, true);
    let relay = of(ScheduleKind::Relay, false);
    assert_ne!(relay.bits, before.bits);
    assert_eq!(relay.bits, of(ScheduleKind::Resident, false).bits);
    library(|_, index| (index == 0).then_some(1.0));
    for schedule in [ScheduleKind::Relay, ScheduleKind::Resident] {
        let found = of(schedule, false);
        assert_eq!(found.bits, before.bits);
        assert!(!found.warnings.is_empty());
        for told in found.warnings {
            assert!(told.starts_with("cuBLASLt refuses the algorithm that was chosen"), "{told}");
        }
    }
}
