//! Training is the same, bit for bit, in every configuration of the ring: relay, resident and
//! pipelines, layers and sequences dealt over devices, any depth, stash place, recomputation,
//! number of devices and threads, link, and with the model in memory or on file.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use l2l::config::{
    ChannelsConfig, CompressionKind, Dtype, EpsTier, GradientDtype, GroupConfig, MasterDtype,
    OptimizerKind, Recompute, ScheduleKind, StashDtype, StashPlace,
};
use l2l::data::Batches;
use l2l::models::Base;
use l2l::plan::LinkBytes;
use l2l::{Config, Plan, Trainer, shape_of};
use proptest::prelude::*;

use crate::balanced::{Routers, all_losses, whole_steps};
use crate::compression::{Encodings, encodings, possible};
use crate::plan::limit;
use crate::trained::{Family, Trained};
pub(crate) use crate::ways::{Ways, baseline, ways};
use crate::whole;

/// What is trained: a case decides the bits of a run.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) layers: usize,
    pub(crate) batch: usize,
    pub(crate) micro_batch: usize,
    pub(crate) dropout: f32,
    pub(crate) clip: bool,
    pub(crate) tied_tiles: bool,
    /// Experts of a block, and those that a token chooses. `None`: blocks have no experts.
    pub(crate) experts: Option<[usize; 2]>,
    /// Losses and limits of routers, if there are experts.
    pub(crate) routers: Routers,
    /// With experts: they are those of gpt-oss, and not of Qwen3.
    pub(crate) gpt_oss: bool,
    pub(crate) groups: u32,
    /// Slices of a block, if it has no experts.
    pub(crate) slices: u32,
    pub(crate) trained: Trained,
    /// How what is not trained is stored, if anything is not.
    pub(crate) base: Base,
    pub(crate) rule: OptimizerKind,
    /// What the device computes with, and how masters are stored.
    pub(crate) precision: (Dtype, MasterDtype),
    pub(crate) encodings: Encodings,
}

/// A block has `count` experts, of which a token chooses `per_token`.
fn set_experts(config: &mut Config, case: &Case, [count, per_token]: [usize; 2]) {
    config.experts = case.routers.config(per_token);
    config.model.preset = Some(if case.gpt_oss { "gpt-oss-20b" } else { "moe-small" }.into());
    config.model.kv_heads = case.gpt_oss.then_some(1);
    config.model.experts = Some(count);
    config.model.experts_per_token = Some(per_token);
    config.model.expert_intermediate = Some(14);
}

pub(crate) fn config(case: &Case, ways: &Ways) -> Config {
    let mut config = Config::default();
    config.model.layers = Some(case.layers);
    let mut ways = ways.clone();
    if let Some(experts) = case.experts {
        set_experts(&mut config, case, experts);
        if case.routers.is_of_step() {
            ways.kind = whole_steps(ways.kind);
        }
    }
    config.model.hidden = Some(24);
    config.model.heads = Some(if case.slices > 1 { 4 } else { 3 });
    config.model.vocabulary = Some(if case.tied_tiles { 100_000 } else { 51 });
    config.model.positions = Some(10);
    config.model.dropout = Some(case.dropout);
    config.data.train = "random".into();
    config.data.sequence_length = Some(7);
    config.step.batch = case.batch;
    config.step.micro_batch = case.micro_batch;
    config.step.seed = 5;
    config.optimizer.clip_norm = case.clip.then_some(0.5);
    config.optimizer.learning_rate = 1e-2;
    (config.device.dtype, config.optimizer.masters) = case.precision;
    (config.stash.dtype, config.device.gradient_dtype, config.compression.kind) = case.encodings;
    config.stash.block_size = 8;
    (config.compression.rank, config.compression.density) = (2, 0.1);
    // Steps that may change nothing need the model in memory, and so does error feedback.
    let in_memory = config.device.dtype == Dtype::F16 || config.compression().is_some();
    let on_file = ways.on_file && !in_memory;
    config.eps.tier = if on_file { EpsTier::File } else { EpsTier::Memory };
    config.loss_scale.initial = 256.0;
    config.parallel.groups = case.groups;
    config.parallel.slices = case.slices;
    config.train = case.trained.config(Family::of(case.experts.is_some(), case.gpt_oss));
    // The inputs of some adapted modules are cut.
    config.train.lora.iter_mut().filter(|_| case.slices > 1).for_each(|lora| lora.dropout = 0.0);
    config.train.neftune_alpha = 50.0 * f64::from(case.dropout);
    config.train.label_smoothing = case.dropout;
    if !matches!(case.trained, Trained::All) {
        config.train.base = case.base;
    }
    config.optimizer.kind = case.rule;
    if case.layers == 2 {
        let vectors = if case.experts.is_some() { "norm" } else { "bias" };
        let patterns = vec!["mlp".into(), vectors.into()];
        let learning_rate = Some(3e-3);
        let kind = Some(OptimizerKind::Lion);
        let clip_norm = (case.batch > 3).then_some(0.2);
        config.optimizer.groups =
            vec![GroupConfig { patterns, learning_rate, weight_decay: Some(0.1), kind, clip_norm }];
    }
    // One of the two rules of this kind, by chance.
    let has_momentum = case.rule == OptimizerKind::Sgd && case.batch.is_multiple_of(2);
    config.optimizer.momentum = has_momentum.then_some(0.9);
    ways.set(&mut config, case.experts.is_some());
    config
}

