//! The tokenizer of a directory: `tokenizer.json`, the special tokens, and the chat template.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use tokenizers::processors::PostProcessorWrapper;
use tokenizers::processors::sequence::Sequence;
use tokenizers::{Encoding, PostProcessor, TruncationParams, truncate_encodings};

use super::caught::caught;
use super::chat::Template;
use super::sealed::hex;
use super::text::Encoded;
use super::{tokenizer_json, tokenizer_settings};
use crate::error::Error;
use crate::lfs;

/// Turns text into tokens and back, by the files of a directory.
#[derive(Clone)]
pub struct Tokenizer {
    inner: Library,
    /// The ids of all special tokens.
    specials: BTreeSet<u32>,
    /// The `eos_token`.
    end: Option<u32>,
    /// The `mask_token`.
    mask: Option<u32>,
    /// The largest token id.
    largest: Option<u32>,
    template: Result<Option<Template>, String>,
    digest: String,
}

impl Tokenizer {
    /// Opens the tokenizer of a directory. `None` if the directory has no `tokenizer.json`.
    ///
    /// # Errors
    /// A file of the tokenizer cannot be read.
    pub fn open(directory: &Path) -> Result<Option<Tokenizer>, Error> {
        let path = directory.join("tokenizer.json");
        if !path.is_file() {
            return Ok(None);
        }
        let refuse = |what: &dyn std::fmt::Display| Error::bad_model(path.display(), what);
        let text = fs::read_to_string(&path).map_err(|error| refuse(&error))?;
        if lfs::is_pointer(text.as_bytes()) {
            return Err(refuse(&lfs::INSTEAD));
        }
        tokenizer_json::check(&text).map_err(|error| refuse(&error))?;
        let read = caught(|| text.parse::<tokenizers::Tokenizer>()).map_err(|error| {
            refuse(&format_args!("the tokenizers library cannot read it: {error}"))
        })?;
        let mut inner = read.map_err(|error| refuse(&error))?;
        drop(text);
        // The config limits the length of a sequence, and batches have no padding.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|error| refuse(&error))?;
        caught(|| tokenizer_settings::apply(directory, &mut inner)).map_err(|error| {
            refuse(&format_args!("the tokenizers library fails with its settings: {error}"))
        })??;
        let post_processor = inner.get_post_processor().cloned().map(untrimmed);
        inner.with_post_processor(post_processor);
        let inner = Library(inner);
        let named = special_tokens(directory)?;
        let id = |token: &str| inner.ask(|inner| inner.token_to_id(token)).ok().flatten();
        let role = |role: &str| named.get(role).and_then(Value::as_str).and_then(id);
        let added = inner.ask(|inner| inner.get_added_tokens_decoder());
        let added = added.map_err(|error| refuse(&error))?;
        let added = added.iter().filter(|(_, token)| token.special);
        inner.try_out(added.clone().map(|(_, token)| token.content.as_str())).map_err(|error| {
            refuse(&format_args!("the tokenizers library fails with it: {error}"))
        })?;
        let mut specials: BTreeSet<u32> = added.map(|(&id, _)| id).collect();
        specials.extend(named.values().filter_map(Value::as_str).filter_map(id));
        let end = role("eos_token");
        let mask = role("mask_token");
        let largest = inner.ask(|inner| inner.get_vocab(true).into_values().max());
        let largest = largest.map_err(|error| refuse(&error))?;
        // Only chats need the template, so an error in it is reported when a chat is read.
        let template = Template::open(directory, &named).map_err(|error| error.to_string());
        let mut hasher = Sha256::new();
        for file in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"] {
            hasher.update(fs::read(directory.join(file)).unwrap_or_default());
        }
        if let Ok(Some(template)) = &template {
            template.texts_of_more_files().for_each(|text| hasher.update(text));
        }
        let digest = hex(&hasher.finalize()[..8]);
        Ok(Some(Tokenizer { specials, end, mask, largest, template, digest, inner }))
    }

    /// Encodes a text or a pair of texts, with special tokens if `specials`.
    ///
    /// # Errors
    /// The tokenizer fails.
    pub fn encode(
        &self,
        text: &str,
        pair: Option<&str>,
        specials: bool,
    ) -> Result<Encoded, String> {
        let encoded = self.inner.run(|inner| match pair {
            Some(pair) => inner.encode((text, pair), specials),
            None => inner.encode(text, specials),
        });
        Ok(as_encoded(&encoded?))
    }

    /// Encodes the words of a text with special tokens. Also returns for each token the index of
    /// the word that begins with it, if any.
    ///
    /// # Errors
    /// The tokenizer fails.
    pub fn encode_words(&self, words: &[String]) -> Result<(Encoded, Vec<Option<usize>>), String> {
        let encoded = self.inner.run(|inner| inner.encode(words, true))?;
        let mut last = None;
        let begins = encoded.get_word_ids().iter().map(|&word| {
            let begins = word.filter(|_| word != last);
            last = word.or(last);
            begins.map(|word| word as usize)
        });
        Ok((as_encoded(&encoded), begins.collect()))
    }

    /// Encodes a text or a pair of texts with special tokens, cut to at most `most` tokens. The
    /// longer text of a pair is cut first.
    ///
    /// # Errors
    /// The tokenizer fails; or `most` leaves no room for text beside the special tokens.
    pub fn encode_cut(
        &self,
        text: &str,
        pair: Option<&str>,
        most: usize,
    ) -> Result<Encoded, String> {
        // The library's own truncation cuts each text before it knows which one is longer.
        let plain = |text| self.inner.run(|inner| inner.encode(text, false));
        let text = plain(text)?;
        let pair = pair.map(plain).transpose()?;
        let added = |inner: &tokenizers::Tokenizer| {
            inner.get_post_processor().map_or(0, |added| added.added_tokens(pair.is_some()))
        };
        let added = self.inner.ask(added)?;
        let max_length = most.checked_sub(added).filter(|&room| room > 0);
        let max_length = max_length.ok_or_else(|| format!("{most} positions hold no text"))?;
        let truncation = TruncationParams { max_length, ..TruncationParams::default() };
        let whole = self.inner.run(|inner| {
            let (text, pair) = truncate_encodings(text, pair, &truncation)?;
            inner.post_process(text, pair, true)
        });
        Ok(as_encoded(&whole?))
    }

    /// Decodes tokens, with special tokens if `with_specials`.
    pub fn decode(&self, tokens: &[u32], with_specials: bool) -> String {
        self.inner.run(|inner| inner.decode(tokens, !with_specials)).unwrap_or_default()
    }

    /// The number of tokens, with added tokens.
    pub fn vocabulary(&self) -> usize {
        self.inner.ask(|inner| inner.get_vocab_size(true)).unwrap_or(0)
    }

    /// The largest token id.
    pub fn largest(&self) -> Option<u32> {
        self.largest
    }

    /// Whether a token is special: it is not text.
    pub fn is_special(&self, token: u32) -> bool {
        self.specials.contains(&token)
    }

    /// The token that ends a text (`eos_token`).
    pub fn end(&self) -> Option<u32> {
        self.end
    }

    /// The token that replaces a masked token (`mask_token`).
    pub fn mask(&self) -> Option<u32> {
        self.mask
    }

    /// The chat template, if the directory has one.
    ///
    /// # Errors
    /// The template cannot be parsed.
    pub fn template(&self) -> Result<Option<&Template>, String> {
        self.template.as_ref().map(Option::as_ref).map_err(Clone::clone)
    }

    /// Sets the date that a chat template writes, in the form `2026-01-31`. Without, it is the day
    /// on which the tokenizer was opened.
    ///
    /// # Errors
    /// There is no such day.
    pub fn set_date(&self, day: &str) -> Result<(), String> {
        match &self.template {
            Ok(Some(template)) => template.clock().set(day),
            _ => Ok(()),
        }
    }

    /// The date, if the chat template has written it.
    pub fn date(&self) -> Option<String> {
        self.template.as_ref().ok()?.as_ref()?.clock().read()
    }

    /// The first 8 bytes of a SHA-256 of the tokenizer's files.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// The id of a token by its name.
    pub fn token(&self, name: &str) -> Option<u32> {
        self.inner.ask(|inner| inner.token_to_id(name)).ok().flatten()
    }
}

