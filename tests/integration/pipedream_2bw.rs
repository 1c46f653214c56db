//! `schedule.kind = "2bw"`: PyTorch's losses and weights by the rule of the article; the bits of
//! every other schedule with a delay, on any devices; resumed runs that are the unbroken one; and
//! refusals. `goldens/delayed.py` has the same rule, so its cases are compared with.

use std::fs;

use l2l::config::{
    ChannelsConfig, CompressionKind, EpsTier, NonFinite, OptimizerKind, ScheduleKind, StashPlace,
};
use l2l::data::{Batches, Dataset};
use l2l::{Config, Plan, Trainer, model_of, shape_of};
use proptest::prelude::*;
use serde_json::Value;

use crate::delayed::check_weights;
use crate::exact::{self, Case, SMALL, Ways, baseline, ways};
use crate::optimizers::{bytes_of, steps};
use crate::pipedream;
use crate::plan::limit;
use crate::pytorch::{case, numbers};
use crate::trained::Trained;
use crate::whole;

/// A window over so many stages, of batches of several micro-batches.
fn windowed(case: &Case, ways: &Ways, stages: u32, window: u32) -> Config {
    let mut config = pipedream::windowed(case, ways, stages, window);
    config.schedule.kind = ScheduleKind::DoubleBuffered;
    config.schedule.delay = 1;
    config.step.micro_batch = case.micro_batch;
    limit(&mut config, ways.room);
    config
}

/// The same steps, with the same delay, in another order.
fn in_steps(case: &Case, ways: &Ways, stages: u32, window: u32) -> Config {
    let mut config = windowed(case, ways, stages, window);
    (config.schedule.stages, config.schedule.window) = (None, None);
    config.schedule.kind = ways.kind;
    config
}

/// A case whose batches are of whole micro-batches.
fn small() -> Case {
    Case { batch: 6, dropout: 0.0, ..SMALL.clone() }
}

fn digest(config: Config, steps: usize) -> String {
    exact::run(config, steps).1.weights_digest
}

/// AdamW, SGD with momentum and Muon, over one to five stages and in windows of several lengths.
/// The golden is of steps: a window has the mean of their losses, and of their squared norms.
#[tokio::test]
async fn a_window_is_pytorchs() {
    let golden: Value =
        serde_json::from_str(include_str!("../goldens/delayed.json")).expect("JSON");
    let folder = tempfile::tempdir().expect("a place for files");
    let all = golden["cases"].as_array().expect("a list").iter();
    let of_rule = all
        .filter(|one| one["clip_norm"].is_null() && one["delay"] == 1 && one["delay_after"] == 0);
    let mut met = 0;
    for expected in of_rule {
        for (stages, window) in [(1, 5), (3, 4), (5, 20), (4, 2)] {
            let (mut config, _) = case("llama");
            config.step.micro_batch = 1; // of five sequences
            config.step.steps = golden["steps"].as_u64();
            let kind = expected["kind"].as_str().expect("a name");
            pipedream::set_rule(&mut config, kind);
            config.schedule.kind = ScheduleKind::DoubleBuffered;
            config.schedule.delay = 1;
            (config.schedule.stages, config.schedule.window) = (Some(stages), Some(window));
            config.device.count = Some(1 + met % 3);
            let name = format!("{kind} {:?}", config.schedule);
            let losses = numbers(expected, "losses");
            let norms = numbers(expected, "norms");
            let mut batches = Batches::open(&config).expect("it is committed");
            let mut trainer = Trainer::start(config).await.expect("a case of ours");
            let each = window as usize;
            for (losses, norms) in losses.chunks(each).zip(norms.chunks(each)) {
                let mean = |numbers: &[f64]| numbers.iter().sum::<f64>() / each as f64;
                let loss = mean(losses);
                let squares: Vec<f64> = norms.iter().map(|norm| norm * norm).collect();
                let norm = mean(&squares).sqrt();
                let batch = batches.next().await.expect("good data");
                let report = trainer.step(batch).await.expect("nothing fails here");
                let step = report.step;
                assert!((report.loss - loss).abs() < 2e-5, "{name} {step}: {} {loss}", report.loss);
                let off = (report.grad_norm / norm - 1.0).abs();
                assert!(off < 1e-4, "{name} {step}: norm {} {norm}", report.grad_norm);
            }
            let place = folder.path().join(met.to_string());
            trainer.checkpoint(&place).await.expect("a directory of ours");
            check_weights(&name, &place, expected);
            met += 1;
        }
    }
    assert_eq!(met, 3 * 4);
}

