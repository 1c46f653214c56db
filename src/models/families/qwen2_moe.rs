//! Qwen2 with experts (Yang et al. 2024; Qwen1.5-MoE): a shared expert, which all rows use, stands
//! beside the experts that a router chooses.

use serde_json::Value;

use super::Names;
use super::llama::{read_shared, write_shared};
use super::qwen3_moe::{SPARSE, read_sparse, write_sparse};
use super::read::{Keys, flag, layer_types, only, size};
use crate::models::{Experts, Shape};

pub(super) static NAMES: Names = Names {
    family: "qwen2_moe",
    shared: [
        "model.layers.{}.mlp.shared_expert.gate_proj",
        "model.layers.{}.mlp.shared_expert.up_proj",
        "model.layers.{}.mlp.shared_expert.down_proj",
    ],
    shared_gate: "model.layers.{}.mlp.shared_expert_gate",
    read,
    write,
    ..SPARSE
};

fn read(keys: &Keys) -> Result<Shape, String> {
    only(keys, "attention_bias", false)?;
    if layer_types(keys)?.is_some_and(|slides| slides.contains(&true)) {
        return Err(
            "layer_types has \"sliding_attention\": only \"full_attention\" is built".into()
        );
    }
    let shared = size(keys, "shared_expert_intermediate_size")?;
    if shared == 0 {
        return Err("shared_expert_intermediate_size is 0: it must be at least 1".into());
    }
    let experts = Some(Experts { shared, ..read_sparse(keys)? });
    let biases = [flag(keys, "qkv_bias", true)?, false, false];
    Ok(Shape { biases, experts, ..read_shared(keys, &NAMES, 10_000.0)? })
}

fn write(shape: &Shape) -> Value {
    let mut config = write_shared(shape, "Qwen2Moe");
    write_sparse(shape, &mut config);
    config["qkv_bias"] = shape.biases[0].into();
    config["shared_expert_intermediate_size"] =
        shape.experts.map_or(0, |experts| experts.shared).into();
    config
}
