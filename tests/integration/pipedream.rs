//! `schedule.kind = "pipedream"`: PyTorch's losses and weights by the rule of the article; the same
//! bits on any devices; resumed runs that are the unbroken one; and refusals.
//! `goldens/pipedream.py` makes what is compared with.

use std::fs;

use l2l::config::{
    ChannelsConfig, CompressionKind, Dtype, EpsTier, GradientDtype, LossScaleKind, MasterDtype,
    MuonRateRule, NonFinite, ObjectiveKind, OptimizerKind, RateSchedule, Recompute, ScheduleKind,
    StashPlace, Task,
};
use l2l::data::{Batches, Dataset};
use l2l::models::LayerSelection;
use l2l::{Config, Plan, Trainer, model_of, shape_of};
use proptest::prelude::*;
use serde_json::Value;

use crate::delayed::check_weights;
use crate::exact::{self, Case, SMALL, Ways, baseline, ways};
use crate::optimizers::{bytes_of, steps};
use crate::plan::limit;
use crate::pytorch::{case, numbers};
use crate::trained::Trained;
use crate::whole;

const KIND: ScheduleKind = ScheduleKind::Pipedream;

/// A window over so many stages, of an untied Llama; with dropout, of a GPT-2 that classifies.
pub(crate) fn windowed(case: &Case, ways: &Ways, stages: u32, window: u32) -> Config {
    let recompute = true.into();
    let whole = Ways { kind: KIND, chunks: None, recompute, tensor: 1, ..ways.clone() };
    let mut config = exact::config(case, &whole);
    if case.dropout > 0.0 {
        config.model.task = Some(Task::SequenceClassification);
        config.train.label_smoothing = 0.0;
    } else {
        config.model.preset = Some("llama-7b".into());
        config.model.intermediate = Some(40);
        config.model.dropout = None;
        config.train.neftune_alpha = 5.0;
    }
    config.step.micro_batch = config.step.batch;
    (config.schedule.stages, config.schedule.window) = (Some(stages), Some(window));
    config.step.steps = Some(u64::from(3 * window));
    config.optimizer.schedule = RateSchedule::Cosine;
    config.schedule.recompute = ways.recompute;
    limit(&mut config, ways.room);
    config
}

/// The rule of a golden, without clipping.
pub(crate) fn set_rule(config: &mut Config, name: &str) {
    let kinds = [OptimizerKind::Adamw, OptimizerKind::Sgd, OptimizerKind::Muon];
    let kind = kinds.into_iter().find(|one| one.name() == name).expect("a rule");
    config.optimizer.kind = kind;
    config.optimizer.momentum = (kind == OptimizerKind::Sgd).then_some(0.9);
    if kind == OptimizerKind::Muon {
        config.optimizer.muon_rate = MuonRateRule::MatchRmsAdamw;
    }
    config.optimizer.clip_norm = None;
}

/// AdamW, SGD with momentum and Muon, over one to five stages.
#[tokio::test]
async fn a_window_is_pytorchs() {
    let golden: Value =
        serde_json::from_str(include_str!("../goldens/pipedream.json")).expect("JSON");
    let folder = tempfile::tempdir().expect("a place for files");
    for (nth, expected) in golden["cases"].as_array().expect("a list").iter().enumerate() {
        let (mut config, _) = case("llama");
        config.step.micro_batch = config.step.batch;
        config.step.steps = golden["steps"].as_u64();
        let kind = expected["kind"].as_str().expect("a name");
        set_rule(&mut config, kind);
        config.schedule.kind = KIND;
        config.schedule.stages = expected["stages"].as_u64().map(|stages| stages as u32);
        config.schedule.window = expected["window"].as_u64().map(|window| window as u32);
        config.device.count = Some(1 + nth as u32 % 3);
        let name = format!("{kind} {:?}", config.schedule);
        let losses = numbers(expected, "losses");
        let norms = numbers(expected, "norms");
        let window = u64::from(config.window());
        let mut batches = Batches::open(&config).expect("it is committed");
        let mut trainer = Trainer::start(config).await.expect("a case of ours");
        for (nth, (loss, norm)) in (1..).zip(losses.into_iter().zip(norms)) {
            let batch = batches.next().await.expect("good data");
            let report = trainer.step(batch).await.expect("nothing fails here");
            assert_eq!(report.step, nth * window);
            assert!((report.loss - loss).abs() < 2e-5, "{name} {nth}: {} {loss}", report.loss);
            let off = (report.grad_norm / norm - 1.0).abs();
            assert!(off < 1e-4, "{name} {nth}: norm {} {norm}", report.grad_norm);
        }
        let place = folder.path().join(nth.to_string());
        trainer.checkpoint(&place).await.expect("a directory of ours");
        check_weights(&name, &place, expected);
    }
}

