//! Simulates a machine that you do not have: a GPT-3 shape on one device behind PCIe.
//!
//! `cargo run --release --example what_if`. The simulation has no tensors: each operation takes the
//! time of its bytes or FLOPs, and the ring decides which operations overlap.

use std::time::Duration;

use l2l::actors::schedule::{Block, Capacities, Phase, Pools, RingModel, Selection, relay};
use l2l::actors::work::{Lane, Work};
use l2l::actors::{Operation, Relay, RingConfig, virtual_time};

const LAYERS: u32 = 96;
const HIDDEN: u64 = 12288;
const SEQUENCE: u64 = 2048;
const MICRO_BATCHES: u32 = 16;

const LINK: f64 = 25e9; // bytes a second, each way
const DEVICE: f64 = 400e12; // FLOPs a second
const HOST_MEMORY: f64 = 200e9; // bytes a second: updates are bound by it

fn seconds(amount: f64, rate: f64) -> Duration {
    Duration::from_secs_f64(amount / rate)
}

fn model() -> RingModel {
    let parameters = 12 * HIDDEN * HIDDEN;
    let stack = Block {
        weight_bytes: 2 * parameters,
        gradient_bytes: 4 * parameters,
        download_bytes: 4 * parameters,
        reduce_scatter_bytes: 4 * parameters,
        encoded: false,
        master_bytes: 4 * parameters,
        state_bytes: 8 * parameters,
        older_bytes: 0,
        region_bytes: 4 * parameters,
        staged: false,
        frozen: false,
    };
    let rows = Block { weight_bytes: 2 * 50257 * HIDDEN, frozen: true, ..stack };
    let blocks = [rows].into_iter().chain((0..LAYERS).map(|_| stack)).collect();
    RingModel::stack(blocks, 2 * SEQUENCE * HIDDEN)
}

fn time(operation: &Operation) -> Duration {
    let plan = &operation.step().plan;
    match operation.work() {
        Work::Compute { phase, .. } => {
            let passes = match phase {
                Phase::Forward => 2,
                _ => 6, // recompute and two products
            };
            let parameters = 12 * HIDDEN * HIDDEN;
            seconds((passes * parameters * SEQUENCE) as f64, DEVICE)
        }
        Work::Update { block, .. } => {
            let bytes = plan.schedule.block(*block).gradient_bytes; // of one of the 7 it touches
            seconds((7 * bytes) as f64, HOST_MEMORY)
        }
        other => seconds(other.bytes(&plan.schedule) as f64, LINK),
    }
}

fn main() {
    let model = model();
    let schedule = relay(&model, &Selection::all(&model, vec![1; MICRO_BATCHES as usize]));
    let schedule = schedule.expect("an embedding and a stack are a model");
    println!("{LAYERS} layers of width {HIDDEN}, {MICRO_BATCHES} sequences of {SEQUENCE} tokens");
    for (weights, stash) in [(1, 4), (2, 4), (2, 16), (2, 64), (3, 64)] {
        let depths = Capacities { weights, stash, ..Capacities::default() };
        let config = RingConfig {
            pools: Pools::of(&schedule, &depths),
            blocks: model.blocks.len() as u32,
            max_layers: LAYERS,
            max_micro_batches: MICRO_BATCHES,
            deferred: false,
            trained: 0,
            delay_from: None,
            watchdog: None,
            inject: None,
        };
        let schedule = &schedule;
        let (_, records) = virtual_time::run(config, time, {
            let schedule = schedule.clone();
            async move |mut relay: Relay<_>| {
                let plan = relay.plan(schedule).expect("the ring was made for it");
                relay.step(plan, ()).await.expect("nothing fails in virtual time");
                relay.stop().await.expect("nothing fails in virtual time");
            }
        })
        .expect("a checked plan ends");
        let end = records.iter().map(|record| record.end).max().unwrap_or_default();
        let busy = |lane| {
            let of_lane = records.iter().filter(|record| record.lane == lane);
            let time: Duration = of_lane.map(|record| record.end - record.begin).sum();
            100.0 * time.as_secs_f64() / end.as_secs_f64()
        };
        println!(
            "weights {weights}, stash {stash:2}: {:6.2} s; busy: {}",
            end.as_secs_f64(),
            Lane::ALL.map(|lane| format!("{} {:3.0} %", lane.name(), busy(lane))).join(", ")
        );
    }
}
