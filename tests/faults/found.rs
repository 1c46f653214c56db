//! Cases that lost something once.

use crate::scenario::{Bench, Scenario};
use crate::{
    CHECKPOINTS, Loss, ON_FILE, RESUMED_INDEX, RESUMED_PARTIAL, RESUMED_REPLACED, check_all,
    check_end, check_loss, losses, safe_step,
};

/// The first call of this name and end of a path fails, and the run resumes.
fn fails(scenario: &Scenario, on: &str) {
    let Some(bench) = Bench::new(false) else { return };
    let place = bench.place("fault");
    let before = bench.begin(scenario, &place);
    let faults = [("FAULTS_KIND", "io"), ("FAULTS_ON", on)];
    let ended = bench.train(scenario, &place, !scenario.kills.is_empty(), &faults);
    let failed = place.records().iter().filter(|record| record.mark == Some('!')).count();
    assert_eq!(failed, scenario.kills.len() + 1, "{on} was not called");
    check_end(&bench, "io", &place, &ended).expect(on);
    ended.check_begin(before).expect(on);
    let safe = before.max(safe_step(scenario, &ended.out));
    bench.resume(scenario, &place, safe).expect(on);
}

/// The power fails after the first call of this name and end of a path.
fn power_fails(scenario: &Scenario, name: &str, end: &str) {
    let Some(bench) = Bench::new(false) else { return };
    let place = bench.place("power");
    bench.begin(scenario, &place);
    let before = if scenario.kills.is_empty() { 0 } else { place.records().len() };
    bench.train(scenario, &place, !scenario.kills.is_empty(), &[]);
    let mut records = place.records();
    let is_it = |record: &crate::Record| {
        let path = record.other.as_ref().unwrap_or(&record.path);
        let said = String::from_utf8_lossy(&record.data);
        record.name == name && (path.ends_with(end) || name == "say" && said.contains(end))
    };
    let at = before + records[before..].iter().position(is_it).expect("there is such a call");
    records.truncate(at + 1);
    let (losses, _) = losses(scenario, &records, at);
    let check = |nth, loss: Loss| check_loss(&bench, scenario, nth, loss);
    let wrong = check_all(scenario.name, losses, usize::MAX, check);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The entry of `checkpoint.directory` in the folder above was never synced, and neither was a
/// folder of companion files in a checkpoint.
#[test]
fn the_first_checkpoint_outlives_a_power_loss() {
    power_fails(&CHECKPOINTS, "say", "checkpoint ");
}

/// The same of `eps.path`.
#[test]
fn the_folder_of_the_eps_outlives_a_power_loss() {
    power_fails(&ON_FILE, "say", "step 2/");
}

/// Torn, it was the only one, and the run could not even begin again.
#[test]
fn the_first_index_is_whole_or_not_there() {
    power_fails(&ON_FILE, "write", "eps/index.new");
    fails(&ON_FILE, "write eps/index.new");
}

/// The index that the killed run had not synced was the only one when the other was overwritten.
#[test]
fn an_index_that_a_killed_run_left_is_synced_before_the_other_is_overwritten() {
    power_fails(&RESUMED_INDEX, "truncate", "eps/index.0");
}

/// Files of the old checkpoint went one by one, and some stayed for ever.
#[test]
fn a_checkpoint_that_cannot_be_removed_is_removed_by_the_next_run() {
    fails(&CHECKPOINTS, "remove generation_config.json");
    power_fails(&CHECKPOINTS, "remove", "generation_config.json");
}

/// The error named no path.
#[test]
fn a_sync_of_blocks_that_fails_names_the_folder() {
    fails(&ON_FILE, "sync eps/blocks");
}

/// A run that resumes began anew.
#[test]
fn checkpoints_that_cannot_be_read_are_not_taken_for_absent() {
    for call in ["opendir checkpoints", "readdir checkpoints", "stat best-00000002/l2l.json"] {
        fails(&RESUMED_PARTIAL, call);
    }
}

/// What a replaced checkpoint was kept under was removed, when it could not be seen.
#[test]
fn a_checkpoint_that_was_being_replaced_is_not_removed_unseen() {
    let Some(bench) = Bench::new(false) else { return };
    let place = bench.place("replaced");
    let safe = bench.begin(&RESUMED_REPLACED, &place);
    assert_eq!(safe, 2);
    // The state on file would be resumed from, too.
    let faults = [("FAULTS_KIND", "io"), ("FAULTS_ON", "stat best-00000002.l2l-old")];
    for faults in [&faults[..], &[]] {
        let ended = bench.train(&CHECKPOINTS, &place, true, faults);
        check_end(&bench, "io", &place, &ended).expect("an error or none");
        ended.check_begin(safe).expect("the one that was being replaced");
    }
}
