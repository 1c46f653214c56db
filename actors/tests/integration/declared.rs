//! What layers may declare: several blocks, several steps, boundaries of their own, activations
//! that some save. A declaration that does not fit its neighbours is refused by name.

use std::time::Duration;

use crate::common::*;
use l2l_actors::Operation;
use l2l_actors::schedule::{
    BlockId, Boundary, BoundaryId, Input, LayerId, Phase, Pipeline, RingModel, RingStep, Role,
    Schedule, StepPlan, Visit, VisitKind, deal, pipeline, relay, resident,
};
use l2l_actors::work::{Work, WorkKind};

/// A model of three layers, whose middle one is visited in two steps, with a boundary of its own
/// between them, and needs three blocks.
fn two_steps() -> RingModel {
    let mut model = model(3, 2, false);
    let first = model.blocks.len() as u32;
    model.blocks.extend([model.blocks[1]; 2]);
    let own = input(Role::Own(0), Role::OwnGradient(0));
    let [attend] = &mut model.layers[2].steps[..] else { panic!("it has one step") };
    let feed = RingStep { needs: vec![BlockId(first)], reads: vec![own], ..attend.clone() };
    attend.needs.push(BlockId(first + 1));
    attend.writes = vec![boundary(Role::Own(0))];
    model.layers[2].steps.push(feed);
    saving(model, |number| number % 2 == 1)
}

/// The same model, in which the first layer hands a tensor to the last, past the middle one.
fn handed_up() -> RingModel {
    let mut model = two_steps();
    model.layers[1].steps[0].writes.push(boundary(Role::Own(7)));
    model.layers[3].steps[0].reads.push(input(Role::Own(7), Role::OwnGradient(7)));
    model
}

/// A step of the ring that runs to its end: how many micro-batches were computed.
fn run(schedule: &Schedule, deferred: bool) -> usize {
    run_in(schedule, deferred, |_| ticks(1))
}

/// The same, where operations take these times.
fn run_in(schedule: &Schedule, deferred: bool, times: fn(&Operation) -> Duration) -> usize {
    let config = config(schedule, &depths(1, 1, 1, 1), deferred);
    let schedule = schedule.clone();
    let (_, records) = l2l_actors::virtual_time::run(
        config,
        times,
        async move |mut relay: l2l_actors::Relay<_>| {
            for _ in 0..2 {
                step_of(&mut relay, &schedule, ()).await.expect("nothing fails here");
            }
            relay.stop().await.expect("nothing fails here");
        },
    )
    .expect("it ends");
    let is_compute = |kind| kind == WorkKind::Forward || kind == WorkKind::Backward;
    records.iter().filter(|record| is_compute(record.kind)).count()
}

#[test]
fn steps_and_boundaries_of_layers_run_in_every_schedule() {
    let kept = keeping(two_steps(), |number| number == 3);
    let all_kept = keeping(handed_up(), |_| true);
    let in_memory = [two_steps(), handed_up(), kept, all_kept];
    for model in in_memory.into_iter().chain([on_file(two_steps()), on_file(handed_up())]) {
        let selection = everything(&model, 4);
        let order = Pipeline::one_forward_one_backward(2, 4);
        let relay = relay(&model, &selection).expect("a model of ours");
        let visits = relay.device_visits().count();
        let schedules = [
            relay.clone(),
            deal(relay, 3),
            resident(&model, &selection).expect("a model of ours"),
            pipeline(&model, &selection, &order).expect("a model of ours"),
        ];
        for schedule in &schedules {
            for deferred in [false, true] {
                assert_eq!(run(schedule, deferred), 2 * 4 * visits);
            }
        }
    }
}

/// The backward pass meets the second step first. It reads what the step saved and read, and the
/// gradient from above.
#[test]
fn the_backward_pass_reverses_steps() {
    let model = handed_up();
    let schedule = relay(&model, &everything(&model, 1)).expect("a model of ours");
    let role = |id| schedule.boundary(id).role;
    let visits: Vec<_> = schedule
        .device_visits()
        .map(|visit| {
            let written = visit.writes.iter().chain(&visit.keeps).copied().map(role).collect();
            (visit.layer.0, visit.step, visit.all_reads().map(role).collect(), written)
        })
        .collect();
    let hidden = Role::Hidden;
    let own = Role::Own(0);
    let own_gradient = Role::OwnGradient(0);
    let saved = Role::SavedActivations;
    assert_eq!(visits[1], (2, 0, vec![hidden], vec![own]));
    assert_eq!(visits[2], (2, 1, vec![own], vec![hidden]));
    // Tile 5 once, tile 4; then the last layer, which also hands a gradient down to the first.
    let gradients = [Role::HiddenGradient, Role::OwnGradient(7)];
    let reads = vec![hidden, Role::Own(7), saved, Role::HeadGradient];
    assert_eq!(visits[7], (3, 0, reads, gradients.to_vec()));
    assert_eq!(visits[8], (2, 1, vec![own, Role::HiddenGradient], vec![own_gradient]));
    assert_eq!(visits[9], (2, 0, vec![hidden, own_gradient], vec![Role::HiddenGradient]));
    let first = [&[hidden, saved][..], &gradients].concat();
    assert_eq!(visits[10], (1, 0, first, vec![Role::HiddenGradient]));
}

