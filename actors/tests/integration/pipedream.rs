//! Windows of PipeDream: the table of versions, no deadlock in small pools, and what is refused.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::common::*;
use crate::deadlock::{config_of_cases, run_plan};
use crate::serial;
use l2l_actors::schedule::{
    BlockId, Capacities, LayerId, Phase, Piece, Pipeline, Place, Pools, Ranks, RingModel, Schedule,
    Selection, StepPlan, Visit, VisitKind, pipedream, pipeline,
};
use l2l_actors::virtual_time;
use l2l_actors::work::{Work, WorkKind};
use l2l_actors::{Relay, RingConfig};
use proptest::prelude::*;

/// A model with stack layers and tiles, and a window over it.
#[derive(Clone, Copy, Debug)]
struct Window {
    layers: u32,
    tiles: u32,
    stages: u32,
    devices: u32,
    batches: u32,
    /// Micro-batches of each batch.
    each: u32,
}

impl Window {
    /// Rows are gathered micro-batch by micro-batch, so those of batches of several are frozen.
    fn model(self) -> RingModel {
        let mut model = model(self.layers, self.tiles, false);
        let rows = model.layers[0].steps[0].needs.clone();
        rows.iter().for_each(|id| model.blocks[id.0 as usize].frozen = self.each > 1);
        model
    }

    fn selection(self, model: &RingModel) -> Selection {
        let mut selection = everything(model, self.batches * self.each);
        selection.set_groups(self.batches);
        selection
    }

    fn schedule(self) -> Schedule {
        let model = self.model();
        let selection = self.selection(&model);
        pipedream(&model, &selection, self.stages, self.devices).expect("a window of ours")
    }
}

const WINDOW: Window = Window { layers: 4, tiles: 0, stages: 4, devices: 4, batches: 7, each: 1 };

fn windows() -> impl Strategy<Value = Window> {
    (1..=5_u32, 0..=3_u32, 1..=8_u32, 1..=4_u32, 1..=6_u32, 1..=3_u32).prop_map(
        |(layers, tiles, stages, devices, batches, each)| {
            let stages = 1 + (stages - 1) % (layers + tiles);
            Window { layers, tiles, stages, devices, batches, each }
        },
    )
}

fn small() -> impl Strategy<Value = Capacities> {
    (1..=3_u32, 1..=3_u32, 1..=3_u32, 1..=4_u32)
        .prop_map(|(weights, gradients, reduced, stash)| depths(weights, gradients, reduced, stash))
}

/// The rule of the article: stage `s` of `n` reads with batch `j` the weights that lack the updates
/// of the last `n - 1 - s` batches before it.
#[test]
fn versions_are_those_of_the_article() {
    for stages in 1..=4 {
        let window = Window { stages, devices: stages, ..WINDOW };
        let schedule = window.schedule();
        let mut met = 0;
        for visit in &schedule.visits {
            let stage = match (visit.kind, visit.place) {
                (VisitKind::Gather, _) => 0,
                (_, Place::Device(device)) => u32::from(device),
                _ => continue,
            };
            let batch = visit.micro_batches.start;
            assert_eq!(visit.micro_batches, batch..batch + 1);
            let lacks = stages - 1 - stage;
            assert_eq!(visit.ahead, batch.saturating_sub(lacks), "batch {batch}, stage {stage}");
            met += 1;
        }
        assert_eq!(met, 7 * (2 * 4 + 1));
    }
    // The first stage has as many versions in use as batches are on their way.
    let pools = Pools::of(&WINDOW.schedule(), &depths(1, 1, 1, 1));
    assert_eq!(pools.weights, 4);
}

