//! Sequences in chunks: the order of their visits, the rules that keep it, the labels that would
//! show a wrong one, and the time that it takes on several devices.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::common::*;
use l2l_actors::schedule::{
    ALL_CHUNKS, BlockId, Capacities, LayerId, MicroBatch, Phase, Pipeline, Place, Pools, Refusal,
    RingModel, Role, Schedule, Selection, StepPlan, Visit, deal, deal_groups, pipeline, relay,
    resident,
};
use l2l_actors::virtual_time;
use l2l_actors::work::WorkKind;
use l2l_actors::{Operation, Relay};
use proptest::prelude::*;

/// Two layers of which the first leaves keys; a single micro-batch, a run of two, another single,
/// and a run of three.
fn mixed() -> (RingModel, Selection) {
    let model = attending(model(2, 0, false), |number| number == 1);
    let selection = in_chunks(&model, &[1, 2, 1, 3]);
    (model, selection)
}

/// The backward visits of a layer, each with its micro-batches in their order.
pub(crate) fn backward(schedule: &Schedule, layer: u32) -> Vec<(Phase, Vec<MicroBatch>)> {
    let of_layer = |visit: &&Visit| visit.layer == LayerId(layer) && visit.phase.is_backward();
    let visits = schedule.device_visits().filter(of_layer);
    visits.map(|visit| (visit.phase, schedule.units(visit).collect())).collect()
}

#[test]
fn runs_go_backward_behind_their_keys() {
    use Phase::{Backward, Keys};
    let (model, mut selection) = mixed();
    let schedule = relay(&model, &selection).expect("a model of ours");
    let plain = backward(&schedule, 2);
    assert_eq!(plain, [(Backward, vec![0, 2, 1, 3, 6, 5, 4])]);
    let expected = [
        (Backward, vec![0]),
        (Keys, vec![1]),
        (Backward, vec![2, 1, 3]),
        (Keys, vec![4, 5]),
        (Backward, vec![6, 5, 4]),
    ];
    assert_eq!(backward(&schedule, 1), expected);
    let ascending: Vec<MicroBatch> = (0..7).collect();
    for visit in schedule.visits.iter().filter(|visit| !visit.on_device()) {
        assert_eq!(schedule.units(visit).collect::<Vec<_>>(), ascending, "{visit:?}");
    }
    let forward = schedule.device_visits().filter(|visit| visit.phase == Phase::Forward);
    for visit in forward {
        assert_eq!(schedule.units(visit).collect::<Vec<_>>(), ascending, "{visit:?}");
    }
    // What it reads is the input alone, also if the layer saves activations.
    let saved = saving(model.clone(), |_| true);
    for model in [&model, &saved] {
        let schedule = relay(model, &selection).expect("a model of ours");
        let keys = schedule.device_visits().find(|visit| visit.phase == Keys).expect("a run");
        let roles: Vec<Role> = keys.all_reads().map(|id| schedule.boundary(id).role).collect();
        assert_eq!(roles, [Role::Hidden]);
        assert_eq!(keys.blocks, [BlockId(1)]);
        assert_eq!(keys.all_writes().count(), 0);
    }
    // Two groups, each of two sequences.
    selection.set_groups(2);
    let schedule = relay(&model, &selection).expect("a model of ours");
    assert_eq!(schedule.groups, [0..3, 3..7]);
    assert_eq!(backward(&schedule, 2), [(Backward, vec![0, 2, 1]), (Backward, vec![3, 6, 5, 4])]);
    // An evaluation has no backward pass, and no keys again.
    selection.frozen = (0..model.blocks.len() as u32).map(BlockId).collect();
    let evaluation = relay(&model, &selection).expect("a model of ours");
    assert!(evaluation.visits.iter().all(|visit| visit.phase == Phase::Forward));
}

