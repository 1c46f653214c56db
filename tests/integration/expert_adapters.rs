//! Adapters of experts: a checkpoint and its export are one model, what PEFT could not load is
//! refused, and a quantised base is dequantised expert by expert.

use std::path::{Path, PathBuf};

use l2l::config::{Dtype, LoraConfig, ScheduleKind};
use l2l::models::Base;
use l2l::{Config, Plan, model_of, shape_of};
use tempfile::TempDir;

use crate::exact::{self, Case, SMALL, baseline, run};
use crate::program::{events, good, output};
use crate::trained::Trained;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(name)
}

/// The arguments of a command about a run with adapters.
fn arguments(command: &str, name: &str, folder: &TempDir, more: &[&str]) -> Vec<String> {
    let golden = golden(name);
    let data = golden.join("data.jsonl");
    let settings = [
        format!("model.path={}", golden.display()),
        format!("data.train={}", data.display()),
        format!("data.validation={}", data.display()),
        "data.sequence_length=40".into(),
        "step.steps=3".into(),
        "step.batch=4".into(),
        "optimizer.learning_rate=0.01".into(),
        "train.lora.rank=3".into(),
        format!("checkpoint.directory={}", folder.path().join("run").display()),
    ];
    let more = more.iter().map(|more| more.to_string());
    let settings = settings.into_iter().chain(more);
    let settings = settings.flat_map(|setting| ["--set".into(), setting]);
    [command.into(), "/dev/null".into()].into_iter().chain(settings).collect()
}

/// The loss of a validation of a directory.
fn loss(name: &str, folder: &TempDir, model: &Path) -> f64 {
    let mut given = arguments("eval", name, folder, &[]);
    given.extend(["--format", "json", "--model"].map(String::from));
    given.push(model.display().to_string());
    let events = events(&good(&given));
    events.last().expect("a result")["loss"].as_f64().expect("a number")
}

#[test]
fn adapters_of_experts_are_merged_into_each() {
    for name in ["mixtral", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe-sparse", "qwen3_next"] {
        let folder = tempfile::tempdir().expect("a place for files");
        good(&arguments("train", name, &folder, &[]));
        let checkpoint = folder.path().join("run/step-00000003");
        let merged = folder.path().join("merged");
        let mut given = arguments("export", name, &folder, &[]);
        given.extend(["--to".into(), merged.display().to_string()]);
        good(&given);
        let adapted = loss(name, &folder, &checkpoint);
        let exported = loss(name, &folder, &merged);
        let plain = loss(name, &folder, &golden(name));
        assert!((adapted - exported).abs() < 1e-5, "{name}: {adapted} {exported}");
        assert!((adapted - plain).abs() > 1e-3, "{name}: {adapted} {plain}");
    }
}

#[test]
fn what_peft_could_not_load_is_refused() {
    let folder = tempfile::tempdir().expect("a place for files");
    let cases = [
        ("train.lora.dropout=0.1", "train.lora.dropout is 0.1"),
        (r#"train.lora.targets=["gate_proj"]"#, "experts.0.up_proj: all experts"),
        (r#"train.lora.targets=["experts.3"]"#, "experts.0.gate_proj: all experts"),
        (r#"train.lora.rank_pattern={"gate_proj"=15}"#, "is 15, and model.layers.0.mlp.experts.0."),
        (r#"train.lora.targets=["mlp.gate"]"#, "routers and heads have no adapters"),
        (r#"train.lora.rank_pattern={"experts.1"=2}"#, "rank_pattern names model.layers.0"),
        (r#"train.lora.alpha_pattern={"down_proj"=2}"#, "alpha_pattern names model.layers.0"),
    ];
    for (setting, says) in cases {
        let refused = output(&arguments("train", "qwen3_moe", &folder, &[setting]));
        let error = String::from_utf8_lossy(&refused.stderr);
        assert!(!refused.status.success() && error.contains(says), "{setting}: {error}");
    }
}

/// The bytes of workspace of a model with this number of experts.
fn workspace(experts: usize, base: Base) -> u64 {
    let mut config = Config::default();
    config.model.preset = Some("moe-small".into());
    config.model.layers = Some(1);
    config.model.experts = Some(experts);
    config.data.train = "random".into();
    config.data.sequence_length = Some(16);
    config.train.lora = Some(LoraConfig::default());
    config.train.base = base;
    let model = model_of(&config, shape_of(&config).expect("a preset of ours"));
    let model = model.expect("a model of ours");
    let plan = Plan::new(&config, &model, &config.update_rule()).expect("a plan of ours");
    plan.device.iter().find(|term| term.name == "workspace").expect("it has one").bytes
}

#[test]
fn an_expert_is_dequantised_when_it_has_rows() {
    // A row's logits are all that grows with the number of experts.
    let grown = workspace(32, Base::Nf4) - workspace(8, Base::Nf4);
    let expert = 3 * 256 * 512 * size_of::<f32>() as u64;
    assert!(grown < expert / 2, "{grown} bytes for 24 experts more, of {expert} bytes each");
    assert!(workspace(8, Base::Nf4) > workspace(8, Base::AsIs) + expert / 2, "one is there");
}

#[test]
fn adapters_of_experts_have_the_same_bits_in_every_schedule() {
    let precision = (Dtype::Bf16, SMALL.precision.1);
    let trained = Trained::Adapters;
    let experts = Some([5, 2]);
    let case = Case { experts, trained, base: Base::Nf4, precision, batch: 6, ..SMALL.clone() };
    let (expected, reference) = run(exact::config(&case, &baseline()), 3);
    for kind in [ScheduleKind::Relay, ScheduleKind::Gpipe] {
        let ways = exact::Ways { kind, devices: 2, recompute: true.into(), ..baseline() };
        let (bits, summary) = run(exact::config(&case, &ways), 3);
        assert_eq!(bits, expected, "{kind:?}");
        assert_eq!(summary.weights_digest, reference.weights_digest, "{kind:?}");
    }
}

/// Quantised adapters that are not trained, beside experts that are, have workspace one by one.
#[test]
fn experts_train_beside_frozen_adapters() {
    let mut config = exact::config(&Case { experts: Some([16, 2]), ..SMALL.clone() }, &baseline());
    config.model.expert_intermediate = Some(128);
    config.train.lora = Some(LoraConfig { rank: Some(24), ..LoraConfig::default() });
    config.train.only = vec!["mlp.experts".into()];
    config.train.frozen = vec!["lora_A".into()];
    config.train.base = Base::Bf16;
    config.schedule.recompute = true.into();
    let of = |bundles| {
        let mut config = config.clone();
        config.schedule.bundles = bundles;
        run(config, 2).0
    };
    assert_eq!(of(Some(1)), of(None));
}
