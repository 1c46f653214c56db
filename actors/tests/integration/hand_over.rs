//! What the next visit of a device reads stays there: the time of a step before and after, as
//! formulas, and what stays.

use std::time::Duration;

use crate::common::times::end_of;
use crate::common::*;
use l2l_actors::Operation;
use l2l_actors::schedule::{
    Encoding, LayerId, Phase, Role, Schedule, Selection, Visit, hand_over, relay,
};
use l2l_actors::virtual_time;
use l2l_actors::work::{Work, WorkKind};
use proptest::prelude::*;

/// Slots for inputs that come ahead.
const STASH: u32 = 6;

fn config_of_cases() -> ProptestConfig {
    let cases = if whole() { 300 } else { 100 };
    ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(cases) }
}

/// The end of a step in which a visit of these layers computes nothing, one of any other takes
/// `compute` for each micro-batch, and a copy of a boundary takes `copy`.
fn end(schedule: &Schedule, visits: u32, light: &[LayerId], compute: u64, copy: u64) -> u64 {
    let mut config = config(schedule, &depths(2, 2, 2, STASH), false);
    config.pools.visits = config.pools.visits.max(visits);
    let schedule = schedule.clone();
    let light = light.to_vec();
    let times = move |operation: &Operation| -> Duration {
        match (operation.work().row().kind, operation.work()) {
            (WorkKind::Input | WorkKind::Output, _) => ticks(copy),
            (_, &Work::Compute { device_visit, .. }) => {
                let layer = operation.step().plan.visit(device_visit).layer;
                ticks(if light.contains(&layer) { 0 } else { compute })
            }
            _ => ticks(0),
        }
    };
    let run = virtual_time::run(config, times, async move |mut relay| {
        step_of(&mut relay, &schedule, ()).await.expect("nothing fails here");
        relay.stop().await.expect("nothing fails here");
    });
    end_of(&run.expect("it ends").1)
}

proptest! {
    #![proptest_config(config_of_cases())]

    /// With one micro-batch a layer, a device waits for two copies between any two visits (and once
    /// for the labels beside a hidden state). When boundaries stay there it waits for the first
    /// input alone, and for the last output.
    #[test]
    fn one_micro_batch_waits_for_no_copy_between_visits(
        layers in 2..=30_u32, compute in 1..20_u64, part in 0..=100_u64,
    ) {
        let model = model(layers, 0, false);
        let schedule = relay(&model, &everything(&model, 1)).expect("a model of ours");
        let copy = compute * part / 200;
        let visits = 2 * u64::from(layers);
        let computes = visits * compute;
        let before = end(&schedule, 0, &[], compute, copy);
        prop_assert_eq!(before, computes + (2 * visits + 1) * copy);
        let after = end(&hand_over(schedule), 0, &[], compute, copy);
        prop_assert_eq!(after, computes + 2 * copy);
    }

    /// A layer that computes nothing, below the head, takes turns with the layer before it. So the
    /// step takes what the others compute, the first input and the last output; and at the turn,
    /// where blocks change their slots, five copies more.
    #[test]
    fn a_light_layer_hides_behind_its_neighbour(
        layers in 2..=12_u32, micro_batches in 4..=12_u32,
        compute in 1..20_u64, part in 1..=100_u64,
    ) {
        let model = model(layers + 1, 1, false);
        let light = vec![LayerId(layers + 1)];
        let selection = everything(&model, micro_batches);
        let plain = relay(&model, &selection).expect("a model of ours");
        let rounds = relay(&model, &Selection { light: light.clone(), ..selection });
        let rounds = hand_over(rounds.expect("a model of ours"));
        let compute = 4 * compute;
        let copy = (compute * part / 400).max(1);
        let all = u64::from(micro_batches) * (2 * u64::from(layers) + 1) * compute;
        let after = end(&rounds, 5, &light, compute, copy);
        prop_assert_eq!(after, all + 7 * copy);
        let before = end(&plain, 5, &light, compute, copy);
        prop_assert!(before > after, "{} {}", before, after);
    }
}

/// A boundary that the next visit alone reads takes no slot. One that is read later, too, goes to
/// the stash as well. What the stash rounds goes there alone.
#[test]
fn what_stays_takes_no_slot() {
    let model = model(3, 1, false);
    let schedule = relay(&model, &everything(&model, 1)).expect("a model of ours");
    let role = |schedule: &Schedule, id: &_| schedule.boundary(*id).role;
    let found = hand_over(schedule.clone());
    let of = |layer: u32, phase| {
        let is_it = |visit: &&Visit| visit.layer == LayerId(layer) && visit.phase == phase;
        found.device_visits().find(is_it).expect("it is visited")
    };
    let hidden = of(1, Phase::Forward);
    assert_eq!(hidden.copies.len(), 1, "the backward pass of layer 2 reads it from the stash");
    assert_eq!(of(2, Phase::Forward).kept, [hidden.copies[0].to]);
    assert!(of(2, Phase::Forward).reads.is_empty());
    let gradient = of(3, Phase::Backward);
    assert!(gradient.writes.is_empty());
    assert_eq!(role(&found, &gradient.keeps[0]), Role::HiddenGradient);
    assert_eq!(of(2, Phase::Backward).kept, gradient.keeps);
    // Several micro-batches of a layer, or a stash that rounds.
    let several = relay(&model, &everything(&model, 2)).expect("a model of ours");
    assert_eq!(hand_over(several.clone()), several);
    let mut rounded = schedule;
    rounded.boundaries.iter_mut().for_each(|boundary| boundary.encoding = Encoding::Bf16);
    assert_eq!(hand_over(rounded.clone()), rounded);
}
