//! Frozen weights that are stored in bf16, int8 or NF4: PEFT's training over weights that
//! bitsandbytes' rules have quantised, what they take, and what is refused.
//! `goldens/qlora.py` makes what is compared with.

use std::fs;
use std::path::{Path, PathBuf};

use l2l::config::{EpsTier, LoraConfig, ScheduleKind, StashPlace, TrainConfig};
use l2l::data::Batches;
use l2l::inference::{self, Evaluator};
use l2l::models::Base;
use l2l::{Config, Plan, Trainer, hf, shape_of};
use safetensors::tensor::{SafeTensors, TensorView};
use serde_json::Value;

use crate::pytorch::{self, check};

const BASES: [(Base, &str); 3] = [(Base::Bf16, "bf16"), (Base::Int8, "int8"), (Base::Nf4, "nf4")];

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(name)
}

/// A case that trains PEFT's adapters over a base, and its golden.
fn case(name: &str, base: Base, key: &str) -> (Config, Value) {
    let (mut config, _) = pytorch::case(name);
    let adapters = golden("lora").join(name);
    let text = fs::read_to_string(adapters.join("quantised.json")).expect("it is committed");
    let mut golden: Value = serde_json::from_str(&text).expect("it is JSON");
    config.optimizer.clip_norm = None;
    let lora = LoraConfig { path: Some(adapters), ..LoraConfig::default() };
    config.train = TrainConfig { lora: Some(lora), base, ..TrainConfig::default() };
    (config, golden[key].take())
}

#[tokio::test]
async fn training_over_every_base_is_pefts() {
    for name in ["llama", "tied", "bert", "bert-classes"] {
        for (base, key) in BASES {
            let (config, golden) = case(name, base, key);
            let relay = check(config.clone(), &golden).await;
            let mut resident = config;
            resident.schedule.kind = ScheduleKind::Resident;
            resident.schedule.recompute = false.into();
            resident.stash.place = StashPlace::Device;
            resident.device.threads = Some(1);
            assert_eq!(check(resident, &golden).await, relay, "{name} {base:?}");
        }
    }
}

async fn train(trainer: &mut Trainer, from: u64, to: u64) {
    let mut batches = Batches::open(trainer.config()).expect("it is committed");
    for step in 0..to {
        let batch = batches.next().await.expect("good data");
        if step >= from {
            trainer.step(batch).await.expect("nothing fails here");
        }
    }
}

/// From a checkpoint of adapters, of a whole model, and from a state on file. What is frozen comes
/// from the model that the run began with: to quantise it again would change it.
#[tokio::test]
async fn a_resumed_run_has_the_bits_of_an_unbroken_one() {
    let norms = |base| TrainConfig { only: vec!["norm".into()], base, ..TrainConfig::default() };
    for (base, name) in [(Base::Nf4, "llama"), (Base::Int8, "tied"), (Base::Bf16, "bert-classes")] {
        for trains_norms in [false, true] {
            let (mut config, _) = case(name, base, "nf4");
            if trains_norms {
                config.train = norms(base);
            }
            let mut whole = Trainer::start(config.clone()).await.expect("a case of ours");
            train(&mut whole, 0, 4).await;
            let expected = whole.digest().await.expect("nothing fails here");
            let folder = tempfile::tempdir().expect("a place for files");
            let place = folder.path().join("checkpoint");
            let mut first = Trainer::start(config.clone()).await.expect("a case of ours");
            train(&mut first, 0, 2).await;
            first.checkpoint(&place).await.expect("a directory of ours");
            drop(first);
            let mut on_file = config.clone();
            on_file.eps.tier = EpsTier::File;
            on_file.eps.path = Some(folder.path().join("eps"));
            for config in [config, on_file.clone()] {
                let mut second =
                    Trainer::builder(config).resume(&place).start().await.expect("ours");
                train(&mut second, 2, 4).await;
                let digest = second.digest().await.expect("nothing fails here");
                assert_eq!(digest, expected, "{name} {base:?} {trains_norms}");
            }
            on_file.eps.path = Some(folder.path().join("other"));
            let mut first = Trainer::start(on_file.clone()).await.expect("a case of ours");
            train(&mut first, 0, 2).await;
            first.stop().await.expect("nothing fails here");
            let mut second = Trainer::builder(on_file).resume_file().start().await.expect("ours");
            train(&mut second, 2, 4).await;
            let digest = second.digest().await.expect("nothing fails here");
            assert_eq!(digest, expected, "{name} {base:?} {trains_norms} from its file");
        }
    }
}

/// A checkpoint is evaluated over the same base, and an export has the weights as they were.
#[tokio::test]
async fn evaluations_have_the_base_and_exports_have_not() {
    let (config, _) = case("llama", Base::Nf4, "nf4");
    let loss_of = async |config: &Config| {
        let shape = shape_of(config).expect("a case of ours");
        let (data, _) = l2l::data::Dataset::open(config, &shape).expect("it is committed");
        let mut evaluator = Evaluator::start(config.clone()).await.expect("a case of ours");
        let loss = evaluator.evaluate(data.in_order(4, 3)).await.expect("nothing fails here").loss;
        evaluator.stop().await.expect("nothing fails here");
        loss
    };
    let folder = tempfile::tempdir().expect("a place for files");
    let place = folder.path().join("checkpoint");
    let merged = folder.path().join("merged");
    let mut trainer = Trainer::start(config.clone()).await.expect("a case of ours");
    trainer.checkpoint(&place).await.expect("a directory of ours");
    drop(trainer);
    let mut read = config.clone();
    let mut plain = config.clone();
    inference::load_from(&mut read, &place);
    plain.train.base = Base::AsIs;
    let quantised = loss_of(&config).await;
    let exact = loss_of(&plain).await;
    assert_eq!(loss_of(&read).await, quantised);
    assert!((quantised - exact).abs() > 1e-4, "{quantised} {exact}");
    hf::export(&place, config.model.path.as_deref(), &merged, Default::default())
        .expect("a case of ours");
    plain.model.path = Some(merged);
    plain.train = TrainConfig::default();
    assert!((loss_of(&plain).await - exact).abs() < 1e-5);
}

