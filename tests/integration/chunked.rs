//! Sequences that are longer than a chunk: the numbers of transformers, which computes them whole
//! (`goldens/chunked.py`), the same bits in every schedule, documents, and prompts.

use std::fs;
use std::path::Path;

use l2l::config::{Deal, EpsTier, Recompute, ScheduleKind, StashPlace};
use l2l::data::Predicts;
use l2l::plan::RankShare;
use l2l::{Config, Plan, model_of, shape_of};
use proptest::prelude::*;
use serde_json::Value;
use tempfile::TempDir;

use crate::balanced::Routers;
use crate::exact::{self, Case, SMALL, Ways, baseline, check_links, run};
use crate::packing::{packed, steps, texts};
use crate::plan::limit;
use crate::pytorch::{case, check};
use crate::ranks::{Shared, Task, check_ranks, on_ranks, shared};
use crate::rotary::greedy;
use crate::trained::Trained;
use crate::whole;

const CHUNK: usize = 128;

const CASES: [&str; 35] = [
    "cohere",
    "cohere2",
    "ernie4_5",
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "helium",
    "llama",
    "llama-dynamic",
    "ministral",
    "ministral3",
    "mistral",
    "mixtral",
    "olmo2",
    "olmo3",
    "olmoe",
    "opt",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
    "starcoder2",
    "gemma4_text",
    "gemma4_text-inputs",
    "qwen3_next",
];

/// A case whose sequences have 300 positions, and its golden.
fn long(name: &str) -> (Config, Value) {
    let (mut config, golden) = case(&format!("chunked/{name}"));
    config.data.sequence_length = Some(300);
    config.step.chunk_positions = CHUNK;
    // Transformers has one length for a batch, which these frequencies follow.
    if ["llama-dynamic", "phi3"].contains(&name) {
        config.step.micro_batch = 3;
    }
    (config, golden)
}

#[tokio::test]
async fn every_family_is_that_of_whole_sequences() {
    for name in CASES {
        let (config, golden) = long(name);
        let relay = check(config.clone(), &golden).await;
        let mut resident = config.clone();
        resident.schedule.kind = ScheduleKind::Resident;
        resident.schedule.recompute = false.into();
        resident.stash.place = StashPlace::Device;
        assert_eq!(check(resident, &golden).await, relay, "{name}");
        let mut pipeline = config.clone();
        pipeline.schedule.kind = ScheduleKind::OneForwardOneBackward;
        pipeline.schedule.recompute = Recompute::ATTENTION;
        (pipeline.device.count, pipeline.stash.place) = (Some(2), StashPlace::Host);
        assert_eq!(check(pipeline, &golden).await, relay, "{name}");
        if name.contains("moe") || ["gpt_oss", "mixtral", "qwen3_next"].contains(&name) {
            let mut apart = config.clone();
            apart.schedule.bundles = Some(1);
            assert_eq!(check(apart, &golden).await, relay, "{name}");
        }
        if whole() {
            let mut others = config;
            others.step.chunk_positions = 2 * CHUNK;
            check(others, &golden).await;
        }
    }
}

/// A run of sequences of this length.
fn config(case: &Case, ways: &Ways, length: usize) -> Config {
    let mut config = exact::config(case, ways);
    (config.model.positions, config.data.sequence_length) = (Some(length), Some(length));
    config.step.chunk_positions = CHUNK;
    limit(&mut config, ways.room);
    config
}

/// Rows are many here, so layers are few and the vocabulary is small.
fn long_case(case: Case) -> Case {
    let routers = match case.routers {
        Routers::Limited => Routers::OfStep, // limits need whole sequences
        routers => routers,
    };
    Case { layers: case.layers.min(3), tied_tiles: false, routers, ..case }
}

