//! Seed-OSS (ByteDance Seed 2025): Llama with biases of queries, keys and values, and dropout of
//! what branches add.

use serde_json::Value;

use super::Names;
use super::llama::{SHARED, read_shared, write_shared};
use super::read::{Keys, flag, number, only, with_sizes};
use crate::models::{Dropouts, Shape};

pub(super) static NAMES: Names = Names { family: "seed_oss", read, write, ..SHARED };

fn read(keys: &Keys) -> Result<Shape, String> {
    only(keys, "pretraining_tp", 1)?;
    let keys = &with_sizes(keys, &[("num_key_value_heads", 8), ("head_dim", 128)]);
    let shape = read_shared(keys, &NAMES, 10_000.0)?;
    let residual = number(keys, "residual_dropout", 0.1)?;
    Ok(Shape {
        biases: [
            flag(keys, "attention_bias", true)?,
            flag(keys, "attention_out_bias", false)?,
            flag(keys, "mlp_bias", false)?,
        ],
        dropout: Dropouts {
            attention: number(keys, "attention_dropout", 0.1)?,
            projection: residual,
            feed_forward: residual,
            ..shape.dropout
        },
        ..shape
    })
}

fn write(shape: &Shape) -> Value {
    let mut config = write_shared(shape, "SeedOss");
    for (key, bias) in ["attention_bias", "attention_out_bias", "mlp_bias"].iter().zip(shape.biases)
    {
        config[key] = bias.into();
    }
    config["residual_dropout"] = shape.dropout.feed_forward.into();
    config
}
