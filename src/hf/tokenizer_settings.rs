//! Settings of `tokenizer_config.json` that transformers applies over `tokenizer.json`: how a text
//! is normalized and split, which depends on the tokenizer's class, and further tokens.
//!
//! They agree in most directories. They differ where a person edited one file, or added tokens
//! with an older version.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokenizers::decoders::DecoderWrapper;
use tokenizers::normalizers::NormalizerWrapper;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::processors::PostProcessorWrapper;
use tokenizers::{AddedToken, Tokenizer};

use super::json;
use crate::error::Error;

/// The special tokens with a role, in the order in which transformers adds them.
const ROLES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Applies the settings of a directory to its tokenizer.
pub(super) fn apply(directory: &Path, tokenizer: &mut Tokenizer) -> Result<(), Error> {
    let path = directory.join("tokenizer_config.json");
    let refuse = |what| Error::bad_model(path.display(), what);
    let config: Value = if path.is_file() { json::read(&path)? } else { Value::Null };
    let class = config["tokenizer_class"].as_str().unwrap_or_default();
    match class.trim_end_matches("Fast") {
        "BertTokenizer" | "DistilBertTokenizer" => set_normalizer(&config, tokenizer),
        "GPT2Tokenizer" | "RobertaTokenizer" | "Qwen2Tokenizer" => {
            let adds_space = config["add_prefix_space"].as_bool().unwrap_or(false);
            set_prefix(adds_space, tokenizer)
        }
        "LlamaTokenizer" => match config["add_prefix_space"].as_bool() {
            Some(adds_space) => set_metaspace(adds_space, tokenizer),
            None => Ok(()),
        },
        _ => Ok(()),
    }
    .map_err(refuse)?;
    add_tokens(directory, &config, tokenizer).map_err(refuse)?;
    if config["split_special_tokens"] == true {
        tokenizer.set_encode_special_tokens(true);
    }
    Ok(())
}

/// A step of a tokenizer as JSON.
fn as_json(step: Option<&impl Serialize>) -> Result<Value, String> {
    serde_json::to_value(step).map_err(|error| error.to_string())
}

/// A step of a tokenizer from JSON.
fn of_json<T: DeserializeOwned>(step: Value) -> Result<Option<T>, String> {
    serde_json::from_value(step).map_err(|error| error.to_string())
}

/// Calls a function with a step and with all steps inside it.
fn each_step(step: &mut Value, call: &mut dyn FnMut(&mut Value)) {
    call(step);
    for key in ["normalizers", "pretokenizers", "processors"] {
        let inner = step.get_mut(key).and_then(Value::as_array_mut);
        inner.into_iter().flatten().for_each(|step| each_step(step, call));
    }
}

/// Sets the normalizer of BERT's classes. Keys that the config does not have are as in the class.
fn set_normalizer(config: &Value, tokenizer: &mut Tokenizer) -> Result<(), String> {
    let lowers = config["do_lower_case"].as_bool();
    let strips = config["strip_accents"].as_bool();
    let mut step = as_json(tokenizer.get_normalizer())?;
    let before = step.clone();
    let mut kinds = Vec::new();
    each_step(&mut step, &mut |step| {
        let kind = step["type"].as_str().unwrap_or_default().to_string();
        if kind == "BertNormalizer" {
            step["lowercase"] = lowers.unwrap_or(true).into();
            step["strip_accents"] = strips.into();
            let splits = config["tokenize_chinese_chars"].as_bool().unwrap_or(true);
            step["handle_chinese_chars"] = splits.into();
        }
        kinds.push(kind);
    });
    let has = |kind: &str| kinds.iter().any(|one| one == kind);
    if !has("BertNormalizer") {
        let keys =
            [("do_lower_case", lowers, "Lowercase"), ("strip_accents", strips, "StripAccents")];
        for (key, wanted, kind) in keys {
            if let Some(wanted) = wanted.filter(|&wanted| wanted != has(kind)) {
                return Err(format!(
                    "{key} is {wanted}, and the normalizer of tokenizer.json does otherwise: make \
                     them agree, or leave {key} out"
                ));
            }
        }
    }
    if step != before {
        let normalizer: Option<NormalizerWrapper> = of_json(step)?;
        tokenizer.with_normalizer(normalizer).map_err(|error| error.to_string())?;
    }
    Ok(())
}

/// Sets whether tokenizers of bytes put a space before a text.
fn set_prefix(adds_space: bool, tokenizer: &mut Tokenizer) -> Result<(), String> {
    let change = &mut |step: &mut Value| {
        if let Some(key) = step.get_mut("add_prefix_space") {
            *key = adds_space.into();
        }
    };
    let mut step = as_json(tokenizer.get_pre_tokenizer())?;
    let before = step.clone();
    each_step(&mut step, change);
    if step != before {
        tokenizer.with_pre_tokenizer(of_json::<PreTokenizerWrapper>(step)?);
        // It trims the spans of tokens.
        let mut step = as_json(tokenizer.get_post_processor())?;
        each_step(&mut step, change);
        tokenizer.with_post_processor(of_json::<PostProcessorWrapper>(step)?);
    }
    Ok(())
}

