//! Command R (Cohere 2024): Llama whose attention and feed-forward read the same normed input, with
//! LayerNorms that have no shifts, rotary positions in pairs of neighbours, and a factor of logits.

use serde_json::Value;

use super::Names;
use super::llama::{SHARED, read_shared, write_shared};
use super::read::{Keys, flag, number};
use crate::kernels::{LogitForm, QkNorm, Rotary};
use crate::models::{NormPlaces, Shape};

pub(super) static NAMES: Names = Names {
    family: "cohere",
    qk_norm: ["model.layers.{}.self_attn.q_norm", "model.layers.{}.self_attn.k_norm"],
    read,
    write,
    ..ONE_NORM
};

/// Whether each head of queries and keys has a norm (Command R+).
const QK_NORM: &str = "use_qk_norm";

/// The names that both Cohere families share.
pub(super) const ONE_NORM: Names = Names {
    norm2: "",
    // transformers has no models of these families that classify.
    class_out: "",
    token_classes: "",
    ..SHARED
};

/// Reads the keys that both Cohere families share.
pub(super) fn read_cohere(keys: &Keys, names: &'static Names, theta: f32) -> Result<Shape, String> {
    let bias = flag(keys, "attention_bias", false)?;
    let shape = read_shared(keys, names, theta)?;
    Ok(Shape {
        rotary: shape.rotary.map(|rotary| Rotary { interleaved: true, ..rotary }),
        rms_norm: false,
        norms_only_scale: true,
        norms: NormPlaces::BeforeBoth,
        norm_epsilon: number(keys, "layer_norm_eps", 1e-5)?,
        biases: [bias, bias, false],
        logits: LogitForm { scale: number(keys, "logit_scale", 0.0625)?, cap: None },
        tied: flag(keys, "tie_word_embeddings", true)?,
        ..shape
    })
}

/// Writes the keys that [`read_cohere`] reads.
pub(super) fn write_cohere(shape: &Shape, family: &str) -> Value {
    let mut config = write_shared(shape, family);
    config.as_object_mut().expect("it is one").remove("rms_norm_eps");
    config["layer_norm_eps"] = shape.norm_epsilon.into();
    config["attention_bias"] = shape.biases[0].into();
    config["logit_scale"] = shape.logits.scale.into();
    config
}

fn read(keys: &Keys) -> Result<Shape, String> {
    let qk_norm = flag(keys, QK_NORM, false)?.then_some(QkNorm::LayerNorm);
    Ok(Shape { qk_norm, ..read_cohere(keys, &NAMES, 500_000.0)? })
}

fn write(shape: &Shape) -> Value {
    let mut config = write_cohere(shape, "Cohere");
    config[QK_NORM] = shape.qk_norm.is_some().into();
    config
}
