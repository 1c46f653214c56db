//! What overlap must give, as formulas: each for 300 random rings in virtual time.

use std::time::Duration;

use crate::common::times::*;
use crate::common::*;
use l2l_actors::schedule::{BlockId, LayerId, Phase, Pools, Schedule, StepPlan, deal, relay};
use l2l_actors::virtual_time::{self, Record};
use l2l_actors::work::{Lane, Work, WorkKind};
use proptest::prelude::*;

/// A stack without tiles and its schedule. Stack layer `l` is block and layer `l + 1`.
fn stack(layers: u32, micro_batches: u32) -> Schedule {
    let model = model(layers, 0, false);
    relay(&model, &everything(&model, micro_batches)).expect("a model of ours")
}

fn config_of_cases() -> ProptestConfig {
    let cases = if whole() { 300 } else { 100 };
    ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(cases) }
}

/// Begin of the first and end of the last operation of a layer's backward visit.
fn backward(records: &[Record], plan: &StepPlan, layer: u32) -> (Duration, Duration) {
    let of_visit = |record: &&Record| match record.work {
        Work::Compute { device_visit, .. } => {
            let visit = plan.visit(device_visit);
            visit.layer == LayerId(layer + 1) && visit.phase == Phase::Backward
        }
        _ => false,
    };
    let met: Vec<&Record> = records.iter().filter(of_visit).collect();
    (met[0].begin, met[met.len() - 1].end)
}

proptest! {
    #![proptest_config(config_of_cases())]

    /// One slot: nothing hides, upload and compute add up. At the turn the last layer's block is
    /// there already.
    #[test]
    fn with_one_slot_upload_and_compute_add_up(
        layers in 1..=40_u32, micro_batches in 1..=16_u32,
        upload in 0..100_u64, compute in 0..20_u64,
    ) {
        let schedule = stack(layers, micro_batches);
        let times = Times { upload, compute, ..Times::default() };
        let records = timeline(&schedule, &depths(1, 1, 1, micro_batches), times, false, 1);
        let l = u64::from(layers);
        let m = u64::from(micro_batches);
        prop_assert_eq!(end_of(&records), (2 * l - 1) * upload + 2 * l * m * compute);
    }

    /// Two slots: every upload but the first hides behind the visit before, if it is not longer
    /// and if the inputs of a visit fit in the device's stash slots: a block is uploaded in one
    /// piece, behind the inputs that are fetched ahead and in front of the others.
    #[test]
    fn with_two_slots_only_the_first_upload_shows(
        layers in 1..=40_u32, micro_batches in 1..=16_u32,
        compute in 1..20_u64, part in 0..=100_u64,
    ) {
        let schedule = stack(layers, micro_batches);
        let l = u64::from(layers);
        let m = u64::from(micro_batches);
        let upload = m * compute * part / 100;
        let times = Times { upload, compute, ..Times::default() };
        let stash = 3 * micro_batches; // a backward visit brings up to three boundaries
        let records = timeline(&schedule, &depths(2, 2, 2, stash), times, false, 1);
        prop_assert_eq!(end_of(&records), upload + 2 * l * m * compute);
    }

    /// Eager: a layer's download and update hide behind the backward of the layer below.
    #[test]
    fn eager_updates_start_before_the_second_backward_below_ends(
        layers in 3..=40_u32, micro_batches in 1..=16_u32, compute in 1..20_u64,
        parts in (0..=100_u64, 0..=100_u64),
    ) {
        let schedule = stack(layers, micro_batches);
        let visit = u64::from(micro_batches) * compute;
        let both = visit * parts.0 / 100;
        let download = both * parts.1 / 100;
        let update = both - both * parts.1 / 100;
        let times = Times { compute, download, update, ..Times::default() };
        let capacities = depths(2, 2, 2, 3 * micro_batches);
        let records = timeline(&schedule, &capacities, times, false, 1);
        let plan = StepPlan::new(schedule.clone(), config(&schedule, &capacities, false).pools);
        let plan = plan.expect("pools were made for it");
        for layer in 2..layers {
            let of_layer = |record: &&Record| {
                matches!(record.work, Work::Update { block, .. } if block == BlockId(layer + 1))
            };
            let update = records.iter().find(of_layer).expect("every block is updated");
            let (_, end) = backward(&records, &plan, layer - 2);
            prop_assert!(update.begin < end, "layer {}: {:?} {:?}", layer, update.begin, end);
        }
    }

    /// Deferred: updates in forward order, each before its block's next upload, which does not
    /// wait for the updates behind it.
    #[test]
    fn deferred_updates_run_just_ahead_of_the_next_steps_uploads(
        layers in 2..=40_u32, micro_batches in 1..=16_u32,
        (upload, compute, update) in (1..50_u64, 1..20_u64, 1..50_u64),
    ) {
        let schedule = stack(layers, micro_batches);
        let times = Times { upload, compute, update, ..Times::default() };
        let capacities = depths(2, 2, 2, 4);
        let records = timeline(&schedule, &capacities, times, true, 2);
        let plan = StepPlan::new(schedule.clone(), config(&schedule, &capacities, true).pools);
        let of = |lane, step| {
            records.iter().filter(move |record| record.lane == lane && record.step == step)
        };
        let updated: Vec<(BlockId, Duration)> = of(Lane::Update, 0)
            .filter_map(|record| match record.work {
                Work::Update { block, .. } => Some((block, record.end)),
                _ => None,
            })
            .collect();
        let order: Vec<BlockId> = updated.iter().map(|(block, _)| *block).collect();
        prop_assert_eq!(&order, &plan.expect("pools were made for it").updates);
        let mut first_upload = None;
        for record in of(Lane::Upload, 1) {
            if let Work::UploadBlock { portion, .. } = record.work {
                let is_it = |(id, _): &&(BlockId, _)| *id == portion.block;
                let (_, end) = updated.iter().find(is_it).expect("updated");
                prop_assert!(*end <= record.begin);
                first_upload = first_upload.or(Some(record.begin));
            }
        }
        let (_, last_update) = updated[updated.len() - 1];
        prop_assert!(first_upload.is_some_and(|begin| begin < last_update));
    }
}

