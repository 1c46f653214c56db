//! Reads single keys of a `config.json`. Errors name the key and its value.

use serde_json::{Map, Value};

use crate::kernels::{Activation, ProblemType};
use crate::models::{BlockPattern, Head, Shape, Window};

/// The keys of a `config.json`.
pub(super) type Keys = Map<String, Value>;

pub(super) fn wrong(key: &str, value: &Value, must: &str) -> String {
    format!("{key} is {value}: it must be {must}")
}

/// The value of a key; `None` when it is absent or null.
pub(super) fn given<'k>(keys: &'k Keys, key: &str) -> Option<&'k Value> {
    keys.get(key).filter(|value| !value.is_null())
}

/// A whole number; `None` when it is absent or null.
pub(super) fn size_or_none(keys: &Keys, key: &str) -> Result<Option<usize>, String> {
    let size = |value: &Value| {
        let size = value.as_u64().and_then(|size| usize::try_from(size).ok());
        size.ok_or_else(|| wrong(key, value, "a whole number, at least 0"))
    };
    given(keys, key).map(size).transpose()
}

/// A whole number that must be given.
pub(super) fn size(keys: &Keys, key: &str) -> Result<usize, String> {
    size_or_none(keys, key)?.ok_or_else(|| format!("{key} is missing"))
}

/// The keys of [`sizes`] that most families have.
pub(super) const SIZES: [&str; 6] = [
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
];

/// The six sizes of a shape, in the order of [`gpt2`](fn@super::gpt2), by their keys.
pub(super) fn sizes(keys: &Keys, names: [&str; 6]) -> Result<[usize; 6], String> {
    let mut sizes = [0; 6];
    for (to, name) in sizes.iter_mut().zip(names) {
        *to = size(keys, name)?;
    }
    Ok(sizes)
}

/// The positions of a sliding window; `None` when it is null. Absent: transformers' default.
pub(super) fn sliding_window(keys: &Keys) -> Result<Option<usize>, String> {
    match keys.contains_key("sliding_window") {
        true => size_or_none(keys, "sliding_window"),
        false => Ok(Some(4096)),
    }
}

/// The keys, with transformers' defaults of sizes that are absent.
pub(super) fn with_sizes(keys: &Keys, absent: &[(&str, usize)]) -> Keys {
    let mut keys = keys.clone();
    for (key, size) in absent {
        keys.entry(*key).or_insert((*size).into());
    }
    keys
}

/// A number.
pub(super) fn number(keys: &Keys, key: &str, default: f32) -> Result<f32, String> {
    let number = |value: &Value| {
        let number = value.as_f64().map(|number| number as f32).filter(|number| number.is_finite());
        number.ok_or_else(|| wrong(key, value, "a number"))
    };
    given(keys, key).map_or(Ok(default), number)
}

/// A number above 0; `None` when it is absent or null.
pub(super) fn above_zero(keys: &Keys, key: &str) -> Result<Option<f32>, String> {
    let Some(value) = given(keys, key) else { return Ok(None) };
    let number = number(keys, key, 0.0)?;
    if number > 0.0 { Ok(Some(number)) } else { Err(wrong(key, value, "above 0")) }
}

/// A truth value.
pub(super) fn flag(keys: &Keys, key: &str, default: bool) -> Result<bool, String> {
    let flag = |value: &Value| value.as_bool().ok_or_else(|| wrong(key, value, "true or false"));
    given(keys, key).map_or(Ok(default), flag)
}

/// Refuses every value of a key except the one that is built.
pub(super) fn only(keys: &Keys, key: &str, value: impl Into<Value>) -> Result<(), String> {
    let value = value.into();
    match given(keys, key) {
        Some(given) if *given != value => Err(format!("{key} is {given}: only {value} is built")),
        _ => Ok(()),
    }
}

/// The activation function that a key names.
pub(super) fn activation(keys: &Keys, key: &str, default: &str) -> Result<Activation, String> {
    let name = given(keys, key)
        .map_or(Ok(default), |value| value.as_str().ok_or_else(|| wrong(key, value, "a name")))?;
    Activation::named(name).ok_or_else(|| {
        let known = Activation::ALL.map(|(name, _)| name).join(", ");
        format!("{key} is {name:?}: known are {known}")
    })
}

/// Of each block, whether `layer_types` says that its attention slides; `None` without that key.
pub(super) fn layer_types(keys: &Keys) -> Result<Option<Vec<bool>>, String> {
    let Some(types) = given(keys, "layer_types") else { return Ok(None) };
    let layers = size(keys, "num_hidden_layers")?;
    let types = types.as_array().filter(|types| types.len() == layers);
    let types = types.ok_or_else(|| format!("layer_types must be a list of {layers} kinds"))?;
    let slides = |kind: &Value| match kind.as_str() {
        Some("full_attention") => Ok(false),
        Some("sliding_attention") => Ok(true),
        _ => Err(format!("layer_types has {kind}: known are full_attention, sliding_attention")),
    };
    types.iter().map(slides).collect::<Result<Vec<_>, _>>().map(Some)
}

/// The blocks that a list names.
pub(super) fn listed_blocks(key: &str, blocks: &[bool]) -> Result<BlockPattern, String> {
    BlockPattern::listed(blocks).ok_or_else(|| {
        let most = BlockPattern::LONGEST;
        format!(
            "{key} has {} blocks, and does not repeat after {most} or fewer: that is not built",
            blocks.len()
        )
    })
}