pub(crate) fn precisions() -> impl Strategy<Value = (Dtype, MasterDtype)> {
    prop::sample::select(vec![
        (Dtype::F32, MasterDtype::Auto),
        (Dtype::Bf16, MasterDtype::Split),
        (Dtype::Bf16, MasterDtype::Bf16),
    ])
}

fn windows() -> impl Strategy<Value = (Case, u32, u32)> {
    let rules = prop::sample::select(OptimizerKind::ALL.to_vec());
    (1..=3_usize, prop::bool::ANY, rules, precisions(), 1..=4_u32, 1..=5_u32).prop_map(
        |(batch, drops, rule, precision, stages, window)| {
            let dropout = if drops { 0.1 } else { 0.0 };
            let case = Case { layers: 3, batch, dropout, rule, precision, ..SMALL.clone() };
            (case, stages, window)
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(if whole() { 60 } else { 12 })
    })]

    /// Devices, depths, stash, recomputation, threads: one digest. In any precision, by any rule.
    #[test]
    fn every_way_gives_the_same_bits((case, stages, window) in windows(), ways in ways()) {
        let channels = ChannelsConfig { weights: 1, ..baseline().channels };
        let one = Ways { channels, ..baseline() };
        let (expected, reference) = exact::run(windowed(&case, &one, stages, window), 2);
        let ways = Ways { on_file: false, sharded: false, deal: baseline().deal, ..ways };
        let ways = Ways { devices: ways.devices.min(stages), ..ways };
        let (bits, summary) = exact::run(windowed(&case, &ways, stages, window), 2);
        prop_assert_eq!(bits, expected);
        prop_assert_eq!(&summary.weights_digest, &reference.weights_digest);
    }
}

/// Four stages on one to four devices; and they are not three stages.
#[test]
fn bits_depend_on_stages_and_not_on_devices() {
    let case = Case { dropout: 0.0, ..SMALL.clone() };
    let of = |stages, window, devices| {
        let ways = Ways { devices, place: StashPlace::Host, ..baseline() };
        exact::run(windowed(&case, &ways, stages, window), 2).1.weights_digest
    };
    let expected = of(4, 6, 1);
    (2..=4).for_each(|devices| assert_eq!(of(4, 6, devices), expected, "{devices} devices"));
    assert_ne!(of(3, 6, 1), expected);
    assert_ne!(of(4, 4, 1), expected);
}

/// One stage has no delay: a window is as many steps, one behind the other.
#[test]
fn one_stage_is_no_delay() {
    let case = Case { dropout: 0.0, ..SMALL.clone() };
    let one = windowed(&case, &baseline(), 1, 4);
    let mut steps = one.clone();
    steps.schedule.kind = ScheduleKind::Relay;
    (steps.schedule.stages, steps.schedule.window) = (None, None);
    let digest = |config, steps| exact::run(config, steps).1.weights_digest;
    assert_eq!(digest(one, 3), digest(steps, 12));
    // Nor has a window of one batch.
    let short = windowed(&case, &baseline(), 4, 1);
    let mut steps = short.clone();
    steps.schedule.kind = ScheduleKind::Resident;
    (steps.schedule.stages, steps.schedule.window) = (None, None);
    assert_eq!(digest(short, 3), digest(steps, 3));
}

/// What is frozen is carried through all versions of a window: adapters over a frozen base.
#[test]
fn adapters_and_frozen_layers_have_windows() {
    for (trained, dropout) in [(Trained::Biases, 0.1), (Trained::Adapters, 0.1)] {
        let case = Case { trained, dropout, ..SMALL.clone() };
        let of = |devices| {
            let ways = Ways { devices, place: StashPlace::Host, ..baseline() };
            exact::run(windowed(&case, &ways, 3, 4), 2).1.weights_digest
        };
        assert_eq!(of(1), of(3));
    }
}

