//! Losses that balance experts, and limits of their choice: the numbers of transformers and of the
//! papers (`goldens/balance.py`), and what is refused.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use l2l::config::{ExpertsConfig, ScheduleKind};
use l2l::data::Batches;
use l2l::inference::{Generator, Room, Sampling, Then};
use l2l::models::{BalanceOf, BalanceOver, IdleExperts};
use l2l::telemetry::samples;
use l2l::{Config, Plan, StepReport, Trainer, model_of, shape_of};
use serde_json::Value;

use crate::exact::{Case, SMALL, Ways, baseline, config, run};
use crate::pytorch::case;

/// Losses and limits of the routers of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Routers {
    Plain,
    OfMicroBatches,
    OfSequences,
    OfStep,
    /// Of the step, with capacities and random second choices.
    Limited,
    /// No losses and limits; idle experts are left alone.
    Kept,
}

impl Routers {
    pub(crate) const ALL: [Routers; 6] = [
        Routers::Plain,
        Routers::OfMicroBatches,
        Routers::OfSequences,
        Routers::OfStep,
        Routers::Limited,
        Routers::Kept,
    ];

    pub(crate) fn config(self, per_token: usize) -> ExpertsConfig {
        let (balance_of, balance_over) = match self {
            Routers::Plain => return ExpertsConfig::default(),
            Routers::Kept => {
                return ExpertsConfig { idle: IdleExperts::Keep, ..ExpertsConfig::default() };
            }
            Routers::OfMicroBatches => (BalanceOf::AllLayers, BalanceOver::MicroBatch),
            Routers::OfSequences => (BalanceOf::EachLayer, BalanceOver::Sequence),
            Routers::OfStep => (BalanceOf::AllLayers, BalanceOver::Step),
            Routers::Limited => (BalanceOf::FirstChoice, BalanceOver::Step),
        };
        let is_limited = self == Routers::Limited;
        ExpertsConfig {
            balance_loss: Some(0.3),
            balance_of: Some(balance_of),
            balance_over,
            z_loss: (self != Routers::OfMicroBatches).then_some(0.01),
            capacity_factor: is_limited.then_some(0.9),
            second_at_random: (is_limited && per_token == 2).then_some(true),
            idle: IdleExperts::Update,
        }
    }

    pub(crate) fn is_of_step(self) -> bool {
        matches!(self, Routers::OfStep | Routers::Limited)
    }
}

/// The nearest schedule whose backward passes begin behind all forward passes.
pub(crate) fn whole_steps(kind: ScheduleKind) -> ScheduleKind {
    if kind.is_pipeline() { ScheduleKind::Gpipe } else { ScheduleKind::Relay }
}

/// The loss of a step, with those of routers.
pub(crate) fn all_losses(report: &StepReport) -> f64 {
    report.loss + report.balance_loss.unwrap_or(0.0) + report.z_loss.unwrap_or(0.0)
}

fn golden() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/balance.json");
    let text = fs::read_to_string(path).expect("it is committed");
    serde_json::from_str(&text).expect("it is JSON")
}

/// Runs a case beside the numbers of a golden. Returns the digest that it ends with.
async fn check(config: Config, golden: &Value) -> String {
    let steps = config.step.steps.expect("a case has them") as usize;
    let mut batches = Batches::open(&config).expect("it is committed");
    let mut trainer = Trainer::start(config).await.expect("a case of ours");
    for step in 0..steps {
        let batch = batches.next().await.expect("good data");
        let report = trainer.step(batch).await.expect("nothing fails here");
        let expected = |key: &str| golden[key][step].as_f64().expect("a number");
        let losses =
            [("losses", Some(report.loss)), ("balance", report.balance_loss), ("z", report.z_loss)];
        for (key, loss) in losses {
            let off = (loss.expect("the case has it") - expected(key)).abs();
            assert!(off < 2e-5, "step {step}, {key}: {loss:?} {}", expected(key));
        }
        let norm = report.grad_norm / expected("norms");
        assert!((norm - 1.0).abs() < 1e-4, "step {step}: norm {norm}");
    }
    trainer.digest().await.expect("nothing fails here")
}