fn long_ways(ways: Ways, relays: bool) -> Ways {
    Ways { kind: if relays { ScheduleKind::Relay } else { ways.kind }, ..ways }
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(if whole() { 300 } else { 8 })
    })]

    /// Of every recomputation, stash, tier, clipping, adapter, base, group and device. Most are
    /// relays, in which chunks are micro-batches.
    #[test]
    fn every_way_gives_the_same_bits(
        case in exact::cases(),
        ways in exact::ways(),
        relays in prop::bool::weighted(0.7),
        length in prop::sample::select(vec![129, 256, 300, 560]),
    ) {
        const STEPS: usize = 2;
        let case = long_case(case);
        let ways = long_ways(ways, relays).for_case(&case);
        let (expected, reference) = run(config(&case, &baseline(), length), STEPS);
        let config = config(&case, &ways, length);
        let (bits, summary) = run(config.clone(), STEPS);
        prop_assert_eq!(bits, expected);
        prop_assert_eq!(&summary.weights_digest, &reference.weights_digest);
        check_links(&config, STEPS as u64, &summary.links);
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(if whole() { 100 } else { 4 })
    })]

    #[test]
    fn every_number_of_ranks_gives_the_same_bits(
        case in exact::cases(),
        ways in exact::ways(),
        (ranks, groups, each) in (2..=3_u32, 2..=4_u32, 1..=2_usize),
        length in prop::sample::select(vec![129, 256, 300]),
    ) {
        let case = Case { micro_batch: case.micro_batch.min(2), ..long_case(case) };
        let ways = long_ways(ways, true);
        let Shared { case, ways, ranks } = shared(case, ways, [ranks, groups], each);
        // Devices of ranks with different numbers of chunks need blocks in different orders.
        let count = if ways.devices > 1 { case.micro_batch } else { 1 };
        let case = Case { batch: case.batch.next_multiple_of(count), ..case };
        let folder = tempfile::tempdir().expect("a place for files");
        let task = |ways: &Ways| {
            let mut config = config(&case, ways, length);
            config.eps.path = ways.on_file.then(|| folder.path().into());
            Task { evaluates: true, ..Task::new(config, 2) }
        };
        check_ranks(ranks, &ways, task);
    }
}

#[test]
fn ranks_that_would_exchange_in_different_orders_are_refused() {
    let problem = |groups: u32, batch: usize| {
        let mut config = Config::default();
        (config.model.positions, config.data.sequence_length) = (Some(129), Some(129));
        (config.step.batch, config.step.micro_batch) = (batch, 2);
        config.step.chunk_positions = CHUNK;
        (config.parallel.groups, config.parallel.deal) = (groups, Deal::Sequences);
        config.device.count = Some(2);
        let model = model_of(&config, shape_of(&config).expect("a shape")).expect("a model");
        let share = RankShare { rank: 0, ranks: 2 };
        let plan = Plan::of_rank(&config, &model, &config.update_rule(), share);
        plan.err().map(|error| error.to_string())
    };
    assert_eq!(problem(4, 8), None);
    let of_batch = problem(4, 7).expect("chunks differ");
    assert!(of_batch.contains("step.batch is 7") && of_batch.contains("a multiple of 8"));
    let of_groups = problem(5, 10).expect("groups differ");
    assert!(of_groups.contains("parallel.groups is 5, of which 2 processes"), "{of_groups}");
    assert!(of_groups.contains("set 2, 4 or another 2 times a power of two"), "{of_groups}");
}

/// A run of long sequences goes on from a checkpoint, or from its files, with other numbers of
/// ranks and devices.
#[test]
fn a_run_of_long_sequences_is_interrupted() {
    for (trained, on_file) in [(Trained::All, true), (Trained::Adapters, false)] {
        let case =
            Case { layers: 2, batch: 4, micro_batch: 1, groups: 4, trained, ..SMALL.clone() };
        let folder = tempfile::tempdir().expect("a place for files");
        let of = |devices: u32, steps: usize| {
            let kind = ScheduleKind::Relay;
            let place = StashPlace::Host;
            let ways = Ways { kind, place, devices, on_file, recompute: true.into(), ..baseline() };
            let mut config = config(&case, &ways, 300);
            config.eps.path = on_file.then(|| folder.path().join("eps"));
            Task { evaluates: true, ..Task::new(config, steps) }
        };
        let mut alone = of(1, 4);
        (alone.config.eps.tier, alone.config.eps.path) = (EpsTier::Memory, None);
        let (bits, reference) = alone.run(None).expect("a case of ours");
        let layouts = [(2, 1), (1, 2), (2, 2), (1, 1)];
        for (nth, (ranks, devices)) in layouts.into_iter().enumerate() {
            // Files are those of one number of ranks, so each layout has some of its own.
            let place = |nth: usize| folder.path().join(format!("after-{nth}"));
            let mut task = Task {
                from: nth,
                resumes: nth.checked_sub(1).map(place),
                leaves: Some(place(nth)),
                ..of(devices, 1)
            };
            let path = &mut task.config.eps.path;
            *path = path.take().map(|path| path.join(nth.to_string()));
            for (seen, _) in on_ranks(ranks, |_| task.clone()) {
                let (found, summary) = seen.expect("a case of ours");
                assert_eq!(found, bits[nth..=nth], "{trained:?}: {ranks} × {devices}");
                if nth == 3 {
                    assert_eq!(summary.weights_digest, reference.weights_digest);
                }
            }
        }
    }
}

