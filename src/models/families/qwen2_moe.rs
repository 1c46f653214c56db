//! Qwen2 with experts (Yang et al. 2024; Qwen1.5-MoE): a shared expert, which all rows use, stands
//! beside the experts that a router chooses.

use serde_json::Value;

use super::Names;
use super::llama::{read_shared, write_shared};
use super::qwen3_moe::{SPARSE, read_sparse, used_window, write_sparse, write_used_window};
use super::read::{
    Keys, flag, layer_types, only, size, size_or_none, window_by_kinds, write_layer_types,
};
use crate::models::{Experts, Shape, Window};

pub(super) static NAMES: Names = Names { family: "qwen2_moe", read, write, ..WITH_SHARED };

/// The names that Qwen2, Qwen3.5 and Qwen3-Next with experts share.
pub(super) const WITH_SHARED: Names = Names {
    shared: [
        "model.layers.{}.mlp.shared_expert.gate_proj",
        "model.layers.{}.mlp.shared_expert.up_proj",
        "model.layers.{}.mlp.shared_expert.down_proj",
    ],
    shared_gate: "model.layers.{}.mlp.shared_expert_gate",
    ..SPARSE
};

/// The window of the blocks that slide by `layer_types`; without that key, of every other one of
/// the first `max_window_layers`, as in transformers.
fn window(keys: &Keys) -> Result<Option<Window>, String> {
    let kinds = layer_types(keys)?;
    let Some(positions) = used_window(keys)? else {
        if kinds.is_some_and(|slides| slides.contains(&true)) {
            return Err("layer_types has \"sliding_attention\", and use_sliding_window is false: \
                        set it to true, or each kind to \"full_attention\""
                .into());
        }
        return Ok(None);
    };
    let (key, slides) = match kinds {
        Some(slides) => ("layer_types", slides),
        None => {
            let below = size_or_none(keys, "max_window_layers")?.unwrap_or(28);
            let slides = |block: usize| block.is_multiple_of(2) && block < below;
            let layers = size(keys, "num_hidden_layers")?;
            ("max_window_layers", (0..layers).map(slides).collect())
        }
    };
    if !slides.contains(&true) {
        return Ok(None);
    }
    window_by_kinds(key, &slides, positions).map(Some)
}

/// The key with the channels of the shared expert.
pub(super) const SHARED_CHANNELS: &str = "shared_expert_intermediate_size";

/// The channels of the shared expert.
pub(super) fn shared_channels(keys: &Keys) -> Result<usize, String> {
    match size(keys, SHARED_CHANNELS)? {
        0 => Err(format!("{SHARED_CHANNELS} is 0: it must be at least 1")),
        channels => Ok(channels),
    }
}

fn read(keys: &Keys) -> Result<Shape, String> {
    only(keys, "attention_bias", false)?;
    let experts = Some(Experts { shared: shared_channels(keys)?, ..read_sparse(keys, false)? });
    let biases = [flag(keys, "qkv_bias", true)?, false, false];
    let window = window(keys)?;
    Ok(Shape { biases, experts, window, ..read_shared(keys, &NAMES, 10_000.0)? })
}

fn write(shape: &Shape) -> Value {
    let mut config = write_shared(shape, "Qwen2Moe");
    write_sparse(shape, &mut config);
    write_used_window(shape, &mut config);
    write_layer_types(shape, &mut config);
    config["qkv_bias"] = shape.biases[0].into();
    config[SHARED_CHANNELS] = shape.experts.map_or(0, |experts| experts.shared).into();
    config
}
