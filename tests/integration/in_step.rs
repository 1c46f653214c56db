//! The reference of a preference in the same step, of a run with adapters: the numbers of the
//! reference before training, to the bit, from the uploads of fine-tuning.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;

use l2l::config::{
    ByteSize, Dtype, EpsTier, LoraConfig, ObjectiveKind, ReferenceKind, ScheduleKind, StashDtype,
};
use l2l::data::{Batch, Sequence};
use l2l::fabric::{self, Fabric};
use l2l::models::Base;
use l2l::{Config, Error, Plan, Trainer};
use proptest::prelude::*;
use serde_json::Value;

use crate::exact::planned;
use crate::preference::{answers, on_file};
use crate::reference::{Weights, fit};
use crate::ways::{Ways, baseline, ways};
use crate::whole;

const RECORDS: usize = 7;

fn lora() -> LoraConfig {
    LoraConfig { rank: Some(2), ..LoraConfig::default() }
}

/// A run with adapters on preferences of seven records.
fn config(folder: &Path) -> Config {
    let mut config = on_file(folder, &answers(RECORDS));
    config.objective.kind = ObjectiveKind::Dpo;
    config.optimizer.learning_rate = 1e-2;
    config.step.batch = 4;
    config.step.steps = Some(4);
    config.train.lora = Some(lora());
    config
}

/// The bits of losses, norms and metrics of four steps, and the digest of the weights.
type Ran = (Vec<Vec<u64>>, String);

async fn run_on(config: Config, fabric: Option<Arc<dyn Fabric>>) -> Result<Ran, Error> {
    let mut builder = Trainer::builder(config);
    if let Some(fabric) = fabric {
        builder = builder.fabric(fabric);
    }
    let (mut trainer, mut batches) = builder.open().await?;
    let mut bits = Vec::new();
    for _ in 0..4 {
        let report = trainer.step(batches.next().await?).await?;
        let metrics = report.metrics.iter().map(|(_, value)| value);
        let all = [report.loss, report.grad_norm].into_iter().chain(metrics);
        bits.push(all.map(f64::to_bits).collect());
    }
    let digest = trainer.digest().await?;
    trainer.stop().await?;
    Ok((bits, digest))
}

/// Runs a config on a runtime of its own, with a file of its own if the model is on file.
fn run(config: &Config, reference: ReferenceKind) -> Ran {
    run_as(config, reference, None)
}

fn run_as(config: &Config, reference: ReferenceKind, fabric: Option<Arc<dyn Fabric>>) -> Ran {
    let folder = tempfile::tempdir().expect("a place for files");
    let mut config = config.clone();
    config.objective.reference = Some(reference);
    config.eps.path = (config.eps.tier == EpsTier::File).then(|| folder.path().into());
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(run_on(config, fabric)).expect("a config of ours")
}

#[test]
fn it_is_the_reference_before_to_the_bit() {
    let folder = tempfile::tempdir().expect("a place for files");
    let plain = config(folder.path());
    let with = |change: &dyn Fn(&mut Config)| {
        let mut config = plain.clone();
        change(&mut config);
        config
    };
    let cases = [
        plain.clone(),
        with(&|config| config.objective.kind = ObjectiveKind::Ipo),
        with(&|config| config.objective.kind = ObjectiveKind::Hinge),
        // Below the second block the reference is the policy, unless something is dropped there.
        with(&|config| set(config).targets = Some(vec!["*.1.*".into()])),
        with(&|config| set(config).dropout = 0.2),
        with(&|config| {
            set(config).targets = Some(vec!["*.1.*".into()]);
            config.model.dropout = Some(0.2);
        }),
        with(&|config| config.train.base = Base::Nf4),
        with(&|config| config.step.micro_batch = 1),
    ];
    for (number, config) in cases.iter().enumerate() {
        let before = run(config, ReferenceKind::Before);
        let in_step = run(config, ReferenceKind::InStep);
        assert_eq!(in_step, before, "case {number}");
        let first = f64::from_bits(before.0[0][0]);
        let drops = config.model.dropout.is_some()
            || config.train.lora.as_ref().is_some_and(|lora| lora.dropout > 0.0);
        if config.objective.kind == ObjectiveKind::Dpo && !drops {
            assert_eq!(first, std::f64::consts::LN_2, "case {number}");
        }
        assert_ne!(f64::from_bits(before.0[3][0]), first, "it learns");
    }
}

fn set(config: &mut Config) -> &mut LoraConfig {
    config.train.lora.as_mut().expect("adapters")
}

