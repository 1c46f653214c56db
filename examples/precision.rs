//! Simulates a step in f32 and in f16 on the machine of the L2L paper (arXiv 2002.05645): 50 B
//! parameters on one V100 behind PCIe.
//!
//! `cargo run --release --example precision`. The simulation has no tensors: each operation takes
//! the time of its bytes or FLOPs at full rate, and the ring decides which operations overlap.

use std::time::Duration;

use l2l::actors::schedule::{Block, Capacities, Phase, Pools, RingModel, Selection, relay};
use l2l::actors::work::{Lane, Work};
use l2l::actors::{Operation, Relay, RingConfig, virtual_time};

const LAYERS: u32 = 62;
const HIDDEN: u64 = 8192;
const VOCABULARY: u64 = 50257;
const PARAMETERS: u64 = 12 * HIDDEN * HIDDEN; // of a layer
const TOKENS: u64 = 4 * 512; // of a micro-batch
const MICRO_BATCHES: [u32; 6] = [1, 2, 4, 8, 16, 32];

// NVIDIA's data sheet of the V100 (SXM2): peaks of single precision and of tensor cores.
const F32: f64 = 15.7e12; // FLOPs a second
const F16: f64 = 125e12; // FLOPs a second
const LINK: f64 = 12e9; // bytes a second, each way: PCIe 3.0 x16 in practice
const HOST_MEMORY: f64 = 100e9; // bytes a second: updates are bound by it

/// The dtypes and rates of one column of the table.
#[derive(Clone, Copy)]
struct Precision {
    name: &'static str,
    device: f64,
    weight: u64,   // bytes on the device and over the link, also of an activation
    gradient: u64, // bytes over the link; on the device and in updates it is f32
}

const PRECISIONS: [Precision; 3] = [
    Precision { name: "f32", device: F32, weight: 4, gradient: 4 },
    Precision { name: "f16", device: F16, weight: 2, gradient: 4 },
    Precision { name: "f16, gradients bf16", device: F16, weight: 2, gradient: 2 },
];

fn seconds(amount: u64, rate: f64) -> Duration {
    Duration::from_secs_f64(amount as f64 / rate)
}

fn model(precision: Precision) -> RingModel {
    let Precision { weight, gradient, .. } = precision;
    let stack = Block {
        weight_bytes: weight * PARAMETERS,
        gradient_bytes: 4 * PARAMETERS,
        download_bytes: gradient * PARAMETERS,
        reduce_scatter_bytes: 4 * PARAMETERS,
        encoded: gradient < 4,
        master_bytes: 4 * PARAMETERS,
        state_bytes: 8 * PARAMETERS,
        older_bytes: 0,
        region_bytes: 4 * PARAMETERS,
        staged: false,
        frozen: false,
    };
    let rows = Block { weight_bytes: weight * VOCABULARY * HIDDEN, frozen: true, ..stack };
    let blocks = [rows].into_iter().chain((0..LAYERS).map(|_| stack)).collect();
    RingModel::stack(blocks, weight * TOKENS * HIDDEN)
}

fn time(precision: Precision, operation: &Operation) -> Duration {
    let schedule = &operation.step().plan.schedule;
    match operation.work() {
        Work::Compute { phase, .. } => {
            let passes = match phase {
                Phase::Forward => 2,
                _ => 6, // recompute and two products
            };
            seconds(passes * PARAMETERS * TOKENS, precision.device)
        }
        Work::Join { portion, .. } => {
            let block = schedule.block(portion.block); // read in bf16, written in f32
            seconds(block.download_bytes + block.gradient_bytes, HOST_MEMORY)
        }
        Work::Update { block, .. } => {
            let block = schedule.block(*block);
            let moved = 2 * (block.master_bytes + block.state_bytes); // read and written
            let published = if precision.weight < 4 { block.weight_bytes } else { 0 }; // a copy
            seconds(block.gradient_bytes + moved + published, HOST_MEMORY)
        }
        other => seconds(other.bytes(schedule), LINK),
    }
}

/// Seconds of a step, and the share of them in which the device computes nothing.
fn step(precision: Precision, micro_batches: u32) -> (f64, f64) {
    let model = model(precision);
    let schedule = relay(&model, &Selection::all(&model, vec![1; micro_batches as usize]));
    let schedule = schedule.expect("an embedding and a stack are a model");
    let config = RingConfig {
        pools: Pools::of(&schedule, &Capacities::default()),
        blocks: model.blocks.len() as u32,
        max_layers: LAYERS,
        max_micro_batches: micro_batches,
        deferred: false,
        trained: 0,
        delay_from: None,
        watchdog: None,
        inject: None,
    };
    let durations = move |operation: &Operation| time(precision, operation);
    let (_, records) = virtual_time::run(config, durations, async move |mut relay: Relay<_>| {
        let plan = relay.plan(schedule).expect("the ring was made for it");
        relay.step(plan, ()).await.expect("nothing fails in virtual time");
        relay.stop().await.expect("nothing fails in virtual time");
    })
    .expect("a checked plan ends");
    let end = records.iter().map(|record| record.end).max().unwrap_or_default().as_secs_f64();
    let computed = records.iter().filter(|record| record.lane == Lane::Compute);
    let busy: Duration = computed.map(|record| record.end - record.begin).sum();
    (end, 1.0 - busy.as_secs_f64() / end)
}

fn main() {
    let layers = u64::from(LAYERS) * PARAMETERS;
    println!(
        "{LAYERS} layers of width {HIDDEN}: {:.1} B parameters, with the embedding {:.1} B; \
         micro-batches of {TOKENS} tokens\n",
        layers as f64 / 1e9,
        (layers + VOCABULARY * HIDDEN) as f64 / 1e9,
    );
    let names = PRECISIONS.map(|precision| format!("{} | idle", precision.name));
    println!("| micro-batches | {} | f32 ÷ f16 |", names.join(" | "));
    println!("|---{}", "|---".repeat(2 * PRECISIONS.len() + 1) + "|");
    for micro_batches in MICRO_BATCHES {
        let steps = PRECISIONS.map(|precision| step(precision, micro_batches));
        let cells = steps.map(|(time, idle)| format!("{time:.1} s | {:.0} %", 100.0 * idle));
        let ratio = steps[0].0 / steps[1].0;
        println!("| {micro_batches} | {} | {ratio:.2} |", cells.join(" | "));
    }
}
