//! Windows of PipeDream-2BW: each batch lacks one update, no deadlock in small pools, what is
//! refused, and the time that windows save.

use std::sync::Arc;

use crate::common::*;
use crate::deadlock::{config_of_cases, run_plan};
use crate::pipedream::labels_tell;
use crate::serial;
use l2l_actors::schedule::{
    BlockId, Capacities, Pipeline, Pools, Schedule, StepPlan, Version, VisitKind, pipedream_2bw,
    pipeline,
};
use l2l_actors::virtual_time;
use l2l_actors::work::{Work, WorkKind};
use l2l_actors::{Operation, RingConfig};
use proptest::prelude::*;

/// A model with stack layers and tiles, and a window over it. Its rows train.
#[derive(Clone, Copy, Debug)]
struct Case {
    layers: u32,
    tiles: u32,
    stages: u32,
    devices: u32,
    batches: u32,
    /// Micro-batches of each batch.
    each: u32,
}

const CASE: Case = Case { layers: 4, tiles: 0, stages: 4, devices: 4, batches: 5, each: 3 };

impl Case {
    fn made(self, frozen: Vec<BlockId>) -> Schedule {
        let model = model(self.layers, self.tiles, false);
        let mut selection = everything(&model, self.batches * self.each);
        selection.set_groups(self.batches);
        selection.frozen = frozen;
        let made = pipedream_2bw(&model, &selection, self.stages, self.devices);
        made.expect("a window of ours")
    }

    fn schedule(self) -> Schedule {
        self.made(Vec::new())
    }
}

/// Pools for a window in a ring that keeps two versions of each block.
fn ring(schedule: &Schedule, depths: &Capacities) -> RingConfig {
    let delay_from = (schedule.lag > 0).then_some(0);
    RingConfig { delay_from, ..config(schedule, depths, false) }
}

fn cases() -> impl Strategy<Value = Case> {
    (1..=5_u32, 0..=3_u32, 1..=6_u32, 1..=4_u32, 1..=5_u32, 0..=2_u32).prop_map(
        |(layers, tiles, stages, devices, batches, more)| {
            let stages = 1 + (stages - 1) % (layers + tiles);
            let each = (stages - 1).max(1) + more;
            Case { layers, tiles, stages, devices, batches, each }
        },
    )
}

fn small() -> impl Strategy<Value = Capacities> {
    (1..=3_u32, 1..=3_u32, 1..=3_u32, 1..=4_u32)
        .prop_map(|(weights, gradients, reduced, stash)| depths(weights, gradients, reduced, stash))
}

/// The rule of the article: in all stages, batch `t` reads the weights with the updates of all
/// batches before it but the last. Windows change nothing about it.
#[test]
fn each_batch_lacks_one_update() {
    for devices in [1, 4] {
        let schedule = Case { devices, ..CASE }.schedule();
        let config = ring(&schedule, &depths(2, 1, 1, 2));
        let run = virtual_time::run(
            config,
            |_| ticks(1),
            async move |mut relay| {
                for _ in 0..3 {
                    step_of(&mut relay, &schedule, ()).await.expect("nothing fails here");
                }
                relay.stop().await.expect("nothing fails here");
            },
        );
        let (_, records) = run.expect("it ends");
        let plan = |step: u64| u64::from(CASE.batches) * step;
        let mut met = 0;
        for record in &records {
            let Work::UploadBlock { version, .. } = record.work else { continue };
            // Uploads name versions; visits name batches. Those of a step are `batches` versions.
            let base = plan(record.step);
            let all = base.saturating_sub(1)..base + u64::from(CASE.batches) - 1;
            assert!(all.contains(&version), "step {}: v{version}", record.step);
            met += 1;
        }
        assert!(met >= 3 * 5 * 4);
    }
    let schedule = CASE.schedule();
    let reads = schedule.visits.iter().filter(|v| v.on_device() || v.kind == VisitKind::Gather);
    reads.for_each(|visit| assert_eq!(visit.ahead, visit.micro_batches.start / CASE.each));
    assert_eq!((schedule.lag, schedule.batches()), (1, CASE.batches));
}

/// A window has many operations, so there are fewer cases.
fn config_of_windows() -> ProptestConfig {
    ProptestConfig { cases: config_of_cases().cases / 5, ..config_of_cases() }
}

