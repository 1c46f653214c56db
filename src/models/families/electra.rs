//! ELECTRA's discriminator (Clark et al. 2020): BERT without a pooler, with a head of classes of
//! its own. Embeddings may have fewer channels than hidden states, as in ELECTRA-small.

use serde_json::Value;

use super::bert::{read_shared, write_shared};
use super::read::{Keys, read_head, size_or_none};
use super::{NONE, Names};
use crate::kernels::Activation;
use crate::models::{Head, Shape};

pub(super) static NAMES: Names = Names {
    family: "electra",
    prefix: "electra.",
    embedding: "electra.embeddings.word_embeddings.weight",
    positions: "electra.embeddings.position_embeddings.weight",
    token_types: "electra.embeddings.token_type_embeddings.weight",
    stem_norm: "electra.embeddings.LayerNorm",
    embedding_projection: "electra.embeddings_project",
    qkv: &[
        "electra.encoder.layer.{}.attention.self.query",
        "electra.encoder.layer.{}.attention.self.key",
        "electra.encoder.layer.{}.attention.self.value",
    ],
    projection: "electra.encoder.layer.{}.attention.output.dense",
    norm1: "electra.encoder.layer.{}.attention.output.LayerNorm",
    up: &["electra.encoder.layer.{}.intermediate.dense"],
    down: "electra.encoder.layer.{}.output.dense",
    norm2: "electra.encoder.layer.{}.output.LayerNorm",
    class_dense: "classifier.dense",
    class_activation: Activation::GeluErf,
    class_out: "classifier.out_proj",
    class_drops_first: true,
    read,
    write,
    ..NONE
};

const EMBEDDING: &str = "embedding_size";
const MOST: usize = 1 << 20;

fn read(keys: &Keys) -> Result<Shape, String> {
    let shape = read_shared(keys, &NAMES)?;
    let width = size_or_none(keys, EMBEDDING)?.unwrap_or(128);
    if !(1..=MOST).contains(&width) {
        return Err(format!("{EMBEDDING} is {width}: it must be 1 to {MOST}"));
    }
    let embedding_channels = (width != shape.hidden).then_some(width);
    Ok(Shape { embedding_channels, head: read_head(keys, Head::EMBEDDING)?, ..shape })
}

fn write(shape: &Shape) -> Value {
    let mut config = write_shared(shape, "Electra");
    config[EMBEDDING] = shape.embedding_width().into();
    config
}