/// Runs `steps` steps. Gives the bits of each step's loss and gradient norm, and the summary.
pub(crate) fn run(mut config: Config, steps: usize) -> (Vec<(u64, u64)>, crate::Ending) {
    let folder = tempfile::tempdir().expect("a place for files");
    if config.eps.tier == EpsTier::File {
        config.eps.path = Some(folder.path().into());
    }
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(async {
        let mut batches = Batches::open(&config).expect("random data");
        let mut trainer = Trainer::start(config).await.expect("a case of ours");
        let mut bits = Vec::new();
        for _ in 0..steps {
            let batch = batches.next().await.expect("random data");
            let report = trainer.step(batch).await.expect("nothing fails here");
            assert!(report.loss.is_finite() && report.grad_norm > 0.0);
            bits.push((all_losses(&report).to_bits(), report.grad_norm.to_bits()));
        }
        (bits, crate::stop(trainer).await.expect("nothing fails here"))
    })
}

pub(crate) fn cases() -> impl Strategy<Value = Case> {
    let shape = (prop::sample::select(vec![1_usize, 2, 13]), 1..=7_usize, 1..=3_usize);
    let flags = (prop::bool::ANY, prop::bool::ANY, prop::bool::weighted(0.1), 1..=8_usize);
    let rules = prop::sample::select(OptimizerKind::ALL.to_vec());
    let bases = prop::sample::select(vec![Base::AsIs, Base::Bf16, Base::Int8, Base::Nf4]);
    let precisions = prop::sample::select(vec![
        (Dtype::F32, MasterDtype::Auto),
        (Dtype::F32, MasterDtype::F32),
        (Dtype::Bf16, MasterDtype::Split),
        (Dtype::Bf16, MasterDtype::F32),
        (Dtype::Bf16, MasterDtype::Bf16),
        (Dtype::F16, MasterDtype::Auto),
    ]);
    // From experts that are often idle to those that every token chooses.
    let experts = prop::sample::select(vec![[1, 1], [5, 1], [4, 2], [9, 3], [3, 3]]);
    let experts = prop::option::weighted(0.3, experts);
    let slices = prop::sample::select(vec![1_u32, 1, 2, 4]);
    let experts = (experts, prop::bool::weighted(0.4), slices);
    let routers = prop::sample::select(Routers::ALL.to_vec());
    let numbers = (precisions, encodings(), experts, routers);
    let flags = (flags, prop::sample::select(Trained::ALL.to_vec()), bases, rules, numbers);
    (shape, flags).prop_map(|((layers, batch, micro_batch), flags)| {
        let (flags, trained, base, rule, (precision, encodings, blocks, routers)) = flags;
        let (experts, gpt_oss, slices) = blocks;
        let (drops, clip, tied_tiles, groups) = flags;
        let turns = batch.div_ceil(micro_batch);
        let divisors = (1..=groups).rev().filter(|&groups| turns.is_multiple_of(groups));
        possible(Case {
            layers,
            batch,
            micro_batch,
            dropout: if drops { 0.1 } else { 0.0 },
            clip,
            tied_tiles,
            experts,
            routers,
            gpt_oss,
            groups: divisors.max().unwrap_or(1) as u32,
            slices: if experts.is_some() { 1 } else { slices },
            trained,
            base,
            rule,
            precision,
            encodings,
        })
    })
}