proptest! {
    #![proptest_config(config_of_windows())]

    /// The oracle of memory checks the version of each upload, visit, gather and update.
    #[test]
    fn every_window_ends_in_any_order(
        case in cases(), depths in small(), seed in any::<u64>(),
        frozen in prop::collection::vec(0..9_u32, 0..3),
    ) {
        let blocks = case.schedule().blocks.len() as u32;
        let schedule = case.made(frozen.iter().map(|id| BlockId(id % blocks)).collect());
        let config = ring(&schedule, &depths);
        let plan = StepPlan::new(schedule.clone(), config.pools).expect("pools made for it");
        let versions = run_plan(config, Arc::new(plan), seed, 3);
        let newest = if schedule.trains { 3 * Version::from(case.batches) } else { 0 };
        prop_assert_eq!(versions, Ok(vec![newest; blocks as usize]));
    }

    /// The same lists in pools that they were not made for.
    #[test]
    fn a_window_ends_where_the_replay_does(
        case in cases(), depths in small(), seed in any::<u64>(),
        less in (0..=3_u32, 0..=5_u32, 0..=4_u32, 0..=2_u32, 0..=1_u32),
    ) {
        let schedule = case.schedule();
        let full = ring(&schedule, &depths);
        let mut plan = StepPlan::new(schedule, full.pools).expect("pools were made for it");
        plan.pools = Pools {
            visits: full.pools.visits.saturating_sub(less.0).max(1),
            inputs: full.pools.inputs.saturating_sub(less.1),
            outputs: full.pools.outputs.saturating_sub(less.2),
            gradients: full.pools.gradients.saturating_sub(less.3),
            reduced: full.pools.reduced.saturating_sub(less.4).max(1),
            ..full.pools
        };
        let replayed = plan.replay();
        let config = RingConfig { pools: plan.pools, ..full };
        let ran = run_plan(config, Arc::new(plan), seed, 1);
        prop_assert_eq!(replayed.is_ok(), ran.is_ok(), "{:?} and {:?}", replayed, ran);
    }

    /// A version that is not there yet, or not any more, is refused; whatever is not refused finds
    /// the versions that it names.
    #[test]
    fn wrong_versions_are_refused(
        case in cases(), depths in small(), at in any::<usize>(), more in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let mut schedule = case.schedule();
        let visits = schedule.visits.iter().filter(|visit| visit.on_device());
        let all: Vec<_> = visits.map(|v| (v.layer, v.step, v.ahead)).collect();
        let (layer, step, batch) = all[at % all.len()];
        prop_assume!(more || batch > 0);
        let of_batch = schedule.visits.iter_mut().filter(|visit| {
            visit.on_device() && (visit.layer, visit.step, visit.ahead) == (layer, step, batch)
        });
        of_batch.for_each(|visit| visit.ahead = if more { batch + 1 } else { batch - 1 });
        let config = ring(&schedule, &depths);
        match StepPlan::new(schedule, config.pools) {
            Err(refusal) => {
                let is_known = ["before batch", "uploads"].iter().any(|text| {
                    refusal.reason.contains(text)
                });
                prop_assert!(is_known, "{}", refusal);
            }
            Ok(plan) => prop_assert!(run_plan(config, Arc::new(plan), seed, 2).is_ok()),
        }
    }
}

/// Before the first batch of a run there is no older version, so there are two steps.
#[test]
fn labels_tell_a_wrong_version() {
    let schedule = CASE.schedule();
    let config = ring(&schedule, &Capacities::default());
    labels_tell(schedule, config, 2);
}

#[test]
fn a_window_does_the_work_of_the_serial_walk() {
    for (stages, devices, each) in [(1, 1, 1), (4, 1, 3), (4, 2, 3), (4, 4, 4), (2, 2, 1)] {
        serial::check(Case { stages, devices, each, ..CASE }.schedule(), false);
    }
}

/// Ticks until all of these steps have ended, if a visit takes four and an update so many.
fn makespan(schedule: &Schedule, config: RingConfig, steps: u32, update: u64) -> u64 {
    let times = move |operation: &Operation| match operation.work().row().kind {
        WorkKind::Forward | WorkKind::Backward => ticks(4),
        WorkKind::Update => ticks(update),
        _ => ticks(0),
    };
    let schedule = schedule.clone();
    let run = virtual_time::run(config, times, async move |mut relay| {
        let observer = relay.observer();
        for _ in 0..steps {
            step_of(&mut relay, &schedule, ()).await.expect("nothing fails here");
        }
        let end = observer.now();
        relay.stop().await.expect("nothing fails here");
        end.as_nanos() as u64
    });
    run.expect("it ends").0
}

