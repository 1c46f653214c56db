//! DistilBERT (Sanh et al. 2019): BERT without token types, and with other names of keys and
//! tensors.

use serde_json::{Value, json};

use super::read::{Keys, activation, architecture, number, only, read_head, size, write_labels};
use super::{NONE, Names};
use crate::kernels::Activation;
use crate::models::{Dropouts, Head, Shape};

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

fn read(keys: &Keys) -> Result<Shape, String> {
    only(keys, "sinusoidal_pos_embds", false)?;
    only(keys, "tie_word_embeddings", true)?;
    let hidden = size(keys, "dim")?;
    let heads = size(keys, "n_heads")?;
    let residual = number(keys, "dropout", 0.1)?;
    Ok(Shape {
        names: &NAMES,
        layers: size(keys, "n_layers")?,
        hidden,
        heads,
        kv_heads: heads,
        head_size: hidden / heads.max(1),
        intermediate: size(keys, "hidden_dim")?,
        vocabulary: size(keys, "vocab_size")?,
        positions: size(keys, "max_position_embeddings")?,
        learned_positions: Some(0),
        token_types: 0,
        rotary: None,
        causal: false,
        window_rotary: None,
        window: None,
        rms_norm: false,
        post_norm: true,
        branch_norm: false,
        norm_offset: 0.0,
        norm_epsilon: 1e-12,
        qk_norm: false,
        biases: [true; 3],
        activation: activation(keys, "activation", "gelu")?,
        gated: false,
        transposed: true,
        chunk_positions: Shape::CHUNK_POSITIONS,
        dropout: Dropouts {
            embedding: residual,
            attention: number(keys, "attention_dropout", 0.1)?,
            projection: 0.0,
            feed_forward: residual,
            classifier: number(keys, "seq_classif_dropout", 0.2)?,
        },
        tied: true,
        head: read_head(keys, Head::Masked)?,
        embedding_scale: 1.0,
        initializer_range: number(keys, "initializer_range", 0.02)?,
    })
}

fn write(shape: &Shape) -> Value {
    let mut config = json!({
        "architectures": [architecture(shape, "DistilBert")],
        "seq_classif_dropout": shape.dropout.classifier,
        "n_layers": shape.layers,
        "dim": shape.hidden,
        "n_heads": shape.heads,
        "hidden_dim": shape.intermediate,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.positions,
        "activation": shape.activation.name(),
        "dropout": shape.dropout.feed_forward,
        "attention_dropout": shape.dropout.attention,
        "tie_word_embeddings": shape.tied,
        "initializer_range": shape.initializer_range,
    });
    write_labels(shape, &mut config);
    config
}
