//! Storage that fails, at each call of a small run: errors, short writes, full disks, and power
//! that fails (`disk.rs` says what is left then). Whatever happens, no checkpoint that the run told
//! of is lost, and the run that resumes ends with the bits of one that nothing happened to.
//!
//! The program runs as a user runs it. A library that is loaded before libc (`shim.cpp`) counts its
//! calls and lets them fail. `cargo test --test faults` tries a few of them, evenly chosen,
//! `L2L_TESTS=whole` more, `L2L_FAULTS=all` all of them, which takes an hour or so.
#![cfg(all(feature = "cli", target_os = "linux"))]

mod disk;
mod found;
mod journal;
mod limits;
mod owners;
mod scenario;

use std::collections::HashSet;
use std::num::NonZero;
use std::path::Path;
use std::sync::Mutex;
use std::thread;

use disk::{Disk, Tree};
use journal::Record;
use scenario::{Bench, Ended, Place, Scenario, safe_step};

const CHECKPOINTS: Scenario = Scenario {
    name: "checkpoints",
    checkpoints: true,
    on_file: false,
    is_delayed: false,
    kills: &[],
    replaced: None,
};

const ON_FILE: Scenario = Scenario {
    name: "on file",
    checkpoints: false,
    on_file: true,
    is_delayed: false,
    kills: &[],
    replaced: None,
};

const BOTH: Scenario = Scenario {
    name: "on file, with checkpoints",
    checkpoints: true,
    on_file: true,
    is_delayed: false,
    kills: &[],
    replaced: None,
};

const RESUMED_PARTIAL: Scenario = Scenario {
    name: "resumed with a checkpoint that was not complete",
    checkpoints: true,
    on_file: false,
    is_delayed: false,
    kills: &["rename step-00000002"],
    replaced: None,
};

const RESUMED_REMOVED: Scenario = Scenario {
    name: "resumed with a checkpoint that was being removed",
    checkpoints: true,
    on_file: false,
    is_delayed: false,
    kills: &["remove config.json"],
    replaced: None,
};

const RESUMED_REPLACED: Scenario = Scenario {
    name: "resumed on file with a checkpoint that was being replaced",
    checkpoints: true,
    on_file: true,
    is_delayed: false,
    kills: &["rename step-00000002"],
    replaced: Some("best-00000002"),
};

const RESUMED_INDEX: Scenario = Scenario {
    name: "resumed on file with an index that was being written",
    checkpoints: false,
    on_file: true,
    is_delayed: false,
    kills: &["sync eps/index.1"],
    replaced: None,
};

const RESUMED_BLOCKS: Scenario = Scenario {
    name: "resumed on file with blocks of a step that was not complete",
    checkpoints: false,
    on_file: true,
    is_delayed: false,
    kills: &["truncate eps/index.1"],
    replaced: None,
};

const DELAYED: Scenario =
    Scenario { name: "checkpoints of a delay", is_delayed: true, ..CHECKPOINTS };

const DELAYED_BOTH: Scenario =
    Scenario { name: "on file, with checkpoints, with a delay", is_delayed: true, ..BOTH };

const DELAYED_BLOCKS: Scenario = Scenario {
    name: "resumed on file with blocks of a step that was not complete, with a delay",
    is_delayed: true,
    ..RESUMED_BLOCKS
};

const SCENARIOS: [&Scenario; 11] = [
    &CHECKPOINTS,
    &ON_FILE,
    &BOTH,
    &RESUMED_PARTIAL,
    &RESUMED_REMOVED,
    &RESUMED_REPLACED,
    &RESUMED_INDEX,
    &RESUMED_BLOCKS,
    &DELAYED,
    &DELAYED_BOTH,
    &DELAYED_BLOCKS,
];

/// The most cases of a scenario and test; they are evenly chosen.
fn most() -> usize {
    match (std::env::var("L2L_FAULTS").as_deref(), std::env::var("L2L_TESTS").as_deref()) {
        (Ok("all"), _) => usize::MAX,
        (Ok(other), _) => panic!("L2L_FAULTS is {other:?}, and can be \"all\""),
        (_, Ok("whole")) => 40,
        (_, Err(_)) => 4,
        (_, Ok(other)) => panic!("L2L_TESTS is {other:?}, and can be \"whole\""),
    }
}

/// So many of these cases, evenly chosen.
fn chosen<T>(mut cases: Vec<T>, most: usize) -> Vec<T> {
    let all = cases.len();
    let most = most.min(all);
    let mut nth = 0;
    cases.retain(|_| {
        nth += 1;
        nth * most / all > (nth - 1) * most / all
    });
    cases
}

