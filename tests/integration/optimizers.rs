//! Every update rule: the same bits in every configuration of the ring, resumed runs that are the
//! unbroken ones, states as declared in plans and checkpoints, and refusals that say what works.

use std::fs;
use std::path::Path;

use l2l::config::{
    ChannelsConfig, EpsTier, GroupConfig, OptimizerConfig, OptimizerKind, RateSchedule,
    ScheduleKind, StashPlace,
};
use l2l::data::{Batches, Dataset};
use l2l::models::Model;
use l2l::plan::RankShare;
use l2l::{Config, Plan, Trainer, hf, shape_of};
use safetensors::{Dtype, SafeTensors};

use crate::exact::{self, SMALL, Ways, baseline};

const STEPS: u64 = 5;

/// A vocabulary of two tiles.
const TWO_TILES: usize = 24_000;

/// The settings of `[optimizer]` that are tried: each rule, an average, and several rules at once.
fn settings() -> Vec<(String, OptimizerConfig)> {
    let of_kind = |kind: OptimizerKind| {
        let optimizer = OptimizerConfig { kind, learning_rate: 1e-2, ..OptimizerConfig::default() };
        (kind.name().to_string(), optimizer)
    };
    let mut all: Vec<(String, OptimizerConfig)> =
        OptimizerKind::ALL.into_iter().map(of_kind).collect();
    let momentum = OptimizerConfig { momentum: Some(0.9), ..of_kind(OptimizerKind::Sgd).1 };
    all.push(("momentum".into(), momentum));
    let average = OptimizerConfig { ema: Some(0.9), ..of_kind(OptimizerKind::Muon).1 };
    all.push(("average".into(), average));
    let group = |pattern: &str, kind| GroupConfig {
        patterns: vec![pattern.into()],
        learning_rate: Some(3e-3),
        weight_decay: Some(0.1),
        clip_norm: None,
        kind: Some(kind),
    };
    let groups = vec![
        group("mlp", OptimizerKind::Adamw8bit),
        group("attn", OptimizerKind::Adafactor),
        group("bias", OptimizerKind::Lion),
        group("wpe", OptimizerKind::Sgd),
    ];
    all.push(("groups".into(), OptimizerConfig { groups, ..of_kind(OptimizerKind::AdamwBf16).1 }));
    all
}

/// A model with matrices that are large enough for moments of 8 bits, and a vocabulary of two
/// tiles.
fn config(optimizer: &OptimizerConfig, ways: &Ways) -> Config {
    let mut config = exact::config(&SMALL, ways);
    config.model.layers = Some(2);
    config.model.hidden = Some(48);
    config.model.vocabulary = Some(TWO_TILES);
    config.step.steps = Some(STEPS);
    config.optimizer = optimizer.clone();
    config
}

fn relay() -> Ways {
    let channels = ChannelsConfig { weights: 2, ..baseline().channels };
    Ways { kind: ScheduleKind::Relay, channels, place: StashPlace::Host, ..baseline() }
}

#[test]
fn every_rule_has_the_same_bits_in_every_configuration() {
    for (nth, (name, optimizer)) in settings().into_iter().enumerate() {
        for clip_norm in [None, Some(0.5)] {
            let optimizer = OptimizerConfig { clip_norm, ..optimizer.clone() };
            // A second tile takes most of the time. Eager updates of two are resumed below.
            let has_one_tile = clip_norm.is_none() && !crate::whole();
            let run = |ways: &Ways| {
                let mut config = config(&optimizer, ways);
                config.model.vocabulary = Some(if has_one_tile { 300 } else { TWO_TILES });
                exact::run(config, 3)
            };
            let (bits, expected) = run(&baseline());
            let shallow = ChannelsConfig { weights: 1, gradients: 1, reduced: 1, stash: 1 };
            let ways = [
                Ways { threads: 2, ..relay() },
                Ways { channels: shallow, recompute: true.into(), ..relay() },
                Ways { devices: 2, ..relay() },
                Ways { on_file: true, ..relay() },
            ];
            // Each rule is tried in every second way, and its neighbours in the others.
            let first = if crate::whole() { 0 } else { nth % 2 };
            for ways in ways.into_iter().skip(first).step_by(if crate::whole() { 1 } else { 2 }) {
                let (found, summary) = run(&ways);
                assert_eq!(found, bits, "{name}: {ways:?}");
                assert_eq!(summary.weights_digest, expected.weights_digest, "{name}: {ways:?}");
            }
        }
    }
}

