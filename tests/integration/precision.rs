//! 16-bit training: every family near PyTorch's f64, loss scales that are GradScaler's, steps that
//! change nothing, masters in each format.

use std::path::Path;

use l2l::config::{Dtype, LossScaleKind, MasterDtype, NonFinite};
use l2l::data::{Batch, Batches, Sequence};
use l2l::optimizers::LossScale;
use l2l::plan::Term;
use l2l::{Config, Plan, StepReport, Trainer, shape_of};
use serde_json::Value;

use crate::exact::{self, Case, SMALL, baseline};
use crate::pytorch::{FAMILIES, case, numbers};

/// Losses and norms of every family in 16 bits, with masters in each format, beside those that
/// transformers computes in f64. `goldens/bf16.py` tells how far PyTorch's own bf16 is off.
#[tokio::test]
async fn families_in_16_bits_are_near_pytorch() {
    for (nth, name) in FAMILIES.into_iter().enumerate() {
        let mut offs = Vec::new();
        let all = [
            (Dtype::Bf16, MasterDtype::Split, 6e-2),
            (Dtype::Bf16, MasterDtype::Bf16, 2e-1), // rounded at random ten times
            (Dtype::F16, MasterDtype::F32, 4e-2),
        ];
        // Without `L2L_TESTS=whole`, families take turns with the last two.
        let others = if crate::whole() { &all[1..] } else { &all[1 + nth % 2..][..1] };
        for &(dtype, masters, most) in all[..1].iter().chain(others) {
            let (mut config, golden) = case(name);
            (config.device.dtype, config.optimizer.masters) = (dtype, masters);
            config.loss_scale.initial = 1024.0;
            let losses = numbers(&golden, "losses");
            let norms = numbers(&golden, "norms");
            let mut batches = Batches::open(&config).expect("it is committed");
            let mut trainer = Trainer::start(config).await.expect("a case of ours");
            let mut loss_off = 0.0_f64;
            let mut norm_off = 0.0_f64;
            for (loss, norm) in losses.into_iter().zip(norms) {
                let batch = batches.next().await.expect("good data");
                let report = trainer.step(batch).await.expect("nothing fails here");
                assert!(!report.skipped, "{name} in {dtype}");
                loss_off = loss_off.max((report.loss - loss).abs() / loss.abs().max(1.0));
                norm_off = norm_off.max((report.grad_norm - norm).abs() / norm.max(1.0));
            }
            offs.push(format!("{dtype} {masters:?}: {loss_off:.1e}, {norm_off:.1e}"));
            assert!(loss_off < most && norm_off < 3.0 * most, "{name}: {offs:?}");
        }
        println!("{name}: {}", offs.join("; "));
    }
}

#[test]
fn scales_are_gradscalers() {
    let text = include_str!("../goldens/loss_scale.json");
    let golden: Value = serde_json::from_str(text).expect("it is JSON");
    let interval = golden["growth_interval"].as_u64().expect("a number");
    for case in golden["cases"].as_array().expect("a list") {
        let list = |key: &str| case[key].as_array().expect("a list").clone();
        let number = |key: &str| case[key].as_f64().expect("a number");
        let overflows: Vec<u64> = list("overflows").iter().filter_map(Value::as_u64).collect();
        let mut scale = LossScale {
            scale: number("initial") as f32,
            finite_steps: 0,
            growth: Some((number("growth_factor"), interval)),
            backoff_factor: number("backoff_factor"),
        };
        let mut changes = Vec::new();
        let mut before = None;
        for step in 0..golden["steps"].as_u64().expect("a number") {
            scale.stepped(!overflows.contains(&step));
            if before != Some(scale.scale) {
                changes.push((Some(step), Some(f64::from(scale.scale))));
                before = Some(scale.scale);
            }
        }
        let expected = list("scales");
        let expected = expected.iter().map(|pair| (pair[0].as_u64(), pair[1].as_f64()));
        assert_eq!(changes, expected.collect::<Vec<_>>());
    }
}

fn half() -> Config {
    let mut config = exact::config(&SMALL, &baseline());
    config.device.dtype = Dtype::F16;
    config.step.steps = Some(100);
    config.optimizer.warmup_steps = 7; // the rate tells which update a step is
    config
}

