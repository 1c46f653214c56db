//! `schedule.delay = 1`: PyTorch's losses and weights when each batch reads the weights before the
//! last update; the same bits in every configuration of the ring; resumed and killed runs that are
//! the unbroken one; and refusals. `goldens/delayed.py` makes what is compared with.

use std::fs;
use std::path::Path;

use l2l::config::{
    ChannelsConfig, Dtype, MasterDtype, MuonRateRule, NonFinite, OptimizerKind, RateSchedule,
    ScheduleKind, StashPlace,
};
use l2l::data::{Batches, Dataset};
use l2l::models::IdleExperts;
use l2l::{Config, Plan, Trainer, model_of, shape_of};
use proptest::prelude::*;
use safetensors::SafeTensors;
use serde_json::Value;

use crate::exact::{self, Case, SMALL, Ways, baseline, cases, ways};
use crate::optimizers::{bytes_of, steps};
use crate::pytorch::{case, numbers};
use crate::trained::Trained;
use crate::whole;

/// A run with a delay.
pub(crate) fn delayed(case: &Case, ways: &Ways, after: Option<u64>) -> Config {
    let mut config = exact::config(case, &ways.clone().for_case(case));
    config.schedule.delay = 1;
    config.schedule.delay_after = after;
    config
}

/// The weights of a checkpoint have these sums and norms. Their deviations from f64 are printed
/// beside those of PyTorch's run in f32.
pub(crate) fn check_weights(name: &str, checkpoint: &Path, golden: &Value) {
    let bytes = bytes_of(checkpoint, "model.safetensors");
    let weights = SafeTensors::deserialize(&bytes).expect("a file of ours");
    let expected = golden["float64"]["weights"].as_object().expect("a list by name");
    assert_eq!(weights.len(), expected.len());
    let mut off = [[0.0_f64; 2]; 2]; // of norms and of sums: ours, PyTorch's
    for (tensor, expected) in expected {
        let view = weights.tensor(tensor).expect("a tensor of the model");
        let values = view.data().as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes));
        let values: Vec<f64> = values.map(f64::from).collect();
        let norm = values.iter().map(|value| value * value).sum::<f64>().sqrt();
        let sum: f64 = values.iter().sum();
        let of = |of: &Value| [0, 1].map(|at| of[at].as_f64().expect("a number"));
        let [expected, theirs] = [expected, &golden["float32"]["weights"][tensor]].map(of);
        for (off, found) in off.iter_mut().zip([[sum, norm], theirs]) {
            off[0] = off[0].max((found[1] / expected[1] - 1.0).abs());
            off[1] = off[1].max((found[0] - expected[0]).abs() / expected[1]);
        }
        assert!(off[0][0] < 2e-6, "{name} {tensor}: {norm} {expected:?}");
        assert!(off[0][1] < 2e-5, "{name} {tensor}: {sum} {expected:?}");
    }
    println!("{name}: weights off by {:.1e} in norm, {:.1e} in sum", off[0][0], off[0][1]);
    println!("    PyTorch in f32: {:.1e} in norm, {:.1e} in sum", off[1][0], off[1][1]);
}

/// AdamW, SGD with momentum and Muon, clipped or not, some from a later batch on.
#[tokio::test]
async fn a_delayed_run_is_pytorchs() {
    let golden: Value =
        serde_json::from_str(include_str!("../goldens/delayed.json")).expect("JSON");
    let folder = tempfile::tempdir().expect("a place for files");
    for (nth, expected) in golden["cases"].as_array().expect("a list").iter().enumerate() {
        let (mut config, _) = case("llama");
        config.step.steps = golden["steps"].as_u64();
        let kind = expected["kind"].as_str().expect("a name");
        let kinds = [OptimizerKind::Adamw, OptimizerKind::Sgd, OptimizerKind::Muon];
        config.optimizer.kind = kinds.into_iter().find(|one| one.name() == kind).expect("a rule");
        config.optimizer.momentum = (kind == "sgd").then_some(0.9);
        if kind == "muon" {
            config.optimizer.muon_rate = MuonRateRule::MatchRmsAdamw;
        }
        config.optimizer.clip_norm = expected["clip_norm"].as_f64();
        config.schedule.delay = expected["delay"].as_u64().expect("a number") as u32;
        config.schedule.delay_after =
            expected["delay_after"].as_u64().filter(|_| config.schedule.delay == 1);
        let name = format!("{kind} {:?} {:?}", config.optimizer.clip_norm, config.schedule);
        let losses = numbers(expected, "losses");
        let norms = numbers(expected, "norms");
        let mut batches = Batches::open(&config).expect("it is committed");
        let mut trainer = Trainer::start(config).await.expect("a case of ours");
        for (step, (loss, norm)) in losses.into_iter().zip(norms).enumerate() {
            let batch = batches.next().await.expect("good data");
            let report = trainer.step(batch).await.expect("nothing fails here");
            assert!((report.loss - loss).abs() < 2e-5, "{name} {step}: {} {loss}", report.loss);
            let off = (report.grad_norm / norm - 1.0).abs();
            assert!(off < 1e-4, "{name} {step}: norm {} {norm}", report.grad_norm);
        }
        let place = folder.path().join(nth.to_string());
        trainer.checkpoint(&place).await.expect("a directory of ours");
        check_weights(&name, &place, expected);
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(if whole() { 150 } else { 25 })
    })]

    /// Relay, resident and pipelines, devices, deals, depths, stash, recomputation, threads, tiers:
    /// one digest. All that is trained, in any precision, by any rule.
    #[test]
    fn every_way_gives_the_same_bits(
        case in cases(), ways in ways(), after in prop::option::weighted(0.3, 0..=3_u64),
    ) {
        const STEPS: usize = 4;
        let (expected, reference) = exact::run(delayed(&case, &baseline(), after), STEPS);
        let (bits, summary) = exact::run(delayed(&case, &ways, after), STEPS);
        prop_assert_eq!(bits, expected);
        prop_assert_eq!(&summary.weights_digest, &reference.weights_digest);
    }
}

