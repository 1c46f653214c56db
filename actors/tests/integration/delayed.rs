//! A delay of one update: no deadlock in the smallest pools, steps between that do not train, and
//! what is hidden, as a formula.

use crate::common::times::Times;
use crate::common::*;
use crate::deadlock::{cases, config_of_cases, run_in_any_order};
use l2l_actors::schedule::{BlockId, Phase, Ranks, Schedule, relay};
use l2l_actors::virtual_time::{self, Record};
use l2l_actors::work::{Summed, Work};
use l2l_actors::{Operation, RingConfig};
use proptest::prelude::*;

proptest! {
    #![proptest_config(config_of_cases())]

    /// The oracle of memory checks at each operation that a step reads the version of its plan, and
    /// that updates read the gradients of their own batch.
    #[test]
    fn every_delayed_ring_ends_in_any_order(case in cases(), from in 0..=3_u64) {
        let mut case = case;
        case.deferred = true;
        let schedule = case.schedule();
        let config = RingConfig { delay_from: Some(from), ..case.config(&schedule) };
        let versions = run_in_any_order(config, &case, 4);
        let newest = if schedule.trains { 4 } else { 0 };
        prop_assert_eq!(versions, Ok(vec![newest; schedule.blocks.len()]));
    }

    /// The exposed update. Without a delay: all of it but what hides behind the next forward pass.
    /// With a delay: all of it but what hides behind a whole step.
    #[test]
    fn a_delay_hides_updates_behind_a_whole_step(
        layers in 2..=30_u32, micro_batches in 1..=8_u32, compute in 1..20_u64,
        backward in 1..=3_u64, update in 1..60_u64,
    ) {
        let model = model(layers, 0, false);
        let schedule = relay(&model, &everything(&model, micro_batches)).expect("ours");
        let times = Times { compute, update, ..Times::default() };
        let pass = u64::from(layers * micro_batches) * compute;
        let updates = u64::from(layers + 1) * update; // with that of the embedding
        let both = pass + backward * pass;
        prop_assert_eq!(period(&schedule, times, backward, Some(0)), updates.max(both));
        // The first layer waits for two updates, then each for one more.
        let visit = u64::from(micro_batches) * compute;
        let forward = if update > visit { updates + visit } else { 2 * update + pass };
        prop_assert_eq!(period(&schedule, times, backward, None), forward + backward * pass);
    }
}

/// With recomputation, a backward pass takes three times a forward pass. Updates that wait for a
/// norm hide behind the next forward pass, and with a delay behind both: so they need a quarter of
/// the tokens, and those that hide the update of the embedding.
#[test]
fn a_quarter_of_the_tokens_hides_updates() {
    const LAYERS: u32 = 12;
    const UPDATE: u64 = 16;
    let model = model(LAYERS, 0, false);
    let least = |delay_from: Option<u64>| {
        (1..=40_u32).find(|&micro_batches| {
            let schedule = relay(&model, &everything(&model, micro_batches)).expect("ours");
            let times = Times { compute: 1, update: UPDATE, ..Times::default() };
            // Nothing hides the two updates that the first layer waits for without a delay.
            let shown = if delay_from.is_none() { 2 * UPDATE } else { 0 };
            let computes = 4 * u64::from(LAYERS * micro_batches);
            period(&schedule, times, 3, delay_from) == computes + shown
        })
    };
    assert_eq!(least(None), Some(16));
    assert_eq!(least(Some(0)), Some((13 * 16_u32).div_ceil(12).div_ceil(4)));
}

/// The time from one step's end to the next one's, when many have passed. A backward visit takes
/// `backward` times a forward visit.
fn period(schedule: &Schedule, times: Times, backward: u64, delay_from: Option<u64>) -> u64 {
    let capacities = depths(2, 2, 2, 64);
    let config = RingConfig { delay_from, ..config(schedule, &capacities, true) };
    let durations = move |operation: &Operation| match *operation.work() {
        Work::Compute { device_visit, .. }
            if operation.step().plan.visit(device_visit).phase == Phase::Backward =>
        {
            ticks(backward * times.compute)
        }
        ref work => times.of(work),
    };
    let schedule = schedule.clone();
    let run = virtual_time::run(config, durations, async move |mut relay| {
        let observer = relay.observer();
        let mut ends = Vec::new();
        for _ in 0..5 {
            step_of(&mut relay, &schedule, ()).await.expect("nothing fails here");
            ends.push(observer.now());
        }
        relay.stop().await.expect("nothing fails here");
        (ends[4] - ends[3]).as_nanos() as u64
    });
    run.expect("it ends").0
}

