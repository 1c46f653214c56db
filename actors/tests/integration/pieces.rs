//! Layers in pieces: what portions, partial sums and merges do, and what breaks a sum.

use std::sync::Arc;

use crate::common::*;
use crate::runs::{ends, steps};
use l2l_actors::schedule::{
    ALL_CHUNKS, BlockId, Capacities, Cut, Fetch, LayerId, Phase, Pipeline, Place, Pools, Portion,
    Ranks, Refusal, RingModel, Role, Schedule, StepPlan, Visit, deal, deal_groups, pipeline, relay,
    resident,
};
use l2l_actors::work::Work;
use l2l_actors::{serial, virtual_time};

/// Three layers and a tile; the middle layer is in pieces, and its block is 2.
fn cut(pieces: [u16; 2]) -> RingModel {
    in_pieces(model(3, 1, false), pieces, |number| number == 2)
}

const CUT: BlockId = BlockId(2);

fn of_layer(schedule: &Schedule) -> Vec<&Visit> {
    schedule.device_visits().filter(|visit| visit.layer == LayerId(2)).collect()
}

fn planned(schedule: &Schedule, depths: &Capacities) -> StepPlan {
    let pools = Pools::of(schedule, depths);
    StepPlan::new(schedule.clone(), pools).expect("a schedule of ours")
}

/// What pieces read and write, forward and backward: one sum of two pieces, one of three.
#[test]
fn pieces_hand_partial_sums_on() {
    let model = cut([2, 3]);
    let schedule = relay(&model, &everything(&model, 1)).expect("a model of ours");
    let roles =
        |ids: &[_]| -> Vec<Role> { ids.iter().map(|&id| schedule.boundary(id).role).collect() };
    let all = of_layer(&schedule);
    let visits: Vec<_> = all
        .iter()
        .map(|visit| (visit.cut.expect("a piece"), roles(&visit.reads), roles(&visit.writes)))
        .collect();
    let hidden = Role::Hidden;
    let partial = Role::Partial;
    let down = Role::HiddenGradient;
    let sum = Role::PartialGradient;
    let forward = [
        (0, vec![hidden], vec![partial]),
        (1, vec![hidden, partial], vec![hidden]),
        (2, vec![hidden], vec![partial]),
        (3, vec![hidden, partial], vec![partial]),
        (4, vec![hidden, partial], vec![hidden]),
    ];
    assert_eq!(visits[..5], forward);
    let backward = [
        (4, vec![hidden, down], vec![sum]),
        (3, vec![hidden, down, sum], vec![sum]),
        (2, vec![hidden, down, sum], vec![down]),
        (1, vec![hidden, down], vec![sum]),
        (0, vec![hidden, down, sum], vec![down]),
    ];
    assert_eq!(visits[5..], backward);
    // All pieces of a sum read one gradient, and each sum has its own.
    let gradient = |at: usize| schedule.with_role(&all[at].reads, down);
    assert_eq!([gradient(5), gradient(6)], [gradient(7); 2]);
    assert_eq!(gradient(8), gradient(9));
    assert_eq!(gradient(8), schedule.with_role(&all[7].writes, down));
}

/// With nothing to train below, the first piece hands no gradient down. The others go on to do so:
/// the first one trains what stands before the sum.
#[test]
fn partial_gradients_end_with_their_sum() {
    let model = cut([1, 2]);
    let mut selection = everything(&model, 1);
    selection.frozen = vec![BlockId(0), BlockId(1)];
    let schedule = relay(&model, &selection).expect("a model of ours");
    let writes: Vec<usize> = of_layer(&schedule).iter().map(|visit| visit.writes.len()).collect();
    assert_eq!(writes, [1, 1, 1, 1, 1, 0]);
    ends(&schedule, &depths(1, 1, 1, 1), false);
}

/// Boundary bytes of a layer, by hidden states: of one sum with P pieces up 3 P - 2 and down
/// 2 P - 1 forward, up 4 P - 2 and down 2 P - 1 backward, on any number of devices.
#[test]
fn bytes_of_partial_sums_are_a_formula() {
    let bytes = |model: &RingModel, devices: u32| {
        let schedule = relay(model, &everything(model, 1)).expect("a model of ours");
        let schedule = deal(schedule, devices);
        let of = |ids: &[_]| -> u64 { ids.iter().map(|&id| schedule.stashed_bytes(id, 0)).sum() };
        let all = of_layer(&schedule);
        let up: u64 = all.iter().map(|visit| of(&visit.reads)).sum();
        let down: u64 = all.iter().map(|visit| of(&visit.writes)).sum();
        (up / 100, down / 100)
    };
    assert_eq!(bytes(&model(3, 1, false), 1), (3, 2));
    for (pieces, expected) in [
        ([1, 1], (6, 4)),
        ([1, 2], (13, 8)),
        ([1, 4], (27, 16)),
        ([2, 4], (34, 20)),
        ([2, 8], (62, 36)),
        ([4, 8], (76, 44)),
    ] {
        for devices in 1..=3 {
            assert_eq!(bytes(&cut(pieces), devices), expected, "{pieces:?}");
        }
    }
}

