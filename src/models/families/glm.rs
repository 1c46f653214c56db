//! GLM-4-9B of 2024 (GLM Team 2024): Llama whose gate and up projection are one tensor, and of
//! whose heads a part rotates, in pairs of neighbours.

use serde_json::Value;

use super::Names;
use super::llama::{SHARED, read_shared, write_shared};
use super::read::{Keys, flag, number, size_or_none};
use crate::kernels::Rotary;
use crate::models::Shape;

pub(super) static NAMES: Names = Names { family: "glm", read, write, ..FUSED };

/// The names that both GLM families share.
pub(super) const FUSED: Names = Names { up: &["model.layers.{}.mlp.gate_up_proj"], ..SHARED };

const PART: &str = "partial_rotary_factor";

/// Reads the keys that both GLM families share, with transformers' defaults.
pub(super) fn read_glm(keys: &Keys, names: &'static Names) -> Result<Shape, String> {
    let mut all = keys.clone();
    all.entry(PART).or_insert(0.5.into());
    let shape = read_shared(&all, names, 10_000.0)?;
    Ok(Shape {
        kv_heads: size_or_none(keys, "num_key_value_heads")?.unwrap_or(2),
        head_size: size_or_none(keys, "head_dim")?.unwrap_or(128),
        rotary: shape.rotary.map(|rotary| Rotary { interleaved: true, ..rotary }),
        norm_epsilon: number(keys, "rms_norm_eps", 1.5625e-7)?,
        biases: [flag(keys, "attention_bias", true)?, false, false],
        ..shape
    })
}

/// Writes the keys that [`read_glm`] reads.
pub(super) fn write_glm(shape: &Shape, family: &str) -> Value {
    let mut config = write_shared(shape, family);
    config["attention_bias"] = shape.biases[0].into();
    let part = shape.rotary.map(|rotary| rotary.part);
    config[PART] = part.into();
    config["rope_parameters"][PART] = part.into();
    config
}

fn read(keys: &Keys) -> Result<Shape, String> {
    read_glm(keys, &NAMES)
}

fn write(shape: &Shape) -> Value {
    write_glm(shape, "Glm")
}