/// What decides the bits of a run.
#[derive(Clone, Debug)]
struct Case {
    micro_batch: usize,
    groups: u32,
    dtype: Dtype,
    stash: StashDtype,
    base: Base,
    /// Only the upper block has adapters.
    upper: bool,
    ranks: u32,
    slices: u32,
}

fn cases() -> impl Strategy<Value = Case> {
    let dtypes = prop::sample::select(vec![Dtype::F32, Dtype::F32, Dtype::Bf16, Dtype::F16]);
    let stashes = prop::sample::select(vec![StashDtype::F32, StashDtype::Bf16, StashDtype::Int8]);
    let bases = prop::sample::select(vec![Base::AsIs, Base::Bf16, Base::Int8, Base::Nf4]);
    let sizes = (1..=3_usize, 1..=2_u32, any::<bool>(), 1..=2_u32, 1..=2_u32);
    (sizes, dtypes, stashes, bases).prop_map(|(sizes, dtype, stash, base)| {
        let (micro_batch, groups, upper, ranks, slices) = sizes;
        // Eight sequences make three micro-batches of three.
        let groups = if micro_batch == 3 { 1 } else { groups };
        let ranks = ranks.min(groups);
        let base = if ranks > 1 { Base::AsIs } else { base };
        Case { micro_batch, groups, dtype, stash, base, upper, ranks, slices }
    })
}

impl Case {
    fn config(&self, folder: &Path, ways: &Ways) -> Config {
        let mut config = config(folder);
        config.step.micro_batch = self.micro_batch;
        (config.parallel.groups, config.parallel.slices) = (self.groups, self.slices);
        config.device.dtype = self.dtype;
        config.loss_scale.initial = 256.0;
        config.stash.dtype = self.stash;
        config.stash.block_size = 8;
        config.train.base = self.base;
        set(&mut config).targets = self.upper.then(|| vec!["*.1.*".into()]);
        let on_file = ways.on_file && self.dtype != Dtype::F16;
        config.eps.tier = if on_file { EpsTier::File } else { EpsTier::Memory };
        ways.set(&mut config, false);
        config
    }

    /// Orders that mix the passes need whole records in a micro-batch.
    fn ways(&self, mut ways: Ways) -> Ways {
        if !self.micro_batch.is_multiple_of(2)
            && !matches!(ways.kind, ScheduleKind::Relay | ScheduleKind::Gpipe)
        {
            ways.kind = ScheduleKind::Relay;
        }
        if self.ranks > 1 {
            (ways.kind, ways.devices) = (ScheduleKind::Relay, 1);
        }
        let turns = 8_usize.div_ceil(self.micro_batch) as u32;
        let tensor = ways.tensor.min(self.slices);
        Ways { tensor, ..ways.for_sizes(3, turns / self.ranks, self.groups / self.ranks) }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(if whole() { 150 } else { 24 })
    })]

    #[test]
    fn every_way_has_one_digest(case in cases(), ways in ways()) {
        let folder = tempfile::tempdir().expect("a place for files");
        let is_whole = case.micro_batch.is_multiple_of(2);
        let kind = if is_whole { ScheduleKind::Resident } else { ScheduleKind::Relay };
        let plain = case.config(folder.path(), &Ways { kind, ..baseline() });
        let expected = run(&plain, ReferenceKind::Before);
        let mut other = case.config(folder.path(), &case.ways(ways));
        // A ceiling is that of a step without the reference's own places.
        if let Some(ceiling) = other.device.memory.bytes() {
            other.device.memory = ByteSize::from(ceiling + (1 << 20));
        }
        if case.ranks == 1 {
            prop_assert_eq!(run(&other, ReferenceKind::InStep), expected);
            return Ok(());
        }
        let other = &other;
        let all: Vec<Ran> = thread::scope(|scope| {
            let ranks = fabric::threads(case.ranks).into_iter().map(|fabric| {
                let fabric = Some(Arc::new(fabric) as Arc<dyn Fabric>);
                scope.spawn(move || run_as(other, ReferenceKind::InStep, fabric))
            });
            let ranks: Vec<_> = ranks.collect();
            ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).collect()
        });
        for of_rank in all {
            prop_assert_eq!(&of_rank, &expected);
        }
    }
}

/// Sequences that the ring takes in chunks.
#[test]
fn chunks_of_long_answers_have_one_digest() {
    let folder = tempfile::tempdir().expect("a place for files");
    let mut lines = answers(RECORDS);
    for (line, n) in lines.iter_mut().zip(1..) {
        line["chosen"] = format!("{n} yes ").repeat(20 + 15 * n).into();
    }
    let mut config = Config { data: on_file(folder.path(), &lines).data, ..config(folder.path()) };
    config.data.sequence_length = Some(1024);
    config.model.positions = Some(1024);
    config.step.chunk_positions = 128;
    let expected = run(&config, ReferenceKind::Before);
    assert_eq!(run(&config, ReferenceKind::InStep), expected);
    config.device.count = Some(2);
    config.parallel.groups = 1;
    assert_eq!(run(&config, ReferenceKind::InStep), expected);
}

