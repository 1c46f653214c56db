//! Objectives: a host visit between forward and backward computes the loss of whole records, and
//! writes statistics that the backward pass reads in place of those of the forward pass.

use crate::common::*;
use l2l_actors::schedule::{
    BlockId, Phase, Pipeline, Ranks, RingModel, Role, Schedule, StepPlan, Visit, VisitKind, deal,
    pipeline, relay, resident,
};
use l2l_actors::work::{Work, WorkKind};
use l2l_actors::{Operation, Relay, virtual_time};

fn is_objective(visit: &&Visit) -> bool {
    matches!(visit.kind, VisitKind::Objective { .. })
}

fn in_two_groups(model: &RingModel) -> Schedule {
    let mut selection = everything(model, 4);
    selection.set_groups(2);
    relay(model, &selection).expect("a model of ours")
}

#[test]
fn it_stands_between_forward_and_backward() {
    let base = model(3, 2, true);
    for of_step in [false, true] {
        let schedule = in_two_groups(&aiming(base.clone(), of_step));
        let visits = || schedule.visits.iter();
        let ranges: Vec<_> =
            visits().filter(is_objective).map(|visit| visit.micro_batches.clone()).collect();
        assert_eq!(ranges, if of_step { vec![0..4; 1] } else { vec![0..2, 2..4] });
        assert!(visits().all(|visit| visit.kind != VisitKind::Loss));
        // Every tile has two visits a group, also the last.
        let tiles = |phase| {
            let is_one = move |v: &&Visit| v.kind == VisitKind::Tile && v.phase == phase;
            visits().filter(is_one).collect::<Vec<_>>()
        };
        assert_eq!((tiles(Phase::Forward).len(), tiles(Phase::Backward).len()), (4, 4));
        let objective = visits().find(is_objective).expect("there is one");
        let [complete] = objective.reads[..] else { panic!("it reads the statistics alone") };
        let [weighed] = objective.writes[..] else { panic!("it writes them again") };
        assert_eq!(schedule.boundary(complete), schedule.boundary(weighed));
        assert!(tiles(Phase::Forward)[3].writes.contains(&complete));
        for tile in tiles(Phase::Backward) {
            assert_eq!(schedule.with_role(&tile.reads, Role::Statistics), Some(weighed));
            assert_eq!(schedule.with_role(&tile.writes, Role::Statistics), None);
        }
    }
}

#[test]
fn an_evaluation_has_the_loss_alone() {
    let model = aiming(model(3, 2, false), true);
    let mut selection = everything(&model, 4);
    selection.frozen = (0..model.blocks.len() as u32).map(BlockId).collect();
    let schedule = relay(&model, &selection).expect("a model of ours");
    let objectives: Vec<_> = schedule.visits.iter().filter(is_objective).collect();
    let [objective] = objectives[..] else { panic!("one of the whole step") };
    assert_eq!((objective.reads.len(), objective.writes.len()), (1, 0));
    assert_eq!(run(&schedule, true), (5 * 4, 4));
}

/// A step of the ring that runs to its end: micro-batches that were computed, and losses.
fn run(schedule: &Schedule, deferred: bool) -> (usize, usize) {
    let config = config(schedule, &depths(1, 1, 1, 1), deferred);
    let schedule = schedule.clone();
    let ran = async move |mut relay: l2l_actors::Relay<_>| {
        step_of(&mut relay, &schedule, ()).await.expect("nothing fails here");
        relay.stop().await.expect("nothing fails here");
    };
    let (_, records) = l2l_actors::virtual_time::run(config, |_| ticks(1), ran).expect("it ends");
    let is_compute = |kind| kind == WorkKind::Forward || kind == WorkKind::Backward;
    let computed = records.iter().filter(|record| is_compute(record.kind)).count();
    let losses = records.iter().filter(|record| matches!(record.work, Work::Loss { .. }));
    (computed, losses.count())
}

#[test]
fn objectives_run_in_every_schedule() {
    for base in [model(4, 2, true), on_file(model(4, 0, false))] {
        let each = aiming(base.clone(), false);
        let whole = aiming(base, true);
        let selection = everything(&each, 4);
        let order = Pipeline::one_forward_one_backward(2, 4);
        let gpipe = Pipeline::gpipe(2, 1, 4);
        let schedules = [
            relay(&each, &selection),
            relay(&whole, &selection),
            relay(&whole, &selection).map(|relay| deal(relay, 3)),
            Ok(in_two_groups(&each)),
            resident(&each, &selection),
            resident(&whole, &everything(&whole, 1)),
            pipeline(&each, &selection, &order),
            pipeline(&each, &selection, &gpipe),
            pipeline(&whole, &selection, &gpipe),
        ];
        for schedule in schedules {
            let schedule = schedule.expect("a model of ours");
            let of_visit = |visit: &Visit| visit.micro_batches.len();
            let computed: usize = schedule.device_visits().map(of_visit).sum();
            for deferred in [false, true] {
                assert_eq!(run(&schedule, deferred), (computed, schedule.micro_batches.len()));
            }
        }
    }
}