/// The bytes that so many steps move, by device, as the plan says.
pub(crate) fn planned(config: &Config, steps: u64) -> Vec<LinkBytes> {
    let model = l2l::model_of(config, shape_of(config).expect("a shape of ours"));
    let model = model.expect("a model of ours");
    let plan = Plan::new(config, &model, &config.update_rule()).expect("a plan of ours");
    let all = |link: LinkBytes| LinkBytes {
        upload: steps * link.upload,
        download: steps * link.download,
        peers: steps * link.peers,
    };
    plan.traffic.link_bytes.into_iter().map(all).collect()
}

/// Checks the bytes that so many steps moved. Random sequences all have the longest length, so each
/// step moves the plan's bytes; or fewer, if experts are idle that have visits of their own.
pub(crate) fn check_links(config: &Config, steps: u64, moved: &[LinkBytes]) {
    let planned = planned(config, steps);
    if config.schedule.bundles.is_none() {
        assert_eq!(moved, planned);
    }
    for (moved, planned) in moved.iter().zip(&planned) {
        let is_within = moved.upload <= planned.upload && moved.download <= planned.download;
        assert!(is_within, "{moved:?}, planned {planned:?}");
    }
}

/// Checks that a run in another way has the bits of the plain one, and moves the plan's bytes.
pub(crate) fn check_way(plain: Config, config: Config, steps: usize) {
    let (expected, reference) = run(plain, steps);
    let (bits, summary) = run(config.clone(), steps);
    assert_eq!(bits, expected);
    assert_eq!(summary.weights_digest, reference.weights_digest);
    check_links(&config, steps as u64, &summary.links);
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(if whole() { 300 } else { 60 })
    })]

    #[test]
    fn every_way_gives_the_same_bits(case in cases(), ways in ways()) {
        let ways = ways.for_case(&case);
        check_way(config(&case, &baseline()), config(&case, &ways), 3);
    }
}

/// Noise of embeddings is that of its step, in the range that its rule gives.
#[test]
fn noise_is_of_training_alone() {
    let of = |alpha: f64| {
        let mut config = config(&SMALL, &baseline());
        (config.model.dropout, config.train.neftune_alpha) = (Some(0.0), alpha);
        config.optimizer.learning_rate = 1e-30; // only noise changes losses
        config.optimizer.weight_decay = 0.0;
        run(config, 3).0
    };
    let quiet = of(0.0);
    let noisy = of(5.0);
    assert_eq!(noisy, of(5.0));
    for (step, (quiet, noisy)) in quiet.iter().zip(&noisy).enumerate() {
        assert_ne!(quiet, noisy, "step {step}");
    }
}

/// Layers whose workspace is the largest, in every kind of pipeline.
#[test]
fn wide_layers_have_room_in_every_pipeline() {
    let case = Case { layers: 4, batch: 4, micro_batch: 2, ..SMALL.clone() };
    let of = |ways: &Ways| {
        let mut config = config(&case, ways);
        (config.model.hidden, config.model.positions) = (Some(48), Some(40));
        config.data.sequence_length = Some(40);
        limit(&mut config, ways.room);
        run(config, 2).1.weights_digest
    };
    let expected = of(&baseline());
    for recompute in [true.into(), false.into(), Recompute::ATTENTION, Recompute::AUTO] {
        for kind in [ScheduleKind::Gpipe, ScheduleKind::Interleaved] {
            let ways = Ways { kind, devices: 2, recompute, room: 0.6, ..baseline() };
            assert_eq!(of(&ways), expected, "{kind:?} {recompute:?}");
        }
    }
}

pub(crate) static SMALL: LazyLock<Case> = LazyLock::new(|| Case {
    layers: 4,
    batch: 5,
    micro_batch: 2,
    dropout: 0.1,
    clip: false,
    tied_tiles: false,
    experts: None,
    routers: Routers::Plain,
    gpt_oss: false,
    groups: 1,
    slices: 1,
    trained: Trained::All,
    base: Base::AsIs,
    rule: OptimizerKind::Adamw,
    precision: (Dtype::F32, MasterDtype::Auto),
    encodings: (StashDtype::F32, GradientDtype::F32, CompressionKind::None),
});

