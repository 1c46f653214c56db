//! ERNIE 4.5, dense models of text (Baidu 2025): Llama whose heads rotate in pairs of neighbours,
//! and all of whose products have biases, or none has.

use serde_json::Value;

use super::Names;
use super::llama::{SHARED, read_shared, write_shared};
use super::read::{Keys, flag, number, with_sizes};
use crate::kernels::Rotary;
use crate::models::Shape;

pub(super) static NAMES: Names = Names {
    family: "ernie4_5",
    // transformers has no models of the family that classify.
    class_out: "",
    token_classes: "",
    read,
    write,
    ..SHARED
};

fn read(keys: &Keys) -> Result<Shape, String> {
    let keys = &with_sizes(keys, &[("num_key_value_heads", 2), ("head_dim", 128)]);
    let shape = read_shared(keys, &NAMES, 500_000.0)?;
    Ok(Shape {
        rotary: shape.rotary.map(|rotary| Rotary { interleaved: true, ..rotary }),
        norm_epsilon: number(keys, "rms_norm_eps", 1e-5)?,
        biases: [flag(keys, "use_bias", false)?; 3],
        tied: flag(keys, "tie_word_embeddings", true)?,
        ..shape
    })
}

fn write(shape: &Shape) -> Value {
    let mut config = write_shared(shape, "Ernie4_5");
    config["use_bias"] = shape.biases[0].into();
    config
}