/// A layer of two steps, of which the first leaves keys: what the steps share stays on the device,
/// and the keys are computed from it.
#[test]
fn the_step_that_leaves_keys_has_them_again() {
    let mut two = attending(model(3, 2, false), |_| true);
    let layer = &mut two.layers[2];
    let mut feed = layer.steps[0].clone();
    feed.needs = vec![BlockId(two.blocks.len() as u32)];
    feed.reads.push(input(Role::Own(0), Role::OwnGradient(0)));
    feed.reach = 0;
    layer.steps[0].writes = vec![boundary(Role::Own(0))];
    layer.steps.push(feed);
    two.blocks.push(two.blocks[1]);
    let selection = in_chunks(&two, &[3, 2]);
    let schedule = relay(&two, &selection).expect("a model of ours");
    let of_layer = |visit: &&Visit| visit.layer == LayerId(2) && visit.phase.is_backward();
    let visits: Vec<&Visit> = schedule.device_visits().filter(of_layer).collect();
    let order: Vec<_> = visits.iter().map(|visit| (visit.step, visit.phase)).collect();
    let of_first = [(0, Phase::Keys), (0, Phase::Backward)];
    assert_eq!(order, [&[(1, Phase::Backward)][..], &of_first, &of_first].concat());
    let roles = |keys: &Visit| -> Vec<Role> {
        keys.kept.iter().map(|&id| schedule.boundary(id).role).collect()
    };
    assert_eq!((roles(visits[1]), visits[1].reads.len()), (vec![Role::Hidden], 0));
    for schedule in [schedule.clone(), deal(schedule, 2)] {
        for deferred in [false, true] {
            ends(&schedule, &depths(1, 1, 1, 1), deferred);
        }
    }
}

/// Runs two steps, in which every operation finds what it asks for.
pub(crate) fn ends(schedule: &Schedule, depths: &Capacities, deferred: bool) {
    let config = config(schedule, depths, deferred);
    let plan = StepPlan::new(schedule.clone(), config.pools).expect("pools were made for it");
    assert!(steps(Arc::new(plan), deferred).is_ok());
}

/// Two steps of a plan. The panic of an operation that finds something else than it asks for is an
/// error.
pub(crate) fn steps(plan: Arc<StepPlan>, deferred: bool) -> Result<u64, String> {
    let mut config = config(&plan.schedule, &Capacities::default(), deferred);
    config.pools = plan.pools;
    let main = async move |mut relay: Relay<_>| {
        for _ in 0..2 {
            relay.step(plan.clone(), ()).await.expect("nothing fails here");
        }
        relay.stop().await.expect("nothing fails here");
    };
    let run = || virtual_time::run(config, |_: &Operation| ticks(1), main);
    let run = catch_unwind(AssertUnwindSafe(run)).map_err(|panic| {
        panic.downcast_ref::<String>().cloned().unwrap_or_else(|| "another panic".into())
    })?;
    let (_, records) = run.map_err(|tasks| format!("{tasks:?} wait"))?;
    Ok(records.len() as u64)
}

/// Two layers that leave keys, a run of three, one of two. Visits: 0 gather, 1 and 2 forward,
/// 3 loss, then of layer 2: 4 keys and 5 back of the first run, 6 and 7 of the second; of layer 1:
/// 8 to 11; 12 scatter.
fn sound() -> Schedule {
    let model = attending(model(2, 0, false), |_| true);
    relay(&model, &in_chunks(&model, &[3, 2])).expect("a model of ours")
}

fn refusal(change: impl Fn(&mut Schedule)) -> Refusal {
    let two_devices = deal(sound(), 2);
    let pools = Pools::of(&two_devices, &Capacities::default());
    assert!(StepPlan::new(sound(), pools).is_ok());
    let mut schedule = sound();
    change(&mut schedule);
    StepPlan::new(schedule, pools).expect_err("a rule is broken")
}

#[track_caller]
fn refused(at: Option<usize>, reason: &str, change: impl Fn(&mut Schedule)) {
    let refusal = refusal(change);
    assert_eq!(refusal.visit, at, "{refusal}");
    assert!(refusal.reason.contains(reason), "{refusal}");
}

#[test]
fn runs_are_apart_and_inside_a_group() {
    refused(None, "begins before the run in front of it ends", |s| s.runs = vec![0..3, 2..5]);
    refused(None, "begins before the run in front of it ends", |s| s.runs.reverse());
    refused(None, "has less than two chunks", |s| s.runs = vec![0..1; 1]);
    let backward = Range { start: 3, end: 0 };
    refused(None, "has less than two chunks", move |s| s.runs = vec![backward.clone()]);
    refused(None, "ends behind the last", |s| s.runs = vec![0..3, 3..9]);
    refused(None, "run 0..3 lies in two groups", |s| s.groups = vec![0..2, 2..5]);
}