proptest! {
    #![proptest_config(config_of_cases())]

    /// Layers dealt over N devices: all work without a gap but for the way of one micro-batch over
    /// the devices, there in the forward and back in the backward.
    #[test]
    fn dealt_layers_take_an_nth_and_one_way_over_the_devices(
        devices in 1..=5_u32, rounds in 1..=6_u32, more in 0..=8_u32,
        forward in 1..20_u64, backward in 1..40_u64,
    ) {
        let layers = devices * rounds;
        let micro_batches = devices + more;
        let schedule = deal(stack(layers, micro_batches), devices);
        let capacities = depths(2, 2, 2, 3 * micro_batches);
        let config = config(&schedule, &capacities, false);
        let times = move |operation: &l2l_actors::Operation| {
            ticks(match operation.work().row().kind {
                WorkKind::Forward => forward,
                WorkKind::Backward => backward,
                _ => 0,
            })
        };
        let run = virtual_time::run(config, times, async move |mut relay| {
            step_of(&mut relay, &schedule, ()).await.expect("nothing fails here");
            relay.stop().await.expect("nothing fails here");
        });
        let (_, records) = run.expect("it ends");
        let n = u64::from(devices);
        let all = u64::from(layers * micro_batches);
        let both = forward + backward;
        prop_assert_eq!(end_of(&records), all / n * both + (n - 1) * both);
    }

    /// Sharded transfer: each link moves an nth of the weights that one device's would, and copies
    /// between devices hide behind uploads that are at least as long.
    #[test]
    fn sharded_blocks_take_an_nth_of_each_link(
        layers in 1..=20_u32, each in 1..=3_u32, devices in 2..=4_u32,
        upload in 1..100_u64, part in 0..=100_u64,
    ) {
        let model = model(layers, 0, false);
        let sharded = sharded(&model, each * devices, devices);
        let whole = Schedule { shards: 1, ..sharded.clone() };
        let plan = |schedule: &Schedule| {
            let pools = Pools::of(schedule, &depths(1, 1, 1, 1));
            StepPlan::new(schedule.clone(), pools).expect("pools were made for it")
        };
        let of_whole = plan(&whole);
        let of_sharded = plan(&sharded);
        let all = of_whole.walks[0].traffic.weights;
        let sum: u64 = of_sharded.walks.iter().map(|walk| walk.traffic.weights).sum();
        prop_assert_eq!(sum, all);
        for (walk, whole) in of_sharded.walks.iter().zip(&of_whole.walks) {
            prop_assert_eq!(whole.traffic.weights, all);
            prop_assert_eq!(walk.traffic.weights + walk.traffic.shards, all);
            // Shards are cut at multiples of 256 bytes: blocks here have about 1,000.
            let nth = all / u64::from(devices);
            prop_assert!(walk.traffic.weights <= nth + 256 * 2 * u64::from(layers));
            prop_assert_eq!(walk.traffic.gradients, whole.traffic.gradients);
        }
        // One slot: a block's upload and copy add up. The last layer's block is there at the turn.
        let peer = upload * part / 100;
        let times = Times { upload, peer, ..Times::default() };
        let records = timeline(&sharded, &depths(1, 1, 1, 64), times, false, 1);
        prop_assert_eq!(end_of(&records), (2 * u64::from(layers) - 1) * (upload + peer));
        // Two slots: the copy of a block hides behind the upload of the next.
        let records = timeline(&sharded, &depths(2, 1, 1, 64), times, false, 1);
        let two = StepPlan::new(sharded.clone(), Pools::of(&sharded, &depths(2, 1, 1, 64)));
        let two = two.expect("pools were made for it");
        let own = two.walks[0].visits.iter().map(|&visit| &two.device_visits[visit]);
        let fetches = own.flat_map(|visit| visit.uploads()).count() as u64;
        // At the turn the last block's copy frees the slot that the next upload waits for.
        let shown = if layers > 2 { 2 } else { 1 };
        prop_assert_eq!(end_of(&records), fetches * upload + shown * peer);
    }
}
