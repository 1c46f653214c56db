//! The families: how each one's `config.json` describes its parts, and the names of its tensors.
//! All else is shared.

mod bert;
mod distilbert;
mod gpt2;
mod llama;
mod mistral;
mod qwen2;
mod qwen3;
mod read;
mod roberta;

use serde_json::{Map, Value, json};

use super::shape::Shape;
use crate::kernels::Activation;

/// The names of a family's tensors; `{}` is a block's number.
#[derive(Debug)]
pub struct Names {
    /// `model_type`.
    pub family: &'static str,
    /// The front of the names, which some checkpoints leave out.
    pub prefix: &'static str,
    /// The embedding of tokens.
    pub embedding: &'static str,
    /// The tables of positions and of token types, or "".
    pub positions: &'static str,
    /// See `positions`.
    pub token_types: &'static str,
    /// The norm behind the embedding, or "".
    pub stem_norm: &'static str,
    /// The norm of attention, without `.weight`; and so on.
    pub norm1: &'static str,
    /// Queries, keys and values: three, or one for all.
    pub qkv: &'static [&'static str],
    /// Norms of queries and of keys.
    pub qk_norm: [&'static str; 2],
    /// Attention's output.
    pub projection: &'static str,
    /// The norm of the feed-forward.
    pub norm2: &'static str,
    /// The feed-forward's gate, if there is one, and its first product.
    pub up: &'static [&'static str],
    /// The feed-forward's second product.
    pub down: &'static str,
    /// The last norm; the head's transform, its norm, and its bias for each token; or "".
    pub final_norm: &'static str,
    /// See `final_norm`.
    pub transform: &'static str,
    /// See `final_norm`.
    pub transform_norm: &'static str,
    /// See `final_norm`.
    pub head_bias: &'static str,
    /// The head's table.
    pub head: &'static str,
    /// The transform's activation function, where it is not the feed-forward's.
    pub transform_activation: Option<Activation>,
    /// The two products of a head of whole sequences.
    pub class_dense: &'static str,
    /// See `class_dense`.
    pub class_out: &'static str,
    /// The activation function between them.
    pub class_activation: Activation,
    /// True when dropout comes before them, too.
    pub class_drops_first: bool,
    /// Reads a `config.json`.
    read: fn(&Map<String, Value>) -> Result<Shape, String>,
    /// Writes what `read` reads.
    write: fn(&Shape) -> Value,
}

impl PartialEq for Names {
    fn eq(&self, other: &Names) -> bool {
        self.family == other.family
    }
}

impl Names {
    /// True when a `config.json` of the family may name a head size of its own.
    pub fn has_head_size(&self) -> bool {
        ["llama", "mistral", "qwen2", "qwen3"].contains(&self.family)
    }
}

/// No names, for the parts that a family does not have.
const NONE: Names = Names {
    family: "",
    prefix: "",
    embedding: "",
    positions: "",
    token_types: "",
    stem_norm: "",
    norm1: "",
    qkv: &[],
    qk_norm: ["", ""],
    projection: "",
    norm2: "",
    up: &[],
    down: "",
    final_norm: "",
    transform: "",
    transform_norm: "",
    head_bias: "",
    head: "lm_head.weight",
    transform_activation: None,
    class_dense: "",
    class_out: "",
    class_activation: Activation::Tanh,
    class_drops_first: false,
    read: |_| Err(String::new()),
    write: |_| Value::Null,
};

/// All of them.
static FAMILIES: [&Names; 8] = [
    &bert::NAMES,
    &distilbert::NAMES,
    &gpt2::NAMES,
    &llama::NAMES,
    &mistral::NAMES,
    &qwen2::NAMES,
    &qwen3::NAMES,
    &roberta::NAMES,
];

pub use gpt2::gpt2;

