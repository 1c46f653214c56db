//! Qwen3.5, dense models of text (Qwen Team 2026): Qwen3 with linear attention in three of four
//! blocks, gates of attention's output, scales of norms stored as their differences from 1, and
//! rotary positions of a part of each head. All three positions of a token are the same in a text,
//! so the sections of its rotary positions (`mrope_section`) have no effect.

use serde_json::{Value, json};

use super::llama::{SHARED, read_shared, write_shared};
use super::read::{Keys, all_but_last, flag, given, listed_blocks, only, size, size_or_none};
use super::{LinearNames, Names};
use crate::kernels::{LinearHeads, QkNorm};
use crate::models::{BlockPattern, Head, LinearAttention, Shape};

pub(super) static NAMES: Names = Names { family: "qwen3_5_text", read, write, ..HYBRID };

/// The names that Qwen3.5, with and without experts, and Qwen3-Next share.
pub(super) const HYBRID: Names = Names {
    qk_norm: ["model.layers.{}.self_attn.q_norm", "model.layers.{}.self_attn.k_norm"],
    linear: LinearNames {
        projection: &[
            "model.layers.{}.linear_attn.in_proj_qkv",
            "model.layers.{}.linear_attn.in_proj_b",
            "model.layers.{}.linear_attn.in_proj_a",
            "model.layers.{}.linear_attn.in_proj_z",
        ],
        convolution: "model.layers.{}.linear_attn.conv1d",
        log: "model.layers.{}.linear_attn.A_log",
        bias: "model.layers.{}.linear_attn.dt_bias",
        norm: "model.layers.{}.linear_attn.norm",
        output: "model.layers.{}.linear_attn.out_proj",
    },
    token_classes: "",
    ..SHARED
};

/// The keys of linear attention's sizes, transformers' defaults, and the most that is built.
const SIZES: [(&str, usize, usize); 5] = [
    ("linear_num_key_heads", 16, 1 << 12),
    ("linear_num_value_heads", 32, 1 << 12),
    ("linear_key_head_dim", 128, 1 << 10),
    ("linear_value_head_dim", 128, 1 << 10),
    ("linear_conv_kernel_dim", 4, 1 << 6),
];

const PART: &str = "partial_rotary_factor";

fn read(keys: &Keys) -> Result<Shape, String> {
    read_hybrid(keys, &NAMES, 4)
}

/// Reads the keys that Qwen3.5, with and without experts, and Qwen3-Next share. `kv_heads`:
/// transformers' default.
pub(super) fn read_hybrid(
    keys: &Keys,
    names: &'static Names,
    kv_heads: usize,
) -> Result<Shape, String> {
    only(keys, "hidden_act", "silu")?;
    let mut shared = keys.clone();
    if given(keys, PART).is_none() {
        shared.insert(PART.into(), json!(0.25));
    }
    let shape = read_shared(&shared, names, 10_000.0)?;
    let bias = flag(keys, "attention_bias", false)?;
    let heads = linear_heads(keys)?;
    let blocks = linear_blocks(keys)?;
    Ok(Shape {
        kv_heads: size_or_none(keys, "num_key_value_heads")?.unwrap_or(kv_heads),
        head_size: size_or_none(keys, "head_dim")?.unwrap_or(256),
        qk_norm: Some(QkNorm::ByHead),
        norm_offset: 1.0,
        output_gates: true,
        linear: Some(LinearAttention { heads, blocks }),
        biases: [bias, bias, false],
        ..shape
    })
}

fn linear_heads(keys: &Keys) -> Result<LinearHeads, String> {
    let mut sizes = [0; SIZES.len()];
    for (to, (key, default, most)) in sizes.iter_mut().zip(SIZES) {
        *to = size_or_none(keys, key)?.unwrap_or(default);
        if !(1..=most).contains(to) {
            return Err(format!("{key} is {to}: it must be 1 to {most}"));
        }
    }
    let [key_heads, value_heads, key_size, value_size, taps] = sizes;
    if value_heads % key_heads != 0 {
        return Err(format!(
            "linear_num_value_heads is {value_heads}: it must be a multiple of \
             linear_num_key_heads, which is {key_heads}"
        ));
    }
    Ok(LinearHeads { key_heads, value_heads, key_size, value_size, taps })
}

/// The blocks with linear attention: by default all but the last of every few.
fn linear_blocks(keys: &Keys) -> Result<BlockPattern, String> {
    let layers = size(keys, "num_hidden_layers")?;
    let Some(types) = given(keys, "layer_types") else {
        const EVERY: &str = "full_attention_interval";
        return match size_or_none(keys, EVERY)?.unwrap_or(4) {
            0 => Err(format!("{EVERY} is 0: it must be at least 1")),
            every => all_but_last(EVERY, every),
        };
    };
    let types = types.as_array().filter(|types| types.len() == layers);
    let types = types.ok_or_else(|| format!("layer_types must be a list of {layers} kinds"))?;
    let is_linear = |kind: &Value| match kind.as_str() {
        Some("full_attention") => Ok(false),
        Some("linear_attention") => Ok(true),
        _ => Err(format!("layer_types has {kind}: known are full_attention, linear_attention")),
    };
    let linear = types.iter().map(is_linear).collect::<Result<Vec<bool>, String>>()?;
    listed_blocks("layer_types", &linear)
}

fn write(shape: &Shape) -> Value {
    write_hybrid(shape, &of_text(shape, "Qwen3_5"))
}

/// The beginning of the name of a family's model. Without Text in their names, transformers' models
/// with some heads have images, too.
pub(super) fn of_text(shape: &Shape, family: &str) -> String {
    let is_of_text = matches!(shape.head, Head::Classes { .. } | Head::Embedding { .. });
    let text = if is_of_text { "Text" } else { "" };
    format!("{family}{text}")
}

/// Writes the keys that [`read_hybrid`] reads.
pub(super) fn write_hybrid(shape: &Shape, family: &str) -> Value {
    let mut config = write_shared(shape, family);
    config["attention_bias"] = shape.biases[0].into();
    let kind = |block: usize| match shape.linear_of(block) {
        Some(_) => "linear_attention",
        None => "full_attention",
    };
    config["layer_types"] = (0..shape.layers).map(kind).collect();
    if let Some(LinearAttention { heads, .. }) = shape.linear {
        let LinearHeads { key_heads, value_heads, key_size, value_size, taps } = heads;
        let sizes = [key_heads, value_heads, key_size, value_size, taps];
        for ((key, ..), size) in SIZES.into_iter().zip(sizes) {
            config[key] = size.into();
        }
    }
    config
}
