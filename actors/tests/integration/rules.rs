//! Every rule a schedule can break is refused, with the visit that breaks it; and what a plan
//! decides: residency, gradients' spans, traffic.

use crate::common::*;
use l2l_actors::schedule::{
    Block, BlockId, Boundary, BoundaryId, Capacities, Copied, LayerId, Phase, Place, Pools,
    Refusal, Role, Schedule, StepPlan, Visit, VisitKind, relay, resident,
};

/// Embedding, two layers, two tied tiles. Visits: 0 gather, 1 and 2 stack, 3 tile, 4 last tile and
/// back, 5 loss, 6 tile back, 7 and 8 stack back, 9 scatter.
fn sound() -> Schedule {
    let model = model(2, 2, true);
    relay(&model, &everything(&model, 3)).expect("a model of ours")
}

fn refusal(change: impl Fn(&mut Schedule)) -> Refusal {
    let pools = Pools::of(&sound(), &Capacities::default());
    assert!(StepPlan::new(sound(), pools).is_ok());
    let mut schedule = sound();
    change(&mut schedule);
    StepPlan::new(schedule, pools).expect_err("a rule is broken")
}

#[track_caller]
fn refused(at: Option<usize>, reason: &str, change: impl Fn(&mut Schedule)) {
    let refusal = refusal(change);
    assert_eq!(refusal.visit, at, "{refusal}");
    let text = refusal.to_string();
    assert!(text.contains(reason), "{text}");
    assert!(at.is_none_or(|at| text.contains(&format!("visit {at}, layer"))), "{text}");
}

#[test]
fn a_step_needs_something_to_do() {
    refused(None, "micro-batches", |s| s.micro_batches.clear());
    refused(None, "at least one sequence", |s| s.micro_batches[1] = 0);
    refused(None, "no visit of a device", |s| s.visits.clear());
}

#[test]
fn names_must_be_known_and_met_once() {
    refused(Some(2), "micro-batches 0..4 of 3", |s| s.visits[2].micro_batches = 0..4);
    refused(Some(2), "micro-batches 1..1 of 3", |s| s.visits[2].micro_batches = 1..1);
    let twice = vec![BlockId(2), BlockId(2)];
    refused(Some(1), "names a block twice", move |s| {
        s.visits[1].blocks = twice.clone();
    });
    refused(Some(1), "block 99 is unknown: the schedule has 4", |s| {
        s.visits[1].blocks = vec![BlockId(99)];
    });
    refused(Some(1), "names a boundary twice", |s| {
        let again = s.visits[1].reads[0];
        s.visits[1].reads.push(again);
    });
    refused(Some(1), "boundary 99 is unknown", |s| s.visits[1].writes.push(BoundaryId(99)));
}

#[test]
fn places_are_this_rings() {
    refused(Some(1), "this ring has devices 0 to 0", |s| s.visits[1].place = Place::Device(1));
    refused(Some(1), "a host visit gathers", |s| s.visits[1].place = Place::Host);
}

#[test]
fn groups_follow_each_other_and_visits_are_of_one() {
    let all = |s: &Schedule| s.micro_batches.len() as u32;
    refused(None, "and 0 comes next", |s| s.groups[0].start = 1);
    refused(None, "comes next", |s| s.groups.push(all(s)..all(s)));
    refused(None, "groups end at micro-batch 1", |s| s.groups[0].end = 1);
    refused(Some(1), "of groups [0, 1]: a visit is of one", |s| {
        s.groups = vec![0..1, 1..all(s)];
    });
}

#[test]
fn a_visit_is_what_its_kind_says() {
    refused(Some(0), "a gather writes only", |s| s.visits[0].kind = VisitKind::Scatter);
    refused(Some(5), "has no block", |s| s.visits[5].blocks = vec![BlockId(0)]);
    refused(Some(9), "a scatter reads only", |s| s.visits[9].phase = Phase::Forward);
    let balance = |of_step| VisitKind::Balance { of_step };
    refused(Some(0), "a balance or an objective reads", move |s| s.visits[0].kind = balance(false));
    refused(Some(5), "answers for the whole step", move |s| {
        s.visits[5].kind = balance(true);
        s.visits[5].micro_batches = 0..1;
    });
}

