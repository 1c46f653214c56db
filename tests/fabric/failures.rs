//! Ranks are killed or stopped at random moments: all others end in bounds, no process is left, and
//! what a resumed run comes to is what the unbroken one did.

use std::path::Path;
use std::process::Command;

use crate::runs::{Chance, Moment, Phase, Run, Tally, resumes, train};

/// A run of which a rank did not start. MPI does not say which.
pub(crate) const NEVER_BEGAN: &str = "not all ranks started within";

/// Slow enough to be hit on its way; with a checkpoint after each step, if one is to be hit.
pub(crate) fn slow(seconds: &str, moment: Moment) -> Vec<&str> {
    let mut settings = vec!["device.flop_rate=90MFLOP/s", seconds];
    if moment == Moment::InCheckpoint {
        settings.push("checkpoint.every_steps=1");
    }
    settings
}

/// Sends a signal to a rank of several runs.
pub(crate) fn end_in_bounds(
    signal: &str,
    count: u32,
    folder: &Path,
    expected: &str,
    chance: &mut Chance,
) {
    let mut tally = Tally::default();
    for case in 0..count {
        let directory = folder.join(format!("{signal}-{case}"));
        let moment = Moment::of(case);
        let ranks = 2 + chance.below(2) as u32;
        let victim = chance.below(u64::from(ranks)) as u32;
        let command = train(ranks, &directory, &slow("watchdog.seconds=3", moment));
        let mut run = Run::start(command, ranks, &directory);
        run.wait_for(moment, chance);
        let processes = run.processes();
        let hit = processes.iter().find(|(rank, _)| *rank == victim);
        let phase = run.disturb(|| {
            if let Some((_, process)) = hit {
                let arguments = [format!("-{signal}"), process.to_string()];
                // It may have ended by itself.
                _ = Command::new("kill").args(arguments).status();
            }
        });
        let took = run.wait_for_ranks();
        let is_well = run.wait_for_launcher();
        let error = run.error();
        if is_well == Some(true) {
            assert!(hit.is_none() || phase == Phase::Ended, "{signal} of rank {victim}: {error}");
        } else if is_well.is_none() {
            println!("mpirun stays, without a process of its own");
        } else {
            assert!(hit.is_some(), "it ended before: {error}");
            let never_began = phase == Phase::Starting && error.contains(NEVER_BEGAN);
            let named = error.contains(&format!("rank {victim}"));
            assert!(named || never_began, "{signal} of rank {victim}: {error}");
        }
        let again = chance.below(4) as u32;
        resumes(again, &directory, expected);
        println!(
            "{signal} of rank {victim} of {ranks}, {phase:?}: all ended in {:.1} s, resumed on \
             {again}",
            took.as_secs_f64()
        );
        tally.0.push((phase, took));
    }
    println!("{signal}: {tally}");
}