/// Validations between windows read the newest weights, and change nothing.
#[tokio::test]
async fn evaluation_in_between_changes_nothing() {
    let case = Case { dropout: 0.0, ..SMALL.clone() };
    let mut digests = Vec::new();
    for looks in [false, true] {
        let config = windowed(&case, &baseline(), 4, 4);
        let (data, _) =
            Dataset::open(&config, &shape_of(&config).expect("ours")).expect("random data");
        let mut batches = Batches::open(&config).expect("random data");
        let mut trainer = Trainer::start(config).await.expect("a run of ours");
        let mut seen = Vec::new();
        for _ in 0..3 {
            let batch = batches.next().await.expect("random data");
            trainer.step(batch).await.expect("nothing fails here");
            for _ in 0..if looks { 2 } else { 0 } {
                seen.push(trainer.evaluate([data.batch([0])]).await.expect("it can").loss);
            }
        }
        assert!(seen.chunks(2).all(|pair| pair[0].to_bits() == pair[1].to_bits()));
        assert!(seen.windows(3).step_by(2).all(|all| all[0] != all[2]), "{seen:?}");
        digests.push(trainer.digest().await.expect("nothing fails here"));
    }
    assert_eq!(digests[0], digests[1]);
}

/// From a checkpoint that is written while the next window runs, to other devices.
#[tokio::test]
async fn every_resumed_run_is_the_unbroken_one() {
    const WINDOW: u32 = 4;
    for dropout in [0.0, 0.1] {
        let case = Case { dropout, ..SMALL.clone() };
        let of = |ways: &Ways| windowed(&case, ways, 4, WINDOW);
        let folder = tempfile::tempdir().expect("a place for files");
        let at = |name: &str| folder.path().join(name);
        let mut whole = Trainer::start(of(&baseline())).await.expect("a run of ours");
        steps(&mut whole, 0, 1).await; // a window
        whole.begin_checkpoint(&at("begun")).await.expect("a directory of ours");
        steps(&mut whole, WINDOW.into(), u64::from(WINDOW) + 2).await; // two more
        whole.end_checkpoint().await.expect("a directory of ours");
        whole.checkpoint(&at("whole")).await.expect("a directory of ours");
        let channels = ChannelsConfig { weights: 1, gradients: 1, reduced: 1, stash: 1 };
        let place = StashPlace::Host;
        let recompute = Recompute::ATTENTION;
        let ways = Ways { channels, devices: 3, place, recompute, ..baseline() };
        let resumed = Trainer::builder(of(&ways)).resume(at("begun")).start().await;
        let mut resumed = resumed.expect("a checkpoint of ours");
        assert_eq!((resumed.progress().step, resumed.changes()), (WINDOW.into(), &[][..]));
        steps(&mut resumed, WINDOW.into(), u64::from(WINDOW) + 2).await;
        resumed.checkpoint(&at("resumed")).await.expect("a directory of ours");
        for file in fs::read_dir(at("whole")).expect("it was written").flatten() {
            let name = file.file_name().into_string().expect("a name of ours");
            if name.ends_with(".safetensors") {
                let [one, other] = ["whole", "resumed"].map(|of| bytes_of(&at(of), &name));
                assert!(one == other, "{name}");
            }
        }
        let mut other = of(&baseline());
        other.schedule.window = Some(2);
        let refused = Trainer::builder(other).resume(at("begun")).start().await;
        let refused = refused.map(drop).expect_err("another rule").to_string();
        assert!(refused.contains("schedule.window was"), "{refused}");
        // No run begins inside a window.
        let mut other = of(&baseline());
        other.schedule.window = Some(3);
        let refused = Trainer::builder(other).resume(at("begun")).with_changes().start().await;
        let refused = refused.map(drop).expect_err("no whole windows").to_string();
        assert!(refused.contains("it is at step 4, and windows of 3 begin at"), "{refused}");
    }
}

