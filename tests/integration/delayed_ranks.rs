//! `schedule.delay = 1` in several processes: the bits of one, whatever each of them has, and a run
//! that goes on with another number of processes is the run that was not interrupted.

use l2l::Plan;
use l2l::config::{Dtype, MasterDtype, OptimizerKind, ScheduleKind};
use l2l::plan::RankShare;
use proptest::prelude::*;

use crate::delayed::delayed;
use crate::exact::{Case, SMALL, Ways, baseline, cases, ways};
use crate::ranks::{Shared, Task, check_ranks, check_resumed, shared};
use crate::trained::Trained;
use crate::whole;

/// A case that four ranks can run.
fn of_four() -> Case {
    Case { batch: 8, micro_batch: 1, groups: 4, ..SMALL.clone() }
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(if whole() { 150 } else { 12 })
    })]

    /// Ranks, schedules, devices, groups, depths, stash, tiers; all that is trained, in any
    /// precision that ranks can have, clipped or not. Evaluations in between read the newest
    /// weights.
    #[test]
    fn every_number_of_ranks_gives_the_same_bits(
        case in cases(),
        ways in ways(),
        (ranks, groups, each) in (2..=4_u32, 2..=6_u32, 1..=2_usize),
        (after, evaluates) in (prop::option::weighted(0.3, 0..=3_u64), any::<bool>()),
    ) {
        const STEPS: usize = 4;
        let Shared { case, ways, ranks } = shared(case, ways, [ranks, groups], each);
        let folder = tempfile::tempdir().expect("a place for files");
        let of = |ways: &Ways| {
            let mut config = delayed(&case, ways, after);
            config.eps.path = ways.on_file.then(|| folder.path().into());
            config
        };
        check_ranks(ranks, &ways, |ways| Task { evaluates, ..Task::new(of(ways), STEPS) });
    }
}

/// One digest of one to three ranks, with one device or two: of all weights and of adapters, in f32
/// and in 16 bits, clipped or not, by each rule that ranks can have.
#[test]
fn every_layout_of_ranks_and_devices_gives_the_same_bits() {
    let split = (Dtype::Bf16, MasterDtype::Split);
    let half = (Dtype::F16, MasterDtype::Auto);
    let some = [
        of_four(),
        Case { clip: true, precision: split, rule: OptimizerKind::Sgd, ..of_four() },
        Case { trained: Trained::ALL[1], precision: split, ..of_four() },
        Case { precision: half, rule: OptimizerKind::Lion, ..of_four() },
    ];
    for case in &some[..if whole() { 4 } else { 3 }] {
        for (ranks, devices) in [(2, 1), (3, 1), (2, 2)] {
            let relay = Ways { kind: ScheduleKind::Relay, devices, ..baseline() };
            let ways = relay.for_ranks(case, ranks);
            check_ranks(ranks, &ways, |ways| Task::new(delayed(case, ways, None), 4));
        }
    }
}

/// Checkpoints have the parts of all ranks, also of the weights before the last update.
#[test]
fn a_run_resumes_on_any_number_of_ranks() {
    let adapters = Case { trained: Trained::ALL[1], ..of_four() };
    // The blocks of adapters have two parts.
    for (case, all_ranks) in [(of_four(), [4, 2, 3, 1]), (adapters, [1, 2, 2, 1])] {
        check_resumed(&delayed(&case, &baseline(), Some(1)), &all_ranks, |checkpoint| {
            assert!(checkpoint.join("older.safetensors").is_file());
        });
    }
}

/// A rank holds its part of both versions.
#[test]
fn the_second_copy_falls_with_the_number_of_ranks() {
    let config = delayed(&of_four(), &baseline(), None);
    let model = l2l::model_of(&config, l2l::shape_of(&config).expect("ours")).expect("ours");
    let held = |ranks: u32| -> Vec<u64> {
        let of_rank = |rank| {
            let share = RankShare { rank, ranks };
            let plan = Plan::of_rank(&config, &model, &config.update_rule(), share);
            plan.expect("a plan of ours").eps_bytes()[0]
        };
        (0..ranks).map(of_rank).collect()
    };
    let all = held(1)[0];
    for ranks in [2, 3] {
        assert_eq!(held(ranks).iter().sum::<u64>(), all);
    }
}