#[test]
fn a_visit_cuts_no_run() {
    // Two chunks swapped, in a visit for each.
    refused(Some(1), "meets 1, expected 0", |s| {
        let one = |m: u32, s: &Schedule| s.visits[1].of_micro_batches(m..m + 1);
        let swapped = [one(1, s), one(0, s), s.visits[1].of_micro_batches(2..5)];
        s.visits.splice(1..2, swapped);
    });
    refused(Some(1), "has micro-batches 0..1, a part of run 0..3", |s| {
        let rest = s.visits[1].of_micro_batches(1..5);
        s.visits[1].micro_batches = 0..1;
        s.visits.insert(2, rest);
    });
    refused(Some(5), "meets 2, expected 3", |s| s.runs = vec![0..4; 1]);
}

#[test]
fn the_backward_pass_of_a_run_follows_its_keys() {
    let without = "run 0..3 at 0..3 without its keys: the visit before it on its device must \
                   compute those of 0..2";
    let unused = "the next visit of its device is not the backward pass of their run";
    refused(Some(4), without, |s| _ = s.visits.remove(4));
    // Of another run, of a part, of all chunks, of another layer, of other blocks.
    refused(Some(5), without, |s| s.visits[4].micro_batches = 3..4);
    refused(Some(5), without, |s| s.visits[4].micro_batches = 0..1);
    refused(Some(5), without, |s| s.visits[4].micro_batches = 0..3);
    refused(Some(5), without, |s| s.visits[4] = s.visits[8].clone());
    refused(Some(5), without, |s| s.visits[4].blocks = vec![BlockId(1)]);
    refused(Some(5), without, |s| s.visits[4].place = Place::Device(1));
    refused(Some(5), without, |s| s.visits[4].reads = vec![s.visits[1].reads[0]]);
    // Twice, before another layer's, at the end, and where no run begins.
    refused(Some(4), unused, |s| s.visits.insert(4, s.visits[4].clone()));
    refused(Some(6), unused, |s| s.visits.swap(7, 8));
    refused(Some(12), unused, |s| s.visits.insert(12, s.visits[10].clone()));
    refused(Some(4), unused, |s| {
        s.runs.remove(0);
    });
    // Two runs in one visit, behind the keys of the first.
    refused(Some(5), "has run 3..5 behind other micro-batches", |s| {
        s.visits[5].micro_batches = 0..5;
        s.visits.drain(6..8);
    });
    refused(Some(4), unused, |s| s.visits[5].reach = 0);
}

#[test]
fn keys_are_of_layers_and_of_their_inputs() {
    let layers = "leaves keys on a device, and visits no layer of the stack";
    refused(Some(0), layers, |s| s.visits[0].reach = 1);
    refused(Some(12), layers, |s| s.visits[12].phase = Phase::Keys);
    refused(Some(4), "computes keys from no boundary", |s| s.visits[4].reads.clear());
}

#[test]
fn orders_by_micro_batch_take_sequences_whole() {
    let (model, selection) = mixed();
    let order = Pipeline::gpipe(2, 1, 7);
    let refused = [
        resident(&model, &selection).expect_err("one micro-batch after another"),
        pipeline(&model, &selection, &order).expect_err("one micro-batch after another"),
    ];
    for refusal in refused {
        assert!(refusal.reason.contains("takes sequences whole, and run 1..3"), "{refusal}");
        assert!(refusal.reason.contains("use the relay"), "{refusal}");
    }
    let twice = Selection { runs: vec![0..3, 2..4], ..selection.clone() };
    assert!(relay(&model, &twice).expect_err("runs overlap").reason.contains("begins before"));
    // A table of the relay has its passes without keys, and no pipeline takes it.
    let schedule = relay(&model, &selection).expect("a model of ours");
    let table = Pipeline::of(&schedule);
    assert!(table.to_string().ends_with("1B6,1B5,1B4,0B0,0B2,0B1,0B3,0B6,0B5,0B4\n"), "{table}");
    let whole = Selection { runs: Vec::new(), ..selection };
    assert!(pipeline(&model, &whole, &table).is_err());
    let mut of_keys = order;
    of_keys.devices[0][0].phase = Phase::Keys;
    let refusal = pipeline(&model, &whole, &of_keys).expect_err("keys are no pass");
    assert!(refusal.reason.contains("0K0 is no pass of a pipeline"), "{refusal}");
}

