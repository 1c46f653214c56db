//! What is trained, and by which rule, on emulated GPUs.

use super::{KINDS, close, config, run};
use crate::config::{DeviceKind, LoraConfig, OptimizerKind, ScheduleKind, StashPlace, TrainConfig};
use crate::devices::cuda::emulated;
use crate::models::Base;
use crate::tensor::Dtype;

/// Adapters, or some tensors: relay and resident end with the same bits, close to the CPU's.
#[test]
fn parts_of_a_model_are_trained() {
    if !emulated::instead() {
        return;
    }
    let lora = LoraConfig { rank: Some(3), dropout: 0.1, ..LoraConfig::default() };
    let adapters = |base| TrainConfig { lora: Some(lora.clone()), base, ..TrainConfig::default() };
    let some = TrainConfig { only: vec!["c_attn".into(), "bias".into()], ..TrainConfig::default() };
    for (train, rule) in [
        (adapters(Base::AsIs), OptimizerKind::Adamw),
        (adapters(Base::Nf4), OptimizerKind::Adamw),
        (adapters(Base::Int8), OptimizerKind::AdamwBf16),
        (TrainConfig { base: Base::Bf16, ..some.clone() }, OptimizerKind::Muon),
        (some, OptimizerKind::Lion),
    ] {
        let of = |kind, dtype, schedule| {
            let mut config = config(kind);
            config.device.dtype = dtype;
            config.train = train.clone();
            config.optimizer.kind = rule;
            config.schedule.kind = schedule;
            if kind == DeviceKind::Cuda {
                config.stash.place = StashPlace::Host;
            }
            run(config, 3).expect("a case of ours")
        };
        let (cpu, _) = of(DeviceKind::Cpu, Dtype::F32, ScheduleKind::Relay);
        for dtype in KINDS {
            let (steps, end) = of(DeviceKind::Cuda, dtype, ScheduleKind::Relay);
            let (resident, resident_end) = of(DeviceKind::Cuda, dtype, ScheduleKind::Resident);
            assert_eq!((&steps, end.weights_digest), (&resident, resident_end.weights_digest));
            close(&steps, &cpu, dtype, "the CPU");
        }
    }
}
