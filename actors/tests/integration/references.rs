//! The reference of an objective in the step: a second forward visit behind each of the policy's,
//! which uses the same upload.

use crate::common::*;
use l2l_actors::schedule::{
    BlockId, LayerId, Phase, Pipeline, Refusal, RingModel, Role, Schedule, StepPlan, Visit,
    VisitKind, deal, deal_groups, pipeline, relay, resident,
};
use l2l_actors::virtual_time;
use l2l_actors::work::WorkKind;

fn in_groups(model: &RingModel, groups: u32) -> Schedule {
    let mut selection = everything(model, 4);
    selection.set_groups(groups);
    relay(model, &selection).expect("a model of ours")
}

fn of_phase(schedule: &Schedule, phase: Phase) -> Vec<&Visit> {
    schedule.device_visits().filter(|visit| visit.phase == phase).collect()
}

#[test]
fn each_visit_from_a_layer_on_has_one_of_the_reference_behind_it() {
    for (first, of_step, groups) in [(0, true, 1), (1, false, 2), (2, true, 2), (3, false, 1)] {
        let policy = aiming(model(3, 2, false), of_step);
        let schedule = in_groups(&referring(policy.clone(), first), groups);
        let forward = of_phase(&schedule, Phase::Forward);
        let reference = of_phase(&schedule, Phase::Reference);
        let alike: Vec<_> = forward.iter().filter(|visit| visit.layer.0 >= first).collect();
        assert_eq!(alike.len(), reference.len());
        for (visit, own) in alike.iter().zip(&reference) {
            assert_eq!((visit.layer, &visit.blocks), (own.layer, &own.blocks));
            assert_eq!((visit.place, &visit.micro_batches), (own.place, &own.micro_batches));
            assert!(visit.writes.iter().all(|id| !own.writes.contains(id)));
        }
        // The first visits read what the layer below wrote, which has no reference.
        assert_eq!(alike[0].reads, reference[0].reads);
        let objective = schedule.visits.iter().find(|visit| visit.kind.is_objective());
        let objective = objective.expect("there is one");
        let last = schedule.with_role(&reference[reference.len() - 1].writes, Role::Statistics);
        assert_eq!(objective.reads.len(), 2);
        assert_eq!(Some(objective.reads[1]), last);
        // Nothing else of the reference is read behind the next layer.
        let backward = of_phase(&schedule, Phase::Backward);
        let written: Vec<_> = reference.iter().flat_map(|visit| visit.all_writes()).collect();
        assert!(backward.iter().all(|visit| visit.reads.iter().all(|id| !written.contains(id))));
        // All else is the policy's alone.
        let alone = in_groups(&policy, groups);
        assert_eq!(of_phase(&alone, Phase::Backward).len(), backward.len());
    }
}

/// One upload serves both, with a slot for weights or with several, on one device or on more.
#[test]
fn weights_are_uploaded_as_without_a_reference() {
    for base in [model(4, 3, true), choosing(model(4, 2, false), |number| number % 2 == 0)] {
        let policy = aiming(base, true);
        for weights in 1..=3 {
            let traffic = |model: &RingModel| -> Vec<_> {
                let dealt = [1, 2].map(|devices| deal(in_groups(model, 2), devices));
                let by_groups = deal_groups(in_groups(model, 2), &[1, 1]);
                let all = dealt.into_iter().chain([by_groups, sharded(model, 4, 2)]);
                all.map(|schedule| {
                    let pools = config(&schedule, &depths(weights, 1, 1, 1), true).pools;
                    let plan = StepPlan::new(schedule, pools).expect("pools were made for it");
                    (plan.traffic.weights, plan.traffic.shards, plan.traffic.gradients)
                })
                .collect()
            };
            assert_eq!(traffic(&policy), traffic(&referring(policy.clone(), 1)));
        }
    }
}

/// Micro-batches that are computed in a step, and losses.
fn run(schedule: &Schedule, deferred: bool) -> usize {
    let config = config(schedule, &depths(1, 1, 1, 1), deferred);
    let schedule = schedule.clone();
    let ran = async move |mut relay: l2l_actors::Relay<_>| {
        step_of(&mut relay, &schedule, ()).await.expect("nothing fails here");
        relay.stop().await.expect("nothing fails here");
    };
    let (_, records) = virtual_time::run(config, |_| ticks(1), ran).expect("it ends");
    records.iter().filter(|record| record.kind == WorkKind::Forward).count()
}

