//! Gemma 3, models of text (Gemma Team 2025): Llama with norms also behind the branches, scales of
//! norms stored as their differences from 1, scaled embeddings, norms of queries and keys, and a
//! sliding window, with rotary positions of its own, in five of six blocks. With attention to both
//! sides it is an encoder without a head: EmbeddingGemma (Schechter Vera et al. 2025).

use serde_json::Value;

use super::Names;
use super::llama::{SHARED, read_shared, write_shared};
use super::read::{
    Keys, activation, flag, given, number, size_or_none, sliding_window, window_of_most,
    with_sizes, write_layer_types,
};
use super::rotary::{ROPE, rotary_by_kind, write_rotary_by_kind};
use crate::kernels::QkNorm;
use crate::models::{Head, NormPlaces, Shape, Window};

pub(super) static NAMES: Names = Names {
    family: "gemma3_text",
    token_classes: "", // transformers has no such model
    qk_norm: ["model.layers.{}.self_attn.q_norm", "model.layers.{}.self_attn.k_norm"],
    read,
    write,
    ..AROUND
};

/// The names of Gemma 2 to 4, which have norms around their branches.
pub(super) const AROUND: Names = Names {
    branch_norms: [
        "model.layers.{}.post_attention_layernorm",
        "model.layers.{}.post_feedforward_layernorm",
    ],
    norm2: "model.layers.{}.pre_feedforward_layernorm",
    ..SHARED
};

/// transformers' defaults of the base of rotary positions: in all of a sequence, and in a window.
const THETAS: [f32; 2] = [1_000_000.0, 10_000.0];

const BOTH_SIDES: &str = "use_bidirectional_attention";

/// transformers' defaults of sizes, which Google's own files leave out.
const ABSENT: [(&str, usize); 9] = [
    ("vocab_size", 262_208),
    ("hidden_size", 2304),
    ("intermediate_size", 9216),
    ("num_hidden_layers", 26),
    ("num_attention_heads", 8),
    ("num_key_value_heads", 4),
    ("head_dim", 256),
    ("max_position_embeddings", 131_072),
    ("sliding_window", 4096),
];

fn read(keys: &Keys) -> Result<Shape, String> {
    let causal = !flag(keys, BOTH_SIDES, false)?;
    for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
        if let Some(limit) = given(keys, key) {
            return Err(format!("{key} is {limit}: Gemma 3 is built without it"));
        }
    }
    let keys = &with_sizes(keys, &ABSENT);
    let mut shared = keys.clone();
    shared.retain(|key, _| !ROPE.contains(&key.as_str()));
    let shape = read_shared(&shared, &NAMES, THETAS[0])?;
    if !causal && shape.head != Head::Tokens {
        return Err(format!("{BOTH_SIDES} is true: only embeddings are built, and no classes"));
    }
    let head_size = size_or_none(keys, "head_dim")?.unwrap_or(shape.head_size);
    let bias = flag(keys, "attention_bias", false)?;
    let thetas = [THETAS[0], number(keys, "rope_local_base_freq", THETAS[1])?];
    let [rotary, window_rotary] = rotary_by_kind(keys, thetas)?.map(Some);
    Ok(Shape {
        head_size,
        score_scale: score_scale(keys, head_size)?,
        rotary,
        window_rotary,
        causal,
        head: if causal { shape.head } else { Head::EMBEDDING },
        window: window(keys, causal)?,
        qk_norm: Some(QkNorm::ByHead),
        biases: [bias, bias, false],
        activation: activation(keys, "hidden_activation", "gelu_pytorch_tanh")?,
        tied: flag(keys, "tie_word_embeddings", true)?,
        ..with_norms_around(shape)
    })
}

const SCALAR: &str = "query_pre_attn_scalar";

/// The scale of scores of heads of this size, if the key gives another one than they have by
/// default.
pub(super) fn score_scale(keys: &Keys, head_size: usize) -> Result<Option<f32>, String> {
    let scalar = size_or_none(keys, SCALAR)?.unwrap_or(256);
    if scalar == 0 {
        return Err(format!("{SCALAR} is 0: it must be at least 1"));
    }
    Ok((scalar != head_size).then(|| (scalar as f64).powf(-0.5) as f32))
}

/// Writes the key that [`score_scale`] reads.
pub(super) fn write_score_scale(shape: &Shape, config: &mut Value) {
    let scalar = |scale: f32| f64::from(scale).powi(-2).round() as usize;
    config[SCALAR] = shape.score_scale.map_or(shape.head_size, scalar).into();
}

/// A shape with what Gemma 2 to 4 share: norms also behind branches, whose scales are differences
/// from 1, and scaled embeddings.
pub(super) fn with_norms_around(shape: Shape) -> Shape {
    Shape {
        norms: NormPlaces::Around,
        norm_offset: 1.0,
        embedding_scale: (shape.hidden as f64).sqrt() as f32,
        ..shape
    }
}

/// The window, in the blocks of `layer_types`; without that key, in all but the last of every few.
/// To both sides, the key counts the positions of both.
fn window(keys: &Keys, causal: bool) -> Result<Option<Window>, String> {
    let Some(positions) = sliding_window(keys)? else { return Ok(None) };
    let positions = if causal { positions } else { positions / 2 + 1 };
    let pattern = size_or_none(keys, "sliding_window_pattern")?.unwrap_or(6);
    window_of_most(keys, positions, pattern).map(Some)
}

fn write(shape: &Shape) -> Value {
    let of_tokens = matches!(shape.head, Head::Tokens);
    let mut config = write_shared(shape, if of_tokens { "Gemma3" } else { "Gemma3Text" });
    write_rotary_by_kind(shape, &mut config);
    config["rope_local_base_freq"] = shape.window_rotary.map(|rotary| rotary.theta).into();
    config["attention_bias"] = shape.biases[0].into();
    config["hidden_activation"] = shape.activation.name().into();
    write_score_scale(shape, &mut config);
    let positions = |window: Window| match shape.causal {
        true => window.positions,
        false => 2 * (window.positions - 1),
    };
    config["sliding_window"] = shape.window.map(positions).into();
    config[BOTH_SIDES] = (!shape.causal).into();
    write_layer_types(shape, &mut config);
    config
}
