//! Trainings whose gradients or activations cross the link in fewer bits.

use super::{KINDS, close, config, golden, run, trained};
use crate::Config;
use crate::config::{DeviceKind, GradientDtype, ScheduleKind, StashDtype, StashPlace};
use crate::devices::cuda::emulated;
use crate::tensor::Dtype;

/// Gradients in bf16, a stash in int8, and in f32 a stash in bf16: relay, resident and kept layers
/// end with the same bits, close to the CPU's, and less is moved.
#[test]
fn what_crosses_the_link_is_packed() {
    if !emulated::instead() {
        return;
    }
    let gradients: &dyn Fn(&mut Config) = &|of| of.device.gradient_dtype = GradientDtype::Bf16;
    let int8: &dyn Fn(&mut Config) = &|of| {
        (of.stash.dtype, of.stash.block_size) = (StashDtype::Int8, 8);
    };
    let bf16: &dyn Fn(&mut Config) = &|of| of.stash.dtype = StashDtype::Bf16;
    for dtype in KINDS {
        let of = |kind, change: &dyn Fn(&mut Config), way: &dyn Fn(&mut Config)| {
            let mut config = config(kind);
            (config.device.dtype, config.stash.place) = (dtype, StashPlace::Host);
            (config.step.batch, config.parallel.groups) = (8, 2);
            change(&mut config);
            way(&mut config);
            run(config, 3).expect("a case of ours")
        };
        let (_, exact) = of(DeviceKind::Cuda, &|_| (), &|_| ());
        for (name, change) in [("gradients", gradients), ("int8", int8), ("bf16", bf16)] {
            let (steps, end) = of(DeviceKind::Cuda, change, &|_| ());
            // A stash in bf16 is that of a device in bf16.
            let is_exact = dtype == Dtype::Bf16 && name == "bf16";
            assert_eq!(end.digest == exact.digest, is_exact, "{name}");
            assert_eq!(end.moved[1] == exact.moved[1], is_exact, "{name}");
            assert!(end.moved[1] <= exact.moved[1], "{name}");
            let ways: [&dyn Fn(&mut Config); 3] = [
                &|of| trained::keep(of, 1),
                &|of| of.schedule.kind = ScheduleKind::Resident,
                &|of| of.device.ordinals = Some(vec![0, 1]),
            ];
            for way in ways {
                let (again, ended) = of(DeviceKind::Cuda, change, way);
                assert_eq!((&again, ended.digest), (&steps, end.digest.clone()));
            }
            let (cpu, _) = of(DeviceKind::Cpu, change, &|_| ());
            close(&steps, &cpu, dtype, "the CPU");
        }
    }
}

/// The positive inputs of a ReLU alone are saved: the bits of all of them, whether all have room or
/// some are recomputed.
#[test]
fn positive_inputs_are_saved() {
    if !emulated::instead() {
        return;
    }
    for dtype in KINDS {
        let of = |density: Option<f64>| {
            let (mut config, _) = golden("opt");
            config.device.dtype = dtype;
            config.schedule.recompute = false.into();
            config.stash.relu_density = density;
            let (steps, end) = run(config, 2).expect("a case of ours");
            (steps, end.digest, end.moved[1])
        };
        let (steps, digest, all) = of(None);
        let moved = [0.85, 0.6, 0.02].map(|density| {
            let (packed, end, moved) = of(Some(density));
            assert_eq!((&packed, &end), (&steps, &digest), "{density} in {dtype}");
            moved
        });
        assert!(moved[2] < moved[1] && moved[1] < moved[0].min(all), "{moved:?} of {all}");
    }
}
