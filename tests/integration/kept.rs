//! Experts that no token of a step chose are left alone: the numbers of PyTorch with parameters for
//! each expert (`goldens/kept.py`), the same bits in every schedule, and what is refused.

use std::fs;
use std::path::Path;

use l2l::config::{
    ChannelsConfig, CompressionKind, Dtype, EpsTier, MasterDtype, OptimizerKind, RateSchedule,
    ScheduleKind, StashPlace,
};
use l2l::data::Batches;
use l2l::models::{BalanceOf, IdleExperts};
use l2l::plan::RankShare;
use l2l::{Config, Plan, Trainer, model_of, shape_of};
use safetensors::SafeTensors;
use serde_json::Value;

use crate::balanced::Routers;
use crate::exact::{Case, SMALL, Ways, baseline, config, run};
use crate::optimizers::{bytes_of, steps};
use crate::pytorch;
use crate::trained::Trained;

const EXPERTS: usize = 16;

/// Two layers, each of whose tokens chooses one of 16 experts.
fn case() -> Case {
    Case {
        layers: 2,
        batch: 4,
        dropout: 0.0,
        experts: Some([EXPERTS, 1]),
        routers: Routers::Kept,
        ..SMALL.clone()
    }
}

fn relay() -> Ways {
    let channels = ChannelsConfig { weights: 2, ..baseline().channels };
    Ways { kind: ScheduleKind::Relay, channels, place: StashPlace::Host, ..baseline() }
}

/// The numbers of updates that the optimizer's file of a checkpoint has under these names.
fn updates(checkpoint: &Path, names: impl Iterator<Item = String>) -> Vec<u64> {
    let bytes = bytes_of(checkpoint, "optimizer.safetensors");
    let states = SafeTensors::deserialize(&bytes).expect("a file of ours");
    let counts = names.flat_map(|name| {
        let name = format!("{name}.updates");
        let state = states.tensor(&name).unwrap_or_else(|_| panic!("{name}"));
        let counts = state.data().as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes));
        counts.collect::<Vec<u64>>()
    });
    counts.collect()
}

fn experts(end: &str) -> impl Iterator<Item = String> {
    (0..EXPERTS).map(move |expert| format!("model.layers.0.mlp.experts.{expert}.{end}"))
}

#[tokio::test]
async fn kept_experts_are_pytorchs() {
    let (mut config, _) = pytorch::case("qwen3_moe-idle");
    config.experts.idle = IdleExperts::Keep;
    let path = config.model.path.clone().expect("a case has one").join("kept.json");
    let text = fs::read_to_string(path).expect("it is committed");
    let golden: Value = serde_json::from_str(&text).expect("it is JSON");
    let whole = pytorch::check(config.clone(), &golden).await;
    let mut resident = config.clone();
    resident.schedule.kind = ScheduleKind::Resident;
    resident.schedule.recompute = false.into();
    resident.stash.place = StashPlace::Device;
    assert_eq!(pytorch::check(resident, &golden).await, whole);
    let mut apart = config.clone();
    apart.schedule.bundles = Some(1);
    assert_eq!(pytorch::check(apart, &golden).await, whole);

    let folder = tempfile::tempdir().expect("a place for files");
    let mut batches = Batches::open(&config).expect("it is committed");
    let mut trainer = Trainer::start(config).await.expect("a case of ours");
    for _ in 0..golden["steps"].as_u64().expect("a number") {
        let batch = batches.next().await.expect("good data");
        trainer.step(batch).await.expect("nothing fails here");
    }
    assert_eq!(trainer.digest().await.expect("nothing fails here"), whole);
    for (name, expected) in
        experts("gate_proj.weight").zip(golden["gates"].as_array().into_iter().flatten())
    {
        let (_, found) = trainer.weights(&name).await.expect("it has one");
        let expected = expected.as_array().expect("a row").iter();
        let expected = expected.map(|value| value.as_f64().expect("a number"));
        for (found, expected) in found.iter().zip(expected) {
            assert!((f64::from(*found) - expected).abs() < 1e-5, "{name}: {found} {expected}");
        }
    }
    let place = folder.path().join("checkpoint");
    trainer.checkpoint(&place).await.expect("a directory of ours");
    let expected = golden["updates"].as_array().expect("a list").iter();
    let expected: Vec<u64> = expected.map(|count| count.as_u64().expect("a number")).collect();
    for end in ["gate_proj.weight", "up_proj.weight", "down_proj.weight"] {
        assert_eq!(updates(&place, experts(end)), expected, "{end}");
    }
}

