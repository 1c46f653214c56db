//! Pipelines: the orders of PyTorch's generators, published makespans, tables in and out, and what
//! is refused.

use std::time::Duration;

use crate::common::*;
use l2l_actors::schedule::{Pipeline, RingModel, Schedule, StepPlan, deal, pipeline, relay};
use l2l_actors::virtual_time;
use l2l_actors::work::WorkKind;
use proptest::prelude::*;

fn made(kind: &str, devices: u32, chunks: u32, micro_batches: u32) -> Pipeline {
    match kind {
        "gpipe" => Pipeline::gpipe(devices, chunks, micro_batches),
        "1f1b" => Pipeline::one_forward_one_backward(devices, micro_batches),
        _ => Pipeline::interleaved(devices, chunks, micro_batches).expect("even rounds"),
    }
}

#[test]
fn orders_are_those_of_pytorch() {
    let goldens = include_str!("../goldens/pipelines.csv");
    let mut tables = 0;
    for table in goldens.split("# ").filter(|table| !table.is_empty()) {
        let (head, rows) = table.split_once('\n').expect("a head and rows");
        let words: Vec<&str> = head.split(' ').collect();
        let [devices, chunks, micro_batches] =
            [1, 2, 3].map(|at| words[at].trim().parse().expect("a number"));
        let ours = made(words[0], devices, chunks, micro_batches);
        assert_eq!(ours, Pipeline::parse(rows).expect("a table of PyTorch's"), "{head}");
        assert_eq!(ours.to_string(), rows, "{head}");
        tables += 1;
    }
    assert!(tables > 100);
}

fn stack(layers: u32) -> RingModel {
    model(layers, 0, false)
}

fn schedule_of(order: &Pipeline, layers: u32, micro_batches: u32) -> Schedule {
    let model = stack(layers);
    pipeline(&model, &everything(&model, micro_batches), order).expect("a pipeline of ours")
}

/// Ends of a step in which layers take so long, forward and backward, and nothing else takes time.
/// All blocks stay on their devices.
fn makespan(schedule: Schedule, forward: u64, backward: u64) -> u64 {
    run(schedule, move |operation| {
        ticks(match operation.work().row().kind {
            WorkKind::Forward => forward,
            WorkKind::Backward => backward,
            _ => 0,
        })
    })
}

fn run(
    schedule: Schedule,
    times: impl Fn(&l2l_actors::Operation) -> Duration + Send + 'static,
) -> u64 {
    let micro_batches = schedule.micro_batches.len() as u32;
    let config = config(&schedule, &depths(1000, 2, 2, 8 * micro_batches), false);
    let run = virtual_time::run(config, times, async move |mut relay| {
        step_of(&mut relay, &schedule, ()).await.expect("nothing fails here");
        relay.stop().await.expect("nothing fails here");
    });
    let (_, records) = run.expect("it ends");
    records.iter().map(|record| record.end.as_nanos() as u64).max().expect("a step has records")
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(300)
    })]

    /// GPipe and 1F1B of N stages and M micro-batches: (M + N - 1) times a stage's forward and
    /// backward, so a bubble of (N - 1) / (M + N - 1).
    #[test]
    fn gpipe_and_1f1b_take_what_was_published(
        devices in 1..=5_u32, per_stage in 1..=3_u32, more in 0..=8_u32,
        forward in 1..20_u64, backward in 1..40_u64,
    ) {
        let layers = devices * per_stage;
        let micro_batches = devices + more;
        let n = u64::from(devices);
        let m = u64::from(micro_batches);
        let expected = (m + n - 1) * u64::from(per_stage) * (forward + backward);
        for kind in ["gpipe", "1f1b"] {
            let order = made(kind, devices, 1, micro_batches);
            let schedule = schedule_of(&order, layers, micro_batches);
            prop_assert_eq!(makespan(schedule, forward, backward), expected, "{}", kind);
        }
    }

    /// Interleaved with V chunks and rounds of N micro-batches: a V-th of that bubble.
    #[test]
    fn interleaved_takes_what_was_published(
        devices in 1..=4_u32, chunks in 2..=3_u32, rounds in 1..=4_u32, per_stage in 1..=2_u32,
        unit in 1..20_u64, factor in 1..=3_u64,
    ) {
        let layers = devices * chunks * per_stage;
        let micro_batches = devices * rounds;
        let forward = unit;
        let backward = factor * unit;
        let n = u64::from(devices);
        let m = u64::from(micro_batches);
        let v = u64::from(chunks);
        let stage = u64::from(per_stage) * (forward + backward);
        let order = made("interleaved", devices, chunks, micro_batches);
        let schedule = schedule_of(&order, layers, micro_batches);
        prop_assert_eq!(makespan(schedule, forward, backward), (m * v + n - 1) * stage);
    }

    /// A relay that was written to a table and read from it takes as long as the relay.
    #[test]
    fn a_table_of_a_relay_runs_as_the_relay(
        devices in 1..=4_u32, layers in 4..=8_u32, micro_batches in 1..=6_u32,
        forward in 1..20_u64, backward in 1..40_u64,
    ) {
        let model = stack(layers);
        let dealt = relay(&model, &everything(&model, micro_batches)).expect("a model of ours");
        let dealt = deal(dealt, devices);
        let table = Pipeline::of(&dealt).to_string();
        let order = Pipeline::parse(&table).expect("a table of ours");
        let again = schedule_of(&order, layers, micro_batches);
        prop_assert_eq!(
            makespan(again, forward, backward),
            makespan(dealt, forward, backward)
        );
    }
}

