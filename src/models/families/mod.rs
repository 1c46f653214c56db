//! Model families: how each one's `config.json` is read and written, and the names of its tensors.
//! Everything else is shared between families.

mod bert;
mod cohere;
mod cohere2;
mod distilbert;
mod electra;
mod ernie4_5;
mod experts;
mod gemma2;
mod gemma3;
mod gemma4;
mod glm;
mod glm4;
mod gpt2;
mod gpt_neox;
mod gpt_oss;
mod granite;
mod helium;
mod llama;
mod ministral;
mod ministral3;
mod mistral;
mod mixtral;
mod modernbert;
mod olmo2;
mod olmo3;
mod olmoe;
mod opt;
mod phi3;
mod presets;
mod qwen2;
mod qwen2_moe;
mod qwen3;
mod qwen3_5;
mod qwen3_5_moe;
mod qwen3_moe;
mod qwen3_next;
mod read;
mod roberta;
mod rotary;
mod seed_oss;
mod smollm3;
mod starcoder2;

use serde_json::{Map, Value};

use super::shape::Shape;
use crate::kernels::Activation;

/// The names of linear attention's tensors.
#[derive(Clone, Copy, Debug)]
pub struct LinearNames {
    /// The projections: to queries, keys and values; to the factors of new values; to the steps; to
    /// the gates of the output. Or two, both by heads of keys: to queries, keys, values and gates;
    /// to factors and steps.
    pub projection: &'static [&'static str],
    /// The convolution.
    pub convolution: &'static str,
    /// The logarithm of each head's decay. The name is complete.
    pub log: &'static str,
    /// The bias of each head's steps. The name is complete.
    pub bias: &'static str,
    /// The norm of the output.
    pub norm: &'static str,
    /// The output projection.
    pub output: &'static str,
}

impl LinearNames {
    /// True when the columns of the projections lie by heads of keys.
    pub(crate) fn is_by_head(&self) -> bool {
        self.projection.len() == 2
    }
}

/// The names of what blocks' inputs need. `{}` stands for the number of a block.
#[derive(Clone, Copy, Debug)]
pub struct InputNames {
    /// The table of tokens. The name is complete.
    pub table: &'static str,
    /// The product of embeddings, to the inputs of all blocks.
    pub projection: &'static str,
    /// Its norm.
    pub norm: &'static str,
    /// The product of hidden states that a block multiplies its input by.
    pub gate: &'static str,
    /// The product onto hidden states.
    pub output: &'static str,
    /// The norm of that.
    pub output_norm: &'static str,
}

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
    /// The product behind it, where embeddings have other channels than hidden states.
    pub embedding_projection: &'static str,
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
    /// The tensors of all experts of a block, if files have no others: gates and up projections in
    /// turn, and the down projections. Their matrices are (inputs, outputs); the names of their
    /// biases end with `_bias`. Empty: each expert has the modules above.
    pub stacked: &'static [&'static str],
    /// The number that multiplies the output of a block. The name is complete.
    pub output_scalar: &'static str,
    /// The sinks of attention's heads.
    pub sinks: &'static str,
    /// Those of linear attention.
    pub linear: LinearNames,
    /// Those of blocks' inputs.
    pub inputs: InputNames,
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
    /// The norm behind it and its activation. Empty: there is none.
    pub class_norm: &'static str,
    /// Whether a classifier of tokens has that first layer, too.
    pub transforms_tokens: bool,
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
        const WITHOUT: [&str; 12] = [
            "bert",
            "camembert",
            "cohere2",
            "distilbert",
            "electra",
            "gpt2",
            "gpt_neox",
            "modernbert",
            "olmoe",
            "opt",
            "roberta",
            "xlm-roberta",
        ];
        !WITHOUT.contains(&self.family)
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
        const WITH: [&str; 8] = [
            "gemma4_text",
            "glm",
            "glm4",
            "gpt_neox",
            "phi3",
            "qwen3_5_text",
            "qwen3_5_moe_text",
            "qwen3_next",
        ];
        WITH.contains(&self.family)
    }

    /// Whether transformers reads a text anew when it grows beyond the positions that the model was
    /// first trained with, so that all of its keys rotate as in a long text.
    pub(crate) fn rereads_long_texts(&self) -> bool {
        self.family == "phi3"
    }

    /// Whether the family has grouped-query attention: fewer key and value heads than heads.
    pub(crate) fn has_kv_heads(&self) -> bool {
        !["gpt2", "gpt_neox", "opt"].contains(&self.family)
    }
}

