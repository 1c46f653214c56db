//! SmolLM3 (Bakouch et al. 2025): Llama without rotary positions in some blocks.

use serde_json::Value;

use super::Names;
use super::llama::{SHARED, read_shared, write_shared};
use super::read::{
    Keys, all_but_last, flag, given, layer_types, listed_blocks, only, size_or_none,
};
use crate::models::{BlockPattern, Shape};

pub(super) static NAMES: Names = Names { family: "smollm3", read, write, ..SHARED };

fn read(keys: &Keys) -> Result<Shape, String> {
    only(keys, "use_sliding_window", false)?;
    if layer_types(keys)?.is_some_and(|slides| slides.contains(&true)) {
        return Err("layer_types has sliding_attention: only full_attention is built".into());
    }
    let bias = flag(keys, "attention_bias", false)?;
    let shape = read_shared(keys, &NAMES, 2_000_000.0)?;
    Ok(Shape {
        biases: [bias, bias, flag(keys, "mlp_bias", false)?],
        rotary_blocks: rotary_blocks(keys, shape.layers)?,
        tied: flag(keys, "tie_word_embeddings", true)?,
        ..shape
    })
}

/// The blocks that rotate: by default all but the last of every few.
fn rotary_blocks(keys: &Keys, layers: usize) -> Result<BlockPattern, String> {
    const EVERY: &str = "no_rope_layer_interval";
    let Some(list) = given(keys, "no_rope_layers") else {
        return all_but_last(EVERY, size_or_none(keys, EVERY)?.unwrap_or(4));
    };
    // Each block has a number: 1 if it rotates, else 0.
    let rotates = |one: &Value| match one.as_u64() {
        Some(one @ (0 | 1)) => Ok(one == 1),
        _ => Err(format!("no_rope_layers has {one}: known are 0 and 1")),
    };
    let list = list.as_array().filter(|list| list.len() >= layers);
    let list = list.ok_or_else(|| format!("no_rope_layers must be a list of {layers} numbers"))?;
    let rotates = list[..layers].iter().map(rotates).collect::<Result<Vec<bool>, String>>()?;
    listed_blocks("no_rope_layers", &rotates)
}

fn write(shape: &Shape) -> Value {
    let mut config = write_shared(shape, "SmolLM3");
    config["attention_bias"] = shape.biases[0].into();
    config["mlp_bias"] = shape.biases[2].into();
    config["no_rope_layers"] =
        (0..shape.layers).map(|block| Value::from(u8::from(shape.rotates(block)))).collect();
    config
}