#[test]
fn it_runs_in_every_schedule() {
    let each = referring(aiming(model(4, 2, true), false), 2);
    let whole = referring(aiming(model(4, 2, true), true), 2);
    let selection = everything(&each, 4);
    let order = Pipeline::one_forward_one_backward(2, 4);
    let mut frozen = everything(&whole, 4);
    frozen.frozen = (0..whole.blocks.len() as u32).map(BlockId).collect();
    let schedules = [
        relay(&whole, &selection),
        relay(&whole, &frozen),
        relay(&whole, &selection).map(|relay| deal(relay, 3)),
        relay(&attending(whole.clone(), |_| true), &in_chunks(&whole, &[3, 1])),
        resident(&each, &selection),
        pipeline(&each, &selection, &order),
        pipeline(&whole, &selection, &Pipeline::gpipe(2, 1, 4)),
    ];
    for schedule in schedules {
        let schedule = schedule.expect("a model of ours");
        for deferred in [false, true] {
            // Four layers and two tiles, of which layers from the second on have two visits.
            assert_eq!(run(&schedule, deferred), (6 + 5) * 4);
        }
    }
}

#[test]
fn the_order_of_a_schedule_has_the_reference_in_its_forward_passes() {
    let schedule = in_groups(&referring(aiming(model(2, 1, false), true), 1), 1);
    let policy = in_groups(&aiming(model(2, 1, false), true), 1);
    assert_eq!(Pipeline::of(&schedule), Pipeline::of(&policy));
    let mut order = Pipeline::gpipe(1, 1, 4);
    order.devices[0][0].phase = Phase::Reference;
    let model = aiming(model(2, 1, false), true);
    let refusal = pipeline(&model, &everything(&model, 4), &order).expect_err("no pass");
    assert!(refusal.reason.contains("0R0 is no pass of a pipeline"), "{refusal}");
}

#[test]
fn wrong_forms_are_refused() {
    let good = in_groups(&referring(aiming(model(3, 1, false), true), 1), 1);
    let refused = |reason: &str, change: &dyn Fn(&mut Schedule)| {
        let mut schedule = good.clone();
        change(&mut schedule);
        let pools = config(&good, &depths(2, 2, 2, 2), false).pools;
        let refusal = StepPlan::new(schedule, pools).expect_err(reason);
        assert!(refusal.to_string().contains(reason), "{refusal}");
    };
    let is_last = |visit: &Visit| visit.phase == Phase::Reference && visit.layer == LayerId(4);
    let last = good.visits.iter().position(is_last).expect("it has one");
    let objective = good.visits.iter().position(|visit| visit.kind.is_objective());
    let objective = objective.expect("it has one");
    refused("before it is written", &|s| s.visits.swap(last, objective));
    refused("is written by no visit", &|s| {
        s.visits.remove(last);
        let id = s.visits[objective - 1].reads[1];
        s.visits[objective - 1].reads.retain(|read| *read != id);
    });
    refused("which nobody reads", &|s| {
        s.visits[objective].reads.remove(1);
    });
    // A block may be of the next version behind its gradient.
    refused("after its gradient ended", &|s| {
        let mut moved = s.visits.remove(last);
        s.visits[0].writes.append(&mut moved.writes);
        s.visits.push(moved);
    });
    refused("micro-batch order", &|s| {
        let first = s.visits[last].of_micro_batches(0..1);
        s.visits[last].micro_batches = 1..4;
        s.visits.insert(last + 1, first);
    });
    refused("wrong place", &|s| s.visits[last].kind = VisitKind::Objective { of_step: true });
    let gather = &|s: &mut Schedule| s.visits[0].phase = Phase::Reference;
    refused("a gather writes only", gather);
    let none: Result<Schedule, Refusal> = {
        let model = referring(aiming(model(3, 1, false), true), 9);
        relay(&model, &everything(&model, 4))
    };
    let refusal = none.expect_err("no layer of it");
    assert!(refusal.reason.contains("reference"), "{refusal}");
}
