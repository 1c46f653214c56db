//! BERT (Devlin et al. 2019): an encoder with bidirectional attention, learned positions, token
//! types and post-norm blocks. The masked LM head has a transform and a bias.

use serde_json::{Value, json};

use super::read::{
    Keys, SIZES, activation, architecture, flag, number, only, read_head, size, sizes, write_keys,
};
use super::{NONE, Names, gpt2};
use crate::models::{Dropouts, Head, NormPlaces, Shape};

pub(super) static NAMES: Names = Names {
    family: "bert",
    prefix: "bert.",
    embedding: "bert.embeddings.word_embeddings.weight",
    positions: "bert.embeddings.position_embeddings.weight",
    token_types: "bert.embeddings.token_type_embeddings.weight",
    stem_norm: "bert.embeddings.LayerNorm",
    qkv: &[
        "bert.encoder.layer.{}.attention.self.query",
        "bert.encoder.layer.{}.attention.self.key",
        "bert.encoder.layer.{}.attention.self.value",
    ],
    projection: "bert.encoder.layer.{}.attention.output.dense",
    norm1: "bert.encoder.layer.{}.attention.output.LayerNorm",
    up: &["bert.encoder.layer.{}.intermediate.dense"],
    down: "bert.encoder.layer.{}.output.dense",
    norm2: "bert.encoder.layer.{}.output.LayerNorm",
    transform: "cls.predictions.transform.dense",
    transform_norm: "cls.predictions.transform.LayerNorm",
    head_bias: "cls.predictions.bias",
    head: "cls.predictions.decoder.weight",
    class_dense: "bert.pooler.dense",
    class_out: "classifier",
    read,
    write,
    ..NONE
};

/// Reads the keys that BERT and RoBERTa share: all but the position of the first token.
pub(super) fn read_shared(keys: &Keys, names: &'static Names) -> Result<Shape, String> {
    only(keys, "position_embedding_type", "absolute")?;
    only(keys, "is_decoder", false)?;
    let residual = number(keys, "hidden_dropout_prob", 0.1)?;
    Ok(Shape {
        names,
        token_types: size(keys, "type_vocab_size")?,
        causal: false,
        norms: NormPlaces::BehindSums,
        norm_epsilon: number(keys, "layer_norm_eps", 1e-12)?,
        activation: activation(keys, "hidden_act", "gelu")?,
        transposed: true,
        dropout: Dropouts {
            embedding: residual,
            attention: number(keys, "attention_probs_dropout_prob", 0.1)?,
            projection: residual,
            feed_forward: residual,
            classifier: number(keys, "classifier_dropout", residual)?,
        },
        tied: flag(keys, "tie_word_embeddings", true)?,
        head: read_head(keys, Head::Masked)?,
        initializer_range: number(keys, "initializer_range", 0.02)?,
        ..gpt2(sizes(keys, SIZES)?)
    })
}

/// Writes the keys that [`read_shared`] reads.
pub(super) fn write_shared(shape: &Shape, family: &str) -> Value {
    let own = json!({
        "classifier_dropout": shape.dropout.classifier,
        "max_position_embeddings": shape.positions + shape.learned_positions.unwrap_or(0),
        "type_vocab_size": shape.token_types,
        "layer_norm_eps": shape.norm_epsilon,
        "hidden_act": shape.activation.name(),
        "hidden_dropout_prob": shape.dropout.feed_forward,
        "attention_probs_dropout_prob": shape.dropout.attention,
        "initializer_range": shape.initializer_range,
    });
    write_keys(shape, architecture(shape, family), SIZES, own)
}

fn read(keys: &Keys) -> Result<Shape, String> {
    read_shared(keys, &NAMES)
}

fn write(shape: &Shape) -> Value {
    write_shared(shape, "Bert")
}
