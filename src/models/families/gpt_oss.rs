//! gpt-oss (OpenAI 2025): Llama with experts in each block, sinks and biases in attention, a
//! sliding window in every other block, and a gate that is clamped.
//!
//! Files have one tensor for the experts of a block, whose matrices are (inputs, outputs), with
//! gates and up projections in turn. Blocks hold each expert's range of it as it is, so files are
//! read and written as they are.

use serde_json::{Value, json};

use super::Names;
use super::experts::{read_experts, write_experts};
use super::llama::{SHARED, read_shared, write_shared};
use super::read::{
    Keys, flag, given, number, only, size_or_none, window_of_most, write_layer_types, wrong,
};
use crate::kernels::ClampedGate;
use crate::models::{Experts, Shape};

pub(super) static NAMES: Names = Names {
    family: "gpt_oss",
    router: "model.layers.{}.mlp.router",
    stacked: &["model.layers.{}.mlp.experts.gate_up_proj", "model.layers.{}.mlp.experts.down_proj"],
    sinks: "model.layers.{}.self_attn.sinks",
    read,
    write,
    ..SHARED
};

/// The key with the channels of an expert.
const INTERMEDIATE: &str = "intermediate_size";

fn read(keys: &Keys) -> Result<Shape, String> {
    only(keys, "hidden_act", "silu")?;
    let mut keys = keys.clone();
    let is_given = |key| given(&keys, key).is_some();
    if !is_given("rope_parameters") && !is_given("rope_scaling") {
        // transformers' default of this family.
        let yarn = json!({
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": false, "original_max_position_embeddings": 4096,
        });
        keys.insert("rope_parameters".into(), yarn);
    }
    let keys = &keys;
    let experts = Experts { router_bias: true, ..read_experts(keys, INTERMEDIATE)? };
    let positions = match keys.contains_key("sliding_window") {
        true => size_or_none(keys, "sliding_window")?,
        false => Some(128),
    };
    let bias = flag(keys, "attention_bias", true)?;
    let shared = read_shared(keys, &NAMES, 150_000.0)?;
    Ok(Shape {
        head_size: if keys.contains_key("head_dim") { shared.head_size } else { 64 },
        window: positions.map(|positions| window_of_most(keys, positions, 2)).transpose()?,
        experts: Some(experts),
        norm_epsilon: number(keys, "rms_norm_eps", 1e-5)?,
        sinks: true,
        biases: [bias, bias, true],
        clamped: Some(ClampedGate {
            alpha: number(keys, "swiglu_alpha", 1.702)?,
            limit: limit(keys)?,
        }),
        ..shared
    })
}

/// The limit of gates and up projections.
fn limit(keys: &Keys) -> Result<f32, String> {
    const LIMIT: &str = "swiglu_limit";
    let limit = number(keys, LIMIT, 7.0)?;
    if limit > 0.0 { Ok(limit) } else { Err(wrong(LIMIT, &limit.into(), "above 0")) }
}

fn write(shape: &Shape) -> Value {
    let mut config = write_shared(shape, "GptOss");
    config["attention_bias"] = shape.biases[0].into();
    config["sliding_window"] = shape.window.map(|window| window.positions).into();
    write_layer_types(shape, &mut config);
    if let Some(experts) = &shape.experts {
        write_experts(experts, INTERMEDIATE, &mut config);
    }
    if let Some(ClampedGate { alpha, limit }) = shape.clamped {
        config["swiglu_alpha"] = alpha.into();
        config["swiglu_limit"] = limit.into();
    }
    config
}