#[test]
fn a_visit_of_a_device_has_one_boundary_of_a_role() {
    refused(Some(2), "two boundaries that are hidden state", |s| {
        let first = s.visits[1].reads[0];
        s.visits[2].reads.push(first);
    });
    refused(Some(1), "two boundaries that are hidden state", |s| {
        s.boundaries.push(s.boundaries[0]);
        s.visits[1].writes.push(BoundaryId(s.boundaries.len() as u32 - 1));
    });
}

#[test]
fn a_boundary_is_written_once_before_it_is_read() {
    refused(Some(1), "before it is written", |s| s.visits.swap(1, 2));
    refused(Some(6), "of micro-batch 0 again", |s| {
        let first = s.visits[1].writes[0];
        s.visits[6].writes.push(first);
    });
    refused(Some(8), "before it is written", |s| s.visits.swap(8, 9));
    refused(Some(8), "which nobody reads", |s| _ = s.visits.pop());
}

#[test]
fn micro_batches_come_in_order() {
    let model = model(2, 2, true);
    let schedule = resident(&model, &everything(&model, 3)).expect("a model of ours");
    let pools = Pools::of(&schedule, &Capacities::default());
    let mut swapped = schedule.clone();
    let turn = (schedule.visits.len() - 2) / 3;
    for at in 1..=turn {
        swapped.visits.swap(at, turn + at);
    }
    let refusal = StepPlan::new(swapped, pools).expect_err("micro-batch 1 comes first");
    assert_eq!(refusal.visit, Some(1));
    assert!(refusal.reason.contains("micro-batch order: meets 1, expected 0"), "{refusal}");
}

#[test]
fn a_gradient_ends_once() {
    refused(Some(9), "after its gradient ended", |s| {
        // Layer 1 forward once more, behind its backward.
        let again = Visit { phase: Phase::Forward, layer: LayerId(77), ..s.visits[1].clone() };
        let again = Visit { writes: Vec::new(), ..again };
        s.visits.insert(9, again);
    });
    refused(Some(10), "after its gradient was scattered", |s| {
        let again = Visit { layer: LayerId(77), ..s.visits[6].clone() };
        s.visits.push(Visit { writes: Vec::new(), ..again });
    });
    refused(Some(9), "all micro-batches of the step at once", |s| {
        let rest = Visit { micro_batches: 2..3, ..s.visits[9].clone() };
        s.visits[9].micro_batches = 0..2;
        s.visits.push(rest);
    });
}

#[test]
fn a_gradient_is_added_up_on_one_device() {
    let model = model(2, 0, false);
    let mut schedule = resident(&model, &everything(&model, 3)).expect("a model of ours");
    let last = schedule.visits.iter().rposition(|visit| visit.on_device()).expect("a visit");
    schedule.visits[last].place = Place::Device(1);
    let pools = Pools::of(&schedule, &Capacities::default());
    let refusal = StepPlan::new(schedule, pools).expect_err("its gradient is on device 0");
    assert_eq!(refusal.visit, Some(last));
    assert!(refusal.reason.contains("trains block 1 on another device"), "{refusal}");
}

