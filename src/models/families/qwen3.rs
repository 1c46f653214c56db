//! Qwen3, dense models (Yang et al. 2025): Llama with norms of the queries and keys of each head,
//! and with a head size that does not follow from the hidden size.

use serde_json::Value;

use super::Names;
use super::llama::{SHARED, read_shared, write_shared};
use super::qwen2::{window, write_window};
use super::read::{Keys, flag, size_or_none};
use crate::kernels::QkNorm;
use crate::models::Shape;

pub(super) static NAMES: Names = Names {
    family: "qwen3",
    qk_norm: ["model.layers.{}.self_attn.q_norm", "model.layers.{}.self_attn.k_norm"],
    read,
    write,
    ..SHARED
};

fn read(keys: &Keys) -> Result<Shape, String> {
    let bias = flag(keys, "attention_bias", false)?;
    let window = window(keys)?;
    let biases = [bias, bias, false];
    let head_size = size_or_none(keys, "head_dim")?.unwrap_or(128); // transformers' default
    let shared = read_shared(keys, &NAMES, 10_000.0)?;
    Ok(Shape { window, biases, head_size, qk_norm: Some(QkNorm::ByHead), ..shared })
}

fn write(shape: &Shape) -> Value {
    let mut config = write_shared(shape, "Qwen3");
    config["attention_bias"] = shape.biases[0].into();
    write_window(shape, &mut config);
    config
}
