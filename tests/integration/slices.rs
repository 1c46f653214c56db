//! Blocks in slices: losses are PyTorch's up to rounding, and the bits depend on the number of
//! slices alone.

use std::path::Path;

use l2l::config::{Dtype, LoraConfig, Recompute, ScheduleKind, StashPlace};
use l2l::models::{Base, Model};
use l2l::{Config, Trainer, shape_of};
use serde_json::{Value, json};

use crate::exact::{Case, SMALL, baseline, config, run};
use crate::pytorch::{case, check};
use crate::trained::Trained;

/// Cases whose blocks can be cut, with the number of slices.
const CUT: [(&str, u32); 22] = [
    ("cohere", 2),
    ("glm", 2),
    ("gpt_neox-slices", 2),
    ("gpt_neox-slices", 4),
    ("granite", 2),
    ("llama", 2),
    ("llama-classes", 2),
    ("llama-tokens", 2),
    ("modernbert-slices", 2),
    ("modernbert-slices", 4),
    ("opt-slices", 2),
    ("opt-slices", 4),
    ("phi3", 2),
    ("qwen2-slices", 2),
    ("qwen2-slices", 4),
    ("qwen3-slices", 2),
    ("qwen3-slices", 4),
    ("smollm3", 2),
    ("starcoder2", 2),
    ("tied", 2),
    ("tied", 4),
    ("untied", 2),
];

/// Ten steps, beside transformers in f64; also resident, with activations that are saved.
#[tokio::test]
async fn families_in_slices_are_pytorchs() {
    for (name, slices) in CUT {
        let (mut config, golden) = case(name);
        config.parallel.slices = slices;
        let relay = check(config.clone(), &golden).await;
        config.schedule.kind = ScheduleKind::Resident;
        config.schedule.recompute = false.into();
        config.stash.place = StashPlace::Device;
        config.device.threads = Some(1);
        assert_eq!(check(config.clone(), &golden).await, relay, "{name} in {slices} slices");
        config.parallel.slices = 1;
        assert_ne!(check(config, &golden).await, relay, "{name}: sums have another order");
    }
}

/// Long sequences in chunks, whose slices have keys and values of their own.
#[tokio::test]
async fn long_sequences_in_slices_are_pytorchs() {
    let (mut config, golden) = case("long");
    config.data.sequence_length = Some(4200);
    config.step.chunk_positions = 2048;
    config.parallel.slices = 2;
    check(config, &golden).await;
}

/// Blocks that torch.distributed cuts over processes. `goldens/slices.py` makes what is compared
/// with.
#[tokio::test]
async fn slices_are_those_of_processes_of_pytorch() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/slices.json");
    let text = std::fs::read_to_string(path).expect("it is committed");
    let found: Value = serde_json::from_str(&text).expect("it is JSON");
    for name in ["sliced-llama", "tied"] {
        for slices in [2_u32, 4] {
            let (mut config, _) = case(name);
            config.parallel.slices = slices;
            let golden = json!({ "float64": found[name][slices.to_string()] });
            check(config, &golden).await;
        }
    }
}

/// Losses and norms of a random run.
fn numbers(config: Config) -> Vec<f64> {
    let bits = run(config, 3).0;
    bits.into_iter().flat_map(|(loss, norm)| [loss, norm]).map(f64::from_bits).collect()
}

fn in_slices(case: &Case, slices: u32) -> Config {
    let mut config = config(&Case { slices: 2, ..case.clone() }, &baseline());
    config.parallel.slices = slices;
    config
}

/// Results are those of whole blocks within rounding: with the masks of all kinds of dropout, in
/// every dtype, with adapters on every module, over bases of every kind.
#[test]
fn slices_are_whole_blocks_within_rounding() {
    let adapters = Trained::AdaptersAndNorms;
    for (precision, most) in [(Dtype::F32, 2e-5), (Dtype::Bf16, 3e-2), (Dtype::F16, 4e-3)] {
        let precision = (precision, SMALL.precision.1);
        for (trained, base) in [
            (Trained::All, Base::AsIs),
            (adapters, Base::AsIs),
            (Trained::Adapters, Base::Bf16),
            (adapters, Base::Int8),
            (adapters, Base::Nf4),
        ] {
            let case = Case { layers: 2, trained, base, precision, ..SMALL.clone() };
            let whole = numbers(in_slices(&case, 1));
            for slices in [2, 4] {
                let found = numbers(in_slices(&case, slices));
                for (found, whole) in found.iter().zip(&whole) {
                    let off = (found / whole - 1.0).abs();
                    assert!(off < most, "{slices}, {trained:?}, {base:?}: {found} {whole}");
                }
            }
        }
    }
}

