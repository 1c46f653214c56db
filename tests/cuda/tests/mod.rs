//! The device on a driver that is emulated: whole models against PyTorch's goldens and against the
//! CPU, relay against resident, and a driver that fails anywhere. `kernels/check.py`, beside this
//! folder, compares single kernels with f64.

mod chosen;
mod copies;
mod kept;
mod linear;
mod packed;
mod refused;
mod trained;

use std::path::Path;
use std::sync::Arc;

use super::emulated;
use crate::config::{Deal, DeviceKind, EpsTier, ScheduleKind, StashPlace, Transfer};
use crate::data::Batches;
use crate::devices::{Check, KernelGroup};
use crate::inference::{Generator, Room, Sampling, Then};
use crate::kernels::{Custom, CustomKernel, Kernels};
use crate::models::{
    Backward, Composed, Derived, Final, Forward, Layer, Model, Operations, Save, Stem, Tensor,
    TransformerBlock, Value,
};
use crate::tensor::Dtype;
use crate::trainer::Builder;
use crate::{Config, Summary, Trainer};

fn config(kind: DeviceKind) -> Config {
    let mut config = Config::default();
    config.device.kind = kind;
    config.device.threads = Some(1);
    config.data.train = "random".into();
    config.model.layers = Some(2);
    config.model.hidden = Some(24);
    config.model.heads = Some(3);
    config.model.vocabulary = Some(51);
    config.model.positions = Some(10);
    config.model.dropout = Some(0.1);
    config.data.sequence_length = Some(7);
    config.step.batch = 5;
    config.step.micro_batch = 2;
    config.optimizer.learning_rate = 1e-2;
    config
}

/// Digest of the weights, and bytes up and down.
struct End {
    digest: String,
    moved: [u64; 2],
}

/// Losses and norms of some steps, and the end.
fn run(config: Config, steps: usize) -> Result<(Vec<[f64; 2]>, End), crate::Error> {
    run_on(Trainer::builder(config.clone()), &config, steps)
}

fn run_on(
    builder: Builder,
    config: &Config,
    steps: usize,
) -> Result<(Vec<[f64; 2]>, End), crate::Error> {
    emulated::runtime().block_on(async {
        let mut batches = Batches::open(config)?;
        let mut trainer = builder.start().await?;
        let mut found = Vec::new();
        for _ in 0..steps {
            let report = trainer.step(batches.next().await?).await?;
            found.push([report.loss, report.grad_norm]);
        }
        let digest = trainer.digest().await?;
        let Summary { bytes_uploaded, bytes_downloaded, .. } = trainer.stop().await?;
        Ok((found, End { digest, moved: [bytes_uploaded, bytes_downloaded] }))
    })
}

fn close(found: &[[f64; 2]], expected: &[[f64; 2]], of: Dtype, what: &str) {
    assert_eq!(found.len(), expected.len());
    let most = if of == Dtype::F32 { 1e-4 } else { 5e-2 };
    for (step, (found, expected)) in found.iter().zip(expected).enumerate() {
        for (found, expected) in found.iter().zip(expected) {
            let off = (found - expected).abs() / expected.abs().max(1.0);
            println!("{what} in {of}, step {step}: {found} {expected} {off:.1e}");
            assert!(off < most, "{what} in {of}, step {step}: {found} and not {expected}");
        }
    }
}

const KINDS: [Dtype; 2] = [Dtype::F32, Dtype::Bf16];

/// A case of PyTorch's, as `tests/integration/pytorch.rs` has it.
fn golden(name: &str) -> (Config, Vec<[f64; 2]>) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(name);
    let text = std::fs::read_to_string(folder.join("golden.json")).expect("it is committed");
    let golden: serde_json::Value = serde_json::from_str(&text).expect("it is JSON");
    let numbers = |key: &str| -> Vec<f64> {
        let list = golden["float64"][key].as_array().expect("a list");
        list.iter().map(|number| number.as_f64().expect("a number")).collect()
    };
    let mut config = Config::default();
    config.device.kind = DeviceKind::Cuda;
    config.data.train = folder.join("data.jsonl").display().to_string().into();
    config.data.shuffle = false;
    config.model.path = Some(folder);
    config.step.batch = golden["batch"].as_u64().expect("a number") as usize;
    config.step.micro_batch = 2;
    config.step.steps = golden["steps"].as_u64();
    config.optimizer.learning_rate = golden["learning_rate"].as_f64().expect("a number");
    config.optimizer.weight_decay = golden["weight_decay"].as_f64().expect("a number");
    config.optimizer.clip_norm = golden["clip_norm"].as_f64();
    let steps = numbers("losses").into_iter().zip(numbers("norms"));
    (config, steps.map(|(loss, norm)| [loss, norm]).collect())
}