/// Experts in visits of their own: rows of the reference choose for themselves.
#[test]
fn experts_of_the_reference_are_its_own() {
    let folder = tempfile::tempdir().expect("a place for files");
    let mut config = config(folder.path());
    config.model.preset = Some("moe-small".into());
    config.model.experts = Some(5);
    config.model.experts_per_token = Some(1);
    config.model.expert_intermediate = Some(14);
    let expected = run(&config, ReferenceKind::Before);
    assert_eq!(f64::from_bits(expected.0[0][0]), std::f64::consts::LN_2);
    for bundles in [None, Some(1), Some(2)] {
        config.schedule.bundles = bundles;
        assert_eq!(run(&config, ReferenceKind::InStep), expected, "{bundles:?}");
    }
}

/// A step uploads the weights of fine-tuning's step, in as much device memory, and moves the bytes
/// that were planned.
#[tokio::test]
async fn a_step_uploads_what_fine_tuning_does() {
    let folder = tempfile::tempdir().expect("a place for files");
    let mut config = config(folder.path());
    config.model.layers = Some(6);
    (config.channels.weights, config.model.positions) = (2, Some(64));
    let record = |at: usize| {
        let tokens: Vec<u32> = (0..128).map(|place| ((place * 7 + at) % 50) as u32).collect();
        let labels = tokens.iter().map(|token| *token as i32).collect();
        Sequence { tokens, labels, documents: vec![64, 64], ..Sequence::default() }
    };
    let records: Vec<Sequence> = (0..4).map(record).collect();
    let batch = Batch::of_records(&records);
    let mut plain = config.clone();
    plain.objective = Default::default();
    plain.step.batch = 8;
    (plain.model.dropout, plain.data.train) = (Some(0.0), "random".into());
    let known = batch.clone().with_reference(vec![-1.0; 8]);
    let mut in_step = config.clone();
    in_step.objective.reference = Some(ReferenceKind::InStep);
    let mut moved = Vec::new();
    for (config, batch) in [(in_step, batch.clone()), (config, known), (plain, batch)] {
        let weights = Arc::new(Weights::default());
        let builder = Trainer::builder(config.clone()).observe(weights.clone());
        let mut trainer = builder.start().await.expect("a config of ours");
        let device = trainer.plan().device_bytes();
        for _ in 0..3 {
            trainer.step(batch.clone()).await.expect("a step");
        }
        let ended = crate::stop(trainer).await.expect("nothing fails here");
        assert_eq!(ended.links, planned(&config, 3));
        moved.push((weights.0.load(Relaxed), device));
    }
    let [in_step, before, plain] = moved[..] else { panic!("three runs") };
    assert!(in_step.0 > 0);
    assert_eq!(in_step, before, "weights, and memory of the device");
    assert_eq!(in_step.0, plain.0, "weights");
    assert!(in_step.1 <= plain.1, "memory of the device");
}

/// What the reference leaves waits for the next layer alone: its memory does not grow with depth.
#[test]
fn its_stash_does_not_grow_with_depth() {
    let folder = tempfile::tempdir().expect("a place for files");
    let stash = |layers: usize, reference: ReferenceKind| {
        let mut config = config(folder.path());
        config.model.layers = Some(layers);
        config.objective.reference = Some(reference);
        let shape = l2l::shape_of(&config).expect("a shape of ours");
        let model = l2l::model_of(&config, shape).expect("a model of ours");
        let plan = Plan::new(&config, &model, &config.update_rule()).expect("a plan of ours");
        let term = plan.host.iter().find(|term| term.name == "stash").expect("it has one");
        term.bytes
    };
    let more = |layers| stash(layers, ReferenceKind::InStep) - stash(layers, ReferenceKind::Before);
    assert_eq!(more(2), more(12));
    // Two places for hidden states of eight sequences of 64 tokens, one for statistics.
    assert!((1..=8 * 64 * (2 * 32 * 4 + 16)).contains(&more(2)), "{}", more(2));
}