#[tokio::test]
async fn balance_losses_are_those_of_transformers() {
    let golden = golden();
    for name in ["mixtral", "qwen3_moe", "qwen2_moe"] {
        let (mut config, _) = case(name);
        config.experts.balance_loss = golden["balance_loss"].as_f64();
        let of_step = check(config.clone(), &golden[name]).await;
        // The same over the only micro-batch of a step, in any order.
        config.step.micro_batch = config.step.batch;
        let whole = check(config.clone(), &golden[name]).await;
        config.experts.balance_over = BalanceOver::MicroBatch;
        assert_eq!(check(config.clone(), &golden[name]).await, whole, "{name}");
        config.schedule.kind = ScheduleKind::Resident;
        assert_eq!(check(config.clone(), &golden[name]).await, whole, "{name}");
        assert_ne!(of_step, whole, "gradients of micro-batches are rounded");
    }
}

#[tokio::test]
async fn switch_and_gshard_are_those_of_the_papers() {
    let golden = golden();
    let papers = [
        ("switch", "qwen3_moe-idle", 1.25, BalanceOf::EachLayer),
        ("gshard", "mixtral", 1.0, BalanceOf::FirstChoice),
    ];
    for (name, model, factor, balance_of) in papers {
        let (mut config, _) = case(model);
        config.experts = ExpertsConfig {
            balance_loss: golden["balance_loss"].as_f64(),
            balance_of: Some(balance_of),
            z_loss: golden["z_loss"].as_f64(),
            capacity_factor: Some(factor),
            ..ExpertsConfig::default()
        };
        let relay = check(config.clone(), &golden[name]).await;
        config.schedule.kind = ScheduleKind::Gpipe;
        config.schedule.recompute = false.into();
        assert_eq!(check(config, &golden[name]).await, relay, "{name}");
    }
}

/// The keys of a model's config.json are the default, and are written to its copies.
#[tokio::test]
async fn a_models_own_loss_is_taken_and_written() {
    let (mut config, _) = case("mixtral");
    let source = config.model.path.take().expect("a case has one");
    let folder = tempfile::tempdir().expect("a place for files");
    for file in ["config.json", "model.safetensors"] {
        fs::copy(source.join(file), folder.path().join(file)).expect("it is committed");
    }
    let path = folder.path().join("config.json");
    let text = fs::read_to_string(&path).expect("it was copied");
    let mut keys: Value = serde_json::from_str(&text).expect("it is JSON");
    keys["output_router_logits"] = true.into();
    keys["router_aux_loss_coef"] = 0.1.into();
    fs::write(&path, keys.to_string()).expect("room on a disk");
    config.model.path = Some(folder.path().into());
    check_own(config.clone(), Some(0.1)).await;
    config.experts.balance_loss = Some(0.0);
    check_own(config, None).await;
}

async fn check_own(config: Config, expected: Option<f64>) {
    let shape = shape_of(&config).expect("a case of ours");
    let own = shape.experts.expect("it has them").balance.loss;
    assert_eq!(Some(own).filter(|loss| *loss > 0.0), expected);
    let mut batches = Batches::open(&config).expect("it is committed");
    let mut trainer = Trainer::start(config).await.expect("a case of ours");
    let batch = batches.next().await.expect("good data");
    let report = trainer.step(batch).await.expect("nothing fails here");
    let golden = golden();
    let found = report.balance_loss.map(|loss| (loss * 1e4).round());
    let loss = golden["mixtral"]["balance"][0].as_f64().expect("a number");
    assert_eq!(found, expected.map(|_| (loss * 1e4).round()));
    let event = report.event();
    assert_eq!(event.get("balance_loss").is_some(), expected.is_some());
    let written = tempfile::tempdir().expect("a place for files");
    let to = written.path().join("copy");
    trainer.checkpoint(&to).await.expect("room on a disk");
    let text = fs::read_to_string(to.join("config.json")).expect("a checkpoint has one");
    let keys: Value = serde_json::from_str(&text).expect("it is JSON");
    assert_eq!(keys["output_router_logits"], expected.is_some());
    assert_eq!(keys["router_aux_loss_coef"], 0.1, "it is kept where it has no effect");
    trainer.stop().await.expect("nothing fails here");
}

