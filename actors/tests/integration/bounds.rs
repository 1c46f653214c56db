//! Slots in use never exceed their pools and reach them; pools do not grow with depth or batch;
//! steps may be of any subset, in any order.

use crate::common::*;
use l2l_actors::schedule::{BlockId, Capacities, Pools, relay};
use l2l_actors::virtual_time;
use l2l_actors::{RingConfig, RingError};

/// The most slots of each pool that were taken at once in one step.
fn peaks(layers: u32, micro_batches: u32, capacities: Capacities) -> (Pools, Vec<(String, u32)>) {
    let model = model(layers, 2, true);
    let schedule = relay(&model, &everything(&model, micro_batches)).expect("a model of ours");
    let config = config(&schedule, &capacities, false);
    let pools = config.pools;
    // Slow downloads and updates fill what leaves; slow computes fill what comes.
    let mut most: Vec<(String, u32)> = Vec::new();
    for slow in ["upload", "compute", "download", "update"] {
        let config = config.clone();
        let schedule = schedule.clone();
        let times = move |o: &l2l_actors::Operation| {
            ticks(if o.work().lane().name() == slow { 1000 } else { 1 })
        };
        let run = virtual_time::run(config, times, async move |mut relay| {
            step_of(&mut relay, &schedule, ()).await.expect("nothing fails here");
            let snapshot = relay.snapshot();
            relay.stop().await.expect("nothing fails here");
            snapshot.pools
        });
        let occupancies = run.expect("it ends").0;
        most.resize(occupancies.len(), Default::default());
        for (most, pool) in most.iter_mut().zip(occupancies) {
            assert!(pool.peak as usize <= pool.holders.len(), "{}", pool.name);
            *most = (pool.name.to_string(), most.1.max(pool.peak));
        }
    }
    (pools, most)
}

#[test]
fn in_flight_is_exactly_the_declared_capacity() {
    for capacities in [depths(1, 1, 1, 1), depths(2, 2, 2, 4), depths(3, 1, 2, 2)] {
        let (pools, most) = peaks(12, 6, capacities);
        let of = |name: &str, size: u32| (name.to_string(), size);
        let declared = [
            of("weights", pools.weights),
            of("visits", pools.visits),
            of("inputs", pools.inputs),
            of("outputs", pools.outputs),
            of("gradients", pools.gradients),
            of("reduced", pools.reduced),
        ];
        assert_eq!(most, declared, "{capacities:?}");
    }
}

#[test]
fn memory_is_the_same_for_any_depth_and_batch() {
    let capacities = Capacities::default();
    let (pools, most) = peaks(4, 64, capacities);
    assert_eq!(peaks(400, 2, capacities).0, pools);
    assert_eq!(peaks(400, 64, capacities), (pools, most));
}

#[test]
fn two_hundred_steps_of_random_subsets_and_orders() {
    const LAYERS: u32 = 60;
    let model = model(LAYERS, 3, true);
    let largest: Vec<u32> = (0..40).collect();
    let schedule = relay(&model, &some(&model, 3, &largest)).expect("a model of ours");
    let config = RingConfig { max_layers: 43, ..config(&schedule, &Capacities::default(), false) };
    let run = virtual_time::run(
        config,
        |_| ticks(2),
        async move |mut relay| {
            let mut chance = 7_u64;
            let mut below = move |bound: u64| {
                chance = chance.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (chance >> 33) % bound
            };
            let mut updates = vec![0_u64; model.blocks.len()];
            for step in 0..200 {
                let mut ids: Vec<u32> = (0..LAYERS).collect();
                for at in (1..ids.len()).rev() {
                    ids.swap(at, below(at as u64 + 1) as usize);
                }
                ids.truncate(1 + below(40) as usize);
                let mut selection = some(&model, 1 + below(3) as u32, &ids);
                let frozen = (0..below(20)).map(|_| BlockId(below(63) as u32));
                selection.frozen = frozen.collect();
                let schedule = relay_of(&model, &selection);
                let plan = relay.plan(schedule).expect("within the ring's bounds");
                for block in &plan.updates {
                    let is_met = block.0 < 3 || ids.contains(&(block.0 - 3));
                    assert!(is_met && !selection.frozen.contains(block), "{block} at step {step}");
                    updates[block.0 as usize] += 1;
                }
                relay.step(plan, ()).await.expect("nothing fails here");
                relay.settle().await.expect("nothing fails here");
                assert!(relay.snapshot().versions.iter().all(|&version| version == step + 1));
            }
            let too_many: Vec<u32> = (0..44).collect();
            let refused =
                step_of(&mut relay, &relay_of(&model, &some(&model, 1, &too_many)), ()).await;
            assert!(matches!(refused, Err(RingError::Refused(_))), "{refused:?}");
            relay.stop().await.expect("a refusal leaves the relay as it was");
            updates
        },
    );
    let (updates, records) = run.expect("it ends");
    // Memory has checked every version on the way; here, that updates were made, not only
    // published.
    let mut made = vec![0_u64; updates.len()];
    for record in records {
        if let l2l_actors::work::Work::Update { block, .. } = record.work {
            made[block.0 as usize] += 1;
        }
    }
    assert_eq!(made, updates);
}

fn relay_of(
    model: &l2l_actors::schedule::RingModel,
    selection: &l2l_actors::schedule::Selection,
) -> l2l_actors::schedule::Schedule {
    relay(model, selection).expect("a model of ours")
}