#[test]
fn relay_and_resident_walk_and_move_differently_and_end_the_same() {
    let relay = Ways {
        kind: ScheduleKind::Relay,
        channels: ChannelsConfig { weights: 2, ..baseline().channels },
        ..baseline()
    };
    let (relay_bits, relay) = run(config(&SMALL, &relay), 3);
    let (resident_bits, resident) = run(config(&SMALL, &baseline()), 3);
    assert_eq!((relay_bits, &relay.weights_digest), (resident_bits, &resident.weights_digest));
    assert_ne!(relay.visits, resident.visits);
    assert_ne!(relay.bytes_uploaded, resident.bytes_uploaded);
}

#[test]
fn a_run_is_the_same_again_and_another_seed_is_not() {
    let again = || run(config(&SMALL, &baseline()), 3);
    let first = again();
    let second = again();
    assert_eq!((&first.0, &first.1.weights_digest), (&second.0, &second.1.weights_digest));
    let mut other = config(&SMALL, &baseline());
    other.step.seed = 6;
    assert_ne!(run(other, 3).1.weights_digest, first.1.weights_digest);
}

/// A file of sequences that are longer than a chunk of 128 positions, and of some that are not.
pub(crate) fn long_sequences(folder: &Path) -> PathBuf {
    let data = folder.join("data.jsonl");
    let line = |length: usize| {
        let ids: Vec<usize> = (0..length).map(|at| (at * at + length) % 51).collect();
        serde_json::json!({ "input_ids": ids }).to_string()
    };
    let lines = [128, 326, 17, 129, 1, 128].map(line);
    std::fs::write(&data, lines.join("\n")).expect("room on a disk");
    data
}

/// Sequences that are computed in chunks, beside some that are not.
#[test]
fn long_sequences_give_the_same_bits_everywhere() {
    let folder = tempfile::tempdir().expect("a place for files");
    let data = long_sequences(folder.path());
    let of = |ways: &Ways, chunk_positions: usize| {
        let mut config = config(&Case { layers: 2, batch: 3, clip: true, ..SMALL.clone() }, ways);
        (config.model.hidden, config.model.heads) = (Some(8), Some(1));
        (config.model.positions, config.data.sequence_length) = (Some(400), Some(400));
        config.step.chunk_positions = chunk_positions;
        config.data.train = data.display().to_string().into();
        limit(&mut config, ways.room);
        run(config, 2)
    };
    let (bits, reference) = of(&baseline(), 128);
    let relay = Ways { kind: ScheduleKind::Relay, place: StashPlace::Host, ..baseline() };
    for recompute in [true.into(), Recompute::ATTENTION, Recompute::AUTO] {
        let ways = Ways { recompute, room: 0.5, threads: 2, ..relay.clone() };
        let (found, summary) = of(&ways, 128);
        assert_eq!((&found, &summary.weights_digest), (&bits, &reference.weights_digest));
    }
    // Computed at once, they give other bits, and the same within rounding.
    let whole = of(&relay, 512).0;
    assert_ne!(whole, bits);
    let numbers = |bits: &[(u64, u64)]| -> Vec<f64> {
        bits.iter().flat_map(|&(loss, norm)| [loss, norm]).map(f64::from_bits).collect()
    };
    for (whole, cut) in numbers(&whole).into_iter().zip(numbers(&bits)) {
        assert!((whole - cut).abs() <= 1e-5 * whole, "{whole} {cut}");
    }
}

/// A packed stash rounds what waits, and then the same holds: schedules, places and tiers agree.
#[test]
fn a_packed_stash_gives_the_same_bits_everywhere() {
    let host = Ways { kind: ScheduleKind::Relay, place: StashPlace::Host, ..baseline() };
    let recomputing = Ways { recompute: true.into(), ..host.clone() };
    let on_file = Ways { on_file: true, ..recomputing.clone() };
    let digest = |ways: &Ways, dtype| {
        let mut config = config(&SMALL, ways);
        config.stash.dtype = dtype;
        run(config, 3).1.weights_digest
    };
    let packed = digest(&baseline(), StashDtype::Bf16);
    for ways in [host, recomputing, on_file] {
        assert_eq!(digest(&ways, StashDtype::Bf16), packed, "{ways:?}");
    }
    assert_ne!(digest(&baseline(), StashDtype::F32), packed, "it rounds");
}