/// Runs the steps `from..to`.
pub(crate) async fn steps(trainer: &mut Trainer, from: u64, to: u64) {
    let config = trainer.config().clone();
    let (data, _) = Dataset::open(&config, &shape_of(&config).expect("ours")).expect("random");
    let mut batches = Batches::start(&config, data, from).expect("a thread");
    for _ in from..to {
        let batch = batches.next().await.expect("random data");
        trainer.step(batch).await.expect("nothing fails here");
    }
}

pub(crate) fn bytes_of(checkpoint: &Path, file: &str) -> Vec<u8> {
    fs::read(checkpoint.join(file)).expect("it was written")
}

/// From a checkpoint to other depths, another tier and two devices; and from a state on file, which
/// a run left without an end.
#[tokio::test]
async fn every_resumed_run_is_the_unbroken_one() {
    for (name, optimizer) in settings() {
        let schedule = RateSchedule::Cosine;
        let optimizer = OptimizerConfig { schedule, ..optimizer };
        let folder = tempfile::tempdir().expect("a place for files");
        let place = |name: &str| folder.path().join(name);
        let first = config(&optimizer, &baseline());
        let mut whole = Trainer::start(first.clone()).await.expect("a case of ours");
        steps(&mut whole, 0, STEPS).await;
        whole.checkpoint(&place("whole")).await.expect("a directory of ours");
        drop(whole);

        let mut broken = Trainer::start(first).await.expect("a case of ours");
        steps(&mut broken, 0, 2).await;
        broken.checkpoint(&place("broken")).await.expect("a directory of ours");
        drop(broken);
        let ways = Ways { devices: 2, on_file: true, threads: 2, ..relay() };
        let mut other = config(&optimizer, &ways);
        other.eps.path = Some(place("eps"));
        let resumed = Trainer::builder(other.clone()).resume(place("broken")).start().await;
        let mut resumed = resumed.expect("a checkpoint of ours");
        steps(&mut resumed, 2, 4).await;
        // What a kill would leave now: the index of a complete state, and blocks that go on.
        fs::create_dir(place("killed")).expect("a folder of ours");
        for file in ["index.0", "index.1", "blocks"] {
            let from = place("eps").join(file);
            fs::copy(from, place("killed").join(file)).expect("room on a disk");
        }
        drop(resumed);
        other.eps.path = Some(place("killed"));
        let resumed = Trainer::builder(other).resume_file().start().await;
        let mut resumed = resumed.expect("a state of ours");
        let reached = resumed.progress().step;
        assert!((2..=4).contains(&reached), "{name}: {reached}");
        steps(&mut resumed, reached, STEPS).await;
        resumed.checkpoint(&place("resumed")).await.expect("a directory of ours");
        drop(resumed);
        for file in ["model.safetensors", "optimizer.safetensors"] {
            let [expected, found] = ["whole", "resumed"].map(|run| bytes_of(&place(run), file));
            assert!(expected == found, "{name}: {file}");
        }
    }
}

/// The dtype and sizes of a state in a checkpoint.
fn state(bytes: &[u8], name: &str) -> (Dtype, Vec<usize>) {
    let tensors = SafeTensors::deserialize(bytes).expect("a file of ours");
    let view = tensors.tensor(name);
    let view = view.unwrap_or_else(|_| panic!("{name} of {:?}", tensors.names()));
    (view.dtype(), view.shape().to_vec())
}

#[tokio::test]
async fn checkpoints_hold_states_as_they_are_declared() {
    let folder = tempfile::tempdir().expect("a place for files");
    let c = 48;
    let v = 24_000;
    let of_kind =
        |kind: &str| settings().into_iter().find(|(name, _)| name == kind).expect("it is tried").1;
    for (kind, expected) in [
        ("adamw", vec![("mlp.c_fc.weight.state1", Dtype::F32, vec![c, 4 * c])]),
        ("sgd", vec![]),
        ("momentum", vec![("mlp.c_fc.bias.momentum_buffer", Dtype::F32, vec![4 * c])]),
        (
            "adafactor",
            vec![
                ("mlp.c_fc.weight.row_var", Dtype::F32, vec![c, 1]),
                ("mlp.c_fc.weight.col_var", Dtype::F32, vec![1, 4 * c]),
                ("mlp.c_fc.bias.variance", Dtype::F32, vec![4 * c]),
                // Of each tile its own columns.
                ("wte.weight.row_var", Dtype::F32, vec![v, 1]),
                ("wte.weight.col_var", Dtype::F32, vec![2, c]),
            ],
        ),
        (
            "muon",
            vec![
                ("attn.c_attn.weight.momentum_buffer", Dtype::F32, vec![c, 3 * c]),
                ("wte.weight.state0", Dtype::F32, vec![v, c]),
                ("ln_1.weight.state1", Dtype::F32, vec![c]),
            ],
        ),
        (
            "adamw-8bit",
            vec![
                ("mlp.c_fc.weight.exp_avg", Dtype::U8, vec![c, 4 * c]),
                ("mlp.c_fc.weight.exp_avg_sq_absmax", Dtype::F32, vec![4 * c * c / 256]),
                ("mlp.c_fc.bias.state0", Dtype::F32, vec![4 * c]),
            ],
        ),
        ("adamw-bf16", vec![("mlp.c_fc.weight.exp_avg_sq", Dtype::BF16, vec![c, 4 * c])]),
    ] {
        let mut trainer =
            Trainer::start(config(&of_kind(kind), &relay())).await.expect("a case of ours");
        steps(&mut trainer, 0, 1).await;
        let place = folder.path().join(kind);
        trainer.checkpoint(&place).await.expect("a directory of ours");
        let bytes = bytes_of(&place, "optimizer.safetensors");
        for (name, dtype, shape) in expected {
            let layer = if name.starts_with("wte") { "" } else { "h.0." };
            let found = state(&bytes, &format!("transformer.{layer}{name}"));
            assert_eq!(found, (dtype, shape), "{kind}: {name}");
        }
    }
}