/// What a plan says of a base: the bytes that lie on the host and that travel.
#[test]
fn a_base_takes_its_bytes() {
    let plan = |base| {
        let mut config = Config::default();
        config.model.preset = Some("llama-1b".into());
        config.data.train = "random".into();
        config.step.batch = 1;
        let lora = LoraConfig { rank: Some(4), ..LoraConfig::default() };
        config.train = TrainConfig { lora: Some(lora), base, ..TrainConfig::default() };
        let model = l2l::model_of(&config, shape_of(&config).expect("a preset")).expect("ours");
        let plan = Plan::new(&config, &model, &config.update_rule()).expect("ours");
        (plan, model)
    };
    let (as_is, model) = plan(Base::AsIs);
    let matrices: usize = model
        .blocks
        .iter()
        .flat_map(|block| block.frozen())
        .filter(|tensor| tensor.kind == l2l::models::Kind::Weight)
        .map(|tensor| tensor.len())
        .sum();
    let share = matrices as f64 / model.parameters() as f64;
    assert!(share > 0.7, "matrices are most of the model: {share}");
    // What 4 bytes of each matrix's element become.
    for (base, bytes) in [(Base::Int8, 1.002), (Base::Nf4, 0.516)] {
        let (plan, _) = plan(base);
        let saved = as_is.eps_bytes()[0] as f64 - plan.eps_bytes()[0] as f64;
        let expected = matrices as f64 * (4.0 - bytes);
        assert!((saved / expected - 1.0).abs() < 1e-3, "{base:?}: {saved} of {expected}");
        assert!(
            plan.traffic.upload_bytes < as_is.traffic.upload_bytes
                && plan.device_bytes() < as_is.device_bytes()
        );
    }
    let (half, _) = plan(Base::Bf16);
    let ratio = half.eps_bytes()[0] as f64 / as_is.eps_bytes()[0] as f64;
    assert!((0.5..0.51).contains(&ratio), "{ratio}");
}

/// A trained bias beside a frozen table: rows are still those of the table.
#[tokio::test]
async fn a_frozen_table_behind_a_trained_bias_is_gathered() {
    let (mut config, _) = pytorch::case("bert");
    config.optimizer.learning_rate = 0.0;
    config.optimizer.weight_decay = 0.0;
    let mut first = Vec::new();
    for (only, base) in [(vec![], Base::AsIs), (vec!["bias".to_string()], Base::AsIs)] {
        config.train = TrainConfig { only, base, ..TrainConfig::default() };
        let mut batches = Batches::open(&config).expect("it is committed");
        let mut trainer = Trainer::start(config.clone()).await.expect("a case of ours");
        let batch = batches.next().await.expect("good data");
        first.push(trainer.step(batch).await.expect("nothing fails here").loss);
        trainer.stop().await.expect("nothing fails here");
    }
    assert_eq!(first[0].to_bits(), first[1].to_bits());
}

#[test]
fn bases_without_frozen_weights_are_refused() {
    let refused = |change: &dyn Fn(&mut TrainConfig)| {
        let (mut config, _) = pytorch::case("llama");
        config.train.base = Base::Nf4;
        change(&mut config.train);
        let made = shape_of(&config).and_then(|shape| l2l::model_of(&config, shape));
        match config.check().and(made) {
            Ok(_) => panic!("{:?} is accepted", config.train),
            Err(error) => error.to_string(),
        }
    };
    for error in [refused(&|_| ()), refused(&|train| train.frozen = vec!["norm".into()])] {
        assert!(error.contains("train.base") && error.contains("train.lora"), "{error}");
    }
}

#[tokio::test]
async fn weights_that_cannot_be_quantised_are_named() {
    let folder = tempfile::tempdir().expect("a place for files");
    let (mut config, _) = case("llama", Base::Nf4, "nf4");
    let from = config.model.path.clone().expect("the case has one");
    for file in fs::read_dir(&from).expect("it is committed").flatten() {
        fs::copy(file.path(), folder.path().join(file.file_name())).expect("a place for files");
    }
    let bytes = fs::read(from.join("model.safetensors")).expect("it is committed");
    let all = SafeTensors::deserialize(&bytes).expect("good");
    const BAD: &str = "model.layers.1.self_attn.o_proj.weight";
    let mut data = all.tensor(BAD).expect("it has one").data().to_vec();
    data[8..12].copy_from_slice(&f32::NAN.to_le_bytes());
    let changed = all.tensors().into_iter().map(|(name, view)| {
        let data = if name == BAD { &data[..] } else { view.data() };
        let view = TensorView::new(view.dtype(), view.shape().to_vec(), data).expect("the same");
        (name, view)
    });
    let changed = safetensors::serialize(changed, None).expect("plain tensors");
    fs::write(folder.path().join("model.safetensors"), changed).expect("a place for files");
    config.model.path = Some(folder.path().into());
    config.model.unsealed = true; // else NaN is refused for itself
    let error = Trainer::start(config).await.err().expect("NaN has no code").to_string();
    for part in [BAD, "row 0, column 2", "NaN"] {
        assert!(error.contains(part), "{part:?} is not in: {error}");
    }
}
