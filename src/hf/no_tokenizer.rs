//! [`Tokenizer`] and [`Template`] in a library without the feature `tokenizers`. These types have
//! no values, so that callers need no `cfg`.

use std::convert::Infallible;
use std::path::Path;

use super::record_value::RecordValue;
use super::text::{Encoded, Message, RenderedChat};
use crate::error::Error;

/// A tokenizer. There is none without the feature `tokenizers`.
#[derive(Clone)]
pub struct Tokenizer(Infallible);

/// A chat template. There is none without the feature `tokenizers`.
#[derive(Clone)]
pub struct Template(Infallible);

/// Methods that nobody can call, because the type has no values.
macro_rules! methods {
    ($($name:ident($($argument:ty),*) -> $result:ty;)*) => {$(
        #[allow(missing_docs, clippy::missing_errors_doc, reason = "it has no values")]
        pub fn $name(&self, $(_: $argument),*) -> $result {
            match self.0 {}
        }
    )*};
}

impl Tokenizer {
    /// `None` if the directory has no `tokenizer.json`.
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

    methods! {
        encode(&str, Option<&str>, bool) -> Result<Encoded, String>;
        encode_words(&[String]) -> Result<(Encoded, Vec<Option<usize>>), String>;
        encode_cut(&str, Option<&str>, usize) -> Result<Encoded, String>;
        decode(&[u32], bool) -> String;
        vocabulary() -> usize;
        largest() -> Option<u32>;
        is_special(u32) -> bool;
        end() -> Option<u32>;
        mask() -> Option<u32>;
        set_date(&str) -> Result<(), String>;
        date() -> Option<String>;
        digest() -> &str;
        template() -> Result<Option<&Template>, String>;
        token(&str) -> Option<u32>;
    }
}

impl Template {
    methods! {
        ask(&[Message], &RecordValue) -> Result<String, String>;
        render_chat(&[Message], &RecordValue) -> Result<RenderedChat, String>;
    }
}