/// The versions that uploads of a block name, step by step.
fn uploaded(records: &[Record], block: BlockId) -> Vec<(u64, u64)> {
    let of = |record: &Record| match record.work {
        Work::UploadBlock { portion, version, .. } if portion.block == block => {
            Some((record.step, version))
        }
        _ => None,
    };
    let mut all: Vec<(u64, u64)> = records.iter().filter_map(of).collect();
    all.dedup();
    all
}

/// Steps that train read the version before the newest; steps between them, the newest. They make
/// no version, and a run that continues another counts from its versions on.
#[test]
fn versions_count_training_steps() {
    let model = model(3, 0, false);
    let trains = everything(&model, 2);
    let mut evaluates = trains.clone();
    evaluates.frozen = (0..model.blocks.len() as u32).map(BlockId).collect();
    let [trains, evaluates] = [trains, evaluates].map(|one| relay(&model, &one).expect("ours"));
    for (delay_from, expected) in
        [(None, [0, 1, 2, 2, 2]), (Some(0), [0, 0, 2, 2, 1]), (Some(2), [0, 1, 2, 2, 1])]
    {
        let depths = depths(1, 1, 1, 1);
        let config = RingConfig { delay_from, ..config(&trains, &depths, true) };
        let order = [&trains, &trains, &evaluates, &evaluates, &trains].map(Schedule::clone);
        let (newest, records) = virtual_time::run(
            config,
            |_| ticks(1),
            async move |mut relay| {
                for schedule in &order {
                    step_of(&mut relay, schedule, ()).await.expect("nothing fails here");
                }
                let newest = relay.newest();
                relay.stop().await.expect("nothing fails here");
                newest
            },
        )
        .expect("it ends");
        assert_eq!(newest, 3);
        let found: Vec<u64> = uploaded(&records, BlockId(1)).iter().map(|(_, v)| *v).collect();
        assert_eq!(found, expected, "{delay_from:?}");
    }
}

/// With files, a rank takes part in a step's norm when its state before the step is sealed, however
/// long that takes. So no rank writes over a state that another one may have to go back to.
#[test]
fn a_norm_waits_for_the_seal_of_the_step_before() {
    let model = on_file(model(3, 2, false));
    let mut schedule = relay(&model, &everything(&model, 2)).expect("ours");
    schedule.ranks = Ranks { count: 2, dealt: true };
    let depths = depths(16, 16, 16, 16);
    let config = RingConfig { delay_from: Some(0), ..config(&schedule, &depths, true) };
    // The last update ends behind all else, and then its state is sealed.
    let durations = |operation: &Operation| match operation.work() {
        Work::Seal => ticks(1000),
        Work::Update { .. } => ticks(100),
        _ => ticks(1),
    };
    let run = virtual_time::run(config, durations, async move |mut relay| {
        for _ in 0..4 {
            step_of(&mut relay, &schedule, ()).await.expect("nothing fails here");
        }
        relay.stop().await.expect("nothing fails here");
    });
    let (_, records) = run.expect("it ends");
    let of = |step: u64, work: Work| {
        let mut all = records.iter().filter(|record| record.step == step && record.work == work);
        all.next().expect("each step has one")
    };
    let squares = Work::AllReduce { of: Summed::Squares };
    let first = records.iter().map(|record| record.step).min().expect("there are some");
    for step in first + 1..first + 4 {
        assert!(of(step, squares.clone()).begin >= of(step - 1, Work::Seal).end, "{step}");
    }
}

/// The head needs the regions of tied rows first, so they are updated first.
#[test]
fn updates_of_tied_rows_hide_too() {
    let model = model(8, 1, true);
    let schedule = relay(&model, &everything(&model, 4)).expect("ours");
    let of = |update| {
        let times = Times { compute: 10, update, ..Times::default() };
        period(&schedule, times, 1, Some(0))
    };
    assert_eq!(of(60), of(1));
}

/// The regions of tied rows on file wait for the update that reads them, however slow it is.
#[test]
fn regions_on_file_wait_for_slow_updates() {
    let model = on_file(model(3, 6, true));
    let schedule = relay(&model, &everything(&model, 2)).expect("ours");
    let times = Times { compute: 1, update: 1000, file: 1, ..Times::default() };
    assert!(period(&schedule, times, 1, Some(0)) >= 9 * 1000);
}