#[test]
fn what_a_window_cannot_have_is_refused_by_name() {
    let case = Case { dropout: 0.0, ..SMALL.clone() };
    let refused = |change: fn(&mut Config), says: &str| {
        let mut config = windowed(&case, &baseline(), 4, 4);
        config.check().expect("a window of ours");
        change(&mut config);
        let error = config.check().expect_err(says).to_string();
        assert!(error.contains(says), "{error}");
    };
    refused(|config| config.schedule.stages = None, "schedule.stages is missing");
    refused(|config| config.schedule.window = None, "schedule.window is missing");
    refused(|config| config.schedule.stages = Some(0), "schedule.stages must be from 1 to 255");
    refused(|config| config.schedule.window = Some(0), "schedule.window must be from 1 to 65536");
    refused(|config| config.schedule.kind = ScheduleKind::Gpipe, "schedule.stages is for");
    refused(|config| config.step.steps = Some(10), "step.steps is 10, and a window has 4 batches");
    refused(
        |config| {
            config.checkpoint.directory = Some("runs".into());
            config.checkpoint.every_steps = Some(6);
        },
        "checkpoint.every_steps is 6, and a window has 4 batches",
    );
    refused(|config| config.validation.every_steps = Some(2), "validation.every_steps is 2");
    refused(|config| config.optimizer.clip_norm = Some(1.0), "optimizer.clip_norm needs the norm");
    refused(|config| config.step.non_finite = NonFinite::Skip, "step.non_finite skips");
    refused(|config| config.device.dtype = Dtype::F16, "device.dtype skips");
    refused(|config| config.loss_scale.kind = LossScaleKind::Fixed, "loss_scale.kind skips");
    refused(|config| config.schedule.delay = 1, "schedule.delay is 1, and");
    refused(|config| config.step.micro_batch = 1, "step.micro_batch must be step.batch");
    refused(|config| config.parallel.slices = 2, "parallel.slices must be 1");
    refused(|config| config.eps.tier = EpsTier::File, "eps.tier must be \"memory\"");
    refused(|config| config.compression.kind = CompressionKind::Int8, "compression.kind must be");
    refused(
        |config| config.device.gradient_dtype = GradientDtype::Bf16,
        "device.gradient_dtype must be",
    );
    refused(|config| config.objective.kind = ObjectiveKind::Dpo, "objective.kind must be");
    refused(|config| config.depth.drop = 0.5, "depth must be left out");
}

/// What is known with the model.
#[test]
fn models_that_windows_cannot_have_are_refused() {
    let case = Case { dropout: 0.0, ..SMALL.clone() };
    let refused = |change: fn(&mut Config), says: &str| {
        let mut config = windowed(&case, &baseline(), 4, 4);
        change(&mut config);
        let model = model_of(&config, shape_of(&config).expect("ours")).expect("ours");
        let refused = Plan::new(&config, &model, &config.update_rule());
        let error = refused.map(drop).expect_err(says).to_string();
        assert!(error.contains(says), "{error}");
    };
    refused(|config| config.schedule.stages = Some(7), "schedule.stages is 7, and the model has 6");
    refused(
        |config| (config.model.layers, config.schedule.window) = (Some(70), Some(1 << 16)),
        "make schedule.window smaller",
    );
    let tied = |config: &mut Config| {
        config.model.preset = Some("gpt-small".into());
        config.model.intermediate = None;
    };
    refused(tied, "schedule.kind is \"pipedream\", which cannot have tied embeddings");
    refused(
        |config| {
            config.model.preset = Some("moe-small".into());
            (config.model.intermediate, config.model.experts) = (None, Some(4));
            config.model.experts_per_token = Some(1);
            config.model.expert_intermediate = Some(14);
        },
        "schedule.kind is \"pipedream\", which cannot have experts",
    );
}