const NO_LINEAR: LinearNames =
    LinearNames { projection: &[], convolution: "", log: "", bias: "", norm: "", output: "" };

const NO_INPUTS: InputNames =
    InputNames { table: "", projection: "", norm: "", gate: "", output: "", output_norm: "" };

/// Names of a family without any layers, which each family fills in.
const NONE: Names = Names {
    family: "",
    prefix: "",
    embedding: "",
    positions: "",
    token_types: "",
    stem_norm: "",
    embedding_projection: "",
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
    stacked: &[],
    output_scalar: "",
    sinks: "",
    linear: NO_LINEAR,
    inputs: NO_INPUTS,
    shared: ["", "", ""],
    shared_gate: "",
    final_norm: "",
    transform: "",
    transform_norm: "",
    head_bias: "",
    head: "lm_head.weight",
    transform_activation: None,
    class_dense: "",
    class_norm: "",
    transforms_tokens: false,
    class_out: "",
    class_activation: Activation::Tanh,
    class_drops_first: false,
    token_classes: "classifier",
    token_classifier_dropout: true,
    read: |_| Err(String::new()),
    write: |_| Value::Null,
};

static FAMILIES: [&Names; 40] = [
    &bert::NAMES,
    &cohere::NAMES,
    &cohere2::NAMES,
    &distilbert::NAMES,
    &electra::NAMES,
    &ernie4_5::NAMES,
    &gemma2::NAMES,
    &gemma3::NAMES,
    &gemma4::NAMES,
    &glm::NAMES,
    &glm4::NAMES,
    &gpt2::NAMES,
    &gpt_neox::NAMES,
    &gpt_oss::NAMES,
    &granite::NAMES,
    &helium::NAMES,
    &llama::NAMES,
    &ministral::NAMES,
    &ministral3::NAMES,
    &mistral::NAMES,
    &mixtral::NAMES,
    &modernbert::NAMES,
    &olmo2::NAMES,
    &olmo3::NAMES,
    &olmoe::NAMES,
    &opt::NAMES,
    &phi3::NAMES,
    &qwen2::NAMES,
    &qwen2_moe::NAMES,
    &qwen3::NAMES,
    &qwen3_5::NAMES,
    &qwen3_5_moe::NAMES,
    &qwen3_moe::NAMES,
    &qwen3_next::NAMES,
    &roberta::NAMES,
    &roberta::XLM,
    &roberta::CAMEMBERT,
    &seed_oss::NAMES,
    &smollm3::NAMES,
    &starcoder2::NAMES,
];

pub use gpt2::gpt2;
pub use presets::{PRESETS, preset};
pub(crate) use read::problem_type;

/// Families that are not built, and why.
const NOT_BUILT: [(&str, &str); 9] = [
    ("deepseek_v2", "whose keys and values are of low rank (MLA), which is not built"),
    ("deepseek_v3", "whose keys and values are of low rank (MLA), which is not built"),
    ("dots1", "whose router has sigmoids, groups and a correction bias: none of them is built"),
    (
        "gemma3n_text",
        "whose blocks have embeddings of their own and share keys and values: neither is built",
    ),
    ("glm4_moe", "whose router has sigmoids, groups and a correction bias: none of them is built"),
    (
        "granitemoe",
        "which has experts beside factors of embeddings, attention, residuals and logits: only the \
         dense granite is built",
    ),
    ("llama4", "which also reads images, and whose experts read weighted inputs: not built"),
    ("llama4_text", "whose router has sigmoids and whose experts read weighted inputs: not built"),
    ("mpnet", "whose blocks share a table of biases by relative position, which is not built"),
];

