//! Phi-3 (Abdin et al. 2024): Llama whose queries, keys and values are one tensor, as gate and up
//! projection are.

use serde_json::Value;

use super::Names;
use super::llama::{SHARED, read_shared, write_shared};
use super::read::{Keys, number, only, size_or_none};
use crate::models::{Dropouts, Shape, Window};

pub(super) static NAMES: Names = Names {
    family: "phi3",
    qkv: &["model.layers.{}.self_attn.qkv_proj"],
    up: &["model.layers.{}.mlp.gate_up_proj"],
    read,
    write,
    ..SHARED
};

fn read(keys: &Keys) -> Result<Shape, String> {
    only(keys, "attention_bias", false)?;
    let window = size_or_none(keys, "sliding_window")?.map(Window::of_all);
    let shape = read_shared(&with_longrope(keys), &NAMES, 10_000.0)?;
    let residual = number(keys, "resid_pdrop", 0.0)?;
    let dropout = Dropouts { projection: residual, feed_forward: residual, ..shape.dropout };
    Ok(Shape { window, dropout, ..shape })
}

/// The keys with transformers' defaults of rotary positions, and without the names that it had for
/// LongRoPE before.
fn with_longrope(keys: &Keys) -> Keys {
    let mut keys = keys.clone();
    keys.entry("original_max_position_embeddings").or_insert(4096.into());
    for key in ["rope_parameters", "rope_scaling"] {
        let Some(Value::Object(scaling)) = keys.get_mut(key) else { continue };
        let kind = scaling.get("rope_type").or_else(|| scaling.get("type"));
        if kind.is_some_and(|kind| kind == "su" || kind == "yarn") {
            scaling.insert("rope_type".into(), "longrope".into());
        }
    }
    keys
}

fn write(shape: &Shape) -> Value {
    let mut config = write_shared(shape, "Phi3");
    config["sliding_window"] = shape.window.map(|window| window.positions).into();
    config["resid_pdrop"] = shape.dropout.feed_forward.into();
    config
}
