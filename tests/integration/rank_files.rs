//! Ranks whose models are on file: they go on from what all of them have.

use std::fs;
use std::path::Path;

use l2l::config::EpsTier;

use crate::ranks::{Task, on_ranks, refused, relay};

/// A task whose model is on file there. It resumes from the state that it finds.
fn on_file(folder: &Path, from: usize, steps: usize) -> Task {
    let mut config = relay(4, 2);
    (config.eps.tier, config.eps.path) = (EpsTier::File, Some(folder.into()));
    Task { from, resumes_file: from > 0, ..Task::new(config, steps) }
}

/// Copies a folder and the folders in it.
pub(crate) fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a place for files");
    for entry in fs::read_dir(from).expect("a folder").flatten() {
        let place = to.join(entry.file_name());
        match entry.file_type().expect("a file").is_dir() {
            true => copy(&entry.path(), &place),
            false => _ = fs::copy(entry.path(), place).expect("room on a disk"),
        }
    }
}

/// Each rank has its parts on a file of its own, and a run goes on from these: also where a kill
/// left some ranks one step ahead of the others.
#[test]
fn a_run_goes_on_from_the_files_of_its_ranks() {
    let folder = tempfile::tempdir().expect("a place for files");
    let (bits, whole) = Task::new(relay(4, 2), 6).run(None).expect("a case of ours");
    let place = folder.path().join("run");
    let run = |at: &Path, from: usize, steps: usize| {
        for (seen, _) in on_ranks(3, |_| on_file(at, from, steps)) {
            let (found, summary) = seen.expect("a case of ours");
            assert_eq!(found, bits[from..from + steps]);
            if from + steps == 6 {
                assert_eq!(summary.weights_digest, whole.weights_digest);
            }
        }
    };
    run(&place, 0, 3);
    let before = folder.path().join("before");
    copy(&place, &before);
    run(&place, 3, 1);
    // Rank 1 was killed before it sealed the last step.
    let late = folder.path().join("late");
    copy(&place, &late);
    copy(&before.join("rank-1"), &late.join("rank-1"));
    run(&late, 3, 3);
    run(&place, 4, 2);
    // Further apart they are not of one run.
    copy(&before.join("rank-1"), &late.join("rank-1"));
    for says in refused(3, |_| on_file(&late, 6, 1)) {
        assert!(says.contains("has states after steps 3 to 6 on different ranks"), "{says}");
    }
}

/// A kill before the first step leaves the first state on some ranks: the run begins again.
#[test]
fn a_run_that_has_done_no_step_begins_again() {
    let folder = tempfile::tempdir().expect("a place for files");
    let (bits, _) = Task::new(relay(4, 2), 2).run(None).expect("a case of ours");
    for (seen, _) in on_ranks(2, |_| on_file(folder.path(), 0, 0)) {
        seen.expect("a case of ours");
    }
    fs::remove_dir_all(folder.path().join("rank-1")).expect("its files");
    for (seen, _) in on_ranks(2, |_| on_file(folder.path(), 0, 2)) {
        assert_eq!(seen.expect("a case of ours").0, bits);
    }
}

#[test]
fn files_of_another_number_of_ranks_are_refused() {
    let folder = tempfile::tempdir().expect("a place for files");
    let place = folder.path().join("two");
    for (seen, _) in on_ranks(2, |_| on_file(&place, 0, 1)) {
        seen.expect("a case of ours");
    }
    for says in refused(3, |_| on_file(&place, 1, 1)) {
        assert!(says.contains("has no state of 1 of 3 processes"), "{says}");
    }
    let says = on_file(&place, 1, 1).run(None).expect_err("it is refused").to_string();
    assert!(says.contains("holds the states of several processes: start as many"), "{says}");
    let place = folder.path().join("one");
    on_file(&place, 0, 1).run(None).expect("a case of ours");
    for says in refused(2, |_| on_file(&place, 1, 1)) {
        assert!(says.contains("holds the state of one process"), "{says}");
    }
}