/// The checks of the kernels of a group.
fn checks(dtype: Dtype, group: KernelGroup) -> Result<Vec<Check>, crate::Error> {
    let mut config = config(DeviceKind::Cuda);
    config.device.dtype = dtype;
    checks_of(&config, group)
}

fn checks_of(config: &Config, group: KernelGroup) -> Result<Vec<Check>, crate::Error> {
    let mut checks = Vec::new();
    super::check(config, group, 7, &mut |check| checks.push(check.clone()))?;
    Ok(checks)
}

fn every_kernel_is_the_cpus(dtype: Dtype) {
    if !emulated::instead() {
        return;
    }
    for group in KernelGroup::ALL {
        let checks = checks(dtype, group).expect("it is emulated");
        assert!(checks.len() > 1);
        for check in checks {
            println!("{dtype} {check:?}");
            assert_eq!(check.problem(), None);
        }
    }
}

#[test]
fn every_kernel_is_the_cpus_in_f32() {
    every_kernel_is_the_cpus(Dtype::F32);
}

#[test]
fn every_kernel_is_the_cpus_in_bf16() {
    every_kernel_is_the_cpus(Dtype::Bf16);
}

#[test]
fn every_kernel_is_the_cpus_in_f16() {
    every_kernel_is_the_cpus(Dtype::F16);
}

/// Halves its input, by a custom kernel.
struct Halves;

const HALF: CustomKernel = CustomKernel {
    name: "times",
    text: r#"
extern "C" __global__ void times(T* y, const T* x, long long count, float factor) {
    const long long at = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at < count) {
        y[at] = put(factor * get(x[at]));
    }
}"#,
    cpu: |writes, reads, numbers| {
        writes[0].iter_mut().zip(reads[0]).for_each(|(y, x)| *y = numbers[0] * x);
    },
};

impl Layer for Halves {
    fn tensors(&self) -> Vec<Tensor> {
        Vec::new()
    }

    fn custom_kernels(&self) -> Vec<CustomKernel> {
        vec![HALF]
    }

    fn saved_len(&self, _positions: usize, _save: Save, _dtype: Dtype) -> usize {
        0
    }

    fn forward(&self, k: &dyn Kernels, pass: &Forward<'_>) {
        let kernel = &HALF;
        let numbers = &[0.5][..];
        k.custom(&Custom { kernel, writes: &[pass.y], reads: &[pass.x], numbers });
    }

    fn backward(&self, k: &dyn Kernels, pass: &Backward<'_>) {
        let dx = pass.dx.unwrap_or_else(|| pass.scratch.take_like(pass.dy));
        let kernel = &HALF;
        let numbers = &[0.5][..];
        k.custom(&Custom { kernel, writes: &[dx], reads: &[pass.dy], numbers });
    }
}

/// Squares its input, by a custom kernel, with a derived backward.
struct Squares;

const SQUARE: CustomKernel = CustomKernel {
    name: "square",
    text: SQUARES,
    cpu: |writes, reads, numbers| {
        writes[0].iter_mut().zip(reads[0]).for_each(|(y, x)| *y = numbers[0] * x * x);
    },
};

const SQUARE_BACKWARD: CustomKernel = CustomKernel {
    name: "square_backward",
    text: SQUARES,
    cpu: |writes, reads, numbers| {
        let slopes = reads[0].iter().zip(reads[1]);
        writes[0].iter_mut().zip(slopes).for_each(|(dx, (dy, x))| *dx = 2.0 * numbers[0] * x * dy);
    },
};

const SQUARES: &str = r#"
extern "C" __global__ void square(T* y, const T* x, long long count, float factor) {
    const long long at = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at < count) {
        y[at] = put(factor * get(x[at]) * get(x[at]));
    }
}

extern "C" __global__ void square_backward(
        T* dx, const T* dy, const T* x, long long count, float factor) {
    const long long at = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at < count) {
        dx[at] = put(2.0f * factor * get(x[at]) * get(dy[at]));
    }
}"#;

impl Composed for Squares {
    fn tensors(&self) -> Vec<Tensor> {
        Vec::new()
    }

    fn index(&self) -> u32 {
        5
    }

    fn channels(&self) -> usize {
        24
    }

    fn custom_kernels(&self) -> Vec<CustomKernel> {
        vec![SQUARE, SQUARE_BACKWARD]
    }

