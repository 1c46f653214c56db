//! Qwen2 (Yang et al. 2024): Llama with biases of queries, keys and values.

use serde_json::Value;

use super::Names;
use super::llama::{SHARED, read_shared, write_shared};
use super::read::{Keys, flag, size, size_or_none};
use crate::models::Shape;

pub(super) static NAMES: Names = Names { family: "qwen2", read, write, ..SHARED };

/// Reads the sliding window: its size, and the first block that has one. `None` when no block has.
/// The first block comes from `layer_types`, else from `max_window_layers`.
pub(super) fn window(keys: &Keys) -> Result<Option<(usize, usize)>, String> {
    if !flag(keys, "use_sliding_window", false)? {
        return Ok(None);
    }
    let window = match keys.contains_key("sliding_window") {
        true => size_or_none(keys, "sliding_window")?,
        false => Some(4096), // transformers' default
    };
    let Some(window) = window else { return Ok(None) };
    let Some(types) = keys.get("layer_types").filter(|types| !types.is_null()) else {
        return Ok(Some((window, size_or_none(keys, "max_window_layers")?.unwrap_or(28))));
    };
    let layers = size(keys, "num_hidden_layers")?;
    let types = types.as_array().filter(|types| types.len() == layers);
    let types = types.ok_or_else(|| format!("layer_types must be a list of {layers} kinds"))?;
    let slides = |kind: &Value| match kind.as_str() {
        Some("full_attention") => Ok(false),
        Some("sliding_attention") => Ok(true),
        _ => Err(format!("layer_types has {kind}: known are full_attention, sliding_attention")),
    };
    let slides = types.iter().map(slides).collect::<Result<Vec<_>, _>>()?;
    let from = slides.iter().position(|slides| *slides).unwrap_or(slides.len());
    if slides[from..].contains(&false) {
        return Err(
            "layer_types alternates: only full_attention, then sliding_attention, is built".into(),
        );
    }
    Ok(Some((window, from)))
}

/// Writes the keys that [`window`] reads.
pub(super) fn write_window(shape: &Shape, config: &mut Value) {
    config["use_sliding_window"] = shape.window.is_some().into();
    config["sliding_window"] = shape.window.map(|(window, _)| window).into();
    config["max_window_layers"] = shape.window.map_or(shape.layers, |(_, from)| from).into();
    let kind = |number: usize| match shape.window {
        Some((_, from)) if number >= from => "sliding_attention",
        _ => "full_attention",
    };
    config["layer_types"] = (0..shape.layers).map(kind).collect();
}

fn read(keys: &Keys) -> Result<Shape, String> {
    let (window, biases) = (window(keys)?, [true, false, false]);
    Ok(Shape { window, biases, ..read_shared(keys, &NAMES, 10_000.0)? })
}

fn write(shape: &Shape) -> Value {
    let mut config = write_shared(shape, "Qwen2");
    write_window(shape, &mut config);
    config
}
