//! File systems without locks: a directory has an owner, which a file names.

use std::fs;
use std::path::PathBuf;

use crate::scenario::{Bench, Ended, Place};
use crate::{BOTH, CHECKPOINTS, ON_FILE};

/// Function not implemented, no locks available, operation not supported: what such file systems
/// say.
const NO_LOCKS: [&str; 3] = ["38", "37", "95"];

fn train(bench: &Bench, place: &Place, error: &str, faults: &[(&str, &str)]) -> Ended {
    let faults = [&[("FAULTS_FLOCK", error)], faults].concat();
    bench.train(&BOTH, place, !faults.contains(&("FAULTS_KIND", "exit")), &faults)
}

/// The owners' files of the two directories.
fn owners(place: &Place) -> [PathBuf; 2] {
    ["checkpoints/.l2l-lock.owner", "eps/lock.owner"].map(|file| place.disk().join(file))
}

/// A run ends well, and leaves no owner. A run that was killed leaves its owners, and the next one
/// takes its place.
#[test]
fn runs_go_on_without_locks() {
    let Some(bench) = Bench::new(false) else { return };
    for scenario in [CHECKPOINTS, ON_FILE, BOTH] {
        for error in NO_LOCKS {
            let place = bench.place("without locks");
            let ended = bench.train(&scenario, &place, false, &[("FAULTS_FLOCK", error)]);
            assert_eq!(ended.status, Some(0), "{error}: {}", ended.said);
            bench.check_digest(&ended).expect(error);
            assert!(owners(&place).iter().all(|owner| !owner.exists()), "{error}");
        }
    }
    let place = bench.place("killed");
    let kill = [("FAULTS_KIND", "exit"), ("FAULTS_ON", "rename step-00000002")];
    let ended = train(&bench, &place, NO_LOCKS[0], &kill);
    assert_eq!(ended.status, Some(137), "{}", ended.said);
    assert!(owners(&place).iter().all(|owner| owner.exists()));
    let ended = train(&bench, &place, NO_LOCKS[0], &[]);
    assert_eq!(ended.status, Some(0), "{}", ended.said);
    bench.check_digest(&ended).expect("it resumes");
    assert!(owners(&place).iter().all(|owner| !owner.exists()));
}

/// A directory is refused while its owner lives, and if nobody can tell whether it lives.
#[test]
fn an_owner_keeps_other_runs_away() {
    let Some(bench) = Bench::new(false) else { return };
    let place = bench.place("owned");
    let kill = [("FAULTS_KIND", "exit"), ("FAULTS_ON", "rename step-00000001")];
    assert_eq!(train(&bench, &place, NO_LOCKS[1], &kill).status, Some(137));
    for owner in owners(&place) {
        let text = fs::read_to_string(&owner).expect("the killed run left it");
        let mut record: serde_json::Value = serde_json::from_str(&text).expect("an object");
        record["process"] = std::process::id().into();
        record["started"] = serde_json::Value::Null;
        let ours = record.to_string();
        record["boot"] = "another".into();
        let says = format!("another run has it: process {} on ", std::process::id());
        for (text, says) in [(ours, &*says), (record.to_string(), &*says), (String::new(), "which")]
        {
            fs::write(&owner, text).expect("it is ours");
            let ended = train(&bench, &place, NO_LOCKS[1], &[]);
            assert_eq!(ended.status, Some(2), "{}", ended.said);
            let delete = format!("delete {:?}", owner.display().to_string());
            assert!(ended.said.contains(says) && ended.said.contains(&delete), "{}", ended.said);
        }
        fs::remove_file(owner).expect("as the message says");
    }
    let ended = train(&bench, &place, NO_LOCKS[1], &[]);
    assert_eq!(ended.status, Some(0), "{}", ended.said);
    bench.check_digest(&ended).expect("it trains");
}