/// A label at a chunk's edge belongs to the position before it, which may be of another chunk; and
/// each label weighs as much as any other, however many its chunk has.
#[tokio::test]
async fn labels_at_the_edges_of_chunks_count_once() {
    let sizes = "model.layers = 2\nmodel.hidden = 32\nmodel.heads = 4\nmodel.vocabulary = 64\n\
                 model.positions = 300\nmodel.preset = \"llama-1b\"\nmodel.kv_heads = 2";
    let only = |labelled: &dyn Fn(usize) -> bool| {
        let mut one = texts(&[300], 3, Predicts::Next).remove(0);
        let others = one.labels.iter_mut().enumerate().filter(|(at, _)| !labelled(*at));
        others.for_each(|(_, label)| *label = -100);
        one
    };
    let edges = [1, 127, 128, 129, 255, 256, 257, 299];
    let mut all: Vec<_> = edges.iter().map(|&edge| only(&|at| at == edge)).collect();
    // One label in the first chunk, none in the second, and all of the third.
    all.push(only(&|at| at == 5 || at >= 2 * CHUNK));
    for (nth, sequence) in all.into_iter().enumerate() {
        let run = |chunk: usize| {
            let mut config = crate::packing::config(sizes, 2);
            config.step.chunk_positions = chunk;
            // Beside another whose labels are all there.
            let short = texts(&[40], 1, Predicts::Next).remove(0);
            let both = vec![sequence.clone(), short];
            steps(config, move |_| both.clone(), Predicts::Next)
        };
        let whole = run(3 * CHUNK).await;
        let cut = run(CHUNK).await;
        for (whole, cut) in whole.iter().zip(&cut) {
            let close = |a: f64, b: f64| (a - b).abs() <= 2e-5 * a.abs().max(1.0);
            assert!(close(whole.loss, cut.loss), "{nth}: {} {}", whole.loss, cut.loss);
            let norms = [whole.grad_norm, cut.grad_norm];
            assert!(close(norms[0], norms[1]), "{nth}: {norms:?}");
        }
    }
}

/// Documents that end inside a chunk, at its end, and in a later chunk.
#[tokio::test]
async fn packed_documents_are_texts_by_themselves() {
    const LENGTHS: [usize; 9] = [9, 170, 3, 118, 56, 72, 128, 1, 31];
    let sizes = "model.layers = 2\nmodel.hidden = 32\nmodel.heads = 4\nmodel.vocabulary = 64\n\
                 model.positions = 300\n";
    // Every second block has a window; one expert is chosen without a choice.
    let windows = "model.kv_heads = 2\nmodel.experts = 1\nmodel.experts_per_token = 1\n\
                   model.expert_intermediate = 14";
    let cases = [
        ("gpt-small", "", Predicts::Next),
        ("llama-1b", "model.kv_heads = 2", Predicts::Next),
        ("gpt-oss-20b", windows, Predicts::Next),
        ("bert-base", "", Predicts::Own),
    ];
    for (preset, keys, predicts) in cases {
        let config = |batch: usize, chunk: usize| {
            let toml = format!("model.preset = \"{preset}\"\n{keys}\n{sizes}");
            let mut config = crate::packing::config(&toml, batch);
            config.step.chunk_positions = chunk;
            config
        };
        let apart = |step| texts(&LENGTHS, step, predicts);
        let together = |step| {
            let texts = texts(&LENGTHS, step, predicts);
            vec![packed(&texts[..4]), packed(&texts[4..])]
        };
        let one = steps(config(LENGTHS.len(), 2 * CHUNK), apart, predicts).await;
        let other = steps(config(2, CHUNK), together, predicts).await;
        for (one, other) in one.iter().zip(&other) {
            let close = |a: f64, b: f64| (a - b).abs() <= 2e-5 * a.abs().max(1.0);
            assert_eq!(one.tokens, other.tokens);
            assert!(close(one.loss, other.loss), "{preset}: {} {}", one.loss, other.loss);
            let norms = [one.grad_norm, other.grad_norm];
            assert!(close(norms[0], norms[1]), "{preset}: {norms:?}");
        }
    }
}

