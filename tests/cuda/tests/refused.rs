//! Refusals of a driver or of its libraries: products, launches, memory.

use super::{KINDS, checks, checks_of, close, config, golden, run, run_on};
use crate::Trainer;
use crate::config::{DeviceKind, ScheduleKind};
use crate::data::Batches;
use crate::devices::cuda::batch_metadata::DeviceMetadata;
use crate::devices::cuda::driver::{Alignment, ProductKey, Stream};
use crate::devices::cuda::emulated::{self, Limits};
use crate::devices::cuda::packed::PackBuffers;
use crate::devices::cuda::{Cuda, overhead_with};
use crate::devices::{Device, KernelGroup};
use crate::kernels::{BatchMetadata, Document, Rows};
use crate::tensor::{Dtype, View};

/// Rows or columns that are one, or odd and of 16 bits.
fn is_unusual(key: &ProductKey) -> bool {
    let [rows, inner, columns] = key.sizes;
    let is_odd = |size: usize| size % 2 == 1 && key.dtypes[0] != Dtype::F32;
    rows == 1 || columns == 1 || [rows, inner, columns].into_iter().any(is_odd)
}

/// The products that a library may have no algorithm for: from a few to all.
const REFUSALS: [fn(&ProductKey, Alignment) -> bool; 3] = [
    |key, _| key.has_bias,
    |key, relies_on| is_unusual(key) && relies_on == Alignment::OfRows,
    |_, _| true,
];

#[test]
fn products_that_the_library_refuses_are_computed() {
    if !emulated::instead() {
        return;
    }
    for dtype in KINDS {
        let of = |refuse, schedule| {
            emulated::limit(Limits { refuse, ..Limits::default() });
            let mut config = config(DeviceKind::Cuda);
            (config.device.dtype, config.schedule.kind) = (dtype, schedule);
            (config.model.hidden, config.model.heads) = (Some(26), Some(2));
            run(config, 2).expect("a case of ours")
        };
        let (steps, _) = of(None, ScheduleKind::Relay);
        for refuse in REFUSALS {
            let (relay, end) = of(Some(refuse), ScheduleKind::Relay);
            let (resident, resident_end) = of(Some(refuse), ScheduleKind::Resident);
            assert_eq!((&relay, end.digest), (&resident, resident_end.digest));
            close(&relay, &steps, dtype, "the library");
            let all = checks(dtype, KernelGroup::Losses).expect("it is emulated");
            assert!(all.iter().all(|check| check.problem().is_none()), "{all:?}");
        }
    }
}

/// Each is reported once, with its sizes.
#[test]
fn slower_products_are_reported() {
    if !emulated::instead() {
        return;
    }
    emulated::limit(Limits { refuse: Some(REFUSALS[0]), ..Limits::default() });
    let config = config(DeviceKind::Cuda);
    emulated::runtime().block_on(async {
        let mut batches = Batches::open(&config).expect("data of ours");
        let mut trainer = Trainer::start(config).await.expect("a case of ours");
        trainer.step(batches.next().await.expect("a batch")).await.expect("nothing fails");
        let told = trainer.take_warnings();
        let says = "by (24, 72) to f32: cuBLASLt has no algorithm with a bias, which is added";
        assert!(told.iter().any(|one| one.contains(says)), "{told:?}");
        assert!(trainer.take_warnings().is_empty());
        trainer.stop().await.expect("a clean end");
    });
}

/// A launch that is refused is reported, and the other kernels are checked; a device that no longer
/// answers ends the check.
#[test]
fn a_check_goes_on_as_long_as_the_device_answers() {
    if !emulated::instead() {
        return;
    }
    emulated::limit(Limits { fails: Some("gate"), ..Limits::default() });
    let all = checks(Dtype::F32, KernelGroup::Rows).expect("the device answers");
    assert!(all.len() > 10);
    for check in all {
        let problem = check.problem().unwrap_or_default();
        assert_eq!(check.kernel == "gate", problem.contains("too many resources"), "{problem}");
    }
    emulated::limit(Limits::default());
    emulated::fail_after(200);
    let says = checks(Dtype::F32, KernelGroup::Rows).expect_err("it is gone").to_string();
    emulated::fail_after(i64::MAX);
    assert!(says.starts_with("the GPU does not answer since "), "{says}");
}

