//! Model families: how each one's `config.json` is read and written, and the names of its tensors.
//! Everything else is shared between families.

mod bert;
mod distilbert;
mod gemma3;
mod gpt2;
mod llama;
mod mistral;
mod opt;
mod phi3;
mod qwen2;
mod qwen3;
mod read;
mod roberta;
mod rotary;

use serde_json::{Map, Value, json};

use super::shape::Shape;
use crate::kernels::Activation;

/// The tensor names of a family. `{}` stands for the number of a transformer block. Names of layers
/// have no `.weight` or `.bias`; names of tables and of `head_bias` are complete. A layer that the
/// family does not have is named "".
#[derive(Debug)]
pub struct Names {
    /// The family's `model_type` in `config.json`.
    pub family: &'static str,
    /// The beginning of names that some checkpoints leave out.
    pub prefix: &'static str,
    /// The table of token embeddings.
    pub embedding: &'static str,
    /// The table of learned positions.
    pub positions: &'static str,
    /// The table of token types.
    pub token_types: &'static str,
    /// The norm after the embedding.
    pub stem_norm: &'static str,
    /// The norm of the attention.
    pub norm1: &'static str,
    /// The projections to queries, keys and values: three layers, or one for all.
    pub qkv: &'static [&'static str],
    /// The norms of the queries and of the keys.
    pub qk_norm: [&'static str; 2],
    /// The output projection of the attention.
    pub projection: &'static str,
    /// The norm of the feed-forward.
    pub norm2: &'static str,
    /// The norms of the outputs of attention and of the feed-forward, before they are added.
    pub branch_norms: [&'static str; 2],
    /// The first layer of the feed-forward: the gate, if there is one, and the up projection; or
    /// one for both.
    pub up: &'static [&'static str],
    /// The second layer of the feed-forward: the down projection.
    pub down: &'static str,
    /// The router of a block with experts.
    pub router: &'static str,
    /// The gate, the up projection and the down projection of an expert. The second `{}` stands for
    /// the number of the expert.
    pub expert: [&'static str; 3],
    /// The gate, the up projection and the down projection of the shared expert.
    pub shared: [&'static str; 3],
    /// The layer whose sigmoid multiplies the output of the shared expert.
    pub shared_gate: &'static str,
    /// The norm after the last block.
    pub final_norm: &'static str,
    /// The transform of a masked LM head: a dense layer before the norm and the vocabulary.
    pub transform: &'static str,
    /// The norm after the transform.
    pub transform_norm: &'static str,
    /// The bias of a masked LM head, one number a token.
    pub head_bias: &'static str,
    /// The table of the LM head.
    pub head: &'static str,
    /// The activation of the transform, if it differs from the feed-forward's.
    pub transform_activation: Option<Activation>,
    /// The first layer of a classifier, a dense layer on the first position (BERT's pooler). Empty:
    /// it has one layer, without a bias, on the last position.
    pub class_dense: &'static str,
    /// The second layer of a classifier, which gives the logits of the classes.
    pub class_out: &'static str,
    /// The activation between the two layers of the classifier.
    pub class_activation: Activation,
    /// Whether dropout also comes before the first layer of the classifier.
    pub class_drops_first: bool,
    /// The layer that classifies tokens. Empty: transformers has no such model of the family.
    pub token_classes: &'static str,
    /// Whether the dropout of a head of tokens' classes is the classifier's; else it is the
    /// feed-forward's.
    pub token_classifier_dropout: bool,
    /// Reads a `config.json`.
    read: fn(&Map<String, Value>) -> Result<Shape, String>,
    /// Writes the keys that `read` reads.
    write: fn(&Shape) -> Value,
}

impl PartialEq for Names {
    fn eq(&self, other: &Names) -> bool {
        self.family == other.family
    }
}

impl Names {
    /// Whether a `config.json` of the family may give a head size (`head_dim`).
    pub fn has_head_size(&self) -> bool {
        ["gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3"].contains(&self.family)
    }

    /// The two names of the bias of a masked LM head: with the weight in one layer, and alone. If
    /// files have both, transformers adds the layer's. If the weight is the embedding's, it writes
    /// the other.
    pub(crate) fn head_biases(&self) -> [String; 2] {
        let layer = self.head.strip_suffix("weight").unwrap_or(self.head);
        [format!("{layer}bias"), self.head_bias.into()]
    }

    /// Whether a part of each head may rotate, as in transformers.
    pub(crate) fn rotates_parts(&self) -> bool {
        self.family == "phi3"
    }

    /// Whether transformers reads a text anew when it grows beyond the positions that the model was
    /// first trained with, so that all of its keys rotate as in a long text.
    pub(crate) fn rereads_long_texts(&self) -> bool {
        self.family == "phi3"
    }

    /// Whether the family has grouped-query attention: fewer key and value heads than heads.
    pub(crate) fn has_kv_heads(&self) -> bool {
        !["gpt2", "opt"].contains(&self.family)
    }
}

/// Names of a family without any layers, which each family fills in.
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
    branch_norms: ["", ""],
    up: &[],
    down: "",
    router: "",
    expert: ["", "", ""],
    shared: ["", "", ""],
    shared_gate: "",
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
    token_classes: "classifier",
    token_classifier_dropout: true,
    read: |_| Err(String::new()),
    write: |_| Value::Null,
};

static FAMILIES: [&Names; 11] = [
    &bert::NAMES,
    &distilbert::NAMES,
    &gemma3::NAMES,
    &gpt2::NAMES,
    &llama::NAMES,
    &mistral::NAMES,
    &opt::NAMES,
    &phi3::NAMES,
    &qwen2::NAMES,
    &qwen3::NAMES,
    &roberta::NAMES,
];

pub use gpt2::gpt2;
pub(crate) use read::problem_type;

/// The names that [`preset`] knows.
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

/// The shape of a well-known model, by its name. `None` for an unknown name.
pub fn preset(name: &str) -> Option<Shape> {
    let gpt = |layers, hidden, heads, vocabulary, positions| {
        gpt2([layers, hidden, heads, 4 * hidden, vocabulary, positions])
    };
    let shape = |config: Value| read(&config).expect("the preset's own config is valid");
    let bert = |layers: usize, hidden: usize, heads: usize| {
        shape(json!({
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
        "llama-1b" => shape(json!({
            "model_type": "llama", "num_hidden_layers": 16, "hidden_size": 2048,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
            "intermediate_size": 8192, "vocab_size": 128256, "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5, "tie_word_embeddings": true, "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
            },
        })),
        "llama-7b" => shape(json!({
            "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096,
            "num_attention_heads": 32, "intermediate_size": 11008, "vocab_size": 32000,
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        })),
        "llama-70b" => shape(json!({
            "model_type": "llama", "num_hidden_layers": 80, "hidden_size": 8192,
            "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28672,
            "vocab_size": 32000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        })),
        "qwen" => shape(json!({
            "model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "intermediate_size": 12288, "vocab_size": 151936, "max_position_embeddings": 40960,
            "rope_theta": 1000000.0,
        })),
        _ => return None,
    })
}

/// Reads the shape that a `config.json` describes.
///
/// # Errors
/// A key is missing or wrong, or needs something that is not built: the key, its value, and what
/// is built.
pub fn read(config: &Value) -> Result<Shape, String> {
    let known = FAMILIES.map(|names| names.family).join(", ");
    let Some(config) = config.as_object() else { return Err("it is no JSON object".into()) };
    let kind = config.get("model_type").and_then(Value::as_str).unwrap_or("none");
    if kind == "gemma3" {
        return Err("model_type is \"gemma3\", which also reads images: only its text model \
                    (gemma3_text, as google/gemma-3-1b-it) is built"
            .into());
    }
    let Some(names) = FAMILIES.iter().find(|names| names.family == kind) else {
        return Err(format!("model_type is {kind:?}: known are {known}"));
    };
    let shape = (names.read)(config)?;
    rotary::check_rotary(&shape)?;
    Ok(shape)
}

/// Writes each number that is an f32 in as few digits as tell it: 1e-6, not 9.999999974752427e-7.
pub(crate) fn shorten(value: &mut Value) {
    match value {
        Value::Number(number) if number.is_f64() => {
            let single = number.as_f64().unwrap_or_default() as f32;
            let is_single = Some(f64::from(single)) == number.as_f64();
            if let Some(short) = single.to_string().parse().ok().filter(|_| is_single) {
                *value = serde_json::Number::from_f64(short).map_or(Value::Null, Value::Number);
            }
        }
        Value::Array(all) => all.iter_mut().for_each(shorten),
        Value::Object(all) => all.values_mut().for_each(shorten),
        _ => {}
    }
}

/// Writes the `config.json` of a shape. All other keys are kept from `source`, the config that the
/// model was read with, which may be null.
pub fn write(shape: &Shape, source: &Value) -> Value {
    let mut config = source.as_object().cloned().unwrap_or_default();
    let mut own = (shape.names.write)(shape);
    shorten(&mut own);
    config.extend(own.as_object().cloned().unwrap_or_default());
    config.insert("model_type".into(), shape.names.family.into());
    // Weights are written as f32, whatever dtype they were read in.
    config.remove("torch_dtype");
    config.remove("quantization_config");
    config.insert("dtype".into(), "float32".into());
    // The source's names of the classes are kept, if it has as many classes.
    let count = |labels: &Value| labels.as_object().map(Map::len);
    if count(&source["id2label"]) == count(&own["id2label"]) {
        for key in ["id2label", "label2id"].into_iter().filter(|key| source.get(key).is_some()) {
            config.insert(key.into(), source[key].clone());
        }
    }
    let mut config = Value::Object(config);
    rotary::keep_rotary(shape, source, &mut config);
    config
}