fn windows() -> impl Strategy<Value = (Case, u32, u32)> {
    let rules = prop::sample::select(OptimizerKind::ALL.to_vec());
    let sizes = (1..=2_usize, 0..=2_usize, 1..=4_u32, 1..=4_u32);
    (sizes, prop::bool::ANY, rules, pipedream::precisions()).prop_map(
        |(sizes, drops, rule, precision)| {
            let (micro_batch, more, stages, window) = sizes;
            let batch = micro_batch * (1.max(stages as usize - 1) + more);
            let dropout = if drops { 0.1 } else { 0.0 };
            let small = SMALL.clone();
            let case = Case { layers: 3, batch, micro_batch, dropout, rule, precision, ..small };
            (case, stages, window)
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(if whole() { 60 } else { 12 })
    })]

    /// Stages, windows, devices, depths, stash, recomputation, threads: one digest, that of a relay
    /// with a delay. In any precision, by any rule.
    #[test]
    fn every_way_gives_the_bits_of_a_delay((case, stages, window) in windows(), ways in ways()) {
        let relay = Ways { kind: ScheduleKind::Relay, ..baseline() };
        let expected = digest(in_steps(&case, &relay, stages, window), 2 * window as usize);
        let ways = Ways { on_file: false, sharded: false, deal: baseline().deal, ..ways };
        let ways = Ways { devices: ways.devices.min(stages), ..ways };
        let config = windowed(&case, &ways, stages, window);
        let (bits, summary) = exact::run(config.clone(), 2);
        prop_assert_eq!(&summary.weights_digest, &expected);
        exact::check_links(&config, 2, &summary.links);
        // And so are losses and norms, of windows that are the same.
        let whole = windowed(&case, &baseline(), 1, window);
        prop_assert_eq!(bits, exact::run(whole, 2).0);
    }
}

/// Pipelines whose steps end empty compute the same.
#[test]
fn windows_are_1f1b_with_a_delay() {
    let case = small();
    let kind = ScheduleKind::OneForwardOneBackward;
    // Learning rates follow from the steps of the run.
    let digest = |mut config: Config, steps| {
        config.step.steps = Some(24);
        digest(config, steps)
    };
    let of = |devices| digest(in_steps(&case, &Ways { kind, devices, ..baseline() }, 4, 6), 12);
    let expected = of(4);
    assert_eq!(of(1), expected);
    for (stages, window, devices) in [(4, 6, 1), (4, 6, 2), (4, 6, 4), (4, 3, 4), (2, 12, 2)] {
        let ways = Ways { devices, place: StashPlace::Host, ..baseline() };
        let config = windowed(&case, &ways, stages, window);
        assert_eq!(digest(config, 12 / window as usize), expected, "{stages} {window} {devices}");
    }
    // And PipeDream computes something else.
    let pipedream = pipedream::windowed(&case, &baseline(), 4, 6);
    assert_ne!(digest(pipedream, 2), expected);
}

/// What is frozen is carried through all versions of a window: adapters over a frozen base.
#[test]
fn adapters_and_frozen_layers_have_windows() {
    for (trained, dropout) in [(Trained::Biases, 0.1), (Trained::Adapters, 0.1)] {
        let case = Case { trained, dropout, ..small() };
        let of = |devices| {
            let ways = Ways { devices, place: StashPlace::Host, ..baseline() };
            digest(windowed(&case, &ways, 3, 4), 2)
        };
        let relay = Ways { kind: ScheduleKind::Relay, ..baseline() };
        let expected = digest(in_steps(&case, &relay, 3, 4), 8);
        assert_eq!([of(1), of(3)], [expected.clone(), expected]);
    }
}

/// Validations between windows read the newest weights, and change nothing.
#[tokio::test]
async fn evaluation_in_between_changes_nothing() {
    let mut digests = Vec::new();
    for looks in [false, true] {
        let config = windowed(&small(), &baseline(), 4, 3);
        let (data, _) =
            Dataset::open(&config, &shape_of(&config).expect("ours")).expect("random data");
        let mut batches = Batches::open(&config).expect("random data");
        let mut trainer = Trainer::start(config).await.expect("a run of ours");
        for _ in 0..3 {
            let batch = batches.next().await.expect("random data");
            trainer.step(batch).await.expect("nothing fails here");
            for _ in 0..if looks { 2 } else { 0 } {
                trainer.evaluate([data.batch([0])]).await.expect("it can");
            }
        }
        digests.push(trainer.digest().await.expect("nothing fails here"));
    }
    assert_eq!(digests[0], digests[1]);
}

