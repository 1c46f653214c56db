//! OPT (Zhang et al. 2022): learned positions whose table begins with two unused rows, pre-norm
//! blocks with biases, a final norm, a tied head.

use serde_json::{Value, json};

use super::read::{
    Keys, activation, architecture, flag, number, only, read_head, size, size_or_none, sizes,
    write_keys,
};
use super::{NONE, Names, gpt2};
use crate::models::{Dropouts, Head, Shape};

pub(super) static NAMES: Names = Names {
    family: "opt",
    prefix: "model.",
    embedding: "model.decoder.embed_tokens.weight",
    positions: "model.decoder.embed_positions.weight",
    norm1: "model.decoder.layers.{}.self_attn_layer_norm",
    qkv: &[
        "model.decoder.layers.{}.self_attn.q_proj",
        "model.decoder.layers.{}.self_attn.k_proj",
        "model.decoder.layers.{}.self_attn.v_proj",
    ],
    projection: "model.decoder.layers.{}.self_attn.out_proj",
    norm2: "model.decoder.layers.{}.final_layer_norm",
    up: &["model.decoder.layers.{}.fc1"],
    down: "model.decoder.layers.{}.fc2",
    final_norm: "model.decoder.final_layer_norm",
    class_out: "score",
    token_classes: "",
    read,
    write,
    ..NONE
};

/// Unused rows of the table of positions. `config.json` has no key for them.
const ROWS_BEFORE: usize = 2;

const SIZES: [&str; 6] = [
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "ffn_dim",
    "vocab_size",
    "max_position_embeddings",
];

fn read(keys: &Keys) -> Result<Shape, String> {
    only(keys, "enable_bias", true)?;
    only(keys, "layer_norm_elementwise_affine", true)?;
    if !flag(keys, "do_layer_norm_before", true)? {
        return Err("do_layer_norm_before is false: norms behind the branches, which opt-350m \
                    has, are not built. Take another size"
            .into());
    }
    if flag(keys, "_remove_final_layer_norm", false)? {
        return Err("_remove_final_layer_norm is true: a model without a norm behind its last \
                    block is not built. Take a checkpoint with one"
            .into());
    }
    let hidden = size(keys, "hidden_size")?;
    let embedded = size_or_none(keys, "word_embed_proj_dim")?.unwrap_or(hidden);
    if embedded != hidden {
        return Err(format!(
            "word_embed_proj_dim is {embedded}: only hidden_size, which is {hidden}, is built. \
             Take another size than opt-350m"
        ));
    }
    let left_out = number(keys, "layerdrop", 0.0)?;
    if left_out != 0.0 {
        return Err(format!(
            "layerdrop is {left_out}: only 0 is built. To leave out layers at random, set it to \
             0, and depth.drop and depth.rule = \"uniform\" in the config of the run"
        ));
    }
    let residual = number(keys, "dropout", 0.1)?;
    Ok(Shape {
        names: &NAMES,
        learned_positions: Some(ROWS_BEFORE),
        activation: activation(keys, "activation_function", "relu")?,
        transposed: true,
        dropout: Dropouts {
            attention: number(keys, "attention_dropout", 0.0)?,
            projection: residual,
            feed_forward: residual,
            ..Dropouts::default()
        },
        tied: flag(keys, "tie_word_embeddings", true)?,
        head: read_head(keys, Head::Tokens)?,
        initializer_range: number(keys, "init_std", 0.02)?,
        ..gpt2(sizes(keys, SIZES)?)
    })
}

fn write(shape: &Shape) -> Value {
    let own = json!({
        "word_embed_proj_dim": shape.hidden,
        "activation_function": shape.activation.name(),
        "dropout": shape.dropout.feed_forward,
        "attention_dropout": shape.dropout.attention,
        "init_std": shape.initializer_range,
    });
    write_keys(shape, architecture(shape, "OPT"), SIZES, own)
}
