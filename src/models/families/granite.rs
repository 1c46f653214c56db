//! Granite (Granite Team 2024): Llama with factors of embeddings, of attention's scores, of what
//! branches add, and of logits.

use serde_json::Value;

use super::Names;
use super::llama::{SHARED, read_shared, write_shared};
use super::read::{Keys, above_zero, flag, number};
use crate::kernels::LogitForm;
use crate::models::Shape;

pub(super) static NAMES: Names = Names { family: "granite", read, write, ..SHARED };

fn read(keys: &Keys) -> Result<Shape, String> {
    let bias = flag(keys, "attention_bias", false)?;
    let divisor = above_zero(keys, "logits_scaling")?.unwrap_or(1.0);
    Ok(Shape {
        score_scale: Some(number(keys, "attention_multiplier", 1.0)?),
        embedding_scale: number(keys, "embedding_multiplier", 1.0)?,
        residual_scale: number(keys, "residual_multiplier", 1.0)?,
        logits: LogitForm { scale: 1.0 / divisor, cap: None },
        biases: [bias, bias, flag(keys, "mlp_bias", false)?],
        ..read_shared(keys, &NAMES, 10_000.0)?
    })
}

fn write(shape: &Shape) -> Value {
    let mut config = write_shared(shape, "Granite");
    config["attention_bias"] = shape.biases[0].into();
    config["mlp_bias"] = shape.biases[2].into();
    config["attention_multiplier"] = shape.score_scale.into();
    config["embedding_multiplier"] = shape.embedding_scale.into();
    config["residual_multiplier"] = shape.residual_scale.into();
    config["logits_scaling"] = (1.0 / shape.logits.scale).into();
    config
}
