//! What virtual time costs: microseconds of an operation, by the number of devices.
//!
//! `cargo bench -p l2l-actors --bench virtual_time`. Each ring is a relay whose layers are dealt to
//! devices, or whose groups are, with and without copies that share the host's memory, and without
//! the check of memory. Each figure is the median of rounds in one process.

use std::time::{Duration, Instant};

use l2l_actors::schedule::{
    Block, Capacities, Pools, RingModel, Schedule, Selection, deal, deal_groups, relay,
};
use l2l_actors::virtual_time::{self, Cost, Use};
use l2l_actors::work::Lane;
use l2l_actors::{Operation, RingConfig};

const LAYERS: u32 = 96;
const ROUNDS: usize = 3;
const DEVICES: [u32; 4] = [1, 8, 32, 128];

fn model() -> RingModel {
    let block = Block {
        weight_bytes: 1,
        gradient_bytes: 1,
        download_bytes: 1,
        reduce_scatter_bytes: 1,
        encoded: false,
        master_bytes: 1,
        state_bytes: 2,
        older_bytes: 0,
        region_bytes: 1,
        staged: false,
        frozen: false,
    };
    RingModel::stack(vec![block; LAYERS as usize + 1], 4)
}

/// A relay whose layers go to devices by turns.
fn layers(devices: u32) -> Schedule {
    let model = model();
    let selection = Selection::all(&model, vec![1; 16]);
    deal(relay(&model, &selection).expect("a model of ours"), devices)
}

/// A relay in which each device has one group of two micro-batches.
fn groups(devices: u32) -> Schedule {
    let model = model();
    let mut selection = Selection::all(&model, vec![1; 2 * devices as usize]);
    selection.set_groups(devices);
    let schedule = relay(&model, &selection).expect("a model of ours");
    deal_groups(schedule, &vec![1; devices as usize])
}

/// Copies take a quarter of the host's memory each, if it is shared.
fn cost(operation: &Operation, is_shared: bool) -> Cost {
    let lane = operation.work().row().lane;
    let copies = matches!(lane, Lane::Upload | Lane::Download) && is_shared;
    let uses = copies.then_some(Use { resource: 0, share: 0.25 });
    let alone = Duration::from_nanos(if lane == Lane::Compute { 1000 } else { 300 });
    Cost { alone, uses: uses.into_iter().collect() }
}

/// Microseconds of an operation of two steps, and the number of operations.
fn micros(schedule: &Schedule, is_shared: bool) -> (f64, usize) {
    let config = RingConfig {
        pools: Pools::of(schedule, &Capacities::default()),
        blocks: schedule.blocks.len() as u32,
        max_layers: LAYERS,
        max_micro_batches: schedule.micro_batches.len() as u32,
        deferred: false,
        trained: 0,
        delay_from: None,
        watchdog: None,
        inject: None,
    };
    let schedule = schedule.clone();
    let costs = move |operation: &Operation| cost(operation, is_shared);
    let run = virtual_time::run_unchecked(config, costs, async move |mut relay| {
        let plan = relay.plan(schedule).expect("pools were made for it");
        let begin = Instant::now();
        for _ in 0..2 {
            relay.step(plan.clone(), ()).await.expect("nothing fails here");
        }
        relay.stop().await.expect("nothing fails here");
        begin.elapsed()
    });
    let (took, records) = run.expect("it ends");
    (took.as_secs_f64() * 1e6 / records.len() as f64, records.len())
}

fn main() {
    if std::env::args().any(|argument| argument == "--test") {
        return; // cargo test builds benches; it has no use for their figures
    }
    println!("microseconds an operation, median of {ROUNDS}: alone, and with shared memory");
    for (name, schedule_of) in [("layers", layers as fn(u32) -> Schedule), ("groups", groups)] {
        for devices in DEVICES {
            let schedule = schedule_of(devices);
            let median = |is_shared| {
                let mut all: Vec<_> = (0..ROUNDS).map(|_| micros(&schedule, is_shared)).collect();
                all.sort_by(|one, other| one.0.total_cmp(&other.0));
                all[ROUNDS / 2]
            };
            let [(alone, operations), (shared, _)] = [median(false), median(true)];
            println!(
                "{name} of {devices:>3} devices, {operations:>6} operations: {alone:>6.2}, \
                 {shared:>6.2}"
            );
        }
    }
}
