//! Command R7B and Command A (Cohere 2024, 2025): Command R with a window in some blocks, by
//! default in three of four; the others have no rotary positions.

use serde_json::Value;

use super::Names;
use super::cohere::{ONE_NORM, read_cohere, write_cohere};
use super::read::{Keys, size_or_none, sliding_window, window_of_most, write_layer_types};
use crate::models::Shape;

pub(super) static NAMES: Names = Names { family: "cohere2", read, write, ..ONE_NORM };

fn read(keys: &Keys) -> Result<Shape, String> {
    let shape = read_cohere(keys, &NAMES, 10_000.0)?;
    if shape.head_size * shape.heads != shape.hidden {
        return Err(format!(
            "head_dim is {}: in this family it is hidden_size ÷ num_attention_heads",
            shape.head_size
        ));
    }
    let Some(positions) = sliding_window(keys)? else {
        return Err("sliding_window is null: only blocks with a window rotate, so it must be \
                    given"
            .into());
    };
    let pattern = size_or_none(keys, "sliding_window_pattern")?.unwrap_or(4);
    let window = window_of_most(keys, positions, pattern)?;
    Ok(Shape { window: Some(window), rotary_blocks: window.blocks, ..shape })
}

fn write(shape: &Shape) -> Value {
    let mut config = write_cohere(shape, "Cohere2");
    config["sliding_window"] = shape.window.map(|window| window.positions).into();
    write_layer_types(shape, &mut config);
    config
}