/// A window has one bubble. Steps of 1F1B with the same delay, which compute the same, have one
/// each.
#[test]
fn windows_save_the_bubbles_of_1f1b() {
    let wide = depths(16, 16, 16, 64);
    for (stages, batches, each) in [(2, 5, 1), (2, 5, 4), (4, 7, 3), (4, 7, 8)] {
        let case = Case { layers: stages, tiles: 0, stages, devices: stages, batches, each };
        let window = case.schedule();
        let in_window = makespan(&window, ring(&window, &wide), 1, 0);
        assert_eq!(in_window, u64::from(batches * each + stages - 1) * 8);
        let model = model(stages, 0, false);
        let order = Pipeline::one_forward_one_backward(stages, each);
        let flushed = pipeline(&model, &everything(&model, each), &order).expect("a pipeline");
        let delayed = RingConfig { delay_from: Some(0), ..config(&flushed, &wide, true) };
        let in_steps = makespan(&flushed, delayed, batches, 0);
        assert_eq!(in_steps, u64::from(batches * (each + stages - 1)) * 8);
        assert!(in_window < in_steps);
    }
}

/// An update has the time of a batch to hide in, less that of the stages behind the first one. The
/// host updates four blocks and the rows, one behind the other. Behind the last batch those of the
/// first stage and of the rows are shown.
#[test]
fn updates_hide_behind_the_next_batch() {
    let of = |each, update| {
        let case = Case { each, ..CASE };
        let schedule = case.schedule();
        let bubble = u64::from(case.batches * each + case.stages - 1) * 8;
        makespan(&schedule, ring(&schedule, &depths(16, 16, 16, 64)), 1, update) - bubble
    };
    assert_eq!(of(8, 4), 2 * 4);
    assert!(of(3, 4) > 2 * 4 && of(8, 40) > 2 * 40);
}

#[test]
fn what_a_window_cannot_have_is_refused() {
    let few = Case { each: 2, ..CASE }.schedule();
    let pools = Pools::of(&few, &Capacities::default());
    let refusal = StepPlan::new(few, pools).expect_err("the first stage would wait for ever");
    assert!(refusal.reason.contains("behind 1 updates, before batch 0 has gone"), "{refusal}");
    // One slot is enough: the host has both versions, so that a block may come again.
    let schedule = CASE.schedule();
    let pools = Pools::of(&schedule, &depths(1, 1, 1, 1));
    assert_eq!(pools.weights, 1);
    assert!(StepPlan::new(schedule.clone(), pools).is_ok());
    // Another lag, or one of a step that is not in batches.
    let frozen = (0..schedule.blocks.len() as u32).map(BlockId).collect();
    for (lag, other) in [(2, schedule), (1, CASE.made(frozen))] {
        let other = Schedule { lag, ..other };
        let pools = Pools::of(&other, &Capacities::default());
        let refusal = StepPlan::new(other, pools).expect_err("no ring has such versions");
        assert!(refusal.reason.contains(&format!("has a lag of {lag}: it is 0 or 1")), "{refusal}");
    }
}

/// Updates inside a step cannot wait for its norm, and a ring without a delay keeps one version.
#[test]
fn rings_for_other_steps_refuse_windows() {
    let schedule = CASE.schedule();
    for (deferred, delay_from, says) in [
        (true, Some(0), "wait for the norm of all its gradients"),
        (false, None, "a lag of 1 needs a ring with delay_from Some(0), and this one has None"),
        (false, Some(3), "this one has Some(3)"),
    ] {
        let ring = config(&schedule, &Capacities::default(), deferred);
        let ring = RingConfig { delay_from, ..ring };
        let schedule = schedule.clone();
        let run = virtual_time::run(
            ring,
            |_| ticks(1),
            async move |relay| relay.plan(schedule).expect_err("another ring").reason,
        );
        let (reason, _) = run.expect("it ends");
        assert!(reason.contains(says), "{reason}");
    }
}