/// With several micro-batches, a batch reads what the batches before it have made when its first
/// one comes to the stage: by the order of 1F1B, followed here from its table.
#[test]
fn batches_of_several_micro_batches_read_what_is_ready() {
    for (stages, each) in [(2, 2), (3, 2), (4, 2), (4, 3), (4, 5)] {
        let window = Window { stages, devices: stages, each, ..WINDOW };
        let count = window.batches * each;
        let order = Pipeline::one_forward_one_backward(stages, count);
        let mut expected = BTreeMap::new();
        for (stage, actions) in (0..).zip(&order.devices) {
            let mut backward = 0;
            for action in actions {
                let batch = action.micro_batch / each;
                if action.phase == Phase::Forward {
                    expected.entry((stage, batch)).or_insert(backward / each);
                } else {
                    backward += 1;
                }
            }
        }
        for visit in window.schedule().device_visits() {
            let stage = visit.device().expect("a device");
            let batch = visit.micro_batches.start / each;
            assert_eq!(visit.ahead, expected[&(stage, batch)], "{stages} stages of {each}");
        }
    }
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
        window in windows(), depths in small(), seed in any::<u64>(),
        frozen in prop::collection::vec(0..9_u32, 0..3),
    ) {
        let model = window.model();
        let mut selection = window.selection(&model);
        let blocks = model.blocks.len() as u32;
        selection.frozen = frozen.iter().map(|id| BlockId(id % blocks)).collect();
        let made = pipedream(&model, &selection, window.stages, window.devices);
        let schedule = made.expect("a window of ours");
        let config = config(&schedule, &depths, false);
        let plan = StepPlan::new(schedule.clone(), config.pools).expect("pools made for it");
        let versions = run_plan(config, Arc::new(plan), seed, 3);
        let newest = if schedule.trains { 3 * u64::from(window.batches) } else { 0 };
        prop_assert_eq!(versions, Ok(vec![newest; blocks as usize]));
    }

    /// The same lists in pools that they were not made for.
    #[test]
    fn a_window_ends_where_the_replay_does(
        window in windows(), depths in small(), seed in any::<u64>(),
        less in (0..=3_u32, 0..=5_u32, 0..=4_u32, 0..=2_u32, 0..=1_u32),
    ) {
        let schedule = window.schedule();
        let full = config(&schedule, &depths, false);
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

    /// Pieces in another order: a wait for an update that comes behind the wait never ends.
    #[test]
    fn pieces_in_any_order_end_where_the_replay_does(
        window in windows(), depths in small(), seed in any::<u64>(), at in any::<(usize, usize)>(),
    ) {
        let schedule = window.schedule();
        let config = config(&schedule, &depths, false);
        let mut plan = StepPlan::new(schedule, config.pools).expect("pools were made for it");
        let walks = plan.walks.len();
        let pieces = &mut plan.walks[at.0 % walks].pieces;
        let weights = |piece: &Piece| {
            matches!(piece, Piece::Weights { .. })
        };
        let places: Vec<usize> = (1..pieces.len())
            .filter(|&place| weights(&pieces[place]) && !weights(&pieces[place - 1]))
            .collect();
        prop_assume!(!places.is_empty());
        let place = places[at.1 % places.len()];
        pieces.swap(place - 1, place);
        let replayed = plan.replay();
        let ran = run_plan(config, Arc::new(plan), seed, 1);
        prop_assert_eq!(replayed.is_ok(), ran.is_ok(), "{:?} and {:?}", replayed, ran);
    }

    /// A version that is not there yet, or that one pass alone names, is refused; whatever is not
    /// refused finds the versions that it names.
    #[test]
    fn wrong_versions_are_refused(
        window in windows(), depths in small(), at in any::<usize>(), more in any::<bool>(),
        both in any::<bool>(), seed in any::<u64>(),
    ) {
        let mut schedule = window.schedule();
        let reads: Vec<usize> = (0..schedule.visits.len())
            .filter(|&index| {
                let visit = &schedule.visits[index];
                let gathers = visit.kind == VisitKind::Gather && window.each == 1;
                visit.on_device() || gathers
            })
            .collect();
        let changed = schedule.visits[reads[at % reads.len()]].clone();
        prop_assume!(more || changed.ahead > 0);
        let ahead = if more { changed.ahead + 1 } else { changed.ahead - 1 };
        let mut others = 0;
        for visit in &mut schedule.visits {
            let same = (visit.layer, visit.step) == (changed.layer, changed.step)
                && visit.micro_batches.start / window.each
                    == changed.micro_batches.start / window.each;
            if same && (both || *visit == changed) {
                visit.ahead = ahead;
            } else if same && visit.on_device() {
                others += 1;
            }
        }
        let config = config(&schedule, &depths, false);
        match StepPlan::new(schedule, config.pools) {
            Err(refusal) => {
                let known = ["before batch", "went forward", "uploads", "gathers from"];
                let is_known = known.iter().any(|text| refusal.reason.contains(text));
                prop_assert!(is_known, "{}", refusal);
            }
            Ok(plan) => {
                prop_assert!(!more);
                let passes = changed.kind != VisitKind::Gather && window.each == 1;
                prop_assert!(!(passes && !both && others > 0), "one pass alone was changed");
                prop_assert!(run_plan(config, Arc::new(plan), seed, 2).is_ok());
            }
        }
    }
}

#[test]
fn labels_tell_a_wrong_version() {
    let schedule = WINDOW.schedule();
    let config = config(&schedule, &Capacities::default(), false);
    labels_tell(schedule, config, 1);
}

