//! Mixtral (Jiang et al. 2024): Llama with experts in each block, and with a sliding window in some
//! early checkpoints.

use serde_json::Value;

use super::Names;
use super::experts::{read_experts, write_experts};
use super::llama::{SHARED, read_shared, write_shared};
use super::read::{Keys, number, only, size_or_none};
use crate::models::{Shape, Window};

pub(super) static NAMES: Names = Names {
    family: "mixtral",
    router: "model.layers.{}.block_sparse_moe.gate",
    expert: [
        "model.layers.{}.block_sparse_moe.experts.{}.w1",
        "model.layers.{}.block_sparse_moe.experts.{}.w3",
        "model.layers.{}.block_sparse_moe.experts.{}.w2",
    ],
    read,
    write,
    ..SHARED
};

/// The key with the channels of an expert.
const INTERMEDIATE: &str = "intermediate_size";

fn read(keys: &Keys) -> Result<Shape, String> {
    only(keys, "attention_bias", false)?;
    // Without the key there is no window: that is transformers' default, unlike Mistral's.
    let window = size_or_none(keys, "sliding_window")?.map(Window::of_all);
    let experts = Some(read_experts(keys, INTERMEDIATE)?);
    let norm_epsilon = number(keys, "rms_norm_eps", 1e-5)?;
    let shared = read_shared(keys, &NAMES, 1_000_000.0)?;
    Ok(Shape { window, experts, norm_epsilon, ..shared })
}

fn write(shape: &Shape) -> Value {
    let mut config = write_shared(shape, "Mixtral");
    config["sliding_window"] = shape.window.map(|window| window.positions).into();
    if let Some(experts) = &shape.experts {
        write_experts(experts, INTERMEDIATE, &mut config);
    }
    config
}
