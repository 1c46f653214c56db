//! Linear attention: the same bits in every schedule and number of threads, documents, sequences
//! that are longer than a chunk of attention, and a GPU.

use std::fs;

use l2l::config::{Deal, DeviceKind, ModelConfig, Recompute, ScheduleKind};
use l2l::data::Predicts;
use l2l::{Config, Trainer};
use proptest::prelude::*;
use serde_json::json;

use crate::exact::{self, Case, SMALL, check_way, run};
use crate::packing::{packed, steps, texts};
use crate::plan::limit;
use crate::pytorch::case as golden;
use crate::trained::Trained;
use crate::ways::{Ways, baseline, ways};
use crate::whole;

/// A run of the golden's model, on sequences over several pieces of the delta rule's backward.
fn config(case: &Case, ways: &Ways) -> Config {
    let mut config = exact::config(case, ways);
    let path = golden("qwen3_5_text").0.model.path;
    config.model = ModelConfig { path, ..ModelConfig::default() };
    // The smallest matrices have four rows.
    config.train.lora.iter_mut().for_each(|lora| lora.rank = Some(3));
    config.data.sequence_length = Some(39);
    limit(&mut config, ways.room);
    config
}

fn cases() -> impl Strategy<Value = Case> {
    let trained = prop::sample::select(vec![Trained::All, Trained::Adapters]);
    (exact::cases(), trained).prop_map(|(case, trained)| Case {
        layers: 4,
        tied_tiles: false,
        experts: None,
        slices: 1,
        trained,
        ..case
    })
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(if whole() { 60 } else { 12 })
    })]

    #[test]
    fn every_way_gives_the_same_bits(case in cases(), ways in ways()) {
        let ways = ways.for_case(&case);
        check_way(config(&case, &baseline()), config(&case, &ways), 2);
    }
}

/// All that a layer computes again has the bits that it had; and so has what several devices
/// compute.
#[test]
fn relay_resident_and_pipelines_end_the_same() {
    let case = Case { batch: 4, micro_batch: 2, ..SMALL.clone() };
    let expected = run(config(&case, &baseline()), 2).1.weights_digest;
    for recompute in [true.into(), false.into(), Recompute::ATTENTION] {
        for (kind, devices) in [
            (ScheduleKind::Relay, 1),
            (ScheduleKind::Relay, 2),
            (ScheduleKind::Gpipe, 2),
            (ScheduleKind::OneForwardOneBackward, 2),
        ] {
            let ways = Ways { kind, devices, recompute, threads: 3, ..baseline() };
            let found = run(config(&case, &ways), 2).1.weights_digest;
            assert_eq!(found, expected, "{kind:?} {devices} {recompute:?}");
        }
    }
    let relay = ScheduleKind::Relay;
    let of_groups = Case { groups: 2, ..case };
    let expected = run(config(&of_groups, &baseline()), 2).1.weights_digest;
    let ways = Ways { kind: relay, devices: 2, deal: Deal::Sequences, sharded: true, ..baseline() };
    assert_eq!(run(config(&of_groups, &ways), 2).1.weights_digest, expected);
}

/// No state passes from a document to the next.
#[tokio::test]
async fn packed_training_is_unpacked_training() {
    const LENGTHS: [usize; 5] = [9, 3, 20, 1, 7];
    let of = |batch: usize| {
        let (mut config, _) = golden("qwen3_5_text");
        config.data.train = "random".into();
        (config.step.batch, config.step.micro_batch) = (batch, batch);
        config.optimizer.learning_rate = 1e-3;
        config
    };
    let text = |step| {
        let mut all = texts(&LENGTHS, step, Predicts::Next);
        all.iter_mut().flat_map(|one| &mut one.tokens).for_each(|token| *token %= 61);
        all.iter_mut().flat_map(|one| &mut one.labels).for_each(|label| *label %= 61);
        all
    };
    let one = steps(of(LENGTHS.len()), text, Predicts::Next).await;
    let other = steps(of(1), |step| vec![packed(&text(step))], Predicts::Next).await;
    for (one, other) in one.iter().zip(&other) {
        let close = |a: f64, b: f64| (a - b).abs() <= 1e-5 * a.abs().max(1.0);
        assert_eq!(one.tokens, other.tokens);
        assert!(close(one.loss, other.loss), "{} {}", one.loss, other.loss);
        assert!(close(one.grad_norm, other.grad_norm), "{} {}", one.grad_norm, other.grad_norm);
    }
}

/// Attention computes long sequences chunk by chunk, and the delta rule passes them whole.
#[test]
fn long_sequences_are_those_of_one_chunk() {
    let folder = tempfile::tempdir().expect("a place for files");
    let source = golden("qwen3_5_text").0.model.path.expect("a case has one");
    let text = fs::read_to_string(source.join("config.json")).expect("it is committed");
    let mut long: serde_json::Value = serde_json::from_str(&text).expect("it is JSON");
    long["max_position_embeddings"] = json!(400);
    fs::write(folder.path().join("config.json"), long.to_string()).expect("a directory of ours");
    let weights = "model.safetensors";
    fs::copy(source.join(weights), folder.path().join(weights)).expect("a directory of ours");
    let of = |kind: ScheduleKind, chunk_positions: usize| {
        let case = Case { batch: 3, dropout: 0.0, ..SMALL.clone() };
        let mut config = config(&case, &Ways { kind, ..baseline() });
        config.model.path = Some(folder.path().into());
        config.data.sequence_length = Some(300);
        config.step.chunk_positions = chunk_positions;
        config.optimizer.learning_rate = 1e-4;
        run(config, 2).0
    };
    let numbers = |bits: Vec<(u64, u64)>| -> Vec<f64> {
        bits.iter().flat_map(|&(loss, norm)| [loss, norm]).map(f64::from_bits).collect()
    };
    let whole = numbers(of(ScheduleKind::Resident, 512));
    let cut = of(ScheduleKind::Resident, 128);
    assert_eq!(of(ScheduleKind::Relay, 128), cut);
    for (whole, cut) in whole.into_iter().zip(numbers(cut)) {
        assert!((whole - cut).abs() <= 1e-5 * whole, "{whole} {cut}");
    }
}

#[tokio::test]
async fn a_gpu_and_new_layers_are_refused_by_name() {
    let gpu: fn(&mut Config) = |config| config.device.kind = DeviceKind::Cuda;
    let growth: fn(&mut Config) = |config| config.model.max_layers = Some(8);
    for (change, says) in [
        (gpu, "device.kind is cuda: linear attention and gates of attention's output"),
        (growth, "layers are not added to a model with linear attention"),
    ] {
        let (mut config, _) = golden("qwen3_5_text");
        change(&mut config);
        let refused = Trainer::start(config).await.map(drop).expect_err("it is not built");
        assert!(refused.to_string().contains(says), "{refused}");
    }
}
