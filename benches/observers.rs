//! Measures the cost of telemetry: nanoseconds for each operation, with different observers.
//!
//! `cargo bench --bench observers`. Each figure is the median of `ROUNDS` rounds, because machines
//! are noisy.

use std::sync::Arc;
use std::time::{Duration, Instant};

use l2l::telemetry::{
    Histograms, Lane, Ledger, Observe, Slice, SliceKind, Trace, WorkKind, recorder,
};

const ROUNDS: usize = 15;
const OPERATIONS: u64 = 20_000;

/// The operations of a step in turn: an upload, a kernel that waited for it, a download.
fn slice(number: u64) -> Slice {
    let lane = [Lane::Upload, Lane::Compute, Lane::Download][number as usize % 3];
    let kind = [WorkKind::Weights, WorkKind::Forward, WorkKind::Output][number as usize % 3];
    let begin = Duration::from_micros(100 * number);
    Slice {
        number: Some(number),
        lane,
        device: None,
        kind: SliceKind::Work(kind),
        step: number / 600,
        layer: Some((number / 12 % 50) as u32),
        phase: Some("forward"),
        micro_batch: Some((number / 3 % 4) as u32),
        block: Some((number / 12 % 50) as u32),
        version: Some(number / 600),
        bytes: 1 << 20,
        begin,
        end: begin + Duration::from_micros(90),
        released_by: number.checked_sub(1),
    }
}

/// Nanoseconds an operation: the median of `ROUNDS` calls, each with all operations.
fn nanos(mut of_round: impl FnMut()) -> f64 {
    let mut rounds: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let begin = Instant::now();
            of_round();
            begin.elapsed().as_nanos() as f64 / OPERATIONS as f64
        })
        .collect();
    rounds.sort_by(f64::total_cmp);
    rounds[ROUNDS / 2]
}

fn main() {
    let slices: Vec<Slice> = (0..OPERATIONS).map(slice).collect();
    let recorder = recorder();
    let histograms = Histograms::new("bench", &recorder);
    let folder = tempfile::tempdir().expect("a folder");
    let trace =
        Trace::create(&folder.path().join("trace.json"), "bench").expect("a folder of ours");
    let cases: [(&str, Vec<Arc<dyn Observe>>); 4] = [
        ("the ledger", vec![]),
        ("and histograms", vec![histograms.clone()]),
        ("and the timeline", vec![trace.clone()]),
        ("all of them", vec![histograms, trace.clone()]),
    ];
    for (name, observers) in cases {
        let ledger = Ledger::new(50, 1, observers);
        let cost = nanos(|| slices.iter().for_each(|slice| ledger.heard(slice)));
        recorder.handle().run_upkeep();
        println!("{name:<18} {cost:7.0} ns an operation");
    }
    _ = trace.finish();
}