/// Checks some of the cases at a time, and gives what is wrong in which.
fn check_all<T: Send>(
    what: &str,
    cases: Vec<T>,
    most: usize,
    check: impl Fn(usize, T) -> Result<(), String> + Sync,
) -> Vec<String> {
    let all = cases.len();
    let cases = chosen(cases, most);
    let count = cases.len();
    let cases = Mutex::new(cases.into_iter().enumerate());
    let wrong = Mutex::new(Vec::new());
    let next = || cases.lock().expect("nothing panics inside").next();
    let threads = thread::available_parallelism().map_or(1, NonZero::get);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some((nth, case)) = next() {
                    if let Err(problem) = check(nth, case) {
                        println!("{what}: {problem}");
                        wrong.lock().expect("nothing panics inside").push((nth, problem));
                    }
                }
            });
        }
    });
    let mut wrong = wrong.into_inner().expect("nothing panics inside");
    wrong.sort();
    println!("{what}: {count} of {all} cases, {} wrong", wrong.len());
    wrong.into_iter().map(|(_, problem)| format!("{what}: {problem}")).collect()
}

/// Checks all scenarios, and fails with what is wrong in which.
fn check_each<'s>(
    scenarios: impl Iterator<Item = &'s Scenario>,
    check: impl Fn(&Bench, &Scenario) -> Vec<String>,
) {
    let wrong = scenarios.flat_map(|scenario| match Bench::new(scenario.is_delayed) {
        Some(bench) => check(&bench, scenario),
        None => Vec::new(),
    });
    let wrong: Vec<String> = wrong.collect();
    assert!(wrong.is_empty(), "{} cases:\n{}", wrong.len(), wrong.join("\n"));
}

/// The ways in which a call of this class can fail.
fn kinds(class: char) -> &'static [&'static str] {
    match class {
        'r' => &["io", "gone", "short", "interrupted"],
        'w' => &["io", "full", "short", "interrupted", "gone", "filled"],
        's' => &["io", "full", "gone", "filled"],
        'q' | 'd' => &["io", "gone"],
        _ => &[],
    }
}

/// What a process that met a fault may say.
fn check_end(bench: &Bench, kind: &str, place: &Place, ended: &Ended) -> Result<(), String> {
    let Ended { status, said, .. } = ended;
    let disk = place.disk().display().to_string();
    let is_harmless = ["short", "interrupted"].contains(&kind);
    match status {
        None => Err(format!("a signal (SIGALRM: it hung): {said}")),
        _ if said.contains("panicked") => Err(format!("a panic: {said}")),
        Some(0) => bench.check_digest(ended),
        Some(_) if is_harmless => Err(format!("an error: {said}")),
        Some(1 | 2) if !said.contains(&disk) => Err(format!("an error without a path: {said}")),
        Some(1) => Ok(()),
        Some(2) if !ended.has_begun() => Ok(()),
        Some(status) => Err(format!("status {status}: {said}")),
    }
}

fn copy(from: &Path, to: &Path) {
    disk::write(&disk::read(from), to);
}

/// Each call of a run fails in each way that it can.
fn calls_that_fail(bench: &Bench, scenario: &Scenario) -> Vec<String> {
    let begun = bench.place("begun");
    let before = bench.begin(scenario, &begun);
    let resumes = !scenario.kills.is_empty();
    let measured = bench.place("measured");
    copy(&begun.disk(), &measured.disk());
    let ended = bench.train(scenario, &measured, resumes, &[]);
    assert_eq!(ended.status, Some(0), "{}", ended.said);
    let mut calls: Vec<Record> = measured.records();
    calls.sort_by_key(|record| record.number);
    let cases: Vec<(Record, &str)> = calls
        .into_iter()
        .flat_map(|record| {
            let kinds = kinds(record.class).iter();
            kinds.map(move |kind| (Record { data: Vec::new(), ..record.clone() }, *kind))
        })
        .collect();
    check_all(scenario.name, cases, most(), |nth, (call, kind)| {
        let place = bench.place(&format!("fault-{nth}"));
        copy(&begun.disk(), &place.disk());
        let at = call.number.to_string();
        let faults = [("FAULTS_KIND", kind), ("FAULTS_AT", &at)];
        let ended = bench.train(scenario, &place, resumes, &faults);
        // Threads take turns, so the call of this number may be another one now.
        let failed = place.records().into_iter().find(|record| record.mark == Some('!'));
        let told = failed.as_ref().unwrap_or(&call).told();
        let locate = |what: String| format!("{kind} at {told}: {what}");
        check_end(bench, kind, &place, &ended).map_err(locate)?;
        ended.check_begin(before).map_err(locate)?;
        let safe = before.max(safe_step(scenario, &ended.out));
        bench.resume(scenario, &place, safe).map_err(locate)
    })
}