/// The least device has the same stages; the largest batch is a micro-batch, too.
#[test]
fn what_fits_is_of_windows() {
    let case = Case { dropout: 0.0, ..SMALL.clone() };
    let mut config = windowed(&case, &baseline(), 4, 4);
    let model = model_of(&config, shape_of(&config).expect("ours")).expect("ours");
    let rule = config.update_rule();
    let plan_of = |config: &Config| Plan::new(config, &model, &rule).expect("a window of ours");
    let least = Plan::least(&config, &model, &rule).expect("a window of ours").device_bytes();
    let plan = plan_of(&config);
    let room = plan.device_bytes() + 1;
    let most = plan.largest_micro_batch(&model, &rule, room).expect("its own batch fits");
    assert!(most >= config.step.batch, "{most}");
    let fits = plan.largest_micro_batch(&model, &rule, room - 2).expect("a smaller one fits");
    assert!(fits <= most, "{fits}");
    let says = |config: &Config, says: &str| {
        let misfits = plan_of(config).misfits(&model, &rule, None);
        let text = misfits.first().expect("it does not fit").to_string();
        assert!(text.contains(says), "{text}");
    };
    config.device.memory = (room - 2).into();
    says(&config, &format!("step.batch and step.micro_batch = {fits} would fit"));
    says(&config, "or make step.batch and step.micro_batch, schedule.stages or channels smaller");
    config.device.memory = (least - 1).into();
    says(&config, &format!("{least} bytes is the least that works with these schedule.stages"));
    let mut relay = config.clone();
    relay.schedule.kind = ScheduleKind::Relay;
    (relay.schedule.stages, relay.schedule.window) = (None, None);
    let of_relay = Plan::least(&relay, &model, &rule).expect("a relay of ours").device_bytes();
    assert!(of_relay < least, "{of_relay} {least}");
}

/// A bench counts windows, with the default number of them; and so does a search for settings.
#[cfg(feature = "cli")]
#[test]
fn a_bench_and_a_search_run_windows() {
    use crate::program::{events, good};
    let folder = tempfile::tempdir().expect("a place for files");
    let at = folder.path().join("run.toml");
    let text = "model = { preset = \"llama-7b\", layers = 2, hidden = 16, heads = 2, kv_heads = 2, \
                intermediate = 24, vocabulary = 31 }\n\
                data = { train = \"random\", sequence_length = 8 }\n\
                step = { batch = 2, micro_batch = 2 }\n\
                schedule = { kind = \"pipedream\", stages = 3, window = 3 }\n";
    fs::write(&at, text).expect("a directory of ours");
    let at = at.display().to_string();
    let found = good(&["bench", &at, "--set", "log.format=json"]);
    let steps: Vec<u64> = events(&found)
        .iter()
        .filter(|event| event["event"] == "step")
        .map(|event| event["step"].as_u64().expect("a number"))
        .collect();
    assert!(steps.len() > 1 && steps.iter().zip(1..).all(|(step, nth)| *step == 3 * nth));
    let tuned = good(&["tune", &at, "--steps", "1", "--rounds", "1"]);
    assert!(tuned.contains("kind = \"pipedream\""), "{tuned}");
}

/// A program has the same layers in all steps, and brings whole windows.
#[tokio::test]
async fn a_program_brings_windows() {
    let case = Case { dropout: 0.0, ..SMALL.clone() };
    let mut config = windowed(&case, &baseline(), 2, 2);
    config.step.steps = None; // 100
    let (data, _) = Dataset::open(&config, &shape_of(&config).expect("ours")).expect("random data");
    let mut trainer = Trainer::start(config.clone()).await.expect("a run of ours");
    let short = trainer.step(data.batch([0, 1, 2, 3, 4]).expect("random data")).await;
    let short = short.expect_err("one batch").to_string();
    assert!(short.contains("a window of 2 batches of step.batch has 10"), "{short}");
    let window = data.batch(0..10).expect("random data");
    let some = trainer.step_with(window.clone(), &LayerSelection::of([0])).await;
    let some = some.expect_err("other layers").to_string();
    assert!(some.contains("has the same layers in all steps"), "{some}");
    assert_eq!(trainer.step(window).await.expect("nothing fails here").step, 2);
    config.schedule.window = Some(3);
    let odd =
        Trainer::start(config.clone()).await.map(drop).expect_err("no whole windows").to_string();
    assert!(odd.contains("step.steps is 100, and a window has 3 batches"), "{odd}");
    config.step.epochs = Some(1.0);
    let odd = Trainer::builder(config).steps(100).start().await.map(drop);
    let odd = odd.expect_err("no whole windows").to_string();
    assert!(odd.contains("step.epochs makes 100 steps"), "{odd}");
    assert!(odd.contains("set step.steps = 99 or 102 in its place"), "{odd}");
}
