//! ModernBERT (Warner et al. 2024): an encoder with rotary positions, norms without shifts in front
//! of its branches, a gated feed-forward without biases, and a window in two of three blocks.

use serde_json::{Value, json};

use super::read::{
    Keys, SIZES, activation, architecture, flag, given, layer_types, number, only, read_head,
    size_or_none, sizes, window_by_kinds, write_keys, write_layer_types, wrong,
};
use super::rotary::{ROPE, rotary_by_kind, write_rotary_by_kind};
use super::{NONE, Names, gpt2};
use crate::kernels::{Activation, Pooling};
use crate::models::{BlockPattern, Dropouts, Head, NormPlaces, Shape, Window};

pub(super) static NAMES: Names = Names {
    family: "modernbert",
    prefix: "model.",
    embedding: "model.embeddings.tok_embeddings.weight",
    stem_norm: "model.embeddings.norm",
    norm1: "model.layers.{}.attn_norm",
    qkv: &["model.layers.{}.attn.Wqkv"],
    projection: "model.layers.{}.attn.Wo",
    norm2: "model.layers.{}.mlp_norm",
    up: &["model.layers.{}.mlp.Wi"],
    down: "model.layers.{}.mlp.Wo",
    final_norm: "model.final_norm",
    transform: "head.dense",
    transform_norm: "head.norm",
    transform_activation: Some(Activation::GeluErf),
    head: "decoder.weight",
    head_bias: "decoder.bias",
    class_dense: "head.dense",
    class_norm: "head.norm",
    class_activation: Activation::GeluErf,
    transforms_tokens: true,
    class_out: "classifier",
    read,
    write,
    ..NONE
};

/// transformers' defaults of the base of rotary positions: in all of a sequence, and in a window.
const THETAS: [f32; 2] = [160_000.0, 10_000.0];

const POOLING: &str = "classifier_pooling";

fn read(keys: &Keys) -> Result<Shape, String> {
    only(keys, "classifier_activation", "gelu")?;
    if number(keys, "mlp_dropout", 0.0)? != 0.0 {
        return Err(format!("mlp_dropout is {}: only 0 is built", keys["mlp_dropout"]));
    }
    let [_, scaling] = ROPE;
    if let Some(given) = given(keys, scaling) {
        return Err(format!("{scaling} is {given}: in this family only null is built"));
    }
    let thetas = [
        number(keys, "global_rope_theta", THETAS[0])?,
        number(keys, "local_rope_theta", THETAS[1])?,
    ];
    let [rotary, window_rotary] = rotary_by_kind(keys, thetas)?.map(Some);
    let bias = flag(keys, "attention_bias", false)?;
    let attention = number(keys, "attention_dropout", 0.0)?;
    Ok(Shape {
        names: &NAMES,
        learned_positions: None,
        rotary,
        window_rotary,
        window: Some(window(keys)?),
        causal: false,
        norms: NormPlaces::BeforeButFirst,
        norms_only_scale: !flag(keys, "norm_bias", false)?,
        norm_epsilon: number(keys, "norm_eps", 1e-5)?,
        biases: [bias, bias, flag(keys, "mlp_bias", false)?],
        transform_bias: flag(keys, "classifier_bias", false)?,
        token_bias: flag(keys, "decoder_bias", true)?,
        activation: activation(keys, "hidden_activation", "gelu")?,
        gated: true,
        transposed: true,
        dropout: Dropouts {
            embedding: number(keys, "embedding_dropout", 0.0)?,
            attention,
            projection: attention,
            feed_forward: 0.0,
            classifier: number(keys, "classifier_dropout", 0.0)?,
        },
        tied: flag(keys, "tie_word_embeddings", true)?,
        head: read_head(keys, Head::Masked)?,
        pooling: pooling(keys)?,
        initializer_range: number(keys, "initializer_range", 0.02)?,
        ..gpt2(sizes(keys, SIZES)?)
    })
}

/// The window. By default the first of every few blocks has none.
fn window(keys: &Keys) -> Result<Window, String> {
    const EVERY: &str = "global_attn_every_n_layers";
    let positions = 1 + size_or_none(keys, "local_attention")?.unwrap_or(128) / 2;
    if let Some(slides) = layer_types(keys)? {
        return window_by_kinds("layer_types", &slides, positions);
    }
    match size_or_none(keys, EVERY)?.unwrap_or(3) {
        0 => Err(format!("{EVERY} is 0: it must be at least 1")),
        every => match BlockPattern::all_but(every, 0) {
            Some(blocks) => Ok(Window { blocks, ..Window::of_all(positions) }),
            None => {
                Err(format!("{EVERY} is {every}: it must be at most {}", BlockPattern::LONGEST))
            }
        },
    }
}

fn pooling(keys: &Keys) -> Result<Pooling, String> {
    let Some(name) = given(keys, POOLING) else { return Ok(Pooling::First) };
    match name.as_str() {
        Some("cls") => Ok(Pooling::First),
        Some("mean") => Ok(Pooling::Mean),
        _ => Err(wrong(POOLING, name, "cls or mean")),
    }
}

fn write(shape: &Shape) -> Value {
    let own = json!({
        "norm_bias": !shape.norms_only_scale,
        "norm_eps": shape.norm_epsilon,
        "attention_bias": shape.biases[0],
        "mlp_bias": shape.biases[2],
        "classifier_bias": shape.transform_bias,
        "decoder_bias": shape.token_bias,
        "hidden_activation": shape.activation.name(),
        "embedding_dropout": shape.dropout.embedding,
        "attention_dropout": shape.dropout.attention,
        "classifier_dropout": shape.dropout.classifier,
        POOLING: if shape.pooling == Pooling::Mean { "mean" } else { "cls" },
        "local_attention": shape.window.map(|window| 2 * (window.positions - 1)),
        "initializer_range": shape.initializer_range,
    });
    let mut config = write_keys(shape, architecture(shape, "ModernBert"), SIZES, own);
    write_rotary_by_kind(shape, &mut config);
    write_layer_types(shape, &mut config);
    config
}
