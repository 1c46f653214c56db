//! Refuses a `tokenizer.json` that makes the library `tokenizers` panic, or texts grow without
//! bound, before the library reads it.

use std::borrow::Cow;
use std::collections::HashMap;

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;

/// The largest factor by which a normalizer, a pre-tokenizer or a decoder may lengthen a text, or a
/// post-processor a list of tokens. Published tokenizers have up to 16 (Llama), and T5's has 100.
const MOST_GROWTH: f64 = 10_000.0;

/// The steps of a tokenizer.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Steps {
    normalizer: Value,
    pre_tokenizer: Value,
    post_processor: Value,
    decoder: Value,
}

#[derive(Deserialize)]
struct WithMerges<'a> {
    #[serde(borrow)]
    model: Merges<'a>,
}

#[derive(Deserialize)]
struct Merges<'a> {
    #[serde(default)]
    continuing_subword_prefix: Option<String>,
    #[serde(borrow)]
    vocab: HashMap<Cow<'a, str>, IgnoredAny>,
    #[serde(borrow)]
    merges: Vec<Merge<'a>>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Merge<'a> {
    Pair(#[serde(borrow)] Cow<'a, str>, #[serde(borrow)] Cow<'a, str>),
    Line(#[serde(borrow)] Cow<'a, str>),
}

/// Refuses a `tokenizer.json` with which the library would panic or grow.
pub(super) fn check(text: &str) -> Result<(), String> {
    // The library refuses any other file.
    let Ok(steps) = serde_json::from_str::<Steps>(text) else { return Ok(()) };
    for (name, step) in [
        ("normalizer", &steps.normalizer),
        ("pre_tokenizer", &steps.pre_tokenizer),
        ("post_processor", &steps.post_processor),
        ("decoder", &steps.decoder),
    ] {
        let growth = growth(step);
        if growth > MOST_GROWTH {
            return Err(format!(
                "the steps of {name} may make a text {growth:.0} times longer, and {MOST_GROWTH} \
                 is the most"
            ));
        }
    }
    check_templates(&steps.post_processor)?;
    match serde_json::from_str::<WithMerges<'_>>(text) {
        Ok(WithMerges { model }) => check_merges(&model),
        Err(_) => Ok(()),
    }
}

/// The factor by which a step may lengthen a text or a list of tokens. A step that is a list of
/// steps has the product of their factors.
fn growth(step: &Value) -> f64 {
    let all = ["normalizers", "pretokenizers", "processors", "decoders"];
    let inner = all.iter().filter_map(|key| step[key].as_array()).flatten();
    let inner: f64 = inner.map(growth).product();
    let length = |key: &str| step[key].as_str().map_or(0, str::len) as f64;
    inner
        * match step["type"].as_str().unwrap_or_default() {
            // The content may replace each byte, and may come between bytes.
            "Replace" => 1.0 + length("content"),
            "Prepend" => 1.0 + length("prepend"),
            // A space becomes a character, a byte becomes one of two bytes.
            "Metaspace" => 4.0,
            "ByteLevel" => 2.0,
            // A compatibility character of 3 bytes becomes up to 18 characters.
            "NFKC" | "NFKD" | "Precompiled" => 6.0,
            "TemplateProcessing" => {
                let uses = |key: &str| {
                    let pieces = step[key].as_array().into_iter().flatten();
                    pieces.filter(|piece| !piece["Sequence"].is_null()).count()
                };
                uses("single").max(uses("pair").div_ceil(2)).max(1) as f64
            }
            _ => 1.0,
        }
}

/// Refuses a template with unknown special tokens, or with a second text where there is only one.
fn check_templates(step: &Value) -> Result<(), String> {
    for inner in step["processors"].as_array().into_iter().flatten() {
        check_templates(inner)?;
    }
    for key in ["single", "pair"] {
        for piece in step[key].as_array().into_iter().flatten() {
            if let Some(token) = piece["SpecialToken"]["id"].as_str() {
                let known = &step["special_tokens"][token];
                let count = |key: &str| known[key].as_array().map(Vec::len);
                if known.is_null() {
                    return Err(format!(
                        "post_processor: {key:?} has the special token {token:?}, which is not in \
                         special_tokens"
                    ));
                }
                if count("ids") != count("tokens") {
                    return Err(format!(
                        "post_processor: the special token {token:?} has another number of ids \
                         than of tokens"
                    ));
                }
            }
            if key == "single" && piece["Sequence"]["id"] == "B" {
                return Err("post_processor: \"single\" names B, and has one text, A".into());
            }
        }
    }
    Ok(())
}

/// Refuses merges of two tokens to a token that is not in the vocabulary.
fn check_merges(model: &Merges<'_>) -> Result<(), String> {
    let prefix = model.continuing_subword_prefix.as_deref().unwrap_or_default();
    let longest = model.vocab.keys().map(|token| token.len()).max().unwrap_or(0);
    for merge in &model.merges {
        let (first, second) = match merge {
            Merge::Pair(first, second) => (first.as_ref(), second.as_ref()),
            Merge::Line(line) => line.split_once(' ').unwrap_or((line, "")),
        };
        // The library reports unknown tokens.
        if !model.vocab.contains_key(first) || !model.vocab.contains_key(second) {
            continue;
        }
        if !second.is_char_boundary(prefix.len()) {
            return Err(format!(
                "model: continuing_subword_prefix {prefix:?} is longer than the token {second:?} \
                 that is merged with {first:?}"
            ));
        }
        if first.len() + second.len() - prefix.len() > longest {
            return Err(format!(
                "model: {first:?} and {second:?} are merged to a token that vocab has not"
            ));
        }
    }
    Ok(())
}