/// A batch in which only so many positions have a label: the fewer, the larger its gradients.
fn batch(labelled: usize) -> Batch {
    let of = |labelled: usize| {
        let tokens = vec![3, 1, 4, 1, 5, 9];
        let label = |at: usize| if (1..=labelled).contains(&at) { 9 } else { -100 };
        Sequence { labels: (0..6).map(label).collect(), ..Sequence::plain(tokens) }
    };
    let first = of(labelled);
    let none = of(0);
    Batch::new(&[first, none.clone(), none.clone(), none.clone(), none])
}

async fn steps(trainer: &mut Trainer, batches: &[Batch]) -> Vec<StepReport> {
    let mut reports = Vec::new();
    for batch in batches {
        reports.push(trainer.step(batch.clone()).await.expect("nothing fails here"));
    }
    reports
}

fn bits(reports: &[StepReport]) -> Vec<(u64, u64, u64)> {
    let of_one = |report: &StepReport| {
        let StepReport { loss, grad_norm, learning_rate, .. } = report;
        (loss.to_bits(), grad_norm.to_bits(), learning_rate.to_bits())
    };
    reports.iter().filter(|report| !report.skipped).map(of_one).collect()
}

/// A scale that is far too high falls until gradients are finite. What is trained then is the run
/// that began with that scale, on the batches since.
#[tokio::test]
async fn a_scale_that_is_too_high_costs_steps_and_nothing_else() {
    let mut config = half();
    config.loss_scale.initial = 2_f64.powi(40);
    let batches = vec![batch(3); 40];
    let mut trainer = Trainer::start(config.clone()).await.expect("a case of ours");
    let begin = trainer.digest().await.expect("it is in memory");
    let reports = steps(&mut trainer, &batches[..2]).await;
    assert!(reports.iter().all(|report| report.skipped && report.loss.is_finite()));
    assert_eq!(trainer.digest().await.expect("it is in memory"), begin);
    let reports = [reports, steps(&mut trainer, &batches[2..]).await].concat();
    let skipped = reports.iter().take_while(|report| report.skipped).count();
    assert!((10..30).contains(&skipped), "{skipped}");
    let all = reports.iter().filter(|report| report.skipped).count();
    assert!(all < skipped + 3, "gradients grow a little while the rate warms up: {all}");
    assert_eq!(trainer.progress().skipped, all as u64);

    config.loss_scale.initial = reports[skipped].loss_scale.expect("there is one");
    let mut other = Trainer::start(config).await.expect("a case of ours");
    let expected = steps(&mut other, &batches[skipped..]).await;
    assert_eq!(bits(&reports), bits(&expected));
    let digests = [trainer.digest().await, other.digest().await];
    let [one, other] = digests.map(|digest| digest.expect("it is in memory"));
    assert_eq!(one, other);
}

/// Batches whose gradients overflow are as if they had not been, with a scale that stays.
#[tokio::test]
async fn outlier_batches_change_nothing() {
    let mut config = half();
    config.loss_scale.kind = LossScaleKind::Fixed;
    config.optimizer.clip_norm = Some(0.5);
    let outlier = batch(1);
    let usual = batch(5);
    // The lowest scale at which the one overflows, and the other does not.
    for exponent in 10..40 {
        config.loss_scale.initial = 2_f64.powi(exponent);
        let mut trainer = Trainer::start(config.clone()).await.expect("a case of ours");
        if steps(&mut trainer, std::slice::from_ref(&outlier)).await[0].skipped {
            break;
        }
    }
    let run = async |batches: &[&Batch]| {
        let batches: Vec<Batch> = batches.iter().map(|&batch| batch.clone()).collect();
        let mut trainer = Trainer::start(config.clone()).await.expect("a case of ours");
        let reports = steps(&mut trainer, &batches).await;
        let skipped: Vec<bool> = reports.iter().map(|report| report.skipped).collect();
        (skipped, bits(&reports), trainer.digest().await.expect("it is in memory"))
    };
    let with = run(&[&usual, &outlier, &usual, &outlier, &outlier, &usual]).await;
    let without = run(&[&usual, &usual, &usual]).await;
    assert_eq!(with.0, [false, true, false, true, true, false]);
    assert_eq!((with.1, with.2), (without.1, without.2));
}