    fn compose(&self, ops: &mut Operations<'_>, x: Value) -> Value {
        let dropped = ops.dropout(x, 0.1);
        let squared = ops.custom(&SQUARE, &SQUARE_BACKWARD, dropped, &[0.3]);
        ops.add(x, squared)
    }
}

#[test]
fn custom_kernels_run() {
    if !emulated::instead() {
        return;
    }
    let of = |kind, dtype| {
        let mut config = config(kind);
        config.device.dtype = dtype;
        let shape = crate::shape_of(&config).expect("a shape of ours");
        let stack: Vec<Box<dyn Layer>> = vec![
            Box::new(Stem { index: 1, shape }),
            Box::new(Halves),
            Box::new(Derived(Squares)),
            Box::new(TransformerBlock::new(3, 0, shape)),
            Box::new(Final::new(shape)),
        ];
        run_on(Trainer::builder(config.clone()).model(Model::of(shape, stack)), &config, 3)
    };
    let (cpu, _) = of(DeviceKind::Cpu, Dtype::F32).expect("a case of ours");
    for dtype in KINDS {
        let (cuda, _) = of(DeviceKind::Cuda, dtype).expect("a case of ours");
        close(&cuda, &cpu, dtype, "the CPU");
    }
}

#[test]
fn rates_are_measured() {
    if !emulated::instead() {
        return;
    }
    let driver = emulated::of(Dtype::F32);
    let rates = super::rates::measure(&driver, Dtype::F32, 1000, 8).expect("it is emulated");
    assert!(rates.product > 0.0 && rates.pageable.iter().all(|rate| *rate > 0.0));
}

#[test]
fn models_are_pytorchs() {
    if !emulated::instead() {
        return;
    }
    for name in [
        "tied",
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "gpt_oss",
        "qwen2_moe",
        "qwen3_moe-idle",
        "bert",
        "olmo2",
        "olmo2-grouped",
        "cohere-norms",
        "roberta-classes",
        "bert-value",
        "gpt2-classes",
        "opt",
        "rotary/phi3-partial",
        "rotary/llama-dynamic",
    ] {
        for of in KINDS {
            let (mut config, expected) = golden(name);
            config.device.dtype = of;
            if name.starts_with("rotary") {
                config.data.sequence_length = Some(24); // beyond the model's positions
            }
            let (found, _) = run(config, 2).expect("a case of ours");
            close(&found, &expected[..2], of, name);
        }
    }
}

#[test]
fn relay_is_resident_and_like_the_cpu() {
    if !emulated::instead() {
        return;
    }
    for (dtype, clip) in KINDS.into_iter().flat_map(|of| [(of, None), (of, Some(0.5))]) {
        let of = |kind, schedule, place| {
            let mut config = config(kind);
            if kind == DeviceKind::Cuda {
                config.device.dtype = dtype;
            }
            config.schedule.kind = schedule;
            config.stash.place = place;
            config.optimizer.clip_norm = clip;
            run(config, 3).expect("a case of ours")
        };
        let (relay, ends) = of(DeviceKind::Cuda, ScheduleKind::Relay, StashPlace::Host);
        let (resident, end) = of(DeviceKind::Cuda, ScheduleKind::Resident, StashPlace::Host);
        assert_eq!((&relay, &ends.digest), (&resident, &end.digest));
        let (near, end) = of(DeviceKind::Cuda, ScheduleKind::Relay, StashPlace::Auto);
        assert_eq!((&near, &end.digest), (&relay, &ends.digest));
        let is_less = |side: usize| end.moved[side] < ends.moved[side];
        assert!(is_less(0) && is_less(1), "some boundaries stay on the device");
        let (cpu, end) = of(DeviceKind::Cpu, ScheduleKind::Relay, StashPlace::Auto);
        close(&relay, &cpu, dtype, "the CPU");
        match dtype {
            Dtype::F32 => assert_eq!(ends.moved, end.moved),
            _ => assert!(ends.moved[0] < end.moved[0] * 6 / 10, "half, but for statistics"),
        }
    }
}