/// The activations that are saved, and what is recomputed, change no bit.
#[test]
fn slices_give_the_same_bits_with_each_recomputation() {
    for slices in [2, 4] {
        let of = |recompute: Recompute, place| {
            let mut config = in_slices(&SMALL, slices);
            config.schedule.kind = ScheduleKind::Relay;
            config.schedule.recompute = recompute;
            config.stash.place = place;
            run(config, 3).1.weights_digest
        };
        let expected = of(true.into(), StashPlace::Host);
        for recompute in [false.into(), Recompute::ATTENTION] {
            assert_eq!(of(recompute, StashPlace::Host), expected, "{slices}");
        }
    }
}

fn refused(config: &Config) -> String {
    let found = shape_of(config).and_then(|shape| l2l::model_of(config, shape).map(drop));
    found.expect_err("it cannot be cut").to_string()
}

/// Each refusal names what would do.
#[tokio::test]
async fn what_cannot_be_cut_is_refused() {
    let preset = |heads: usize, hidden: usize, slices: u32| {
        let mut config = Config::default();
        config.model.hidden = Some(hidden);
        config.model.heads = Some(heads);
        config.parallel.slices = slices;
        config
    };
    let says = refused(&preset(8, 64, 3));
    assert!(says.contains("parallel.slices is 3, and a block has 8 heads: set a number"), "{says}");
    assert!(says.contains("(1, 2, 4, 8)"), "{says}");
    let mut config = preset(6, 48, 3);
    config.model.intermediate = Some(40);
    let says = refused(&config);
    assert!(says.contains("has 40 channels of the feed-forward"), "{says}");
    assert!(says.contains("(1, 2)"), "{says}");
    for (name, slices, what) in [
        ("llama", 4, "has 2 heads of keys and values: set a number that divides them (1, 2)"),
        ("bert", 3, "norms behind the sums of its blocks. Set it to 1"),
        ("gemma3_text", 2, "norms of the outputs of its branches"),
        ("olmo2", 3, "norms of the outputs of its branches"),
        ("mixtral", 3, "the model has experts"),
        ("qwen3_5_text-tied", 2, "the model has linear attention"),
    ] {
        let (mut config, _) = case(name);
        config.parallel.slices = slices;
        let says = refused(&config);
        assert!(says.contains("parallel.slices is") && says.contains(what), "{name}: {says}");
    }
    let mut config = preset(4, 32, 2);
    config.train.lora = Some(LoraConfig { dropout: 0.1, ..LoraConfig::default() });
    let says = refused(&config);
    assert!(says.contains("train.lora.dropout is 0.1, and with parallel.slices = 2"), "{says}");
    assert!(says.contains("h.0.attn.c_proj is cut: set it to 0, leave such modules"), "{says}");
    let targets = Some(vec!["c_attn".into(), "c_fc".into()]);
    config.train.lora = Some(LoraConfig { dropout: 0.1, targets, ..LoraConfig::default() });
    let shape = shape_of(&config).expect("it can be cut");
    l2l::model_of(&config, shape).expect("dropout of whole inputs");
    config.train.lora = None;
    let own = Trainer::builder(config.clone()).model(Model::new(shape)).start().await;
    let says = own.map(drop).expect_err("it is not the config's").to_string();
    assert!(says.contains("parallel.slices is for a model that the config names"), "{says}");
    let relu = "parallel.slices = 2\nstash = { relu_density = 0.5 }\nschedule.recompute = false";
    let says = Config::parse(relu).expect_err("it is for whole blocks").to_string();
    assert!(says.contains("stash.relu_density is for whole blocks"), "{says}");
}

/// Slices are part of what a run is, and may be changed on request.
#[tokio::test]
async fn other_slices_are_a_change() {
    let folder = tempfile::tempdir().expect("a place for files");
    let place = folder.path().join("checkpoint");
    let mut trainer = Trainer::start(in_slices(&SMALL, 1)).await.expect("a run of ours");
    trainer.checkpoint(&place).await.expect("a directory of ours");
    trainer.stop().await.expect("nothing fails here");
    let of = |slices| Trainer::builder(in_slices(&SMALL, slices)).resume(&place);
    let says = of(2).start().await.map(drop).expect_err("another rule").to_string();
    assert!(says.contains("parallel.slices was 1, is 2"), "{says}");
    assert!(says.contains("--resume-with-changes"), "{says}");
    let changed = of(2).with_changes().start().await.expect("a change that may be");
    assert!(changed.changes().join("; ").contains("parallel.slices was 1, is 2"));
    changed.stop().await.expect("nothing fails here");
}