/// Memory that cannot be pinned changes no bit, and is reported. What is pinned is pinned in parts.
#[test]
fn memory_that_is_not_pinned_is_reported() {
    if !emulated::instead() {
        return;
    }
    let of = |pinned| {
        emulated::limit(Limits { pinned, ..Limits::default() });
        let mut config = config(DeviceKind::Cuda);
        config.model.hidden = Some(96);
        emulated::runtime().block_on(async {
            let mut batches = Batches::open(&config).expect("data of ours");
            let mut trainer = Trainer::start(config).await.expect("a case of ours");
            trainer.step(batches.next().await.expect("a batch")).await.expect("nothing fails");
            let told = trainer.take_warnings();
            let digest = trainer.digest().await.expect("it is in memory");
            let summary = trainer.stop().await.expect("a clean end");
            (digest, summary.pinned_bytes, told)
        })
    };
    let (digest, all, told) = of(None);
    assert!(all > 1_000_000 && told.is_empty(), "{all} {told:?}");
    let (same, some, told) = of(Some(200_000));
    assert!(digest == same && (1..=200_000).contains(&some));
    assert_eq!(told.len(), 1);
    assert!(told[0].contains("could not be pinned (out of memory that"), "{told:?}");
    let (same, none, _) = of(Some(0));
    assert_eq!((same, none), (digest, 0));
}

/// Metadata is sent when it changes, from pinned memory or other; each kernel reads that of its own
/// micro-batch, though more are on their way.
#[test]
fn metadata_is_sent_when_it_changes() {
    if !emulated::instead() {
        return;
    }
    let documents = [Document { from: 0, to: 3 }; 12];
    let kinds = [1; 12];
    let of = |second: &'static [usize], has_documents: bool| {
        let rows = second[2] - second[0];
        let documents = &documents[..if has_documents { rows } else { 0 }];
        let kinds = &kinds[..rows];
        BatchMetadata { starts: second, kinds, documents, cached: &[], dropout_key: None }
    };
    let batches = [
        of(&[2, 5, 7], false),
        of(&[2, 5, 7], false),
        of(&[2, 5, 7], true),
        of(&[0, 5, 7], false),
        of(&[0, 5, 12], true),
        of(&[0, 6, 12], false),
    ];
    for pinned in [None, Some(0)] {
        emulated::limit(Limits { pinned, ..Limits::default() });
        let driver = emulated::of(Dtype::F32);
        let none = PackBuffers::default();
        let most = overhead_with(none, Rows { sequences: 2, positions: 6 });
        let device = Cuda::new(driver, 2 * most, View::floats(0, most), none);
        let device = device.expect("it is emulated");
        let bytes = device.metadata.len() * 4;
        let place = |nth: usize| View::floats(most + nth * 100, device.metadata.len());
        for (nth, batch) in batches.iter().enumerate() {
            device.compute(batch, &|_| 0).expect("nothing fails");
            let from = device.address(device.metadata);
            let to = device.address(place(nth));
            device.driver.copy(Stream::Compute, to, from, bytes).expect("nothing fails");
        }
        assert_eq!(device.current.lock().expect("nobody panicked").changes, batches.len() - 1);
        for (nth, batch) in batches.iter().enumerate() {
            let mut words = Vec::new();
            DeviceMetadata::write(batch, &mut words);
            assert_eq!(words.len(), 5 + batch.rows().div_ceil(4) + 2 * batch.documents.len());
            let there = device.read_back(place(nth)).expect("nothing fails");
            assert_eq!(bytemuck::cast_slice::<f32, u32>(&there)[..words.len()], words);
        }
    }
}

#[test]
fn a_device_with_too_little_memory_is_refused() {
    if !emulated::instead() {
        return;
    }
    emulated::limit(Limits { free: Some(1000), ..Limits::default() });
    let says = run(config(DeviceKind::Cuda), 1).err().expect("it is refused").to_string();
    assert!(says.contains("bytes of the device's memory, of which 1000 are free"), "{says}");
}

fn attention_is_the_cpus(dtype: Dtype) {
    let mut config = config(DeviceKind::Cuda);
    config.device.dtype = dtype;
    let all = checks_of(&config, KernelGroup::Attention).expect("it is emulated");
    assert!(all.iter().all(|check| check.problem().is_none()), "{all:?}");
}