/// The most micro-batches that have been through a device's forward and not through its backward.
#[test]
fn one_forward_one_backward_keeps_as_many_micro_batches_as_devices_follow() {
    let kept = |order: &Pipeline| -> Vec<i64> {
        let of_device = |actions: &Vec<l2l_actors::schedule::Action>| {
            let mut now = 0;
            let mut most = 0;
            for action in actions {
                let forward = action.phase == l2l_actors::schedule::Phase::Forward;
                now += if forward { 1 } else { -1 };
                most = most.max(now);
            }
            most
        };
        order.devices.iter().map(of_device).collect()
    };
    assert_eq!(kept(&made("gpipe", 4, 1, 16)), [16, 16, 16, 16]);
    assert_eq!(kept(&made("1f1b", 4, 1, 16)), [4, 3, 2, 1]);
}

#[test]
fn tables_that_cannot_run_are_refused() {
    let refusal = |table: &str| -> String {
        let order = match Pipeline::parse(table) {
            Ok(order) => order,
            Err(refusal) => return refusal.reason,
        };
        let model = stack(4);
        let made = pipeline(&model, &everything(&model, 2), &order);
        made.expect_err("it cannot run").reason
    };
    for (table, says) in [
        ("", "at least one stage, not 0 and 0"),
        ("0F0,0F1", "0B0 is missing"),
        ("0F0,0F1,0X0,0B1", "row 1, place 3: \"0X0\""),
        ("0F0\n1F0,1B-1", "row 2, place 2: \"1B-1\""),
        ("99999999999F0", "row 1, place 1"),
        ("0F0,0F1,0B0,0B1,0B2", "0B2 comes where micro-batch 2 would, of 2"),
        ("0F1,0F0,0B0,0B1", "0F1 comes where micro-batch 0 would"),
        ("0F0,0F0,0B0,0B1", "0F0 comes where micro-batch 1 would"),
        ("0F0,0F1,0B0", "0B1 is missing"),
        ("0F0,0F1,0I0,0I1,0W0,0W1", "a backward pass is not split in I and W"),
        ("0F0,0F1,0B0,0B1\n2F0,2F1,2B0,2B1", "1F0 is missing"),
        ("0F0,0F1,0B0,0B1,1F0\n1F0,1F1,1B0,1B1", "1F0 comes where micro-batch 1 would"),
        (
            "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1",
            "the pipeline cannot end: device 0 waits with 0B0 for 1B0, device 1 waits with 1F1 for \
             0F1",
        ),
        (
            "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n2F0,2F1,2B0,2B1\n3F0,3F1,3B0,3B1\n4F0,4F1,4B0,4B1",
            "5 stages need as many layers; 4 are visited",
        ),
    ] {
        let found = refusal(table);
        assert!(found.contains(says), "{table:?}: {found}");
    }
    let uneven = Pipeline::interleaved(2, 2, 5).expect_err("two rounds of five");
    assert!(uneven.reason.contains("multiple"), "{uneven}");
    let none = Pipeline::interleaved(0, 2, 5).expect_err("no device");
    assert!(none.reason.contains("a pipeline has devices"), "{none}");
    // Communication and empty places, as PyTorch writes them.
    let with_communication = "0UNSHARD,0F0,0SEND_F0,,0F1,0B0,0B1,0REDUCE_GRAD";
    let plain = "0F0,0F1,0B0,0B1";
    assert_eq!(Pipeline::parse(with_communication), Pipeline::parse(plain));
}

/// With the EPS on file, a device that runs ahead must not take the read slots that another needs.
#[test]
fn pipelines_run_from_file_with_few_slots() {
    for kind in ["gpipe", "1f1b", "interleaved"] {
        for (devices, micro_batches) in [(1, 1), (2, 1), (2, 4), (3, 1), (3, 3), (4, 4)] {
            let chunks = if kind == "1f1b" { 1 } else { 2 };
            let order = made(kind, devices, chunks, micro_batches);
            let model = on_file(model(13, 2, true));
            let schedule = pipeline(&model, &everything(&model, micro_batches), &order);
            let schedule = schedule.expect("a pipeline of ours");
            for weights in [1, 3, 1000] {
                let config = config(&schedule, &depths(weights, 1, 1, 1), false);
                let plan = StepPlan::new(schedule.clone(), config.pools);
                assert!(plan.is_ok(), "{kind} {devices} {micro_batches} {weights}: {plan:?}");
            }
        }
    }
}