/// The bytes of states in a plan: those of the rules, for each parameter of a model whose matrices
/// dwarf its vectors.
#[test]
fn the_plan_counts_the_bytes_of_states() {
    let of = |kind, tier, ema| {
        let mut config = Config::default();
        config.data.train = "random".into();
        config.model.preset = Some("llama-1b".into());
        (config.eps.tier, config.eps.path) = (tier, Some("/tmp".into()));
        (config.optimizer.kind, config.optimizer.ema) = (kind, ema);
        let model = Model::new(shape_of(&config).expect("a shape of ours"));
        let plan = Plan::new(&config, &model, &config.update_rule()).expect("a plan of ours");
        plan.eps_bytes().map(|bytes| bytes as f64 / model.parameters() as f64)
    };
    for (kind, bytes) in [
        (OptimizerKind::Adamw, 8.0),
        (OptimizerKind::Adam, 8.0),
        (OptimizerKind::Lamb, 8.0),
        (OptimizerKind::Lion, 4.0),
        (OptimizerKind::Sgd, 0.0),
        (OptimizerKind::Adafactor, 0.003),
        (OptimizerKind::Muon, 4.85), // embedding and head have two moments
        (OptimizerKind::Adamw8bit, 2.0 + 2.0 * 4.0 / 256.0),
        (OptimizerKind::AdamwBf16, 4.0),
    ] {
        for (tier, copies) in [(EpsTier::Memory, 1.0), (EpsTier::File, 2.0)] {
            for (ema, more) in [(None, 0.0), (Some(0.999), 4.0)] {
                let [masters, states, _] = of(kind, tier, ema);
                let expected = copies * (bytes + more);
                assert!((masters - 4.0 * copies).abs() < 0.01, "{kind:?}: {masters}");
                assert!((states - expected).abs() < 0.02, "{kind:?}: {states} of {expected}");
            }
        }
    }
}

/// A rule or a block size of another run's states is refused, with what to do, from a checkpoint
/// and from a state on file.
#[tokio::test]
async fn states_of_another_rule_are_refused() {
    let folder = tempfile::tempdir().expect("a place for files");
    let place = folder.path().join("checkpoint");
    let ways = Ways { on_file: true, ..relay() };
    let eight = OptimizerConfig { kind: OptimizerKind::Adamw8bit, ..OptimizerConfig::default() };
    let mut config = config(&eight, &ways);
    config.eps.path = Some(folder.path().join("eps"));
    let mut trainer = Trainer::start(config.clone()).await.expect("a case of ours");
    steps(&mut trainer, 0, 2).await;
    trainer.checkpoint(&place).await.expect("a directory of ours");
    trainer.stop().await.expect("nothing fails here");
    let with = |optimizer: OptimizerConfig| Config { optimizer, ..config.clone() };
    let smaller = OptimizerConfig { block_size: 128, ..eight.clone() };
    let average = OptimizerConfig { ema: Some(0.99), ..eight.clone() };
    for (optimizer, says) in [
        (OptimizerConfig::default(), "optimizer.kind was \"adamw-8bit\", is \"adamw\""),
        (smaller, "optimizer.block_size was 256, is 128"),
        (average, "optimizer.ema was null, is 0.99"),
    ] {
        let mut in_memory = with(optimizer.clone());
        in_memory.eps.tier = EpsTier::Memory;
        let checkpoint = Trainer::builder(in_memory).resume(&place).start().await;
        let on_file = Trainer::builder(with(optimizer)).resume_file().start().await;
        for refused in [checkpoint, on_file] {
            let error = refused.err().expect("other states");
            assert_eq!(error.exit_code(), 2);
            let error = error.to_string();
            for says in [says, "states are of that setting", "set model.path to the checkpoint"] {
                assert!(error.contains(says), "{error}");
            }
        }
    }
    // What the message says works.
    let mut anew = with(OptimizerConfig::default());
    (anew.model, anew.eps.tier) = (Default::default(), EpsTier::Memory);
    anew.model.path = Some(place);
    let mut trainer = Trainer::start(anew).await.expect("a model of ours");
    steps(&mut trainer, 0, 1).await;
}