/// A device holds a portion where it would hold a block: uploads and gradients are of portions, and
/// the block is updated once.
#[test]
fn devices_hold_portions_and_the_host_blocks() {
    let model = cut([1, 3]);
    let mut selection = everything(&model, 4);
    selection.set_groups(2);
    let schedule = relay(&model, &selection).expect("a model of ours");
    for deferred in [false, true] {
        let schedule = schedule.clone();
        let config = config(&schedule, &depths(1, 1, 1, 2), deferred);
        assert_eq!(config.pools.reduced, 2);
        let run = virtual_time::run(
            config,
            |_| ticks(1),
            async move |mut relay| {
                step_of(&mut relay, &schedule, ()).await.expect("nothing fails here");
                relay.settle().await.expect("nothing fails here");
                relay.stop().await.expect("nothing fails here");
            },
        );
        let mut portions = Vec::new();
        let mut merged = Vec::new();
        let mut updates = 0;
        for record in run.expect("it ends").1 {
            match record.work {
                Work::UploadBlock { portion, .. } if portion.block == CUT => {
                    assert_eq!(record.bytes, 1002 / 4);
                    portions.extend(portion.cut);
                }
                Work::DownloadGradient { portion, .. } if portion.block == CUT => {
                    assert_eq!(record.bytes, 2004 / 4);
                }
                Work::Merge { portion, .. } => merged.push(portion),
                Work::Update { block, .. } if block == CUT => {
                    assert_eq!(merged.len(), 4);
                    updates += 1;
                }
                _ => {}
            }
        }
        assert_eq!(portions, [0, 1, 2, 3, 3, 2, 1, 0]);
        let of = |cut| Portion { block: CUT, cut: Some(cut) };
        assert_eq!((merged, updates), ([3, 2, 1, 0].map(of).to_vec(), 1));
    }
    assert_eq!(Portion { block: CUT, cut: Some(1) }.to_string(), "portion 1 of block 2");
}

/// Portions that are uploaded one after the other share the read of their block, on one device and
/// on several.
#[test]
fn portions_share_the_read_of_their_block() {
    let model = cut([1, 3]);
    let in_memory = relay(&model, &everything(&model, 2)).expect("a model of ours");
    let file = on_file(model);
    let on_file = relay(&file, &everything(&file, 2)).expect("a model of ours");
    let ranks = Schedule { ranks: Ranks { count: 2, dealt: true }, ..in_memory };
    for schedule in [on_file, ranks] {
        for devices in 1..=3 {
            let schedule = deal(schedule.clone(), devices);
            let plan = planned(&schedule, &depths(1, 1, 1, 1));
            let visits = plan.fetches.iter().filter_map(|fetch| match fetch {
                Fetch::Read { visits, block } if *block == CUT => Some(visits.len()),
                _ => None,
            });
            let visits: Vec<usize> = visits.collect();
            assert_eq!(visits.len(), 2, "{devices} devices: {visits:?}");
            assert_eq!(visits[0], 4);
            for deferred in [false, true] {
                ends(&schedule, &depths(1, 1, 1, 1), deferred);
            }
        }
    }
}

/// All schedules run to their end, and the walk on one page does the same work.
#[test]
fn pieces_run_in_every_schedule() {
    for pieces in [[1, 1], [1, 2], [2, 4]] {
        let mut models = vec![cut(pieces), saving(cut(pieces), |_| true)];
        models.push(keeping(models[1].clone(), |_| true));
        models.push(on_file(cut(pieces)));
        for model in models {
            let mut selection = everything(&model, 4);
            selection.set_groups(2);
            let relay = relay(&model, &selection).expect("a model of ours");
            let groups = deal_groups(relay.clone(), &[1, 1]);
            let order = Pipeline::one_forward_one_backward(3, 4);
            let schedules = [
                relay.clone(),
                deal(relay.clone(), 2),
                deal(relay.clone(), 5),
                groups.clone(),
                Schedule { shards: 2, ..groups },
                Schedule { ranks: Ranks { count: 2, dealt: true }, ..relay },
                resident(&model, &selection).expect("a model of ours"),
                pipeline(&model, &everything(&model, 4), &order).expect("a model of ours"),
            ];
            for schedule in &schedules {
                for deferred in [false, true] {
                    ends(schedule, &depths(1, 1, 1, 1), deferred);
                }
            }
        }
    }
}

