//! GLM-4 of 2025 (GLM-4-0414): GLM with norms also behind the branches.

use serde_json::Value;

use super::Names;
use super::glm::{FUSED, read_glm, write_glm};
use super::read::Keys;
use crate::models::{NormPlaces, Shape};

pub(super) static NAMES: Names = Names {
    family: "glm4",
    branch_norms: [
        "model.layers.{}.post_self_attn_layernorm",
        "model.layers.{}.post_mlp_layernorm",
    ],
    read,
    write,
    ..FUSED
};

fn read(keys: &Keys) -> Result<Shape, String> {
    Ok(Shape { norms: NormPlaces::Around, ..read_glm(keys, &NAMES)? })
}

fn write(shape: &Shape) -> Value {
    write_glm(shape, "Glm4")
}
