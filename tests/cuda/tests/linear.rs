//! Linear attention and gates of attention's output: goldens, long sequences in chunks, and two
//! GPUs.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::{KINDS, close, golden, run};
use crate::Config;
use crate::config::{DeviceKind, ScheduleKind};
use crate::devices::cuda::emulated;
use crate::tensor::Dtype;

/// Each in a schedule with layers that come and go, and with all layers on the device.
#[test]
fn models_with_linear_attention_are_pytorchs() {
    if !emulated::instead() {
        return;
    }
    for name in ["qwen3_5_text", "qwen3_5_text-tied", "qwen3_5_moe_text", "qwen3_next"] {
        for of in KINDS {
            let (mut config, expected) = golden(name);
            config.device.dtype = of;
            let mut resident = config.clone();
            resident.schedule.kind = ScheduleKind::Resident;
            let (found, end) = run(config, 2).expect("a case of ours");
            close(&found, &expected[..2], of, name);
            let (walked, of_walk) = run(resident, 2).expect("a case of ours");
            assert_eq!((walked, of_walk.digest), (found, end.digest), "{name} in {of}");
        }
    }
}

/// The golden's model with room for more positions, on random tokens.
fn long(folder: &Path, kind: DeviceKind, of: Dtype) -> Config {
    let (mut config, _) = golden("qwen3_5_text");
    let source = config.model.path.take().expect("a case has one");
    let text = fs::read_to_string(source.join("config.json")).expect("it is committed");
    let mut model: Value = serde_json::from_str(&text).expect("it is JSON");
    model["max_position_embeddings"] = json!(400);
    fs::write(folder.join("config.json"), model.to_string()).expect("a directory of ours");
    let weights = "model.safetensors";
    fs::copy(source.join(weights), folder.join(weights)).expect("a directory of ours");
    config.model.path = Some(folder.into());
    config.device.kind = kind;
    config.device.dtype = of;
    config.data.train = "random".into();
    config.data.sequence_length = Some(300);
    (config.step.batch, config.step.micro_batch) = (2, 1);
    config.optimizer.learning_rate = 1e-4;
    config
}

/// States pass from chunk to chunk, and their gradients back, close to the CPU's numbers and to
/// those of whole sequences, over two segments of the backward.
#[test]
fn states_pass_from_chunk_to_chunk() {
    if !emulated::instead() {
        return;
    }
    let folder = tempfile::tempdir().expect("a place for files");
    for dtype in KINDS {
        let of = |kind, chunk, way: &dyn Fn(&mut Config)| {
            let mut config = long(folder.path(), kind, dtype);
            config.step.chunk_positions = chunk;
            way(&mut config);
            let (steps, end) = run(config, 1).expect("a case of ours");
            (steps, end.digest)
        };
        let relay = of(DeviceKind::Cuda, 128, &|_| ());
        let ways: [&dyn Fn(&mut Config); 3] = [
            &|of| of.schedule.kind = ScheduleKind::Resident,
            &|of| of.schedule.recompute = false.into(),
            &|of| of.device.ordinals = Some(vec![0, 1]),
        ];
        for way in ways {
            assert_eq!(of(DeviceKind::Cuda, 128, way), relay, "in {dtype}");
        }
        let whole = of(DeviceKind::Cuda, 384, &|_| ());
        close(&relay.0, &whole.0, dtype, "whole sequences");
        close(&relay.0, &of(DeviceKind::Cpu, 128, &|_| ()).0, dtype, "the CPU");
    }
}
