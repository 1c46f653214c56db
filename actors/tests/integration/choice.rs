//! Blocks of which rows choose parts: which uploads are cut, what they wait for, and which waits
//! are refused.

use crate::common::times::*;
use crate::common::*;
use l2l_actors::schedule::{
    BlockId, BoundaryId, ChosenBy, LayerId, Phase, Pools, RingModel, Role, Schedule, StepPlan,
    deal, relay, resident,
};
use l2l_actors::virtual_time::Record;
use l2l_actors::work::Work;

/// Three layers and two tiles. The layers have the blocks 2 to 4; rows of the second one choose
/// parts of the blocks 7 and 8.
fn chosen() -> RingModel {
    choosing(model(3, 2, false), |number| number == 2)
}

const PARTS: [BlockId; 2] = [BlockId(7), BlockId(8)];

fn schedule(waits_for_choice: bool) -> Schedule {
    let model = chosen();
    let mut selection = everything(&model, 4);
    selection.set_groups(2);
    selection.waits_for_choice = waits_for_choice;
    relay(&model, &selection).expect("a model of ours")
}

fn plan(schedule: &Schedule, weights: u32) -> StepPlan {
    let pools = Pools::of(schedule, &depths(weights, 1, 1, 4));
    StepPlan::new(schedule.clone(), pools).expect("pools were made for it")
}

/// The uploads of the blocks of which rows choose parts: phase, block, and what cuts them.
fn uploads(plan: &StepPlan) -> Vec<(Phase, BlockId, Option<ChosenBy>)> {
    let of_visit = |(index, visit): (usize, &l2l_actors::schedule::DeviceVisit)| {
        let phase = plan.visit(index).phase;
        let uploads: Vec<_> =
            visit.uploads().map(|of| (phase, of.portion.block, of.chosen_by)).collect();
        uploads
    };
    let all = plan.device_visits.iter().enumerate().flat_map(of_visit);
    all.filter(|(_, block, _)| PARTS.contains(block)).collect()
}

/// The boundary by which rows choose, as the stash has it.
fn choice(schedule: &Schedule) -> BoundaryId {
    let chosen = schedule.visits.iter().find_map(|visit| visit.chosen_by);
    let id = chosen.expect("rows of a layer choose");
    assert_eq!(schedule.boundary(id).role, Role::Own(1));
    id
}

/// Backward visits know what all groups chose. Forward visits know it where uploads wait.
#[test]
fn uploads_are_cut_where_the_choice_is_known() {
    let schedule_of = schedule;
    for waits in [false, true] {
        let schedule = schedule_of(waits);
        let boundary = choice(&schedule);
        let all = Some(ChosenBy { boundary, first: 0, end: 4 });
        let forward = all.filter(|_| waits);
        let [first, second] = PARTS;
        let expected = [
            (Phase::Forward, first, forward),
            (Phase::Forward, second, forward),
            (Phase::Backward, second, all),
            (Phase::Backward, first, all),
        ];
        assert_eq!(uploads(&plan(&schedule, 1)), expected, "{waits}");
    }
}

/// An upload whose block stays in its slot serves all visits until its last use.
#[test]
fn a_block_that_stays_is_cut_by_all_its_visits() {
    // With a slot for each block, those of the forward pass stay until the backward pass.
    let all_stay = |waits| uploads(&plan(&schedule(waits), 100));
    assert!(all_stay(false).iter().all(|(_, _, chosen_by)| chosen_by.is_none()));
    let cut = all_stay(true);
    assert!(cut.iter().all(|(phase, _, chosen_by)| {
        *phase == Phase::Forward && chosen_by.is_some_and(|all| all.micro_batches() == (0..4))
    }));
    assert_eq!(cut.len(), 2);
    // One micro-batch after the other: what the next one chooses is not known in time.
    let model = chosen();
    let mut selection = everything(&model, 4);
    selection.waits_for_choice = true;
    let schedule = resident(&model, &selection).expect("a model of ours");
    assert!(uploads(&plan(&schedule, 100)).iter().all(|(_, _, chosen_by)| chosen_by.is_none()));
    let each = uploads(&plan(&schedule, 1));
    assert_eq!(each.len(), 4 * 4);
    assert!(
        each.iter().all(|(_, _, chosen_by)| {
            chosen_by.is_some_and(|one| one.micro_batches().len() == 1)
        })
    );
}