/// The shapes that have a name.
pub const PRESETS: [&str; 13] = [
    "gpt-small",
    "gpt2",
    "gpt2-medium",
    "gpt2-large",
    "gpt2-xl",
    "gpt3-175b",
    "turing-nlg-17b",
    "bert-base",
    "bert-large",
    "llama-1b",
    "llama-7b",
    "llama-70b",
    "qwen",
];

/// A shape by its name.
pub fn preset(name: &str) -> Option<Shape> {
    let gpt = |layers, hidden, heads, vocabulary, positions| {
        gpt2([layers, hidden, heads, 4 * hidden, vocabulary, positions])
    };
    let of = |config: Value| read(&config).expect("a config of ours");
    let bert = |layers: usize, hidden: usize, heads: usize| {
        of(json!({
            "model_type": "bert", "num_hidden_layers": layers, "hidden_size": hidden,
            "num_attention_heads": heads, "intermediate_size": 4 * hidden, "vocab_size": 30522,
            "max_position_embeddings": 512, "type_vocab_size": 2,
        }))
    };
    Some(match name {
        "gpt-small" => gpt(6, 256, 8, 256, 256),
        "gpt2" => gpt(12, 768, 12, 50257, 1024),
        "gpt2-medium" => gpt(24, 1024, 16, 50257, 1024),
        "gpt2-large" => gpt(36, 1280, 20, 50257, 1024),
        "gpt2-xl" => gpt(48, 1600, 25, 50257, 1024),
        "gpt3-175b" => gpt(96, 12288, 96, 50257, 2048),
        "turing-nlg-17b" => gpt(78, 4256, 28, 50257, 1024),
        "bert-base" => bert(12, 768, 12),
        "bert-large" => bert(24, 1024, 16),
        "llama-1b" => of(json!({
            "model_type": "llama", "num_hidden_layers": 16, "hidden_size": 2048,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
            "intermediate_size": 8192, "vocab_size": 128256, "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5, "tie_word_embeddings": true, "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
            },
        })),
        "llama-7b" => of(json!({
            "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096,
            "num_attention_heads": 32, "intermediate_size": 11008, "vocab_size": 32000,
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        })),
        "llama-70b" => of(json!({
            "model_type": "llama", "num_hidden_layers": 80, "hidden_size": 8192,
            "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28672,
            "vocab_size": 32000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        })),
        "qwen" => of(json!({
            "model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "intermediate_size": 12288, "vocab_size": 151936, "max_position_embeddings": 40960,
            "rope_theta": 1000000.0,
        })),
        _ => return None,
    })
}

/// The shape that a `config.json` describes.
///
/// # Errors
/// What it asks for that is not built, and what is.
pub fn read(config: &Value) -> Result<Shape, String> {
    let known = FAMILIES.map(|names| names.family).join(", ");
    let Some(config) = config.as_object() else { return Err("it is no JSON object".into()) };
    let kind = config.get("model_type").and_then(Value::as_str).unwrap_or("none");
    let Some(names) = FAMILIES.iter().find(|names| names.family == kind) else {
        return Err(format!("model_type is {kind:?}: known are {known}"));
    };
    (names.read)(config)
}

/// A `config.json` of a shape, over the keys of one it was read from.
pub fn write(shape: &Shape, over: &Value) -> Value {
    let mut config = over.as_object().cloned().unwrap_or_default();
    let own = (shape.names.write)(shape);
    config.extend(own.as_object().cloned().unwrap_or_default());
    config.insert("model_type".into(), shape.names.family.into());
    // What is written is f32, whatever was read.
    config.remove("torch_dtype");
    config.insert("dtype".into(), "float32".into());
    // Names of classes that it had are better than numbers.
    let count = |labels: &Value| labels.as_object().map(Map::len);
    if count(&over["id2label"]) == count(&own["id2label"]) {
        for key in ["id2label", "label2id"].into_iter().filter(|key| over.get(key).is_some()) {
            config.insert(key.into(), over[key].clone());
        }
    }
    Value::Object(config)
}
