//! `config.json` of the GPT-2 family.

use std::fs;
use std::path::Path;

use serde::Deserialize;

use crate::error::Error;
use crate::models::{Dropouts, Gelu, Shape};

/// What of it is read. Other keys do not change the model.
#[derive(Deserialize)]
struct Gpt2 {
    model_type: String,
    n_layer: usize,
    n_embd: usize,
    n_head: usize,
    n_inner: Option<usize>,
    n_positions: usize,
    vocab_size: usize,
    #[serde(default = "gelu_new")]
    activation_function: String,
    #[serde(default = "epsilon")]
    layer_norm_epsilon: f32,
    #[serde(default = "tenth")]
    embd_pdrop: f32,
    #[serde(default = "tenth")]
    attn_pdrop: f32,
    #[serde(default = "tenth")]
    resid_pdrop: f32,
    #[serde(default = "yes")]
    tie_word_embeddings: bool,
    #[serde(default = "deviation")]
    initializer_range: f32,
    #[serde(default = "yes")]
    scale_attn_weights: bool,
    #[serde(default)]
    scale_attn_by_inverse_layer_idx: bool,
    #[serde(default)]
    add_cross_attention: bool,
}

// Defaults of transformers' GPT2Config.
fn gelu_new() -> String {
    "gelu_new".into()
}
fn epsilon() -> f32 {
    1e-5
}
fn tenth() -> f32 {
    0.1
}
fn deviation() -> f32 {
    0.02
}
fn yes() -> bool {
    true
}

/// The shape that a directory's `config.json` describes.
///
/// # Errors
/// The file is not there, is not of this family, or asks for what is not built.
pub(crate) fn read_shape(directory: &Path) -> Result<Shape, Error> {
    let path = directory.join("config.json");
    let refuse = |what: String| Error::refused(format_args!("{}: {what}", path.display()));
    let text = fs::read_to_string(&path).map_err(|error| refuse(error.to_string()))?;
    let kind: serde_json::Value =
        serde_json::from_str(&text).map_err(|error| refuse(error.to_string()))?;
    let family = kind.get("model_type").and_then(|kind| kind.as_str()).unwrap_or("none");
    if family != "gpt2" {
        return Err(refuse(format!("model_type is {family:?}; \"gpt2\" is what there is so far")));
    }
    let config: Gpt2 = serde_json::from_str(&text).map_err(|error| refuse(error.to_string()))?;
    debug_assert_eq!(config.model_type, "gpt2");
    let gelu = match config.activation_function.as_str() {
        "gelu_new" | "gelu_pytorch_tanh" => Gelu::Tanh,
        "gelu" => Gelu::Erf,
        other => return Err(refuse(format!("activation_function {other:?} is not built"))),
    };
    let unusual = [
        (!config.scale_attn_weights, "scale_attn_weights = false"),
        (config.scale_attn_by_inverse_layer_idx, "scale_attn_by_inverse_layer_idx = true"),
        (config.add_cross_attention, "add_cross_attention = true"),
    ];
    if let Some((_, what)) = unusual.iter().find(|(is, _)| *is) {
        return Err(refuse(format!("{what} is not built")));
    }
    Ok(Shape {
        layers: config.n_layer,
        hidden: config.n_embd,
        heads: config.n_head,
        intermediate: config.n_inner.unwrap_or(config.n_embd.saturating_mul(4)),
        vocabulary: config.vocab_size,
        positions: config.n_positions,
        gelu,
        layer_norm_epsilon: config.layer_norm_epsilon,
        dropout: Dropouts {
            embedding: config.embd_pdrop,
            attention: config.attn_pdrop,
            residual: config.resid_pdrop,
        },
        tied: config.tie_word_embeddings,
        initializer_range: config.initializer_range,
    })
}

/// Writes a directory's `config.json`, as transformers reads it.
///
/// # Errors
/// The file cannot be written.
pub(crate) fn write_shape(directory: &Path, shape: &Shape) -> Result<(), Error> {
    let path = directory.join("config.json");
    let text = serde_json::json!({
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_layer": shape.layers,
        "n_embd": shape.hidden,
        "n_head": shape.heads,
        "n_inner": shape.intermediate,
        "n_positions": shape.positions,
        "vocab_size": shape.vocabulary,
        "activation_function": match shape.gelu {
            Gelu::Tanh => "gelu_new",
            Gelu::Erf => "gelu",
        },
        "layer_norm_epsilon": shape.layer_norm_epsilon,
        "embd_pdrop": shape.dropout.embedding,
        "attn_pdrop": shape.dropout.attention,
        "resid_pdrop": shape.dropout.residual,
        "tie_word_embeddings": shape.tied,
        "initializer_range": shape.initializer_range,
        "bos_token_id": null,
        "eos_token_id": null,
    });
    let text = serde_json::to_string_pretty(&text).expect("it is plain JSON");
    fs::write(&path, text)
        .map_err(|error| Error::failed(format_args!("{}: {error}", path.display())))
}