/// An upload of another version than its visits need does not pass for theirs in any of these
/// steps: either the ring waits for ever, or a label tells.
pub(crate) fn labels_tell(schedule: Schedule, config: RingConfig, steps: u64) {
    let plan = StepPlan::new(schedule, config.pools).expect("pools were made for it");
    let mut changed = 0;
    for at in 0..plan.device_visits.len() {
        for more in [false, true] {
            let mut plan = plan.clone();
            let Some(residence) = plan.device_visits[at].residences.first_mut() else { continue };
            let other =
                if more { Some(residence.ahead + 1) } else { residence.ahead.checked_sub(1) };
            let Some(other) = other.filter(|_| residence.upload) else { continue };
            residence.ahead = other;
            let config = config.clone();
            let run = AssertUnwindSafe(|| run_plan(config, Arc::new(plan), at as u64, steps));
            assert!(!matches!(catch_unwind(run), Ok(Ok(_))), "device visit {at}, {other} ahead");
            changed += 1;
        }
    }
    assert!(changed > 20);
}

#[test]
fn a_window_does_the_work_of_the_serial_walk() {
    for (stages, devices, each) in [(1, 1, 1), (4, 1, 1), (4, 2, 1), (4, 4, 1), (3, 2, 2)] {
        serial::check(Window { stages, devices, each, ..WINDOW }.schedule(), false);
    }
}

/// Nothing waits for the end of a batch: a window takes as long as one step of 1F1B with as many
/// micro-batches, if nothing but visits takes time, and they take the same.
#[test]
fn a_window_has_one_bubble() {
    let period = |schedule: Schedule| {
        let config = config(&schedule, &depths(16, 16, 16, 64), false);
        let times = |operation: &l2l_actors::Operation| match operation.work().row().kind {
            WorkKind::Forward | WorkKind::Backward => ticks(4),
            _ => ticks(0),
        };
        let run = virtual_time::run(config, times, async move |mut relay| {
            let observer = relay.observer();
            step_of(&mut relay, &schedule, ()).await.expect("nothing fails here");
            let end = observer.now();
            relay.stop().await.expect("nothing fails here");
            end.as_nanos() as u64
        });
        run.expect("it ends").0
    };
    for (stages, batches) in [(1, 4), (2, 5), (4, 7)] {
        let window = Window { layers: stages, stages, devices: stages, batches, ..WINDOW };
        assert_eq!(period(window.schedule()), u64::from(batches + stages - 1) * 8);
    }
}

/// The last stage has no delay: each of its batches waits for a download, an update and an upload.
/// Two stages on as many devices hide that of the first stage.
#[test]
fn the_last_stage_waits_for_its_updates() {
    let window = Window { layers: 2, stages: 2, devices: 2, batches: 5, ..WINDOW };
    let schedule = window.schedule();
    let config = config(&schedule, &depths(4, 4, 4, 16), false);
    let times = |operation: &l2l_actors::Operation| match operation.work() {
        Work::Compute { .. } => ticks(4),
        Work::Update { .. } => ticks(10),
        Work::UploadBlock { .. } | Work::DownloadGradient { .. } => ticks(1),
        _ => ticks(0),
    };
    let run = virtual_time::run(config, times, async move |mut relay: Relay<_>| {
        step_of(&mut relay, &schedule, ()).await.expect("nothing fails here");
        relay.stop().await.expect("nothing fails here");
    });
    let (_, records) = run.expect("it ends");
    let begins: Vec<u64> = records
        .iter()
        .filter(|record| record.device == Some(1) && record.work.row().kind == WorkKind::Forward)
        .map(|record| record.begin.as_nanos() as u64)
        .collect();
    // Forward, backward, download, update (behind that of the first stage), upload.
    let round_trip = 4 + 4 + 1 + 10 + 1;
    assert!(begins.windows(2).all(|pair| pair[1] - pair[0] >= round_trip), "{begins:?}");
}

/// A step between that does not train reads the newest version, and makes none.
#[test]
fn versions_count_batches() {
    let model = WINDOW.model();
    let selection = WINDOW.selection(&model);
    let trains = WINDOW.schedule();
    let mut evaluates = selection.clone();
    evaluates.frozen = (0..model.blocks.len() as u32).map(BlockId).collect();
    let order = Pipeline::one_forward_one_backward(4, 7).forward_only(7);
    let evaluates = pipeline(&model, &evaluates, &order).expect("a pipeline of ours");
    let pools = Pools::of(&trains, &Capacities::default());
    let pools = pools.max(Pools::of(&evaluates, &Capacities::default()));
    let config = RingConfig { pools, ..config(&trains, &Capacities::default(), false) };
    let order = [trains.clone(), evaluates.clone(), evaluates, trains];
    let run = virtual_time::run(
        config,
        |_| ticks(1),
        async move |mut relay| {
            let mut newest = Vec::new();
            for schedule in &order {
                let resolved = step_of(&mut relay, schedule, ()).await.expect("nothing fails here");
                newest.push((relay.newest(), resolved.loss));
            }
            relay.stop().await.expect("nothing fails here");
            newest
        },
    );
    let (newest, _) = run.expect("it ends");
    assert_eq!(newest, [(7, 7.0), (7, 7.0), (7, 7.0), (14, 7.0)]);
}