/// A run that resumes has the scale, the count and the bits of one that was not interrupted.
#[tokio::test]
async fn a_resumed_run_has_its_scale() {
    let mut config = half();
    config.loss_scale.initial = 2_f64.powi(34);
    config.loss_scale.growth_interval = 3;
    let folder = tempfile::tempdir().expect("a place for files");
    let place = folder.path().join("checkpoint");
    let batches: Vec<Batch> = (0..30).map(|at| batch(1 + at % 5)).collect();
    let mut unbroken = Trainer::start(config.clone()).await.expect("a case of ours");
    let before = steps(&mut unbroken, &batches[..20]).await;
    assert!(before.iter().any(|report| report.skipped));
    unbroken.checkpoint(&place).await.expect("a directory of ours");
    let progress = unbroken.progress().clone();
    let expected = steps(&mut unbroken, &batches[20..]).await;
    let resumed = Trainer::builder(config).resume(&place).start().await;
    let mut resumed = resumed.expect("a whole checkpoint");
    assert_eq!(*resumed.progress(), progress);
    let found = steps(&mut resumed, &batches[20..]).await;
    let scales = |reports: &[StepReport]| -> Vec<_> {
        reports.iter().map(|report| (report.loss_scale, report.skipped)).collect()
    };
    assert_eq!(scales(&found), scales(&expected));
    assert_eq!(bits(&found), bits(&expected));
    let digests = [unbroken.digest().await, resumed.digest().await];
    let [one, other] = digests.map(|digest| digest.expect("it is in memory"));
    assert_eq!(one, other);
}

/// A run that learns nothing says so: in its summary, and after 100 steps with an error.
#[tokio::test]
async fn a_run_that_skips_all_of_its_steps_says_so() {
    let mut config = half();
    config.loss_scale.kind = LossScaleKind::Fixed;
    config.loss_scale.initial = 1e30;
    config.step.steps = Some(7);
    let fitted = Trainer::fit(config.clone()).run(&mut ()).await.expect("a case of ours");
    assert_eq!((fitted.summary.steps, fitted.summary.skipped), (7, 7));
    config.step.steps = Some(1000);
    let error = Trainer::fit(config).run(&mut ()).await.expect_err("it learns nothing");
    assert_eq!(error.kind(), l2l::ErrorKind::NotFinite);
    assert!(error.to_string().contains("the last 100 steps changed nothing"), "{error}");
}

/// A step whose future was dropped changes the scale all the same.
#[tokio::test]
async fn a_dropped_step_moves_the_scale() {
    let mut config = half();
    config.loss_scale.initial = 2_f64.powi(40);
    let mut trainer = Trainer::start(config).await.expect("a case of ours");
    {
        let mut step = std::pin::pin!(trainer.step(batch(5)));
        let once = |context: &mut std::task::Context<'_>| {
            std::task::Poll::Ready(_ = std::future::Future::poll(step.as_mut(), context))
        };
        std::future::poll_fn(once).await;
    }
    let report = trainer.step(batch(5)).await.expect("nothing fails here");
    assert_eq!((report.step, report.loss_scale), (2, Some(2_f64.powi(39))));
    assert_eq!(trainer.progress().skipped, 2);
}

/// In f32, too: a step whose numbers are not finite ends the run, changes nothing, or goes on.
#[tokio::test]
async fn steps_that_are_not_finite_stop_are_skipped_or_go_on() {
    let run = async |non_finite| {
        let mut config = exact::config(&SMALL, &baseline());
        config.step.non_finite = non_finite;
        config.optimizer.learning_rate = 1e30;
        let mut trainer = Trainer::start(config).await.expect("a case of ours");
        let first = trainer.step(batch(5)).await.expect("it is finite");
        assert!(!first.skipped);
        let digest = trainer.digest().await.expect("it is in memory");
        let second = trainer.step(batch(5)).await;
        let after = trainer.digest().await;
        (digest, second, after)
    };
    let (_, stopped, _) = run(NonFinite::Stop).await;
    let stopped = stopped.expect_err("it is not finite").to_string();
    // The weights are far too large after the first step: the first layer's states overflow.
    let says = "is the first whose hidden states behind it are not finite; its first such \
                operation is linear, of (";
    assert!(stopped.contains(says) && stopped.contains("(the model is whole"), "{stopped}");
    let (before, skipped, after) = run(NonFinite::Skip).await;
    assert!(skipped.expect("it is skipped").skipped);
    assert_eq!(after.expect("it is in memory"), before);
    let (before, went_on, after) = run(NonFinite::Continue).await;
    assert!(!went_on.expect("it goes on").skipped);
    assert_ne!(after.expect("it is in memory"), before);
}

