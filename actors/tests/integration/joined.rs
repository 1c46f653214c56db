//! Rings under one clock that exchange data: an exchange waits for all of them.

use std::time::Duration;

use l2l_actors::RingConfig;
use l2l_actors::schedule::{Ranks, Schedule, relay};
use l2l_actors::virtual_time::{self, JoinedRing, Record};
use l2l_actors::work::Lane;

use crate::common::times::Times;
use crate::common::{config, depths, everything, model, step_of, ticks};

const STEPS: usize = 3;

/// The step of one of several ranks.
fn schedule(micro_batches: u32) -> Schedule {
    let model = model(3, 0, false);
    let mut schedule = relay(&model, &everything(&model, micro_batches)).expect("ours");
    schedule.ranks = Ranks { count: 4, dealt: true };
    schedule
}

fn config_of(schedule: &Schedule) -> RingConfig {
    config(schedule, &depths(2, 2, 2, 8), true)
}

const TIMES: Times =
    Times { upload: 2, peer: 0, compute: 7, download: 2, update: 3, stash: 1, host: 1, file: 5 };

/// Runs a ring for each of these: micro-batches of a step, and ticks of a kernel. Returns their
/// timelines.
fn joined(rings: &[(u32, u64)]) -> Vec<Vec<Record>> {
    let ring = |&(micro_batches, compute): &(u32, u64)| {
        let schedule = schedule(micro_batches);
        let times = Times { compute, ..TIMES };
        JoinedRing::new(
            config_of(&schedule),
            move |operation| times.of(operation.work()),
            async move |mut relay| {
                for _ in 0..STEPS {
                    step_of(&mut relay, &schedule, ()).await.expect("nothing fails here");
                }
                relay.stop().await.expect("nothing fails here");
            },
        )
    };
    let run = JoinedRing::run(rings.iter().map(ring).collect()).expect("it ends");
    run.into_iter().map(|((), records)| records).collect()
}

/// What an operation was and when it ran.
fn seen(records: &[Record]) -> Vec<(String, Duration, Duration)> {
    records.iter().map(|one| (one.work.to_string(), one.begin, one.end)).collect()
}

#[test]
fn equal_rings_behave_as_one_alone() {
    let schedule = schedule(4);
    let run = virtual_time::run(
        config_of(&schedule),
        |operation| TIMES.of(operation.work()),
        async move |mut relay| {
            for _ in 0..STEPS {
                step_of(&mut relay, &schedule, ()).await.expect("nothing fails here");
            }
            relay.stop().await.expect("nothing fails here");
        },
    );
    let (_, alone) = run.expect("it ends");
    assert!(alone.iter().any(|record| record.lane == Lane::Fetch));
    assert!(alone.iter().any(|record| record.lane == Lane::Exchange));
    for count in [1, 2, 5] {
        for records in joined(&vec![(4, TIMES.compute); count]) {
            assert_eq!(seen(&records), seen(&alone), "{count}");
        }
    }
}

/// One ring of each kind tells what all of them would.
#[test]
fn a_ring_of_each_kind_stands_for_all() {
    let kinds = [(4, 7), (8, 7), (4, 30)];
    let of_kinds = joined(&kinds);
    for copies in [2, 3] {
        let all: Vec<(u32, u64)> = (0..copies).flat_map(|_| kinds).collect();
        for (at, records) in joined(&all).iter().enumerate() {
            assert_eq!(seen(records), seen(&of_kinds[at % kinds.len()]), "ring {at} of {copies}");
        }
    }
}

/// All rings end an exchange when the last one has begun it, and its own time has passed.
#[test]
fn an_exchange_waits_for_the_slowest() {
    let rings = joined(&[(4, 7), (4, 70)]);
    let of = |records: &[Record], lane: Lane| -> Vec<(Duration, Duration)> {
        let all = records.iter().filter(|record| record.lane == lane);
        all.map(|record| (record.begin, record.end)).collect()
    };
    for lane in [Lane::Fetch, Lane::Exchange] {
        let [fast, slow] = [&rings[0], &rings[1]].map(|records| of(records, lane));
        assert_eq!(fast.len(), slow.len());
        assert!(!fast.is_empty());
        for ((a, a_end), (b, b_end)) in fast.into_iter().zip(slow) {
            assert_eq!([a_end, b_end], [a.max(b) + ticks(TIMES.file); 2]);
        }
    }
}

/// A ring that stops early leaves the others waiting, and the error names their tasks.
#[test]
fn a_ring_that_stops_early_is_found() {
    let ring = |steps: usize| {
        let schedule = schedule(4);
        JoinedRing::new(
            config_of(&schedule),
            |operation| TIMES.of(operation.work()),
            async move |mut relay| {
                for _ in 0..steps {
                    step_of(&mut relay, &schedule, ()).await.expect("nothing fails here");
                }
                relay.stop().await.expect("nothing fails here");
            },
        )
    };
    let stuck = JoinedRing::run(vec![ring(1), ring(2)]).expect_err("the second waits");
    assert!(stuck.iter().any(|task| task == "main"), "{stuck:?}");
}