/// Older GPUs run f16 on tensor cores: a V100 by quad pairs, a T4 with little shared memory a
/// block.
#[test]
fn older_gpus_run_f16() {
    if !emulated::instead() {
        return;
    }
    for architecture in [75, 70] {
        emulated::limit(Limits { architecture: Some(architecture), ..Limits::default() });
        attention_is_the_cpus(Dtype::F16);
    }
    // A V100 trains.
    let of = |kind, schedule| {
        let mut config = config(kind);
        (config.device.dtype, config.schedule.kind) = (Dtype::F16, schedule);
        run(config, 3).expect("a case of ours")
    };
    let (relay, end) = of(DeviceKind::Cuda, ScheduleKind::Relay);
    let (resident, resident_end) = of(DeviceKind::Cuda, ScheduleKind::Resident);
    assert_eq!((&relay, end.digest), (&resident, resident_end.digest));
    let (cpu, _) = of(DeviceKind::Cpu, ScheduleKind::Relay);
    close(&relay, &cpu, Dtype::F16, "the CPU");
}

/// Heads of the usual sizes, over more positions than a tile has.
#[test]
fn heads_of_64_and_128_are_like_the_cpus() {
    if !emulated::instead() {
        return;
    }
    let of = |kind, dtype, schedule, heads| {
        let mut config = config(kind);
        (config.device.dtype, config.schedule.kind) = (dtype, schedule);
        (config.model.hidden, config.model.heads) = (Some(128), Some(heads));
        (config.model.positions, config.data.sequence_length) = (Some(140), Some(140));
        (config.model.layers, config.step.batch) = (Some(1), 2);
        run_on(Trainer::builder(config.clone()), &config, 1).expect("a case of ours")
    };
    let cases = [(Dtype::F32, 1), (Dtype::Bf16, 1), (Dtype::F16, 1), (Dtype::F16, 2)];
    let cpu = [1, 2].map(|heads| of(DeviceKind::Cpu, Dtype::F32, ScheduleKind::Relay, heads).0);
    for (dtype, heads) in cases {
        let on_gpu = |schedule| of(DeviceKind::Cuda, dtype, schedule, heads);
        let (relay, end) = on_gpu(ScheduleKind::Relay);
        let (resident, resident_end) = on_gpu(ScheduleKind::Resident);
        assert_eq!((&relay, end.digest), (&resident, resident_end.digest));
        close(&relay, &cpu[heads - 1], dtype, "the CPU");
    }
}

/// Heads of more than 256 channels take kernels of their own.
#[test]
fn wide_heads_are_like_the_cpus() {
    if !emulated::instead() {
        return;
    }
    let of = |kind, dtype| {
        let mut config = config(kind);
        config.device.dtype = dtype;
        (config.model.hidden, config.model.heads) = (Some(260), Some(1));
        (config.model.positions, config.data.sequence_length) = (Some(70), Some(70));
        (config.model.layers, config.step.batch) = (Some(1), 2);
        run_on(Trainer::builder(config.clone()), &config, 1).expect("a case of ours").0
    };
    let cpu = of(DeviceKind::Cpu, Dtype::F32);
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
        close(&of(DeviceKind::Cuda, dtype), &cpu, dtype, "the CPU");
    }
}

/// Whichever call of the driver fails, the run ends, and says so.
#[test]
fn a_driver_that_fails_anywhere_ends_the_run() {
    if !emulated::instead() {
        return;
    }
    const MANY: i64 = 1 << 40;
    emulated::fail_after(MANY);
    run(config(DeviceKind::Cuda), 2).expect("a case of ours");
    let calls = emulated::calls(MANY);
    assert!(calls > 500, "{calls}");
    let mut after = 0;
    while after < calls - 3 {
        emulated::fail_after(after);
        match run(config(DeviceKind::Cuda), 2) {
            Err(error) => assert!(error.to_string().contains("told to fail"), "{after}: {error}"),
            // The number of events that are waited for depends on which thread is first.
            Ok(_) => assert!(emulated::calls(after) <= after, "{after}"),
        }
        after += 1 + after / 9;
    }
    emulated::fail_after(MANY);
}

#[test]
fn a_limit_of_scores_is_refused() {
    if !emulated::instead() {
        return;
    }
    let (config, _) = golden("gemma2");
    let refused = run(config, 1).err().expect("it is not built").to_string();
    assert!(refused.contains("attn_logit_softcapping"), "{refused}");
}