/// What is left after a power loss, and what must be resumed from it.
struct Loss {
    told: String,
    tree: Tree,
    safe: u64,
    /// A checkpoint that is not as it was.
    incomplete: Option<String>,
}

/// All that may be left when the power fails after a call, from `first` on. Each once.
fn losses(scenario: &Scenario, records: &[Record], first: usize) -> (Vec<Loss>, Disk) {
    let mut disk = Disk::new();
    let mut out = String::new();
    let mut seen = HashSet::new();
    let mut losses = Vec::new();
    for (nth, record) in records.iter().enumerate() {
        disk.apply(record);
        if record.name == "say" {
            out.push_str(&String::from_utf8_lossy(&record.data));
        }
        let changes = ["w", "s", "d", "o"].iter().any(|class| class.starts_with(record.class));
        if nth < first || !changes {
            continue;
        }
        let safe = safe_step(scenario, &out);
        disk.after_power_loss(&mut |left, tree| {
            if seen.insert((disk::digest_of(&tree), safe)) {
                let incomplete = disk.incomplete(&tree);
                let told = format!("after {}, {left}", record.told());
                losses.push(Loss { told, tree, safe, incomplete });
            }
        });
    }
    (losses, disk)
}

/// Resumes from what is left.
fn check_loss(bench: &Bench, scenario: &Scenario, nth: usize, loss: Loss) -> Result<(), String> {
    let Loss { told, tree, safe, incomplete } = loss;
    let place = bench.place(&format!("loss-{nth}"));
    disk::write(&tree, &place.disk());
    let resumed = bench.resume(scenario, &place, safe);
    let whole = incomplete.map_or(Ok(()), |path| Err(format!("{path} is not complete")));
    whole.and(resumed).map_err(|what| format!("{told}: {what}"))
}

/// The power fails after each call of a run.
fn power_loss(bench: &Bench, scenario: &Scenario) -> Vec<String> {
    let place = bench.place("measured");
    bench.begin(scenario, &place);
    let first = if scenario.kills.is_empty() { 0 } else { place.records().len() };
    let ended = bench.train(scenario, &place, !scenario.kills.is_empty(), &[]);
    assert_eq!(ended.status, Some(0), "{}", ended.said);
    let (losses, disk) = losses(scenario, &place.records(), first);
    let now = disk.now();
    let real = disk::read(&place.disk());
    assert!(
        now.keys().eq(real.keys()),
        "the journal has all calls: {:?} and {:?}",
        now.keys(),
        real.keys()
    );
    assert_eq!(disk::digest_of(&now), disk::digest_of(&real), "the journal has all data");
    check_all(scenario.name, losses, most(), |nth, loss| check_loss(bench, scenario, nth, loss))
}

/// Each sync of a run fails, and then the power: what was not synced may be lost.
fn syncs_that_fail(bench: &Bench, scenario: &Scenario) -> Vec<String> {
    let measured = bench.place("measured");
    let ended = bench.train(scenario, &measured, false, &[]);
    assert_eq!(ended.status, Some(0), "{}", ended.said);
    let mut calls = measured.records();
    calls.retain(|record| record.name == "sync");
    check_all(scenario.name, calls, most(), |nth, call| {
        let place = bench.place(&format!("sync-{nth}"));
        let at = call.number.to_string();
        bench.train(scenario, &place, false, &[("FAULTS_KIND", "io"), ("FAULTS_AT", &at)]);
        let records = place.records();
        let (losses, _) = losses(scenario, &records, records.len() - 1);
        for (other, loss) in chosen(losses, most()).into_iter().enumerate() {
            let checked = check_loss(bench, scenario, 1000 * nth + other, loss);
            checked.map_err(|what| format!("{} fails: {what}", call.told()))?;
        }
        Ok(())
    })
}

#[test]
fn a_call_that_fails_loses_nothing() {
    check_each(SCENARIOS.into_iter(), calls_that_fail);
}

#[test]
fn a_power_loss_loses_nothing_that_was_told() {
    check_each(SCENARIOS.into_iter(), power_loss);
}

#[test]
fn a_sync_that_fails_makes_nothing_safe() {
    check_each([&CHECKPOINTS, &ON_FILE, &BOTH, &DELAYED_BOTH].into_iter(), syncs_that_fail);
}
