//! Layers with a window: the parts of their runs, the rules that keep the order of these, and the
//! labels that would show a wrong one.

use std::sync::Arc;

use crate::common::*;
use crate::runs::{backward, ends, steps};
use l2l_actors::schedule::{
    ALL_CHUNKS, Capacities, LayerId, Phase, Place, Pools, Schedule, StepPlan, Visit, deal, relay,
};
use l2l_actors::work::WorkKind;
use l2l_actors::{Operation, virtual_time};

/// With a window, keys are computed again just before they are needed.
#[test]
fn runs_of_a_window_go_backward_in_parts() {
    use Phase::{Backward, Keys};
    let windows = reaching(model(3, 0, false), |number| number as u32);
    // A run that fits the region of a layer, and one that does not, each before another sequence.
    let selection = in_chunks(&windows, &[3, 1, 5, 1]);
    let schedule = relay(&windows, &selection).expect("a model of ours");
    let one = [
        (Keys, vec![1]),
        (Backward, vec![2]),
        (Keys, vec![0]),
        (Backward, vec![1, 0]),
        (Backward, vec![3]),
        (Keys, vec![7]),
        (Backward, vec![8]),
        (Keys, vec![6]),
        (Backward, vec![7]),
        (Keys, vec![5]),
        (Backward, vec![6]),
        (Keys, vec![4]),
        (Backward, vec![5, 4]),
        (Backward, vec![9]),
    ];
    assert_eq!(backward(&schedule, 1), one);
    let two = [
        (Keys, vec![0, 1]),
        (Backward, vec![2, 1, 0, 3]),
        (Keys, vec![6, 7]),
        (Backward, vec![8]),
        (Keys, vec![5]),
        (Backward, vec![7]),
        (Keys, vec![4]),
        (Backward, vec![6, 5, 4]),
        (Backward, vec![9]),
    ];
    assert_eq!(backward(&schedule, 2), two);
    // A window that reaches all chunks is none.
    let of = |reach: u32| {
        let model = reaching(model(3, 0, false), |_| reach);
        let mut schedule = relay(&model, &selection).expect("a model of ours");
        schedule.visits.iter_mut().for_each(|visit| visit.reach = reach.min(1));
        schedule
    };
    assert_eq!(of(4), of(ALL_CHUNKS));
    assert_ne!(of(3), of(ALL_CHUNKS));
    for schedule in [schedule.clone(), deal(schedule, 2)] {
        for deferred in [false, true] {
            ends(&schedule, &depths(1, 1, 1, 1), deferred);
        }
    }
}

/// Two layers that attend to one chunk before their own, a run of three. Visits: 0 gather, 1 and 2
/// forward, 3 loss, then of layer 2: 4 keys of chunk 1, 5 back of chunk 2, 6 keys of chunk 0, 7
/// back of the others; of layer 1: 8 to 11; 12 scatter.
fn windowed() -> Schedule {
    let model = reaching(model(2, 0, false), |_| 1);
    relay(&model, &in_chunks(&model, &[3])).expect("a model of ours")
}

#[test]
fn parts_of_a_run_follow_each_other_behind_their_keys() {
    #[track_caller]
    fn refused(at: usize, reason: &str, change: impl Fn(&mut Schedule)) {
        let mut schedule = windowed();
        let pools = Pools::of(&deal(schedule.clone(), 2), &Capacities::default());
        assert!(StepPlan::new(schedule.clone(), pools).is_ok());
        change(&mut schedule);
        let refusal = StepPlan::new(schedule, pools).expect_err("a rule is broken");
        assert_eq!(refusal.visit, Some(at), "{refusal}");
        assert!(refusal.reason.contains(reason), "{refusal}");
    }
    let last = "begins run 0..3 at 2..3 without its keys: the visit before it on its device must \
                compute those of 1..2";
    let others = "begins run 0..3 at 0..2 without its keys: the visit before it on its device must \
                  compute those of 0..1";
    // Keys that are missing, of too many chunks, or of the wrong ones.
    refused(4, last, |s| _ = s.visits.remove(4));
    refused(5, last, |s| s.visits[4].micro_batches = 0..2);
    refused(5, last, |s| s.visits[4].micro_batches = 0..1);
    refused(6, others, |s| _ = s.visits.remove(6));
    refused(7, others, |s| s.visits[6].micro_batches = 1..2);
    // Keys that come twice or too early.
    refused(6, "the next visit of its device is not the backward", |s| {
        s.visits.insert(6, s.visits[6].clone());
    });
    refused(4, "the next visit of its device is not the backward", |s| s.visits.swap(5, 6));
    // A run whole, where the device has no room for it; parts in a wrong order, or cut further.
    let part = "a part of run 0..3: a visit has all chunks of a run, or none; with a window";
    refused(5, "has micro-batches 0..3, a part of run 0..3", |s| {
        s.visits[5].micro_batches = 0..3;
        s.visits.drain(6..8);
    });
    refused(5, "micro-batch order: meets 1, expected 2", |s| s.visits.swap(5, 7));
    refused(7, part, |s| {
        let first = s.visits[7].of_micro_batches(0..1);
        s.visits[7].micro_batches = 1..2;
        s.visits.insert(8, first);
    });
    refused(5, part, |s| s.visits[5].reach = 2);
    // Something else between two parts.
    refused(
        7,
        "goes on with run 0..3 at 0..2: the visit before its keys on its device must be",
        |s| {
            s.visits[5].place = Place::Device(1);
            s.visits[4].place = Place::Device(1);
        },
    );
}