/// The first batch is the same, and the second reads the first weights again. A delay that begins
/// behind the last batch changes nothing.
#[test]
fn a_delay_begins_where_it_says() {
    let of = |after| exact::run(delayed(&SMALL, &baseline(), after), 4);
    let ways = Ways { kind: ScheduleKind::Relay, ..baseline() };
    let (prompt, whole) = exact::run(exact::config(&SMALL, &ways), 4);
    let (late, summary) = of(Some(4));
    assert_eq!((late, &summary.weights_digest), (prompt.clone(), &whole.weights_digest));
    for begin in 0..3_u64 {
        let (bits, _) = of(Some(begin));
        let same = (begin as usize).max(1);
        assert_eq!(bits[..same], prompt[..same], "{begin}");
        assert_ne!(bits[same], prompt[same], "{begin}");
    }
    assert_eq!(of(None).1.weights_digest, of(Some(0)).1.weights_digest);
}

/// Validations read the newest weights, and change nothing.
#[tokio::test]
async fn evaluation_in_between_changes_nothing() {
    let mut digests = Vec::new();
    for looks in [false, true] {
        let config = delayed(&SMALL, &baseline(), None);
        let (data, _) =
            Dataset::open(&config, &shape_of(&config).expect("ours")).expect("random data");
        let mut trainer = Trainer::start(config.clone()).await.expect("a run of ours");
        let mut batches = Batches::open(&config).expect("random data");
        let mut seen = Vec::new();
        for _ in 0..4 {
            let batch = batches.next().await.expect("random data");
            trainer.step(batch).await.expect("nothing fails here");
            if looks {
                for _ in 0..2 {
                    let found = trainer.evaluate([data.batch([0])]).await.expect("it can");
                    seen.push(found.loss);
                }
            }
        }
        // Each two of the same weights; then an update.
        assert!(seen.chunks(2).all(|pair| pair[0].to_bits() == pair[1].to_bits()));
        assert!(seen.windows(3).step_by(2).all(|all| all[0] != all[2]), "{seen:?}");
        digests.push(trainer.digest().await.expect("nothing fails here"));
    }
    assert_eq!(digests[0], digests[1]);
}

