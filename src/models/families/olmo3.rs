//! OLMo 3 (Team OLMo 2025): OLMo 2 with a sliding window in three of four blocks, and rotary
//! positions by the kind of block.

use serde_json::Value;

use super::Names;
use super::olmo2::{BEHIND, THETA, read_behind, write_behind};
use super::read::{Keys, sliding_window, window_of_most, write_layer_types};
use super::rotary::{ROPE, rotary_by_kind, write_rotary_by_kind};
use crate::models::Shape;

pub(super) static NAMES: Names = Names { family: "olmo3", read, write, ..BEHIND };

fn read(keys: &Keys) -> Result<Shape, String> {
    let mut shared = keys.clone();
    shared.retain(|key, _| !ROPE.contains(&key.as_str()));
    let shape = read_behind(&shared, &NAMES)?;
    let [rotary, window_rotary] = rotary_by_kind(keys, [THETA; 2])?.map(Some);
    let positions = sliding_window(keys)?;
    let window = positions.map(|positions| window_of_most(keys, positions, 4)).transpose()?;
    Ok(Shape { rotary, window_rotary, window, ..shape })
}

fn write(shape: &Shape) -> Value {
    let mut config = write_behind(shape, "Olmo3");
    write_rotary_by_kind(shape, &mut config);
    config["sliding_window"] = shape.window.map(|window| window.positions).into();
    write_layer_types(shape, &mut config);
    config
}