/// From a checkpoint that is written while the next window runs, to other devices; to other
/// windows; and to steps of 1F1B, and back. None of these is a change of the run.
#[tokio::test]
async fn every_resumed_run_is_the_unbroken_one() {
    let case = small();
    let folder = tempfile::tempdir().expect("a place for files");
    let at = |name: &str| folder.path().join(name);
    let of = |ways: &Ways, stages, window| {
        let mut config = windowed(&case, ways, stages, window);
        config.step.steps = Some(12);
        config
    };
    let mut whole = Trainer::start(of(&baseline(), 4, 4)).await.expect("a run of ours");
    steps(&mut whole, 0, 1).await; // a window
    whole.begin_checkpoint(&at("begun")).await.expect("a directory of ours");
    steps(&mut whole, 4, 6).await; // two more
    whole.end_checkpoint().await.expect("a directory of ours");
    whole.checkpoint(&at("whole")).await.expect("a directory of ours");
    let channels = ChannelsConfig { weights: 1, gradients: 1, reduced: 1, stash: 1 };
    let ways = Ways { channels, devices: 3, place: StashPlace::Host, ..baseline() };
    let mut flushed = of(&ways, 4, 4);
    flushed.schedule.kind = ScheduleKind::OneForwardOneBackward;
    (flushed.schedule.stages, flushed.schedule.window) = (None, None);
    let runs = [(of(&ways, 4, 4), 2), (of(&ways, 3, 2), 4), (flushed, 8)];
    for (nth, (config, count)) in runs.into_iter().enumerate() {
        let place = at(&nth.to_string());
        let resumed = Trainer::builder(config.clone()).resume(at("begun")).start().await;
        let mut resumed = resumed.expect("a checkpoint of ours");
        assert_eq!((resumed.progress().step, resumed.changes()), (4, &[][..]));
        if nth == 2 {
            // Half of it in steps, and back to windows.
            steps(&mut resumed, 4, 8).await;
            resumed.checkpoint(&place).await.expect("a directory of ours");
            drop(resumed.stop().await.expect("nothing fails here"));
            let back = Trainer::builder(of(&ways, 4, 4)).resume(&place).start().await;
            resumed = back.expect("a checkpoint of ours");
            assert_eq!((resumed.progress().step, resumed.changes()), (8, &[][..]));
            steps(&mut resumed, 8, 9).await;
        } else {
            steps(&mut resumed, 4, 4 + count).await;
        }
        resumed.checkpoint(&place).await.expect("a directory of ours");
        for file in ["model", "optimizer", "older"].map(|name| format!("{name}.safetensors")) {
            let [one, other] = [at("whole"), place.clone()].map(|of| bytes_of(&of, &file));
            assert!(one == other, "{nth}: {file}");
        }
    }
    assert!(fs::exists(at("whole").join("older.safetensors")).expect("a folder of ours"));
}

#[test]
fn what_a_window_cannot_have_is_refused_by_name() {
    let refused = |change: fn(&mut Config), says: &str| {
        let mut config = windowed(&small(), &baseline(), 4, 4);
        config.check().expect("a window of ours");
        change(&mut config);
        let error = config.check().expect_err(says).to_string();
        assert!(error.contains(says), "{error}");
    };
    refused(|config| config.schedule.stages = None, "stages is missing: schedule.kind = \"2bw\"");
    refused(|config| config.schedule.window = None, "schedule.window is missing");
    refused(|config| config.schedule.delay = 0, "schedule.delay must be 1, with");
    refused(|config| config.schedule.delay_after = Some(4), "schedule.delay_after must be left");
    refused(|config| config.step.micro_batch = 4, "step.micro_batch must divide step.batch");
    refused(
        |config| config.step.micro_batch = 3,
        "step.micro_batch is 3, so a batch has 2 micro-batches. 3 or more must follow each other",
    );
    refused(
        |config| config.step.micro_batch = 3,
        "make it or schedule.stages smaller, or step.batch larger",
    );
    refused(|config| config.step.steps = Some(10), "step.steps is 10, and a window has 4 batches");
    refused(|config| config.validation.every_steps = Some(2), "validation.every_steps is 2");
    let clips = "gone backward, and with schedule.kind = \"2bw\" updates come before: leave it out";
    refused(|config| config.optimizer.clip_norm = Some(1.0), clips);
    refused(|config| config.step.non_finite = NonFinite::Skip, "with schedule.kind = \"2bw\"");
    refused(|config| config.parallel.groups = 3, "groups must be 1: each batch is a group, with");
    refused(|config| config.eps.tier = EpsTier::File, "memory\", with schedule.kind = \"2bw\"");
    refused(|config| config.compression.kind = CompressionKind::Int8, "compression.kind must be");
}