/// The `config.json` of the text model, where it is a part of a model that also reads images.
pub(crate) fn text_part(config: &Value) -> Option<Value> {
    let mut text = config.get("text_config")?.as_object()?.clone();
    for key in ["bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings"] {
        if let Some(value) = config.get(key).filter(|value| !value.is_null()) {
            text.entry(key).or_insert_with(|| value.clone());
        }
    }
    Some(Value::Object(text))
}

/// Reads the shape that a `config.json` describes. Of a model that also reads images, it is that of
/// the text model.
///
/// # Errors
/// A key is missing or wrong, or needs something that is not built: the key, its value, and what
/// is built.
pub fn read(config: &Value) -> Result<Shape, String> {
    let known = FAMILIES.map(|names| names.family).join(", ");
    let text = text_part(config);
    let config = text.as_ref().unwrap_or(config);
    let Some(config) = config.as_object() else { return Err("it is no JSON object".into()) };
    let kind = config.get("model_type").and_then(Value::as_str).unwrap_or("none");
    if let Some((_, why)) = NOT_BUILT.iter().find(|(family, _)| *family == kind) {
        return Err(format!("model_type is {kind:?}, {why}"));
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

/// Keeps the source's name of an activation function that has several (`gelu_new`,
/// `gelu_pytorch_tanh`): transformers computes them differently, and their last bits differ.
fn keep_activations(source: &Value, own: &mut Value) {
    let named = |value: &Value| value.as_str().and_then(Activation::named);
    for (key, value) in own.as_object_mut().into_iter().flatten() {
        let given = &source[key.as_str()];
        if named(value).is_some() && named(value) == named(given) {
            *value = given.clone();
        }
    }
}

/// Writes the `config.json` of a shape. All other keys are kept from `source`, the config that the
/// model was read with, which may be null. Of a model that also reads images, it is the config of
/// the text model alone.
pub fn write(shape: &Shape, source: &Value) -> Value {
    let text = text_part(source);
    let source = text.as_ref().unwrap_or(source);
    let mut config = source.as_object().cloned().unwrap_or_default();
    let mut own = (shape.names.write)(shape);
    shorten(&mut own);
    keep_activations(source, &mut own);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_written_config_keeps_the_name_of_an_activation_function() {
        for name in ["gelu_new", "gelu_pytorch_tanh", "silu"] {
            let text = include_str!("../../../tests/goldens/starcoder2/config.json");
            let mut source: Value = serde_json::from_str(text).expect("it is JSON");
            source["hidden_act"] = name.into();
            let mut shape = read(&source).expect("it is a model");
            assert_eq!(write(&shape, &source)["hidden_act"], name);
            shape.activation = Activation::Relu;
            assert_eq!(write(&shape, &source)["hidden_act"], "relu");
        }
    }

    /// Gemma 3 of 27 B parameters has heads of 128 channels, and scores divided by √168.
    #[test]
    fn scores_of_gemma_have_a_scale_of_their_own() {
        let text = include_str!("../../../tests/goldens/gemma3_text/config.json");
        let mut source: Value = serde_json::from_str(text).expect("it is JSON");
        let head_size = source["head_dim"].as_u64().expect("a size");
        for (scalar, scale) in [(168, Some(168.0_f64.powf(-0.5) as f32)), (head_size, None)] {
            source["query_pre_attn_scalar"] = scalar.into();
            let shape = read(&source).expect("it is a model");
            assert_eq!(shape.score_scale, scale);
            assert_eq!(write(&shape, &source)["query_pre_attn_scalar"], scalar);
        }
    }
}