/// A gradient has contributions where a row of its group chose.
#[test]
fn gradients_are_cut_by_group() {
    let schedule = schedule(false);
    let boundary = choice(&schedule);
    let times = Times { upload: 3, compute: 2, ..Times::default() };
    let records = timeline(&schedule, &depths(2, 1, 1, 4), times, false, 1);
    let of_gradient = |record: &Record| match record.work {
        Work::DownloadGradient { portion, group, chosen_by, .. } => {
            Some((portion.block, group, chosen_by))
        }
        _ => None,
    };
    let cut: Vec<_> = records.iter().filter_map(of_gradient).collect();
    for (block, group, chosen_by) in cut {
        let of_group = ChosenBy { boundary, first: 2 * group, end: 2 * group + 2 };
        let expected = PARTS.contains(&block).then_some(of_group);
        assert_eq!(chosen_by, expected, "{block} of group {group}");
    }
}

/// The Prefetcher waits for the choice of all micro-batches. Without the wait, blocks come while
/// the device computes what chooses.
#[test]
fn uploads_wait_for_what_rows_choose() {
    let times = Times { upload: 10, compute: 7, ..Times::default() };
    let of = |waits: bool| {
        let schedule = schedule(waits);
        let boundary = choice(&schedule);
        let records = timeline(&schedule, &depths(3, 1, 1, 4), times, false, 1);
        let begins = |record: &&Record| match record.work {
            Work::UploadBlock { portion, .. } => portion.block == PARTS[0],
            _ => false,
        };
        let known = |record: &&Record| match record.work {
            Work::DownloadBoundary { outputs, .. } => outputs.boundary == boundary,
            _ => false,
        };
        let ends = records.iter().filter(known).map(|record| record.end);
        let first = records.iter().find(begins).expect("it is uploaded").begin;
        (first, ends.max().expect("it is downloaded"))
    };
    let (begin, known) = of(true);
    assert!(begin >= known, "{begin:?} {known:?}");
    let (begin, known) = of(false);
    assert!(begin < known, "{begin:?} {known:?}");
}

/// A block of which rows choose, by what a layer of another device writes, stands in front of what
/// that layer waits for: such a wait would not end. By what a layer of the same device writes, it
/// stands behind.
#[test]
fn a_choice_that_waits_for_its_upload_is_refused() {
    let base = model(3, 2, false);
    let schedule = deal(relay(&base, &everything(&base, 4)).expect("a model of ours"), 2);
    let chosen_by_layer = |number: u32| {
        let mut schedule = schedule.clone();
        let writer = schedule.device_visits().find(|visit| visit.layer == LayerId(number));
        let written = writer.expect("it is visited").writes[0];
        let third = schedule.visits.iter_mut().filter(|visit| visit.layer == LayerId(3));
        third.for_each(|visit| visit.chosen_by = Some(written));
        let pools = Pools::of(&schedule, &depths(2, 1, 1, 1));
        StepPlan::new(schedule, pools)
    };
    chosen_by_layer(1).expect("the same device writes it");
    let refused = chosen_by_layer(2).expect_err("another device writes it").to_string();
    let says = "layer 3 forward: its weights would wait for ever for what rows choose of a block";
    assert!(refused.contains(says), "{refused}");
}

/// A choice that no step of the layer writes is refused.
#[test]
fn a_choice_is_of_the_layer() {
    let mut model = model(3, 2, false);
    model.layers[2].steps[0].chosen_by = Some(Role::Own(1));
    let refused = relay(&model, &everything(&model, 1)).expect_err("nothing writes it");
    let says = "layer 2 has blocks that are chosen by own tensor 1, which no earlier step of it";
    assert!(refused.reason.contains(says), "{refused}");
}
