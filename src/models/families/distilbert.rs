//! DistilBERT (Sanh et al. 2019): BERT without token types, and with other names of keys and
//! tensors.

use serde_json::{Value, json};

use super::read::{
    Keys, activation, architecture, flag, number, only, read_head, sizes, write_keys,
};
use super::{NONE, Names, gpt2};
use crate::kernels::Activation;
use crate::models::{Dropouts, Head, NormPlaces, Shape};

pub(super) static NAMES: Names = Names {
    family: "distilbert",
    prefix: "distilbert.",
    embedding: "distilbert.embeddings.word_embeddings.weight",
    positions: "distilbert.embeddings.position_embeddings.weight",
    stem_norm: "distilbert.embeddings.LayerNorm",
    qkv: &[
        "distilbert.transformer.layer.{}.attention.q_lin",
        "distilbert.transformer.layer.{}.attention.k_lin",
        "distilbert.transformer.layer.{}.attention.v_lin",
    ],
    projection: "distilbert.transformer.layer.{}.attention.out_lin",
    norm1: "distilbert.transformer.layer.{}.sa_layer_norm",
    up: &["distilbert.transformer.layer.{}.ffn.lin1"],
    down: "distilbert.transformer.layer.{}.ffn.lin2",
    norm2: "distilbert.transformer.layer.{}.output_layer_norm",
    transform: "vocab_transform",
    transform_norm: "vocab_layer_norm",
    head_bias: "vocab_projector.bias",
    head: "vocab_projector.weight",
    class_dense: "pre_classifier",
    class_out: "classifier",
    class_activation: Activation::Relu,
    token_classifier_dropout: false,
    read,
    write,
    ..NONE
};

const SIZES: [&str; 6] =
    ["n_layers", "dim", "n_heads", "hidden_dim", "vocab_size", "max_position_embeddings"];

fn read(keys: &Keys) -> Result<Shape, String> {
    only(keys, "sinusoidal_pos_embds", false)?;
    let residual = number(keys, "dropout", 0.1)?;
    Ok(Shape {
        names: &NAMES,
        causal: false,
        norms: NormPlaces::BehindSums,
        norm_epsilon: 1e-12,
        activation: activation(keys, "activation", "gelu")?,
        transposed: true,
        dropout: Dropouts {
            embedding: residual,
            attention: number(keys, "attention_dropout", 0.1)?,
            projection: 0.0,
            feed_forward: residual,
            classifier: number(keys, "seq_classif_dropout", 0.2)?,
        },
        tied: flag(keys, "tie_word_embeddings", true)?,
        head: read_head(keys, Head::Masked)?,
        initializer_range: number(keys, "initializer_range", 0.02)?,
        ..gpt2(sizes(keys, SIZES)?)
    })
}

fn write(shape: &Shape) -> Value {
    let own = json!({
        "seq_classif_dropout": shape.dropout.classifier,
        "activation": shape.activation.name(),
        "dropout": shape.dropout.feed_forward,
        "attention_dropout": shape.dropout.attention,
        "initializer_range": shape.initializer_range,
    });
    write_keys(shape, architecture(shape, "DistilBert"), SIZES, own)
}