/// A resumed run needs no table: the base is there.
#[tokio::test]
async fn a_resumed_run_computes_it_again() {
    for tier in [EpsTier::Memory, EpsTier::File] {
        let folders = [(); 2].map(|()| tempfile::tempdir().expect("a place for files"));
        let [unbroken, broken] = folders.each_ref().map(|folder| {
            let mut config = crate::reference::whole(folder.path());
            config.train.lora = Some(lora());
            config.objective.reference = Some(ReferenceKind::InStep);
            config.eps.tier = tier;
            config.eps.path = (tier == EpsTier::File).then(|| folder.path().join("eps"));
            config
        });
        let (expected, all) = fit(&unbroken, None).await;
        let expected = expected.expect("a run of ours");
        assert!(all.events.iter().all(|event| event["event"] != "reference"));
        assert_eq!(all.losses("step")[0], std::f64::consts::LN_2);
        let (_, first) = fit(&broken, Some(3)).await;
        let (rest, second) = fit(&broken, None).await;
        assert_eq!(rest.expect("it resumes").weights_digest, expected.weights_digest);
        for kind in ["step", "validation"] {
            let both = [first.losses(kind), second.losses(kind)].concat();
            assert_eq!(both, all.losses(kind), "{kind}");
        }
        let checkpoints = broken.checkpoint.directory.expect("set");
        let latest = fs::read_dir(checkpoints).expect("it is there").flatten();
        let mut tables = latest.map(|one| one.path().join("reference.safetensors"));
        assert!(tables.all(|table| !table.exists()));
    }
}

#[tokio::test]
async fn a_reference_that_would_not_be_the_base_is_refused() {
    let folder = tempfile::tempdir().expect("a place for files");
    let refused = |change: &dyn Fn(&mut Config)| {
        let mut config = config(folder.path());
        config.objective.reference = Some(ReferenceKind::InStep);
        change(&mut config);
        async move {
            let started = Trainer::start(config).await;
            started.map(drop).expect_err("it is refused").to_string()
        }
    };
    let found = refused(&|config| config.train.lora = None).await;
    assert!(found.contains("objective.reference is \"in-step\", and the model has no"), "{found}");
    assert!(found.contains("set train.lora, or set \"before\""), "{found}");
    let found = refused(&|config| config.train.only = vec!["norm".into()]).await;
    assert!(found.contains("is trained beside the adapters"), "{found}");
    let found = refused(&|config| config.train.neftune_alpha = 5.0).await;
    assert!(found.contains("the noise of train.neftune_alpha"), "{found}");
    let found = refused(&|config| config.objective.kind = ObjectiveKind::Simpo).await;
    assert!(found.contains("objective.reference is for kind = \"dpo\""), "{found}");
    let found = refused(&|config| config.depth.drop = 0.5).await;
    assert!(found.contains("depth.drop"), "{found}");
    let place = folder.path().join("adapters");
    let mut trainer = Trainer::start(config(folder.path())).await.expect("a config of ours");
    trainer.checkpoint(&place).await.expect("a place for files");
    let adapters = LoraConfig { path: Some(place), ..LoraConfig::default() };
    let found = refused(&|config| config.train.lora = Some(adapters.clone())).await;
    assert!(found.contains("would lack the adapters of train.lora.path"), "{found}");
}

/// `l2l eval` computes it from the checkpoint's adapters and their base.
#[cfg(feature = "cli")]
#[tokio::test]
async fn eval_computes_it() {
    use crate::program::good;
    let folder = tempfile::tempdir().expect("a place for files");
    let base = folder.path().join("base");
    let plain = Config { train: Default::default(), ..config(folder.path()) };
    let mut trainer = Trainer::start(plain).await.expect("a config of ours");
    trainer.checkpoint(&base).await.expect("a place for files");
    let mut config = crate::reference::whole(folder.path());
    config.model = l2l::config::ModelConfig { path: Some(base.clone()), ..Default::default() };
    config.train.lora = Some(lora());
    config.objective.reference = Some(ReferenceKind::InStep);
    let (fitted, recorder) = fit(&config, None).await;
    fitted.expect("a run of ours");
    let file = folder.path().join("config.toml");
    let at = |path: &Path| path.display().to_string();
    let toml = format!(
        "model.path = {:?}\n\
         data = {{ train = {:?}, validation = {:?}, sequence_length = 64 }}\n\
         step = {{ batch = 2, micro_batch = 2 }}\n\
         objective = {{ kind = \"dpo\", reference = \"in-step\" }}\n\
         train.lora.rank = 2\n\
         checkpoint.directory = {:?}\n",
        at(&base),
        at(&folder.path().join("pairs.jsonl")),
        at(&folder.path().join("held.jsonl")),
        at(&config.checkpoint.directory.expect("set")),
    );
    fs::write(&file, toml).expect("a file of ours");
    let found: Value =
        serde_json::from_str(&good(&["eval", &at(&file), "--format", "json"])).expect("an object");
    assert_eq!(found["loss"].as_f64(), recorder.losses("validation").last().copied());
}