/// Pieces of the first sum leave the keys of their own heads for later chunks.
#[test]
fn pieces_have_keys_of_their_own() {
    let whole = attending(model(3, 1, false), |_| true);
    let model = in_pieces(whole, [2, 2], |number| number == 2);
    let schedule = relay(&model, &in_chunks(&model, &[3, 2])).expect("a model of ours");
    let keys = of_layer(&schedule).into_iter().filter(|visit| visit.phase == Phase::Keys);
    let parts: Vec<u16> = keys.filter_map(|visit| visit.cut).collect();
    assert_eq!(parts, [1, 1, 0, 0]);
    assert!(model.layers[2].steps[0].reach == ALL_CHUNKS && model.layers[2].steps[2].reach == 0);
    for devices in 1..=3 {
        ends(&deal(schedule.clone(), devices), &depths(1, 1, 1, 1), false);
    }
}

#[test]
fn the_walk_on_one_page_merges_as_the_ring_does() {
    let model = cut([1, 2]);
    let schedule = relay(&model, &everything(&model, 2)).expect("a model of ours");
    let plan = planned(&schedule, &Capacities::default());
    let mut merges = Vec::new();
    serial::step(&plan, 0, false, |_, work| {
        if let Work::Merge { portion, reduced, into } = work {
            merges.push((portion.cut, reduced, into));
        }
        1.0
    });
    assert_eq!(merges, [2, 1, 0].map(|cut| (Some(cut), 0, 1)));
}

fn sound() -> Schedule {
    let model = cut([1, 3]);
    relay(&model, &everything(&model, 2)).expect("a model of ours")
}

#[track_caller]
fn refused(reason: &str, change: impl Fn(&mut Schedule)) {
    let mut schedule = sound();
    let pools = Pools { devices: 2, ..Pools::of(&schedule, &Capacities::default()) };
    assert!(StepPlan::new(schedule.clone(), pools).is_ok());
    change(&mut schedule);
    let refusal: Refusal = StepPlan::new(schedule, pools).expect_err("a rule is broken");
    assert!(refusal.reason.contains(reason), "{refusal}");
}

/// Visits of the layer in pieces: forward 2 to 5, backward 10 to 13, from the last piece on.
#[test]
fn broken_sums_are_refused() {
    let partial = |s: &Schedule, at: usize, role| {
        s.with_role(&s.visits[at].reads, role).expect("it reads one")
    };
    // Read twice, and so another is skipped.
    refused("of micro-batch 0, which nobody reads", |s| {
        let first = partial(s, 4, Role::Partial);
        let last = partial(s, 5, Role::Partial);
        s.visits[5].reads.iter_mut().filter(|id| **id == last).for_each(|id| *id = first);
    });
    // Out of order.
    refused("before it is written", |s| s.visits.swap(3, 4));
    refused("before it is written", |s| s.visits.swap(10, 11));
    let four = cut([1, 4]);
    let mut swapped = relay(&four, &everything(&four, 2)).expect("a model of ours");
    [swapped.visits[4].cut, swapped.visits[5].cut] = [3, 2].map(Some);
    let pools = Pools::of(&swapped, &Capacities::default());
    let refusal = StepPlan::new(swapped, pools).expect_err("portions 2 and 3 are swapped");
    assert!(refusal.reason.contains("which portion 2 of it does not write"), "{refusal}");
    // Left out.
    refused("reads no partial sum, and is portion 3 of a sum over 1..4", |s| {
        let sum = partial(s, 5, Role::Partial);
        s.visits[5].reads.retain(|id| *id != sum);
    });
    refused("reads no partial gradient, and is portion 2 of a sum over 1..4", |s| {
        let sum = partial(s, 11, Role::PartialGradient);
        s.visits[11].reads.retain(|id| *id != sum);
    });
    refused("reads a partial sum, and is no portion of a sum", |s| {
        let sum = partial(s, 4, Role::Partial);
        s.visits[6].reads.push(sum);
    });
    refused("reads a partial sum, and is portion 0 of a sum over 0..1", |s| {
        let sum = partial(s, 4, Role::Partial);
        s.visits[2].reads.push(sum);
    });
}

