//! [`Tokenizer`] and [`Template`] in a library without the feature `tokenizers`: types of which
//! there are no values, so that callers need no `cfg`.

use std::convert::Infallible;
use std::path::Path;

use serde_json::Value;

use super::text::{Encoded, Message, RenderedChat};
use crate::error::Error;

/// A tokenizer. There is none without the feature `tokenizers`.
#[derive(Clone)]
pub struct Tokenizer(Infallible);

/// A chat template. There is none without the feature `tokenizers`.
#[derive(Clone)]
pub struct Template(Infallible);

#[allow(missing_docs, clippy::missing_errors_doc, reason = "it has no values")]
impl Tokenizer {
    /// `None`, when the directory has no `tokenizer.json`.
    ///
    /// # Errors
    /// The directory has one, which this library cannot read.
    pub fn open(directory: &Path) -> Result<Option<Tokenizer>, Error> {
        let path = directory.join("tokenizer.json");
        if !path.is_file() {
            return Ok(None);
        }
        let what = "this program was built without tokenizers: build it with feature `tokenizers`";
        Err(Error::bad_model(path.display(), what))
    }

    pub fn encode(&self, _: &str, _: Option<&str>, _: bool) -> Result<Encoded, String> {
        match self.0 {}
    }

    pub fn encode_words(&self, _: &[String]) -> Result<(Encoded, Vec<Option<usize>>), String> {
        match self.0 {}
    }

    pub fn encode_cut(&self, _: &str, _: Option<&str>, _: usize) -> Result<Encoded, String> {
        match self.0 {}
    }

    pub fn decode(&self, _: &[u32], _: bool) -> String {
        match self.0 {}
    }

    pub fn vocabulary(&self) -> usize {
        match self.0 {}
    }

    pub fn is_special(&self, _: u32) -> bool {
        match self.0 {}
    }

    pub fn end(&self) -> Option<u32> {
        match self.0 {}
    }

    pub fn mask(&self) -> Option<u32> {
        match self.0 {}
    }

    pub fn digest(&self) -> &str {
        match self.0 {}
    }

    pub fn template(&self) -> Result<Option<&Template>, String> {
        match self.0 {}
    }

    pub fn token(&self, _: &str) -> Option<u32> {
        match self.0 {}
    }
}

#[allow(missing_docs, clippy::missing_errors_doc, reason = "it has no values")]
impl Template {
    pub fn ask(&self, _: &[Message], _: &Value) -> Result<String, String> {
        match self.0 {}
    }

    pub fn render_chat(&self, _: &[Message], _: &Value) -> Result<RenderedChat, String> {
        match self.0 {}
    }
}