/// What two steps of a layer use is brought or written by the first of them, and the other finds
/// it on the device. The stash has it only if a later visit of another layer or phase reads it.
#[test]
fn what_steps_of_a_layer_use_stays_on_the_device() {
    let mut model = two_steps();
    let hidden = input(Role::Hidden, Role::HiddenGradient);
    model.layers[2].steps[1].reads.push(hidden);
    let once = Input { once: true, ..input(Role::Own(1), Role::OwnGradient(1)) };
    model.layers[2].steps[0].writes.push(boundary(Role::Own(1)));
    model.layers[2].steps[1].reads.push(once);
    let schedule = relay(&model, &everything(&model, 1)).expect("a model of ours");
    let roles = |ids: &mut dyn Iterator<Item = BoundaryId>| -> Vec<Role> {
        ids.map(|id| schedule.boundary(id).role).collect()
    };
    let of_layer: Vec<_> =
        schedule.device_visits().filter(|visit| visit.layer == LayerId(2)).collect();
    let [first, second, second_back, first_back] = of_layer[..] else { panic!("four visits") };
    let kept = |visit: &Visit| roles(&mut visit.kept.iter().copied());
    let copied = |visit: &Visit| roles(&mut visit.copies.iter().map(|copied| copied.from));
    assert_eq!(roles(&mut first.reads.iter().copied()), [Role::Hidden]);
    assert_eq!(roles(&mut first.writes.iter().copied()), [Role::Own(0)]);
    assert_eq!(roles(&mut first.keeps.iter().copied()), [Role::Own(1)]);
    assert_eq!(copied(first), [Role::Hidden, Role::Own(0)]);
    assert_eq!(second.reads, []);
    assert_eq!(kept(second).len(), 3);
    // The backward pass does not need what is read once.
    let reads = [Role::Own(0), Role::Hidden, Role::HiddenGradient];
    assert_eq!(roles(&mut second_back.all_reads()), reads);
    assert_eq!(copied(second_back), [Role::Hidden]);
    let gradients = [Role::OwnGradient(0), Role::HiddenGradient, Role::OwnGradient(1)];
    assert_eq!(roles(&mut second_back.keeps.iter().copied()), gradients);
    assert_eq!(first_back.reads, []);
    assert_eq!(run(&schedule, false), 2 * schedule.device_visits().count());
}

/// What a device keeps takes no slots and moves no bytes: as if it was recomputed.
#[test]
fn what_is_kept_passes_no_slot() {
    let recomputed = model(4, 2, true);
    let of = |model: &RingModel| {
        let schedule = relay(model, &everything(model, 3)).expect("a model of ours");
        let pools = config(&schedule, &depths(2, 1, 1, 4), false).pools;
        StepPlan::new(schedule, pools).expect("pools were made for it")
    };
    let expected = of(&recomputed);
    let saved = saving(recomputed, |_| true);
    let kept = of(&keeping(saved.clone(), |_| true));
    assert_eq!((kept.pools, kept.traffic), (expected.pools, expected.traffic));
    assert!(of(&saved).traffic.inputs > expected.traffic.inputs);
    let is_kept = |role| kept.schedule.boundaries.iter().filter(|of| of.role == role).count();
    assert_eq!(is_kept(Role::SavedActivations), 4);
    let visits = || kept.schedule.device_visits();
    let forward: Vec<_> = visits().flat_map(|visit| visit.keeps.clone()).collect();
    let backward: Vec<_> = visits().flat_map(|visit| visit.kept.clone()).collect();
    assert_eq!(forward, backward.into_iter().rev().collect::<Vec<_>>());
}

/// What layers measure is read behind the last of them, and answered to those that train.
#[test]
fn the_host_answers_between_forward_and_backward() {
    let base = model(4, 2, false);
    let of = |answers| measuring(base.clone(), answers, |number| number < 4);
    let mut selection = everything(&base, 4);
    selection.set_groups(2);
    selection.frozen = vec![BlockId(0), BlockId(1), BlockId(2)]; // layer 1, and all below
    let generated = |answers| relay(&of(answers), &selection).expect("a model of ours");
    let is_balance = |visit: &&Visit| matches!(visit.kind, VisitKind::Balance { .. });
    let ranges = |answers| -> Vec<_> {
        let visits = generated(answers).visits;
        visits.iter().filter(is_balance).map(|visit| visit.micro_batches.clone()).collect()
    };
    assert_eq!(ranges(Answers::Nothing), []);
    assert_eq!(ranges(Answers::Read), [0..2, 2..4]);
    assert_eq!(ranges(Answers::MicroBatch), [0..2, 2..4]);
    assert_eq!(ranges(Answers::Step), vec![0..4; 1]);
    let schedule = generated(Answers::Step);
    let balance = schedule.visits.iter().find(is_balance).expect("there is one");
    assert_eq!((balance.layer.0, balance.reads.len(), balance.writes.len()), (3, 3, 2));
    let read = schedule.device_visits().filter(|visit| visit.phase == Phase::Backward);
    let read = read.flat_map(|visit| schedule.with_role(&visit.reads, Role::Balance));
    assert_eq!(read.count(), 2 * 2, "two layers, two groups");
    let mut frozen = selection.clone();
    frozen.frozen = (0..base.blocks.len() as u32).map(BlockId).collect();
    let evaluation = relay(&of(Answers::Step), &frozen).expect("a model of ours");
    assert!(!evaluation.visits.iter().any(|visit| is_balance(&visit)));
    for answers in [Answers::Read, Answers::MicroBatch, Answers::Step] {
        for deferred in [false, true] {
            let schedule = generated(answers);
            let dealt = deal(schedule.clone(), 3);
            assert_eq!(run(&schedule, deferred), run(&dealt, deferred));
        }
    }
}