/// Losses, and the weights of rows, wait for what other processes measured, if they need it.
#[test]
fn losses_of_the_step_wait_for_the_measures_of_other_processes() {
    for of_step in [false, true] {
        let mut schedule = in_two_groups(&aiming(model(2, 1, false), of_step));
        schedule.ranks = Ranks { count: 2, dealt: true };
        let config = config(&schedule, &depths(1, 1, 1, 1), true);
        let is_exchange = |work: &Work| matches!(work, Work::ExchangeMeasures { .. });
        let time = move |operation: &Operation| {
            ticks(if is_exchange(operation.work()) { 1000 } else { 1 })
        };
        let ran = async move |mut relay: Relay<_>| {
            step_of(&mut relay, &schedule, ()).await.expect("nothing fails here");
            relay.stop().await.expect("nothing fails here");
        };
        let (_, records) = virtual_time::run(config, time, ran).expect("it ends");
        let exchanged: Vec<_> = records.iter().filter(|record| is_exchange(&record.work)).collect();
        assert_eq!(exchanged.len(), usize::from(of_step));
        let Some(exchange) = exchanged.first() else { continue };
        let waits = |work: &Work| matches!(work, Work::Loss { .. } | Work::Answer { .. });
        let waiting: Vec<_> = records.iter().filter(|record| waits(&record.work)).collect();
        assert_eq!(waiting.len(), 4 + 4);
        assert!(waiting.iter().all(|record| record.begin >= exchange.end));
    }
}

#[test]
fn an_objective_of_the_step_needs_all_forward_passes_first() {
    let whole = aiming(model(4, 2, false), true);
    let selection = everything(&whole, 4);
    let mixed = Pipeline::one_forward_one_backward(2, 4);
    let refused = [
        resident(&whole, &selection).expect_err("one micro-batch after another"),
        pipeline(&whole, &selection, &mixed).expect_err("by turns"),
    ];
    for refusal in refused {
        assert!(refusal.reason.contains("or computes an objective"), "{refusal}");
    }
}

/// A schedule in which a tile would read weights of rows that are not there yet.
#[test]
fn an_objective_behind_its_reader_is_refused() {
    let mut schedule = in_two_groups(&aiming(model(2, 1, false), true));
    let at = schedule.visits.iter().position(|visit| is_objective(&visit)).expect("it has one");
    let objective = schedule.visits.remove(at);
    schedule.visits.insert(at + 1, objective);
    let pools = config(&schedule, &depths(1, 1, 1, 1), false).pools;
    let refusal = StepPlan::new(schedule.clone(), pools).expect_err("it is behind its reader");
    assert!(refusal.to_string().contains("before it is written"), "{refusal}");
    // A part of the step is not the step.
    schedule.visits[at + 1].micro_batches = 0..2;
    let refusal = StepPlan::new(schedule, pools).expect_err("it is of the whole step");
    assert!(refusal.to_string().contains("a part of its micro-batches"), "{refusal}");
}

/// Without a head, the objective reads the last hidden states, and the backward pass begins with
/// the gradient that it writes.
#[test]
fn a_model_without_a_head_begins_with_the_gradient_of_its_hidden_states() {
    for of_step in [false, true] {
        let base = headless(3, of_step);
        let selection = everything(&base, 4);
        let schedule = relay(&base, &selection).expect("a model of ours");
        let objective = schedule.visits.iter().find(is_objective).expect("there is one");
        let [hidden] = objective.reads[..] else { panic!("it reads hidden states alone") };
        let [gradient] = objective.writes[..] else { panic!("it writes their gradient") };
        assert_eq!(schedule.boundary(hidden).role, Role::Hidden);
        assert_eq!(schedule.boundary(gradient).role, Role::HeadGradient);
        let mut backward = schedule.visits.iter().filter(|visit| visit.phase == Phase::Backward);
        let first = backward.next().expect("it trains");
        assert_eq!(schedule.with_role(&first.reads, Role::HeadGradient), Some(gradient));
        assert!(backward.all(|visit| !visit.reads.contains(&gradient)), "it has one reader");
        for deferred in [false, true] {
            assert_eq!(run(&schedule, deferred), (2 * 3 * 4, 4));
            let dealt = deal(schedule.clone(), 2);
            assert_eq!(run(&dealt, deferred), (2 * 3 * 4, 4));
        }
        let mut frozen = everything(&base, 4);
        frozen.frozen = (0..base.blocks.len() as u32).map(BlockId).collect();
        let evaluation = relay(&base, &frozen).expect("a model of ours");
        let objective = evaluation.visits.iter().find(is_objective).expect("there is one");
        assert_eq!((objective.reads.len(), objective.writes.len()), (1, 0));
        assert_eq!(run(&evaluation, true), (3 * 4, 4));
    }
    let each = headless(3, false);
    let resident = resident(&each, &everything(&each, 4)).expect("a model of ours");
    assert_eq!(run(&resident, false), (2 * 3 * 4, 4));
    let order = Pipeline::one_forward_one_backward(2, 4);
    let pipeline = pipeline(&each, &everything(&each, 4), &order).expect("a model of ours");
    assert_eq!(run(&pipeline, true), (2 * 3 * 4, 4));
}
