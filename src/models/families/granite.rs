//! Granite (Granite Team 2024): Llama with factors of embeddings, of attention's scores, of what
//! branches add, and of logits.

use serde_json::Value;

use super::Names;
use super::llama::{SHARED, read_shared, write_shared};
use super::read::{Keys, above_zero, flag, number};
use crate::kernels::LogitForm;
use crate::models::Shape;

pub(super) static NAMES: Names = Names {
    family: "granite",
    // transformers has no models of this family that classify.
    class_out: "",
    token_classes: "",
    read,
    write,
    ..SHARED
};

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
    config["logits_scaling"] = divisor(shape.logits.scale).into();
    config
}

/// The divisor with the fewest digits whose reciprocal is this factor: the one that was read.
fn divisor(factor: f32) -> f32 {
    let exact = 1.0 / f64::from(factor);
    let rounded = |digits: usize| format!("{exact:.digits$}").parse().unwrap_or(exact as f32);
    let is_it = |divisor: &f32| 1.0 / divisor == factor;
    (0..9).map(rounded).find(is_it).unwrap_or(exact as f32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_divisor_is_written_as_it_was_read() {
        for divisor_read in [1.0, 1.75, 3.0, 8.0, 13.7, 0.3] {
            assert_eq!(divisor(1.0 / divisor_read), divisor_read);
        }
    }
}