/// Metrics of experts, layer by layer, and choices that were dropped so far.
#[tokio::test]
async fn loads_of_experts_are_told() {
    let (mut config, _) = case("mixtral");
    config.experts.capacity_factor = Some(0.5);
    config.experts.z_loss = Some(0.1);
    let mut batches = Batches::open(&config).expect("it is committed");
    let mut trainer = Trainer::start(config).await.expect("a case of ours");
    let mut dropped = 0.0;
    for _ in 0..2 {
        let batch = batches.next().await.expect("good data");
        trainer.step(batch).await.expect("nothing fails here");
        let mut told = BTreeMap::new();
        samples(&trainer.watch().view(0), |metric, labels, value| {
            told.insert([&[metric.name], labels].concat().join(" "), value);
        });
        assert!(told["l2l_dropped_assignments_total"] > dropped);
        dropped = told["l2l_dropped_assignments_total"];
        assert!(told["l2l_z_loss"] > 0.0 && told["l2l_balance_loss"] == 0.0);
        for layer in ["1", "2"] {
            let of = |name: &str| told[&format!("{name} {layer}")];
            // Five experts, of which a token chooses two.
            assert!((1.0..=2.5).contains(&of("l2l_expert_load_max_ratio")));
            assert!((0.4..=1.0).contains(&of("l2l_expert_token_share")));
            assert!((0.0..=3.0).contains(&of("l2l_idle_experts")));
            assert!((0.0..=5.0_f64.ln() + 1e-6).contains(&of("l2l_router_entropy")));
        }
    }
    trainer.stop().await.expect("nothing fails here");
}

/// The presets of the two papers: their losses fall, their routers learn, and keys of `[experts]`
/// replace what a preset has.
#[tokio::test]
async fn presets_train_as_the_papers_do() {
    let folder = tempfile::tempdir().expect("a place for files");
    let path = folder.path().join("text.txt");
    fs::write(&path, "The seventh son of the seventh son. ".repeat(60)).expect("a place for files");
    let papers = [
        ("switch-small", 1, BalanceOf::EachLayer, 1_250_000, false),
        ("gshard-small", 2, BalanceOf::FirstChoice, 2_000_000, true),
    ];
    for (preset, per_token, of, capacity, second_at_random) in papers {
        let mut config = Config::default();
        config.model.preset = Some(preset.into());
        [config.model.layers, config.model.heads] = [Some(2); 2];
        [config.model.hidden, config.model.expert_intermediate] = [Some(32); 2];
        config.data.train = path.display().to_string().into();
        config.data.sequence_length = Some(32);
        config.step.batch = 4;
        config.optimizer.learning_rate = 0.01;
        let shape = shape_of(&config).expect("a preset of ours");
        let experts = shape.experts.expect("it has them");
        assert!(!experts.is_of(0) && experts.is_of(1) && experts.per_token == per_token);
        assert_eq!(experts.normalised, per_token > 1, "a weight of 1 would teach no router");
        assert_eq!((experts.balance.loss, experts.balance.of), (0.01, of));
        assert_eq!(experts.balance.capacity_millionths, Some(capacity));
        assert_eq!(experts.balance.second_at_random, second_at_random);
        let mut batches = Batches::open(&config).expect("good data");
        let mut trainer = Trainer::start(config.clone()).await.expect("a preset of ours");
        let router = "model.layers.1.mlp.gate.weight";
        let before = trainer.weights(router).await.expect("it has one").1;
        let mut losses = Vec::new();
        for _ in 0..12 {
            let report = trainer.step(batches.next().await.expect("good data")).await;
            let report = report.expect("nothing fails here");
            assert!(report.balance_loss.is_some_and(|loss| loss > 0.0));
            losses.push(report.loss);
        }
        assert!(losses[11] < losses[0] - 0.5, "{preset}: {losses:?}");
        assert_ne!(trainer.weights(router).await.expect("it has one").1, before);
        let summary = trainer.stop().await.expect("nothing fails here");
        assert!(summary.balance_loss.is_some_and(|loss| loss > 0.0));
        let event = summary.event(None, None);
        assert_eq!(event["balance_loss"].as_f64(), summary.balance_loss);
        assert_eq!(event["z_loss"], 0.0);
        config.experts.balance_of = Some(BalanceOf::AllLayers);
        config.experts.second_at_random = Some(false);
        let changed = shape_of(&config).expect("a preset of ours").experts.expect("it has them");
        assert_eq!(changed.balance.of, BalanceOf::AllLayers);
        assert!(!changed.balance.second_at_random);
    }
}

