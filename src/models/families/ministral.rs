//! Ministral (Mistral AI 2024): Mistral with a window in some blocks.

use serde_json::Value;

use super::Names;
use super::llama::{SHARED, read_shared, write_shared};
use super::read::{Keys, layer_types, sliding_window, window_of_most, write_layer_types};
use crate::models::Shape;

pub(super) static NAMES: Names = Names { family: "ministral", read, write, ..SHARED };

fn read(keys: &Keys) -> Result<Shape, String> {
    let positions = sliding_window(keys)?;
    if positions.is_none() && layer_types(keys)?.is_some_and(|slides| slides.contains(&true)) {
        return Err("layer_types has sliding_attention, and sliding_window is null".into());
    }
    let window = positions.map(|positions| window_of_most(keys, positions, 0)).transpose()?;
    Ok(Shape { window, ..read_shared(keys, &NAMES, 10_000.0)? })
}

fn write(shape: &Shape) -> Value {
    let mut config = write_shared(shape, "Ministral");
    config["sliding_window"] = shape.window.map(|window| window.positions).into();
    write_layer_types(shape, &mut config);
    config
}
