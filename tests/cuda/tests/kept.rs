//! Layers that keep their activations, and boundaries that stay, on emulated GPUs: none, some and
//! all layers in every schedule, on one to three GPUs, with adapters and in 16 bits, give the bits
//! of recomputation.

use super::trained::keep;
use super::{KINDS, config, run};
use crate::Config;
use crate::config::{DeviceKind, EpsTier, LoraConfig, Recompute, ScheduleKind, TrainConfig};
use crate::devices::cuda::emulated;
use crate::tensor::Dtype;

const SCHEDULES: [ScheduleKind; 5] = [
    ScheduleKind::Relay,
    ScheduleKind::Resident,
    ScheduleKind::Gpipe,
    ScheduleKind::OneForwardOneBackward,
    ScheduleKind::Interleaved,
];

/// The losses, norms and weights of two steps. `halves`: of the room for all kept layers; `None`:
/// everything is recomputed.
fn bits(
    dtype: Dtype,
    train: &TrainConfig,
    kind: ScheduleKind,
    devices: usize,
    halves: Option<u64>,
) -> (Vec<[f64; 2]>, String) {
    let mut config = config(DeviceKind::Cuda);
    config.device.dtype = dtype;
    config.model.layers = Some(6);
    (config.step.batch, config.step.micro_batch) = (6, 2);
    config.train = train.clone();
    config.schedule.kind = kind;
    config.device.ordinals = Some((0..devices).collect());
    config.schedule.recompute = true.into();
    halves.into_iter().for_each(|halves| keep(&mut config, halves));
    let (steps, end) = run(config, 2).expect("a case of ours");
    (steps, end.digest)
}

#[test]
fn kept_layers_change_no_bits_in_any_schedule() {
    if !emulated::instead() {
        return;
    }
    let whole = std::env::var("L2L_TESTS").as_deref() == Ok("whole");
    let lora = Some(LoraConfig { rank: Some(3), ..LoraConfig::default() });
    let adapters = TrainConfig { lora, ..TrainConfig::default() };
    let mut number = 0;
    for (dtype, train) in
        KINDS.into_iter().flat_map(|of| [(of, TrainConfig::default()), (of, adapters.clone())])
    {
        let expected = bits(dtype, &train, ScheduleKind::Resident, 1, None);
        for kind in SCHEDULES {
            for (devices, halves) in (1..=3).flat_map(|count| [(count, 0), (count, 1), (count, 2)])
            {
                // Without the whole search, each case of another way.
                number += 1;
                if !whole && number % 4 != 0 {
                    continue;
                }
                let found = bits(dtype, &train, kind, devices, Some(halves));
                let what = (dtype, kind, devices, halves);
                assert_eq!(found, expected, "{what:?}");
            }
        }
    }
}

/// In bf16, neither the choice of saved activations nor the place of blocks changes a bit.
#[test]
fn in_bf16_ways_are_equal() {
    if !emulated::instead() {
        return;
    }
    let folder = tempfile::tempdir().expect("a place for files");
    let ways: [&dyn Fn(&mut Config); 7] = [
        &|_| (),
        &|config| keep(config, 1),
        &|config| keep(config, 2),
        &|config| config.schedule.recompute = false.into(),
        &|config| config.schedule.recompute = Recompute::ATTENTION,
        &|config| config.channels.weights = 1,
        &|config| {
            (config.eps.tier, config.eps.path) = (EpsTier::File, Some(folder.path().into()));
        },
    ];
    let ends = ways.map(|way| {
        let mut config = config(DeviceKind::Cuda);
        config.device.dtype = Dtype::Bf16;
        way(&mut config);
        let (steps, end) = run(config, 3).expect("a case of ours");
        (steps, end.digest)
    });
    assert!(ends.iter().all(|end| *end == ends[0]), "{ends:?}");
}