fn refusal(change: impl Fn(&mut Config)) -> String {
    let mut config = Config::default();
    config.model.preset = Some("moe-small".into());
    config.data.train = "random".into();
    change(&mut config);
    let planned = shape_of(&config).and_then(|shape| model_of(&config, shape));
    let planned = planned.and_then(|model| Plan::new(&config, &model, &config.update_rule()));
    planned.map(drop).expect_err("it is refused").to_string()
}

/// Limits are of training alone: a run generates from a prompt that training could not have.
#[tokio::test]
async fn limits_leave_long_prompts_alone() {
    let of = |capacity_factor| async move {
        let mut config = Config::default();
        config.model.preset = Some("moe-small".into());
        config.model.layers = Some(1);
        config.model.positions = Some(300);
        config.step.chunk_positions = 128;
        config.experts.capacity_factor = capacity_factor;
        let prompt: Vec<u32> = (0..200).collect();
        let room = Room { prompts: 1, prompt: 200, tokens: 204 };
        let mut generator = Generator::start(config, room).await.expect("a model of ours");
        let mut tokens = Vec::new();
        let each = |_, token, _| {
            tokens.push(token);
            Then::GoOn
        };
        let how = Sampling::default();
        generator.generate(&[prompt], 4, how, &[], each).await.expect("a good prompt");
        generator.stop().await.expect("a clean end");
        tokens
    };
    assert_eq!(of(Some(0.5)).await, of(None).await);
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    type Change = fn(&mut Config);
    let cases: [(&str, &str, Change); 5] = [
        ("experts.z_loss", "the model has no experts", |config| {
            config.model.preset = Some("gpt-small".into());
            config.experts.z_loss = Some(0.1);
        }),
        ("experts.balance_over", "set \"micro-batch\"", |config| {
            config.experts.balance_loss = Some(0.1);
            config.schedule.kind = ScheduleKind::Resident;
        }),
        ("experts.balance_over", "set \"micro-batch\"", |config| {
            config.experts.balance_loss = Some(0.1);
            config.schedule.kind = ScheduleKind::OneForwardOneBackward;
        }),
        ("experts.second_at_random", "two choices a token, and this model has 3", |config| {
            config.model.experts_per_token = Some(3);
            config.experts.second_at_random = Some(true);
        }),
        ("experts.capacity_factor", "set step.chunk_positions to at least 256", |config| {
            config.step.chunk_positions = 128;
            config.data.sequence_length = Some(256);
            config.experts.capacity_factor = Some(1.25);
        }),
    ];
    for (key, says, change) in cases {
        let text = refusal(change);
        assert!(text.contains(key) && text.contains(says), "{text}");
    }
}

/// Every way of training trains experts.
#[test]
fn experts_have_the_same_bits_in_every_kind_of_schedule() {
    let each = [
        ([4, 2], Routers::Plain, false),
        ([9, 1], Routers::Plain, false),
        ([5, 2], Routers::Plain, true),
        ([4, 2], Routers::Limited, true),
        ([5, 3], Routers::OfStep, false),
        ([5, 2], Routers::OfSequences, true),
        ([9, 1], Routers::OfMicroBatches, false),
    ];
    for (experts, routers, gpt_oss) in each {
        let case = Case { experts: Some(experts), routers, gpt_oss, groups: 3, ..SMALL.clone() };
        let case = Case { batch: 6, ..case };
        let expected = run(config(&case, &baseline()), 3);
        let kinds = [ScheduleKind::Relay, ScheduleKind::Gpipe, ScheduleKind::Interleaved];
        for (kind, bundles) in kinds.into_iter().flat_map(|kind| [(kind, None), (kind, Some(1))]) {
            let way = Ways { kind, devices: 2, recompute: true.into(), bundles, ..baseline() };
            let way = Ways { on_file: true, ..way }.for_case(&case);
            let (bits, summary) = run(config(&case, &way), 3);
            let name = format!("{kind:?} {experts:?} {bundles:?} {routers:?} {gpt_oss}");
            assert_eq!(bits, expected.0, "{name}");
            assert_eq!(summary.weights_digest, expected.1.weights_digest, "{name}");
        }
    }
}
