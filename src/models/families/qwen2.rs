//! Qwen2 (Yang et al. 2024): Llama with biases of queries, keys and values.

use serde_json::Value;

use super::Names;
use super::llama::{SHARED, read_shared, write_shared};
use super::read::{
    Keys, flag, layer_types, size_or_none, sliding_window, window_by_kinds, write_layer_types,
};
use crate::models::{Shape, Window};

pub(super) static NAMES: Names = Names { family: "qwen2", read, write, ..SHARED };

/// Reads the sliding window, and which blocks have it: by `layer_types`, else by
/// `max_window_layers`. `None` when no block has.
pub(super) fn window(keys: &Keys) -> Result<Option<Window>, String> {
    if !flag(keys, "use_sliding_window", false)? {
        return Ok(None);
    }
    let Some(positions) = sliding_window(keys)? else { return Ok(None) };
    let Some(slides) = layer_types(keys)? else {
        let from = size_or_none(keys, "max_window_layers")?.unwrap_or(28);
        return Ok(Some(Window { from, ..Window::of_all(positions) }));
    };
    let from = slides.iter().position(|slides| *slides).unwrap_or(slides.len());
    if slides[from..].contains(&false) {
        return window_by_kinds("layer_types", &slides, positions).map(Some);
    }
    Ok(Some(Window { from, ..Window::of_all(positions) }))
}

/// Writes the keys that [`window`] reads.
pub(super) fn write_window(shape: &Shape, config: &mut Value) {
    config["use_sliding_window"] = shape.window.is_some().into();
    config["sliding_window"] = shape.window.map(|window| window.positions).into();
    config["max_window_layers"] = shape.window.map_or(shape.layers, |window| window.from).into();
    write_layer_types(shape, config);
}

fn read(keys: &Keys) -> Result<Shape, String> {
    let window = window(keys)?;
    let biases = [true, false, false];
    Ok(Shape { window, biases, ..read_shared(keys, &NAMES, 10_000.0)? })
}

fn write(shape: &Shape) -> Value {
    let mut config = write_shared(shape, "Qwen2");
    write_window(shape, &mut config);
    config
}