/// A prompt that is read in chunks is continued as one that is read whole, beside a short one.
#[tokio::test]
async fn prompts_are_read_in_chunks() {
    for name in ["gpt2", "gemma3_text", "llama", "qwen2_moe", "qwen3_5_moe_text", "qwen3_5_text"] {
        let (mut config, _) = long(name);
        let prompt = |length: u32| (0..length).map(|at| 2 + (at * at + length) % 59).collect();
        let prompts = [280, 20, 128].map(prompt);
        let cut = greedy(config.clone(), &prompts, 12).await;
        config.step.chunk_positions = 3 * CHUNK;
        assert_eq!(greedy(config, &prompts, 12).await, cut, "{name}");
    }
}

/// Chunks on ranks and devices, with losses that depend on whole sequences. The last micro-batch
/// has one sequence.
#[test]
fn ranks_and_devices_share_long_sequences() {
    for routers in [Routers::OfSequences, Routers::OfStep] {
        let case = Case {
            layers: 2,
            batch: 5,
            micro_batch: 2,
            groups: 3,
            experts: Some([5, 2]),
            routers,
            ..SMALL.clone()
        };
        let of = |ways: Ways| Task { evaluates: true, ..Task::new(config(&case, &ways, 300), 2) };
        let relay = Ways { kind: ScheduleKind::Relay, place: StashPlace::Host, ..baseline() };
        let first = match routers {
            Routers::OfStep => relay.clone(),
            _ => baseline(),
        };
        let (expected, reference) = of(first).run(None).expect("a case of ours");
        for (ranks, devices, deal) in [
            (1, 3, Deal::Layers),
            (2, 1, Deal::Layers),
            (2, 2, Deal::Layers),
            (1, 2, Deal::Sequences),
        ] {
            let ways = Ways { devices, deal, recompute: true.into(), ..relay.clone() };
            for (seen, _) in on_ranks(ranks, |_| of(ways.clone())) {
                let (bits, summary) = seen.expect("a case of ours");
                assert_eq!(bits, expected, "{routers:?}: {ranks} × {devices}, {deal:?}");
                assert_eq!(summary.weights_digest, reference.weights_digest);
            }
        }
    }
}

/// What a device holds of a step, in bytes: what grows with the length, and all else.
fn held(preset: &str, length: usize) -> [u64; 2] {
    let sizes = "model.layers = 3\nmodel.hidden = 64\nmodel.heads = 4\nmodel.kv_heads = 2\n\
                 model.vocabulary = 97";
    let config = crate::packing::config(&format!("model.preset = \"{preset}\"\n{sizes}"), 2);
    held_of(config, length)
}

fn held_of(mut config: Config, length: usize) -> [u64; 2] {
    if config.model.path.is_none() {
        config.model.positions = Some(length);
    }
    config.data.sequence_length = Some(length);
    config.step.chunk_positions = CHUNK;
    let model = model_of(&config, shape_of(&config).expect("a shape of ours"));
    let plan = Plan::new(&config, &model.expect("a model of ours"), &config.update_rule());
    let plan = plan.expect("a plan");
    let keys = plan.device.iter().find(|term| term.name == "keys_and_values");
    let keys = keys.map_or(0, |term| term.bytes);
    [keys, plan.device_bytes() - keys]
}

#[test]
fn devices_grow_with_the_length_by_keys_and_values_alone() {
    for preset in ["llama-1b", "qwen", "moe-small"] {
        let lengths = [2, 16, 64, 1024].map(|chunks| held(preset, chunks * CHUNK));
        let [keys, rest] = lengths[0];
        for (chunks, [more_keys, same]) in [2, 16, 64, 1024].into_iter().zip(lengths) {
            assert_eq!(same, rest, "{preset}: {chunks} chunks");
            assert_eq!(more_keys * 2, keys * chunks, "{preset}: {chunks} chunks");
        }
    }
}