/// The labels are the oracle of the rules: these plans pass no rule, and run all the same.
#[test]
fn labels_show_runs_that_meet_on_a_device() {
    // Two layers by turns: each finds the keys of the other.
    let model = attending(model(2, 0, false), |_| true);
    let mut selection = in_chunks(&model, &[1, 1, 1]);
    selection.frozen = (0..model.blocks.len() as u32).map(BlockId).collect();
    let by_turns = resident(&model, &selection).expect("a model of ours");
    let planned = |schedule: &Schedule| {
        let pools = Pools::of(schedule, &Capacities::default());
        StepPlan::new(schedule.clone(), pools).expect("a schedule of ours")
    };
    let mut plan = planned(&by_turns);
    assert!(steps(Arc::new(plan.clone()), false).is_ok());
    plan.schedule.runs = vec![0..3; 1];
    let panic = steps(Arc::new(plan.clone()), false).expect_err("layer 2 used the region");
    assert!(panic.contains("asked, Keys(0, 0) holds") && panic.contains("LayerId(2)"), "{panic}");
    // On a device each, they do not meet.
    let mut plan = planned(&deal(by_turns, 2));
    plan.schedule.runs = vec![0..3; 1];
    assert!(steps(Arc::new(plan), false).is_ok());
    // Keys that nobody computes again, or that are another layer's.
    let sound = planned(&sound());
    assert!(steps(Arc::new(sound.clone()), false).is_ok());
    let changes: [fn(&mut Schedule); 3] =
        [|s| s.visits[4].reach = 0, |s| s.visits[4].layer = LayerId(1), |s| s.visits[4].step = 1];
    for change in changes {
        let mut plan = sound.clone();
        change(&mut plan.schedule);
        let panic = steps(Arc::new(plan), false).expect_err("its keys are missing");
        assert!(panic.contains("Keys(0, "), "{panic}");
    }
}

/// Ticks of an operation of one chunk.
#[derive(Clone, Copy, Debug)]
struct Costs {
    /// How many chunks before its own a chunk attends to.
    reach: u32,
    /// Of the products with weights, forward.
    linear: u64,
    /// Of attention to the chunk before, forward; half of that to the chunk itself.
    attention: u64,
    keys: u64,
    /// Backward, in forward passes.
    backward: u64,
}

impl Costs {
    /// Forward, of chunk `c` of its sequence.
    fn forward(self, c: u64) -> u64 {
        self.linear + self.attention * c.min(self.reach.into()) + self.attention / 2
    }
}

/// When a step of sequences in chunks ends, with layers dealt over devices: a list scheduler. An
/// operation begins when its device is free and what it reads is there.
fn list_scheduler(devices: usize, layers: usize, sequences: &[u32], costs: Costs) -> u64 {
    let mut free = vec![0; devices];
    let mut run = |layer: usize, ready: u64, ticks: u64| {
        let free: &mut u64 = &mut free[layer % devices];
        *free = ready.max(*free) + ticks;
        *free
    };
    // What each chunk has from the layer before.
    let mut there: Vec<Vec<u64>> = sequences.iter().map(|&k| vec![0; k as usize]).collect();
    for layer in 0..layers {
        for chunk in there.iter_mut().flat_map(|chunks| (0..).zip(chunks)) {
            let (c, there) = chunk;
            *there = run(layer, *there, costs.forward(c));
        }
    }
    for layer in (0..layers).rev() {
        for chunks in &mut there {
            let mut first = chunks.len() - 1; // of the keys that were computed
            for (c, there) in chunks.iter_mut().enumerate().rev() {
                let reached = c.saturating_sub(costs.reach as usize);
                for _ in reached..first {
                    run(layer, 0, costs.keys);
                }
                first = first.min(reached);
                *there = run(layer, *there, costs.backward * costs.forward(c as u64));
            }
        }
    }
    free.into_iter().max().expect("a device")
}