/// What is known with the model, and by a program.
#[tokio::test]
async fn models_and_programs_that_windows_cannot_have_are_refused() {
    let plan = |config: &Config| {
        let model = model_of(config, shape_of(config).expect("ours")).expect("ours");
        Plan::new(config, &model, &config.update_rule()).map(drop)
    };
    let mut config = windowed(&small(), &baseline(), 4, 4);
    plan(&config).expect("a window of ours");
    config.model.preset = Some("gpt-small".into());
    config.model.intermediate = None;
    let tied = plan(&config).expect_err("its head is the embedding").to_string();
    assert!(tied.contains("is \"2bw\", which cannot have tied embeddings that train"), "{tied}");
    let config = windowed(&small(), &baseline(), 2, 2);
    let (data, _) = Dataset::open(&config, &shape_of(&config).expect("ours")).expect("random data");
    let mut trainer = Trainer::start(config).await.expect("a run of ours");
    let window = data.batch(0..12).expect("random data");
    let layers = l2l::models::LayerSelection::of([0]);
    let some = trainer.step_with(window, &layers).await.expect_err("other layers").to_string();
    assert!(some.contains("schedule.kind = \"2bw\" has the same layers in all steps"), "{some}");
}

/// Weight slots are as many as the config says; the host has two versions of each block.
#[test]
fn a_window_takes_memory_of_the_host() {
    let case = small();
    let channels = ChannelsConfig { weights: 1, ..baseline().channels };
    let ways = Ways { channels, recompute: true.into(), ..baseline() };
    let plan = |config: &Config| {
        let model = model_of(config, shape_of(config).expect("ours")).expect("ours");
        Plan::new(config, &model, &config.update_rule()).expect("a plan of ours")
    };
    let weights = |config: &Config| {
        let plan = plan(config);
        let term = plan.device.iter().find(|term| term.name == "weights").map(|term| term.bytes);
        term.expect("a device has weights")
    };
    let double = windowed(&case, &ways, 4, 4);
    let pipedream = pipedream::windowed(&case, &ways, 4, 4);
    assert!(weights(&double) < weights(&pipedream));
    let room = plan(&double).device_bytes();
    let model = model_of(&double, shape_of(&double).expect("ours")).expect("ours");
    let most = plan(&double).largest_micro_batch(&model, &double.update_rule(), room);
    assert!(most.is_some_and(|most| most >= case.micro_batch), "{most:?}");
}