/// The weights of each expert of the first layer under a name, whether files have one tensor for
/// all of them or one for each.
async fn weights(trainer: &mut Trainer, names: &[String]) -> Vec<Vec<f32>> {
    let mut all = Vec::new();
    for name in names {
        let (_, weights) = trainer.weights(name).await.expect("it has one");
        let each = weights.len() * names.len() / EXPERTS;
        all.extend(weights.chunks(each).map(<[f32]>::to_vec));
    }
    all
}

/// Weights, the adapters of frozen weights, and the part of an expert in a tensor of all experts.
#[tokio::test]
async fn idle_experts_alone_are_left_alone() {
    const STEPS: usize = 3;
    let adapters = Case { trained: Trained::Adapters, ..case() };
    let gpt_oss = Case { gpt_oss: true, ..case() };
    let stacked = vec!["model.layers.0.mlp.experts.down_proj".to_string()];
    let precision = (Dtype::Bf16, MasterDtype::Bf16);
    let halves = Case { rule: OptimizerKind::Muon, precision, ..case() };
    for (case, names) in [
        (case(), experts("down_proj.weight").collect::<Vec<_>>()),
        (adapters, experts("down_proj.lora_A.weight").collect()),
        (gpt_oss, stacked),
        (halves, experts("up_proj.weight").collect()),
    ] {
        for idle in [IdleExperts::Update, IdleExperts::Keep] {
            let mut config = config(&case, &relay());
            config.optimizer.groups.clear();
            config.optimizer.weight_decay = 0.5;
            config.experts.idle = idle;
            let mut batches = Batches::open(&config).expect("random data");
            let mut trainer = Trainer::start(config).await.expect("a case of ours");
            let mut before = weights(&mut trainer, &names).await;
            let mut all_idle = 0;
            for step in 0..STEPS {
                let batch = batches.next().await.expect("random data");
                trainer.step(batch).await.expect("nothing fails here");
                let idle_experts = trainer.watch().view(0).routers[0].idle as usize;
                assert!(idle_experts > 0, "{case:?}");
                all_idle += idle_experts;
                let after = weights(&mut trainer, &names).await;
                assert_eq!(after.len(), EXPERTS);
                let same = before.iter().zip(&after).filter(|(a, b)| a == b).count();
                let expected = if idle == IdleExperts::Keep { idle_experts } else { 0 };
                assert_eq!(same, expected, "{case:?}, step {step}");
                before = after;
            }
            if idle == IdleExperts::Keep {
                let folder = tempfile::tempdir().expect("a place for files");
                let place = folder.path().join("checkpoint");
                trainer.checkpoint(&place).await.expect("a directory of ours");
                let counts = updates(&place, names.iter().cloned());
                assert_eq!(counts.len(), EXPERTS);
                assert_eq!(counts.iter().sum::<u64>() as usize, STEPS * EXPERTS - all_idle);
            }
        }
    }
}

/// Backward passes that begin before all forward passes, on one device and on several; groups;
/// eager updates and those that wait for the norm.
#[test]
fn every_schedule_knows_the_idle_experts() {
    for clip in [false, true] {
        for groups in [1, 2] {
            let case = Case { layers: 3, clip, groups, ..case() };
            let (bits, expected) = run(config(&case, &baseline()), 3);
            let updated = Case { routers: Routers::Plain, ..case.clone() };
            let updated = run(config(&updated, &baseline()), 3).1;
            assert_ne!(updated.weights_digest, expected.weights_digest);
            let kinds = [
                (ScheduleKind::Relay, 2, Some(1)),
                (ScheduleKind::Resident, 1, Some(2)),
                (ScheduleKind::Gpipe, 2, None),
                (ScheduleKind::OneForwardOneBackward, 3, None),
                (ScheduleKind::Interleaved, 2, Some(2)),
            ];
            for (kind, devices, bundles) in kinds {
                let on_file = devices == 2;
                let ways = Ways { kind, devices, bundles, on_file, threads: 2, ..relay() };
                let ways = ways.for_case(&case);
                let (found, summary) = run(config(&case, &ways), 3);
                assert_eq!(found, bits, "{case:?} {ways:?}");
                assert_eq!(summary.weights_digest, expected.weights_digest, "{case:?} {ways:?}");
            }
        }
    }
}