/// The same in the ring. Boundaries take `copies` ticks on their way, each way.
fn makespan(devices: u32, layers: u32, sequences: &[u32], costs: Costs, copies: u64) -> u64 {
    let model = reaching(model(layers, 0, false), |_| costs.reach);
    let schedule = relay(&model, &in_chunks(&model, sequences)).expect("a model of ours");
    let schedule = deal(schedule, devices);
    let config = config(&schedule, &depths(1000, 1000, 1000, 1000), false);
    let of_run = schedule.clone();
    let times = move |operation: &Operation| {
        let row = operation.work().row();
        let place = |m: u32| m - of_run.run_of(m).map_or(m, |run| run.start);
        let forward = row.micro_batch().map_or(0, |m| costs.forward(place(m).into()));
        ticks(match row.kind {
            WorkKind::Forward => forward,
            WorkKind::Backward => costs.backward * forward,
            WorkKind::Keys => costs.keys,
            WorkKind::Input | WorkKind::Output => copies,
            _ => 0,
        })
    };
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

    #[test]
    fn makespan_of_dealt_chunks_equals_the_list_schedulers(
        devices in 1..=5_u32, layers in 1..=12_u32,
        sequences in prop::collection::vec(1..=8_u32, 1..=4),
        (linear, attention, keys, backward) in (1..40_u64, 0..10_u64, 0..20_u64, 1..=4_u64),
        reach in prop::sample::select(vec![1, 2, 3, ALL_CHUNKS]),
    ) {
        let costs = Costs { reach, linear, attention, keys, backward };
        let expected = list_scheduler(devices as usize, layers as usize, &sequences, costs);
        prop_assert_eq!(makespan(devices, layers, &sequences, costs, 0), expected);
    }

    /// Groups are as equal as can be, and cut no run.
    #[test]
    fn groups_cut_no_run(
        sequences in prop::collection::vec(1..=4_u32, 1..=9), count in 1..=6_u32,
    ) {
        let model = attending(model(1, 0, false), |_| true);
        let mut selection = in_chunks(&model, &sequences);
        selection.set_groups(count);
        let schedule = relay(&model, &selection).expect("a model of ours");
        let sequences_of = |group: &Range<u32>| {
            group.clone().filter(|&m| schedule.run_of(m).is_none_or(|run| run.start == m)).count()
        };
        let sizes: Vec<usize> = schedule.groups.iter().map(sequences_of).collect();
        prop_assert_eq!(sizes.len(), sequences.len().min(count as usize));
        prop_assert_eq!(sizes.iter().sum::<usize>(), sequences.len());
        prop_assert!(sizes.iter().max().zip(sizes.iter().min()).is_some_and(|(a, b)| a - b < 2));
        for dealt in [deal(schedule.clone(), 3), deal_groups(schedule, &[1; 3])] {
            ends(&dealt, &depths(1, 1, 1, 1), false);
        }
    }

    /// Without runs, a layer that leaves keys has the visits of one that leaves none.
    #[test]
    fn without_runs_keys_change_nothing(
        layers in 1..=5_u32, tiles in 0..=2_u32, micro_batches in 1..=5_u32, groups in 1..=3_u32,
    ) {
        let base = model(layers, tiles, false);
        let of = |model: &RingModel| {
            let mut selection = everything(model, micro_batches);
            selection.set_groups(groups);
            let mut schedules = [relay(model, &selection), resident(model, &selection)];
            for schedule in schedules.iter_mut().flatten() {
                schedule.visits.iter_mut().for_each(|visit| visit.reach = 0);
            }
            schedules
        };
        prop_assert_eq!(of(&base), of(&attending(base.clone(), |_| true)));
    }
}

/// One sequence of 16 chunks keeps four devices busy. Costs are those of a chunk of 8,192 tokens in
/// a layer of 218 million parameters and 4,096 channels: 436 MFLOP a token with weights, 134 with
/// the chunk before, 17 for keys and values. Copies hide, which take an eighth of the least pass.
#[test]
fn one_sequence_runs_on_four_devices() {
    let costs = Costs { reach: ALL_CHUNKS, linear: 436, attention: 134, keys: 17, backward: 3 };
    for layers in [16, 32] {
        for copies in [0, 50] {
            let [one, four] = [1, 4].map(|n| makespan(n, layers, &[16], costs, copies));
            let ratio = one as f64 / four as f64;
            println!("{layers} layers, copies of {copies}: {ratio:.2} times as fast");
            assert!(ratio >= 3.4, "{layers} layers, copies of {copies}: {ratio}");
        }
    }
}