/// Visits: 0 gather, 1 and 2 stack, 3 loss, 4 and 5 stack back, 6 scatter.
#[test]
fn what_a_device_keeps_is_read_there() {
    let model = keeping(saving(model(2, 0, false), |_| true), |_| true);
    let sound = relay(&model, &everything(&model, 3)).expect("a model of ours");
    let pools = Pools { devices: 2, ..Pools::of(&sound, &depths(2, 2, 2, 8)) };
    assert!(StepPlan::new(sound.clone(), pools).is_ok());
    let refused = |at: usize, reason: &str, change: &dyn Fn(&mut Schedule)| {
        let mut schedule = sound.clone();
        change(&mut schedule);
        let refusal = StepPlan::new(schedule, pools).expect_err("a rule is broken");
        assert_eq!(refusal.visit, Some(at), "{refusal}");
        assert!(refusal.reason.contains(reason), "{refusal}");
    };
    refused(4, "on another device than the one that keeps it", &|s| {
        s.visits[4].place = Place::Device(1);
    });
    let elsewhere = "in another place than where it was written";
    refused(5, elsewhere, &|s| {
        let kept = s.visits[5].kept.remove(0);
        s.visits[5].reads.push(kept);
    });
    refused(5, elsewhere, &|s| {
        let kept = s.visits[1].keeps.remove(0);
        s.visits[1].writes.push(kept);
    });
    refused(1, "names a boundary twice", &|s| {
        let kept = s.visits[1].keeps[0];
        s.visits[1].writes.push(kept);
    });
    refused(2, "which nobody reads", &|s| s.visits[4].kept.clear());
    refused(6, "runs on the host", &|s| {
        let kept = s.visits[5].kept[0];
        s.visits[6].kept.push(kept);
    });
    let copy = |s: &mut Schedule, from: BoundaryId, boundary: Boundary| {
        let to = BoundaryId(s.boundaries.len() as u32);
        s.boundaries.push(boundary);
        s.visits[1].copies.push(Copied { from, to });
    };
    refused(1, "which it neither reads nor writes", &|s| {
        let from = s.visits[6].reads[0];
        copy(s, from, *s.boundary(from));
    });
    refused(1, "copies hidden state of", &|s| {
        let from = s.visits[1].reads[0];
        copy(s, from, Boundary { sequence_bytes: 3, ..*s.boundary(from) });
    });
    refused(1, "which nobody reads", &|s| {
        let from = s.visits[1].reads[0];
        copy(s, from, *s.boundary(from));
    });
}

#[test]
fn a_trained_block_belongs_to_one_layer() {
    refused(Some(8), "trains block 2, as layer 1 does", |s| {
        for visit in [1, 2, 7, 8] {
            s.visits[visit].blocks = vec![BlockId(2)];
        }
        for (visit, layer) in [(1, 1), (2, 2), (7, 1), (8, 2)] {
            s.visits[visit].layer = LayerId(layer);
        }
    });
}

#[test]
fn a_gather_is_used_before_its_block_may_be_updated() {
    refused(Some(8), "ends the gradient of block 3 before boundary", |s| {
        // The second layer's block is gathered from too, and first read behind its backward.
        s.boundaries.push(Boundary { role: Role::CachedKv, ..s.boundaries[0] });
        let late = BoundaryId(s.boundaries.len() as u32 - 1);
        let gather = Visit { layer: LayerId(77), writes: vec![late], ..s.visits[0].clone() };
        s.visits.insert(1, Visit { blocks: vec![BlockId(3)], ..gather });
        s.visits[9].reads.push(late);
    });
}

#[test]
fn absurd_numbers_are_refused_or_cut() {
    let all =
        Capacities { weights: u32::MAX, gradients: u32::MAX, reduced: u32::MAX, stash: u32::MAX };
    let pools = Pools::of(&sound(), &all);
    assert!(pools.weights <= 4 && pools.gradients <= 4 && pools.reduced <= 4);
    assert!(StepPlan::new(sound(), pools).is_ok());
    let mut heavy = sound();
    heavy.blocks.iter_mut().for_each(|block| block.weight_bytes = u64::MAX);
    let plan = StepPlan::new(heavy, pools).expect("bytes are only counted");
    assert_eq!(plan.traffic.weights, u64::MAX);
    refused(None, "is written by no visit", |s| s.boundaries.push(s.boundaries[0]));
}

#[test]
fn pools_hold_what_one_operation_takes() {
    let pools = Pools::of(&sound(), &Capacities::default());
    let with = |change: fn(&mut Pools)| {
        let mut less = pools;
        change(&mut less);
        StepPlan::new(sound(), less).expect_err("too small").to_string()
    };
    assert!(with(|p| p.weights = 0).contains("takes 1 slots of pool weights, which has 0"));
    assert!(with(|p| p.inputs = 1).contains("of pool inputs, which has 1"));
    assert!(with(|p| p.outputs = 0).contains("of pool outputs, which has 0"));
    assert!(with(|p| p.gradients = 0).contains("pool gradients has 0"));
    assert!(with(|p| p.reduced = 0).contains("need at least one slot"));
    assert!(with(|p| p.visits = 0).contains("need at least one slot"));
}

