//! Llama 2 and 3 (Touvron et al. 2023; Grattafiori et al. 2024): rotary positions, pre-norm blocks
//! with RMS norms, grouped-query attention, a gated feed-forward.

use serde_json::{Value, json};

use super::read::{
    Keys, SIZES, activation, architecture, flag, number, only, read_head, size_or_none, sizes,
    write_keys,
};
use super::rotary::{rotary, write_rotary};
use super::{NONE, Names, gpt2};
use crate::models::{Dropouts, Head, Shape};

pub(super) static NAMES: Names = Names { family: "llama", read, write, ..SHARED };

/// The names that Llama, Mistral and Qwen share.
pub(super) const SHARED: Names = Names {
    prefix: "model.",
    embedding: "model.embed_tokens.weight",
    norm1: "model.layers.{}.input_layernorm",
    qkv: &[
        "model.layers.{}.self_attn.q_proj",
        "model.layers.{}.self_attn.k_proj",
        "model.layers.{}.self_attn.v_proj",
    ],
    projection: "model.layers.{}.self_attn.o_proj",
    norm2: "model.layers.{}.post_attention_layernorm",
    up: &["model.layers.{}.mlp.gate_proj", "model.layers.{}.mlp.up_proj"],
    down: "model.layers.{}.mlp.down_proj",
    final_norm: "model.norm",
    class_out: "score",
    token_classes: "score",
    ..NONE
};

/// Reads the keys that Llama, Mistral and Qwen share: all but biases, norms of queries and keys,
/// and sliding windows.
pub(super) fn read_shared(keys: &Keys, names: &'static Names, theta: f32) -> Result<Shape, String> {
    let base = gpt2(sizes(keys, SIZES)?);
    Ok(Shape {
        names,
        kv_heads: size_or_none(keys, "num_key_value_heads")?.unwrap_or(base.kv_heads),
        head_size: size_or_none(keys, "head_dim")?.unwrap_or(base.head_size),
        learned_positions: None,
        rotary: Some(rotary(keys, theta)?),
        rms_norm: true,
        norm_epsilon: number(keys, "rms_norm_eps", 1e-6)?,
        biases: [false; 3],
        activation: activation(keys, "hidden_act", "silu")?,
        gated: true,
        transposed: true,
        dropout: Dropouts {
            attention: number(keys, "attention_dropout", 0.0)?,
            classifier: number(keys, "classifier_dropout", 0.1)?,
            ..Dropouts::default()
        },
        tied: flag(keys, "tie_word_embeddings", false)?,
        head: read_head(keys, Head::Tokens)?,
        initializer_range: number(keys, "initializer_range", 0.02)?,
        ..base
    })
}

/// Writes the keys that [`read_shared`] reads.
pub(super) fn write_shared(shape: &Shape, family: &str) -> Value {
    let own = json!({
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "rms_norm_eps": shape.norm_epsilon,
        "hidden_act": shape.activation.name(),
        "attention_dropout": shape.dropout.attention,
        "initializer_range": shape.initializer_range,
    });
    let mut config = write_keys(shape, architecture(shape, family), SIZES, own);
    if let Some(rotary) = &shape.rotary {
        write_rotary(shape, rotary, &mut config);
    }
    config
}

fn read(keys: &Keys) -> Result<Shape, String> {
    only(keys, "pretraining_tp", 1)?;
    let bias = flag(keys, "attention_bias", false)?;
    let biases = [bias, bias, flag(keys, "mlp_bias", false)?];
    Ok(Shape { biases, ..read_shared(keys, &NAMES, 10_000.0)? })
}

fn write(shape: &Shape) -> Value {
    let mut config = write_shared(shape, "Llama");
    config["attention_bias"] = shape.biases[0].into();
    config["mlp_bias"] = shape.biases[2].into();
    config
}
