//! RoBERTa (Liu et al. 2019), XLM-RoBERTa (Conneau et al. 2020) and CamemBERT (Martin et al. 2020):
//! BERT with a position table that begins after the padding token's position.

use serde_json::Value;

use super::bert::{read_shared, write_shared};
use super::read::{Keys, size_or_none};
use super::{NONE, Names};
use crate::kernels::Activation;
use crate::models::Shape;

pub(super) static NAMES: Names = Names {
    family: "roberta",
    read: |keys| read(keys, &NAMES),
    write: |shape| write(shape, "Roberta"),
    ..SHARED
};

pub(super) static XLM: Names = Names {
    family: "xlm-roberta",
    read: |keys| read(keys, &XLM),
    write: |shape| write(shape, "XLMRoberta"),
    ..SHARED
};

pub(super) static CAMEMBERT: Names = Names {
    family: "camembert",
    read: |keys| read(keys, &CAMEMBERT),
    write: |shape| write(shape, "Camembert"),
    ..SHARED
};

const SHARED: Names = Names {
    prefix: "roberta.",
    embedding: "roberta.embeddings.word_embeddings.weight",
    positions: "roberta.embeddings.position_embeddings.weight",
    token_types: "roberta.embeddings.token_type_embeddings.weight",
    stem_norm: "roberta.embeddings.LayerNorm",
    qkv: &[
        "roberta.encoder.layer.{}.attention.self.query",
        "roberta.encoder.layer.{}.attention.self.key",
        "roberta.encoder.layer.{}.attention.self.value",
    ],
    projection: "roberta.encoder.layer.{}.attention.output.dense",
    norm1: "roberta.encoder.layer.{}.attention.output.LayerNorm",
    up: &["roberta.encoder.layer.{}.intermediate.dense"],
    down: "roberta.encoder.layer.{}.output.dense",
    norm2: "roberta.encoder.layer.{}.output.LayerNorm",
    transform: "lm_head.dense",
    transform_norm: "lm_head.layer_norm",
    head_bias: "lm_head.bias",
    head: "lm_head.decoder.weight",
    transform_activation: Some(Activation::GeluErf),
    class_dense: "classifier.dense",
    class_out: "classifier.out_proj",
    class_drops_first: true,
    ..NONE
};

fn read(keys: &Keys, names: &'static Names) -> Result<Shape, String> {
    let shape = read_shared(keys, names)?;
    let before = size_or_none(keys, "pad_token_id")?.unwrap_or(1).saturating_add(1);
    let Some(positions) = shape.positions.checked_sub(before) else {
        return Err(format!("max_position_embeddings must be above {before}"));
    };
    Ok(Shape { positions, learned_positions: Some(before), ..shape })
}

fn write(shape: &Shape, architecture: &str) -> Value {
    let mut config = write_shared(shape, architecture);
    config["pad_token_id"] = (shape.learned_positions.unwrap_or(2) - 1).into();
    config
}
