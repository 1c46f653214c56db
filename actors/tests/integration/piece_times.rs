//! The time that layers in pieces take on several devices: dealt, and in pipelines.

use crate::common::*;
use l2l_actors::schedule::{MicroBatch, Pipeline, RingModel, Schedule, deal, pipeline, relay};
use l2l_actors::work::{Work, WorkKind};
use l2l_actors::{Operation, virtual_time};
use proptest::prelude::*;

/// When a step ends whose layers are in pieces that are dealt over devices: a list scheduler, for
/// which a piece is a layer.
fn list_scheduler(devices: usize, pieces: usize, micro_batches: usize, times: [u64; 2]) -> u64 {
    let mut free = vec![0; devices];
    let mut there = vec![0; micro_batches];
    let mut run = |piece: usize, there: &mut Vec<u64>, ticks: u64| {
        for ready in there {
            let free: &mut u64 = &mut free[piece % devices];
            *free = (*free).max(*ready) + ticks;
            *ready = *free;
        }
    };
    (0..pieces).for_each(|piece| run(piece, &mut there, times[0]));
    run(pieces, &mut there, 0); // the tile
    (0..pieces).rev().for_each(|piece| run(piece, &mut there, times[1]));
    there.into_iter().max().unwrap_or(0)
}

/// The end of a step in which a piece takes so long, forward and backward, and nothing else takes
/// time. All portions stay on their devices.
fn makespan(schedule: Schedule, times: [u64; 2]) -> u64 {
    let micro_batches = schedule.micro_batches.len() as u32;
    let config = config(&schedule, &depths(1000, 1000, 4, 8 * micro_batches), false);
    let durations = move |operation: &Operation| {
        let is_piece = |visit: usize| operation.step().plan.visit(visit).cut.is_some();
        let row = operation.work().row();
        ticks(match *operation.work() {
            Work::Compute { device_visit, .. } if is_piece(device_visit) => match row.kind {
                WorkKind::Forward => times[0],
                _ => times[1],
            },
            _ => 0,
        })
    };
    let run = virtual_time::run(config, durations, async move |mut relay| {
        step_of(&mut relay, &schedule, ()).await.expect("nothing fails here");
        relay.stop().await.expect("nothing fails here");
    });
    let (_, records) = run.expect("it ends");
    records.iter().map(|record| record.end.as_nanos() as u64).max().expect("a step has records")
}

/// Layers that are all in pieces, of equal sizes, and a tile of no size.
fn equal(layers: u32, pieces: [u16; 2]) -> RingModel {
    let mut model = model(layers, 1, false);
    model.blocks.iter_mut().for_each(|block| block.weight_bytes = 5040);
    model.blocks.last_mut().expect("a tile").weight_bytes = 0;
    in_pieces(model, pieces, |_| true)
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(if whole() { 300 } else { 100 })
    })]

    #[test]
    fn dealt_pieces_take_what_a_list_scheduler_says(
        layers in 1..=3_u32, pieces in (1..=2_u16, 1..=4_u16), devices in 1..=5_u32,
        micro_batches in 1..=5_u32, times in (1..20_u64, 1..40_u64),
    ) {
        let model = equal(layers, pieces.into());
        let schedule = relay(&model, &everything(&model, micro_batches)).expect("a model of ours");
        let count = layers as usize * usize::from(pieces.0 + pieces.1);
        let expected =
            list_scheduler(devices as usize, count, micro_batches as usize, times.into());
        prop_assert_eq!(makespan(deal(schedule, devices), times.into()), expected);
    }

    /// PTD-P: `stages` of `tensor` devices each. A unit passes the pieces of a stage one behind the
    /// other, so the bubble is that of `stages` x `tensor` stages, and a V-th of it with V chunks.
    #[test]
    fn pipelines_of_pieces_take_a_closed_form(
        stages in 1..=2_u32, tensor in prop::sample::select(vec![1_u32, 2, 4]),
        chunks in 1..=2_u32, rounds in 1..=3_u32, halves in 1..=2_u32,
        times in (1..20_u64, 1..40_u64),
    ) {
        let devices = stages * tensor;
        let micro_batches: MicroBatch = devices * rounds;
        // Each pipeline stage has the pieces that it has of one layer.
        let sums = if halves == 1 { [tensor as u16, 0] } else { [tensor as u16; 2] };
        let layers = stages * chunks;
        let model = equal(layers, sums);
        let order = match chunks {
            1 => Pipeline::one_forward_one_backward(devices, micro_batches),
            _ => Pipeline::interleaved(devices, chunks, micro_batches).expect("even rounds"),
        };
        let selection = everything(&model, micro_batches);
        let schedule = pipeline(&model, &selection, &order).expect("a pipeline of ours");
        let stage = u64::from(halves) * (times.0 + times.1);
        let slots = u64::from(micro_batches * chunks + devices - 1);
        prop_assert_eq!(makespan(schedule, times.into()), slots * stage);
    }
}