/// The library's tokenizer. All calls go through this type, which catches panics: the library reads
/// some files that make it panic later.
#[derive(Clone)]
struct Library(tokenizers::Tokenizer);

impl Library {
    fn ask<T>(&self, call: impl FnOnce(&tokenizers::Tokenizer) -> T) -> Result<T, String> {
        caught(|| call(&self.0)).map_err(|panic| format!("the tokenizers library failed: {panic}"))
    }

    fn run<T>(
        &self,
        call: impl FnOnce(&tokenizers::Tokenizer) -> tokenizers::Result<T>,
    ) -> Result<T, String> {
        self.ask(call)?.map_err(|error| error.to_string())
    }

    /// Encodes and decodes a short text, a pair, words and all special tokens. So a file that makes
    /// the library panic is found before a run starts. Errors do not count: the library may refuse
    /// a text.
    fn try_out<'a>(&self, specials: impl Iterator<Item = &'a str>) -> Result<(), String> {
        let specials: Vec<&str> = specials.collect();
        let text = format!("Hello, {}\u{e9}\u{2581}1 \u{1f600}", specials.concat());
        self.ask(|inner| {
            let single = inner.encode(text.as_str(), true);
            let tokens = single.map(|one| one.get_ids().to_vec()).unwrap_or_default();
            let _ = inner.encode((text.as_str(), "a b"), true);
            let _ = inner.encode("", true);
            let _ = inner.encode(&["a", " b"][..], true);
            let _ = inner.decode(&tokens, false);
            let _ = inner.decode(&tokens, true);
        })
    }
}