#[test]
fn generators_refuse_what_is_no_model() {
    let model = model(2, 2, true);
    let mut selection = everything(&model, 1);
    selection.layers.push(LayerId(9));
    assert!(relay(&model, &selection).expect_err("unknown").reason.contains("layer 9 is not"));
    let mut selection = everything(&model, 1);
    selection.frozen = vec![BlockId(9)];
    assert!(relay(&model, &selection).expect_err("unknown").reason.contains("block 9 is not"));
    let mut selection = everything(&model, 1);
    selection.layers.reverse();
    let order = "layer 0 gathers, and stands behind another step";
    assert!(relay(&model, &selection).expect_err("wrong order").reason.contains(order));
}

/// Blocks uploaded in a step, in order.
fn uploads(plan: &StepPlan) -> Vec<u32> {
    let all = plan.device_visits.iter().flat_map(|visit| &visit.residences);
    all.filter(|residence| residence.upload).map(|residence| residence.portion.block.0).collect()
}

#[test]
fn the_turn_fetches_nothing_twice() {
    let model = model(6, 0, false); // blocks 1 to 6 are the stack's
    let schedule = relay(&model, &everything(&model, 2)).expect("a model of ours");
    let of = |weights| {
        let pools = Pools::of(&schedule, &depths(weights, 1, 1, 1));
        uploads(&StepPlan::new(schedule.clone(), pools).expect("pools were made for it"))
    };
    assert_eq!(of(1), [1, 2, 3, 4, 5, 6, 5, 4, 3, 2, 1]);
    assert_eq!(of(2), [1, 2, 3, 4, 5, 6, 4, 3, 2, 1]);
    assert_eq!(of(6), [1, 2, 3, 4, 5, 6]);
}

/// The least number of fetches, by trying everything.
fn fewest(visits: &[BlockId], held: &[BlockId], slots: usize) -> usize {
    let Some((block, later)) = visits.split_first() else { return 0 };
    if held.contains(block) {
        return fewest(later, held, slots);
    }
    if held.len() < slots {
        let held: Vec<_> = held.iter().chain([block]).copied().collect();
        return 1 + fewest(later, &held, slots);
    }
    let without = (0..held.len()).map(|evicted| {
        let mut held = held.to_vec();
        held[evicted] = *block;
        1 + fewest(later, &held, slots)
    });
    without.min().expect("there is a slot")
}

#[test]
fn residency_fetches_the_least() {
    for (layers, tiles) in [(4, 0), (3, 2), (2, 3)] {
        for slots in 1..=4 {
            let model = model(layers, tiles, tiles > 0);
            let schedule = relay(&model, &everything(&model, 1)).expect("a model of ours");
            let pools = Pools::of(&schedule, &depths(slots, 1, 1, 1));
            let plan = StepPlan::new(schedule.clone(), pools).expect("pools were made for it");
            let met: Vec<BlockId> = schedule
                .visits
                .iter()
                .filter(|v| v.on_device())
                .map(|visit| visit.blocks[0])
                .collect();
            assert_eq!(uploads(&plan).len(), fewest(&met, &[], slots as usize));
        }
    }
}

/// A layer of two blocks, one of them shared with the next layer and frozen.
#[test]
fn shared_and_frozen_blocks_are_fetched_once_and_not_updated() {
    let mut model = model(2, 0, false); // blocks: 0 embedding, 1 and 2 stack
    let first = model.blocks[0];
    let frozen = Block { weight_bytes: 10, gradient_bytes: 20, download_bytes: 20, ..first };
    model.blocks.push(Block { frozen: true, ..frozen });
    for layer in &mut model.layers[1..] {
        layer.steps[0].needs.push(BlockId(3));
    }
    let schedule = relay(&model, &everything(&model, 2)).expect("a model of ours");
    let pools = Pools::of(&schedule, &depths(3, 1, 1, 1));
    let plan = StepPlan::new(schedule, pools).expect("pools were made for it");
    assert_eq!(uploads(&plan), [1, 3, 2]);
    assert_eq!(plan.updates, [BlockId(0), BlockId(1), BlockId(2)]);
    assert_eq!(plan.carried, [BlockId(3)]);
}