#[track_caller]
fn refused(reason: &str, change: impl Fn(&mut Schedule)) {
    let mut schedule = WINDOW.schedule();
    let pools = Pools::of(&schedule, &Capacities::default());
    assert!(StepPlan::new(schedule.clone(), pools).is_ok());
    change(&mut schedule);
    let refusal = StepPlan::new(schedule, pools).expect_err("a rule is broken");
    assert!(refusal.reason.contains(reason), "{refusal}");
}

#[test]
fn what_a_window_cannot_have_is_refused() {
    refused("a scatter takes all micro-batches of the step", |s| s.in_batches = false);
    let model = WINDOW.model();
    let order = Pipeline::one_forward_one_backward(4, 7);
    let mut whole = pipeline(&model, &WINDOW.selection(&model), &order).expect("a pipeline");
    let pools = Pools::of(&whole, &Capacities::default());
    whole.visits[9].ahead = 1;
    let refusal = StepPlan::new(whole, pools).expect_err("it has no batches");
    assert!(refusal.reason.contains("the step is not in batches"), "{refusal}");

    refused("in batches without a block that trains", |s| s.trains = false);
    refused("in batches of several processes", |s| s.ranks = Ranks { count: 2, dealt: true });
    refused("in batches with blocks on file", |s| s.blocks[2].staged = true);
    // A block of two layers.
    refused("layer 2 forward: needs block 1, as layer 1 does", |s| {
        let of_second = |visit: &&mut Visit| visit.layer == LayerId(2);
        s.visits.iter_mut().filter(of_second).for_each(|visit| {
            if visit.phase == Phase::Forward {
                visit.blocks.push(BlockId(1));
            }
        });
    });
    // A layer whose batches go to two devices by turns.
    refused("on another device than visits before it", |s| {
        let of_batch =
            |visit: &&mut Visit| visit.layer == LayerId(2) && visit.micro_batches.start == 3;
        let visits = s.visits.iter_mut().filter(of_batch);
        visits.for_each(|visit| visit.place = Place::Device(0));
    });
    // Rows of two batches at once.
    refused("has rows of batches [0, 1]", |s| {
        let is_gather = |visit: &Visit| visit.kind == VisitKind::Gather;
        let second =
            s.visits.iter().position(|visit| is_gather(visit) && visit.micro_batches.start == 1);
        s.visits.remove(second.expect("one"));
        let first = s.visits.iter_mut().find(|visit| is_gather(visit));
        first.expect("one").micro_batches = 0..2;
    });
    // Too few slots for the versions in use.
    let schedule = WINDOW.schedule();
    let pools = Pools { weights: 3, ..Pools::of(&schedule, &Capacities::default()) };
    let refusal = StepPlan::new(schedule, pools).expect_err("a version would have to come again");
    assert!(refusal.reason.contains("a slot for each version in use, here 4"), "{refusal}");
    let objective = aiming(WINDOW.model(), false);
    let made = pipedream(&objective, &WINDOW.selection(&objective), 4, 4).expect("a schedule");
    let pools = Pools::of(&made, &Capacities::default());
    let refusal = StepPlan::new(made, pools).expect_err("an objective");
    assert!(refusal.reason.contains("with a balance or an objective"), "{refusal}");
}

/// Updates inside a step cannot wait for its norm, and need no delay.
#[test]
fn rings_whose_updates_wait_refuse_windows() {
    let schedule = WINDOW.schedule();
    for (deferred, delay_from, says) in [
        (true, None, "wait for the norm of all its gradients"),
        (true, Some(0), "wait for the norm of all its gradients"),
        (false, Some(0), "a lag of 0 needs a ring with delay_from None, and this one has Some(0)"),
    ] {
        let ring = config(&schedule, &Capacities::default(), deferred);
        let ring = RingConfig { delay_from, ..ring };
        let schedule = schedule.clone();
        let run = virtual_time::run(
            ring,
            |_| ticks(1),
            async move |relay| relay.plan(schedule).expect_err("it waits").reason,
        );
        let (reason, _) = run.expect("it ends");
        assert!(reason.contains(says), "{reason}");
    }
}