/// An update may follow from what all layers measured in its step. The last tile has one visit for
/// both passes, so no loss stands between the measures and the gradients of the layers.
#[test]
fn updates_come_behind_all_measures() {
    let times = |operation: &Operation| match operation.work() {
        Work::Measure { .. } => ticks(1000),
        _ => ticks(1),
    };
    let model = measuring(model(2, 1, false), Answers::Read, |_| true);
    for model in [model.clone(), on_file(model)] {
        let schedule = relay(&model, &everything(&model, 2)).expect("a model of ours");
        for deferred in [false, true] {
            assert!(run_in(&schedule, deferred, times) > 0);
        }
    }
}

/// Where a backward pass begins before another forward pass ends, no answer is of the step.
#[test]
fn answers_of_the_step_need_all_forward_passes_first() {
    let base = model(4, 2, false);
    let of_step = measuring(base.clone(), Answers::Step, |_| true);
    let each = measuring(base, Answers::MicroBatch, |_| true);
    let selection = everything(&of_step, 4);
    let mixed = Pipeline::one_forward_one_backward(2, 4);
    let gpipe = Pipeline::gpipe(2, 1, 4);
    let refused = [
        resident(&of_step, &selection).expect_err("one micro-batch after another"),
        pipeline(&of_step, &selection, &mixed).expect_err("by turns"),
    ];
    for refusal in refused {
        assert!(refusal.reason.contains("let it answer for each micro-batch"), "{refusal}");
    }
    let schedules = [
        pipeline(&of_step, &selection, &gpipe),
        pipeline(&each, &selection, &gpipe),
        pipeline(&each, &selection, &mixed),
        resident(&each, &selection),
        resident(&of_step, &everything(&of_step, 1)),
    ];
    for schedule in schedules {
        let schedule = schedule.expect("a model of ours");
        let visits: usize = schedule.device_visits().map(|visit| visit.micro_batches.len()).sum();
        assert_eq!(run(&schedule, true), 2 * visits);
    }
}

#[track_caller]
fn refused(says: &[&str], plant: impl Fn(&mut RingModel)) {
    let mut model = handed_up();
    plant(&mut model);
    let schedule = relay(&model, &everything(&model, 2));
    let planned = schedule.and_then(|schedule| {
        let pools = config(&schedule, &depths(2, 1, 1, 1), false).pools;
        StepPlan::new(schedule, pools)
    });
    let text = planned.expect_err("a fault was planted").to_string();
    says.iter().for_each(|part| assert!(text.contains(part), "{part}: {text}"));
}

#[test]
fn faults_in_declarations_are_refused_by_name() {
    let unread = ["layer 3", "reads own tensor 9, which no step before it writes"];
    refused(&unread, |model| {
        model.layers[3].steps[0].reads.push(input(Role::Own(9), Role::OwnGradient(9)));
    });
    refused(&["layer 1", "which nobody reads"], |model| {
        model.layers[1].steps[0].writes.push(boundary(Role::Own(9)));
    });
    refused(&["layer 3 reads own tensor 7 as 0 bytes a token and 8", "layer 1 writes"], |model| {
        let read = &mut model.layers[3].steps[0].reads[1].boundary;
        *read = Boundary::of_sequences(Role::Own(7), 2, 4);
    });
    refused(&["layer 2 is trained through own tensor 0", "declares the gradient"], |model| {
        model.layers[2].steps[1].reads[0].gradient = None;
    });
    refused(&["layer 2", "trains block", "another step of the layer"], |model| {
        let shared = model.layers[2].steps[0].needs[0];
        model.layers[2].steps[1].needs = vec![shared];
    });
    refused(&["block 99 of a layer is not in the model"], |model| {
        model.layers[1].steps[0].needs.push(BlockId(99));
    });
    refused(&["layer 1", "two boundaries that are own tensor 7"], |model| {
        model.layers[1].steps[0].writes.push(boundary(Role::Own(7)));
    });
    refused(&["layer 2 gathers, and stands behind another step"], |model| {
        model.layers[2].steps[0].kind = VisitKind::Gather;
    });
    refused(&["layer 4 reads statistics, which no step before it writes"], |model| {
        model.layers[0].steps[0].writes.pop();
    });
}