/// Rules that see whole tensors, or pack their states, run in one process. The message says which
/// others there are.
#[test]
fn rules_that_need_whole_tensors_are_refused_with_several_processes() {
    for (name, optimizer) in settings() {
        let config = config(&optimizer, &relay());
        let model = Model::new(shape_of(&config).expect("a shape of ours"));
        let share = RankShare { rank: 0, ranks: 2 };
        let mut config = config;
        (config.parallel.groups, config.step.batch) = (2, 4);
        let plan = Plan::of_rank(&config, &model, &config.update_rule(), share);
        let is_elementwise = ["adamw", "adam", "sgd", "momentum", "lion"].contains(&&name[..]);
        match plan {
            Ok(_) => assert!(is_elementwise, "{name}"),
            Err(error) => {
                let error = error.to_string();
                assert!(!is_elementwise && error.contains("\"lion\""), "{name}: {error}");
            }
        }
    }
}

/// A pattern of a group that names no tensor is refused with names that there are.
#[tokio::test]
async fn groups_of_no_tensor_are_refused() {
    let (_, mut optimizer) = settings().pop().expect("groups");
    optimizer.groups[0].patterns = vec!["mpl".into()];
    let error = Trainer::start(config(&optimizer, &relay())).await.err().expect("no such tensor");
    let error = error.to_string();
    assert!(error.contains("optimizer.groups") && error.contains("\"mpl\""), "{error}");
    assert!(error.contains("c_fc"), "{error}");
}

/// The average is that of the weights after each step, and is exported in their place.
#[tokio::test]
async fn averages_follow_the_weights_and_are_exported() {
    const NAME: &str = "transformer.h.1.mlp.c_fc.weight";
    let folder = tempfile::tempdir().expect("a place for files");
    let place = folder.path().join("checkpoint");
    let optimizer = OptimizerConfig { ema: Some(0.9), ..OptimizerConfig::default() };
    let mut trainer = Trainer::start(config(&optimizer, &relay())).await.expect("a case of ours");
    let mut average: Vec<f32> = Vec::new();
    for step in 0..4 {
        steps(&mut trainer, step, step + 1).await;
        let (_, weights) = trainer.weights(NAME).await.expect("it is there");
        if average.is_empty() {
            average = weights;
        } else {
            let each = average.iter_mut().zip(weights);
            each.for_each(|(average, weight)| *average += (weight - *average) * 0.1_f32);
        }
    }
    trainer.checkpoint(&place).await.expect("a directory of ours");
    let values = |bytes: &[u8], name: &str| -> Vec<f32> {
        let tensors = SafeTensors::deserialize(bytes).expect("a file of ours");
        let data = tensors.tensor(name).expect("it is there").data().to_vec();
        data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("four"))).collect()
    };
    let bytes = bytes_of(&place, "optimizer.safetensors");
    assert_eq!(values(&bytes, &format!("{NAME}.ema")), average);

    let to = folder.path().join("exported");
    let of_average = hf::ExportOptions { average: true, ..Default::default() };
    hf::export(&place, None, &to, of_average.clone()).expect("a checkpoint of ours");
    assert_eq!(values(&bytes_of(&to, "model.safetensors"), NAME), average);
    let all = |path: &Path| bytes_of(path, "model.safetensors").len();
    assert_eq!(all(&to), all(&place));
    // A checkpoint without an average.
    let plain = folder.path().join("plain");
    let mut trainer =
        Trainer::start(config(&OptimizerConfig::default(), &relay())).await.expect("ours");
    steps(&mut trainer, 0, 1).await;
    trainer.checkpoint(&plain).await.expect("a directory of ours");
    let error =
        hf::export(&plain, None, &folder.path().join("none"), of_average).expect_err("none");
    assert!(error.to_string().contains("optimizer.ema"), "{error}");
}