/// From a checkpoint that is written while the next steps run, to other depths and two devices:
/// of each precision, of adapters, clipped, and before the delay begins.
#[tokio::test]
async fn every_resumed_run_is_the_unbroken_one() {
    const STEPS: u64 = 6;
    let bf16 = (Dtype::Bf16, MasterDtype::Split);
    let copied = (Dtype::F16, MasterDtype::Auto);
    let rounded = (Dtype::Bf16, MasterDtype::Bf16);
    let some = [
        (SMALL.clone(), None),
        (SMALL.clone(), Some(4)),
        (Case { clip: true, precision: bf16, rule: OptimizerKind::Muon, ..SMALL.clone() }, None),
        (Case { precision: copied, ..SMALL.clone() }, Some(1)),
        (Case { precision: rounded, ..SMALL.clone() }, None),
        (Case { trained: Trained::ALL[1], precision: bf16, ..SMALL.clone() }, None),
    ];
    for (nth, (case, after)) in some.into_iter().enumerate() {
        let of = |ways: &Ways| {
            let mut config = delayed(&case, ways, after);
            config.step.steps = Some(STEPS);
            config.optimizer.schedule = RateSchedule::Cosine;
            config
        };
        let folder = tempfile::tempdir().expect("a place for files");
        let at = |name: &str| folder.path().join(name);
        let mut whole = Trainer::start(of(&baseline())).await.expect("a run of ours");
        steps(&mut whole, 0, 3).await;
        whole.begin_checkpoint(&at("begun")).await.expect("a directory of ours");
        steps(&mut whole, 3, STEPS).await;
        whole.end_checkpoint().await.expect("a directory of ours");
        whole.checkpoint(&at("whole")).await.expect("a directory of ours");
        let channels = ChannelsConfig { weights: 1, gradients: 1, reduced: 1, stash: 1 };
        let ways = Ways { channels, devices: 2, place: StashPlace::Host, ..baseline() };
        let resumed = Trainer::builder(of(&ways)).resume(at("begun")).start().await;
        let mut resumed = resumed.expect("a checkpoint of ours");
        assert_eq!(resumed.changes(), [""; 0]);
        steps(&mut resumed, 3, STEPS).await;
        resumed.checkpoint(&at("resumed")).await.expect("a directory of ours");
        for file in fs::read_dir(at("whole")).expect("it was written").flatten() {
            let name = file.file_name().into_string().expect("a name of ours");
            if name.ends_with(".safetensors") {
                let [one, other] = ["whole", "resumed"].map(|of| bytes_of(&at(of), &name));
                assert!(one == other, "{nth}: {name}");
            }
        }
        let [older, newest] =
            ["older", "optimizer"].map(|of| at("whole").join(format!("{of}.safetensors")));
        assert!(older.is_file() && newest.is_file());
    }
}

/// A run that turns the delay on has no weights from before, and says so; one that turns it off
/// does not need them.
#[tokio::test]
async fn a_delay_that_is_turned_on_or_off_is_a_change() {
    let folder = tempfile::tempdir().expect("a place for files");
    let place = folder.path().join("checkpoint");
    for (first, second) in [(0, 1), (1, 0)] {
        let of = |delay| {
            let mut config = delayed(&SMALL, &baseline(), None);
            config.schedule.delay = delay;
            config
        };
        let mut trainer = Trainer::start(of(first)).await.expect("a run of ours");
        steps(&mut trainer, 0, 2).await;
        trainer.checkpoint(&place).await.expect("a directory of ours");
        let has_older = place.join("older.safetensors").is_file();
        assert_eq!(has_older, first == 1);
        let refused = Trainer::builder(of(second)).resume(&place).start().await;
        let refused = refused.map(drop).expect_err("another rule").to_string();
        assert!(refused.contains("schedule.delay was"), "{refused}");
        let changed = Trainer::builder(of(second)).resume(&place).with_changes().start().await;
        let mut changed = changed.expect("a change that may be");
        let says = changed.changes().join("; ");
        assert_eq!(says.contains("no older.safetensors"), second == 1, "{says}");
        steps(&mut changed, 2, 4).await;
        fs::remove_dir_all(&place).expect("it is ours");
    }
}

/// A damaged or missing file of the weights before is found, as every other file is.
#[tokio::test]
async fn weights_from_before_are_sealed() {
    let folder = tempfile::tempdir().expect("a place for files");
    let place = folder.path().join("checkpoint");
    let config = delayed(&SMALL, &baseline(), None);
    let mut trainer = Trainer::start(config.clone()).await.expect("a run of ours");
    steps(&mut trainer, 0, 2).await;
    trainer.checkpoint(&place).await.expect("a directory of ours");
    let file = place.join("older.safetensors");
    let mut bytes = fs::read(&file).expect("it was written");
    *bytes.last_mut().expect("it is not empty") ^= 1;
    for damage in [Some(bytes), None] {
        match damage {
            Some(bytes) => fs::write(&file, bytes).expect("it is ours"),
            None => fs::remove_file(&file).expect("it is ours"),
        }
        let refused = Trainer::builder(config.clone()).resume(&place).start().await;
        let refused = refused.map(drop).expect_err("it is damaged").to_string();
        assert!(refused.contains("older.safetensors is "), "{refused}");
    }
}

/// An update leaves an expert alone that no row of its own batch chose, while the next batch runs.
#[test]
fn idle_experts_are_left_alone() {
    let case = Case { layers: 2, batch: 1, experts: Some([16, 1]), dropout: 0.0, ..SMALL.clone() };
    let of = |idle, ways: &Ways| {
        let mut config = delayed(&case, ways, None);
        config.experts.idle = idle;
        exact::run(config, 5).1.weights_digest
    };
    let kind = ScheduleKind::Relay;
    let apart = Ways { kind, bundles: Some(1), place: StashPlace::Host, ..baseline() };
    let expected = of(IdleExperts::Keep, &baseline());
    for ways in [apart.clone(), Ways { devices: 2, ..apart }] {
        assert_eq!(of(IdleExperts::Keep, &ways), expected, "{ways:?}");
    }
    assert_ne!(of(IdleExperts::default(), &baseline()), expected);
}