/// Two GPUs give the bits of one with as many groups, however the work is dealt.
#[test]
fn two_gpus_are_one() {
    if !emulated::instead() {
        return;
    }
    let folder = tempfile::tempdir().expect("a place for files");
    let ways: [&dyn Fn(&mut Config); 8] = [
        &|_| (),
        &|config| trained::keep(config, 1),
        &|config| config.schedule.kind = ScheduleKind::Resident,
        &|config| config.schedule.recompute = false.into(),
        &|config| config.schedule.kind = ScheduleKind::OneForwardOneBackward,
        &|config| config.parallel.deal = Deal::Sequences,
        &|config| {
            let sharded = Transfer::Sharded;
            (config.parallel.deal, config.parallel.transfer) = (Deal::Sequences, sharded);
        },
        &|config| {
            let folder = folder.path().join(config.device.dtype.to_string());
            (config.eps.tier, config.eps.path) = (EpsTier::File, Some(folder));
        },
    ];
    for dtype in KINDS {
        let of = |ordinals: Option<Vec<usize>>, way: &dyn Fn(&mut Config)| {
            let mut config = config(DeviceKind::Cuda);
            (config.step.batch, config.device.dtype) = (8, dtype);
            (config.parallel.groups, config.optimizer.clip_norm) = (2, Some(0.5));
            config.device.ordinals = ordinals;
            way(&mut config);
            let (steps, end) = run(config, 3).expect("a case of ours");
            (steps, end.digest)
        };
        let one = of(None, &|_| ());
        for way in ways {
            assert_eq!(of(Some(vec![0, 1]), way), one, "{dtype}");
        }
    }
}

/// Ranks, each with a GPU, give the bits of one with as many groups, with split masters, too.
#[test]
fn ranks_with_gpus_are_one() {
    if !emulated::instead() {
        return;
    }
    for (dtype, ranks) in KINDS.into_iter().flat_map(|dtype| [(dtype, 2), (dtype, 3)]) {
        let config = || {
            let mut config = config(DeviceKind::Cuda);
            (config.step.batch, config.device.dtype) = (8, dtype);
            (config.parallel.groups, config.optimizer.clip_norm) = (4, Some(0.5));
            config
        };
        let (steps, one) = run(config(), 3).expect("a case of ours");
        let on_rank = |fabric| {
            assert!(emulated::instead()); // of each thread
            let builder = Trainer::builder(config()).fabric(Arc::new(fabric));
            run_on(builder, &config(), 3).expect("a case of ours")
        };
        std::thread::scope(|scope| {
            let spawn = |fabric| scope.spawn(move || on_rank(fabric));
            let all: Vec<_> = crate::fabric::threads(ranks).into_iter().map(spawn).collect();
            for (found, end) in all.into_iter().map(|rank| rank.join().expect("no panic")) {
                assert_eq!((&found, &end.digest), (&steps, &one.digest));
            }
        });
    }
}

/// Greedy text is that of the goldens in f32; in bf16 it begins like it.
#[test]
fn text_goes_on() {
    if !emulated::instead() {
        return;
    }
    let runtime = emulated::runtime();
    for family in ["gpt2", "mistral", "opt", "qwen3", "qwen3_5_text"] {
        let folder =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/generate").join(family);
        let text = std::fs::read_to_string(folder.join("golden.json")).expect("it is committed");
        let golden: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        let lists = |key: &str| -> Vec<Vec<u32>> {
            serde_json::from_value(golden[key].clone()).expect("lists of tokens")
        };
        let prompts = lists("prompts");
        let greedy = lists("greedy");
        let prompt = prompts.iter().map(Vec::len).max().expect("a prompt");
        let most = 6;
        for of in KINDS {
            let mut config = Config::default();
            (config.device.kind, config.device.dtype) = (DeviceKind::Cuda, of);
            config.model.path = Some(folder.clone());
            config.step.micro_batch = 2;
            let room = Room { prompts: prompts.len(), prompt, tokens: prompt + most };
            let mut found = vec![Vec::new(); prompts.len()];
            runtime.block_on(async {
                let mut generator = Generator::start(config, room).await.expect("a case of ours");
                let each = |prompt: usize, token: u32, _| {
                    found[prompt].push(token);
                    Then::GoOn
                };
                let how = Sampling::default();
                generator.generate(&prompts, most, how, &[], each).await.expect("good prompts");
                generator.stop().await.expect("a clean end");
            });
            let alike = |(found, greedy): (&Vec<u32>, &Vec<u32>)| {
                found.iter().zip(greedy).take_while(|(found, greedy)| found == greedy).count()
            };
            let alike: Vec<usize> = found.iter().zip(&greedy).map(alike).collect();
            println!("{family} in {of}: {alike:?} of {most}");
            assert!(of != Dtype::F32 || alike.iter().all(|count| *count == most), "{family}");
            let all: usize = alike.iter().sum();
            assert!(2 * all >= most * prompts.len(), "{family} in {of}: {alike:?}");
        }
    }
}
