//! OLMo 2 (Walsh et al. 2024): Llama whose blocks norm the outputs of their branches and not the
//! inputs, with one norm over all heads of the queries, and one over all heads of the keys.

use serde_json::Value;

use super::Names;
use super::llama::{SHARED, read_shared, write_shared};
use super::read::{Keys, flag, number};
use crate::kernels::QkNorm;
use crate::models::{NormPlaces, Shape};

pub(super) static NAMES: Names = Names { family: "olmo2", read, write, ..BEHIND };

/// The names that OLMo 2 and 3 share.
pub(super) const BEHIND: Names = Names {
    norm1: "model.layers.{}.post_attention_layernorm",
    norm2: "model.layers.{}.post_feedforward_layernorm",
    qk_norm: ["model.layers.{}.self_attn.q_norm", "model.layers.{}.self_attn.k_norm"],
    // transformers has no model of this family that classifies tokens.
    token_classes: "",
    ..SHARED
};

/// Reads the keys that OLMo 2 and 3 share: all but rotary positions and windows.
pub(super) fn read_behind(keys: &Keys, names: &'static Names) -> Result<Shape, String> {
    let bias = flag(keys, "attention_bias", false)?;
    let shape = read_shared(keys, names, THETA)?;
    Ok(Shape {
        norms: NormPlaces::Behind,
        norm_epsilon: number(keys, "rms_norm_eps", 1e-5)?,
        qk_norm: Some(QkNorm::Joint),
        biases: [bias, bias, false],
        ..shape
    })
}

/// The base of rotary positions, if no key gives it.
pub(super) const THETA: f32 = 500_000.0;

fn read(keys: &Keys) -> Result<Shape, String> {
    read_behind(keys, &NAMES)
}

/// Writes the keys that [`read_behind`] reads.
pub(super) fn write_behind(shape: &Shape, family: &str) -> Value {
    let mut config = write_shared(shape, family);
    config["attention_bias"] = shape.biases[0].into();
    config
}

fn write(shape: &Shape) -> Value {
    write_behind(shape, "Olmo2")
}