/// The third batch is the first that reads updated weights. It is reported by its own number, and
/// the update of the second, which is whole, stays.
#[tokio::test]
async fn a_step_that_is_not_finite_is_that_of_its_batch() {
    for non_finite in [NonFinite::Stop, NonFinite::Skip] {
        let mut config = delayed(&SMALL, &baseline(), None);
        config.step.non_finite = non_finite;
        config.optimizer.learning_rate = 1e30;
        let mut batches = Batches::open(&config).expect("random data");
        let mut trainer = Trainer::start(config).await.expect("a case of ours");
        for _ in 0..2 {
            let batch = batches.next().await.expect("random data");
            assert!(!trainer.step(batch).await.expect("it is finite").skipped);
        }
        let before = trainer.digest().await.expect("it is in memory");
        let third = trainer.step(batches.next().await.expect("random data")).await;
        if non_finite == NonFinite::Stop {
            let error = third.expect_err("it is not finite").to_string();
            assert!(error.contains("(the model is whole, as of step 2)"), "{error}");
            continue;
        }
        let report = third.expect("it is skipped");
        assert_eq!((report.step, report.skipped), (3, true));
        assert_eq!(trainer.digest().await.expect("it is in memory"), before);
    }
}

#[test]
fn what_a_delay_cannot_have_is_refused_by_name() {
    let refused = |change: fn(&mut Config), says: &str| {
        let mut config = delayed(&SMALL, &baseline(), None);
        change(&mut config);
        let error = config.check().expect_err(says).to_string();
        assert!(error.contains(says), "{error}");
    };
    refused(|config| config.schedule.delay = 2, "schedule.delay must be 0 or 1");
    let alone = |config: &mut Config| {
        (config.schedule.delay, config.schedule.delay_after) = (0, Some(3));
    };
    refused(alone, "schedule.delay_after is for schedule.delay = 1");
}

/// The trained weights are there once more, and gradients have regions.
#[test]
fn the_plan_counts_the_second_copy() {
    let of = |delay| {
        let mut config = delayed(&SMALL, &baseline(), None);
        config.schedule.delay = delay;
        let model = model_of(&config, shape_of(&config).expect("ours")).expect("ours");
        let plan = Plan::new(&config, &model, &config.update_rule()).expect("a plan of ours");
        let bytes = 4 * model.parameters() as u64;
        (plan.eps_bytes(), bytes)
    };
    let ([masters, states, _], bytes) = of(0);
    let (delayed, _) = of(1);
    assert!(bytes <= masters && masters < bytes + bytes / 20, "{masters} {bytes}");
    assert_eq!(delayed[1], states);
    assert!(delayed[0] - masters >= bytes && delayed[0] == 2 * masters, "{delayed:?}");
    assert!(delayed[2] >= bytes);
}

/// What a delay saves, in words and as data: where it saves something, or where the config has it.
#[cfg(feature = "cli")]
#[test]
fn a_plan_says_what_a_delay_saves() {
    use crate::program::{events, good};
    let settings = [
        "model.layers=4",
        "model.hidden=256",
        "data.train=random",
        "data.sequence_length=32",
        "step.batch=4",
        "step.micro_batch=2",
    ];
    let plan = |more: &[&str], host: &str| {
        let sets = settings.iter().chain(more).flat_map(|set| ["--set", set]);
        let rates = ["--tflops", "0.1", "--link-gbps", "1000", "--host-gbps", host];
        good(&["plan"].into_iter().chain(sets).chain(rates).collect::<Vec<_>>())
    };
    const SAYS: &str = "it changes results and may cost loss (docs/delay.md)";
    let delay = ["schedule.delay=1", "schedule.delay_after=40"];
    for (host, helps) in [("8", true), ("10000", false)] {
        assert_eq!(plan(&[], host).contains(SAYS), helps, "{host}");
        assert!(plan(&delay, host).contains(SAYS), "{host}");
    }
    let json = plan(&[&delay[..], &["log.format=json"]].concat(), "8");
    let event = &events(&json)[0];
    let [without, with] =
        ["without", "with"].map(|of| event["delay"][format!("step_seconds_{of}")].as_f64());
    assert_eq!(with, event["step_seconds"].as_f64());
    assert!(without > with, "{event}");
    let none = plan(&["log.format=json"], "10000");
    assert!(events(&none)[0]["delay"].is_null());
}
