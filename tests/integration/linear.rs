//! Linear attention: the same bits in every schedule and number of threads, documents, sequences
//! that are longer than a chunk, and memory.

use std::fs;
use std::path::Path;

use l2l::config::{Deal, ModelConfig, Recompute, ScheduleKind, StashPlace};
use l2l::data::Predicts;
use l2l::inference::{Generator, Room};
use l2l::plan::Term;
use l2l::{Config, Plan, Trainer, model_of, shape_of};
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

/// The golden's model, with another number of positions.
fn with_positions(folder: &Path, positions: usize) -> ModelConfig {
    let source = golden("qwen3_5_text").0.model.path.expect("a case has one");
    let text = fs::read_to_string(source.join("config.json")).expect("it is committed");
    let mut long: serde_json::Value = serde_json::from_str(&text).expect("it is JSON");
    long["max_position_embeddings"] = json!(positions);
    fs::write(folder.join("config.json"), long.to_string()).expect("a directory of ours");
    let weights = "model.safetensors";
    fs::copy(source.join(weights), folder.join(weights)).expect("a directory of ours");
    ModelConfig { path: Some(folder.into()), ..ModelConfig::default() }
}

/// States pass from chunk to chunk, and their gradients back, wherever chunks are computed.
#[test]
fn long_sequences_are_those_of_one_chunk() {
    let folder = tempfile::tempdir().expect("a place for files");
    let model = with_positions(folder.path(), 400);
    let case = Case { batch: 3, dropout: 0.0, ..SMALL.clone() };
    let of = |case: &Case, ways: &Ways, chunk_positions: usize| {
        let mut config = config(case, ways);
        config.model = model.clone();
        config.data.sequence_length = Some(300);
        config.step.chunk_positions = chunk_positions;
        config.optimizer.learning_rate = 1e-4;
        let (bits, summary) = run(config, 2);
        (bits, summary.weights_digest)
    };
    let numbers = |bits: Vec<(u64, u64)>| -> Vec<f64> {
        bits.iter().flat_map(|&(loss, norm)| [loss, norm]).map(f64::from_bits).collect()
    };
    for case in [&case, &Case { trained: Trained::Adapters, ..case.clone() }] {
        let whole = numbers(of(case, &baseline(), 512).0);
        let cut = of(case, &baseline(), 128);
        for (devices, recompute) in
            [(1, true.into()), (1, false.into()), (1, Recompute::ATTENTION), (2, true.into())]
        {
            let kind = ScheduleKind::Relay;
            let ways = Ways { kind, devices, recompute, ..baseline() };
            assert_eq!(of(case, &ways, 128), cut, "{devices} {recompute:?}");
        }
        for (whole, cut) in whole.into_iter().zip(numbers(cut.0)) {
            assert!((whole - cut).abs() <= 1e-5 * whole, "{whole} {cut}");
        }
    }
}

/// G, H, D_k, D_v and taps of the golden.
const SIZES: [usize; 5] = [2, 4, 6, 10, 3];

/// Bytes of what a sequence passes on: inputs of the convolution, and states.
fn state_bytes() -> usize {
    let [key_heads, value_heads, key_size, value_size, taps] = SIZES;
    let mixed = 2 * key_heads * key_size + value_heads * value_size;
    4 * ((taps - 1) * mixed + value_heads * value_size * key_size)
}

fn bytes_of(terms: &[Term], name: &str) -> usize {
    terms.iter().find(|term| term.name == name).map_or(0, |term| term.bytes as usize)
}

/// Where chunks are many, keys and values of attention are more than a state for each chunk. All
/// else on a device stays as it is.
#[test]
fn a_device_grows_with_the_length_by_keys_and_values_alone() {
    let folder = tempfile::tempdir().expect("a place for files");
    let model = with_positions(folder.path(), 1 << 15);
    let [few, many] = [8, 64].map(|chunks: usize| {
        let kind = ScheduleKind::Relay;
        let place = StashPlace::Host;
        let ways = Ways { kind, place, ..baseline() };
        let mut config = config(&SMALL, &ways);
        config.model = model.clone();
        config.data.sequence_length = Some(chunks * 128);
        config.step.chunk_positions = 128;
        let model = model_of(&config, shape_of(&config).expect("a shape")).expect("a model");
        let plan = Plan::new(&config, &model, &config.update_rule()).expect("a plan");
        let keys = bytes_of(&plan.device, "keys_and_values");
        (keys, plan.device_bytes() as usize - keys)
    });
    assert_eq!((few.0 * 8, few.1), many);
}

/// Generation keeps keys and values of one block, and as much of three as for a text of any length.
#[test]
fn a_text_of_any_length_has_one_state() {
    let folder = tempfile::tempdir().expect("a place for files");
    let model = with_positions(folder.path(), 1 << 15);
    let config = Config { model, ..Config::default() };
    for tokens in [50, 5000] {
        let plan = Generator::plan(&config, Room { prompts: 3, prompt: 10, tokens });
        let keys = 2 * 20 * tokens * 4;
        let cache = bytes_of(&plan.expect("it fits").host, "kv_cache");
        assert_eq!(cache, (3 * (keys + 3 * state_bytes())).next_multiple_of(64), "{tokens}");
    }
}

#[tokio::test]
async fn new_layers_are_refused() {
    let (mut config, _) = golden("qwen3_5_text");
    config.model.max_layers = Some(8);
    let refused = Trainer::start(config).await.map(drop).expect_err("it is not built").to_string();
    assert!(refused.contains("layers are not added to a model with linear attention"), "{refused}");
}