/// Where a layer's experts are visited apart, the error names the visit of the experts that
/// overflowed, and not the one that ended the layer.
#[tokio::test]
async fn the_experts_that_are_not_finite_are_named() {
    let mut config = exact::config(&Case { experts: Some([4, 2]), ..SMALL.clone() }, &baseline());
    // So large that each expert is a bundle.
    config.model.hidden = Some(32);
    config.model.expert_intermediate = Some(8192);
    config.model.layers = Some(1);
    config.schedule.bundles = Some(1);
    config.schedule.recompute = true.into();
    config.train.only = vec!["mlp.experts.1".into()];
    config.optimizer.learning_rate = 1e30;
    let mut trainer = Trainer::start(config).await.expect("a case of ours");
    trainer.step(batch(5)).await.expect("it is finite");
    let stopped = trainer.step(batch(5)).await.expect_err("it is not finite").to_string();
    let says = "is the first whose sums of its experts' outputs are not finite, in its visit with \
                model.layers.0.mlp.experts.1.gate_proj.weight to \
                model.layers.0.mlp.experts.1.down_proj.weight; its first such operation is gate, \
                of (";
    assert!(stopped.contains(says), "{stopped}");
}

/// What masters take on the host, and halves on the device.
#[test]
fn sixteen_bits_take_less_memory() {
    let planned = |dtype, masters| {
        let mut config = exact::config(&SMALL, &baseline());
        config.model.hidden = Some(96);
        (config.device.dtype, config.optimizer.masters) = (dtype, masters);
        let shape = shape_of(&config).expect("a shape of ours");
        let model = l2l::model_of(&config, shape).expect("a model of ours");
        let plan = Plan::new(&config, &model, &config.update_rule()).expect("a plan of ours");
        let parameters: usize = model.blocks.iter().map(|block| block.len()).sum();
        let of = |terms: &[Term], name| {
            terms.iter().find(|term| term.name == name).expect("it is a term").bytes as f64
        };
        let masters = of(&plan.host, "masters") / parameters as f64;
        (masters, of(&plan.device, "weights"), plan.device_bytes())
    };
    let (masters, weights, whole) = planned(Dtype::F32, MasterDtype::Auto);
    assert_eq!(masters, 4.0);
    for (dtype, format, bytes) in [
        (Dtype::Bf16, MasterDtype::Split, 4.0),
        (Dtype::Bf16, MasterDtype::F32, 6.0),
        (Dtype::Bf16, MasterDtype::Bf16, 2.0),
        (Dtype::F16, MasterDtype::Auto, 6.0),
    ] {
        let (masters, halves, all) = planned(dtype, format);
        assert_eq!((masters, 2.0 * halves), (bytes, weights), "{dtype} {format:?}");
        assert!(all < whole, "{dtype} {format:?}: {all} of {whole}");
    }
}

/// Checkpoints of 16-bit runs are read by runs of other formats, with the changes said.
#[tokio::test]
async fn a_checkpoint_serves_every_format() {
    let folder = tempfile::tempdir().expect("a place for files");
    let place: &Path = &folder.path().join("checkpoint");
    let mut config = half();
    config.optimizer.warmup_steps = 0;
    let mut trainer = Trainer::start(config.clone()).await.expect("a case of ours");
    steps(&mut trainer, &[batch(5), batch(4)]).await;
    trainer.checkpoint(place).await.expect("a directory of ours");
    let expected = trainer.digest().await.expect("it is in memory");
    for dtype in [Dtype::F32, Dtype::Bf16] {
        config.device.dtype = dtype;
        let refused = Trainer::builder(config.clone()).resume(place).start().await.map(drop);
        assert!(refused.expect_err("it differs").to_string().contains("device.dtype"));
        let builder = Trainer::builder(config.clone()).resume(place).with_changes();
        let mut resumed = builder.start().await.expect("a whole checkpoint");
        assert_eq!(resumed.digest().await.expect("it is in memory"), expected);
        steps(&mut resumed, &[batch(3)]).await;
    }
}
