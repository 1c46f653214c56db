//! Gemma 2 (Gemma Team 2024): Gemma 3 with limits of attention's scores and of logits, without
//! norms of queries and keys, with one kind of rotary positions and a window in every other block.

use serde_json::Value;

use super::Names;
use super::gemma3::{AROUND, score_scale, with_norms_around, write_score_scale};
use super::llama::{read_shared, write_shared};
use super::read::{
    Keys, above_zero, activation, flag, only, size_or_none, sliding_window, window_of_most,
    write_layer_types,
};
use crate::kernels::LogitForm;
use crate::models::{Shape, Window};

pub(super) static NAMES: Names = Names { family: "gemma2", read, write, ..AROUND };

const CAPS: [&str; 2] = ["attn_logit_softcapping", "final_logit_softcapping"];

fn read(keys: &Keys) -> Result<Shape, String> {
    only(keys, "use_bidirectional_attention", false)?;
    let shape = with_norms_around(read_shared(keys, &NAMES, 10_000.0)?);
    let bias = flag(keys, "attention_bias", false)?;
    let head_size = size_or_none(keys, "head_dim")?.unwrap_or(256);
    // Without the key there is a limit; with null there is none.
    let cap = |key: &str, default| match keys.contains_key(key) {
        true => above_zero(keys, key),
        false => Ok(Some(default)),
    };
    Ok(Shape {
        head_size,
        score_scale: score_scale(keys, head_size)?,
        score_cap: cap(CAPS[0], 50.0)?,
        logits: LogitForm { cap: cap(CAPS[1], 30.0)?, ..LogitForm::PLAIN },
        window: window(keys)?,
        biases: [bias, bias, false],
        activation: activation(keys, "hidden_activation", "gelu_pytorch_tanh")?,
        tied: flag(keys, "tie_word_embeddings", true)?,
        ..shape
    })
}

/// The window, in the blocks of `layer_types`; without that key, in every other.
fn window(keys: &Keys) -> Result<Option<Window>, String> {
    let Some(positions) = sliding_window(keys)? else { return Ok(None) };
    window_of_most(keys, positions, 2).map(Some)
}

fn write(shape: &Shape) -> Value {
    let mut config = write_shared(shape, "Gemma2");
    config["attention_bias"] = shape.biases[0].into();
    config["hidden_activation"] = shape.activation.name().into();
    write_score_scale(shape, &mut config);
    config[CAPS[0]] = shape.score_cap.into();
    config[CAPS[1]] = shape.logits.cap.into();
    config["sliding_window"] = shape.window.map(|window| window.positions).into();
    write_layer_types(shape, &mut config);
    config
}
