//! StarCoder2 (Lozhkov et al. 2024): Llama's attention and names, with GPT-2's norms, biases and
//! feed-forward.

use serde_json::Value;

use super::Names;
use super::llama::{SHARED, read_shared, write_shared};
use super::read::{Keys, activation, flag, number, size_or_none};
use crate::models::{Dropouts, Shape, Window};

pub(super) static NAMES: Names = Names {
    family: "starcoder2",
    up: &["model.layers.{}.mlp.c_fc"],
    down: "model.layers.{}.mlp.c_proj",
    read,
    write,
    ..SHARED
};

fn read(keys: &Keys) -> Result<Shape, String> {
    let shape = read_shared(keys, &NAMES, 10_000.0)?;
    let residual = number(keys, "residual_dropout", 0.0)?;
    let dropout = Dropouts {
        embedding: number(keys, "embedding_dropout", 0.0)?,
        projection: residual,
        feed_forward: residual,
        ..shape.dropout
    };
    Ok(Shape {
        window: size_or_none(keys, "sliding_window")?.map(Window::of_all),
        rms_norm: false,
        norm_epsilon: number(keys, "norm_epsilon", 1e-5)?,
        biases: [flag(keys, "use_bias", true)?; 3],
        activation: activation(keys, "hidden_act", "gelu_pytorch_tanh")?,
        gated: false,
        dropout,
        tied: flag(keys, "tie_word_embeddings", true)?,
        ..shape
    })
}

fn write(shape: &Shape) -> Value {
    let mut config = write_shared(shape, "Starcoder2");
    config.as_object_mut().expect("it is one").remove("rms_norm_eps");
    config["norm_epsilon"] = shape.norm_epsilon.into();
    config["use_bias"] = shape.biases[0].into();
    config["sliding_window"] = shape.window.map(|window| window.positions).into();
    config["residual_dropout"] = shape.dropout.feed_forward.into();
    config["embedding_dropout"] = shape.dropout.embedding.into();
    config
}