/// With windows in all layers nothing grows: keys and values of the window's chunks are there. One
/// layer without a window keeps those of all.
#[test]
fn devices_do_not_grow_with_the_length_if_all_layers_have_windows() {
    let folder = TempDir::new().expect("a directory");
    let held = |name: &str, window, chunks: usize, kind| {
        let mut config = windowed(name, window, folder.path());
        config.schedule.kind = kind;
        held_of(config, chunks * CHUNK)
    };
    let relay = ScheduleKind::Relay;
    for (window, places) in [(1, 2), (129, 2), (130, 3), (300, 4)] {
        let lengths = [2, 4, 16, 64].map(|chunks| held("mistral", window, chunks, relay));
        assert_eq!(lengths[1..], [lengths[3]; 3][..], "{window}");
        let [few, same] = lengths[0];
        assert_eq!(lengths[3], [few * places / 2, same], "{window}");
        let visited =
            [4, 16, 64].map(|chunks| held("mistral", window, chunks, ScheduleKind::Resident)[0]);
        assert_eq!(visited, [lengths[3][0]; 3], "{window}");
    }
    for name in ["gemma3_text", "gpt_oss"] {
        let [(few, rest), (many, same)] =
            [4, 64].map(|chunks| held(name, 40, chunks, relay)).map(|[keys, rest]| (keys, rest));
        assert_eq!((few * 16, rest), (many, same), "{name}");
    }
}

/// A model of this family in `chunked`, with windows of this length and room for long sequences.
fn windowed(name: &str, window: usize, folder: &Path) -> Config {
    let (mut config, _) = long(name);
    let from = config.model.path.take().expect("a case has one");
    for file in ["config.json", "model.safetensors"] {
        fs::copy(from.join(file), folder.join(file)).expect("it is committed");
    }
    let path = folder.join("config.json");
    let text = fs::read_to_string(&path).expect("it was copied");
    let mut keys: Value = serde_json::from_str(&text).expect("JSON");
    keys["sliding_window"] = window.into();
    keys["max_position_embeddings"] = (64 * CHUNK).into();
    fs::write(&path, keys.to_string()).expect("a directory of ours");
    config.model.path = Some(folder.into());
    config.data.train = "random".into();
    config.data.sequence_length = Some(LONGEST);
    (config.step.batch, config.step.micro_batch) = (2, 2);
    config
}

/// Positions of six chunks, the last of them ragged.
const LONGEST: usize = 700;

/// Windows that end inside a chunk, at its end, and behind several: the numbers of sequences that
/// are computed whole, and the same bits wherever chunks are computed.
#[test]
fn windows_are_those_of_whole_sequences() {
    let windows = [("gemma3_text", 40), ("mistral", 130), ("gpt_oss", 129)];
    let others =
        if whole() { &[("mistral", 1), ("mistral", 300), ("qwen2", 257)][..] } else { &[] };
    for &(name, window) in windows.iter().chain(others) {
        let folder = TempDir::new().expect("a directory");
        let config = windowed(name, window, folder.path());
        let mut whole = config.clone();
        whole.step.chunk_positions = LONGEST.next_multiple_of(CHUNK);
        let numbers = |bits: &[(u64, u64)]| -> Vec<f64> {
            bits.iter().flat_map(|&(loss, norm)| [loss, norm].map(f64::from_bits)).collect()
        };
        let (bits, relay) = run(config.clone(), 2);
        let of_whole = numbers(&run(whole, 2).0);
        for (one, other) in numbers(&bits).into_iter().zip(of_whole) {
            assert!((one - other).abs() <= 2e-5 * other, "{name}, {window}: {one} {other}");
        }
        let mut ways = vec![config.clone(); 3];
        ways[0].schedule.kind = ScheduleKind::Resident;
        (ways[1].device.count, ways[1].schedule.recompute) = (Some(2), true.into());
        ways[2].schedule.recompute = false.into();
        ways[2].stash.place = StashPlace::Device;
        for way in ways {
            let (other, summary) = run(way, 2);
            assert_eq!(other, bits, "{name}, {window}");
            assert_eq!(summary.weights_digest, relay.weights_digest, "{name}, {window}");
        }
    }
}