/// Tokens, types and spans of the library's encoding. Special tokens cover no text.
fn as_encoded(encoded: &Encoding) -> Encoded {
    let added = encoded.get_special_tokens_mask().iter();
    let spans = encoded.get_offsets().iter().zip(added);
    Encoded {
        tokens: encoded.get_ids().to_vec(),
        kinds: encoded.get_type_ids().iter().map(|&kind| kind as u8).collect(),
        spans: spans.map(|(&span, &is_added)| if is_added == 1 { (0, 0) } else { span }).collect(),
    }
}

/// The step with `trim_offsets` off. It leaves spaces out of the spans of tokens, so that a token
/// of nothing but spaces, such as indentation, would seem to cover nothing of an answer.
fn untrimmed(step: PostProcessorWrapper) -> PostProcessorWrapper {
    match step {
        PostProcessorWrapper::ByteLevel(step) => step.trim_offsets(false).into(),
        PostProcessorWrapper::Roberta(step) => step.trim_offsets(false).into(),
        PostProcessorWrapper::Sequence(steps) => {
            Sequence::new(steps.into_iter().map(untrimmed).collect()).into()
        }
        step => step,
    }
}

/// The special tokens by role (`eos_token`, `mask_token`), from the files in which transformers
/// keeps them. The later file wins.
fn special_tokens(directory: &Path) -> Result<Map<String, Value>, Error> {
    let mut named = Map::new();
    for file in ["special_tokens_map.json", "tokenizer_config.json"] {
        let path = directory.join(file);
        let Ok(text) = fs::read_to_string(&path) else { continue };
        let all: Value =
            serde_json::from_str(&text).map_err(|error| Error::bad_model(path.display(), error))?;
        for (role, token) in all.as_object().into_iter().flatten() {
            let content = token.get("content").unwrap_or(token);
            if role.ends_with("_token") && content.is_string() {
                named.insert(role.clone(), content.clone());
            }
        }
    }
    Ok(named)
}