/// Sets whether a tokenizer of Llama's kind puts a space before a text, or refuses what cannot be
/// set: what stands in a normalizer also changes texts behind special tokens.
fn set_metaspace(adds_space: bool, tokenizer: &mut Tokenizer) -> Result<(), String> {
    let mut prepends = false;
    each_step(&mut as_json(tokenizer.get_normalizer())?, &mut |step| {
        prepends |= step["type"] == "Prepend";
    });
    let mut step = as_json(tokenizer.get_pre_tokenizer())?;
    let before = step.clone();
    let mut has_scheme = false;
    each_step(&mut step, &mut |step| {
        if let Some(scheme) = step.get_mut("prepend_scheme") {
            has_scheme = true;
            if !adds_space {
                *scheme = "never".into();
            } else if *scheme == "never" {
                *scheme = "first".into();
            }
        }
    });
    // Tokenizers of bytes, as Llama 3's, have no such space, and transformers does not add one.
    let mut is_of_bytes = false;
    each_step(&mut step, &mut |step| is_of_bytes |= step["type"] == "ByteLevel");
    if is_of_bytes {
        return Ok(());
    }
    if prepends != adds_space && !has_scheme || prepends && !adds_space {
        return Err(format!(
            "add_prefix_space is {adds_space}, and tokenizer.json does otherwise: save the \
             tokenizer anew with transformers, or leave add_prefix_space out"
        ));
    }
    if step != before {
        tokenizer.with_pre_tokenizer(of_json::<PreTokenizerWrapper>(step)?);
        let mut decoder = as_json(tokenizer.get_decoder())?;
        if let Some(all) = decoder.get_mut("decoders").and_then(Value::as_array_mut) {
            // A text without that space loses none when it is decoded.
            all.retain(|one| adds_space || one["type"] != "Strip");
        }
        tokenizer.with_decoder(of_json::<DecoderWrapper>(decoder)?);
    }
    Ok(())
}

/// A token of a config: a text, or an object with its properties.
fn token_of(value: &Value, is_special: bool) -> Option<AddedToken> {
    let content = value.as_str().or_else(|| value["content"].as_str())?.to_string();
    let flag = |key: &str, default| value[key].as_bool().unwrap_or(default);
    let special = is_special || flag("special", false);
    Some(AddedToken {
        content,
        single_word: flag("single_word", false),
        lstrip: flag("lstrip", false),
        rstrip: flag("rstrip", false),
        normalized: flag("normalized", !special),
        special,
    })
}

/// Adds the tokens that `tokenizer.json` does not have, or has with other properties.
fn add_tokens(directory: &Path, config: &Value, tokenizer: &mut Tokenizer) -> Result<(), String> {
    let known = tokenizer.get_added_tokens_decoder();
    let declared = declared_tokens(directory, config, tokenizer)?;
    let mut new: Vec<AddedToken> = Vec::new();
    for token in declared.values() {
        let id = tokenizer.token_to_id(&token.content);
        if id.and_then(|id| known.get(&id)) != Some(token) {
            new.push(token.clone());
        }
    }
    let legacy: Value = match config["added_tokens_decoder"].is_object() {
        true => Value::Null,
        false => {
            let text = fs::read_to_string(directory.join("special_tokens_map.json"));
            serde_json::from_str(&text.unwrap_or_default()).unwrap_or_default()
        }
    };
    let of_role =
        |role: &&str| [&config[*role], &legacy[*role]].into_iter().find(|one| !one.is_null());
    let extra = ["extra_special_tokens", "additional_special_tokens"];
    let extra = extra.map(|key| [&config[key], &legacy[key]]).into_iter().flatten();
    let in_list = |all: &'_ Value| all.as_array().cloned().unwrap_or_default();
    let in_map = |all: &'_ Value| {
        all.as_object().into_iter().flatten().map(|(_, token)| token.clone()).collect::<Vec<_>>()
    };
    let extra = extra.flat_map(|all| [in_list(all), in_map(all)].concat());
    for value in ROLES.iter().filter_map(of_role).cloned().chain(extra) {
        let Some(token) = token_of(&value, true) else { continue };
        let id = tokenizer.token_to_id(&token.content);
        let is_special = id.and_then(|id| known.get(&id)).is_some_and(|known| known.special);
        match new.iter_mut().find(|one| one.content == token.content) {
            Some(declared) => declared.special = true,
            None if !is_special => new.push(token),
            None => {}
        }
    }
    if new.is_empty() {
        return Ok(());
    }
    tokenizer.add_tokens(new).map_err(|error| error.to_string())?;
    for (&id, token) in &declared {
        let given = tokenizer.token_to_id(&token.content);
        let was_known = known.values().any(|known| known.content == token.content);
        if !was_known && given != Some(id) {
            return Err(format!(
                "added_tokens_decoder has the token {:?} with the id {id}, and tokenizer.json has \
                 no such token and would give it {}: they do not belong together",
                token.content,
                given.map_or("none".into(), |given| given.to_string())
            ));
        }
    }
    Ok(())
}

/// The added tokens that the directory's files name beside `tokenizer.json`, by id.
fn declared_tokens(
    directory: &Path,
    config: &Value,
    tokenizer: &Tokenizer,
) -> Result<BTreeMap<u32, AddedToken>, String> {
    let mut declared = BTreeMap::new();
    if let Some(all) = config["added_tokens_decoder"].as_object() {
        for (id, value) in all {
            let entry = id.parse().ok().zip(token_of(value, false));
            let (id, token) =
                entry.ok_or_else(|| format!("added_tokens_decoder.{id} is no token"))?;
            declared.insert(id, token);
        }
        return Ok(declared);
    }
    // Older versions kept the ids in a file of their own, without properties.
    let text = fs::read_to_string(directory.join("added_tokens.json")).unwrap_or_default();
    let all: Value = serde_json::from_str(&text).unwrap_or_default();
    let is_new = |(content, _): &(&String, &Value)| tokenizer.token_to_id(content).is_none();
    for (content, id) in all.as_object().into_iter().flatten().filter(is_new) {
        let token = token_of(&Value::from(&**content), false);
        let id = id.as_u64().and_then(|id| u32::try_from(id).ok());
        declared.extend(id.zip(token));
    }
    Ok(declared)
}