/// All blocks but the last of every few, whose number `key` gives.
pub(super) fn all_but_last(key: &str, every: usize) -> Result<BlockPattern, String> {
    BlockPattern::all_but(every, every.saturating_sub(1))
        .ok_or_else(|| format!("{key} is {every}: it must be at most {}", BlockPattern::LONGEST))
}

/// The window of the blocks that slide by `layer_types`; without that key, of all but the last of
/// every `every`.
pub(super) fn window_of_most(
    keys: &Keys,
    positions: usize,
    every: usize,
) -> Result<Window, String> {
    match layer_types(keys)? {
        None => {
            let blocks = all_but_last("sliding_window_pattern", every)?;
            Ok(Window { blocks, ..Window::of_all(positions) })
        }
        Some(slides) => window_by_kinds("layer_types", &slides, positions),
    }
}

/// The window of the blocks that slide, which `key` names.
pub(super) fn window_by_kinds(
    key: &str,
    slides: &[bool],
    positions: usize,
) -> Result<Window, String> {
    let blocks = listed_blocks(key, slides)?;
    Ok(Window { blocks, ..Window::of_all(positions) })
}

pub(super) fn write_layer_types(shape: &Shape, config: &mut Value) {
    let slides = |number: usize| shape.window.is_some_and(|window| window.is_of(number));
    let kind = |number| if slides(number) { "sliding_attention" } else { "full_attention" };
    config["layer_types"] = (0..shape.layers).map(kind).collect();
}

/// The head that a model's `architectures` name: of classes, else `tokens`.
pub(super) fn read_head(keys: &Keys, tokens: Head) -> Result<Head, String> {
    let named = given(keys, "architectures").and_then(|names| names[0].as_str()).unwrap_or("");
    let of_tokens = named.ends_with("ForTokenClassification");
    if !of_tokens && !named.ends_with("ForSequenceClassification") {
        return Ok(tokens);
    }
    let listed = given(keys, "id2label").and_then(Value::as_object).map(|labels| labels.len());
    let labels = match listed {
        Some(labels) => labels,
        None => size_or_none(keys, "num_labels")?.unwrap_or(2),
    };
    if of_tokens {
        return Ok(Head::TokenClasses { labels });
    }
    // Another head may replace this one, so a problem that is not built is no error here.
    let problem = problem_type(keys, labels).unwrap_or(ProblemType::of_labels(labels));
    Ok(Head::Classes { labels, problem })
}

/// The `problem_type` of a head of sequences with this number of labels.
///
/// # Errors
/// It is not known, or not built for this number of labels.
pub(crate) fn problem_type(keys: &Keys, labels: usize) -> Result<ProblemType, String> {
    let usual = ProblemType::of_labels(labels);
    let Some(kind) = given(keys, "problem_type") else { return Ok(usual) };
    match kind.as_str().and_then(ProblemType::named) {
        Some(problem) if problem.fits(labels) => Ok(problem),
        _ => Err(format!(
            "problem_type is {kind} of {labels} labels: built are {} and {}",
            usual.name(),
            ProblemType::MultiLabelClassification.name()
        )),
    }
}

/// The name that transformers has for a family's model with this head.
pub(super) fn architecture(shape: &Shape, family: &str) -> String {
    match shape.head {
        Head::Tokens => format!("{family}ForCausalLM"),
        Head::Masked => format!("{family}ForMaskedLM"),
        Head::Classes { .. } => format!("{family}ForSequenceClassification"),
        Head::TokenClasses { .. } => format!("{family}ForTokenClassification"),
        Head::Embedding { .. } => format!("{family}Model"),
    }
}

/// Writes the keys of a shape that all families have: the architecture, the sizes under the names
/// with which [`sizes`] reads them, and the labels. `own` has the others.
pub(super) fn write_keys(
    shape: &Shape,
    architecture: String,
    names: [&str; 6],
    own: Value,
) -> Value {
    let &Shape { layers, hidden, heads, intermediate, vocabulary, positions, .. } = shape;
    let sizes = [layers, hidden, heads, intermediate, vocabulary, positions];
    let mut config =
        Keys::from_iter(names.into_iter().map(String::from).zip(sizes.map(Value::from)));
    config.insert("architectures".into(), Value::from(vec![architecture]));
    config.insert("tie_word_embeddings".into(), shape.tied.into());
    config.extend(own.as_object().cloned().unwrap_or_default());
    let mut config = Value::Object(config);
    write_labels(shape, &mut config);
    config
}

/// Writes the keys of a classifier, with transformers' generic names of the classes.
fn write_labels(shape: &Shape, config: &mut Value) {
    let (labels, kind) = match shape.head {
        Head::Classes { labels, problem } => (labels, Some(problem.name())),
        Head::TokenClasses { labels } => {
            if shape.names.token_classifier_dropout {
                config["classifier_dropout"] = shape.dropout.classifier.into();
            }
            (labels, None)
        }
        Head::Tokens | Head::Masked | Head::Embedding { .. } => return,
    };
    let name = |label: usize| format!("LABEL_{label}");
    let by_id = (0..labels).map(|label| (label.to_string(), Value::from(name(label))));
    let by_name = (0..labels).map(|label| (name(label), Value::from(label)));
    config["id2label"] = Value::Object(by_id.collect());
    config["label2id"] = Value::Object(by_name.collect());
    config["problem_type"] = kind.into();
}
