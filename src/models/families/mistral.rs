//! Mistral (Jiang et al. 2023): Llama with a sliding window.

use serde_json::Value;

use super::Names;
use super::llama::{SHARED, read_shared, write_shared};
use super::read::{Keys, sliding_window};
use crate::models::{Shape, Window};

pub(super) static NAMES: Names = Names { family: "mistral", read, write, ..SHARED };

fn read(keys: &Keys) -> Result<Shape, String> {
    let window = sliding_window(keys)?.map(Window::of_all);
    Ok(Shape { window, ..read_shared(keys, &NAMES, 10_000.0)? })
}

fn write(shape: &Shape) -> Value {
    let mut config = write_shared(shape, "Mistral");
    config["sliding_window"] = shape.window.map(|window| window.positions).into();
    config
}
