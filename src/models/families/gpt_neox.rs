//! GPT-NeoX (Black et al. 2022) and Pythia (Biderman et al. 2023): attention and feed-forward are
//! beside each other, a part of each head rotates, and one projection has queries, keys and values
//! head by head.

use serde_json::{Value, json};

use super::read::{
    Keys, SIZES, activation, architecture, flag, number, only, read_head, sizes, write_keys,
};
use super::rotary::{rotary, write_rotary};
use super::{NONE, Names, gpt2};
use crate::models::{Dropouts, Head, NormPlaces, Shape};

pub(super) static NAMES: Names = Names {
    family: "gpt_neox",
    prefix: "gpt_neox.",
    embedding: "gpt_neox.embed_in.weight",
    norm1: "gpt_neox.layers.{}.input_layernorm",
    qkv: &["gpt_neox.layers.{}.attention.query_key_value"],
    projection: "gpt_neox.layers.{}.attention.dense",
    norm2: "gpt_neox.layers.{}.post_attention_layernorm",
    up: &["gpt_neox.layers.{}.mlp.dense_h_to_4h"],
    down: "gpt_neox.layers.{}.mlp.dense_4h_to_h",
    final_norm: "gpt_neox.final_layer_norm",
    head: "embed_out.weight",
    class_out: "score",
    read,
    write,
    ..NONE
};

/// The part of a head that rotates, and where transformers 5 and 4 have it.
const PART: [&str; 2] = ["partial_rotary_factor", "rotary_pct"];
const THETA: &str = "rotary_emb_base";

fn read(keys: &Keys) -> Result<Shape, String> {
    only(keys, "is_decoder", false)?;
    let bias = flag(keys, "attention_bias", true)?;
    let hidden = number(keys, "hidden_dropout", 0.0)?;
    let is_beside = flag(keys, "use_parallel_residual", true)?;
    let mut all = keys.clone();
    let part = keys.get(PART[1]).cloned();
    all.entry(PART[0]).or_insert(part.unwrap_or_else(|| 0.25.into()));
    Ok(Shape {
        names: &NAMES,
        learned_positions: None,
        rotary: Some(rotary(&all, number(keys, THETA, 10_000.0)?)?),
        norms: if is_beside { NormPlaces::BeforeEach } else { NormPlaces::Before },
        norm_epsilon: number(keys, "layer_norm_eps", 1e-5)?,
        qkv_by_head: true,
        biases: [bias, bias, true],
        activation: activation(keys, "hidden_act", "gelu")?,
        transposed: true,
        dropout: Dropouts {
            embedding: hidden,
            attention: number(keys, "attention_dropout", 0.0)?,
            projection: hidden,
            feed_forward: hidden,
            classifier: number(keys, "classifier_dropout", 0.1)?,
        },
        tied: flag(keys, "tie_word_embeddings", false)?,
        head: read_head(keys, Head::Tokens)?,
        initializer_range: number(keys, "initializer_range", 0.02)?,
        ..gpt2(sizes(keys, SIZES)?)
    })
}

fn write(shape: &Shape) -> Value {
    let own = json!({
        "attention_bias": shape.biases[0],
        "use_parallel_residual": shape.norms == NormPlaces::BeforeEach,
        "layer_norm_eps": shape.norm_epsilon,
        "hidden_act": shape.activation.name(),
        "hidden_dropout": shape.dropout.feed_forward,
        "attention_dropout": shape.dropout.attention,
        "initializer_range": shape.initializer_range,
    });
    let mut config = write_keys(shape, architecture(shape, "GPTNeoX"), SIZES, own);
    if let Some(rotary) = &shape.rotary {
        write_rotary(shape, rotary, &mut config);
        config[THETA] = rotary.theta.into();
        PART.iter().for_each(|key| config[*key] = rotary.part.into());
        config["rope_parameters"][PART[0]] = rotary.part.into();
    }
    config
}
