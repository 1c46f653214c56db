//! Helium (Kyutai 2025): Llama whose heads rotate in pairs of neighbours.

use serde_json::Value;

use super::Names;
use super::llama::{SHARED, read_shared, write_shared};
use super::read::{Keys, flag, number, with_sizes};
use crate::kernels::Rotary;
use crate::models::Shape;

pub(super) static NAMES: Names = Names { family: "helium", read, write, ..SHARED };

fn read(keys: &Keys) -> Result<Shape, String> {
    let keys = &with_sizes(keys, &[("num_key_value_heads", 20), ("head_dim", 128)]);
    let shape = read_shared(keys, &NAMES, 100_000.0)?;
    if shape.attention_width() != shape.hidden {
        return Err(format!(
            "head_dim is {}: in this family num_attention_heads × head_dim is hidden_size, which \
             is {}",
            shape.head_size, shape.hidden
        ));
    }
    Ok(Shape {
        rotary: shape.rotary.map(|rotary| Rotary { interleaved: true, ..rotary }),
        norm_epsilon: number(keys, "rms_norm_eps", 1e-8)?,
        biases: [flag(keys, "attention_bias", false)?, false, flag(keys, "mlp_bias", false)?],
        ..shape
    })
}

fn write(shape: &Shape) -> Value {
    let mut config = write_shared(shape, "Helium");
    config["attention_bias"] = shape.biases[0].into();
    config["mlp_bias"] = shape.biases[2].into();
    config
}