/// What a plan that does not fit advises is a config that is accepted, and fits.
#[test]
fn a_plan_advises_what_fits() {
    let case = Case { batch: 16, micro_batch: 4, ..small() };
    let ways = Ways { recompute: true.into(), ..baseline() };
    for stages in [1, 2, 4] {
        let config = windowed(&case, &ways, stages, 4);
        let model = model_of(&config, shape_of(&config).expect("ours")).expect("ours");
        let rule = config.update_rule();
        let plan_of = |config: &Config| Plan::new(config, &model, &rule).expect("a window of ours");
        let says = |memory: u64, says: &str| {
            let mut config = config.clone();
            config.device.memory = memory.into();
            let misfits = plan_of(&config).misfits(&model, &rule, None);
            let text = misfits.first().expect("it does not fit").to_string();
            assert!(text.contains(says), "{says}: {text}");
        };
        let with = |micro_batch: usize| {
            let mut config = config.clone();
            config.step.micro_batch = micro_batch;
            config.check().is_ok().then(|| plan_of(&config).device_bytes())
        };
        let parts = [1, 2, 4, 8, 16].map(|part| Some((part, with(part)?)));
        let parts: Vec<(usize, u64)> = parts.into_iter().flatten().collect();
        assert_eq!(parts.last().map(|part| part.0), Some([16, 16, 4][stages as usize / 2]));
        for &(part, bytes) in &parts {
            let most = plan_of(&config).largest_micro_batch(&model, &rule, bytes);
            let fit = parts.iter().filter(|fit| fit.1 <= bytes).map(|fit| fit.0);
            assert_eq!(most, fit.max(), "{part} of {stages} stages");
        }
        let (part, bytes) = parts[1];
        says(bytes, &format!(": step.micro_batch = {part} would fit; or give it "));

        let least = Plan::least(&config, &model, &rule).expect("a window of ours").device_bytes();
        let few = if stages == 4 { 3 } else { 1 };
        let mut advised = config.clone();
        (advised.step.batch, advised.step.micro_batch) = (few, 1);
        advised.channels = ChannelsConfig { weights: 1, gradients: 1, reduced: 1, stash: 1 };
        advised.stash.place = StashPlace::Host;
        advised.check().expect("it is advised");
        assert_eq!(plan_of(&advised).device_bytes(), least);
        let advice = format!(": step.batch = {few}, step.micro_batch and all channels of 1, with ");
        says(least, &advice);
        says(least - 1, &format!("{least} bytes is the least that works with these schedule."));
    }
}

/// Other pipelines have the results of a relay, so the least device is one of a relay.
#[test]
fn the_least_of_other_pipelines_is_a_relay() {
    let case = Case { batch: 16, micro_batch: 4, ..small() };
    let kind = ScheduleKind::OneForwardOneBackward;
    let ways = Ways { kind, recompute: true.into(), ..baseline() };
    let mut config = in_steps(&case, &ways, 4, 4);
    let model = model_of(&config, shape_of(&config).expect("ours")).expect("ours");
    let rule = config.update_rule();
    let plan_of = |config: &Config| Plan::new(config, &model, &rule).expect("a plan of ours");
    let least = Plan::least(&config, &model, &rule).expect("a relay of ours").device_bytes();
    config.device.memory = least.into();
    let text = plan_of(&config).misfits(&model, &rule, None)[0].to_string();
    let advice = ": step.micro_batch and all channels of 1, with schedule.kind = \"relay\", \
                  recomputing and the stash on the host, would fit";
    assert!(text.contains(advice), "{text}");
    config.step.micro_batch = 1;
    config.channels = ChannelsConfig { weights: 1, gradients: 1, reduced: 1, stash: 1 };
    config.stash.place = StashPlace::Host;
    assert!(plan_of(&config).device_bytes() > least, "the pipeline takes more");
    config.schedule.kind = ScheduleKind::Relay;
    config.check().expect("it is advised");
    assert!(plan_of(&config).device_bytes() <= least);
}

/// A bench and a search run windows; a plan says the seconds that they save.
#[cfg(feature = "cli")]
#[test]
fn the_program_runs_windows() {
    use crate::program::{events, good};
    let folder = tempfile::tempdir().expect("a place for files");
    let at = folder.path().join("run.toml");
    let text = "model = { preset = \"llama-7b\", layers = 2, hidden = 16, heads = 2, kv_heads = 2, \
                intermediate = 24, vocabulary = 31 }\n\
                data = { train = \"random\", sequence_length = 8 }\n\
                device = { count = 3 }\n\
                step = { batch = 6, micro_batch = 2 }\n\
                schedule = { kind = \"2bw\", stages = 3, window = 3, delay = 1 }\n";
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
    assert!(tuned.contains("kind = \"2bw\""), "{tuned}");
    let rates = ["--tflops", "0.00001", "--link-gbps", "1000", "--host-gbps", "1000"];
    let planned = good(&[&["plan", &at], &rates[..]].concat());
    let says = "s with \"1f1b\" and no delay; it changes results and may cost loss";
    let line = planned.lines().find(|line| line.contains(says));
    let line = line.unwrap_or_else(|| panic!("{planned}"));
    let words: Vec<&str> = line.split(' ').collect();
    let seconds: Vec<f64> = words.iter().filter_map(|word| word.parse().ok()).collect();
    assert!(planned.contains("bytes, with step.batch = 2, and a micro-batch and channels of 1"));
    assert!(line.contains("schedule.kind = \"2bw\": ") && seconds[0] < seconds[1], "{line}");
}
