//! Text as tokens: through the model's own tokenizer, or by bytes.

use crate::config::Config;
use crate::error::Error;
use crate::hf::{self, Encoded, Message, Template, Tokenizer};
use crate::models::Shape;

/// Tokens there are in text by bytes.
pub(super) const BYTES: usize = 256;

/// What a model's tokens are.
#[derive(Clone)]
pub enum Vocabulary {
    /// A byte is a token.
    Bytes,
    /// As its directory's tokenizer says.
    Words(Box<Tokenizer>),
    /// Nobody knows, and why.
    Unknown(String),
}

impl Vocabulary {
    /// Of the model that a config names.
    ///
    /// # Errors
    /// The config's model cannot be read.
    pub fn of(config: &Config, shape: &Shape) -> Result<Vocabulary, Error> {
        let known = shape.vocabulary;
        let Some(path) = &config.model.path else {
            return Ok(if known >= BYTES {
                Vocabulary::Bytes
            } else {
                Vocabulary::Unknown(format!(
                    "text is read as bytes, and the model knows {known} tokens: model.vocabulary \
                     must be at least {BYTES}"
                ))
            });
        };
        Ok(match Tokenizer::open(path) {
            Ok(Some(tokenizer)) => Vocabulary::Words(Box::new(tokenizer)),
            // Who trains on bare tokens may do without.
            Err(error) => Vocabulary::Unknown(error.to_string()),
            Ok(None) if known == BYTES || hf::reads_bytes(path) => Vocabulary::Bytes,
            Ok(None) => Vocabulary::Unknown(format!(
                "text needs a tokenizer, and there is no tokenizer.json in {}",
                path.display()
            )),
        })
    }

    /// Text as tokens.
    ///
    /// # Errors
    /// Nobody knows how; or bytes of a pair, for nothing would tell where one ends.
    pub fn encode(
        &self,
        text: &str,
        pair: Option<&str>,
        specials: bool,
    ) -> Result<Encoded, String> {
        match self {
            Vocabulary::Words(tokenizer) => tokenizer.encode(text, pair, specials),
            Vocabulary::Unknown(why) => Err(why.clone()),
            Vocabulary::Bytes if pair.is_some() => {
                Err("text_pair: two texts cannot be told apart when text is read as bytes".into())
            }
            Vocabulary::Bytes => Ok(Encoded {
                tokens: text.bytes().map(u32::from).collect(),
                kinds: Vec::new(),
                spans: (0..text.len()).map(|at| (at, at + 1)).collect(),
            }),
        }
    }

    /// Tokens as text; what is none is shown as U+FFFD.
    pub fn decode(&self, tokens: &[u32], with_specials: bool) -> String {
        match self {
            Vocabulary::Words(tokenizer) => tokenizer.decode(tokens, with_specials),
            Vocabulary::Bytes => {
                let bytes: Vec<u8> =
                    tokens.iter().map(|&token| u8::try_from(token).unwrap_or(0xff)).collect();
                String::from_utf8_lossy(&bytes).into_owned()
            }
            Vocabulary::Unknown(_) => {
                let ids: Vec<String> = tokens.iter().map(u32::to_string).collect();
                ids.join(" ")
            }
        }
    }

    /// The token that ends a text, if one does.
    pub fn end(&self) -> Option<u32> {
        self.tokenizer().and_then(Tokenizer::end)
    }

    /// The tokenizer, if there is one.
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        match self {
            Vocabulary::Words(tokenizer) => Some(tokenizer),
            Vocabulary::Bytes | Vocabulary::Unknown(_) => None,
        }
    }

    /// How chats are written.
    ///
    /// # Errors
    /// Nobody knows.
    pub fn template(&self) -> Result<&Template, String> {
        let template = self.tokenizer().map(Tokenizer::template).transpose()?.flatten();
        template.ok_or_else(|| {
            "messages: the model's directory has no chat template (chat_template.jinja, or \
             chat_template in tokenizer_config.json)"
                .into()
        })
    }

    /// A chat that the assistant is to go on with, as text.
    ///
    /// # Errors
    /// There is no template, or it fails.
    pub fn ask(&self, messages: &[Message]) -> Result<String, String> {
        self.template()?.ask(messages)
    }

    /// What the tokenizer puts in front of a text, and behind it.
    pub(super) fn wrap(&self) -> Result<(Vec<u32>, Vec<u32>), String> {
        let (plain, wrapped) = (self.encode("a", None, false)?, self.encode("a", None, true)?);
        let (plain, wrapped) = (plain.tokens, wrapped.tokens);
        let at = wrapped.windows(plain.len().max(1)).position(|window| window == plain);
        let at = at.unwrap_or(0);
        let behind = (at + plain.len()).min(wrapped.len());
        Ok((wrapped[..at].to_vec(), wrapped[behind..].to_vec()))
    }
}