#[test]
fn broken_portions_are_refused() {
    let all = |s: &mut Schedule, cut| {
        s.visits.iter_mut().filter(|v| v.layer == LayerId(2)).for_each(|v| v.cut = cut);
    };
    refused("needs all of block 2, which is cut", |s| all(s, None));
    refused("needs portion 4 of block 2, which has 4", |s| all(s, Some(4)));
    refused("needs a portion of block 1, which is whole", |s| s.visits[1].cut = Some(0));
    refused("is cut, and the schedule has no such block", |s| {
        let cuts = s.cuts[&CUT].clone();
        s.cuts.insert(BlockId(77), cuts);
    });
    refused("block 1 is cut into 0 portions", |s| _ = s.cuts.insert(BlockId(1), Vec::new()));
    refused("portions of block 2 that are one sum are apart", |s| {
        let cuts = s.cuts.get_mut(&CUT).expect("it is cut");
        *cuts = [0, 1, 0, 1].map(|sum| Cut { sum, ..cuts[0] }).to_vec();
    });
    refused("trains portion 3 of block 2 on another device", |s| {
        let half = s.visits[10].of_micro_batches(1..2);
        s.visits[10].micro_batches = 0..1;
        s.visits.insert(11, Visit { place: Place::Device(1), ..half });
    });
}

/// A model that declares portions which its blocks do not have gets no schedule.
#[test]
fn broken_declarations_are_refused() {
    let refusal = |change: &dyn Fn(&mut RingModel)| -> String {
        let mut model = cut([1, 3]);
        change(&mut model);
        let order = Pipeline::one_forward_one_backward(2, 2);
        let selection = everything(&model, 2);
        let refusal = pipeline(&model, &selection, &order).expect_err("a portion is unknown");
        assert_eq!(relay(&model, &selection).expect_err("a portion is unknown"), refusal);
        refusal.reason
    };
    let whole = refusal(&|model| model.cuts.clear());
    assert_eq!(whole, "layer 2 needs a portion of block 2, which is whole");
    let unknown = refusal(&|model| model.layers[2].steps[3].cut = Some(4));
    assert_eq!(unknown, "layer 2 needs portion 4 of block 2, which has 4");
    let sizes = refusal(&|model| model.layers[2].steps[2].reads[1].boundary.token_bytes = 8);
    assert!(sizes.contains("layer 2 reads partial sum as"), "{sizes}");
}

/// Landing slots: one for the gradient of the block that is being merged, one for a portion.
#[test]
fn too_few_landing_slots_are_refused() {
    let schedule = sound();
    let pools = Pools { reduced: 1, ..Pools::of(&schedule, &Capacities::default()) };
    let refusal = StepPlan::new(schedule.clone(), pools).expect_err("one slot");
    let reason = "merges portions of gradients in 2 landing slots; pool reduced has 1";
    assert_eq!(refusal.reason, reason);
    let mut plan = planned(&schedule, &Capacities::default());
    plan.pools.reduced = 1;
    assert!(plan.replay().is_err());
    assert!(steps(Arc::new(plan), false).is_err());
}

/// The labels are the oracle of the rules: these plans pass no rule, and run all the same.
#[test]
fn labels_show_broken_sums() {
    let sound = planned(&sound(), &Capacities::default());
    assert!(steps(Arc::new(sound.clone()), false).is_ok());
    let broken = |change: &dyn Fn(&mut StepPlan)| -> String {
        let mut plan = sound.clone();
        change(&mut plan);
        steps(Arc::new(plan), false).expect_err("a sum is broken")
    };
    let replaced = |at: usize, from: usize, role| {
        move |plan: &mut StepPlan| {
            let schedule = &mut plan.schedule;
            let other = schedule.with_role(&schedule.visits[from].reads, role).expect("a sum");
            let own = schedule.with_role(&schedule.visits[at].reads, role).expect("a sum");
            let reads = schedule.visits[at].reads.iter_mut();
            reads.filter(|id| **id == own).for_each(|id| *id = other);
        }
    };
    // A partial sum that is read twice: its place was given to another.
    let panic = broken(&replaced(5, 4, Role::Partial));
    assert!(panic.contains("holds Some(Taken)"), "{panic}");
    let panic = broken(&replaced(12, 11, Role::PartialGradient));
    assert!(panic.contains("holds Some(Taken)"), "{panic}");
    // A piece that reads none: what was summed before is lost.
    let panic = broken(&|plan| {
        let schedule = &mut plan.schedule;
        let sum = schedule.with_role(&schedule.visits[5].reads, Role::Partial).expect("a sum");
        schedule.visits[5].reads.retain(|id| *id != sum);
    });
    assert!(panic.contains("has no sum of the portions before its own"), "{panic}");
    // Pieces in another order, each with the sum of the one that ran before.
    let panic = broken(&|plan| {
        let cuts = plan.schedule.cuts.get_mut(&CUT).expect("it is cut");
        cuts[1].sum = 0;
    });
    assert!(panic.contains("has no sum of the portions before its own"), "{panic}");
    // A portion that is never merged.
    let panic = broken(&|plan| {
        let cuts = plan.schedule.cuts.get_mut(&CUT).expect("it is cut");
        cuts.push(Cut { sum: 2, ..cuts[3] });
    });
    assert!(panic.contains("Merged(Portion { block: BlockId(2), cut: Some(4) }"), "{panic}");
}