/// From a checkpoint to another tier and other depths, under every rule: the counts of updates go
/// on, and so do averages of weights, which idle experts have, too.
#[tokio::test]
async fn every_resumed_run_is_the_unbroken_one() {
    const STEPS: u64 = 4;
    for rule in OptimizerKind::ALL {
        let folder = tempfile::tempdir().expect("a place for files");
        let place = |name: &str| folder.path().join(name);
        let of = |ways: &Ways| {
            let mut config = config(&Case { layers: 1, rule, ..case() }, ways);
            config.step.steps = Some(STEPS);
            config.optimizer.schedule = RateSchedule::Cosine;
            config.optimizer.ema = Some(0.9);
            config
        };
        let first = of(&baseline());
        let mut whole = Trainer::start(first.clone()).await.expect("a case of ours");
        steps(&mut whole, 0, STEPS).await;
        whole.checkpoint(&place("whole")).await.expect("a directory of ours");
        drop(whole);
        let mut broken = Trainer::start(first.clone()).await.expect("a case of ours");
        steps(&mut broken, 0, 2).await;
        broken.checkpoint(&place("broken")).await.expect("a directory of ours");
        drop(broken);

        let mut other = of(&Ways { bundles: Some(2), threads: 2, on_file: true, ..relay() });
        other.eps.path = Some(place("eps"));
        let resumed = Trainer::builder(other.clone()).resume(place("broken")).start().await;
        let mut resumed = resumed.expect("a checkpoint of ours");
        steps(&mut resumed, 2, 3).await;
        resumed.stop().await.expect("nothing fails here");
        let resumed = Trainer::builder(other).resume_file().start().await;
        let mut resumed = resumed.expect("a state of ours");
        steps(&mut resumed, 3, STEPS).await;
        resumed.checkpoint(&place("resumed")).await.expect("a directory of ours");
        drop(resumed);
        for file in ["model.safetensors", "optimizer.safetensors"] {
            let [expected, found] = ["whole", "resumed"].map(|run| bytes_of(&place(run), file));
            assert!(expected == found, "{rule:?}: {file}");
        }
        let names = experts("down_proj.weight");
        let counts = updates(&place("whole"), names);
        assert!(counts.iter().any(|count| (1..STEPS).contains(count)), "{rule:?}: {counts:?}");

        let mut updates_all = first;
        updates_all.experts.idle = IdleExperts::Update;
        for changes in [false, true] {
            let builder = Trainer::builder(updates_all.clone()).resume(place("broken"));
            let builder = if changes { builder.with_changes() } else { builder };
            let refused = builder.start().await.map(drop).expect_err("it has other states");
            let refused = refused.to_string();
            let why = "experts.idle was \"keep\", is \"update\". The states are of that setting";
            assert!(refused.contains(why), "{refused}");
        }
    }
}

#[test]
fn what_is_not_built_is_refused() {
    type Change = fn(&mut Config);
    let refusal = |ranks: u32, change: Change| {
        let mut config = config(&case(), &baseline());
        config.eps.tier = EpsTier::Memory;
        config.parallel.groups = 2;
        change(&mut config);
        let planned = shape_of(&config).and_then(|shape| model_of(&config, shape));
        let share = RankShare { rank: 0, ranks };
        let planned =
            planned.and_then(|model| Plan::of_rank(&config, &model, &config.update_rule(), share));
        planned.map(drop).expect_err("it is refused").to_string()
    };
    let cases: [(u32, Change, &str); 5] = [
        (2, |_| {}, "each of several processes counts its own tokens: start one process"),
        (
            1,
            |config| config.compression.kind = CompressionKind::TopK,
            "an expert without tokens has a compressed gradient",
        ),
        (
            1,
            |config| config.experts.balance_of = Some(BalanceOf::FirstChoice),
            "a step counts first choices alone: set \"each-layer\"",
        ),
        (
            1,
            |config| {
                config.model.experts_per_token = Some(2);
                config.experts.second_at_random = Some(true);
            },
            "does not count the choices that are left: set it to false",
        ),
        (
            1,
            |config| config.model = Config::default().model,
            "experts.idle is set, and the model has no experts: leave it out",
        ),
    ];
    for (ranks, change, says) in cases {
        let refused = refusal(ranks, change);
        assert!(refused.contains("experts.idle") && refused.contains(says), "{refused}");
    }
}
