//! Qwen2 (Yang et al. 2024): Llama with biases of queries, keys and values.

use serde_json::Value;

use super::Names;
use super::llama::{SHARED, read_shared, write_shared};
use super::read::{Keys, flag, size_or_none};
use crate::models::Shape;

pub(super) static NAMES: Names = Names { family: "qwen2", read, write, ..SHARED };

/// The window, if it is used at all, of blocks from the one on that `max_window_layers` says.
pub(super) fn window(keys: &Keys) -> Result<Option<(usize, usize)>, String> {
    if !flag(keys, "use_sliding_window", false)? {
        return Ok(None);
    }
    let window = size_or_none(keys, "sliding_window")?.unwrap_or(4096);
    Ok(Some((window, size_or_none(keys, "max_window_layers")?.unwrap_or(28))))
}

/// What [`window`] reads.
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
    let mut config = write_shared(shape, "Qwen2ForCausalLM");
    write_window(shape, &mut config);
    config
}