/// Regions that are smaller or larger than the schedule was made for, and keys that are missing.
#[test]
fn labels_show_keys_that_are_not_in_their_region() {
    let of = |reach: u32| {
        let model = reaching(model(2, 0, false), |_| reach);
        let schedule = relay(&model, &in_chunks(&model, &[4])).expect("a model of ours");
        let pools = Pools::of(&schedule, &Capacities::default());
        StepPlan::new(schedule, pools).expect("a schedule of ours")
    };
    let all = |reach| move |s: &mut Schedule| s.visits.iter_mut().for_each(|v| v.reach = reach);
    let of_back = |reach| {
        move |s: &mut Schedule| {
            let is_back = |visit: &&mut Visit| visit.phase == Phase::Backward;
            s.visits.iter_mut().filter(is_back).for_each(|visit| visit.reach = reach);
        }
    };
    let keys_of = |nth, layer| {
        move |s: &mut Schedule| {
            let mut keys = s.visits.iter_mut().filter(|visit| visit.phase == Phase::Keys);
            keys.nth(nth).expect("keys").layer = LayerId(layer);
        }
    };
    type Change = Box<dyn Fn(&mut Schedule)>;
    let cases: [(u32, Change); 7] = [
        (1, Box::new(all(2))),
        (1, Box::new(all(ALL_CHUNKS))),
        (2, Box::new(all(1))),
        (ALL_CHUNKS, Box::new(all(1))),
        (1, Box::new(of_back(2))),
        (1, Box::new(keys_of(1, 1))),
        (2, Box::new(keys_of(1, 1))),
    ];
    for (number, (reach, change)) in cases.into_iter().enumerate() {
        let mut plan = of(reach);
        assert!(steps(Arc::new(plan.clone()), false).is_ok());
        change(&mut plan.schedule);
        let panic = steps(Arc::new(plan), false).expect_err("its keys are missing");
        assert!(panic.contains("Keys"), "{number}: {panic}");
    }
}

/// The blocks of the layer below come while the parts of a run are computed, one chunk each.
#[test]
fn uploads_hide_behind_the_parts_of_a_run() {
    const LAYERS: u64 = 6;
    const CHUNKS: u64 = 12;
    let model = reaching(model(LAYERS as u32, 0, false), |_| 1);
    let schedule = relay(&model, &in_chunks(&model, &[CHUNKS as u32])).expect("a model of ours");
    let config = config(&schedule, &depths(2, 2, 2, 24), false);
    // Each layer's chunks take 12 ticks forward, and 12 + 11 in the backward pass.
    let times = |operation: &Operation| {
        ticks(match operation.work().row().kind {
            WorkKind::Forward | WorkKind::Keys | WorkKind::Backward => 1,
            WorkKind::Weights => CHUNKS - 1,
            _ => 0,
        })
    };
    let run = virtual_time::run(config, times, async move |mut relay| {
        step_of(&mut relay, &schedule, ()).await.expect("nothing fails here");
        relay.stop().await.expect("nothing fails here");
    });
    let (_, records) = run.expect("it ends");
    let end = records.iter().map(|record| record.end.as_nanos() as u64).max();
    let first = CHUNKS - 1;
    assert_eq!(end, Some(first + LAYERS * (CHUNKS + 2 * CHUNKS - 1)));
}
