//! GPT-2 (Radford et al. 2019): learned positions, pre-norm blocks, a final norm, a tied head.
//! Weight matrices are stored as (inputs, outputs); other families store them transposed.

use serde_json::{Value, json};

use super::read::{
    Keys, activation, architecture, flag, number, only, read_head, size, size_or_none, write_keys,
};
use super::{NONE, Names};
use crate::kernels::{Activation, HeadValues, LogitForm, Pooling};
use crate::models::{BlockPattern, Dropouts, Head, NormPlaces, Shape};

pub(super) static NAMES: Names = Names {
    family: "gpt2",
    prefix: "transformer.",
    embedding: "transformer.wte.weight",
    positions: "transformer.wpe.weight",
    norm1: "transformer.h.{}.ln_1",
    qkv: &["transformer.h.{}.attn.c_attn"],
    projection: "transformer.h.{}.attn.c_proj",
    norm2: "transformer.h.{}.ln_2",
    up: &["transformer.h.{}.mlp.c_fc"],
    down: "transformer.h.{}.mlp.c_proj",
    final_norm: "transformer.ln_f",
    class_out: "score",
    read,
    write,
    ..NONE
};

/// The shape of a GPT-2 of these sizes: blocks, hidden channels, heads, feed-forward channels,
/// tokens of the vocabulary, positions.
pub fn gpt2([layers, hidden, heads, intermediate, vocabulary, positions]: [usize; 6]) -> Shape {
    Shape {
        names: &NAMES,
        layers,
        hidden,
        embedding_channels: None,
        heads,
        kv_heads: heads,
        head_size: hidden / heads.max(1),
        values: HeadValues::Plain,
        global_heads: None,
        shared_kv: None,
        block_inputs: None,
        intermediate,
        experts: None,
        vocabulary,
        positions,
        learned_positions: Some(0),
        token_types: 0,
        score_scale: None,
        score_cap: None,
        rotary: None,
        causal: true,
        rotary_blocks: BlockPattern::ALL,
        window_rotary: None,
        window: None,
        rms_norm: false,
        norms_only_scale: false,
        norms: NormPlaces::Before,
        norm_offset: 0.0,
        norm_epsilon: 1e-5,
        qk_norm: None,
        qkv_by_head: false,
        sinks: false,
        output_scalars: false,
        output_gates: false,
        linear: None,
        biases: [true; 3],
        transform_bias: true,
        token_bias: true,
        activation: Activation::GeluTanh,
        gated: false,
        clamped: None,
        transposed: false,
        chunk_positions: Shape::CHUNK_POSITIONS,
        slices: 1,
        pieces: 1,
        dropout: Dropouts::default(),
        tied: true,
        embedding_scale: 1.0,
        residual_scale: 1.0,
        logits: LogitForm::PLAIN,
        head: Head::Tokens,
        pooling: Pooling::First,
        initializer_range: 0.02,
    }
}

fn read(keys: &Keys) -> Result<Shape, String> {
    let is_scaled = flag(keys, "scale_attn_weights", true)?;
    only(keys, "scale_attn_by_inverse_layer_idx", false)?;
    only(keys, "add_cross_attention", false)?;
    let hidden = size(keys, "n_embd")?;
    let intermediate = size_or_none(keys, "n_inner")?.unwrap_or(hidden.saturating_mul(4));
    let sizes = [
        size(keys, "n_layer")?,
        hidden,
        size(keys, "n_head")?,
        intermediate,
        size(keys, "vocab_size")?,
        size(keys, "n_positions")?,
    ];
    Ok(Shape {
        activation: activation(keys, "activation_function", "gelu_new")?,
        norm_epsilon: number(keys, "layer_norm_epsilon", 1e-5)?,
        score_scale: (!is_scaled).then_some(1.0),
        dropout: Dropouts {
            embedding: number(keys, "embd_pdrop", 0.1)?,
            attention: number(keys, "attn_pdrop", 0.1)?,
            projection: number(keys, "resid_pdrop", 0.1)?,
            feed_forward: number(keys, "resid_pdrop", 0.1)?,
            classifier: number(keys, "classifier_dropout", 0.1)?,
        },
        tied: flag(keys, "tie_word_embeddings", true)?,
        head: read_head(keys, Head::Tokens)?,
        initializer_range: number(keys, "initializer_range", 0.02)?,
        ..gpt2(sizes)
    })
}

fn write(shape: &Shape) -> Value {
    let architecture = match shape.head {
        Head::Tokens => "GPT2LMHeadModel".to_string(),
        _ => architecture(shape, "GPT2"),
    };
    let own = json!({
        "activation_function": shape.activation.name(),
        "layer_norm_epsilon": shape.norm_epsilon,
        "scale_attn_weights": shape.score_scale.is_none(),
        "embd_pdrop": shape.dropout.embedding,
        "attn_pdrop": shape.dropout.attention,
        "resid_pdrop": shape.dropout.feed_forward,
        "initializer_range": shape.initializer_range,
    });
    let names = ["n_layer", "n_embd", "n_head", "n_inner", "vocab_size", "n_positions"];
    write_keys(shape, architecture, names, own)
}
